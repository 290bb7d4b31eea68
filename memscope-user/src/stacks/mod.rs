//! Stacks of allocations, Python's and native ones: which interpreter a process has, and what its frames are called.
//!
//! The BPF programs walk Python's frames and send each stack once, as addresses, and before it copies of the code objects
//! that are new in it. Here they get names: from the copies, else from the process while it runs on.

mod code;
#[cfg(fuzzing)]
pub mod fuzzing;
mod interpreter;
mod lines;
mod memory;
mod native;
mod offsets;
mod origin;
mod threads;

use std::{io, sync::Arc};

use memscope_ebpf::{Header, PieceHead, Plain, RawFrame, StackHead, flags, no_stack};
use rustc_hash::FxHashMap;

pub use interpreter::{Found, Interpreter, Refusal};
pub use memory::Memory;
pub use native::{NativeTally, Natives, demangled};
pub use origin::Origins;
pub use threads::robust_lists;

use crate::{
    attach::proc::Proc,
    model::{Frame, Name, Origin, Stack, Tgid, Tid, Whose},
};
use code::{At, Code};
use interpreter::code_and_owner;
use memory::Copied;
use offsets::{OWNED_BY_C, OWNED_BY_GENERATOR};

/// Stacks kept of a process. One that has more gets no more: it makes up code as it goes.
const MOST_STACKS: usize = 1 << 16;
/// Code objects kept of a process.
const MOST_CODES: usize = 1 << 16;
/// Images kept besides those of processes that run.
const MOST_IMAGES: usize = 1 << 12;
/// Threads with pieces that wait for their stack. It comes at once, unless it is lost.
const MOST_WAITING: usize = 64;

/// What a frame is called whose code could not be read in time.
const GONE: &str = "<code gone>";

/// Why allocations have no stack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    NoInterpreter,
    NoSlot,
    NoState,
    NoFrames,
    MainElsewhere,
    /// Of native stacks.
    Small,
    /// Of native stacks.
    NoCode,
    NoTask,
    Limited,
    Unreadable,
    NoRoom,
}

impl Reason {
    pub fn text(self) -> &'static str {
        match self {
            Self::NoInterpreter => "before the interpreter was known",
            Self::NoSlot => "on threads that this kernel can not say the Python state of yet",
            Self::NoState => "on threads without Python",
            Self::NoFrames => "outside of Python functions",
            Self::MainElsewhere => "on threads that the main thread did not wait for",
            Self::Small => "of pools, below --native-min",
            Self::NoCode => "in code that belongs to no file any more",
            Self::NoTask => "run by torch_npu's task queue, for calls that were not seen",
            Self::Limited => "beyond a thread's share of stacks",
            Self::Unreadable => "unreadable",
            Self::NoRoom => "without room for the stack",
        }
    }

    fn of(why: u64) -> Option<Self> {
        Some(match why {
            no_stack::NOT_WANTED => return None,
            no_stack::NO_INTERPRETER => Self::NoInterpreter,
            no_stack::NO_SLOT => Self::NoSlot,
            no_stack::NO_STATE => Self::NoState,
            no_stack::NO_FRAMES => Self::NoFrames,
            no_stack::NO_TASK => Self::NoTask,
            no_stack::LIMITED => Self::Limited,
            no_stack::RING_FULL | no_stack::NO_ROOM => Self::NoRoom,
            _ => Self::Unreadable,
        })
    }
}

/// How many allocations of a process have a stack.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    pub own: u64,
    pub via: u64,
    /// Frames of distinct stacks whose code was gone before its name was read.
    pub gone_frames: u64,
    without: FxHashMap<Reason, u64>,
}

impl Tally {
    pub fn has(&self, reason: Reason) -> bool {
        self.without.contains_key(&reason)
    }

    /// In order of the reasons.
    pub fn without(&self) -> Vec<(Reason, u64)> {
        in_order(&self.without)
    }
}

fn in_order(without: &FxHashMap<Reason, u64>) -> Vec<(Reason, u64)> {
    let mut list: Vec<_> = without.iter().map(|(reason, count)| (*reason, *count)).collect();
    list.sort_unstable();
    list
}

/// The stacks of all processes.
#[derive(Debug, Default)]
pub struct Stacks {
    processes: FxHashMap<Tgid, Known>,
    /// By their numbers.
    images: FxHashMap<u64, Arc<Image>>,
    tallies: FxHashMap<Tgid, Tally>,
    /// What was copied for a thread's next stack.
    copied: FxHashMap<Tid, Copied>,
    /// `None` when they are not wanted.
    pub native: Option<Natives>,
}

/// A program as one process has loaded it, and as those have it that were forked from that.
#[derive(Debug)]
struct Image {
    number: u64,
    proc: Proc,
    interpreter: Interpreter,
    origins: Origins,
}

/// What is known of a process.
#[derive(Debug)]
struct Known {
    memory: Memory,
    image: Arc<Image>,
    codes: FxHashMap<(u64, u64), Arc<Code>>,
    stacks: FxHashMap<u64, Result<Arc<Stack>, Reason>>,
    gone: Name,
}

impl Stacks {
    /// From now on the process's stacks can be read, and those of processes that are forked from it. `image` is its number.
    pub fn begin(
        &mut self,
        tgid: Tgid,
        image: u64,
        proc: &Proc,
        interpreter: Interpreter,
        origins: Origins,
    ) -> io::Result<()> {
        let memory = Memory::of(proc, tgid)?;
        if self.images.len() >= MOST_IMAGES {
            self.images.retain(|_, image| Arc::strong_count(image) > 1);
        }
        let image = Arc::new(Image { number: image, proc: proc.clone(), interpreter, origins });
        self.images.insert(image.number, image.clone());
        self.know(tgid, memory, image);
        Ok(())
    }

    /// The process's stacks can be read by what is known of the one that it was forked from, whose image this is: the version
    /// of its interpreter. `None` when they can not.
    pub fn inherit(&mut self, tgid: Tgid, image: u64) -> Option<&str> {
        if self.processes.get(&tgid).is_none_or(|known| known.image.number != image) {
            let image = self.images.get(&image)?.clone();
            let memory = Memory::of(&image.proc, tgid).ok()?;
            if !image.interpreter.has_same_slot(&memory) {
                return None;
            }
            self.know(tgid, memory, image);
        }
        self.processes.get(&tgid).map(|known| known.image.interpreter.version.as_str())
    }

    fn know(&mut self, tgid: Tgid, memory: Memory, image: Arc<Image>) {
        // Events that are still to come may name stacks of before.
        let stacks = self.processes.remove(&tgid).map(|known| known.stacks).unwrap_or_default();
        let known = Known { memory, image, codes: FxHashMap::default(), stacks, gone: GONE.into() };
        self.processes.insert(tgid, known);
    }

    /// The process ended or runs another program.
    pub fn forget(&mut self, tgid: Tgid) {
        self.processes.remove(&tgid);
        if let Some(native) = &mut self.native {
            native.forget(tgid);
        }
    }

    pub fn tally(&self, tgid: Tgid) -> Option<&Tally> {
        self.tallies.get(&tgid)
    }

    /// Takes a PIECE record; `None` when it is malformed.
    pub fn learn_piece(&mut self, bytes: &[u8]) -> Option<()> {
        let head = PieceHead::read(bytes)?;
        let tid = Tid(head.header.tid);
        let piece = bytes.get(size_of::<PieceHead>()..)?.get(..usize::try_from(head.len).ok()?)?;
        if self.copied.len() >= MOST_WAITING && !self.copied.contains_key(&tid) {
            self.copied.clear();
        }
        self.copied.entry(tid).or_default().add(head.address, piece);
        Some(())
    }

    /// Takes a STACK record; `None` when it is malformed.
    pub fn learn(&mut self, bytes: &[u8]) -> Option<()> {
        let head = StackHead::read(bytes)?;
        let frames: Vec<RawFrame> = bytes
            .get(size_of::<StackHead>()..)?
            .chunks_exact(size_of::<RawFrame>())
            .filter_map(RawFrame::read)
            .collect();
        let frames = frames.get(..head.frames as usize)?;
        let tgid = Tgid(head.header.tgid);
        let copied = self.copied.remove(&Tid(head.header.tid)).unwrap_or_default();
        // Its process has ended since, or runs another program.
        if self.inherit(tgid, head.image).is_none() {
            return Some(());
        }
        let Some(known) = self.processes.get_mut(&tgid) else { return Some(()) };
        if known.stacks.len() >= MOST_STACKS && !known.stacks.contains_key(&head.id) {
            return Some(());
        }
        let whose = if head.header.flags & flags::VIA != 0 { Whose::Via } else { Whose::Own };
        let (stack, gone) = known.resolve(&copied, frames, whose, head.more != 0);
        known.stacks.insert(head.id, stack);
        self.tallies.entry(tgid).or_default().gone_frames += gone;
        Some(())
    }

    /// Takes a NATIVE record; `None` when it is malformed.
    pub fn learn_native(&mut self, bytes: &[u8]) -> Option<()> {
        self.native.as_mut().map_or(Some(()), |native| native.learn(bytes))
    }

    /// The stack of an event, by the header of its record and the Python stack that it names. Counts it.
    pub fn of_event(&mut self, header: &Header, id: u64) -> Option<Arc<Stack>> {
        let tgid = Tgid(header.tgid);
        let python = self.get(tgid, id);
        match self.native.as_mut().and_then(|native| Some((native.take(header)?, native))) {
            Some((stack, native)) => Some(native.join(tgid, id, python.as_ref(), stack)),
            None => python,
        }
    }

    /// The Python stack that an event names. Counts it.
    fn get(&mut self, tgid: Tgid, id: u64) -> Option<Arc<Stack>> {
        if id == no_stack::NOT_WANTED {
            return None;
        }
        let stack = if id < no_stack::FIRST_ID {
            Err(Reason::of(id)?)
        } else {
            match self.processes.get(&tgid) {
                Some(known) => known.stacks.get(&id).cloned().unwrap_or(Err(Reason::NoRoom)),
                None => Err(Reason::NoInterpreter),
            }
        };
        let tally = self.tallies.entry(tgid).or_default();
        match stack {
            Ok(stack) => {
                match stack.whose() {
                    Whose::Own => tally.own += 1,
                    Whose::Via => tally.via += 1,
                }
                Some(stack)
            }
            Err(reason) => {
                *tally.without.entry(reason).or_default() += 1;
                None
            }
        }
    }
}

impl Known {
    /// Names the frames of a stack; with the number of those whose code is gone.
    fn resolve(
        &mut self,
        copied: &Copied,
        raw: &[RawFrame],
        whose: Whose,
        cut: bool,
    ) -> (Result<Arc<Stack>, Reason>, u64) {
        let mut frames = Vec::with_capacity(raw.len());
        let mut gone = 0;
        for raw in raw {
            let (address, owner) = code_and_owner(raw);
            if owner >= OWNED_BY_C {
                continue;
            }
            match self.code(copied, address, raw.identity) {
                Some(code) => match code.at(raw.instruction, owner == OWNED_BY_GENERATOR) {
                    At::NotBegun => {}
                    At::Line(line) => {
                        let origin = self.image.origins.of_file(&code.file);
                        let frame = Frame { function: code.function.clone(), file: code.file.clone(), line };
                        frames.push((frame, origin));
                    }
                },
                None => {
                    gone += 1;
                    let frame = Frame { function: self.gone.clone(), file: self.gone.clone(), line: None };
                    frames.push((frame, Origin::Standard));
                }
            }
        }
        // Only while the main thread waits for the backward pass do its frames say who wanted it.
        let waits = |(frame, _): &(Frame, Origin)| frame.file.contains("/torch/autograd/");
        if whose == Whose::Via && !frames.first().is_some_and(waits) {
            return (Err(Reason::MainElsewhere), gone);
        }
        let stack = Stack::new(frames, whose, cut).map(Arc::new).ok_or(Reason::NoFrames);
        (stack, gone)
    }

    fn code(&mut self, copied: &Copied, address: u64, identity: u64) -> Option<Arc<Code>> {
        if let Some(code) = self.codes.get(&(address, identity)) {
            return Some(code.clone());
        }
        let Interpreter { offsets, types, .. } = &self.image.interpreter;
        let code = Code::read(copied, offsets, types, address, identity)
            .or_else(|| Code::read(&self.memory, offsets, types, address, identity))?;
        let code = Arc::new(code);
        if self.codes.len() < MOST_CODES {
            self.codes.insert((address, identity), code.clone());
        }
        Some(code)
    }
}
