//! Call stacks of allocations.

use serde::Serialize;

use super::Name;

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

#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Stack {
    /// Innermost first.
    frames: Box<[Frame]>,
    whose: Whose,
    /// There are more frames behind the last.
    cut: bool,
    /// The frame to name where there is room for one.
    place: usize,
}

impl Stack {
    /// `None` without frames, or with more than one can count.
    pub fn new(frames: Vec<(Frame, Origin)>, whose: Whose, cut: bool) -> Option<Self> {
        let best = frames.iter().map(|(_, origin)| *origin).max()?;
        let place = frames.iter().position(|(_, origin)| *origin == best)?;
        Some(Stack { frames: frames.into_iter().map(|(frame, _)| frame).collect(), whose, cut, place })
    }

    pub fn frames(&self) -> &[Frame] {
        &self.frames
    }

    pub fn whose(&self) -> Whose {
        self.whose
    }

    pub fn is_cut(&self) -> bool {
        self.cut
    }

    /// The innermost frame of the user's own code; without any, of the code that is closest to it.
    pub fn place(&self) -> Option<&Frame> {
        self.frames.get(self.place)
    }

    /// Who called the place, innermost first.
    pub fn callers(&self) -> &[Frame] {
        self.frames.get(self.place + 1..).unwrap_or_default()
    }
}
