//! Starts a command and holds it at its own first instruction, when the dynamic linker has mapped what it is
//! linked with: sites are attached before anything of it runs.

use std::{
    ffi::OsString,
    fs, io,
    os::{fd::AsFd, unix::process::CommandExt},
    process::{Child, Command},
};

use nix::{
    sys::{
        ptrace,
        signal::Signal,
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};

use super::proc::Proc;
use crate::model::Tgid;

#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    #[error("no command after `--`")]
    Empty,
    #[error("can not start {command}: {source}")]
    Start { command: String, source: io::Error },
    #[error(
        "{command} was started but can not be held for attaching: {source}; start it yourself and use -p PID"
    )]
    Hold { command: String, source: io::Error },
    #[error("{command} ended before its first instruction: {status}")]
    Ended { command: String, status: String },
}

/// The variable that a command finds in its environment.
const FAMILY: &str = "MEMSCOPE_TRACE_FAMILY";

/// What a command and all that it starts have in their environment. Who their parents are tells it only as long as these
/// live: a process whose parent has ended is handed to another one, as daemons want it.
#[derive(Debug, Clone)]
pub struct Family(String);

impl Family {
    /// One that there has not been before.
    pub fn unique() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Self(format!("{}-{}", std::process::id(), now.as_nanos()))
    }

    /// Whether a process is of it, as far as its environment may be read. It began with this environment: what it has
    /// changed since does not show.
    pub fn has(&self, proc: &Proc, tgid: Tgid) -> bool {
        let value = proc.variable(tgid, FAMILY.as_bytes());
        value.is_ok_and(|value| value.as_deref() == Some(self.0.as_bytes()))
    }
}

/// A started command that stands at its first instruction.
pub struct Held {
    child: Child,
    command: String,
}

/// The machine's breakpoint instruction, as it is put over a word of code.
#[cfg(target_arch = "x86_64")]
fn with_breakpoint(word: i64) -> i64 {
    (word & !0xff) | 0xcc
}
#[cfg(target_arch = "aarch64")]
fn with_breakpoint(word: i64) -> i64 {
    (word & !0xffff_ffff) | 0xd420_0000
}

impl Held {
    /// Starts the command. It inherits our standard streams; with `stdout_is_taken`, it writes to standard error
    /// what it writes to standard output. What it starts inherits `family`, by which it is known.
    pub fn start(words: &[OsString], stdout_is_taken: bool, family: &Family) -> Result<Self, SpawnError> {
        let (program, arguments) = words.split_first().ok_or(SpawnError::Empty)?;
        let command = program.to_string_lossy().into_owned();
        let mut builder = Command::new(program);
        builder.args(arguments).env(FAMILY, &family.0);
        if stdout_is_taken {
            let stderr = io::stderr().as_fd().try_clone_to_owned();
            builder.stdout(stderr.map_err(|source| SpawnError::Start { command: command.clone(), source })?);
        }
        // SAFETY: between fork and exec only ptrace(PTRACE_TRACEME) is called, which is async-signal-safe.
        unsafe { builder.pre_exec(|| ptrace::traceme().map_err(io::Error::from)) };
        let child =
            builder.spawn().map_err(|source| SpawnError::Start { command: command.clone(), source })?;
        let mut held = Self { child, command };
        held.run_to_entry()?;
        Ok(held)
    }

    /// Its number in our own PID namespace.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lets it run, untraced by us.
    pub fn release(self) -> Result<Child, SpawnError> {
        ptrace::detach(self.child(), None).map_err(|e| self.hold_failed(e))?;
        Ok(self.child)
    }

    fn child(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    fn hold_failed(&self, source: impl Into<io::Error>) -> SpawnError {
        SpawnError::Hold { command: self.command.clone(), source: source.into() }
    }

    fn run_to_entry(&mut self) -> Result<(), SpawnError> {
        let pid = self.child();
        self.wait_for_trap()?;
        let entry = self.entry().map_err(|e| self.hold_failed(e))?;
        let at = entry as ptrace::AddressType;
        let word = ptrace::read(pid, at).map_err(|e| self.hold_failed(e))?;
        ptrace::write(pid, at, with_breakpoint(word)).map_err(|e| self.hold_failed(e))?;
        ptrace::cont(pid, None).map_err(|e| self.hold_failed(e))?;
        self.wait_for_trap()?;
        ptrace::write(pid, at, word).map_err(|e| self.hold_failed(e))?;
        // x86 has gone past its breakpoint.
        #[cfg(target_arch = "x86_64")]
        {
            let mut registers = ptrace::getregs(pid).map_err(|e| self.hold_failed(e))?;
            registers.rip = entry;
            ptrace::setregs(pid, registers).map_err(|e| self.hold_failed(e))?;
        }
        Ok(())
    }

    /// Waits for a SIGTRAP; other signals are the command's own and are passed on.
    fn wait_for_trap(&self) -> Result<(), SpawnError> {
        loop {
            match waitpid(self.child(), Some(WaitPidFlag::__WALL)).map_err(|e| self.hold_failed(e))? {
                WaitStatus::Stopped(_, Signal::SIGTRAP) | WaitStatus::PtraceEvent(..) => return Ok(()),
                WaitStatus::Stopped(pid, signal) => {
                    ptrace::cont(pid, signal).map_err(|e| self.hold_failed(e))?;
                }
                WaitStatus::Exited(_, code) => return Err(self.ended(format!("exit code {code}"))),
                WaitStatus::Signaled(_, signal, _) => return Err(self.ended(signal.as_str().into())),
                _ => {}
            }
        }
    }

    fn ended(&self, status: String) -> SpawnError {
        SpawnError::Ended { command: self.command.clone(), status }
    }

    /// AT_ENTRY of the auxiliary vector: where the program itself begins, behind the dynamic linker.
    fn entry(&self) -> io::Result<u64> {
        const AT_ENTRY: u64 = 9;
        let auxv = fs::read(format!("/proc/{}/auxv", self.child.id()))?;
        let words: Vec<u64> =
            auxv.chunks_exact(8).map(|c| u64::from_ne_bytes(c.try_into().unwrap_or_default())).collect();
        words
            .chunks_exact(2)
            .find(|pair| pair[0] == AT_ENTRY)
            .map(|pair| pair[1])
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "its auxiliary vector has no AT_ENTRY"))
    }
}
