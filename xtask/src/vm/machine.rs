//! Booting a guest, and what it says.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{BufRead, BufReader, ErrorKind, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use super::{Arch, Kernel, guest::Tests, packages::dir};
use crate::{
    command::{on_path, output},
    setup::Need,
};

/// How long a guest may take. All tests take 10 to 40 minutes, beside another guest, where sites are attached one by
/// one: by what the host's processors do besides.
const PATIENCE: Duration = Duration::from_secs(5400);

/// What a test program ends with when tests have failed. A guest whose kernel has warned says something else.
const TESTS_FAILED: i32 = 101;

/// What booting these kernels needs.
pub fn needs(kernels: &[Kernel]) -> Vec<Need> {
    let mut needs = vec![Need { what: "cpio", packages: &["cpio"], there: on_path("cpio") }];
    for arch in Arch::ALL {
        if !kernels.iter().any(|kernel| kernel.arch == arch) {
            continue;
        }
        let (packages, cross): (&[_], &[_]) = match arch {
            Arch::Amd64 => (&["qemu-system-x86"], &["gcc-x86-64-linux-gnu", "libc6-dev-amd64-cross"]),
            Arch::Arm64 => (&["qemu-system-arm"], &["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"]),
        };
        needs.push(Need { what: "an emulator", packages, there: on_path(emulator(arch)) });
        let gcc = format!("{}-gcc", arch.tools());
        needs.push(Need { what: "a C compiler for it", packages: cross, there: on_path(&gcc) });
    }
    needs
}

fn emulator(arch: Arch) -> &'static str {
    match arch {
        Arch::Amd64 => "qemu-system-x86_64",
        Arch::Arm64 => "qemu-system-aarch64",
    }
}

/// What a guest said.
#[derive(Debug, Serialize, Deserialize)]
pub struct Report {
    pub kernel: Kernel,
    /// What was tested, as git names it; then what tests were run again at.
    pub commit: String,
    /// As `uname` says: release and version.
    pub release: String,
    pub check: Vec<Finding>,
    /// Tests by name, and whether they passed.
    pub tests: BTreeMap<String, bool>,
    /// What the tests ended with; none when the guest did not come that far.
    exit: Option<i32>,
    pub took: Duration,
    log: PathBuf,
}

/// What `memscope-trace check` prints.
#[derive(Deserialize)]
struct Checked {
    checks: Vec<Finding>,
}

/// A line of it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Finding {
    pub subject: String,
    pub state: String,
    pub finding: String,
    pub advice: Option<String>,
}

impl Report {
    pub fn passed(&self) -> bool {
        // What failed may have been run again since.
        let ended = matches!(self.exit, Some(0 | TESTS_FAILED));
        let ready = !self.check.is_empty() && self.check.iter().all(|line| line.state != "bad");
        ready && ended && !self.tests.is_empty() && self.tests.values().all(|passed| *passed)
    }

    fn place(kernel: Kernel) -> PathBuf {
        dir().join("kept").join(format!("{}.json", kernel.name()))
    }

    /// Adds tests that were run again, and their commit, to what is kept of this kernel. Whether they were.
    pub fn keep_tests(&self) -> anyhow::Result<bool> {
        let Some(mut kept) = Self::kept(self.kernel)?.filter(|_| self.passed()) else { return Ok(false) };
        if !kept.commit.contains(&self.commit) {
            kept.commit += &format!(", {}", self.commit);
        }
        kept.tests.extend(self.tests.iter().map(|(name, passed)| (name.clone(), *passed)));
        kept.keep()?;
        Ok(true)
    }

    /// Keeps it for the document about all kernels.
    pub fn keep(&self) -> anyhow::Result<()> {
        let place = Self::place(self.kernel);
        fs::create_dir_all(place.parent().unwrap_or(&place))?;
        fs::write(&place, serde_json::to_vec(self)?).with_context(|| place.display().to_string())
    }

    /// The last one of a kernel that was kept.
    pub fn kept(kernel: Kernel) -> anyhow::Result<Option<Self>> {
        let place = Self::place(kernel);
        match fs::read(&place) {
            Ok(text) => Ok(serde_json::from_slice(&text).with_context(|| place.display().to_string())?),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e).with_context(|| place.display().to_string()),
        }
    }

    pub fn finding(&self, subject: &str) -> Option<&Finding> {
        self.check.iter().find(|line| line.subject == subject)
    }

    /// What went wrong.
    pub fn complaint(&self) -> String {
        let mut what: Vec<_> =
            self.tests.iter().filter(|(_, passed)| !**passed).map(|(name, _)| name.clone()).collect();
        what.extend(
            self.check
                .iter()
                .filter(|line| line.state == "bad")
                .map(|line| format!("{}: {}", line.subject, line.finding)),
        );
        match self.exit {
            None => what.push(String::from("it did not come to its end")),
            Some(_) if self.tests.is_empty() => what.push(String::from("no test ran")),
            Some(_) => {}
        }
        format!("{}: {} (all it said: {})", self.kernel.name(), what.join("; "), self.log.display())
    }
}

/// Boots a kernel and lets it run the tests, or a shell on this terminal.
pub fn boot(kernel: Kernel, image: &Path, system: &Path, tests: &Tests) -> anyhow::Result<Report> {
    let logs = dir().join("logs");
    fs::create_dir_all(&logs)?;
    let log = logs.join(format!("{}.txt", kernel.name()));
    let mut report = Report {
        kernel,
        commit: output("git", &["describe", "--always", "--dirty"]).unwrap_or_default().trim().to_owned(),
        release: String::new(),
        check: Vec::new(),
        tests: BTreeMap::new(),
        exit: None,
        took: Duration::ZERO,
        log,
    };
    let start = Instant::now();
    let mut command = qemu(kernel.arch, image, system, tests);
    if *tests == Tests::Shell {
        command.status().with_context(|| format!("can not start {}", emulator(kernel.arch)))?;
        return Ok(report);
    }
    eprintln!("{}: booting", kernel.name());
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut machine = Machine(child.with_context(|| format!("can not start {}", emulator(kernel.arch)))?);
    let console = machine.0.stdout.take().context("no console")?;
    let (tell, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(console).split(b'\n').map_while(Result::ok) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            if tell.send(text).is_err() {
                break;
            }
        }
    });
    let mut file = File::create(&report.log)?;
    while let Ok(line) = lines.recv_timeout(PATIENCE.saturating_sub(start.elapsed())) {
        writeln!(file, "{:7.2} {line}", start.elapsed().as_secs_f64())?;
        report.hear(&line);
    }
    report.took = start.elapsed();
    if report.took >= PATIENCE {
        writeln!(file, "stopped: it took longer than {PATIENCE:?}")?;
    }
    if report.exit.is_none() && report.release.is_empty() {
        // The emulator itself may have had something to say.
        machine.0.kill()?;
        let status = machine.0.wait()?;
        let errors = machine.0.stderr.take().map(std::io::read_to_string).transpose()?.unwrap_or_default();
        bail!("{} did not boot ({status}): {errors} (console: {})", kernel.name(), report.log.display());
    }
    let good = report.tests.values().filter(|passed| **passed).count();
    eprintln!(
        "{}: {}, {good} of {} tests passed, {:.0} s",
        kernel.name(),
        report.finding("attaching").map_or("no check", |line| &line.finding),
        report.tests.len(),
        report.took.as_secs_f64()
    );
    Ok(report)
}

impl Report {
    fn hear(&mut self, line: &str) {
        if let Some(release) = line.strip_prefix("@kernel ") {
            self.release = release.to_owned();
        } else if let Some(check) = line.strip_prefix("@check ") {
            self.check = serde_json::from_str(check).map(|Checked { checks }| checks).unwrap_or_default();
        } else if let Some(code) = line.strip_prefix("@exit ") {
            self.exit = code.parse().ok();
        } else if let Some((name, outcome)) =
            line.strip_prefix("test ").and_then(|test| test.split_once(" ... "))
        {
            self.tests.insert(name.to_owned(), outcome == "ok");
        }
    }
}

/// A running emulator. It is stopped when dropped.
struct Machine(Child);

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn qemu(arch: Arch, image: &Path, system: &Path, tests: &Tests) -> Command {
    let mut command = Command::new(emulator(arch));
    // Emulation by software is everywhere, and the same everywhere. By one thread: QEMU before 8.1 with several runs
    // code that another processor has already patched, and the kernel, which patches its own to attach to a
    // tracepoint, panics ("Oops: int3").
    command.args(["-accel", "tcg,thread=single", "-smp", "2", "-m", "1024"]);
    let console = match arch {
        Arch::Amd64 => {
            command.args(["-cpu", "max"]);
            "ttyS0"
        }
        Arch::Arm64 => {
            command.args(["-M", "virt", "-cpu", "cortex-a76"]);
            "ttyAMA0"
        }
    };
    command.args(["-nodefaults", "-display", "none", "-serial", "mon:stdio", "-no-reboot"]);
    let mut line = format!("console={console} quiet panic=-1");
    match tests {
        Tests::All => {}
        Tests::Matching(filter) => line += &format!(" memscope.filter={}", filter.join(",")),
        Tests::Shell => line += " memscope.shell",
    }
    command.arg("-kernel").arg(image).arg("-initrd").arg(system).arg("-append").arg(line);
    command
}
