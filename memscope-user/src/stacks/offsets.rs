//! Where CPython keeps what, by version.
//!
//! Offsets in bytes, measured from the debug information of release builds on x86_64 and from the headers with an
//! aarch64 compiler. They are the same on both machines, except what lies behind a mutex in `_PyRuntime` up to 3.11.
//! They do not change within a minor version once that is released.

use memscope_ebpf::NO_OFFSET;

use crate::probes::elf::Arch;

/// What must be known of an interpreter to read its stacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offsets {
    /// In `_PyRuntime`: `autoTSSkey`, `{int is_initialized; int key}`, and the main interpreter.
    pub tss: u32,
    pub main_interpreter: u32,
    /// In `PyInterpreterState`: its newest thread.
    pub threads: u32,
    /// In `PyThreadState`: the next one, its interpreter, the frame it is in or the C frame that holds it.
    pub next_thread: u16,
    pub interpreter: u16,
    pub frame: u16,
    /// In the C frame: the frame. [`NO_OFFSET`]: the thread itself has it.
    pub frame_of_cframe: u16,
    pub in_frame: InFrame,
    pub in_code: InCode,
    pub in_str: InStr,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InFrame {
    /// Bytes to read for all of these.
    pub bytes: u16,
    pub code: u16,
    pub previous: u16,
    pub instruction: u16,
    /// `None`: frames are Python objects, and have no owner.
    pub owner: Option<u16>,
    /// 3.11: in the byte before the owner, whether the frame was entered from C. Later versions have an owner for that.
    pub has_entry_mark: bool,
    pub position: Position,
}

/// What a frame's instruction is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Position {
    /// An index, in units of so many bytes; -1 before the first.
    Index(u32),
    /// An address.
    Address,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InCode {
    /// Bytes to read for all of these.
    pub bytes: u16,
    pub filename: u16,
    pub name: u16,
    /// The name with those of what it is in.
    pub qualname: Option<u16>,
    pub lines: u16,
    pub first_line: u16,
    pub format: LineFormat,
    /// Bytes of pointers from `filename` on that tell code objects apart.
    pub identity_bytes: u16,
    /// The first instruction, and how many come before the first that belongs to the function's text.
    pub instructions: u16,
    pub first_traceable: Option<u16>,
}

/// How line numbers are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineFormat {
    /// `co_lnotab`, up to 3.9.
    Steps,
    /// `co_linetable` of 3.10.
    Ranges,
    /// The location table, from 3.11 on.
    Locations,
}

/// In a `str`; its length is at 16, its state at 32 in all versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InStr {
    pub ascii: u8,
    pub other: u8,
}

/// Owners of a frame, in the low bits of [`memscope_ebpf::RawFrame::code`].
pub const OWNED_BY_GENERATOR: u64 = 1;
/// From here on: frames of the evaluation loop itself, not of a Python function.
pub const OWNED_BY_C: u64 = 3;

const FRAME_OBJECT: InFrame = InFrame {
    bytes: 112,
    code: 32,
    previous: 24,
    instruction: 104,
    owner: None,
    has_entry_mark: false,
    position: Position::Index(1),
};
const CODE_3_8: InCode = InCode {
    bytes: 128,
    filename: 104,
    name: 112,
    qualname: None,
    lines: 120,
    first_line: 40,
    format: LineFormat::Steps,
    identity_bytes: 24,
    instructions: 0,
    first_traceable: None,
};
const CODE_3_11: InCode = InCode {
    bytes: 208,
    filename: 112,
    name: 120,
    qualname: Some(128),
    lines: 136,
    first_line: 72,
    format: LineFormat::Locations,
    identity_bytes: 32,
    instructions: 184,
    first_traceable: Some(168),
};
const V3_8: Offsets = Offsets {
    tss: 1392,
    main_interpreter: 40,
    threads: 8,
    next_thread: 8,
    interpreter: 16,
    frame: 24,
    frame_of_cframe: NO_OFFSET,
    in_frame: FRAME_OBJECT,
    in_code: CODE_3_8,
    in_str: InStr { ascii: 48, other: 72 },
};
const V3_9: Offsets = Offsets { tss: 584, ..V3_8 };
const V3_10: Offsets = Offsets {
    in_frame: InFrame { instruction: 96, position: Position::Index(2), ..FRAME_OBJECT },
    in_code: InCode { format: LineFormat::Ranges, ..CODE_3_8 },
    ..V3_9
};
const V3_11: Offsets = Offsets {
    tss: 592,
    main_interpreter: 48,
    threads: 16,
    frame: 56,
    frame_of_cframe: 8,
    in_frame: InFrame {
        bytes: 80,
        code: 32,
        previous: 48,
        instruction: 56,
        owner: Some(69),
        has_entry_mark: true,
        position: Position::Address,
    },
    in_code: CODE_3_11,
    ..V3_8
};
const V3_12: Offsets = Offsets {
    tss: 1544,
    threads: 72,
    frame_of_cframe: 0,
    in_frame: InFrame { code: 0, previous: 8, owner: Some(70), has_entry_mark: false, ..V3_11.in_frame },
    in_code: InCode { first_line: 68, instructions: 192, first_traceable: Some(176), ..CODE_3_11 },
    in_str: InStr { ascii: 40, other: 56 },
    ..V3_11
};
const V3_13: Offsets = Offsets {
    tss: 2160,
    main_interpreter: 640,
    threads: 7344,
    frame: 72,
    frame_of_cframe: NO_OFFSET,
    in_code: InCode { bytes: 208, instructions: 200, first_traceable: Some(184), ..V3_12.in_code },
    ..V3_12
};

impl Offsets {
    /// Those of CPython 3.`minor`; `None` when they are not known.
    pub fn of(minor: u8, arch: Arch) -> Option<Self> {
        let mut offsets = match minor {
            8 => V3_8,
            9 => V3_9,
            10 => V3_10,
            11 => V3_11,
            12 => V3_12,
            13 => V3_13,
            _ => return None,
        };
        if arch == Arch::Aarch64 && minor <= 11 {
            // Mutexes have 48 bytes there, not 40.
            offsets.tss += 16;
        }
        Some(offsets)
    }
}
