//! What the resolvers found, kept on disk: a large library takes them some tenths of a second.
//!
//! The cache is as trusted as the tool itself, as a wrong offset would put a probe into the middle of an
//! instruction. So it is read and written only in a directory that no one else can write to. And an entry is
//! bound to one file by what its owner can not forge (device, inode, time of the last change), besides the
//! build-id: a container that ships a forged library under a real one's build-id spoils no entry but its own.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat, renameat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat};
use nix::unistd::{UnlinkatFlags, geteuid, unlinkat};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::elf::{ElfError, Library, Missing};
use super::mstx_python::{self, MstxPython};
use super::torch_npu::{self, QueueSites, TorchNpu};

/// Raised whenever a resolver would find something else in the same file.
const RESOLVERS: u32 = 1;
const FILE: &str = "resolved-v1.json";
/// Files remembered; beyond it the oldest are dropped.
const MAX_ENTRIES: usize = 256;
/// Bytes of a cache file that is worth reading: an entry has about 1 KiB.
const MAX_SIZE: u64 = 1 << 20;

/// Where resolved offsets are kept, if anywhere.
#[derive(Debug)]
pub struct Cache {
    directory: Option<PathBuf>,
}

impl Default for Cache {
    /// root: `/var/cache/memscope-trace`. Others: `memscope-trace` in `$XDG_CACHE_HOME`, or in `~/.cache`.
    /// root's environment is not asked, as `sudo` may hand on that of a user.
    fn default() -> Cache {
        let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
        let parent = if geteuid().is_root() {
            Some(PathBuf::from("/var/cache"))
        } else {
            absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))
        };
        Cache { directory: parent.map(|p| p.join("memscope-trace")) }
    }
}

/// A cache file.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Entries {
    /// Oldest first.
    entries: Vec<Entry>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    key: String,
    resolved: serde_json::Value,
}

impl Cache {
    /// Keeps everything in `directory`, which is made when it is missing.
    pub fn at(directory: impl Into<PathBuf>) -> Cache {
        Cache { directory: Some(directory.into()) }
    }

    /// Keeps nothing.
    pub fn none() -> Cache {
        Cache { directory: None }
    }

    /// [`torch_npu::resolve`], from the cache where it has it.
    pub fn torch_npu(&self, library: &Library) -> Result<TorchNpu, ElfError> {
        self.get("torch_npu", library, torch_npu::resolve)
    }

    /// [`torch_npu::resolve_queue`].
    pub fn torch_npu_queue(&self, library: &Library) -> Result<Result<QueueSites, Missing>, ElfError> {
        self.get("torch_npu_queue", library, torch_npu::resolve_queue)
    }

    /// [`mstx_python::resolve`], from the cache where it has it.
    pub fn mstx_python(&self, library: &Library) -> Result<MstxPython, ElfError> {
        self.get("mstx_python", library, mstx_python::resolve)
    }

    fn get<T: Serialize + DeserializeOwned>(
        &self,
        resolver: &str,
        library: &Library,
        resolve: impl Fn(&Library) -> Result<T, ElfError>,
    ) -> Result<T, ElfError> {
        let Some(directory) = self.directory.as_deref().and_then(open_directory) else {
            return resolve(library);
        };
        let key = key(resolver, library)?;
        let kept = read(&directory).entries.into_iter().find(|e| e.key == key);
        if let Some(resolved) = kept.and_then(|e| serde_json::from_value(e.resolved).ok()) {
            return Ok(resolved);
        }
        let resolved = resolve(library)?;
        if let Ok(value) = serde_json::to_value(&resolved)
            && let Err(error) = add(&directory, Entry { key, resolved: value })
        {
            tracing::debug!(%error, "resolved offsets of {} are not kept", library.path().display());
        }
        Ok(resolved)
    }
}

fn key(resolver: &str, library: &Library) -> Result<String, ElfError> {
    let file = library.file().metadata();
    let file = file.map_err(|source| ElfError::Io { path: library.path().into(), source })?;
    let build = library.key()?;
    let (device, inode, size) = (file.dev(), file.ino(), file.size());
    let changed = (file.ctime(), file.ctime_nsec());
    Ok(format!(
        "{resolver} {RESOLVERS} {build} {device:x} {inode:x} {size:x} {:x}.{:x}",
        changed.0, changed.1
    ))
}

/// Whether only this user (or root) can have written it.
fn is_ours(stat: &FileStat, kind: SFlag) -> bool {
    let owner_is_trusted = stat.st_uid == geteuid().as_raw() || stat.st_uid == 0;
    let others_can_write = stat.st_mode & 0o022 != 0;
    owner_is_trusted && !others_can_write && stat.st_mode & SFlag::S_IFMT.bits() == kind.bits()
}

/// Opens the directory, made if need be; `None` when it can not be had or is not to be trusted.
fn open_directory(path: &Path) -> Option<OwnedFd> {
    use std::os::unix::fs::DirBuilderExt;
    // It may exist, and its parent may be missing (~/.cache of a new user).
    let _ = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let directory = open(path, flags, Mode::empty()).ok()?;
    is_ours(&fstat(&directory).ok()?, SFlag::S_IFDIR).then_some(directory)
}

/// The kept entries; none when the file is missing, damaged or not to be trusted.
fn read(directory: &OwnedFd) -> Entries {
    let read = || -> Option<Entries> {
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let file = openat(directory, FILE, flags, Mode::empty()).ok()?;
        if !is_ours(&fstat(&file).ok()?, SFlag::S_IFREG) {
            return None;
        }
        let mut text = Vec::new();
        let length = File::from(file).take(MAX_SIZE).read_to_end(&mut text).ok()?;
        serde_json::from_slice(&text).ok().filter(|_| (length as u64) < MAX_SIZE)
    };
    read().unwrap_or_default()
}

/// A new file beside [`FILE`]. The numbers are hints: other namespaces have processes of the same number, and a
/// killed one leaves its file.
fn create_temporary(directory: &OwnedFd) -> std::io::Result<(OwnedFd, String)> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let mut attempts = 8;
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!(".{FILE}.{}.{number}", std::process::id());
        match openat(directory, &name[..], flags, Mode::S_IRUSR | Mode::S_IWUSR) {
            Ok(file) => return Ok((file, name)),
            Err(Errno::EEXIST) if attempts > 0 => attempts -= 1,
            Err(error) => return Err(error.into()),
        }
    }
}

/// Adds an entry. The file is replaced as a whole: another tracer sees the old one or the new one, and when both
/// write at once one of the entries is resolved again some day.
fn add(directory: &OwnedFd, entry: Entry) -> std::io::Result<()> {
    let mut entries = read(directory);
    entries.entries.retain(|e| e.key != entry.key);
    entries.entries.push(entry);
    let excess = entries.entries.len().saturating_sub(MAX_ENTRIES);
    entries.entries.drain(..excess);

    let (file, temporary) = create_temporary(directory)?;
    let written = File::from(file).write_all(&serde_json::to_vec(&entries)?);
    let replaced =
        written.and_then(|()| Ok(renameat(directory.as_fd(), &temporary[..], directory.as_fd(), FILE)?));
    if replaced.is_err() {
        let _ = unlinkat(directory, &temporary[..], UnlinkatFlags::NoRemoveDir);
    }
    replaced
}
