//! `/proc`, of this host or of the one around a container: who is there, and by which numbers.

use std::{
    fs, io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use nix::sys::statfs::{PROC_SUPER_MAGIC, statfs};

use crate::{
    model::{Tgid, Tid},
    text::sanitize,
};

#[derive(Debug, thiserror::Error)]
pub enum ProcError {
    #[error("{path} is no /proc ({why}): --proc wants the directory where the host's is mounted")]
    NotProc { path: String, why: String },
    #[error(
        "process ids in {path} are those of a container, while BPF programs see the host's: share the host's \
         (--pid=host of docker and podman, hostPID: true of a pod), or mount its /proc into the container \
         (-v /proc:/host/proc) and say --proc /host/proc"
    )]
    OtherNumbers { path: String },
}

/// A mounted proc file system. Its process ids are those of the PID namespace that it was mounted in.
#[derive(Debug, Clone)]
pub struct Proc {
    root: PathBuf,
    /// Its numbers are those of our own PID namespace: system calls take them.
    own: bool,
}

impl Default for Proc {
    fn default() -> Self {
        Self::at("/proc".into())
    }
}

impl Proc {
    /// The one that is mounted at `root`.
    pub fn open(root: PathBuf) -> Result<Self, ProcError> {
        let not_proc = |why: String| ProcError::NotProc { path: root.display().to_string(), why };
        match statfs(&root) {
            Ok(fs) if fs.filesystem_type() == PROC_SUPER_MAGIC => Ok(Self::at(root)),
            Ok(_) => Err(not_proc("another file system is there".into())),
            Err(e) => Err(not_proc(io::Error::from(e).to_string())),
        }
    }

    fn at(root: PathBuf) -> Self {
        let mut proc = Self { root, own: false };
        // One id for each PID namespace from the file system's to ours.
        proc.own = proc.own_tgid() == Some(Tgid(std::process::id()))
            && proc.own_status("NSpid:").is_none_or(|ids| ids.split_ascii_whitespace().count() == 1);
        proc
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Whether system calls that take a process id mean the same process by it.
    pub fn has_own_numbers(&self) -> bool {
        self.own
    }

    /// Our own number here; `None` where we are not to be seen.
    pub fn own_tgid(&self) -> Option<Tgid> {
        fs::read_link(self.root.join("self")).ok()?.to_str()?.parse().ok().map(Tgid)
    }

    fn own_status(&self, key: &str) -> Option<String> {
        let status = fs::read_to_string(self.root.join("self/status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix(key)).map(str::to_owned)
    }

    /// Refuses numbers that are not the ones that BPF programs see. `ours` is our own among those, as far as the
    /// kernel tells it.
    pub fn check_numbers(&self, ours: Option<Tgid>) -> Result<(), ProcError> {
        match ours {
            Some(ours) if self.own_tgid() != Some(ours) => {
                Err(ProcError::OtherNumbers { path: self.root.display().to_string() })
            }
            _ => Ok(()),
        }
    }

    /// The number here of a process that has `pid` in our own namespace.
    pub fn number_of(&self, pid: u32) -> io::Result<Tgid> {
        if self.own {
            return Ok(Tgid(pid));
        }
        let pidfd = pidfd(Tgid(pid))?;
        let facts = fs::read_to_string(self.root.join(format!("self/fdinfo/{}", pidfd.as_raw_fd())))?;
        let number = facts.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse().ok());
        number.filter(|number| *number > 0).map(|number: i32| Tgid(number as u32)).ok_or_else(|| {
            let what = format!("{} does not show the processes of this container", self.root.display());
            io::Error::new(io::ErrorKind::NotFound, what)
        })
    }

    /// Ids of all processes (not threads), unordered. Empty when /proc can not be read.
    pub fn processes(&self) -> Vec<Tgid> {
        fs::read_dir(&self.root)
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok().map(Tgid))
            .collect()
    }

    pub fn path(&self, tgid: Tgid, name: &str) -> PathBuf {
        self.root.join(tgid.to_string()).join(name)
    }

    /// Name of the program as the kernel keeps it (15 bytes at most).
    pub fn comm(&self, tgid: Tgid) -> String {
        fs::read(self.path(tgid, "comm"))
            .map(|b| sanitize(b.trim_ascii_end()).into_owned())
            .unwrap_or_default()
    }

    /// Value of a variable in the environment that the program of the process was started with.
    pub fn variable(&self, tgid: Tgid, name: &[u8]) -> io::Result<Option<Vec<u8>>> {
        let environment = fs::read(self.path(tgid, "environ"))?;
        let mut entries = environment.split(|byte| *byte == 0);
        Ok(entries.find_map(|entry| Some(entry.strip_prefix(name)?.strip_prefix(b"=")?.to_vec())))
    }

    /// Whether the process has an environment that may be read. Within `exec` it has none: a read in 60 of a chain of
    /// programs finds it so (kernel 6.18).
    pub fn shows_environment(&self, tgid: Tgid) -> bool {
        fs::read(self.path(tgid, "environ")).is_ok_and(|environment| !environment.is_empty())
    }

    /// The id of the parent, and of the session.
    pub fn parent_and_session(&self, tgid: Tgid) -> Option<(Tgid, u32)> {
        let stat = self.stat(tgid)?;
        Some((Tgid(stat.field(1)?), stat.field(3)?))
    }

    /// Whether a thread is there.
    pub fn has_thread(&self, tid: Tid) -> bool {
        self.root.join(tid.to_string()).exists()
    }

    /// How long the process has been there, to the clock tick (10 ms).
    pub fn age(&self, tgid: Tgid) -> Option<Duration> {
        let uptime: f64 =
            fs::read_to_string(self.root.join("uptime")).ok()?.split(' ').next()?.parse().ok()?;
        let start = self.start_time(tgid)? as f64 / f64::from(ticks_a_second());
        Duration::try_from_secs_f64(uptime - start).ok()
    }

    /// What the process does: `R`, `S`, `Z`, ... as in ps.
    pub fn state(&self, tgid: Tgid) -> Option<char> {
        self.stat(tgid)?.field(0)
    }

    /// Start of the process in clock ticks since boot: with the id, it names the process for good.
    pub fn start_time(&self, tgid: Tgid) -> Option<u64> {
        self.stat(tgid)?.field(19)
    }

    /// CPU time of all its threads, those that have ended too, in user mode and in the kernel; to the clock tick (10 ms).
    pub fn cpu_time(&self, tgid: Tgid) -> Option<Duration> {
        let stat = self.stat(tgid)?;
        let ticks = stat.field::<u64>(11)? + stat.field::<u64>(12)?;
        Some(Duration::from_secs(ticks) / ticks_a_second())
    }

    fn stat(&self, tgid: Tgid) -> Option<Stat> {
        Stat::parse(&fs::read(self.path(tgid, "stat")).ok()?)
    }
}

/// What stands in a `stat` file behind the program's name, which may hold blanks and brackets itself.
pub struct Stat(Vec<String>);

impl Stat {
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let end = bytes.iter().rposition(|b| *b == b')')?;
        let rest = std::str::from_utf8(bytes.get(end + 2..)?).ok()?;
        Some(Self(rest.split_ascii_whitespace().map(str::to_owned).collect()))
    }

    /// A field by its number in proc(5), less 3.
    fn field<T: FromStr>(&self, number: usize) -> Option<T> {
        self.0.get(number)?.parse().ok()
    }

    /// Whether all threads of the process have ended.
    pub fn has_ended(&self) -> bool {
        matches!(self.field(0), Some('Z' | 'X')) && self.field(17).is_none_or(|threads: u32| threads <= 1)
    }
}

fn ticks_a_second() -> u32 {
    // SAFETY: sysconf takes an integer.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    u32::try_from(ticks).ok().filter(|ticks| *ticks > 0).unwrap_or(100)
}

/// A descriptor that becomes readable when the process ends.
pub fn pidfd(tgid: Tgid) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two integers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, tgid.0, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_brackets_does_not_confuse() {
        let line =
            |state, threads| format!("42 (a) b (c) {state} 7 42 40{} {threads} 0 99 0\n", " 0".repeat(13));
        let stat = Stat::parse(line('S', 2).as_bytes()).unwrap();
        assert_eq!((stat.field(0), stat.field(1), stat.field(3)), (Some('S'), Some(7), Some(40)));
        assert_eq!(stat.field::<u64>(19), Some(99));
        let ended = |state, threads| Stat::parse(line(state, threads).as_bytes()).unwrap().has_ended();
        // The first thread may end before the others.
        assert_eq!([ended('S', 1), ended('Z', 3), ended('Z', 1)], [false, false, true]);
    }

    #[test]
    fn a_process_without_an_environment_has_none_of_its_variables() {
        let dir = tempfile::tempdir().unwrap();
        for (tgid, environment) in [("1", ""), ("2", "A=1\0AB=2\0")] {
            std::fs::create_dir(dir.path().join(tgid)).unwrap();
            std::fs::write(dir.path().join(tgid).join("environ"), environment).unwrap();
        }
        let proc = Proc { root: dir.path().into(), ..Proc::default() };
        let b = |tgid| proc.variable(Tgid(tgid), b"AB").ok().flatten();
        assert_eq!((b(1), b(2), b(3)), (None, Some(b"2".to_vec()), None));
        assert_eq!([1, 2, 3].map(|tgid| proc.shows_environment(Tgid(tgid))), [false, true, false]);
    }

    #[test]
    fn numbers_are_checked_against_the_kernels() {
        let proc = Proc::default();
        let me = std::process::id();
        assert!(proc.has_own_numbers());
        assert_eq!(proc.own_tgid(), Some(Tgid(me)));
        assert_eq!(proc.number_of(me).unwrap(), Tgid(me));
        assert!(proc.check_numbers(Some(Tgid(me))).is_ok() && proc.check_numbers(None).is_ok());
        let told = proc.check_numbers(Some(Tgid(me + 1))).unwrap_err().to_string();
        assert!(told.contains("--pid=host") && told.contains("--proc"), "{told}");
        assert!(Proc::open("/sys".into()).unwrap_err().to_string().contains("another file system"));
        assert!(Proc::open("/nowhere".into()).unwrap_err().to_string().contains("No such file"));
    }
}
