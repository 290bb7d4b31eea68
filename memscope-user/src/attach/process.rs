//! Processes as /proc shows them.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{self, Read},
    os::{
        fd::OwnedFd,
        unix::{ffi::OsStrExt, fs::MetadataExt},
    },
    path::{Path, PathBuf},
};

use caps::{CapSet, Capability};

use super::{
    container, privilege,
    proc::{Proc, Stat, pidfd},
};
use crate::{
    model::{Container, Tgid, Tid},
    text::sanitize,
};

#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    #[error("there is no process {0}; `memscope-trace check` lists those with Ascend libraries")]
    NoSuchProcess(Tgid),
    #[error("{0} is a thread of process {1}; trace that: -p {1}")]
    IsThread(Tgid, Tgid),
    #[error("process {0} has ended; it only waits for its parent to take note (a zombie)")]
    Zombie(Tgid),
    #[error("process {0} is a kernel thread: it has no program to trace")]
    KernelThread(Tgid),
    #[error("process {0} is a 32-bit program: CANN exists for 64-bit ones only, so it can not be traced")]
    ThirtyTwoBit(Tgid),
    #[error("may not read {path} ({source}); {}", why_denied())]
    Denied { path: String, source: io::Error },
    #[error("can not read {path}: {source}")]
    Read { path: String, source: io::Error },
}

fn why_denied() -> String {
    let capability = Capability::CAP_SYS_PTRACE;
    match caps::has_cap(None, CapSet::Effective, capability) {
        Ok(true) => "it has CAP_SYS_PTRACE, so something else forbids it: a security module, or a user namespace around the \
                     tracer"
            .to_owned(),
        _ => format!("the tracer lacks {capability}: {}", privilege::how_to_get(&[])),
    }
}

/// A process that was there when this was made. `life` tells when it ends, whoever gets its id then.
#[derive(Debug)]
pub struct Process {
    pub tgid: Tgid,
    /// Its command line, cut to 200 characters.
    pub command: String,
    /// Driver ids of its logical devices, by `ASCEND_RT_VISIBLE_DEVICES` at its start.
    pub visible_devices: Option<Vec<u16>>,
    /// Its torch_npu was told to allocate workspaces on its task queue's thread, by `TASK_QUEUE_ENABLE` at its start.
    pub allocates_in_queue: bool,
    /// That variable is not known, for want of rights.
    pub is_environment_denied: bool,
    pub container: Option<Container>,
    /// Its id in its own PID namespace, where that is another one.
    pub own_pid: Option<u32>,
    proc: Proc,
    life: Option<Life>,
}

/// How the end of a process is noticed.
#[derive(Debug)]
pub enum Life {
    /// Readable when it has ended.
    Pidfd(OwnedFd),
    /// Of a process that our own PID namespace does not have: its directory in /proc, to be looked at.
    Directory(Directory),
}

/// The directory of one process in /proc, whoever gets its name later.
#[derive(Debug)]
pub struct Directory(File);

impl Directory {
    pub fn has_ended(&self) -> bool {
        let mode = nix::sys::stat::Mode::empty();
        let Ok(stat) = nix::fcntl::openat(&self.0, "stat", nix::fcntl::OFlag::O_CLOEXEC, mode) else {
            return true;
        };
        let mut bytes = Vec::new();
        let read = File::from(stat).read_to_end(&mut bytes);
        read.is_err() || Stat::parse(&bytes).is_none_or(|stat| stat.has_ended())
    }
}

/// A file mapped executable into a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappedFile {
    /// As the process sees it. A deleted file has " (deleted)" behind its name.
    pub path: PathBuf,
    range: String,
    /// Offset in the file from which `range` maps it.
    pub offset: u64,
    id: String,
}

impl MappedFile {
    /// Names the file within one reading of the process's maps and the next.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Where its code is mapped.
    pub fn start(&self) -> Option<u64> {
        u64::from_str_radix(self.range.split('-').next()?, 16).ok()
    }

    /// The address behind.
    pub fn end(&self) -> Option<u64> {
        u64::from_str_radix(self.range.split('-').nth(1)?, 16).ok()
    }
}

/// Which file, whatever its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId {
    pub device: u64,
    pub inode: u64,
}

impl FileId {
    pub fn of(file: &File) -> io::Result<Self> {
        let meta = file.metadata()?;
        Ok(Self { device: meta.dev(), inode: meta.ino() })
    }
}

/// What the names of one file have in common: the layers of container images appear in each container as files of
/// another device, and perhaps with another inode number, and are one inode to a uprobe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stamp {
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    pub fn of(file: &File) -> io::Result<Self> {
        let meta = file.metadata()?;
        Ok(Self {
            size: meta.size(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        })
    }
}

/// Whether the file is shown by a file system that puts layers over one another.
pub fn is_layered(file: &File) -> bool {
    nix::sys::statfs::fstatfs(file)
        .is_ok_and(|fs| fs.filesystem_type() == nix::sys::statfs::OVERLAYFS_SUPER_MAGIC)
}

impl Process {
    pub fn open(proc: &Proc, tgid: Tgid) -> Result<Self, ProcessError> {
        let life = match proc.has_own_numbers() {
            true => pidfd(tgid).map(Life::Pidfd),
            false => File::open(proc.path(tgid, "")).map(|dir| Life::Directory(Directory(dir))),
        };
        let life = life.map_err(|error| match error.raw_os_error() {
            Some(libc::EINVAL | libc::ENOENT | libc::ESRCH) => ProcessError::NoSuchProcess(tgid),
            _ => ProcessError::Read { path: format!("process {tgid}"), source: error },
        });
        // The id of a thread that leads no process has a directory, too.
        match leader(proc, tgid) {
            Some(leader) if leader != tgid => return Err(ProcessError::IsThread(tgid, leader)),
            _ => {}
        }
        let life = life?;
        let mut process = Self {
            tgid,
            command: String::new(),
            visible_devices: None,
            allocates_in_queue: false,
            is_environment_denied: false,
            container: fs::read_to_string(proc.path(tgid, "cgroup")).ok().and_then(|s| container::parse(&s)),
            own_pid: own_pid(proc, tgid),
            proc: proc.clone(),
            life: Some(life),
        };
        process.check_executable()?;
        process.refresh();
        Ok(process)
    }

    /// Tells when the process ends, whoever gets its id then. It is there once: what is known of a process outlives it
    /// by far.
    pub fn take_life(&mut self) -> Option<Life> {
        self.life.take()
    }

    /// Reads again what `exec` changes.
    pub fn refresh(&mut self) {
        self.command = command_line(&self.proc, self.tgid);
        let visible = self.proc.variable(self.tgid, b"ASCEND_RT_VISIBLE_DEVICES");
        self.is_environment_denied =
            visible.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::PermissionDenied);
        let queue = self.proc.variable(self.tgid, b"TASK_QUEUE_ENABLE");
        self.allocates_in_queue =
            queue.is_ok_and(|value| value.is_some_and(|value| value.trim_ascii() == b"2"));
        self.visible_devices = visible.ok().flatten().map(|value| parse_devices(&value));
    }

    fn check_executable(&self) -> Result<(), ProcessError> {
        let path = self.proc.path(self.tgid, "exe");
        let mut head = [0; 5];
        match File::open(&path).and_then(|mut exe| exe.read_exact(&mut head)) {
            Ok(()) if head[4] == 1 => Err(ProcessError::ThirtyTwoBit(self.tgid)),
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                Err(ProcessError::Denied { path: path.display().to_string(), source: e })
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound && fs::read_link(&path).is_err() => {
                Err(match self.proc.state(self.tgid) {
                    Some('Z' | 'X') => ProcessError::Zombie(self.tgid),
                    Some(_) => ProcessError::KernelThread(self.tgid),
                    None => ProcessError::NoSuchProcess(self.tgid),
                })
            }
            _ => Ok(()),
        }
    }

    /// The files mapped executable, each once.
    pub fn mapped_files(&self) -> Result<Vec<MappedFile>, ProcessError> {
        let mut seen = std::collections::HashSet::new();
        let mut files = parse_code(&self.maps()?);
        files.retain(|file| seen.insert(file.id.clone()));
        Ok(files)
    }

    /// All ranges of files that are mapped executable, in order of address.
    pub fn mapped_code(&self) -> Result<Vec<MappedFile>, ProcessError> {
        Ok(parse_code(&self.maps()?))
    }

    fn maps(&self) -> Result<Vec<u8>, ProcessError> {
        let path = self.proc.path(self.tgid, "maps");
        fs::read(&path).map_err(|source| match source.kind() {
            io::ErrorKind::PermissionDenied => {
                ProcessError::Denied { path: path.display().to_string(), source }
            }
            io::ErrorKind::NotFound => ProcessError::NoSuchProcess(self.tgid),
            _ if source.raw_os_error() == Some(libc::ESRCH) => ProcessError::NoSuchProcess(self.tgid),
            _ => ProcessError::Read { path: path.display().to_string(), source },
        })
    }

    /// Opens a mapped file: the very inode that is mapped, not what now has its name.
    pub fn open_mapped(&self, file: &MappedFile) -> io::Result<File> {
        let by_range = self.proc.path(self.tgid, "map_files").join(&file.range);
        let denied = match File::open(by_range) {
            Ok(file) => return Ok(file),
            Err(e) => e,
        };
        // map_files wants CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE. By name, the file must still be the same.
        let root = self.proc.path(self.tgid, "root");
        let relative = file.path.strip_prefix("/").unwrap_or(&file.path);
        let found = File::open(root.join(relative)).map_err(|_| denied)?;
        Ok(found)
    }

    /// A file beside a mapped one, by its path in the process's own file system; at most 64 KiB of it.
    pub fn read_in_root(&self, path: &Path) -> Option<Vec<u8>> {
        let relative = path.strip_prefix("/").ok()?;
        let file = File::open(self.proc.path(self.tgid, "root").join(relative)).ok()?;
        let mut bytes = Vec::new();
        file.take(64 * 1024).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    }

    pub fn proc(&self) -> &Proc {
        &self.proc
    }

    /// Ids of its threads.
    pub fn threads(&self) -> Vec<Tid> {
        fs::read_dir(self.proc.path(self.tgid, "task"))
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok().map(Tid))
            .collect()
    }

    /// Numbers of the Ascend devices that it holds open (`/dev/davinciN`).
    pub fn open_devices(&self) -> Vec<u16> {
        let mut devices: Vec<u16> = fs::read_dir(self.proc.path(self.tgid, "fd"))
            .into_iter()
            .flatten()
            .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
            .filter_map(|target| target.to_str()?.strip_prefix("/dev/davinci")?.parse().ok())
            .collect();
        devices.sort_unstable();
        devices.dedup();
        devices
    }
}

/// The last of the ids in the line `NSpid:`, one for each PID namespace from ours to its own.
fn own_pid(proc: &Proc, tgid: Tgid) -> Option<u32> {
    let status = fs::read_to_string(proc.path(tgid, "status")).ok()?;
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    let own = ids.split_ascii_whitespace().next_back()?.parse().ok()?;
    (own != tgid.0).then_some(own)
}

fn leader(proc: &Proc, tid: Tgid) -> Option<Tgid> {
    let status = fs::read_to_string(proc.path(tid, "status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok().map(Tgid))
}

/// The command line of a process, blanks between the words; its program's name when it has none.
pub fn command_line(proc: &Proc, tgid: Tgid) -> String {
    const MOST: usize = 200;
    let mut bytes = Vec::new();
    if let Ok(file) = File::open(proc.path(tgid, "cmdline")) {
        let _ = file.take(4096).read_to_end(&mut bytes);
    }
    let words: Vec<_> = bytes.split(|b| *b == 0).filter(|word| !word.is_empty()).map(sanitize).collect();
    if words.is_empty() {
        return proc.comm(tgid);
    }
    let line = words.join(" ");
    match line.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

fn parse_code(maps: &[u8]) -> Vec<MappedFile> {
    let mut files = Vec::new();
    for line in maps.split(|b| *b == b'\n') {
        // 7f…-7f… r-xp 00026000 fe:00 1234    /usr/lib/libc.so.6
        let mut rest = line;
        let mut field = || {
            let end = rest.iter().position(|b| *b == b' ').unwrap_or(rest.len());
            let (field, tail) = rest.split_at(end);
            rest = tail.trim_ascii_start();
            field
        };
        let (range, access, offset, device, inode) = (field(), field(), field(), field(), field());
        if access.get(2) != Some(&b'x') || inode == b"0" || !rest.starts_with(b"/") {
            continue;
        }
        if let Ok(range) = std::str::from_utf8(range)
            && let Some(offset) =
                std::str::from_utf8(offset).ok().and_then(|o| u64::from_str_radix(o, 16).ok())
        {
            let id = format!("{} {}", String::from_utf8_lossy(device), String::from_utf8_lossy(inode));
            files.push(MappedFile {
                path: PathBuf::from(OsStr::from_bytes(rest)),
                range: range.to_owned(),
                offset,
                id,
            });
        }
    }
    files
}

/// `0,2-3` as the runtime reads it; what is no number ends the list.
fn parse_devices(value: &[u8]) -> Vec<u16> {
    let mut devices = Vec::new();
    for part in value.split(|b| *b == b',') {
        let part = String::from_utf8_lossy(part);
        let (first, last) = part.split_once('-').unwrap_or((&part, &part));
        match (first.trim().parse::<u16>(), last.trim().parse::<u16>()) {
            (Ok(first), Ok(last)) if first <= last && last < 1024 => devices.extend(first..=last),
            _ => break,
        }
    }
    devices
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_give_what_is_executable() {
        let maps = b"55d0-55d4 r--p 00000000 fe:00 11    /usr/bin/python3\n\
            55d4-55d8 r-xp 00004000 fe:00 11    /usr/bin/python3\n\
            7f00-7f01 rw-p 00000000 00:00 0 \n\
            7f01-7f02 r-xp 00000000 fe:00 12    /opt/my libs/libascendcl.so (deleted)\n\
            7f02-7f03 r-xp 00001000 fe:00 12    /opt/my libs/libascendcl.so (deleted)\n\
            7fff-7fff r-xp 00000000 00:00 0     [vdso]\n";
        let files = parse_code(maps);
        let paths: Vec<_> = files.iter().map(|f| f.path.to_str().unwrap()).collect();
        let library = "/opt/my libs/libascendcl.so (deleted)";
        assert_eq!(paths, ["/usr/bin/python3", library, library]);
        assert_eq!((files[1].start(), files[1].end(), files[1].offset), (Some(0x7f01), Some(0x7f02), 0));
        assert_eq!(files[1].id(), files[2].id());
    }

    #[test]
    fn visible_devices_are_lists_and_ranges() {
        assert_eq!(parse_devices(b"2,3"), [2, 3]);
        assert_eq!(parse_devices(b"0-2,7"), [0, 1, 2, 7]);
        assert_eq!(parse_devices(b"1,x,3"), [1]);
        assert!(parse_devices(b"").is_empty());
    }

    #[test]
    fn this_process_is_found_with_its_libraries() {
        let proc = Proc::default();
        let me = Process::open(&proc, Tgid(std::process::id())).unwrap();
        assert!(me.command.contains("memscope"), "{}", me.command);
        let files = me.mapped_files().unwrap();
        let libc = files.iter().find(|f| f.path.to_string_lossy().contains("libc.so")).unwrap();
        assert!(me.open_mapped(libc).is_ok());
        assert!(proc.start_time(me.tgid).unwrap() > 0);
        assert!(matches!(
            Process::open(&proc, Tgid(0x3fff_fff0)).unwrap_err(),
            ProcessError::NoSuchProcess(_)
        ));
    }
}
