//! What this kernel can do, found by trying, never by its version number.

use std::{ffi::CString, fs, io, os::fd::AsFd, path::Path, sync::mpsc, thread};

use aya_obj::generated::bpf_insn;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
use serde::Serialize;

use super::sys::{self, PerfUprobe, UprobePmu};
use crate::model::Tgid;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Features {
    /// `bpf_get_attach_cookie` (5.15).
    pub attach_cookie: bool,
    /// `uprobe_multi` links (6.6).
    pub uprobe_multi: bool,
    /// Their PID filter means the process, not one thread of it (6.6.35, 6.9.5, 6.10).
    pub uprobe_multi_pid: bool,
    /// uprobes as perf events (4.17).
    pub perf_uprobe: bool,
}

const EXIT: bpf_insn = instruction(0x95, 0, 0);

const fn instruction(code: u8, regs: u8, imm: i32) -> bpf_insn {
    bpf_insn {
        code,
        _bitfield_align_1: [],
        _bitfield_1: aya_obj::generated::__BindgenBitfieldUnit::new([regs]),
        off: 0,
        imm,
    }
}

impl Features {
    pub fn probe() -> Self {
        // `call 174; exit` and `r0 = 0; exit`.
        let cookie = [instruction(0x85, 0, 174), EXIT];
        let attach_cookie = sys::prog_load(sys::PROG_TYPE_KPROBE, 0, &cookie, "probe_cookie").is_ok();
        let (uprobe_multi, uprobe_multi_pid) = probe_uprobe_multi();
        Self {
            attach_cookie,
            uprobe_multi,
            uprobe_multi_pid,
            perf_uprobe: UprobePmu::find(Path::new("/sys")).is_ok(),
        }
    }
}

/// Whether programs may compare and swap (5.12).
pub fn compare_and_swap() -> bool {
    // `*(u64 *)(r10 - 8) = 0; r0 = 0; r1 = 0; cmpxchg(r10 - 8, r0, r1); r0 = 0; exit`.
    let program = [
        bpf_insn { off: -8, ..instruction(0x7a, 0x0a, 0) },
        instruction(0xb7, 0, 0),
        instruction(0xb7, 1, 0),
        bpf_insn { off: -8, ..instruction(0xdb, 0x1a, 0xf1) },
        instruction(0xb7, 0, 0),
        EXIT,
    ];
    sys::prog_load(sys::PROG_TYPE_KPROBE, 0, &program, "probe_cmpxchg").is_ok()
}

/// Our own process id as BPF programs see it, which is that of the host's PID namespace. `None`: the kernel does not
/// say (before 5.10, or without the right to load programs).
pub fn own_tgid() -> Option<Tgid> {
    // `call bpf_get_current_pid_tgid; r0 >>= 32; exit`.
    let program = [instruction(0x85, 0, 14), instruction(0x77, 0, 32), EXIT];
    let program = sys::prog_load(sys::PROG_TYPE_RAW_TRACEPOINT, 0, &program, "own_tgid").ok()?;
    sys::run_raw_tracepoint(program.as_fd()).ok().map(Tgid)
}

/// Whether perf uprobes can be attached, by one at our own ELF header, which never runs.
pub fn try_perf_uprobe() -> io::Result<()> {
    let pmu = UprobePmu::find(Path::new("/sys"))?;
    let event = PerfUprobe::open(&pmu, c"/proc/self/exe", 0, Some(std::process::id()), false)?;
    // Closing it takes 0.1 s.
    thread::spawn(move || drop(event));
    Ok(())
}

/// The number in a file of /proc/sys.
pub fn sysctl(name: &str) -> Option<i64> {
    fs::read_to_string(Path::new("/proc/sys").join(name)).ok()?.trim().parse().ok()
}

/// `none`, `integrity` or `confidentiality`; `None` where the kernel does not know it.
pub fn lockdown() -> Option<String> {
    let modes = fs::read_to_string("/sys/kernel/security/lockdown").ok()?;
    Some(modes.split_once('[')?.1.split_once(']')?.0.to_owned())
}

/// Bytes of locked memory that we may have, where there is a limit and the kernel counts BPF maps among it (before
/// 5.11).
pub fn locked_memory_limit() -> Option<u64> {
    let (limit, most) = getrlimit(Resource::RLIMIT_MEMLOCK).ok()?;
    if limit == RLIM_INFINITY {
        return None;
    }
    // Under a limit of nothing the smallest map tells. Whoever may not lower its limit is told by the error itself.
    setrlimit(Resource::RLIMIT_MEMLOCK, 0, most).ok()?;
    let counted = sys::map_create().is_err_and(|e| e.raw_os_error() == Some(libc::EPERM));
    let _ = setrlimit(Resource::RLIMIT_MEMLOCK, limit, most);
    counted.then_some(limit)
}

fn probe_uprobe_multi() -> (bool, bool) {
    let nothing = [instruction(0xb7, 0, 0), EXIT];
    let Ok(program) = sys::prog_load(sys::PROG_TYPE_KPROBE, sys::TRACE_UPROBE_MULTI, &nothing, "probe_multi")
    else {
        return (false, false);
    };
    let attempt = |path: &str, pid| {
        let path = CString::new(path).map_err(io::Error::other)?;
        sys::uprobe_multi(program.as_fd(), &path, &[0], &[0], pid, false)
    };
    // A kernel that knows the link type looks at the path, and "/" is no regular file.
    let known = attempt("/", None).is_err_and(|e| e.raw_os_error() == Some(libc::EBADF));
    if !known {
        return (false, false);
    }
    // Where the filter takes a process, the id of a thread that leads none is refused (ESRCH); where it takes a
    // thread, that is accepted. The probed byte is our own ELF header, which never runs.
    let (stop, stopped) = mpsc::channel::<()>();
    let (tell, told) = mpsc::channel();
    let helper = thread::spawn(move || {
        // SAFETY: gettid takes nothing and can not fail.
        let _ = tell.send(unsafe { libc::gettid() } as u32);
        let _ = stopped.recv();
    });
    let by_process = told.recv().is_ok_and(|tid| {
        attempt("/proc/self/exe", Some(tid)).is_err_and(|e| e.raw_os_error() == Some(libc::ESRCH))
    });
    drop(stop);
    let _ = helper.join();
    (true, by_process)
}
