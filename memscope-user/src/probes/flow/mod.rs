//! What a function does with its arguments, the addresses it knows, and what it gets from its callees: an
//! abstract interpretation of machine code over a tiny domain.
//!
//! This is how sites are found in stripped binaries: not by what code looks like, but by what provably flows
//! where. Registers and 8-byte stack slots hold a [`Value`]; where paths with different values meet, it becomes
//! [`Value::Unknown`]. Two assumptions, true of compiled code: callees keep to the calling convention and write
//! only those slots of the caller's frame whose address they were just given; stores through pointers of
//! unknown origin do not hit the frame.

pub mod aarch64;
pub mod x86_64;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::elf::Arch;
use super::image::{Function, Image};

/// Bytes of code, branch targets and written stack slots of a function that is worth analysing.
const MAX_FUNCTION: u64 = 512 << 10;
const MAX_LEADERS: usize = 1024;
const MAX_SLOTS: usize = 1024;

/// What is known of a register or of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Value {
    #[default]
    Unknown,
    /// A number, or an address of the library as linked.
    Const(u64),
    /// The stack pointer at entry, plus this.
    Stack(i64),
    /// The n-th argument, plus this.
    Arg(u8, i64),
    /// What the memory at `Stack(n)` holds that this function did not write.
    Slot(i64),
    /// What the call at this address returned, plus this.
    Returned(u64, i64),
    /// The address of another library's symbol: what the dynamic linker puts at this address.
    Import(u64),
}

impl Value {
    pub fn plus(self, n: i64) -> Value {
        match self {
            Value::Const(c) => Value::Const(c.wrapping_add_signed(n)),
            Value::Stack(o) => Value::Stack(o.wrapping_add(n)),
            Value::Arg(i, o) => Value::Arg(i, o.wrapping_add(n)),
            Value::Returned(call, o) => Value::Returned(call, o.wrapping_add(n)),
            Value::Slot(_) | Value::Import(_) if n == 0 => self,
            Value::Slot(_) | Value::Import(_) | Value::Unknown => Value::Unknown,
        }
    }

    /// The value after a copy of its low 32 bits. A `Slot` stays one: it names a variable, of any width.
    fn low_half(self) -> Value {
        match self {
            Value::Const(c) => Value::Const(c & 0xffff_ffff),
            Value::Slot(_) => self,
            _ => Value::Unknown,
        }
    }

    fn join(self, other: Value) -> Value {
        if self == other { self } else { Value::Unknown }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    Code(u64),
    /// Through the pointer at this address.
    Pointer(u64),
    Unknown,
}

impl From<Value> for Target {
    fn from(value: Value) -> Target {
        match value {
            Value::Const(address) => Target::Code(address),
            Value::Import(place) => Target::Pointer(place),
            _ => Target::Unknown,
        }
    }
}

/// Integer arguments looked at: those that aarch64 passes in registers. x86-64 puts the last two on the stack.
pub const ARGUMENTS: usize = 8;

/// A call or tail call, with what its arguments hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    pub at: u64,
    pub target: Target,
    pub arguments: [Value; ARGUMENTS],
}

/// A read of `width` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    pub from: Value,
    pub width: u8,
}

/// A write of 4 or 8 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Store {
    pub to: Value,
    pub value: Value,
}

/// What a function does on the paths from its entry, landing pads of exceptions aside.
#[derive(Debug, Default)]
pub struct Trace {
    pub calls: Vec<Call>,
    pub loads: Vec<Load>,
    pub stores: Vec<Store>,
}

/// Interprets `function`; `None` when it is too large or not code.
pub fn trace(image: &Image<'_>, function: Function) -> Option<Trace> {
    if function.end.checked_sub(function.start)? > MAX_FUNCTION {
        return None;
    }
    let code = image.code(function)?;
    let leaders = leaders(image, function, code)?;

    let mut known = HashMap::from([(function.start, State::at_entry(image.arch()))]);
    let mut work = BTreeSet::from([function.start]);
    while let Some(block) = work.pop_first() {
        let state = known.get(&block)?.clone();
        let mut machine = Machine { image, function, state, trace: None };
        for (to, state) in machine.run_block(block, code, &leaders)? {
            match known.get_mut(&to) {
                Some(before) => {
                    if before.join(&state) {
                        work.insert(to);
                    }
                }
                None => {
                    known.insert(to, state);
                    work.insert(to);
                }
            }
        }
    }

    let mut found = Trace::default();
    let mut blocks: Vec<_> = known.into_iter().collect();
    blocks.sort_unstable_by_key(|&(at, _)| at);
    for (block, state) in blocks {
        let mut machine = Machine { image, function, state, trace: Some(&mut found) };
        machine.run_block(block, code, &leaders)?;
    }
    Some(found)
}

/// The symbol that the linkage stub at `address` jumps to.
fn stub_symbol<'a>(image: &'a Image<'_>, address: u64) -> Option<&'a [u8]> {
    let code = image.bytes(address)?;
    let function = Function { start: address, end: address.checked_add(32)? };
    let mut machine = Machine { image, function, state: State::at_entry(image.arch()), trace: None };
    let mut at = 0;
    // endbr64, adrp, ldr, add; then the jump.
    for _ in 0..5 {
        let (size, next) = machine.step(address.wrapping_add(at as u64), code.get(at..)?)?;
        match next {
            Next::Step => at += size,
            Next::JumpTo(Target::Pointer(slot)) => return image.import_at(slot),
            _ => return None,
        }
    }
    None
}

/// The symbol of another library that a call leads to.
pub fn target_symbol<'a>(image: &'a Image<'_>, target: Target) -> Option<&'a [u8]> {
    match target {
        Target::Code(address) => stub_symbol(image, address),
        Target::Pointer(place) => image.import_at(place),
        Target::Unknown => None,
    }
}

/// Where control goes after an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Step,
    Branch(u64),
    JumpTo(Target),
    Call(Target),
    /// Return, trap, undefined instruction.
    Stop,
}

/// Direct branch targets inside the function: where paths can meet.
fn leaders(image: &Image<'_>, function: Function, code: &[u8]) -> Option<BTreeSet<u64>> {
    let mut leaders = BTreeSet::new();
    let mut at = 0;
    while let Some(rest) = code.get(at..).filter(|rest| !rest.is_empty()) {
        let address = function.start + at as u64;
        let (size, target) = match image.arch() {
            Arch::X86_64 => x86_64::branch(address, rest)?,
            Arch::Aarch64 => aarch64::branch(address, rest)?,
        };
        leaders.extend(target.filter(|&t| function.contains(t)));
        at += size;
    }
    (leaders.len() <= MAX_LEADERS && image.spend(code.len() as u64 / 4)).then_some(leaders)
}

const REGISTERS: usize = 32;

#[derive(Debug, Clone, PartialEq, Eq)]
struct State {
    registers: [Value; REGISTERS],
    /// Low and high 8 bytes of the vector registers.
    vectors: [[Value; 2]; REGISTERS],
    /// Stack slots that this function wrote, by their offset from the stack pointer at entry.
    stack: BTreeMap<i64, Value>,
}

/// The calling convention.
struct Convention {
    /// Registers of the first arguments.
    arguments: &'static [usize],
    result: usize,
    stack_pointer: usize,
    /// A bit for each register whose value survives calls.
    preserved: u32,
}

const fn bits(registers: &[usize]) -> u32 {
    let (mut mask, mut i) = (0, 0);
    while i < registers.len() {
        mask |= 1 << registers[i];
        i += 1;
    }
    mask
}

/// System V ABI, x86-64 supplement 3.2. Registers are numbered as instructions encode them.
const X86_64: Convention = Convention {
    arguments: &[7, 6, 2, 1, 8, 9],
    result: 0,
    stack_pointer: 4,
    preserved: bits(&[3, 4, 5, 12, 13, 14, 15]),
};

/// AAPCS64 6.1.1. Register 31 is the stack pointer.
const AARCH64: Convention = Convention {
    arguments: &[0, 1, 2, 3, 4, 5, 6, 7],
    result: 0,
    stack_pointer: 31,
    preserved: bits(&[19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 31]),
};

fn convention(arch: Arch) -> &'static Convention {
    match arch {
        Arch::X86_64 => &X86_64,
        Arch::Aarch64 => &AARCH64,
    }
}

impl State {
    fn at_entry(arch: Arch) -> State {
        let convention = convention(arch);
        let mut registers = [Value::Unknown; REGISTERS];
        for (n, &register) in (0u8..).zip(convention.arguments) {
            registers[register] = Value::Arg(n, 0);
        }
        registers[convention.stack_pointer] = Value::Stack(0);
        State { registers, vectors: [[Value::Unknown; 2]; REGISTERS], stack: BTreeMap::new() }
    }

    /// Keeps what both states agree on; true if that is less than `self` knew.
    fn join(&mut self, other: &State) -> bool {
        let before = self.clone();
        for (mine, theirs) in self.registers.iter_mut().zip(&other.registers) {
            *mine = mine.join(*theirs);
        }
        for (mine, theirs) in self.vectors.as_flattened_mut().iter_mut().zip(other.vectors.as_flattened()) {
            *mine = mine.join(*theirs);
        }
        let slots: BTreeSet<i64> = self.stack.keys().chain(other.stack.keys()).copied().collect();
        for slot in slots {
            let joined = self.slot(slot).join(other.slot(slot));
            self.stack.insert(slot, joined);
        }
        *self != before
    }

    fn slot(&self, offset: i64) -> Value {
        self.stack.get(&offset).copied().unwrap_or(Value::Slot(offset))
    }
}

/// Names of functions that do not return; what follows a call of them is not reached from there.
fn is_noreturn(name: &[u8]) -> bool {
    matches!(name, b"__stack_chk_fail" | b"_Unwind_Resume" | b"abort" | b"__cxa_rethrow" | b"__cxa_throw")
        || name.starts_with(b"_ZSt9terminate")
        || name.starts_with(b"_ZN3c106detail14torchCheckFail")
        || name.starts_with(b"_ZN3c106detail23torchInternalAssertFail")
        || (name.starts_with(b"_ZSt") && name.windows(8).any(|part| part == b"__throw_"))
}

struct Machine<'a, 'i> {
    image: &'a Image<'i>,
    function: Function,
    state: State,
    trace: Option<&'a mut Trace>,
}

impl Machine<'_, '_> {
    /// Runs from `block` to where control leaves or paths meet; the states that arrive where it goes on.
    fn run_block(&mut self, block: u64, code: &[u8], leaders: &BTreeSet<u64>) -> Option<Vec<(u64, State)>> {
        let mut at = block;
        // Copying states is what a block costs.
        self.image.spend(64 + self.state.stack.len() as u64);
        loop {
            let (size, next) = self.step(at, code.get((at - self.function.start) as usize..)?)?;
            if !self.image.spend(1) || self.state.stack.len() > MAX_SLOTS {
                return None;
            }
            let following = at.saturating_add(size as u64);
            match next {
                Next::Step => {}
                Next::Call(target) => {
                    if self.call(at, target) {
                        return Some(Vec::new());
                    }
                }
                Next::Branch(to) => {
                    let both = [to, following].into_iter().filter(|&a| self.function.contains(a));
                    return Some(both.map(|a| (a, self.state.clone())).collect());
                }
                Next::JumpTo(Target::Code(to)) if self.function.contains(to) => {
                    return Some(vec![(to, self.state.clone())]);
                }
                Next::JumpTo(target) => {
                    // With the caller's frame restored it is a tail call; else a jump table or a cold part.
                    if self.get(self.convention().stack_pointer) == Value::Stack(0) {
                        self.call(at, target);
                    }
                    return Some(Vec::new());
                }
                Next::Stop => return Some(Vec::new()),
            }
            if !self.function.contains(following) {
                return Some(Vec::new());
            }
            if leaders.contains(&following) {
                return Some(vec![(following, self.state.clone())]);
            }
            at = following;
        }
    }

    /// Decodes and executes one instruction; its size.
    fn step(&mut self, at: u64, code: &[u8]) -> Option<(usize, Next)> {
        match self.image.arch() {
            Arch::X86_64 => x86_64::step(self, at, code),
            Arch::Aarch64 => aarch64::step(self, at, code),
        }
    }

    /// Executes a call; true if it does not return.
    fn call(&mut self, at: u64, target: Target) -> bool {
        let convention = self.convention();
        let mut arguments = [Value::Unknown; ARGUMENTS];
        for (argument, &register) in arguments.iter_mut().zip(convention.arguments) {
            *argument = self.get(register);
        }
        if let Value::Stack(top) = self.get(convention.stack_pointer) {
            let pushed = (0i64..).map(|n| self.state.stack.get(&top.wrapping_add(8 * n)));
            for (argument, value) in arguments.iter_mut().skip(convention.arguments.len()).zip(pushed) {
                *argument = value.copied().unwrap_or_default();
            }
        }
        let name = target_symbol(self.image, target);
        if let Some(trace) = &mut self.trace {
            trace.calls.push(Call { at, target, arguments });
        }
        for (number, register) in self.state.registers.iter_mut().enumerate() {
            if convention.preserved >> number & 1 == 0 {
                *register = Value::Unknown;
            }
        }
        self.state.registers[convention.result] = Value::Returned(at, 0);
        self.state.vectors = [[Value::Unknown; 2]; REGISTERS];
        for argument in arguments {
            if let Value::Stack(offset) = argument {
                self.state.stack.remove(&offset);
            }
        }
        name.is_some_and(is_noreturn)
    }

    fn convention(&self) -> &'static Convention {
        convention(self.image.arch())
    }

    fn get(&self, register: usize) -> Value {
        self.state.registers.get(register).copied().unwrap_or_default()
    }

    fn set(&mut self, register: usize, value: Value) {
        if let Some(r) = self.state.registers.get_mut(register) {
            *r = value;
        }
    }

    fn vector(&self, register: usize) -> [Value; 2] {
        self.state.vectors.get(register).copied().unwrap_or_default()
    }

    fn set_vector(&mut self, register: usize, value: [Value; 2]) {
        if let Some(r) = self.state.vectors.get_mut(register) {
            *r = value;
        }
    }

    fn load(&mut self, from: Value, width: u8) -> Value {
        self.note_load(from, width);
        match (from, width) {
            (Value::Stack(offset), 8) => self.state.slot(offset),
            (Value::Stack(offset), 4) => self.state.slot(offset).low_half(),
            (Value::Const(place), 8) => match self.image.pointer(place) {
                Some(address) => Value::Const(address),
                None if self.image.import_at(place).is_some() => Value::Import(place),
                None => Value::Unknown,
            },
            _ => Value::Unknown,
        }
    }

    fn note_load(&mut self, from: Value, width: u8) {
        if let Some(trace) = &mut self.trace
            && from != Value::Unknown
        {
            trace.loads.push(Load { from, width });
        }
    }

    fn load_vector(&mut self, from: Value, width: u8) -> [Value; 2] {
        match width {
            16 => {
                let low = self.load(from, 8);
                [low, self.load(from.plus(8), 8)]
            }
            8 => [self.load(from, 8), Value::Const(0)],
            _ => {
                self.note_load(from, width);
                [Value::Unknown; 2]
            }
        }
    }

    fn store(&mut self, to: Value, width: u8, value: Value) {
        if let Value::Stack(offset) = to {
            let (first, end) = (offset.saturating_sub(7), offset.saturating_add(width.into()));
            let overlapped: Vec<i64> = self.state.stack.range(first..end).map(|(&o, _)| o).collect();
            for slot in overlapped {
                self.state.stack.insert(slot, Value::Unknown);
            }
            // A constant `int` counts as a whole slot: no one reads more of it.
            let is_known = width == 8 || (width == 4 && matches!(value, Value::Const(_)));
            self.state.stack.insert(offset, if is_known { value } else { Value::Unknown });
        }
        if let Some(trace) = &mut self.trace
            && (width == 4 || width == 8)
            && to != Value::Unknown
        {
            trace.stores.push(Store { to, value });
        }
    }

    fn store_vector(&mut self, to: Value, width: u8, value: [Value; 2]) {
        self.store(to, 8, value[0]);
        let mut stored = 8;
        while stored < width {
            self.store(to.plus(stored.into()), 8, if stored == 8 { value[1] } else { Value::Unknown });
            stored += 8;
        }
    }
}
