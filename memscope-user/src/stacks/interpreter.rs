//! Finding a process's Python interpreter, and making sure that it is understood before anything is believed of it.

use memscope_ebpf::{self as wire, RawFrame};

use super::{
    code::{Types, is_alive},
    memory::{Memory, half_at, word_at},
    offsets::{OWNED_BY_C, Offsets},
};
use crate::{
    attach::process::{MappedFile, Process},
    model::Tid,
    probes::elf::{ElfError, Library},
};

/// How far around its usual place the slot of a thread is looked for, in bytes.
const SEARCHED: i64 = 0x800;
/// From a robust list to the first of a thread's slots in glibc, on both machines; and bytes of a slot.
const FIRST_SLOT: i64 = 0x30;
const SLOT_BYTES: i64 = 16;
/// glibc keeps so many slots in the thread itself; Python's is among the first.
const SLOTS: u32 = 32;
/// Threads and frames looked at, at most.
const MOST_THREADS: usize = 4096;
const MOST_FRAMES: usize = 4096;
/// A program that runs changes its frames while they are read: how often that is tried.
const ATTEMPTS: usize = 50;

/// Why there are no Python stacks of a process.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error("CPython {0} is not among the known versions, 3.8 to 3.13")]
    Version(String),
    #[error("its free-threaded build of CPython {0} keeps stacks elsewhere")]
    FreeThreaded(String),
    #[error("{0} does not tell its version, and neither does its name")]
    NoVersion(String),
    #[error("{file} has no {symbol}: it is no CPython that is known")]
    NoSymbol { file: String, symbol: &'static str },
    #[error(transparent)]
    Elf(#[from] ElfError),
    #[error("its memory can not be read: {0}")]
    Unreadable(&'static str),
    #[error("CPython {version} was found, but not where its threads keep their state: {what}")]
    Threads { version: String, what: &'static str },
    #[error("CPython {version} was found, but its frames do not look as they should: {what}")]
    Frames { version: String, what: &'static str },
}

/// What a look at a process brought.
#[derive(Debug)]
pub enum Found {
    /// It has no interpreter (yet).
    None,
    /// It has one that is not ready, or in no function: look again later.
    NotReady,
    Ready(Box<Interpreter>),
}

/// A process's interpreter.
#[derive(Debug, Clone)]
pub struct Interpreter {
    /// `3.11.7`; without the last part where the interpreter does not tell it.
    pub version: String,
    pub offsets: Offsets,
    pub types: Types,
    pub main_thread: u64,
    /// From a robust list to the slot with the thread's state.
    pub slot: i64,
}

impl Interpreter {
    pub fn find(process: &Process) -> Result<Found, Refusal> {
        let Ok(files) = process.mapped_files() else { return Ok(Found::None) };
        let Some((file, named)) = candidate(&files) else { return Ok(Found::None) };
        let path = crate::text::sanitize(file.path.as_os_str().as_encoded_bytes()).into_owned();
        let Ok(opened) = process.open_mapped(file) else {
            return Err(Refusal::Unreadable("its interpreter's file can not be opened"));
        };
        let library = match Library::open(opened, &path) {
            Err(_) if named.minor.is_none() => return Ok(Found::None),
            library => library?,
        };
        let Some(bias) = file.start().and_then(|start| library.bias(start, file.offset)) else {
            return Err(Refusal::Unreadable("it is not known where its interpreter is loaded"));
        };
        let address = |symbol: &'static str| -> Result<u64, Refusal> {
            let found = library.variable(symbol)?;
            found.map(|at| at.wrapping_add(bias)).ok_or(Refusal::NoSymbol { file: path.clone(), symbol })
        };
        let runtime = match address("_PyRuntime") {
            // An executable that only starts what is in libpython.
            Err(Refusal::NoSymbol { .. }) if named.is_program => return Ok(Found::None),
            other => other?,
        };
        let memory = Memory(process.tgid);
        let word = match address("Py_Version") {
            Ok(at) => half_at(&memory.bytes::<4>(at).ok_or(Refusal::Unreadable("Py_Version"))?, 0),
            Err(_) => None,
        };
        let (version, minor) = match (word, named.minor) {
            (Some(word), _) => version(word),
            (None, Some(minor)) => (format!("3.{minor}"), Some(minor)),
            (None, None) => return Err(Refusal::NoVersion(path)),
        };
        let offsets = minor
            .and_then(|minor| Offsets::of(minor, library.arch()))
            .ok_or_else(|| Refusal::Version(version.clone()))?;
        if minor >= Some(13) && is_free_threaded(memory, runtime) {
            return Err(Refusal::FreeThreaded(version));
        }
        let types = Types {
            code: address("PyCode_Type")?,
            text: address("PyUnicode_Type")?,
            bytes: address("PyBytes_Type")?,
        };
        calibrate(process, version, offsets, types, runtime)
    }

    /// What the BPF programs need.
    pub fn for_programs(&self, salt: u64) -> wire::Interpreter {
        let offsets = &self.offsets;
        wire::Interpreter {
            salt,
            main_thread: self.main_thread,
            slot: self.slot,
            instruction_mask: match offsets.in_frame.position {
                super::offsets::Position::Index(_) => u32::MAX.into(),
                super::offsets::Position::Address => u64::MAX,
            },
            frame: offsets.frame,
            frame_of_cframe: offsets.frame_of_cframe,
            frame_bytes: offsets.in_frame.bytes,
            code: offsets.in_frame.code,
            previous: offsets.in_frame.previous,
            instruction: offsets.in_frame.instruction,
            owner: offsets.in_frame.owner.unwrap_or(0),
            owner_mask: if offsets.in_frame.owner.is_some() { 7 } else { 0 },
            identity: offsets.in_code.filename,
            identity_bytes: offsets.in_code.identity_bytes,
            ..wire::Interpreter::default()
        }
    }
}

struct Named {
    minor: Option<u8>,
    is_program: bool,
}

/// The file that may be the interpreter: the library before the program, which may only be its starter.
fn candidate(files: &[MappedFile]) -> Option<(&MappedFile, Named)> {
    let named = |prefix: &str| {
        files.iter().find_map(|file| {
            let name = file.path.file_name()?.to_str()?;
            let rest = name.strip_prefix(prefix)?;
            let minor = rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok();
            Some((file, minor))
        })
    };
    if let Some((file, minor)) = named("libpython3.") {
        return Some((file, Named { minor, is_program: false }));
    }
    if let Some((file, minor)) = named("python3.") {
        return Some((file, Named { minor, is_program: true }));
    }
    // A program may have any name. What is mapped first is the program.
    files.first().map(|file| (file, Named { minor: None, is_program: true }))
}

/// By the number that CPython 3.11 and later have in memory.
fn version(word: u32) -> (String, Option<u8>) {
    let [_, micro, minor, major] = word.to_le_bytes();
    (format!("{major}.{minor}.{micro}"), (major == 3).then_some(minor))
}

/// The table for debuggers at the head of the runtime of 3.13 tells.
fn is_free_threaded(memory: Memory, runtime: u64) -> bool {
    memory
        .bytes::<24>(runtime)
        .is_none_or(|head| !head.starts_with(b"xdebugpy") || word_at(&head, 16) != Some(0))
}

/// Finds where threads keep their state, and checks that all that is known of this version holds here.
pub(super) fn calibrate(
    process: &Process,
    version: String,
    offsets: Offsets,
    types: Types,
    runtime: u64,
) -> Result<Found, Refusal> {
    let memory = Memory(process.tgid);
    let tss: [u8; 8] =
        memory.bytes(runtime + u64::from(offsets.tss)).ok_or(Refusal::Unreadable("its runtime's head"))?;
    let threads_are_wrong = |what| Err(Refusal::Threads { version: version.clone(), what });
    let key = match (half_at(&tss, 0), half_at(&tss, 4)) {
        (Some(0), Some(_)) => return Ok(Found::NotReady),
        (Some(1), Some(key)) if key < SLOTS => key,
        _ => return threads_are_wrong("what should be the key of their state is none"),
    };
    let Some(main) = memory.word(runtime + u64::from(offsets.main_interpreter)) else {
        return Err(Refusal::Unreadable("its runtime's interpreters"));
    };
    if main == 0 {
        return Ok(Found::NotReady);
    }
    let mut last =
        Refusal::Threads { version: version.clone(), what: "none of them has its state in its slot" };
    for _ in 0..ATTEMPTS {
        let Some(states) = thread_states(memory, &offsets, main) else {
            return threads_are_wrong("the list of threads can not be followed");
        };
        let Some((slot, main_thread)) = slot(process, key, &states) else {
            // A thread that begins or ends may be in one list and not in the other.
            std::thread::sleep(std::time::Duration::from_micros(200));
            continue;
        };
        match states.iter().map(|state| check_frames(memory, &offsets, &types, *state)).collect() {
            Frames::Good => {
                return Ok(Found::Ready(Box::new(Interpreter {
                    version,
                    offsets,
                    types,
                    main_thread,
                    slot,
                })));
            }
            Frames::None => return Ok(Found::NotReady),
            Frames::Bad(what) => last = Refusal::Frames { version: version.clone(), what },
        }
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
    Err(last)
}

/// `PyThreadState`s of an interpreter; `None` when they are not all its own.
fn thread_states(memory: Memory, offsets: &Offsets, interpreter: u64) -> Option<Vec<u64>> {
    let mut states = Vec::new();
    let mut at = memory.word(interpreter + u64::from(offsets.threads))?;
    while at != 0 && states.len() < MOST_THREADS {
        if memory.word(at + u64::from(offsets.interpreter))? != interpreter {
            return None;
        }
        states.push(at);
        at = memory.word(at + u64::from(offsets.next_thread))?;
    }
    (!states.is_empty()).then_some(states)
}

/// Where the slot with the state lies, as seen from a thread's robust list; and the state of the main thread, or 0.
fn slot(process: &Process, key: u32, states: &[u64]) -> Option<(i64, u64)> {
    let memory = Memory(process.tgid);
    let usual = FIRST_SLOT + SLOT_BYTES * i64::from(key) + 8;
    let leader = Tid(process.tgid.0);
    let lists: Vec<(Tid, u64)> =
        process.threads().into_iter().filter_map(|tid| Some((tid, robust_list(tid)?))).collect();
    let state_at = |list: u64, slot: i64| {
        memory.word(list.wrapping_add_signed(slot)).filter(|state| states.contains(state))
    };
    let main_thread = |slot| {
        let list = lists.iter().find(|(tid, _)| *tid == leader)?.1;
        state_at(list, slot)
    };
    if lists.iter().any(|(_, list)| state_at(*list, usual).is_some()) {
        return Some((usual, main_thread(usual).unwrap_or(0)));
    }
    // Another C library than those known.
    let search = |list: u64| (-SEARCHED..SEARCHED).step_by(8).find(|slot| state_at(list, *slot).is_some());
    let mut places = lists.iter().filter_map(|(_, list)| search(*list));
    let found = places.next()?;
    Some((found, main_thread(found).unwrap_or(0)))
}

/// The list that glibc registers with the kernel for each thread.
pub fn robust_list(tid: Tid) -> Option<u64> {
    let (mut head, mut length) = (0u64, 0usize);
    // SAFETY: the kernel writes a pointer and a length to where these are.
    let result = unsafe { libc::syscall(libc::SYS_get_robust_list, tid.0, &raw mut head, &raw mut length) };
    (result == 0 && head != 0).then_some(head)
}

/// What the frames of threads look like.
enum Frames {
    Good,
    /// No thread is in a Python function.
    None,
    Bad(&'static str),
}

impl FromIterator<Frames> for Frames {
    fn from_iter<T: IntoIterator<Item = Self>>(threads: T) -> Self {
        threads.into_iter().fold(Frames::None, |all, one| match (all, one) {
            (Frames::Good, _) | (_, Frames::Good) => Frames::Good,
            (Frames::Bad(what), _) | (_, Frames::Bad(what)) => Frames::Bad(what),
            (Frames::None, Frames::None) => Frames::None,
        })
    }
}

/// Follows the frames of a thread to the outermost one.
fn check_frames(memory: Memory, offsets: &Offsets, types: &Types, state: u64) -> Frames {
    const UNREADABLE: Frames = Frames::Bad("they can not be followed");
    let Some(mut frame) = memory.word(state + u64::from(offsets.frame)) else { return UNREADABLE };
    if frame != 0 && offsets.frame_of_cframe != wire::NO_OFFSET {
        match memory.word(frame + u64::from(offsets.frame_of_cframe)) {
            Some(inner) => frame = inner,
            None => return UNREADABLE,
        }
    }
    if frame == 0 {
        return Frames::None;
    }
    let in_frame = &offsets.in_frame;
    for _ in 0..MOST_FRAMES {
        let mut bytes = [0; wire::FRAME_BYTES];
        let Some(bytes) = bytes.get_mut(..in_frame.bytes.into()) else { return UNREADABLE };
        if memory.read(frame, bytes).is_none() {
            return UNREADABLE;
        }
        let (Some(code), Some(previous)) = (word_at(bytes, in_frame.code), word_at(bytes, in_frame.previous))
        else {
            return UNREADABLE;
        };
        let byte = |at: u16| u64::from(bytes.get(usize::from(at)).copied().unwrap_or(u8::MAX));
        let owner = in_frame.owner.map(byte);
        let is_python = owner.is_none_or(|owner| owner < OWNED_BY_C);
        if owner.is_some_and(|owner| owner > OWNED_BY_C) {
            return Frames::Bad("they have no known owner");
        }
        let head: Option<[u8; 16]> = memory.bytes(code);
        if is_python && !head.is_some_and(|head| is_alive(&head, types.code)) {
            return Frames::Bad("they do not lead to code");
        }
        if previous == 0 {
            // The outermost frame tells whether the owner is read at the right place.
            let entered_from_c = match (in_frame.is_entry, owner) {
                (Some(at), _) => byte(at) == 1,
                (None, Some(owner)) => owner == OWNED_BY_C,
                (None, None) => true,
            };
            return if entered_from_c { Frames::Good } else { Frames::Bad("the outermost one is none") };
        }
        frame = previous;
    }
    Frames::Bad("they have no end")
}

/// Takes a frame's word apart: address of the code object, owner.
pub fn code_and_owner(frame: &RawFrame) -> (u64, u64) {
    (frame.code & !7, frame.code & 7)
}
