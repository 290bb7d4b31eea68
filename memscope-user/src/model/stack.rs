//! Call stacks of allocations.

use std::{
    hash::{Hash, Hasher},
    sync::Arc,
};

use serde::Serialize;

use super::{Name, windows};

/// A function of the program, and where it was.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Frame {
    /// With the names of the classes and functions that it is in, where the interpreter keeps these.
    pub function: Name,
    /// As the interpreter has it.
    pub file: Name,
    /// `None`: the instruction belongs to no line, or is not known.
    pub line: Option<u32>,
}

/// Whose code a frame is in, from the least telling to the most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// The interpreter and its standard library.
    Standard,
    /// torch, torch_npu.
    Framework,
    /// Another installed package.
    Package,
    /// A text that was compiled as the program went (`exec`, `eval`): who did so has a file to look into.
    Text,
    /// Code of the user's own.
    User,
}

/// Whose frames a stack has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Whose {
    /// The allocating thread's.
    Own,
    /// The main thread's, which waited for the allocating one.
    Via,
}

/// A native function of the program, and where it was.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NativeFrame {
    /// The file is the source where that is known, else the library or program.
    pub frame: Frame,
    /// The library or program.
    pub module: Name,
    /// Its name there, and the distance of the return address from where it begins.
    pub symbol: Name,
    pub offset: u64,
    /// The return address in the process.
    pub address: u64,
    /// It has no frame of its own: its code is in the next one's.
    pub inlined: bool,
}

/// The native functions of a thread that allocated, from the one that called the allocating one on.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct NativeStack {
    /// Innermost first.
    frames: Box<[NativeFrame]>,
    /// There are more frames behind the last.
    cut: bool,
    place: usize,
}

impl NativeStack {
    /// `None` without frames.
    pub fn new(frames: Vec<(NativeFrame, Origin)>, cut: bool) -> Option<Self> {
        let place = place_of(frames.iter().map(|(_, origin)| *origin))?;
        Some(Self { frames: frames.into_iter().map(|(frame, _)| frame).collect(), cut, place })
    }

    pub fn frames(&self) -> &[NativeFrame] {
        &self.frames
    }

    pub fn is_cut(&self) -> bool {
        self.cut
    }
}

/// Python's functions, the native ones, or both.
#[derive(Debug, Clone)]
pub struct Stack {
    /// Python's, innermost first.
    frames: Arc<[Frame]>,
    whose: Whose,
    /// There are more frames behind the last.
    cut: bool,
    /// The frame to name where there is room for one.
    place: usize,
    /// The next one outside of it of the same code.
    caller: Option<usize>,
    /// Labels of the windows that it passes through.
    label: Option<Name>,
    native: Option<Arc<NativeStack>>,
}

/// One call of the program comes through different native functions by turns: where there are Python ones, these say
/// which call it was.
impl PartialEq for Stack {
    fn eq(&self, other: &Self) -> bool {
        (&self.frames, self.whose, self.cut) == (&other.frames, other.whose, other.cut)
            && (!self.frames.is_empty() || self.native == other.native)
    }
}

impl Eq for Stack {}

impl Hash for Stack {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.frames, self.whose, self.cut).hash(state);
        if self.frames.is_empty() {
            self.native.hash(state);
        }
    }
}

impl Stack {
    /// Of Python's functions; `None` without frames.
    pub fn new(frames: Vec<(Frame, Origin)>, whose: Whose, cut: bool) -> Option<Self> {
        let place = place_of(frames.iter().map(|(_, origin)| *origin))?;
        let origin_of = |at: usize| frames.get(at).map(|(_, origin)| *origin);
        let caller = (place + 1..frames.len()).find(|at| origin_of(*at) == origin_of(place));
        let frames: Arc<[Frame]> = frames.into_iter().map(|(frame, _)| frame).collect();
        let label = windows::label(&frames);
        Some(Stack { frames, whose, cut, place, caller, label, native: None })
    }

    /// The native functions below those of `python`, if any.
    pub fn with_native(python: Option<&Stack>, native: Arc<NativeStack>) -> Self {
        let native = Some(native);
        match python {
            Some(python) => Stack { native, ..python.clone() },
            None => Stack {
                frames: Arc::default(),
                whose: Whose::Own,
                cut: false,
                place: 0,
                caller: None,
                label: None,
                native,
            },
        }
    }

    /// What functions of frameworks that it passes through say of the memory, from the outermost, joined with `@`.
    pub fn label(&self) -> Option<&Name> {
        self.label.as_ref()
    }

    pub fn native(&self) -> Option<&NativeStack> {
        self.native.as_deref()
    }

    /// Python's functions.
    pub fn frames(&self) -> &[Frame] {
        &self.frames
    }

    pub fn whose(&self) -> Whose {
        self.whose
    }

    pub fn is_cut(&self) -> bool {
        self.cut
    }

    /// The innermost frame of the user's own code; without any, of the code that is closest to it. A native one only
    /// where there is no other.
    pub fn place(&self) -> Option<&Frame> {
        let native = || self.native.as_ref().and_then(|native| native.frames.get(native.place));
        self.frames.get(self.place).or_else(|| native().map(|native| &native.frame))
    }

    /// Who called the place, of the user's own code if that is it.
    pub fn caller(&self) -> Option<&Frame> {
        self.frames.get(self.caller?)
    }

    /// Who called the place, innermost first.
    pub fn callers(&self) -> &[Frame] {
        self.frames.get(self.place + 1..).unwrap_or_default()
    }
}

/// The innermost frame of those that tell most.
fn place_of(origins: impl Iterator<Item = Origin> + Clone) -> Option<usize> {
    let best = origins.clone().max()?;
    origins.into_iter().position(|origin| origin == best)
}
