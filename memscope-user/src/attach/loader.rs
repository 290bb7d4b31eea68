//! Loads the BPF object: a small loader over aya-obj, because aya 0.14 can neither load programs for
//! `uprobe_multi` nor give each site its own copy of a program on kernels without attach cookies.

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap as StdHashMap},
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use aya::maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, RingBuf};
use aya_obj::generated::bpf_insn;
use memscope_ebpf::{
    Calls, Counters, Interpreter, MAX_THREADS, NativeConfig, ProcessConfig, Site, Thread, Within,
};

use super::{kernel, privilege, sys};

/// The object of `cargo xtask build-ebpf`, or nothing where it was not built.
static OBJECT: &[u8] = {
    /// The ELF reader wants its input aligned.
    #[repr(C, align(8))]
    struct Aligned<T: ?Sized>(T);
    static ALIGNED: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/memscope.bpf.o")));
    &ALIGNED.0
};

/// `bpf_get_attach_cookie`.
const ATTACH_COOKIE: i32 = 174;
/// `bpf_probe_read_kernel`.
const PROBE_READ_KERNEL: i32 = 113;
/// Room beside the slots, for threads whose slot is another's.
const FEW_THREADS: u32 = 4096;

#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(
        "this build of memscope-trace carries no BPF programs; run `cargo xtask build-ebpf`, then build again"
    )]
    NotBuilt,
    #[error(
        "the BPF object in this build can not be read ({0}); run `cargo xtask build-ebpf`, then build again"
    )]
    Object(String),
    #[error("the kernel does not let memscope-trace use BPF: {source}; {}", advice(source))]
    Forbidden { source: io::Error },
    #[error("can not create the BPF map {name}: {source}; {}", advice(source))]
    Map { name: String, source: io::Error },
    #[error("can not use the BPF map {name}: {source}")]
    UseMap { name: &'static str, source: MapError },
    #[error("the kernel refuses the BPF program {program}: {source}; {}{}", advice(source), verifier(log))]
    Program { program: &'static str, source: io::Error, log: String },
}

fn advice(error: &io::Error) -> Cow<'static, str> {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => privilege::why_refused().into(),
        Some(libc::ENOSYS) => "this kernel is built without BPF".into(),
        Some(libc::ENOMEM) => "the host's memory is used up: try a smaller --ring-size".into(),
        _ => {
            "it takes Linux 5.10 or later with BPF and uprobes (`memscope-trace check` looks for them)".into()
        }
    }
}

fn verifier(log: &str) -> String {
    let tail: Vec<_> = log.lines().rev().take(12).collect();
    if tail.is_empty() {
        String::new()
    } else {
        format!("\nthe verifier says: {}", tail.into_iter().rev().collect::<Vec<_>>().join("\n  "))
    }
}

/// The programs of the object, by what runs where, in the order in which they are attached: returns first, so that
/// each call that is counted at its entry is reported at its return. Of two at one function the kernel runs the later one
/// first: a launch or an operator is named before its arguments are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Program {
    Leave,
    LeaveStack,
    LeaveNative,
    Value,
    Arguments,
    Pack,
    Enter,
    Annotate,
    Keep,
    KeepCaller,
    KeepStruct,
    KeepStructCaller,
    Name,
    Mark,
    Report,
    ReportStack,
    ReportNative,
    Tensor,
    Enqueue,
    Run,
    Mapped,
    Exec,
    Fork,
    Exit,
    Empty,
    EmptyReturn,
}

impl Program {
    fn name(self) -> &'static str {
        match self {
            Self::Enter => "enter",
            Self::Annotate => "annotate",
            Self::Keep => "keep",
            Self::KeepCaller => "keep_caller",
            Self::KeepStruct => "keep_struct",
            Self::KeepStructCaller => "keep_struct_caller",
            Self::Leave => "leave",
            Self::LeaveStack => "leave_stack",
            Self::LeaveNative => "leave_native",
            Self::Value => "value",
            Self::Name => "name",
            Self::Mark => "mark",
            Self::Report => "report",
            Self::ReportStack => "report_stack",
            Self::ReportNative => "report_native",
            Self::Tensor => "tensor",
            Self::Enqueue => "enqueue",
            Self::Run => "run",
            Self::Arguments => "arguments",
            Self::Pack => "pack",
            Self::Mapped => "mapped",
            Self::Exec => "exec",
            Self::Fork => "fork",
            Self::Exit => "exit",
            Self::Empty => "empty",
            Self::EmptyReturn => "empty_return",
        }
    }

    pub fn on_return(self) -> bool {
        matches!(self, Self::Leave | Self::LeaveStack | Self::LeaveNative | Self::Value | Self::EmptyReturn)
    }

    /// The program that does nothing in place of this one.
    pub fn empty(self) -> Self {
        if self.on_return() { Self::EmptyReturn } else { Self::Empty }
    }
}

/// How a program will be attached, which the kernel wants to know when it loads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Flavour {
    UprobeMulti,
    /// A perf event with a cookie.
    PerfCookie,
    /// A perf event on a kernel without cookies: a copy of the program for this site alone.
    PerfSite(u32),
    RawTracepoint,
}

/// The loaded object: its maps, and its programs as they are asked for.
pub struct Loader {
    instructions: StdHashMap<String, Vec<bpf_insn>>,
    programs: BTreeMap<(Program, Flavour), OwnedFd>,
    spares_kernel_memory: bool,
    /// Threads have slots.
    slots: bool,
    /// The maps that programs use among themselves: each is there as long as its descriptor.
    _own_maps: Vec<MapData>,
}

/// The maps, typed.
pub struct Maps {
    pub records: RingBuf<MapData>,
    pub sites: Array<MapData, Site>,
    pub counters: PerCpuArray<MapData, Counters>,
    pub targets: HashMap<MapData, u32, u32>,
    pub calls_by_thread: HashMap<MapData, u64, Calls>,
    pub within: HashMap<MapData, Within, u8>,
    pub interpreters: HashMap<MapData, u32, Interpreter>,
    pub robust_lists: HashMap<MapData, u32, u64>,
    pub threads: HashMap<MapData, u64, Thread>,
    pub native: Array<MapData, NativeConfig>,
    pub processes: Array<MapData, ProcessConfig>,
    pub endings: HashMap<MapData, u32, u32>,
}

impl Loader {
    /// Creates the maps and readies the programs. `ring_bytes` is rounded up to a power of two of at least a page;
    /// `threads`: keep the calls of so many in a map, as on kernels without compare-and-swap.
    pub fn new(ring_bytes: u32, threads: Option<u32>) -> Result<(Self, Maps), LoadError> {
        if OBJECT.is_empty() {
            return Err(LoadError::NotBuilt);
        }
        let broken = |e: &dyn std::fmt::Display| LoadError::Object(e.to_string());
        let mut object = aya_obj::Object::parse(OBJECT).map_err(|e| broken(&e))?;
        let slots = threads.is_none() && kernel::compare_and_swap();
        tracing::debug!("calls are kept in {}", if slots { "slots" } else { "a map" });
        let mut definitions = StdHashMap::new();
        let mut maps: StdHashMap<String, MapData> = StdHashMap::new();
        for (name, mut map) in object.maps.drain() {
            if name == "RECORDS" {
                map.set_max_entries(ring_bytes.next_power_of_two().max(64 * 1024));
            }
            if name == "CALLS" && !slots {
                // The programs look for one and do without.
                map.set_max_entries(1);
            }
            if name == "CALLS_BY_THREAD" {
                map.set_max_entries(threads.unwrap_or(if slots { FEW_THREADS } else { MAX_THREADS }));
            }
            definitions.insert(name.clone(), map.clone());
            let data = MapData::create(map, &name, None).map_err(|e| match e {
                // Whichever map is the first.
                MapError::CreateError { io_error, .. }
                    if io_error.kind() == io::ErrorKind::PermissionDenied =>
                {
                    LoadError::Forbidden { source: io_error }
                }
                MapError::CreateError { io_error, .. } => {
                    LoadError::Map { name: name.clone(), source: io_error }
                }
                e => LoadError::Map { name: name.clone(), source: io::Error::other(e) },
            })?;
            maps.insert(name, data);
        }
        let sections = object.functions.keys().map(|(section, _)| *section).collect();
        object
            .relocate_maps(
                definitions
                    .iter()
                    .map(|(name, map)| (name.as_str(), maps[name].fd().as_fd().as_raw_fd(), map)),
                &sections,
            )
            .map_err(|e| broken(&e))?;
        object.relocate_calls(&sections).map_err(|e| broken(&e))?;
        let instructions = object
            .programs
            .iter()
            .filter_map(|(name, program)| {
                let function = object.functions.get(&program.function_key())?;
                Some((name.clone(), function.instructions.clone()))
            })
            .collect();
        let typed = Maps {
            records: take(&mut maps, "RECORDS", Map::RingBuf)?,
            sites: take(&mut maps, "SITES", Map::Array)?,
            counters: take(&mut maps, "COUNTERS", Map::PerCpuArray)?,
            targets: take(&mut maps, "TARGETS", Map::HashMap)?,
            calls_by_thread: take(&mut maps, "CALLS_BY_THREAD", Map::HashMap)?,
            within: take(&mut maps, "WITHIN", Map::HashMap)?,
            interpreters: take(&mut maps, "INTERPRETERS", Map::HashMap)?,
            robust_lists: take(&mut maps, "ROBUST_LISTS", Map::HashMap)?,
            threads: take(&mut maps, "THREADS", Map::HashMap)?,
            native: take(&mut maps, "NATIVE", Map::Array)?,
            processes: take(&mut maps, "PROCESSES", Map::Array)?,
            endings: take(&mut maps, "ENDINGS", Map::HashMap)?,
        };
        let own_maps = maps.into_values().collect();
        Ok((
            Self {
                instructions,
                programs: BTreeMap::new(),
                spares_kernel_memory: false,
                slots,
                _own_maps: own_maps,
            },
            typed,
        ))
    }

    /// Whether programs loaded from now on do without the kernel's own memory: for a kernel that lets none read it.
    pub fn spare_kernel_memory(&mut self, spare: bool) {
        self.spares_kernel_memory = spare;
    }

    pub fn spares_kernel_memory(&self) -> bool {
        self.spares_kernel_memory
    }

    /// The program, loaded for this way of attaching.
    pub fn program(&mut self, program: Program, flavour: Flavour) -> Result<BorrowedFd<'_>, LoadError> {
        let key = (program, flavour);
        if !self.programs.contains_key(&key) {
            let fd = self.load(program, flavour)?;
            self.programs.insert(key, fd);
        }
        Ok(self.programs[&key].as_fd())
    }

    fn load(&self, program: Program, flavour: Flavour) -> Result<OwnedFd, LoadError> {
        let mut instructions = self
            .instructions
            .get(program.name())
            .cloned()
            .ok_or_else(|| LoadError::Object(format!("it has no program `{}`", program.name())))?;
        if let Flavour::PerfSite(site) = flavour {
            replace_call(&mut instructions, ATTACH_COOKIE, site as i32);
        }
        if !self.slots {
            no_compare_and_swap(&mut instructions);
        }
        if self.spares_kernel_memory {
            replace_call(&mut instructions, PROBE_READ_KERNEL, -libc::EPERM);
        }
        let (prog_type, attach_type) = match flavour {
            Flavour::UprobeMulti => (sys::PROG_TYPE_KPROBE, sys::TRACE_UPROBE_MULTI),
            Flavour::PerfCookie | Flavour::PerfSite(_) => (sys::PROG_TYPE_KPROBE, 0),
            Flavour::RawTracepoint => (sys::PROG_TYPE_RAW_TRACEPOINT, 0),
        };
        sys::prog_load(prog_type, attach_type, &instructions, program.name())
            .map_err(|(source, log)| LoadError::Program { program: program.name(), source, log })
    }
}

fn take<T>(
    maps: &mut StdHashMap<String, MapData>,
    name: &'static str,
    variant: fn(MapData) -> Map,
) -> Result<T, LoadError>
where
    T: TryFrom<Map, Error = MapError>,
{
    let data = maps.remove(name).ok_or_else(|| LoadError::Object(format!("it has no map `{name}`")))?;
    T::try_from(variant(data)).map_err(|source| LoadError::UseMap { name, source })
}

/// `r0 = value`, in place of an instruction.
fn load_result(instruction: &mut bpf_insn, value: i32) {
    const MOV64_IMM: u8 = 0xb7;
    *instruction = bpf_insn { code: MOV64_IMM, off: 0, imm: value, ..*instruction };
    instruction.set_dst_reg(0);
    instruction.set_src_reg(0);
}

/// Turns each call of a helper into `r0 = value`.
fn replace_call(instructions: &mut [bpf_insn], helper: i32, value: i32) {
    const CALL: u8 = 0x85;
    for instruction in instructions {
        if instruction.code == CALL && instruction.src_reg() == 0 && instruction.imm == helper {
            load_result(instruction, value);
        }
    }
}

/// Turns each compare-and-swap into one that finds another value.
fn no_compare_and_swap(instructions: &mut [bpf_insn]) {
    const ATOMIC64: u8 = 0xdb;
    const CMPXCHG: i32 = 0xf1;
    for instruction in instructions {
        if instruction.code == ATOMIC64 && instruction.imm == CMPXCHG {
            load_result(instruction, -1);
        }
    }
}
