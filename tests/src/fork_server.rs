//! Processes that have imported torch already.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    io::{BufRead, BufReader, PipeReader, PipeWriter, Write, pipe},
    os::{fd::AsRawFd, unix::process::ExitStatusExt},
    process::{Child, ChildStdin, ChildStdout, ExitStatus, Stdio},
    sync::{Mutex, PoisonError},
};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::Ground;

/// One for each ground. They end with this process, which closes their standard inputs.
static SERVERS: Mutex<BTreeMap<&'static str, Server>> = Mutex::new(BTreeMap::new());

struct Server {
    _child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Server {
    fn start(ground: Ground) -> Result<Self> {
        // Who is forked off, and outlives the process between, becomes a child of this one.
        // SAFETY: takes and changes numbers only.
        let adopts = unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
        ensure!(adopts == 0, "this process can not adopt others");
        let mut command = ground.command(&["fork_server.py"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let requests = child.stdin.take().context("no standard input")?;
        let answers = BufReader::new(child.stdout.take().context("no standard output")?);
        let mut server = Self { _child: child, requests, answers };
        ensure!(server.answer()? == "ready", "the fork server of {ground:?} did not begin");
        Ok(server)
    }

    fn answer(&mut self) -> Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }
}

/// A process that this one has adopted, with its standard streams.
pub(crate) struct Forked {
    pub pid: u32,
    pub stdin: PipeWriter,
    pub stdout: PipeReader,
    pub stderr: PipeReader,
}

/// Has the fork server of a torch ground run a program.
pub(crate) fn fork(ground: Ground, args: &[&str], env: &[(&str, &str)]) -> Result<Forked> {
    let Ground::Torch(version) = ground else { anyhow::bail!("{ground:?} has no fork server") };
    let ((theirs_in, stdin), (stdout, theirs_out), (stderr, theirs_err)) = (pipe()?, pipe()?, pipe()?);
    let path = |stream: &dyn AsRawFd| format!("/proc/{}/fd/{}", std::process::id(), stream.as_raw_fd());
    let request = json!({
        "argv": ground.program(args),
        "env": env.iter().copied().collect::<BTreeMap<_, _>>(),
        "streams": [path(&theirs_in), path(&theirs_out), path(&theirs_err)],
    });
    let mut servers = SERVERS.lock().unwrap_or_else(PoisonError::into_inner);
    let server = match servers.entry(version) {
        Entry::Occupied(known) => known.into_mut(),
        Entry::Vacant(free) => free.insert(Server::start(ground)?),
    };
    writeln!(server.requests, "{request}")?;
    let answer = server.answer()?;
    let pid = answer.parse().with_context(|| format!("the fork server of {ground:?} says {answer:?}"))?;
    Ok(Forked { pid, stdin, stdout, stderr })
}

/// The end of an adopted process, where it has come. `wait`: waits for it.
pub(crate) fn end(pid: u32, wait: bool) -> Result<Option<ExitStatus>> {
    let mut status = 0;
    let flags = if wait { 0 } else { libc::WNOHANG };
    // SAFETY: `status` is an integer of ours.
    let ended = unsafe { libc::waitpid(pid as i32, &raw mut status, flags) };
    if ended < 0 {
        return Err(std::io::Error::last_os_error()).context("the adopted process is no child of this one");
    }
    Ok((ended > 0).then(|| ExitStatus::from_raw(status)))
}
