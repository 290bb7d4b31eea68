//! aarch64 instructions in terms of [`Machine`]. Encodings: Arm Architecture Reference Manual, C4.1.

use super::{Machine, Next, Target, Value};

const STACK_POINTER: usize = 31;
const SIZE: usize = 4;

struct Word(u32);

impl Word {
    fn bits(&self, low: u32, count: u32) -> u32 {
        self.0 >> low & ((1 << count) - 1)
    }

    fn is(&self, mask: u32, value: u32) -> bool {
        self.0 & mask == value
    }

    /// A signed field of the instruction.
    fn signed(&self, low: u32, count: u32) -> i64 {
        i64::from((self.0 << (32 - low - count)) as i32 >> (32 - count))
    }

    /// Register fields.
    fn d(&self) -> usize {
        self.bits(0, 5) as usize
    }

    fn n(&self) -> usize {
        self.bits(5, 5) as usize
    }

    fn t2(&self) -> usize {
        self.bits(10, 5) as usize
    }

    fn m(&self) -> usize {
        self.bits(16, 5) as usize
    }

    /// Of adr and adrp.
    fn distance(&self) -> i64 {
        self.signed(5, 19) << 2 | i64::from(self.bits(29, 2))
    }

    fn is_64(&self) -> bool {
        self.bits(31, 1) == 1
    }
}

fn word(code: &[u8]) -> Option<Word> {
    Some(Word(u32::from_le_bytes(*code.first_chunk()?)))
}

/// Where the conditional or unconditional branch at `at` goes.
fn target(w: &Word, at: u64) -> Option<u64> {
    let distance = if w.is(0xfc00_0000, 0x1400_0000) {
        w.signed(0, 26)
    } else if w.is(0xff00_0010, 0x5400_0000) || w.is(0x7e00_0000, 0x3400_0000) {
        w.signed(5, 19)
    } else if w.is(0x7e00_0000, 0x3600_0000) {
        w.signed(5, 14)
    } else {
        return None;
    };
    Some(at.wrapping_add_signed(4 * distance))
}

/// Size of the instruction at `at`, and where it branches to directly.
pub fn branch(at: u64, code: &[u8]) -> Option<(usize, Option<u64>)> {
    Some((SIZE, word(code).and_then(|w| target(&w, at))))
}

/// The page that an `adrp` at `at` loads.
pub fn page(at: u64, word: u32) -> Option<u64> {
    let w = Word(word);
    w.is(0x9f00_0000, 0x9000_0000).then(|| (at & !0xfff).wrapping_add_signed(w.distance() << 12))
}

/// The address that an `adr` at `at` loads.
pub fn address(at: u64, word: u32) -> Option<u64> {
    let w = Word(word);
    w.is(0x9f00_0000, 0x1000_0000).then(|| at.wrapping_add_signed(w.distance()))
}

/// The general registers, a bit each, whose value an instruction surely replaces.
pub fn overwritten(word: u32) -> u32 {
    let w = Word(word);
    let is_call = w.is(0xfc00_0000, 0x9400_0000) || w.is(0xffff_fc1f, 0xd63f_0000);
    let is_computed =
        w.is(0x1c00_0000, 0x1000_0000) || (w.is(0x0e00_0000, 0x0a00_0000) && !w.is(0x1fe0_0000, 0x1a40_0000));
    let is_load = w.is(0x3f40_0000, 0x3940_0000);
    match () {
        () if is_call => 0x0007_ffff,
        () if is_computed || is_load => 1 << w.d(),
        () => 0,
    }
}

pub(super) fn step(machine: &mut Machine<'_, '_>, at: u64, code: &[u8]) -> Option<(usize, Next)> {
    let w = word(code)?;
    let next = if w.is(0xfc00_0000, 0x1400_0000) {
        target(&w, at).map_or(Next::Stop, |t| Next::JumpTo(Target::Code(t)))
    } else if let Some(to) = target(&w, at) {
        Next::Branch(to)
    } else if w.is(0xfc00_0000, 0x9400_0000) {
        Next::Call(Target::Code(at.wrapping_add_signed(4 * w.signed(0, 26))))
    } else if w.is(0xffff_fc1f, 0xd61f_0000) {
        Next::JumpTo(machine.get(w.n()).into())
    } else if w.is(0xffff_fc1f, 0xd63f_0000) {
        Next::Call(machine.get(w.n()).into())
    } else if w.is(0xfe00_0000, 0xd600_0000) || w.is(0xff00_0000, 0xd400_0000) || w.is(0xffff_0000, 0) {
        // Other branches to registers (ret), exceptions (brk), udf.
        Next::Stop
    } else {
        execute(machine, at, &w);
        Next::Step
    };
    Some((SIZE, next))
}

fn execute(machine: &mut Machine<'_, '_>, at: u64, w: &Word) {
    // The op0 field.
    match w.bits(25, 4) {
        0b1000 | 0b1001 => immediate(machine, at, w),
        0b0100 | 0b0110 | 0b1100 | 0b1110 => memory(machine, at, w),
        0b0101 | 0b1101 => {
            // mov is orr with the zero register.
            let is_move = w.is(0x7fe0_ffe0, 0x2a00_03e0);
            let value = if is_move { general(machine, w.m()) } else { Value::Unknown };
            set_general(machine, w, value);
        }
        // System: mrs, sysl.
        0b1010 | 0b1011 if w.is(0xffe0_0000, 0xd520_0000) => set_general(machine, w, Value::Unknown),
        0b1010 | 0b1011 => {}
        // Vector and floating point, which can write a general register: fmov, umov, fcvtzs.
        0b0111 | 0b1111 => {
            // movi of zero, to all elements.
            let is_zero = matches!(w.0 & 0xbfff_ffe0, 0x0f00_0400 | 0x0f00_8400 | 0x0f00_e400 | 0x2f00_e400);
            set_general(machine, w, Value::Unknown);
            machine.set_vector(w.d(), [if is_zero { Value::Const(0) } else { Value::Unknown }; 2]);
        }
        _ => set_general(machine, w, Value::Unknown),
    }
}

/// A register field where 31 is the zero register.
fn general(machine: &Machine<'_, '_>, register: usize) -> Value {
    if register == 31 { Value::Const(0) } else { machine.get(register) }
}

/// Writes the destination, where 31 is the zero register.
fn set_general(machine: &mut Machine<'_, '_>, w: &Word, value: Value) {
    if w.d() != 31 {
        machine.set(w.d(), if w.is_64() { value } else { value.low_half() });
    }
}

/// Data processing with an immediate.
fn immediate(machine: &mut Machine<'_, '_>, at: u64, w: &Word) {
    match w.bits(23, 3) {
        // adr, adrp
        0b000 | 0b001 => {
            let value = page(at, w.0).or_else(|| address(at, w.0)).map_or(Value::Unknown, Value::Const);
            if w.d() != 31 {
                machine.set(w.d(), value);
            }
        }
        // add, sub; both registers can be the stack pointer unless flags are set
        0b010 => {
            let amount = i64::from(w.bits(10, 12)) << (12 * w.bits(22, 1));
            let amount = if w.bits(30, 1) == 0 { amount } else { -amount };
            let sets_flags = w.bits(29, 1) == 1;
            if w.d() != STACK_POINTER || !sets_flags {
                let value = machine.get(w.n()).plus(amount);
                machine.set(w.d(), if w.is_64() { value } else { value.low_half() });
            }
        }
        // and, orr, eor of a bit mask: can write the stack pointer (to align it); ands can not
        0b100 => {
            if w.bits(29, 2) != 0b11 {
                machine.set(w.d(), Value::Unknown);
            } else {
                set_general(machine, w, Value::Unknown);
            }
        }
        0b101 => {
            let shift = 16 * w.bits(21, 2);
            let part = u64::from(w.bits(5, 16)) << shift;
            let value = match (w.bits(29, 2), general(machine, w.d())) {
                (0b00, _) => Value::Const(!part),
                (0b10, _) => Value::Const(part),
                (0b11, Value::Const(c)) => Value::Const(c & !(0xffff << shift) | part),
                _ => Value::Unknown,
            };
            set_general(machine, w, value);
        }
        _ => set_general(machine, w, Value::Unknown),
    }
}

/// Loads and stores.
fn memory(machine: &mut Machine<'_, '_>, at: u64, w: &Word) {
    let is_vector = w.bits(26, 1) == 1;
    if w.is(0x3b00_0000, 0x1800_0000) {
        // ldr of a literal
        let from = Value::Const(at.wrapping_add_signed(4 * w.signed(5, 19)));
        let width = match w.bits(30, 2) {
            0b00 | 0b10 => 4,
            _ => 8,
        };
        load(machine, from, width, w.d(), is_vector);
    } else if w.is(0x3a00_0000, 0x2800_0000) {
        // Pairs: no-allocate, post-index, offset, pre-index
        let width: u8 = match (is_vector, w.bits(30, 2)) {
            (false, 0b10) | (true, 0b01) => 8,
            (true, 0b10) => 16,
            _ => 4,
        };
        let offset = w.signed(15, 7) * i64::from(width);
        let place = indexed(machine, w, offset, w.bits(23, 2) & 1 == 1, w.bits(23, 2) == 0b01);
        if w.bits(22, 1) == 1 {
            load(machine, place, width, w.d(), is_vector);
            load(machine, place.plus(width.into()), width, w.t2(), is_vector);
        } else {
            store(machine, place, width, w.d(), is_vector);
            store(machine, place.plus(width.into()), width, w.t2(), is_vector);
        }
    } else if w.is(0x3800_0000, 0x3800_0000) {
        // One register
        let width = match (is_vector, w.bits(30, 2), w.bits(23, 1)) {
            (true, 0, 1) => 16,
            (_, size, _) => 1u8 << size,
        };
        let place = if w.bits(24, 1) == 1 {
            machine.get(w.n()).plus(i64::from(w.bits(10, 12)) * i64::from(width))
        } else {
            match (w.bits(21, 1), w.bits(10, 2)) {
                (0, mode) => indexed(machine, w, w.signed(12, 9), mode & 1 == 1, mode == 0b01),
                // Atomic operations: they load, and store what is not known.
                (_, 0b00) => {
                    let place = machine.get(w.n());
                    machine.note_load(place, width);
                    machine.store(place, width, Value::Unknown);
                    set_general(machine, w, Value::Unknown);
                    return;
                }
                // A register is added.
                _ => Value::Unknown,
            }
        };
        match (w.bits(22, 2), is_vector) {
            (0b00, _) | (0b10, true) => store(machine, place, width, w.d(), is_vector),
            // prfm
            (0b10, false) if width == 8 => {}
            (0b10 | 0b11, false) => load_signed(machine, place, width, w.d()),
            _ => load(machine, place, width, w.d(), is_vector),
        }
    } else {
        // Exclusive and ordered (ldar, stxr, casp), memory tags, vector structures: registers that any of
        // them can write are unknown after it.
        let place = machine.get(w.n());
        machine.note_load(place, 1 << w.bits(30, 2));
        machine.store(place, 1 << w.bits(30, 2), Value::Unknown);
        for register in [w.d(), w.t2(), w.m()] {
            if register != 31 {
                machine.set(register, Value::Unknown);
            }
            machine.set_vector(register, [Value::Unknown; 2]);
        }
        if w.bits(26, 1) == 1 && w.bits(23, 1) == 1 {
            machine.set(w.n(), Value::Unknown);
        }
    }
}

/// The address of an access with an immediate offset; writes the base register back.
fn indexed(machine: &mut Machine<'_, '_>, w: &Word, offset: i64, writes_back: bool, after: bool) -> Value {
    let base = machine.get(w.n());
    let moved = base.plus(offset);
    if writes_back {
        machine.set(w.n(), moved);
    }
    if after { base } else { moved }
}

fn load(machine: &mut Machine<'_, '_>, from: Value, width: u8, register: usize, is_vector: bool) {
    if is_vector {
        let value = machine.load_vector(from, width);
        machine.set_vector(register, value);
        return;
    }
    let value = machine.load(from, width);
    if register != 31 {
        machine.set(register, value);
    }
}

/// A load that extends the sign: an `int` variable stays what it is.
fn load_signed(machine: &mut Machine<'_, '_>, from: Value, width: u8, register: usize) {
    let value = machine.load(from, width);
    if register != 31 {
        machine.set(register, if matches!(value, Value::Slot(_)) { value } else { Value::Unknown });
    }
}

fn store(machine: &mut Machine<'_, '_>, to: Value, width: u8, register: usize, is_vector: bool) {
    if is_vector {
        let value = machine.vector(register);
        if width >= 8 {
            machine.store_vector(to, width, value);
        } else {
            machine.store(to, width, Value::Unknown);
        }
    } else {
        let value = general(machine, register);
        machine.store(to, width, if width == 4 { value.low_half() } else { value });
    }
}
