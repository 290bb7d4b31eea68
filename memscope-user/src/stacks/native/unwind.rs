//! From a frame to its caller's by the unwind tables of a file (x86_64).
//!
//! A step is taken only where the tables say how. Guessing, by frame pointers for instance, would now and then skip
//! functions without a sign of it, and a chain is to be a true one as far as it goes.

use gimli::{
    BaseAddresses, CfaRule, EhFrame, EhFrameHdr, EhFrameOffset, EndianSlice, EvaluationResult, LittleEndian,
    Register, RegisterRule, UnwindContext, UnwindExpression, UnwindSection, Value,
};

use crate::probes::elf::Library;

type Bytes<'a> = EndianSlice<'a, LittleEndian>;

/// What calls preserve, in the order of [`memscope_ebpf::NativeHead::saved`], by DWARF numbers: rbx, rbp, r12 to r15.
const SAVED: [Register; 6] =
    [Register(3), Register(6), Register(12), Register(13), Register(14), Register(15)];
const RSP: Register = Register(7);
const RETURN_ADDRESS: Register = Register(16);

/// Operations of an expression at most; those of compilers have a handful.
const OPERATIONS_MOST: u32 = 128;

/// Where a file has its unwind tables: offsets and addresses before it is loaded anywhere.
#[derive(Debug, Clone, Copy)]
pub struct Tables {
    header: (usize, usize),
    header_address: u64,
    frames: (usize, usize),
    frames_address: u64,
}

/// How the frame of a function leads to its caller's, at one place in the function.
#[derive(Debug, Clone)]
pub struct Rule {
    /// Where the function begins.
    pub function: u64,
    /// A signal's frame: what it interrupted had not called it.
    pub is_signal: bool,
    cfa: Base,
    return_address: Place,
    saved: [Place; SAVED.len()],
}

/// The canonical frame address: that behind the return address.
#[derive(Debug, Clone, Copy)]
enum Base {
    Sp(i64),
    Saved(usize, i64),
    Expression(UnwindExpression<usize>),
}

/// Where the caller's value of a register is.
#[derive(Debug, Clone, Copy)]
enum Place {
    Unchanged,
    /// In memory, so far from the canonical frame address.
    At(i64),
    /// It is the address so far from it.
    Is(i64),
    In(usize),
    AtExpression(UnwindExpression<usize>),
    IsExpression(UnwindExpression<usize>),
    /// There is no caller.
    Nowhere,
    Unknown,
}

/// Registers of a thread, as far as they are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Registers {
    pub ip: u64,
    pub sp: u64,
    pub saved: [Option<u64>; SAVED.len()],
}

/// What a step led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The caller, and where its return address was.
    Caller(Registers, Option<u64>),
    /// The function has no caller: a thread began with it.
    Outermost,
    Unknown,
}

impl Tables {
    pub fn of(library: &Library, file: &[u8]) -> Option<Self> {
        let (header_address, size) = library.eh_frame_hdr()?;
        // From an address to where it is in the file, up to the end of its segment.
        let place = |address: u64| {
            let segment = library
                .segments()
                .iter()
                .find(|s| address.checked_sub(s.address).is_some_and(|into| into < s.file_size))?;
            let into = address - segment.address;
            let begin = usize::try_from(segment.offset.checked_add(into)?).ok()?;
            let end = begin.checked_add(usize::try_from(segment.file_size - into).ok()?)?.min(file.len());
            (begin < end).then_some((begin, end))
        };
        let (begin, end) = place(header_address)?;
        let header = (begin, end.min(begin.checked_add(usize::try_from(size).ok()?)?));
        let bases = BaseAddresses::default().set_eh_frame_hdr(header_address);
        let parsed = EhFrameHdr::new(file.get(header.0..header.1)?, LittleEndian).parse(&bases, 8).ok()?;
        let gimli::Pointer::Direct(frames_address) = parsed.eh_frame_ptr() else { return None };
        Some(Self { header, header_address, frames: place(frames_address)?, frames_address })
    }

    fn frames<'a>(&self, file: &'a [u8]) -> Option<EhFrame<Bytes<'a>>> {
        Some(EhFrame::new(file.get(self.frames.0..self.frames.1)?, LittleEndian))
    }

    /// The rule at an address; `None` where the tables say nothing of it, or nothing that is understood.
    pub fn rule(&self, file: &[u8], address: u64) -> Option<Rule> {
        let bases =
            BaseAddresses::default().set_eh_frame_hdr(self.header_address).set_eh_frame(self.frames_address);
        let header = EhFrameHdr::new(file.get(self.header.0..self.header.1)?, LittleEndian);
        let header = header.parse(&bases, 8).ok()?;
        let frames = self.frames(file)?;
        // By hand: gimli subtracts where the frames begin from whatever the table says.
        let gimli::Pointer::Direct(entry) = header.table()?.lookup(address, &bases).ok()? else {
            return None;
        };
        let entry = EhFrameOffset(usize::try_from(entry.checked_sub(self.frames_address)?).ok()?);
        let function = frames.fde_from_offset(&bases, entry, EhFrame::cie_from_offset).ok()?;
        if !function.contains(address) {
            return None;
        }
        let mut context = UnwindContext::new();
        let row = function.unwind_info_for_address(&frames, &bases, &mut context, address).ok()?;
        let cfa = match *row.cfa() {
            CfaRule::RegisterAndOffset { register: RSP, offset } => Base::Sp(offset),
            CfaRule::RegisterAndOffset { register, offset } => Base::Saved(number(register)?, offset),
            CfaRule::Expression(expression) => Base::Expression(expression),
        };
        let place = |register: Register| match row.register(register) {
            None | Some(RegisterRule::SameValue) => Place::Unchanged,
            Some(RegisterRule::Offset(offset)) => Place::At(offset),
            Some(RegisterRule::ValOffset(offset)) => Place::Is(offset),
            Some(RegisterRule::Register(other)) => number(other).map_or(Place::Unknown, Place::In),
            Some(RegisterRule::Expression(expression)) => Place::AtExpression(expression),
            Some(RegisterRule::ValExpression(expression)) => Place::IsExpression(expression),
            Some(RegisterRule::Undefined) => Place::Nowhere,
            Some(_) => Place::Unknown,
        };
        Some(Rule {
            function: function.initial_address(),
            is_signal: function.cie().is_signal_trampoline(),
            cfa,
            return_address: place(RETURN_ADDRESS),
            saved: SAVED.map(place),
        })
    }

    /// From a frame to its caller's. `stack` gives words of the stack, as far as it is there.
    pub fn step(&self, file: &[u8], rule: &Rule, at: &Registers, stack: &dyn Fn(u64) -> Option<u64>) -> Step {
        let cfa = match rule.cfa {
            Base::Sp(offset) => Some(at.sp.wrapping_add_signed(offset)),
            Base::Saved(n, offset) => at.saved[n].map(|value| value.wrapping_add_signed(offset)),
            Base::Expression(expression) => self.evaluate(file, expression, None, at, stack),
        };
        // The stack grows downwards: a caller's frame lies above.
        let Some(cfa) = cfa.filter(|cfa| rule.is_signal || *cfa > at.sp) else { return Step::Unknown };
        let address = |place: Place| match place {
            Place::At(offset) => Some(cfa.wrapping_add_signed(offset)),
            Place::AtExpression(expression) => self.evaluate(file, expression, Some(cfa), at, stack),
            _ => None,
        };
        let value = |place: Place, unchanged: Option<u64>| match place {
            Place::Unchanged => unchanged,
            Place::At(_) | Place::AtExpression(_) => stack(address(place)?),
            Place::Is(offset) => Some(cfa.wrapping_add_signed(offset)),
            Place::In(n) => at.saved[n],
            Place::IsExpression(expression) => self.evaluate(file, expression, Some(cfa), at, stack),
            Place::Nowhere | Place::Unknown => None,
        };
        let ip = match rule.return_address {
            Place::Nowhere => return Step::Outermost,
            // A function that has not saved it has none that is known.
            place => match value(place, None) {
                Some(0) => return Step::Outermost,
                Some(ip) => ip,
                None => return Step::Unknown,
            },
        };
        let mut saved = at.saved;
        for (n, place) in rule.saved.into_iter().enumerate() {
            saved[n] = value(place, at.saved[n]);
        }
        Step::Caller(Registers { ip, sp: cfa, saved }, address(rule.return_address))
    }

    fn evaluate(
        &self,
        file: &[u8],
        expression: UnwindExpression<usize>,
        cfa: Option<u64>,
        at: &Registers,
        stack: &dyn Fn(u64) -> Option<u64>,
    ) -> Option<u64> {
        let encoding = gimli::Encoding { format: gimli::Format::Dwarf32, version: 4, address_size: 8 };
        let mut evaluation = expression.get(&self.frames(file)?).ok()?.evaluation(encoding);
        evaluation.set_max_iterations(OPERATIONS_MOST);
        if let Some(cfa) = cfa {
            evaluation.set_initial_value(cfa);
        }
        let mut state = evaluation.evaluate().ok()?;
        loop {
            state = match state {
                EvaluationResult::Complete => break,
                EvaluationResult::RequiresMemory { address, size: 8, space: None, .. } => {
                    evaluation.resume_with_memory(Value::Generic(stack(address)?)).ok()?
                }
                EvaluationResult::RequiresRegister { register, .. } => {
                    let value = match register {
                        RSP => at.sp,
                        RETURN_ADDRESS => at.ip,
                        register => at.saved[number(register)?]?,
                    };
                    evaluation.resume_with_register(Value::Generic(value)).ok()?
                }
                _ => return None,
            };
        }
        match evaluation.as_result() {
            [gimli::Piece { location: gimli::Location::Address { address }, .. }] => Some(*address),
            _ => None,
        }
    }
}

fn number(register: Register) -> Option<usize> {
    SAVED.iter().position(|saved| *saved == register)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn this_program() -> (Library, Vec<u8>) {
        let path = std::env::current_exe().unwrap();
        let library = Library::open(fs::File::open(&path).unwrap(), &path).unwrap();
        (library, fs::read(path).unwrap())
    }

    #[test]
    fn a_place_without_a_table_has_no_rule() {
        let (library, file) = this_program();
        let tables = Tables::of(&library, &file).unwrap();
        assert!(tables.rule(&file, 0).is_none());
        assert!(tables.rule(&file, u64::MAX).is_none());
        assert!(tables.rule(&file[..tables.frames.0], 0x1000).is_none());
        assert!(Tables::of(&library, &[]).is_none());
    }

    /// Nothing that a file says may be fatal.
    #[test]
    fn nonsense_in_the_tables_is_survived() {
        let (library, mut file) = this_program();
        let tables = Tables::of(&library, &file).unwrap();
        let code = library.segments().iter().find(|segment| segment.executable).unwrap();
        let (begin, length) = (code.address, code.file_size);
        let registers = Registers { ip: begin, sp: 0x7fff_0000_1000, saved: [Some(0x7fff_0000_2000); 6] };
        let stack = |address: u64| (address & 8 == 0).then_some(address ^ 0x55);
        let mut random = 1u64;
        let mut next = |most: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) as usize % most
        };
        let mut rules = 0;
        for _ in 0..300 {
            for _ in 0..200 {
                let at = tables.frames.0 + next(tables.frames.1 - tables.frames.0);
                file[at] = next(256) as u8;
            }
            let _ = Tables::of(&library, &file);
            for _ in 0..50 {
                let Some(rule) = tables.rule(&file, begin + next(length as usize) as u64) else { continue };
                rules += 1;
                match tables.step(&file, &rule, &registers, &stack) {
                    Step::Caller(caller, _) => assert!(rule.is_signal || caller.sp > registers.sp),
                    Step::Outermost | Step::Unknown => {}
                }
            }
        }
        assert!(rules > 100, "{rules}");
    }
}
