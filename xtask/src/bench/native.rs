//! The native workload, held until whoever watches it is ready.

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use super::{lines, tracer, wait_for};
use crate::sim::Sim;

/// A workload that waits.
pub struct Held {
    child: Child,
    truth: PathBuf,
    dir: tempfile::TempDir,
}

impl Held {
    pub fn start(sim: &Sim, words: &[&str]) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let truth = dir.path().join("truth.jsonl");
        let mut command = Command::new(&sim.workload);
        command.arg("--truth").arg(&truth).args(["--wait-stdin", "--wait-initialized"]).args(words);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
        wait_for(&truth, "ready")?;
        Ok(Self { child, truth, dir })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A directory for what belongs to this run.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Starts the tracer on it, with a report in [`Self::report`], and waits until it is attached.
    pub fn trace(&self, words: &[&str]) -> anyhow::Result<Child> {
        let said = self.dir().join("tracer.txt");
        let mut command = Command::new(tracer());
        command
            .args(["-p", &self.pid().to_string(), "--report"])
            .arg(self.dir().join("report.json"))
            .args(words);
        if !words.contains(&"--no-dump") {
            command.arg("-o").arg(self.dir().join("dump"));
        }
        let child = command.stdout(Stdio::null()).stderr(std::fs::File::create(&said)?).spawn()?;
        for _ in 0..2000 {
            if std::fs::read_to_string(&said)?.contains("tracing ") {
                return Ok(child);
            }
            thread::sleep(Duration::from_millis(5));
        }
        bail!("the tracer did not attach: {}", std::fs::read_to_string(&said)?)
    }

    /// Lets it begin, and waits for its end.
    pub fn play(&mut self) -> anyhow::Result<()> {
        let mut stdin = self.child.stdin.take().context("no standard input")?;
        writeln!(stdin, "go")?;
        let status = self.child.wait()?;
        ensure!(status.success(), "the workload failed: {status}");
        Ok(())
    }

    /// The last figure of that name that it told.
    pub fn figure(&self, name: &str) -> anyhow::Result<f64> {
        let lines = lines(&self.truth);
        let line = lines.iter().rfind(|line| line[name].is_number());
        line.and_then(|line| line[name].as_f64()).with_context(|| format!("the workload told no {name}"))
    }

    /// The tracer's, when it has ended.
    pub fn report(&self) -> anyhow::Result<Value> {
        Ok(serde_json::from_slice(&std::fs::read(self.dir().join("report.json"))?)?)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for the end of a child; with the CPU time that it took, in seconds.
pub fn wait_with_cpu(child: &mut Child) -> anyhow::Result<(ExitStatus, f64)> {
    let before = cpu_of_children();
    let status = child.wait()?;
    Ok((status, cpu_of_children() - before))
}

fn cpu_of_children() -> f64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: a structure of integers, which the call fills.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr());
        usage.assume_init()
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
