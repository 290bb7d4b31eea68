//! Creating directories and files where other users may write too.
//!
//! Everything below the output directory is reached through open directories (`openat` and its kin), so that nobody
//! can swap a part of the path; files are created exclusively and never through a symbolic link. When `sudo` runs
//! the tracer, what it creates belongs to the user who called it.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, RenameFlags, openat, readlinkat, renameat2};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat, mkdirat};
use nix::unistd::{AccessFlags, Gid, Uid, UnlinkatFlags, faccessat, fchown, geteuid, unlinkat};

/// Symbolic links followed in one path before it counts as a loop, as in the kernel.
const MAX_LINKS: usize = 40;

#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    #[error("cannot create output directory {}: {source}", .path.display())]
    Create { path: PathBuf, source: io::Error },
    #[error("cannot write to output directory {}: {source}", .path.display())]
    NotWritable { path: PathBuf, source: io::Error },
    #[error("output directory {}: {} is not a directory", .path.display(), .part.display())]
    NotADirectory { path: PathBuf, part: PathBuf },
    #[error(
        "output directory {}: {} is a symbolic link that user {owner} made in a directory where others may write, \
         and is not followed; give its target if it is the right place",
        .path.display(), .part.display()
    )]
    UntrustedLink { path: PathBuf, part: PathBuf, owner: u32 },
}

/// The user who called the tracer through `sudo`: what it creates is theirs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    pub uid: u32,
    pub gid: u32,
}

impl Caller {
    /// `SUDO_UID` and `SUDO_GID`, when running as root.
    pub fn of_sudo() -> Option<Caller> {
        let id = |name| std::env::var(name).ok()?.parse().ok();
        geteuid().is_root().then_some(())?;
        Some(Caller { uid: id("SUDO_UID")?, gid: id("SUDO_GID")? })
    }
}

/// An open directory.
pub(super) struct Dir {
    fd: OwnedFd,
    path: PathBuf,
    caller: Option<Caller>,
}

/// The output directory, and those that had to be made for it.
pub(super) struct Root {
    pub dir: Dir,
    made: Vec<(Dir, OsString)>,
}

impl Root {
    /// Opens the directory `path`, making it and its parents where missing.
    pub fn open(path: &Path, caller: Option<Caller>) -> Result<Root, OutputError> {
        let create = |source| OutputError::Create { path: path.to_owned(), source };
        let absolute = std::path::absolute(path).map_err(create)?;
        let mut rest: VecDeque<OsString> = parts(&absolute).collect();
        let open_root = || {
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
            let fd = nix::fcntl::open("/", flags, Mode::empty()).map_err(|errno| create(errno.into()))?;
            Ok(Dir { fd, path: "/".into(), caller })
        };
        let mut dir = open_root()?;
        let mut made = Vec::new();
        let mut links = 0;
        while let Some(part) = rest.pop_front() {
            let part_path = dir.path.join(&part);
            let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let found = match openat(&dir.fd, part.as_os_str(), flags, Mode::empty()) {
                Ok(found) => found,
                Err(Errno::ENOENT) => {
                    let child = match dir.make(&part) {
                        Ok(child) => child,
                        // Somebody else was faster: look again.
                        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                            rest.push_front(part);
                            continue;
                        }
                        Err(source) => return Err(create(source)),
                    };
                    made.push((std::mem::replace(&mut dir, child), part));
                    continue;
                }
                Err(errno) => return Err(create(errno.into())),
            };
            let stat = fstat(&found).map_err(|errno| create(errno.into()))?;
            match file_type(&stat) {
                SFlag::S_IFDIR => dir = Dir { fd: found, path: part_path, caller },
                SFlag::S_IFLNK => {
                    links += 1;
                    if links > MAX_LINKS {
                        return Err(create(Errno::ELOOP.into()));
                    }
                    let holder = fstat(&dir.fd).map_err(|errno| create(errno.into()))?;
                    if !trusted(&stat, &holder, caller) {
                        let owner = stat.st_uid;
                        return Err(OutputError::UntrustedLink {
                            path: path.to_owned(),
                            part: part_path,
                            owner,
                        });
                    }
                    let target = readlinkat(&found, c"").map_err(|errno| create(errno.into()))?;
                    let target = PathBuf::from(target);
                    if target.is_absolute() {
                        dir = open_root()?;
                    }
                    let target: Vec<_> = parts(&target).collect();
                    for part in target.into_iter().rev() {
                        rest.push_front(part);
                    }
                }
                _ => return Err(OutputError::NotADirectory { path: path.to_owned(), part: part_path }),
            }
        }
        // Reports name the directory as the user did.
        dir.path = path.to_owned();
        let access = AccessFlags::W_OK | AccessFlags::X_OK;
        faccessat(&dir.fd, c".", access, AtFlags::AT_EACCESS)
            .map_err(|errno| OutputError::NotWritable { path: path.to_owned(), source: errno.into() })?;
        Ok(Root { dir, made })
    }

    /// Removes the directories that were made for nothing.
    pub fn remove_unused(self) {
        for (parent, name) in self.made.into_iter().rev() {
            if unlinkat(&parent.fd, name.as_os_str(), UnlinkatFlags::RemoveDir).is_err() {
                break;
            }
        }
    }
}

impl Dir {
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates the directory `name` and opens it; fails when there is something of that name.
    pub fn make(&self, name: &OsStr) -> io::Result<Dir> {
        mkdirat(&self.fd, name, Mode::from_bits_truncate(0o750))?;
        self.open(name).inspect(Dir::hand_over)
    }

    /// Opens the directory `name`, creating it when missing.
    pub fn enter(&self, name: &OsStr) -> io::Result<Dir> {
        match self.make(name) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => self.open(name),
            result => result,
        }
    }

    fn open(&self, name: &OsStr) -> io::Result<Dir> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let fd = openat(&self.fd, name, flags, Mode::empty())?;
        Ok(Dir { fd, path: self.path.join(name), caller: self.caller })
    }

    /// Creates the file `name`, for its owner alone; fails when there is something of that name.
    pub fn create(&self, name: &str) -> io::Result<File> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let fd = openat(&self.fd, name, flags, Mode::from_bits_truncate(0o600))?;
        hand_over(&fd, self.caller);
        Ok(File::from(fd))
    }

    /// Removes the file `name`.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        Ok(unlinkat(&self.fd, name, UnlinkatFlags::NoRemoveDir)?)
    }

    /// Says in the name of a file that its end is missing. Returns the name that it has then.
    pub fn mark_incomplete(&self, stem: &str, extension: &str) -> String {
        let name = format!("{stem}.{extension}");
        let incomplete = format!("{stem}.incomplete.{extension}");
        let flags = RenameFlags::RENAME_NOREPLACE;
        match renameat2(&self.fd, name.as_str(), &self.fd, incomplete.as_str(), flags) {
            Ok(()) => incomplete,
            Err(errno) => {
                tracing::warn!("{}: cannot rename to {incomplete}: {errno}", self.path.join(&name).display());
                name
            }
        }
    }

    /// Bytes of the file `name`; `None` when there is none.
    pub fn size_of(&self, name: &str) -> Option<u64> {
        let stat = fstatat(&self.fd, name, AtFlags::AT_SYMLINK_NOFOLLOW).ok()?;
        u64::try_from(stat.st_size).ok()
    }

    /// The path by which the kernel knows this directory: without symbolic links.
    pub fn real_path(&self) -> io::Result<PathBuf> {
        std::fs::read_link(format!("/proc/self/fd/{}", self.fd.as_raw_fd()))
    }

    fn hand_over(&self) {
        hand_over(&self.fd, self.caller);
    }
}

fn hand_over(fd: &impl AsFd, caller: Option<Caller>) {
    let Some(caller) = caller else { return };
    let fd = fd.as_fd();
    if let Err(errno) = fchown(fd, Some(Uid::from_raw(caller.uid)), Some(Gid::from_raw(caller.gid))) {
        // Some file systems have no owners; root can still read the file.
        tracing::warn!("cannot give output (fd {}) to user {}: {errno}", fd.as_raw_fd(), caller.uid);
    }
}

fn parts(path: &Path) -> impl Iterator<Item = OsString> {
    path.components()
        .filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir))
        .map(|part| part.as_os_str().to_owned())
}

fn file_type(stat: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits())
}

/// A link is followed when we could have made it, or when no other user could have.
fn trusted(link: &FileStat, holder: &FileStat, caller: Option<Caller>) -> bool {
    let writable_by_others = holder.st_mode & 0o022 != 0;
    let ours = [Some(0), Some(geteuid().as_raw()), caller.map(|caller| caller.uid)];
    !writable_by_others || ours.contains(&Some(link.st_uid))
}
