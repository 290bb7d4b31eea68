//! The system calls behind loading and attaching, as far as no crate offers them in the form needed.

use std::{
    ffi::CStr,
    io,
    mem::{size_of, zeroed},
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    path::Path,
};

use aya_obj::generated::{bpf_attr, bpf_cmd, bpf_insn, perf_event_attr};

/// `bpf_attach_type::BPF_TRACE_UPROBE_MULTI`, kernel 6.6.
pub const TRACE_UPROBE_MULTI: u32 = 48;
/// `bpf_attach_type::BPF_PERF_EVENT`, kernel 5.15.
const PERF_EVENT: u32 = 41;
/// `bpf_prog_type`s: `KPROBE` serves uprobes too.
pub const PROG_TYPE_KPROBE: u32 = 2;
pub const PROG_TYPE_RAW_TRACEPOINT: u32 = 17;

const PERF_EVENT_IOC_SET_BPF: libc::c_ulong = 0x4004_2408;
const UPROBE_MULTI_RETURN: u32 = 1;

fn bpf(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<i32> {
    // SAFETY: `attr` is a whole bpf_attr, and the pointers in it live as long as the call.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command as u32, &raw mut *attr, size_of::<bpf_attr>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
}

fn bpf_fd(command: bpf_cmd, attr: &mut bpf_attr) -> io::Result<OwnedFd> {
    // SAFETY: the kernel has just made this descriptor for us.
    bpf(command, attr).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

fn empty_attr() -> bpf_attr {
    // SAFETY: a union of integers, for which the kernel asks for zeroes where nothing is said.
    unsafe { zeroed() }
}

/// Loads a program; on failure the verifier's log comes with the error.
pub fn prog_load(
    prog_type: u32,
    expected_attach_type: u32,
    instructions: &[bpf_insn],
    name: &str,
) -> Result<OwnedFd, (io::Error, String)> {
    const STATISTICS: u32 = 4;
    const STEPS: u32 = 1;
    let mut log = vec![0; 8 * 1024];
    let load = |log: &mut Vec<u8>, level: u32| {
        let mut attr = empty_attr();
        // SAFETY: BPF_PROG_LOAD reads this member of the union.
        let a = unsafe { &mut attr.__bindgen_anon_3 };
        a.prog_type = prog_type;
        a.expected_attach_type = expected_attach_type;
        a.insn_cnt = instructions.len() as u32;
        a.insns = instructions.as_ptr() as u64;
        a.license = c"GPL".as_ptr() as u64;
        for (to, from) in a.prog_name.iter_mut().zip(name.bytes().take(15)) {
            *to = from as _;
        }
        a.log_level = level;
        a.log_buf = log.as_mut_ptr() as u64;
        a.log_size = log.len() as u32;
        bpf_fd(bpf_cmd::BPF_PROG_LOAD, &mut attr)
    };
    match load(&mut log, STATISTICS) {
        Ok(program) => {
            tracing::debug!("{name}: {}", text(&log).trim().replace('\n', ", "));
            Ok(program)
        }
        Err(first) if first.raw_os_error() == Some(libc::EPERM) => Err((first, String::new())),
        Err(first) => {
            // The reason comes last, and kernels before 6.4 cut the end off.
            log.resize(16 * 1024 * 1024 - 1, 0);
            load(&mut log, STEPS).map_err(|_| (first, text(&log)))
        }
    }
}

fn text(log: &[u8]) -> String {
    CStr::from_bytes_until_nul(log).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Makes the smallest map, as a test.
pub fn map_create() -> io::Result<OwnedFd> {
    const ARRAY: u32 = 2;
    let mut attr = empty_attr();
    // SAFETY: BPF_MAP_CREATE reads this member of the union.
    let a = unsafe { &mut attr.__bindgen_anon_1 };
    (a.map_type, a.key_size, a.value_size, a.max_entries) = (ARRAY, 4, 4, 1);
    bpf_fd(bpf_cmd::BPF_MAP_CREATE, &mut attr)
}

/// Runs a program for raw tracepoints here and now (kernel 5.10); what it returned.
pub fn run_raw_tracepoint(program: BorrowedFd<'_>) -> io::Result<u32> {
    let mut attr = empty_attr();
    attr.test.prog_fd = program.as_raw_fd() as u32;
    bpf(bpf_cmd::BPF_PROG_TEST_RUN, &mut attr)?;
    // SAFETY: BPF_PROG_TEST_RUN has written to this member of the union.
    Ok(unsafe { attr.test.retval })
}

/// Attaches a program to many offsets of one file with one link.
pub fn uprobe_multi(
    program: BorrowedFd<'_>,
    path: &CStr,
    offsets: &[u64],
    cookies: &[u64],
    pid: Option<u32>,
    on_return: bool,
) -> io::Result<OwnedFd> {
    debug_assert_eq!(offsets.len(), cookies.len());
    let mut attr = empty_attr();
    // SAFETY: BPF_LINK_CREATE reads these members of the union.
    unsafe {
        let a = &mut attr.link_create;
        a.__bindgen_anon_1.prog_fd = program.as_raw_fd() as u32;
        a.attach_type = TRACE_UPROBE_MULTI;
        let multi = &mut a.__bindgen_anon_3.uprobe_multi;
        multi.path = path.as_ptr() as u64;
        multi.offsets = offsets.as_ptr() as u64;
        multi.cookies = cookies.as_ptr() as u64;
        multi.cnt = offsets.len() as u32;
        multi.flags = if on_return { UPROBE_MULTI_RETURN } else { 0 };
        multi.pid = pid.unwrap_or(0);
    }
    bpf_fd(bpf_cmd::BPF_LINK_CREATE, &mut attr)
}

/// Attaches a program to a raw tracepoint, which needs no tracefs.
pub fn raw_tracepoint(program: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    let mut attr = empty_attr();
    attr.raw_tracepoint.name = name.as_ptr() as u64;
    attr.raw_tracepoint.prog_fd = program.as_raw_fd() as u32;
    bpf_fd(bpf_cmd::BPF_RAW_TRACEPOINT_OPEN, &mut attr)
}

/// A uprobe as a perf event. It is made disabled and stays so: its program runs all the same, and the target's
/// context switches do not pay for it (an enabled one costs each switch some 0.25 µs).
pub struct PerfUprobe {
    event: OwnedFd,
    /// Kernel 5.15: a link, which carries the cookie.
    _link: Option<OwnedFd>,
}

impl PerfUprobe {
    pub fn open(
        pmu: &UprobePmu,
        path: &CStr,
        offset: u64,
        pid: Option<u32>,
        on_return: bool,
    ) -> io::Result<Self> {
        // SAFETY: plain integers and unions of integers.
        let mut attr: perf_event_attr = unsafe { zeroed() };
        attr.size = size_of::<perf_event_attr>() as u32;
        attr.type_ = pmu.pmu_type;
        attr.config = if on_return { 1 << pmu.return_bit } else { 0 };
        attr.__bindgen_anon_3.uprobe_path = path.as_ptr() as u64;
        attr.__bindgen_anon_4.probe_offset = offset;
        attr.set_disabled(1);
        let (pid, cpu) = pid.map_or((-1, 0), |pid| (pid as i32, -1));
        // SAFETY: `attr` and the path live as long as the call.
        let fd = unsafe {
            libc::syscall(libc::SYS_perf_event_open, &raw const attr, pid, cpu, -1, PERF_FLAG_FD_CLOEXEC)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor for us.
        Ok(Self { event: unsafe { OwnedFd::from_raw_fd(fd as i32) }, _link: None })
    }

    /// Runs `program` at the probe with a cookie (kernel 5.15).
    pub fn link(&mut self, program: BorrowedFd<'_>, cookie: u64) -> io::Result<()> {
        let mut attr = empty_attr();
        // SAFETY: BPF_LINK_CREATE reads these members of the union.
        unsafe {
            let a = &mut attr.link_create;
            a.__bindgen_anon_1.prog_fd = program.as_raw_fd() as u32;
            a.__bindgen_anon_2.target_fd = self.event.as_raw_fd() as u32;
            a.attach_type = PERF_EVENT;
            a.__bindgen_anon_3.perf_event.bpf_cookie = cookie;
        }
        self._link = Some(bpf_fd(bpf_cmd::BPF_LINK_CREATE, &mut attr)?);
        Ok(())
    }

    /// Runs `program` at the probe.
    pub fn set_bpf(&mut self, program: BorrowedFd<'_>) -> io::Result<()> {
        // SAFETY: both descriptors are open.
        let result =
            unsafe { libc::ioctl(self.event.as_raw_fd(), PERF_EVENT_IOC_SET_BPF as _, program.as_raw_fd()) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

const PERF_FLAG_FD_CLOEXEC: libc::c_ulong = 8;

/// How this kernel names uprobes to `perf_event_open`.
#[derive(Debug, Clone, Copy)]
pub struct UprobePmu {
    pmu_type: u32,
    return_bit: u32,
}

impl UprobePmu {
    pub fn find(sys: &Path) -> io::Result<Self> {
        let dir = sys.join("bus/event_source/devices/uprobe");
        let invalid =
            |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {what}", dir.display()));
        let pmu_type = std::fs::read_to_string(dir.join("type"))?;
        let retprobe = std::fs::read_to_string(dir.join("format/retprobe"))?;
        Ok(Self {
            pmu_type: pmu_type.trim().parse().map_err(|_| invalid("type is not a number"))?,
            return_bit: retprobe
                .trim()
                .strip_prefix("config:")
                .and_then(|bit| bit.parse().ok())
                .filter(|bit| *bit < 64)
                .ok_or_else(|| invalid("format/retprobe is not config:N"))?,
        })
    }
}
