//! What the end-to-end tests share: targets, the tracer, and what both of them wrote.
//!
//! The tests need root and the simulated CANN (`cargo xtask sim`, `cargo xtask bed`); `cargo xtask test` brings
//! both. Without, each test says so and passes, unless MEMSCOPE_REQUIRE is set, as `cargo xtask test` does for
//! what it has brought.

mod fork_server;
pub mod leaks;

use std::{
    collections::HashMap,
    fs,
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::{
        fs::{PermissionsExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, channel},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;

/// How long anything may take before a test calls it hung.
fn patience() -> Duration {
    Duration::from_secs(60 * pace())
}

/// How many times longer a run must last to be still there once something has attached to it: guests share few
/// processors, emulate them, and where sites are attached one by one that alone has taken 15 s.
pub fn pace() -> u64 {
    if is_guest() { 5 } else { 1 }
}

pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}

/// The directory of this build's binaries.
fn bin_dir() -> Result<PathBuf> {
    let test = std::env::current_exe()?;
    let dir = test.ancestors().nth(2).context("the test binary lies in no target directory")?;
    Ok(dir.to_path_buf())
}

fn tracer_binary() -> Result<PathBuf> {
    let path = bin_dir()?.join("memscope-trace");
    if !path.is_file() {
        bail!("{} is not built; run `cargo build`", path.display());
    }
    Ok(path)
}

/// What a test runs its target on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ground {
    /// The native workload on the simulated CANN of this layout: `v8` or `v9`.
    Native(&'static str),
    /// The real wheels of this torch version on the simulated CANN.
    Torch(&'static str),
}

impl Ground {
    pub fn dir(self) -> PathBuf {
        match self {
            Self::Native(layout) => root().join("target/sim").join(layout),
            Self::Torch(version) => root().join("target/bed").join(version),
        }
    }

    /// All of it under another name, as files of their own.
    pub fn copy_to(self, to: &Path) -> Result<()> {
        let status = Command::new("cp").arg("-r").arg(self.dir()).arg(to).status()?;
        ensure!(status.success(), "can not copy {}", self.dir().display());
        Ok(())
    }

    fn launcher(self) -> PathBuf {
        self.dir().join(match self {
            Self::Native(_) => "native-workload",
            Self::Torch(_) => "run",
        })
    }

    fn name(self) -> String {
        match self {
            Self::Native(layout) => format!("native:{layout}"),
            Self::Torch(version) => format!("torch:{version}"),
        }
    }

    /// Whether the test can run here; says so when it can not, and fails when it must.
    pub fn is_ready(self) -> bool {
        let missing = if !is_root() {
            Some("root".to_owned())
        } else if !self.launcher().is_file() {
            Some(format!(
                "{} (cargo xtask {})",
                self.dir().display(),
                if matches!(self, Self::Native(_)) { "sim" } else { "bed" }
            ))
        } else {
            None
        };
        let Some(missing) = missing else { return true };
        assert!(!is_required(&self.name()), "{} is required and there is no {missing}", self.name());
        eprintln!("SKIPPED: there is no {missing}");
        false
    }

    /// Whether [`Self::container`] can be had here; says so when not. The guests of `cargo xtask vm` lack both.
    pub fn has_containers() -> bool {
        let overlay = fs::read_to_string("/proc/filesystems").is_ok_and(|list| list.contains("overlay"))
            || Command::new("modprobe")
                .arg("overlay")
                .stderr(Stdio::null())
                .status()
                .is_ok_and(|status| status.success());
        let unshare = Command::new("unshare").args(["--kill-child", "true"]).stderr(Stdio::null()).status();
        let both = overlay && unshare.is_ok_and(|status| status.success());
        if !both {
            eprintln!("SKIPPED: there is no overlay file system, or no unshare of util-linux");
        }
        both
    }

    /// The native workload as a container has it: file system, process ids and /proc of its own, the libraries from
    /// a layer that it shares with other containers. `dir` is its own and empty. Its process is the command's child.
    pub fn container(self, dir: &Path, args: &[&str]) -> Result<Command> {
        let [upper, work, root] = ["upper", "work", "root"].map(|name| dir.join(name));
        for dir in [&upper, &work, &root] {
            fs::create_dir(dir)?;
        }
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-ec"])
            .arg(
                "mount -t overlay overlay -o \"lowerdir=$1,upperdir=$2,workdir=$3\" \"$4\"; root=$4; shift 4; \
                 exec \"$root/native-workload\" \"$@\"",
            )
            .args(["sh".as_ref(), self.dir().as_os_str(), upper.as_os_str(), work.as_os_str(), root.as_os_str()])
            .args(args);
        Ok(command)
    }

    /// Runs the native workload with arguments, or a Python program of tests/workloads/torch with its own.
    pub fn command(self, args: &[&str]) -> Command {
        let mut command = Command::new(self.launcher());
        if let Self::Torch(_) = self {
            command.arg("python");
        }
        command.args(self.program(args));
        command
    }

    /// The words of a command, without what launches it.
    fn program(self, args: &[&str]) -> Vec<String> {
        let mut words: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
        if let (Self::Torch(_), [program, ..]) = (self, &mut words[..]) {
            *program = root().join("tests/workloads/torch").join(&program).to_string_lossy().into_owned();
        }
        words
    }
}

/// Whether a test that lacks this has to fail.
pub fn is_required(what: &str) -> bool {
    let required = std::env::var("MEMSCOPE_REQUIRE").unwrap_or_default();
    required.split(',').any(|it| it == what)
}

pub fn is_root() -> bool {
    // SAFETY: geteuid takes nothing and can not fail.
    unsafe { libc::geteuid() == 0 }
}

/// A running target. It is killed when dropped.
pub struct Target {
    process: Process,
    stdin: Option<Box<dyn Write + Send>>,
    lines: Receiver<String>,
    seen: Vec<String>,
    errors: Option<JoinHandle<String>>,
}

enum Process {
    Child(Child),
    /// Of the fork server; until its end is known.
    Forked {
        pid: u32,
        status: Option<ExitStatus>,
    },
}

impl Process {
    fn id(&self) -> u32 {
        match self {
            Self::Child(child) => child.id(),
            Self::Forked { pid, .. } => *pid,
        }
    }

    fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        match self {
            Self::Child(child) => Ok(child.try_wait()?),
            Self::Forked { pid, status } => {
                if status.is_none() {
                    *status = fork_server::end(*pid, false)?;
                }
                Ok(*status)
            }
        }
    }

    /// Ends it and waits for the end.
    fn kill(&mut self) {
        match self {
            Self::Child(child) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            Self::Forked { pid, status } if status.is_none() => {
                // SAFETY: kill takes two integers; the process is a child of this one, and not yet waited for.
                unsafe { libc::kill(*pid as i32, libc::SIGKILL) };
                *status = fork_server::end(*pid, true).ok().flatten();
            }
            Self::Forked { .. } => {}
        }
    }
}

impl Target {
    pub fn start(mut command: Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("can not start {command:?}"))?;
        let stdin = child.stdin.take().context("no standard input")?;
        let stdout = child.stdout.take().context("no standard output")?;
        let stderr = child.stderr.take().context("no standard error")?;
        Ok(Self::new(Process::Child(child), stdin, stdout, stderr))
    }

    /// Runs a Python program of tests/workloads/torch in a process that has imported torch already, which saves 7 s of
    /// CPU time. From outside, its environment is that of the tests.
    pub fn fork(ground: Ground, args: &[&str], env: &[(&str, &str)]) -> Result<Self> {
        let fork_server::Forked { pid, stdin, stdout, stderr } = fork_server::fork(ground, args, env)?;
        Ok(Self::new(Process::Forked { pid, status: None }, stdin, stdout, stderr))
    }

    fn new(
        process: Process,
        stdin: impl Write + Send + 'static,
        stdout: impl Read + Send + 'static,
        mut stderr: impl Read + Send + 'static,
    ) -> Self {
        let (tell, lines) = channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    break;
                }
            }
        });
        let errors = thread::spawn(move || {
            let mut text = String::new();
            let _ = stderr.read_to_string(&mut text);
            text
        });
        Self { process, stdin: Some(Box::new(stdin)), lines, seen: Vec::new(), errors: Some(errors) }
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// The only child of the process that was started.
    pub fn child_pid(&self) -> Result<u32> {
        let path = format!("/proc/{0}/task/{0}/children", self.pid());
        let children = fs::read_to_string(path)?;
        children.trim().parse().with_context(|| format!("not one child: {children:?}"))
    }

    /// Sends the target a line.
    pub fn tell(&mut self, line: &str) -> Result<()> {
        let stdin = self.stdin.as_mut().context("standard input is closed")?;
        writeln!(stdin, "{line}")?;
        Ok(stdin.flush()?)
    }

    /// Waits for a line that satisfies `wanted`.
    pub fn wait_for(&mut self, what: &str, wanted: impl Fn(&str) -> bool) -> Result<String> {
        let end = Instant::now() + patience();
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    self.seen.push(line.clone());
                    if wanted(&line) {
                        return Ok(line);
                    }
                }
                Err(_) => {
                    self.process.kill();
                    let errors = self.errors.take().and_then(|e| e.join().ok()).unwrap_or_default();
                    bail!("the target did not print {what}; it printed {:?} and {errors}", self.seen);
                }
            }
        }
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: kill takes two integers; the child is ours and not yet waited for.
        unsafe { libc::kill(self.pid() as i32, signal) };
    }

    /// Waits for the end; everything it printed.
    pub fn finish(mut self) -> Result<(ExitStatus, Vec<String>, String)> {
        drop(self.stdin.take());
        let status = wait(|| self.process.try_wait(), "the target")?;
        let mut seen = std::mem::take(&mut self.seen);
        seen.extend(self.lines.try_iter());
        while let Ok(line) = self.lines.recv_timeout(Duration::from_secs(1)) {
            seen.push(line);
        }
        let errors = self.errors.take().and_then(|e| e.join().ok()).unwrap_or_default();
        Ok((status, seen, errors))
    }

    pub fn is_running(&mut self) -> bool {
        matches!(self.process.try_wait(), Ok(None))
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.process.kill();
    }
}

fn wait(mut ended: impl FnMut() -> Result<Option<ExitStatus>>, what: &str) -> Result<ExitStatus> {
    let end = Instant::now() + patience();
    while Instant::now() < end {
        if let Some(status) = ended()? {
            return Ok(status);
        }
        thread::sleep(Duration::from_millis(10));
    }
    bail!("{what} did not end in {:?}", patience());
}

/// A running tracer.
pub struct Tracer {
    child: Child,
    dir: tempfile::TempDir,
    messages: Receiver<String>,
    said: Vec<String>,
    report: Option<JoinHandle<Vec<u8>>>,
    /// Directories that it uses, besides the one for dumps.
    _more: Option<tempfile::TempDir>,
}

/// Someone who is not root.
#[derive(Debug, Clone)]
pub struct User {
    pub capabilities: Vec<Capability>,
    /// Bytes; as much as it wants, when `None`.
    pub locked_memory: Option<u64>,
}

/// By their numbers in linux/capability.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capability {
    DacReadSearch = 2,
    SysPtrace = 19,
    SysAdmin = 21,
    SysResource = 24,
    Perfmon = 38,
    Bpf = 39,
    CheckpointRestore = 40,
}

const NOBODY: u32 = 65534;

impl User {
    /// Of root's capabilities these alone.
    pub fn with(capabilities: &[Capability]) -> Self {
        Self { capabilities: capabilities.to_vec(), locked_memory: None }
    }

    /// The tracer as this user, in a directory that everyone may read.
    fn command(&self) -> Result<(tempfile::TempDir, Command)> {
        let dir = tempfile::tempdir()?;
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755))?;
        let program = dir.path().join("memscope-trace");
        // Not written by this process, a child of which may be between fork and exec: the file would be busy.
        let copied = Command::new("cp").arg(tracer_binary()?).arg(&program).status()?;
        ensure!(copied.success(), "the tracer can not be copied");
        let mut command = Command::new(program);
        command.env("HOME", "/nonexistent").current_dir("/");
        let user = self.clone();
        // SAFETY: only system calls, on values made before the fork.
        unsafe { command.pre_exec(move || user.become_it()) };
        Ok((dir, command))
    }

    fn become_it(&self) -> io::Result<()> {
        let done = |result: libc::c_long| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
        let memory = self.locked_memory.unwrap_or(libc::RLIM_INFINITY);
        let limit = libc::rlimit { rlim_cur: memory, rlim_max: memory };
        let bits = self.capabilities.iter().fold(0u64, |bits, capability| bits | 1 << *capability as u64);
        // Version 3 of the header, for this process; effective, permitted and inheritable, lower halves first.
        let header = [0x2008_0522u32, 0];
        let (low, high) = (bits as u32, (bits >> 32) as u32);
        let sets = [low, low, low, high, high, high];
        // SAFETY: the pointers are to values of these types on this stack.
        unsafe {
            let limited = done(libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit).into());
            // In some containers root may not raise it; kernels that count maps among it are not there.
            limited.or_else(|e| if self.locked_memory.is_some() { Err(e) } else { Ok(()) })?;
            done(libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0).into())?;
            done(libc::setgroups(0, std::ptr::null()).into())?;
            done(libc::setresgid(NOBODY, NOBODY, NOBODY).into())?;
            done(libc::setresuid(NOBODY, NOBODY, NOBODY).into())?;
            done(libc::syscall(libc::SYS_capset, &raw const header, &raw const sets))?;
            for capability in &self.capabilities {
                let raise = libc::PR_CAP_AMBIENT_RAISE as libc::c_ulong;
                done(libc::prctl(libc::PR_CAP_AMBIENT, raise, *capability as libc::c_ulong, 0, 0).into())?;
            }
        }
        Ok(())
    }
}

/// What a tracer left.
pub struct Traced {
    pub status: ExitStatus,
    pub stdout: String,
    pub messages: Vec<String>,
    pub dir: tempfile::TempDir,
}

impl Tracer {
    /// Starts the tracer; with `--json` and a directory of its own for dumps.
    pub fn start(args: &[&str]) -> Result<Self> {
        Self::start_with(args, true)
    }

    pub fn start_with(args: &[&str], json: bool) -> Result<Self> {
        Self::launch(Command::new(tracer_binary()?), args, json)
    }

    /// Starts it in a PID namespace of its own, with a /proc of its own; the host's is at the place that `args` gets. A
    /// signal does not reach it: it has to end by itself.
    pub fn in_container(args: impl FnOnce(&str) -> Vec<String>) -> Result<Self> {
        let outside = tempfile::tempdir()?;
        let place = outside.path().to_string_lossy().into_owned();
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-ec"]);
        // The mount goes with its namespace.
        command.arg("mount -o bind /proc \"$0\"; exec unshare --pid --fork --mount-proc \"$@\"");
        command.arg(&place).arg(tracer_binary()?);
        let args = args(&place);
        let mut tracer = Self::launch(command, &args.iter().map(String::as_str).collect::<Vec<_>>(), true)?;
        tracer._more = Some(outside);
        Ok(tracer)
    }

    /// Starts it as a user who is not root, with these capabilities, and with locked memory up to a limit.
    pub fn as_user(user: &User, args: &[&str]) -> Result<Self> {
        let (program, mut command) = user.command()?;
        if args.first() == Some(&"check") {
            command.arg("check").arg("--json").args(&args[1..]);
            return Self::spawn(command, tempfile::tempdir()?, Some(program));
        }
        let dir = tempfile::tempdir()?;
        chown(dir.path(), Some(NOBODY), Some(NOBODY))?;
        command.arg("--json").arg("-o").arg(dir.path()).args(args);
        Self::spawn(command, dir, Some(program))
    }

    fn launch(mut command: Command, args: &[&str], json: bool) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        if json {
            command.arg("--json");
        }
        if !args.contains(&"--no-dump") && !args.contains(&"-o") {
            command.arg("-o").arg(dir.path());
        }
        command.args(args);
        Self::spawn(command, dir, None)
    }

    /// `more` is there for as long as the tracer.
    fn spawn(mut command: Command, dir: tempfile::TempDir, more: Option<tempfile::TempDir>) -> Result<Self> {
        // A process group of its own: a signal for it must not reach the test.
        command.process_group(0);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let stderr = child.stderr.take().context("no standard error")?;
        let mut stdout = child.stdout.take().context("no standard output")?;
        let (tell, messages) = channel();
        thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    break;
                }
            }
        });
        let report = thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = stdout.read_to_end(&mut bytes);
            bytes
        });
        Ok(Self { child, dir, messages, said: Vec::new(), report: Some(report), _more: more })
    }

    /// Waits until it says that it traces something.
    pub fn attached(self) -> Result<Self> {
        self.says("tracing ", 1)
    }

    /// Waits until it says that it traces this process.
    pub fn attached_to(self, pid: u32) -> Result<Self> {
        self.says(&format!("tracing {pid} "), 1)
    }

    /// The same of another process, which has got the id of one that was traced.
    pub fn attached_to_another(self, pid: u32) -> Result<Self> {
        self.says(&format!("tracing {pid} "), 2)
    }

    fn says(mut self, prefix: &str, times: usize) -> Result<Self> {
        let end = Instant::now() + patience();
        while self.said.iter().filter(|line| line.starts_with(prefix)).count() < times {
            match self.messages.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => self.said.push(line),
                Err(_) => {
                    let _ = self.child.kill();
                    return Err(anyhow!("the tracer did not attach: {:?}", self.said));
                }
            }
        }
        Ok(self)
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: kill takes two integers; the child is ours and not yet waited for.
        unsafe { libc::kill(self.child.id() as i32, signal) };
    }

    /// Ends it as Ctrl-C does.
    pub fn stop(self) -> Result<Traced> {
        self.signal(libc::SIGINT);
        self.finish()
    }

    /// Ends it as nothing should.
    pub fn kill(mut self) -> Result<Traced> {
        self.child.kill()?;
        self.finish()
    }

    /// Waits for its own end.
    pub fn finish(mut self) -> Result<Traced> {
        let status = wait(|| Ok(self.child.try_wait()?), "the tracer")?;
        let stdout = self.report.take().and_then(|r| r.join().ok()).unwrap_or_default();
        while let Ok(line) = self.messages.recv_timeout(Duration::from_secs(2)) {
            self.said.push(line);
        }
        Ok(Traced {
            status,
            stdout: String::from_utf8_lossy(&stdout).into_owned(),
            messages: self.said,
            dir: self.dir,
        })
    }
}

impl Traced {
    /// The report, which must be there.
    pub fn report(&self) -> Result<Report> {
        let value = serde_json::from_str(&self.stdout)
            .with_context(|| format!("no JSON report: {:?}, {:?}", self.stdout, self.messages))?;
        Ok(Report(value))
    }

    /// All rows of all dumps of a process, by file.
    pub fn dump(&self, pid: u32) -> Result<Vec<DumpFile>> {
        dumps(self.dir.path(), pid)
    }
}

/// A block as reports and ground truths name it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Block {
    pub step: u64,
    pub ptr: u64,
    pub size: u64,
}

pub struct Report(pub Value);

impl Report {
    pub fn device(&self, pid: u32, device: u64) -> Result<&Value> {
        self.0["devices"]
            .as_array()
            .into_iter()
            .flatten()
            .find(|d| d["pid"] == pid && d["device"] == device)
            .with_context(|| format!("no device {device} of {pid} in {:#}", self.0["devices"]))
    }

    pub fn pool<'a>(&self, device: &'a Value, pool: &str) -> Option<&'a Value> {
        device["pools"].as_array()?.iter().find(|p| p["pool"] == pool)
    }

    /// Blocks of a list (`leaks`, `late`, `not_judged`) of a device, sorted.
    pub fn blocks(&self, device: &Value, list: &str) -> Vec<Block> {
        let mut blocks: Vec<Block> = device[list].as_array().into_iter().flatten().map(block).collect();
        blocks.sort();
        blocks
    }

    pub fn lost(&self) -> u64 {
        self.0["events"]["lost"].as_u64().unwrap_or(u64::MAX)
    }

    pub fn received(&self) -> u64 {
        self.0["events"]["received"].as_u64().unwrap_or(0)
    }

    /// Hits and losses of a site, over all its rows.
    pub fn site(&self, name: &str) -> (u64, u64) {
        let rows = self.0["sites"].as_array().into_iter().flatten().filter(|s| s["site"] == name);
        rows.fold((0, 0), |(hits, lost), s| {
            (hits + s["hits"].as_u64().unwrap_or(0), lost + s["lost"].as_u64().unwrap_or(0))
        })
    }
}

pub fn pointer(text: &str) -> u64 {
    u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap_or(0)
}

fn block(value: &Value) -> Block {
    Block {
        step: value["step"].as_u64().unwrap_or(0),
        ptr: value["ptr"].as_str().map(pointer).unwrap_or(0),
        size: value["size"].as_u64().unwrap_or(0),
    }
}

/// One csv of a dump.
pub struct DumpFile {
    pub path: PathBuf,
    pub rows: Vec<HashMap<String, String>>,
}

impl DumpFile {
    /// The value of a key in a row's Attr cell, `{k:v,k:v}`.
    pub fn attr<'a>(row: &'a HashMap<String, String>, key: &str) -> Option<&'a str> {
        let cell = row.get("Attr")?.trim_matches(['{', '}']);
        cell.split(',').find_map(|pair| pair.strip_prefix(key)?.strip_prefix(':'))
    }
}

pub fn dumps(dir: &Path, pid: u32) -> Result<Vec<DumpFile>> {
    let mut files = Vec::new();
    let prefix = format!("msmemscope_{pid}_");
    for project in fs::read_dir(dir)?.filter_map(Result::ok) {
        if !project.file_name().to_string_lossy().starts_with(&prefix) {
            continue;
        }
        for device in fs::read_dir(project.path())?.filter_map(Result::ok) {
            let Ok(entries) = fs::read_dir(device.path().join("dump")) else { continue };
            let is_csv = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "csv");
            for path in entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_csv) {
                // A tracer that was killed may have been in the middle of a row: what counts is up to there.
                let text = fs::read_to_string(&path)?;
                let whole = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
                let rows = csv::Reader::from_reader(whole.as_bytes())
                    .deserialize()
                    .collect::<Result<Vec<HashMap<String, String>>, _>>();
                let rows = rows.with_context(|| format!("{}", path.display()))?;
                files.push(DumpFile { path, rows });
            }
        }
    }
    Ok(files)
}

/// A native target that waits for a line before it does anything, and its truth file.
pub fn held(ground: Ground, dir: &Path, args: &[&str]) -> Result<(Target, PathBuf)> {
    held_with(ground, dir, args, |_| {})
}

/// The same, of a command that is prepared further.
pub fn held_with(
    ground: Ground,
    dir: &Path,
    args: &[&str],
    prepare: impl FnOnce(&mut Command),
) -> Result<(Target, PathBuf)> {
    let file = dir.join("truth.jsonl");
    let path = file.to_string_lossy().into_owned();
    let mut command = ground.command(&[&["--wait-stdin", "--truth", &path], args].concat());
    prepare(&mut command);
    let target = Target::start(command)?;
    wait_for_truth(&file, "ready")?;
    Ok((target, file))
}

pub fn wait_for_truth(file: &Path, event: &str) -> Result<()> {
    let end = Instant::now() + patience();
    while Instant::now() < end {
        if truth(file).is_ok_and(|lines| lines.iter().any(|line| line["event"] == event)) {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(10));
    }
    bail!("{} never said {event}", file.display())
}

/// What `check` says to a user: by subject, state, finding and advice.
pub fn checked_by(user: &User) -> Result<HashMap<String, (String, String)>> {
    let traced = Tracer::as_user(user, &["check"])?.finish()?;
    let document: Value = serde_json::from_str(&traced.stdout)
        .with_context(|| format!("{:?} {:?}", traced.stdout, traced.messages))?;
    let lines = document["checks"].as_array().into_iter().flatten();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Ok(lines
        .map(|line| {
            let said = format!("{}; {}", text(&line["finding"]), text(&line["advice"]));
            (text(&line["subject"]), (text(&line["state"]), said))
        })
        .collect())
}

/// A user with what tracing needs, and with CAP_SYS_ADMIN where this kernel keeps perf uprobes for that, which `check`
/// has to say.
pub fn least_privileged() -> Result<User> {
    let mut user = User::with(&[Capability::Bpf, Capability::Perfmon, Capability::SysPtrace]);
    user.capabilities.push(Capability::DacReadSearch);
    let (state, said) = checked_by(&user)?.remove("attaching").context("nothing about attaching")?;
    if state == "bad" {
        ensure!(said.contains("CAP_SYS_ADMIN") && said.contains("cap_sys_admin+ep"), "{said}");
        user.capabilities.push(Capability::SysAdmin);
    }
    Ok(user)
}

/// Whether this is a guest of `cargo xtask vm`: its processor is an emulated one.
pub fn is_guest() -> bool {
    std::env::var_os("MEMSCOPE_GUEST").is_some()
}

/// Whether this machine's settings can be changed for good; says so when not.
pub fn is_to_be_thrown_away() -> bool {
    if !is_guest() {
        eprintln!("SKIPPED: this is no guest of `cargo xtask vm`");
    }
    is_guest()
}

/// The JSON lines of a ground-truth file.
pub fn truth(path: &Path) -> Result<Vec<Value>> {
    let text = fs::read_to_string(path).with_context(|| format!("{}", path.display()))?;
    text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

impl Tracer {
    /// What `memscope-trace check` found, by subject.
    pub fn check() -> Result<HashMap<String, String>> {
        let output = Command::new(tracer_binary()?).args(["check", "--json"]).output()?;
        let document: Value = serde_json::from_slice(&output.stdout)?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let lines = document["checks"].as_array();
        Ok(lines.into_iter().flatten().map(|line| (text(&line["subject"]), text(&line["finding"]))).collect())
    }

    /// What a verb that reads dumps prints with `--json`.
    pub fn verb(args: &[&str]) -> Result<Value> {
        let output = Command::new(tracer_binary()?).args(args).arg("--json").output()?;
        serde_json::from_slice(&output.stdout)
            .with_context(|| format!("{args:?}: {}", String::from_utf8_lossy(&output.stderr)))
    }

    /// What the tool prints with these arguments.
    pub fn prints(args: &[&str]) -> Result<String> {
        let output = Command::new(tracer_binary()?).args(args).output()?;
        String::from_utf8(output.stdout).with_context(|| format!("{args:?} prints what is no text"))
    }

    /// What `memscope-trace probes` prints.
    pub fn start_probes(args: &[&str]) -> Result<String> {
        let output = Command::new(tracer_binary()?).arg("probes").args(args).output()?;
        if !output.status.success() {
            bail!("probes {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}
