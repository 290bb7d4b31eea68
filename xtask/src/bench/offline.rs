//! `cargo xtask bench --offline`: time and memory of the verbs that read dumps, over a large one and a tenth of it. Where
//! memory is the same for both, it does not grow with the rows.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Instant,
};

use anyhow::{Context, ensure};

use super::tracer;
use crate::command::{cargo, root, run};

/// One run of a program.
struct Cost {
    /// By the clock.
    seconds: f64,
    /// Of all threads.
    cpu_seconds: f64,
    /// Resident, at most.
    mebibytes: f64,
}

/// Two dumps of the same number of rows.
struct Dumps {
    base: PathBuf,
    other: PathBuf,
    scratch: PathBuf,
}

pub fn bench(rows: u64) -> anyhow::Result<()> {
    run(cargo().args([
        "build",
        "--quiet",
        "--release",
        "--package",
        "memscope-user",
        "--bins",
        "--example",
        "large_dump",
    ]))?;
    let dir = tempfile::tempdir_in(root().join("target"))?;
    let (large, small) = (dumps(dir.path(), rows)?, dumps(dir.path(), rows / 10)?);
    let gigabytes = fs::metadata(&large.base)?.len() as f64 / 1e9;
    println!("\nA dump of {rows} rows ({gigabytes:.2} GB of csv), and one of a tenth of that:\n");
    println!("| verb | seconds | seconds of CPU | MiB | MiB for a tenth |");
    println!("|---|---|---|---|---|");
    for (verb, words) in verbs() {
        let of_large = cost(&words(&large), &large.scratch)?;
        let of_small = cost(&words(&small), &small.scratch)?;
        println!(
            "| `{verb}` | {:.1} | {:.1} | {:.0} | {:.0} |",
            of_large.seconds, of_large.cpu_seconds, of_large.mebibytes, of_small.mebibytes
        );
    }
    Ok(())
}

type Words = fn(&Dumps) -> Vec<&Path>;

fn verbs() -> [(&'static str, Words); 10] {
    [
        ("leaks DUMP", |d| words(&["leaks"], &[&d.base])),
        ("leaks DUMP --mstx-info epoch", |d| words(&["leaks", "--mstx-info", "epoch"], &[&d.base])),
        ("inefficient DUMP", |d| words(&["inefficient"], &[&d.base])),
        ("inefficient DUMP --rules drgpum", |d| words(&["inefficient", "--rules", "drgpum"], &[&d.base])),
        ("decompose DUMP", |d| words(&["decompose"], &[&d.base])),
        ("oom DUMP", |d| words(&["oom"], &[&d.base])),
        ("compare --steps 3,7 DUMP", |d| words(&["compare", "--steps", "3,7"], &[&d.other])),
        ("compare BASE OTHER", |d| words(&["compare", "-o"], &[&d.scratch, &d.base, &d.other])),
        ("convert DUMP DIR --format csv", |d| words(&["convert", "--format", "csv"], &[&d.base, &d.scratch])),
        ("convert DUMP DIR --format capture", |d| {
            words(&["convert", "--format", "capture"], &[&d.base, &d.scratch])
        }),
    ]
}

fn words<'a>(options: &[&'static str], paths: &[&'a Path]) -> Vec<&'a Path> {
    options.iter().map(|option| Path::new(*option)).chain(paths.iter().copied()).collect()
}

fn dumps(dir: &Path, rows: u64) -> anyhow::Result<Dumps> {
    let dump = |name: &str, changed: bool| {
        let out = dir.join(format!("{name}-{rows}"));
        let mut command = Command::new(root().join("target/release/examples/large_dump"));
        command.arg(&out).arg(rows.to_string()).args(changed.then_some("--changed"));
        let output = command.stderr(Stdio::inherit()).output().context("can not start large_dump")?;
        ensure!(output.status.success(), "large_dump failed: {}", output.status);
        let paths = String::from_utf8(output.stdout)?;
        anyhow::Ok(PathBuf::from(paths.lines().next().context("large_dump wrote nothing")?))
    };
    let scratch = dir.join(format!("scratch-{rows}"));
    Ok(Dumps { base: dump("base", false)?, other: dump("other", true)?, scratch })
}

fn cost(words: &[&Path], scratch: &Path) -> anyhow::Result<Cost> {
    let begin = Instant::now();
    let child = Command::new(tracer()).args(words).stdout(Stdio::null()).spawn()?;
    let usage = wait(child)?;
    let seconds = begin.elapsed().as_secs_f64();
    if scratch.exists() {
        fs::remove_dir_all(scratch)?;
    }
    let time = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    Ok(Cost {
        seconds,
        cpu_seconds: time(usage.ru_utime) + time(usage.ru_stime),
        mebibytes: usage.ru_maxrss as f64 / 1024.0,
    })
}

/// Waits for a program and says what it used.
fn wait(child: Child) -> anyhow::Result<libc::rusage> {
    let mut status = 0;
    // SAFETY: a rusage is numbers alone, for which zeros are good.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both point to variables of ours. Nobody else waits for the child: it is dropped here.
    let waited = unsafe { libc::wait4(child.id() as libc::pid_t, &raw mut status, 0, &raw mut usage) };
    ensure!(waited > 0, "can not wait: {}", std::io::Error::last_os_error());
    ensure!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "the verb failed: status {status}");
    Ok(usage)
}
