//! Finding a process's Python interpreter, and making sure that it is understood before anything is believed of it.

use memscope_ebpf::{self as wire, RawFrame};

use super::{
    code::{Types, is_alive},
    memory::{Memory, Read, half_at, word_at},
    offsets::{OWNED_BY_C, Offsets, Position},
    threads::{listed_by, robust_lists, thread_id},
};
use crate::{
    attach::process::{MappedFile, Process},
    model::Tid,
    probes::elf::{ElfError, Library},
};

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
    /// Where it keeps the number of the slot, and what was there.
    key: (u64, [u8; 8]),
}

/// What the file of an interpreter tells.
#[derive(Clone)]
struct Located {
    version: String,
    offsets: Offsets,
    types: Types,
    /// Address of `_PyRuntime`.
    runtime: u64,
}

impl Located {
    /// `None`: the process has no interpreter.
    fn find(process: &Process) -> Result<Option<Self>, Refusal> {
        let Ok(files) = process.mapped_files() else { return Ok(None) };
        let Some((file, named)) = candidate(&files) else { return Ok(None) };
        let path = crate::text::sanitize(file.path.as_os_str().as_encoded_bytes()).into_owned();
        let Ok(opened) = process.open_mapped(file) else {
            return Err(Refusal::Unreadable("its interpreter's file can not be opened"));
        };
        let library = match Library::open(opened, &path) {
            Err(_) if named.minor.is_none() => return Ok(None),
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
            Err(Refusal::NoSymbol { .. }) if named.is_program => return Ok(None),
            other => other?,
        };
        let memory = &memory_of(process)?;
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
        Ok(Some(Self { version, offsets, types, runtime }))
    }
}

impl Interpreter {
    pub fn find(process: &Process) -> Result<Found, Refusal> {
        match Located::find(process)? {
            Some(located) => calibrate(process, located),
            None => Ok(Found::None),
        }
    }

    /// Whether it still has its threads' states in the same slot: in a forked process it is given one anew.
    pub fn has_same_slot(&self, memory: &impl Read) -> bool {
        let (at, key) = self.key;
        memory.bytes(at) == Some(key)
    }

    /// What the BPF programs need.
    pub fn for_programs(&self, salt: u64) -> wire::Interpreter {
        let offsets = &self.offsets;
        wire::Interpreter {
            salt,
            main_thread: self.main_thread,
            slot: self.slot,
            instruction_mask: match offsets.in_frame.position {
                Position::Index(_) => u32::MAX.into(),
                Position::Address => u64::MAX,
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
            code_bytes: offsets.in_code.bytes,
            ascii: offsets.in_str.ascii,
            other: offsets.in_str.other,
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
fn is_free_threaded(memory: &Memory, runtime: u64) -> bool {
    memory
        .bytes::<24>(runtime)
        .is_none_or(|head| !head.starts_with(b"xdebugpy") || word_at(&head, 16) != Some(0))
}

/// Finds where threads keep their state, and checks that all that is known of this version holds here.
fn calibrate(process: &Process, located: Located) -> Result<Found, Refusal> {
    let Located { version, offsets, types, runtime } = located;
    let memory = &memory_of(process)?;
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
        let Some((slot, main_thread)) = slot(process, memory, key, &states) else {
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
                    key: (runtime + u64::from(offsets.tss), tss),
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
fn thread_states(memory: &Memory, offsets: &Offsets, interpreter: u64) -> Option<Vec<u64>> {
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

fn memory_of(process: &Process) -> Result<Memory, Refusal> {
    Memory::of(process.proc(), process.tgid)
        .map_err(|_| Refusal::Unreadable("its /proc/PID/mem can not be opened"))
}

/// Where the slot with the state lies, as seen from a thread's robust list; and the state of the main thread, or 0.
fn slot(process: &Process, memory: &Memory, key: u32, states: &[u64]) -> Option<(i64, u64)> {
    let slot = FIRST_SLOT + SLOT_BYTES * i64::from(key) + 8;
    let state_at =
        |list: u64| memory.word(list.wrapping_add_signed(slot)).filter(|state| states.contains(state));
    if !process.proc().has_own_numbers() {
        let found: Vec<_> = states
            .iter()
            .filter_map(|state| {
                let list = listed_by(memory, *state, |list| state_at(list) == Some(*state))?;
                Some((list, *state))
            })
            .collect();
        let own_pid = process.own_pid.unwrap_or(process.tgid.0);
        let is_main = |(list, _): &&(u64, u64)| thread_id(memory, *list) == Some(own_pid);
        let main_thread = found.iter().find(is_main).map_or(0, |(_, state)| *state);
        return (!found.is_empty()).then_some((slot, main_thread));
    }
    let leader = Tid(process.tgid.0);
    let lists = robust_lists(process);
    let main_thread = || state_at(lists.iter().find(|(tid, _)| *tid == leader)?.1);
    // Found elsewhere, it would be a guess: only this slot holds the state whether the thread has the GIL or not.
    lists.iter().any(|(_, list)| state_at(*list).is_some()).then(|| (slot, main_thread().unwrap_or(0)))
}

/// What the frames of threads look like.
enum Frames {
    Good,
    /// No thread is in a Python function.
    None,
    Bad(&'static str),
}

impl FromIterator<Frames> for Frames {
    /// One thread at a time changes its frames, and may be caught at it.
    fn from_iter<T: IntoIterator<Item = Self>>(threads: T) -> Self {
        const GOOD_FOR_A_BAD_ONE: usize = 3;
        let (mut good, mut bad, mut last) = (0, 0, None);
        for thread in threads {
            match thread {
                Frames::Good => good += 1,
                Frames::None => {}
                Frames::Bad(what) => {
                    bad += 1;
                    last = Some(what);
                }
            }
        }
        match last {
            Some(what) if good < GOOD_FOR_A_BAD_ONE * bad => Frames::Bad(what),
            _ if good > 0 => Frames::Good,
            _ => Frames::None,
        }
    }
}

/// Follows the frames of a thread to the outermost one.
fn check_frames(memory: &Memory, offsets: &Offsets, types: &Types, state: u64) -> Frames {
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
        let head: Option<[u8; 24]> = memory.bytes(code);
        if is_python && !head.is_some_and(|head| is_alive(&head, types.code)) {
            return Frames::Bad("they do not lead to code");
        }
        let instruction = word_at(bytes, in_frame.instruction);
        if is_python && !instruction.is_some_and(|at| is_in_code(offsets, code, head.as_ref(), at)) {
            return Frames::Bad("their instructions are not in their code");
        }
        if previous == 0 {
            // The outermost frame tells whether the owner is read at the right place.
            let entered_from_c = match in_frame.owner {
                Some(at) if in_frame.has_entry_mark => byte(at.wrapping_sub(1)) == 1,
                Some(_) => owner == Some(OWNED_BY_C),
                None => true,
            };
            return if entered_from_c { Frames::Good } else { Frames::Bad("the outermost one is none") };
        }
        frame = previous;
    }
    Frames::Bad("they have no end")
}

fn is_in_code(offsets: &Offsets, code: u64, head: Option<&[u8; 24]>, instruction: u64) -> bool {
    /// No function has more bytes of instructions.
    const MOST: u64 = 1 << 24;
    match offsets.in_frame.position {
        Position::Index(unit) => i64::from(instruction as u32 as i32) * i64::from(unit) < MOST as i64,
        Position::Address => {
            // The object's size is in instructions; before the first one, the frame has not begun.
            let units = head.and_then(|head| word_at(head, 16)).unwrap_or(0);
            let first = code.wrapping_add(offsets.in_code.instructions.into()).wrapping_sub(2);
            units < MOST && instruction.wrapping_sub(first) <= 2 * units
        }
    }
}

/// Takes a frame's word apart: address of the code object, owner.
pub fn code_and_owner(frame: &RawFrame) -> (u64, u64) {
    (frame.code & !7, frame.code & 7)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        path::{Path, PathBuf},
        process::{Child, Command, Stdio},
    };

    use super::*;
    use crate::{attach::proc::Proc, model::Tgid};

    struct Running {
        child: Child,
        minor: u8,
    }

    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    /// A sleeping program of each known version that this machine has, two of its threads in functions.
    fn programs() -> Vec<Running> {
        const SCRIPT: &str = "import threading, time
def sleep():
    print('ready', flush=True)
    time.sleep(60)
threading.Thread(target=sleep, daemon=True).start()
sleep()";
        let mut places: Vec<PathBuf> = vec!["/usr/bin".into(), "/usr/local/bin".into()];
        let versions = std::env::var_os("HOME").map(|home| Path::new(&home).join(".pyenv/versions"));
        let entries = versions.and_then(|versions| versions.read_dir().ok()).into_iter().flatten().flatten();
        places.extend(entries.map(|entry| entry.path().join("bin")));
        let mut programs = Vec::new();
        for (place, minor) in places.iter().flat_map(|place| (8..=13).map(move |minor| (place, minor))) {
            let mut command = Command::new(place.join(format!("python3.{minor}")));
            let Ok(mut child) =
                command.args(["-c", SCRIPT]).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()
            else {
                continue;
            };
            let lines = child.stdout.take().map(|out| BufReader::new(out).lines().take(2).count());
            let program = Running { child, minor };
            if lines == Some(2) {
                programs.push(program);
            }
        }
        if programs.is_empty() {
            eprintln!("SKIPPED: there is no python3.8 to python3.13 in {places:?}");
        }
        programs
    }

    fn located(program: &Running) -> Option<(Process, Located)> {
        let process = Process::open(&Proc::default(), Tgid(program.child.id())).expect("a process");
        match Located::find(&process) {
            Ok(located) => Some((process, located.expect("an interpreter"))),
            Err(Refusal::Unreadable(_)) => {
                eprintln!("SKIPPED: the memory of other processes can not be read");
                None
            }
            Err(e) => panic!("3.{}: {e}", program.minor),
        }
    }

    #[test]
    fn known_versions_are_understood() {
        for program in programs() {
            let Some((process, located)) = located(&program) else { return };
            assert!(located.version.starts_with(&format!("3.{}", program.minor)), "{}", located.version);
            match calibrate(&process, located) {
                Ok(Found::Ready(interpreter)) => assert_ne!(interpreter.main_thread, 0),
                other => panic!("3.{}: {other:?}", program.minor),
            }
        }
    }

    /// From another PID namespace the kernel does not say where threads have their lists: they are found all the same.
    #[test]
    fn lists_are_found_without_the_kernel() {
        for program in programs() {
            let Some((process, located)) = located(&program) else { return };
            let Ok(Found::Ready(found)) = calibrate(&process, located.clone()) else {
                panic!("{}", located.version)
            };
            let memory = Memory::of(process.proc(), process.tgid).expect("memory");
            let main = memory.word(located.runtime + u64::from(located.offsets.main_interpreter));
            let states = thread_states(&memory, &located.offsets, main.expect("an interpreter"));
            let states = states.expect("threads");
            let mut lists: Vec<_> = states
                .iter()
                .filter_map(|state| {
                    let holds = |list: u64| memory.word(list.wrapping_add_signed(found.slot)) == Some(*state);
                    let list = listed_by(&memory, *state, holds)?;
                    Some((Tid(thread_id(&memory, list)?), list))
                })
                .collect();
            lists.sort_unstable();
            let mut known = robust_lists(&process);
            known.sort_unstable();
            assert!(lists.len() == 2 && lists == known, "{}: {lists:x?} {known:x?}", located.version);
        }
    }

    /// What is off by a little must be refused, not guessed from.
    #[test]
    fn wrong_offsets_are_refused() {
        for program in programs() {
            let Some((process, located)) = located(&program) else { return };
            let right = match calibrate(&process, located.clone()) {
                Ok(Found::Ready(found)) => (found.for_programs(0), found.types),
                other => panic!("{}: {other:?}", located.version),
            };
            let wrong = |what: &str, change: &dyn Fn(&mut Located)| {
                let mut changed = located.clone();
                change(&mut changed);
                // By chance, another way may lead to the same.
                if let Ok(Found::Ready(found)) = calibrate(&process, changed)
                    && (found.for_programs(0), found.types) != right
                {
                    panic!("{} with another {what} was believed: {found:?}", located.version);
                }
            };
            for by in [-8i32, -4, 4, 8] {
                wrong("key", &|l| l.offsets.tss = l.offsets.tss.wrapping_add_signed(by));
            }
            for by in [-8i16, 8] {
                let moved = |offset: u16| offset.wrapping_add_signed(by);
                let further = |offset: u32| offset.wrapping_add_signed(by.into());
                wrong("list of threads", &|l| l.offsets.threads = further(l.offsets.threads));
                wrong("interpreter", &|l| l.offsets.interpreter = moved(l.offsets.interpreter));
                wrong("frame", &|l| l.offsets.frame = moved(l.offsets.frame));
                wrong("code", &|l| l.offsets.in_frame.code = moved(l.offsets.in_frame.code));
                wrong("previous frame", &|l| {
                    l.offsets.in_frame.previous = moved(l.offsets.in_frame.previous)
                });
                wrong("type of code", &|l| l.types.code = l.types.code.wrapping_add_signed(by.into()));
                if located.offsets.in_frame.position == Position::Address {
                    let at = |l: &mut Located| {
                        l.offsets.in_frame.instruction = moved(l.offsets.in_frame.instruction)
                    };
                    wrong("instruction", &at);
                }
            }
            for by in [-1i16, 1] {
                if let Some(owner) = located.offsets.in_frame.owner {
                    wrong("owner", &|l| l.offsets.in_frame.owner = Some(owner.wrapping_add_signed(by)));
                }
            }
            for minor in (8..=13).filter(|minor| *minor != program.minor) {
                // What differs between these two is only how lines are counted.
                if matches!((minor, program.minor), (9, 10) | (10, 9)) {
                    continue;
                }
                let arch = if cfg!(target_arch = "aarch64") {
                    crate::probes::elf::Arch::Aarch64
                } else {
                    crate::probes::elf::Arch::X86_64
                };
                let offsets = Offsets::of(minor, arch).expect("a known version");
                wrong("version", &|l| l.offsets = offsets);
            }
        }
    }
}
