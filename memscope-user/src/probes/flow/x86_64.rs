//! x86-64 instructions in terms of [`Machine`].

use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind,
    Register,
};

use super::{Machine, Next, Target, Value};

const STACK_POINTER: usize = 4;
const FRAME_POINTER: usize = 5;

fn decode(at: u64, code: &[u8]) -> Option<Instruction> {
    let mut decoder = Decoder::with_ip(64, code, at, DecoderOptions::NONE);
    Some(decoder.decode()).filter(|i| !i.is_invalid())
}

/// Whether `code` is a sequence of whole instructions.
pub fn is_whole(code: &[u8]) -> bool {
    let mut decoder = Decoder::new(64, code, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        if instruction.is_invalid() {
            return false;
        }
    }
    true
}

/// Size of the instruction at `at`, and where it branches to directly. Bytes that are no instruction count as
/// one of size 1: no path leads there.
pub fn branch(at: u64, code: &[u8]) -> Option<(usize, Option<u64>)> {
    let Some(instruction) = decode(at, code) else { return Some((1, None)) };
    let target = match instruction.flow_control() {
        FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch => {
            Some(instruction.near_branch_target())
        }
        _ => None,
    };
    Some((instruction.len(), target))
}

pub(super) fn step(machine: &mut Machine<'_, '_>, at: u64, code: &[u8]) -> Option<(usize, Next)> {
    let Some(instruction) = decode(at, code) else { return Some((1, Next::Stop)) };
    let next = match instruction.flow_control() {
        FlowControl::Next => {
            execute(machine, &instruction);
            Next::Step
        }
        FlowControl::ConditionalBranch => Next::Branch(instruction.near_branch_target()),
        FlowControl::UnconditionalBranch => Next::JumpTo(Target::Code(instruction.near_branch_target())),
        FlowControl::IndirectBranch => Next::JumpTo(indirect(machine, &instruction)),
        FlowControl::Call if instruction.mnemonic() == Mnemonic::Call => {
            Next::Call(Target::Code(instruction.near_branch_target()))
        }
        FlowControl::IndirectCall => Next::Call(indirect(machine, &instruction)),
        _ => Next::Stop,
    };
    Some((instruction.len(), next))
}

/// Where an indirect jump or call leads.
fn indirect(machine: &mut Machine<'_, '_>, instruction: &Instruction) -> Target {
    read(machine, instruction, 0).into()
}

fn execute(machine: &mut Machine<'_, '_>, instruction: &Instruction) {
    let same_registers = instruction.op_count() >= 2
        && instruction.op_kind(0) == OpKind::Register
        && instruction.op_kind(1) == OpKind::Register
        && instruction.op_register(0) == instruction.op_register(1);
    match instruction.mnemonic() {
        Mnemonic::Mov => {
            let value = read(machine, instruction, 1);
            write(machine, instruction, value);
        }
        // An `int` that is used as a 64-bit index is still the same variable.
        Mnemonic::Movsxd => match read(machine, instruction, 1) {
            value @ Value::Slot(_) => write(machine, instruction, value),
            _ => write(machine, instruction, Value::Unknown),
        },
        Mnemonic::Lea => {
            let value = address(machine, instruction);
            write(machine, instruction, value);
        }
        Mnemonic::Xor | Mnemonic::Sub if same_registers => write(machine, instruction, Value::Const(0)),
        Mnemonic::Add | Mnemonic::Sub if is_register64(instruction, 0) && is_immediate(instruction, 1) => {
            let amount = instruction.immediate(1) as i64;
            let amount = if instruction.mnemonic() == Mnemonic::Add { amount } else { amount.wrapping_neg() };
            let value = read(machine, instruction, 0).plus(amount);
            write(machine, instruction, value);
        }
        Mnemonic::Push => {
            let value = read(machine, instruction, 0);
            let top = machine.get(STACK_POINTER).plus(-8);
            machine.set(STACK_POINTER, top);
            machine.store(top, 8, value);
        }
        Mnemonic::Pop => {
            let top = machine.get(STACK_POINTER);
            let value = machine.load(top, 8);
            machine.set(STACK_POINTER, top.plus(8));
            write(machine, instruction, value);
        }
        Mnemonic::Leave => {
            let top = machine.get(FRAME_POINTER);
            let value = machine.load(top, 8);
            machine.set(STACK_POINTER, top.plus(8));
            machine.set(FRAME_POINTER, value);
        }
        Mnemonic::Movq | Mnemonic::Vmovq => {
            let value = [read_vector(machine, instruction, 1)[0], Value::Const(0)];
            write_vector(machine, instruction, 8, value);
        }
        Mnemonic::Movaps
        | Mnemonic::Movups
        | Mnemonic::Movapd
        | Mnemonic::Movupd
        | Mnemonic::Movdqa
        | Mnemonic::Movdqu
        | Mnemonic::Vmovaps
        | Mnemonic::Vmovups
        | Mnemonic::Vmovdqa
        | Mnemonic::Vmovdqu => {
            let value = read_vector(machine, instruction, 1);
            write_vector(machine, instruction, vector_size(instruction), value);
        }
        Mnemonic::Punpcklqdq => {
            let (low, high) = (read_vector(machine, instruction, 0), read_vector(machine, instruction, 1));
            write_vector(machine, instruction, 16, [low[0], high[0]]);
        }
        Mnemonic::Vpunpcklqdq => {
            let (low, high) = (read_vector(machine, instruction, 1), read_vector(machine, instruction, 2));
            write_vector(machine, instruction, 16, [low[0], high[0]]);
        }
        Mnemonic::Pinsrq => {
            let (before, part) =
                (read_vector(machine, instruction, 0), read_vector(machine, instruction, 1)[0]);
            let value = if instruction.immediate(2) & 1 == 0 { [part, before[1]] } else { [before[0], part] };
            write_vector(machine, instruction, 16, value);
        }
        Mnemonic::Vpinsrq => {
            let (before, part) =
                (read_vector(machine, instruction, 1), read_vector(machine, instruction, 2)[0]);
            let value = if instruction.immediate(3) & 1 == 0 { [part, before[1]] } else { [before[0], part] };
            write_vector(machine, instruction, 16, value);
        }
        Mnemonic::Movhps | Mnemonic::Movhpd if instruction.op_kind(0) == OpKind::Register => {
            let (before, part) =
                (read_vector(machine, instruction, 0), read_vector(machine, instruction, 1)[0]);
            write_vector(machine, instruction, 16, [before[0], part]);
        }
        Mnemonic::Pxor | Mnemonic::Xorps | Mnemonic::Xorpd if same_registers => {
            write_vector(machine, instruction, 16, [Value::Const(0); 2]);
        }
        Mnemonic::Vpxor | Mnemonic::Vxorps | Mnemonic::Vxorpd
            if instruction.op2_kind() == OpKind::Register
                && instruction.op1_register() == instruction.op2_register() =>
        {
            write_vector(machine, instruction, 16, [Value::Const(0); 2]);
        }
        _ => forget(machine, instruction),
    }
}

/// An instruction of no interest: what it reads was read, and what it writes is unknown.
fn forget(machine: &mut Machine<'_, '_>, instruction: &Instruction) {
    let mut factory = InstructionInfoFactory::new();
    let info = factory.info(instruction);
    for memory in info.used_memory() {
        let place = match memory.index() {
            Register::None => based(machine, memory.base(), memory.displacement()),
            _ => Value::Unknown,
        };
        let width = memory.memory_size().size().min(64) as u8;
        match memory.access() {
            OpAccess::Read | OpAccess::CondRead => machine.note_load(place, width),
            OpAccess::ReadWrite | OpAccess::ReadCondWrite => {
                machine.note_load(place, width);
                machine.store(place, width, Value::Unknown);
            }
            OpAccess::Write | OpAccess::CondWrite => machine.store(place, width, Value::Unknown),
            _ => {}
        }
    }
    for register in info.used_registers() {
        if matches!(
            register.access(),
            OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite
        ) {
            set_register(machine, register.register(), Value::Unknown);
        }
    }
}

fn is_register64(instruction: &Instruction, operand: u32) -> bool {
    instruction.op_kind(operand) == OpKind::Register && instruction.op_register(operand).is_gpr64()
}

fn is_immediate(instruction: &Instruction, operand: u32) -> bool {
    instruction.try_immediate(operand).is_ok()
}

/// `base + displacement`; the displacement is the address itself when there is no base or it is `rip`.
fn based(machine: &Machine<'_, '_>, base: Register, displacement: u64) -> Value {
    match base {
        Register::None | Register::RIP => Value::Const(displacement),
        base if base.is_gpr64() => machine.get(base.number()).plus(displacement as i64),
        _ => Value::Unknown,
    }
}

/// The address of the memory operand.
fn address(machine: &Machine<'_, '_>, instruction: &Instruction) -> Value {
    if instruction.memory_index() != Register::None || !matches!(instruction.segment_prefix(), Register::None)
    {
        return Value::Unknown;
    }
    based(machine, instruction.memory_base(), instruction.memory_displacement64())
}

fn memory_width(instruction: &Instruction) -> u8 {
    instruction.memory_size().size().min(64) as u8
}

fn vector_size(instruction: &Instruction) -> u8 {
    match instruction.op0_kind() {
        OpKind::Register => instruction.op0_register().size().min(64) as u8,
        _ => memory_width(instruction),
    }
}

fn read(machine: &mut Machine<'_, '_>, instruction: &Instruction, operand: u32) -> Value {
    match instruction.op_kind(operand) {
        OpKind::Register => {
            let register = instruction.op_register(operand);
            match register.is_gpr() {
                true if register.is_gpr64() => machine.get(register.number()),
                true if register.is_gpr32() => machine.get(register.number()).low_half(),
                _ => Value::Unknown,
            }
        }
        OpKind::Memory => {
            let from = address(machine, instruction);
            machine.load(from, memory_width(instruction))
        }
        _ => instruction.try_immediate(operand).map_or(Value::Unknown, Value::Const),
    }
}

/// Writes the first operand.
fn write(machine: &mut Machine<'_, '_>, instruction: &Instruction, value: Value) {
    match instruction.op0_kind() {
        OpKind::Register => {
            let register = instruction.op0_register();
            let value = match register.size() {
                8 => value,
                4 => value.low_half(),
                _ => Value::Unknown,
            };
            set_register(machine, register, value);
        }
        OpKind::Memory => {
            let to = address(machine, instruction);
            machine.store(to, memory_width(instruction), value);
        }
        _ => {}
    }
}

fn set_register(machine: &mut Machine<'_, '_>, register: Register, value: Value) {
    if register.is_gpr() {
        machine.set(register.full_register().number(), value);
    } else if register.is_vector_register() {
        machine.set_vector(register.number(), [Value::Unknown; 2]);
    }
}

fn read_vector(machine: &mut Machine<'_, '_>, instruction: &Instruction, operand: u32) -> [Value; 2] {
    match instruction.op_kind(operand) {
        OpKind::Register if instruction.op_register(operand).is_vector_register() => {
            machine.vector(instruction.op_register(operand).number())
        }
        OpKind::Memory => {
            let from = address(machine, instruction);
            machine.load_vector(from, memory_width(instruction))
        }
        _ => [read(machine, instruction, operand), Value::Unknown],
    }
}

/// Writes the first operand, `width` bytes if it is memory.
fn write_vector(machine: &mut Machine<'_, '_>, instruction: &Instruction, width: u8, value: [Value; 2]) {
    match instruction.op0_kind() {
        OpKind::Register if instruction.op0_register().is_vector_register() => {
            machine.set_vector(instruction.op0_register().number(), value);
        }
        OpKind::Register => set_register(machine, instruction.op0_register(), value[0]),
        _ => {
            let to = address(machine, instruction);
            machine.store_vector(to, width, value);
        }
    }
}
