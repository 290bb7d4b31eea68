//! Python stacks, against what the interpreter itself says of them: every version that this machine has.

use std::{
    collections::{HashMap, HashSet},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use memscope_e2e::{
    Capability, Ground, Target, Traced, Tracer, User, is_required, pace, pointer, root, truth, wait_for_truth,
};
use serde_json::Value;

const GROUND: Ground = Ground::Native("v8");

/// Minor versions of CPython 3 whose stacks are understood.
const KNOWN: std::ops::RangeInclusive<u32> = 8..=13;

struct Python {
    program: PathBuf,
    /// `3.11.7`
    version: String,
    minor: u32,
}

/// One of each version, wherever versions are kept.
fn interpreters() -> Vec<Python> {
    let mut places: Vec<PathBuf> = ["/usr/bin", "/usr/local/bin"].map(PathBuf::from).to_vec();
    for kept in [".pyenv/versions", ".local/share/uv/python", "miniconda3/envs"] {
        let versions = std::env::var_os("HOME").map(|home| Path::new(&home).join(kept));
        let entries = versions.and_then(|versions| versions.read_dir().ok()).into_iter().flatten().flatten();
        places.extend(entries.map(|entry| entry.path().join("bin")));
    }
    let mut found: HashMap<(String, bool), Python> = HashMap::new();
    for (place, minor) in places.iter().flat_map(|place| KNOWN.map(move |minor| (place, minor))) {
        let program = place.join(format!("python3.{minor}"));
        let script = "import sys; print('%d.%d.%d' % sys.version_info[:3])";
        let Ok(output) = Command::new(&program).args(["-c", script]).output() else { continue };
        let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if version.starts_with(&format!("3.{minor}.")) {
            // Debian's have the interpreter in the program, others in a library.
            let is_system = place.starts_with("/usr");
            found.entry((version.clone(), is_system)).or_insert(Python { program, version, minor });
        }
    }
    let mut found: Vec<_> = found.into_values().collect();
    found.sort_by_key(|python| (python.minor, python.version.clone()));
    if found.is_empty() {
        assert!(
            !is_required("python"),
            "Python is required, and there is no CPython 3.8 to 3.13 in {places:?}"
        );
        eprintln!("SKIPPED: there is no CPython 3.8 to 3.13 in {places:?}");
    }
    found
}

/// A program of tests/workloads/python, with files for its truth and for when it is to begin.
fn program(python: &Python, name: &str, file: &Path, gate: &Path) -> Command {
    let mut command = Command::new(&python.program);
    command.arg(root().join("tests/workloads/python").join(name));
    command.arg("--library").arg(root().join("target/sim/v8/lib64/libascendcl.so"));
    command.arg("--truth").arg(file).arg("--wait-file").arg(gate);
    command
}

/// The truth and the trace of one run of `stacks.py`.
fn run(python: &Python, options: &[&str]) -> Result<(Vec<Value>, Traced, u32)> {
    run_under(python, |pid| Tracer::start(&[&["-p", pid], options].concat()))
}

/// By a tracer of the process whose id it gets.
fn run_under(
    python: &Python,
    tracer: impl FnOnce(&str) -> Result<Tracer>,
) -> Result<(Vec<Value>, Traced, u32)> {
    run_with(python, tracer, |_| {}, |_| {})
}

/// The same; with what is done to the attached tracer before the program allocates, and after the program's end.
fn run_with(
    python: &Python,
    tracer: impl FnOnce(&str) -> Result<Tracer>,
    before: impl Fn(&Tracer),
    after: impl Fn(&Tracer),
) -> Result<(Vec<Value>, Traced, u32)> {
    let dir = tempfile::tempdir()?;
    let (file, gate) = (dir.path().join("truth.jsonl"), dir.path().join("go"));
    let command = program(python, "stacks.py", &file, &gate);
    let target = Target::start(command)?;
    let pid = target.pid();
    wait_for_truth(&file, "ready")?;
    let tracer = tracer(&pid.to_string())?.attached()?;
    before(&tracer);
    std::fs::write(&gate, "")?;
    let (status, _, errors) = target.finish()?;
    after(&tracer);
    ensure!(status.success(), "{}: {status}: {errors}", python.version);
    Ok((truth(&file)?, tracer.finish()?, pid))
}

/// Stacks of the dump by the addresses of their blocks.
fn dumped(traced: &Traced, pid: u32) -> Result<HashMap<u64, String>> {
    let files = traced.dump(pid)?;
    let rows = files.iter().flat_map(|file| &file.rows).filter(|row| row["Event"] == "MALLOC");
    Ok(rows.map(|row| (pointer(&row["Ptr"]), row["Call Stack(Python)"].clone())).collect())
}

/// What the dump must say of a block.
fn told(block: &Value, separator: &str) -> Result<String> {
    let frames = block["python"].as_array().context("no frames")?;
    let lines: Vec<_> = frames
        .iter()
        .map(|frame| {
            let text = |key: &str| frame[key].as_str().unwrap_or_default().to_owned();
            format!("{}({}): {}", text("file"), frame["line"], text("function"))
        })
        .collect();
    Ok(lines.join(separator))
}

fn assert_equal(python: &Python, lines: &[Value], stacks: &HashMap<u64, String>) -> Result<()> {
    let blocks: Vec<_> = lines.iter().filter(|line| line["event"] == "block").collect();
    assert!(blocks.len() >= 80, "{}: {} blocks", python.version, blocks.len());
    for block in blocks {
        let ptr = block["ptr"].as_u64().context("no address")?;
        let found = stacks.get(&ptr).with_context(|| format!("no block at {ptr:#x}"))?;
        let what = format!("{} {} {}", python.version, block["kind"], block["gil"]);
        assert_eq!(*found, told(block, "\n")?, "{what}");
    }
    Ok(())
}

#[test]
fn stacks_are_what_the_interpreter_says() -> Result<()> {
    if !GROUND.is_ready() {
        return Ok(());
    }
    for python in interpreters() {
        let (lines, traced, pid) = run(&python, &["--call-stack", "python:128"])?;
        let report = traced.report()?;
        let target = &report.0["targets"][0];
        let version = target["python"].as_str().with_context(|| format!("{}: {target}", python.version))?;
        assert!(python.version.starts_with(version), "{version} is not {}", python.version);
        assert_eq!(target["stacks"]["gone_frames"], 0, "{}", python.version);
        assert_equal(&python, &lines, &dumped(&traced, pid)?)?;
        eprintln!("{}: {} blocks", python.program.display(), lines.len() - 2);
    }
    Ok(())
}

/// From a PID namespace that does not have the process: neither its memory nor its threads' lists can be asked for by
/// its number.
#[test]
fn stacks_are_seen_from_inside_a_container() -> Result<()> {
    if !GROUND.is_ready() {
        return Ok(());
    }
    for python in interpreters() {
        let (lines, traced, pid) = run_under(&python, |pid| {
            Tracer::in_container(|proc| {
                ["--proc", proc, "-p", pid, "--call-stack", "python:128"].map(str::to_owned).to_vec()
            })
        })?;
        assert_equal(&python, &lines, &dumped(&traced, pid)?)?;
    }
    Ok(())
}

#[test]
fn stacks_need_no_root() -> Result<()> {
    if !GROUND.is_ready() {
        return Ok(());
    }
    let Some(python) = interpreters().pop() else { return Ok(()) };
    use Capability::{Bpf, DacReadSearch, Perfmon, SysAdmin, SysPtrace};
    let mut user = User::with(&[Bpf, Perfmon, SysPtrace, DacReadSearch]);
    if !Tracer::check()?["attaching"].contains("uprobe_multi") {
        user.capabilities.push(SysAdmin);
    }
    let options = |pid: &str| Tracer::as_user(&user, &["-p", pid, "--call-stack", "python:128"]);
    let (lines, traced, pid) = run_under(&python, options)?;
    assert_equal(&python, &lines, &dumped(&traced, pid)?)
}

/// Waits until what a command has loaded while it ran is attached, as it seems: where there is a program for each site, over
/// seconds. Blocks from before are not known.
fn attached_to_all(tracer: &Tracer) -> Result<()> {
    let step = Duration::from_secs(2 * pace());
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", tracer.pid())).map(Iterator::count);
    let mut held = 0;
    while held != descriptors()? {
        held = descriptors()?;
        thread::sleep(step);
    }
    Ok(())
}

/// The interpreter is looked for as soon as there is one: after the shell, which has none, has made way for it.
#[test]
fn stacks_are_there_from_the_first_instruction() -> Result<()> {
    if !GROUND.is_ready() {
        return Ok(());
    }
    let Some(python) = interpreters().pop() else { return Ok(()) };
    let dir = tempfile::tempdir()?;
    let (file, gate) = (dir.path().join("truth.jsonl"), dir.path().join("go"));
    let command = program(&python, "stacks.py", &file, &gate);
    let mut words = vec!["--call-stack", "python:128", "--", "sh", "-c", "exec \"$0\" \"$@\""];
    words.extend(
        std::iter::once(command.get_program()).chain(command.get_args()).filter_map(|word| word.to_str()),
    );
    let tracer = Tracer::start(&words)?.attached()?;
    wait_for_truth(&file, "ready")?;
    attached_to_all(&tracer)?;
    std::fs::write(&gate, "")?;
    let traced = tracer.finish()?;
    let mut lines = truth(&file)?;
    let ready = lines.iter().find(|line| line["event"] == "ready").context("it did not run")?;
    let pid = ready["pid"].as_u64().context("no pid")? as u32;
    let stacks = dumped(&traced, pid)?;
    // What came before the last site was attached is not known at all.
    lines.retain(|line| {
        line["event"] != "block" || line["ptr"].as_u64().is_some_and(|ptr| stacks.contains_key(&ptr))
    });
    assert_equal(&python, &lines, &stacks)
}

/// A process that has just been forked is its parent's twin: where that one's interpreter is known, its is, before it has
/// been looked at. What it does from then on is its own: at the same addresses there may be other code.
#[test]
fn stacks_of_forked_processes_are_there_from_their_first_allocation() -> Result<()> {
    /// Each fourth forks another one.
    const PROCESSES: usize = 50;
    if !GROUND.is_ready() {
        return Ok(());
    }
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        eprintln!("SKIPPED: this kernel does not describe its structures");
        return Ok(());
    }
    let all = interpreters();
    for python in [all.first(), all.last()].into_iter().flatten() {
        let dir = tempfile::tempdir()?;
        let [file, gate, end] = ["truth.jsonl", "go", "end"].map(|name| dir.path().join(name));
        let mut command = program(python, "forks.py", &file, &gate);
        command.arg("--end-file").arg(&end);
        let mut words = vec!["--call-stack", "python:128", "--"];
        words.extend(
            std::iter::once(command.get_program()).chain(command.get_args()).filter_map(|word| word.to_str()),
        );
        let mut tracer = Tracer::start(&words)?.attached()?;
        wait_for_truth(&file, "ready")?;
        attached_to_all(&tracer)?;
        std::fs::write(&gate, "")?;
        // Who has ended before it could be looked at is in no figure.
        let forked = |lines: &[Value]| -> HashSet<u32> {
            let last = lines.iter().filter(|line| line["kind"] == "own code again");
            last.filter_map(|line| line["pid"].as_u64()).map(|pid| pid as u32).collect()
        };
        let mut children = HashSet::new();
        for _ in 0..600 {
            // A line may be half written.
            children = truth(&file).map(|lines| forked(&lines)).unwrap_or_default();
            if children.len() == PROCESSES {
                break;
            }
            thread::sleep(Duration::from_millis(100));
        }
        assert_eq!(children.len(), PROCESSES, "{}", python.version);
        for child in &children {
            tracer = tracer.attached_to(*child)?;
        }
        std::fs::write(&end, "")?;
        let traced = tracer.finish()?;
        let (mut known, mut unknown, mut missing) = (0, 0, Vec::new());
        for pid in children {
            let stacks = dumped(&traced, pid)?;
            for block in truth(&file)?.iter().filter(|line| line["event"] == "block" && line["pid"] == pid) {
                let ptr = block["ptr"].as_u64().context("no address")?;
                match stacks.get(&ptr).map(String::as_str) {
                    // The last site had not been attached.
                    None => unknown += 1,
                    Some("") => missing.push(block["kind"].to_string()),
                    Some(found) => {
                        known += 1;
                        assert_eq!(found, told(block, "\n")?, "{} {}", python.version, block["kind"]);
                    }
                }
            }
        }
        assert!(known > unknown, "{}: {unknown} of {} blocks are not known", python.version, known + unknown);
        assert!(missing.is_empty(), "{}: {} have no stack: {missing:?}", python.version, missing.len());
    }
    Ok(())
}

/// Names are there also when the program is not any more: the tracer sees nothing of it before it has ended.
#[test]
fn stacks_of_a_program_that_has_ended_have_their_names() -> Result<()> {
    if !GROUND.is_ready() {
        return Ok(());
    }
    let all = interpreters();
    for python in [all.first(), all.last()].into_iter().flatten() {
        let start = |pid: &str| Tracer::start(&["-p", pid, "--call-stack", "python:128"]);
        let signal = |signal| move |tracer: &Tracer| tracer.signal(signal);
        let (lines, traced, pid) = run_with(python, start, signal(libc::SIGSTOP), signal(libc::SIGCONT))?;
        assert_eq!(traced.report()?.0["targets"][0]["stacks"]["gone_frames"], 0, "{}", python.version);
        assert_equal(python, &lines, &dumped(&traced, pid)?)?;
    }
    Ok(())
}

/// On kernels that do not describe their structures, and through a program for each site as on 5.10.
#[test]
fn stacks_need_nothing_that_old_kernels_lack() -> Result<()> {
    if !GROUND.is_ready() {
        return Ok(());
    }
    for python in interpreters().into_iter().rev().take(1) {
        let options = ["--without-btf", "--mechanism", "perf-site", "--call-stack", "python:128"];
        let (mut lines, traced, pid) = run(&python, &options)?;
        // Threads that began after the last look are counted as having no known slot.
        let main = |block: &Value| block["python"].to_string().contains("<module>");
        lines.retain(|line| line["event"] != "block" || main(line));
        assert_equal(&python, &lines, &dumped(&traced, pid)?)?;
    }
    Ok(())
}

#[test]
fn depth_rate_and_form_are_the_users_choice() -> Result<()> {
    if !GROUND.is_ready() {
        return Ok(());
    }
    let Some(python) = interpreters().pop() else { return Ok(()) };
    // The interpreter's own frames count, though they are not shown.
    let (lines, traced, pid) = run(&python, &["--call-stack", "python:5"])?;
    let stacks = dumped(&traced, pid)?;
    for block in lines.iter().filter(|line| line["event"] == "block") {
        let found = block["ptr"].as_u64().and_then(|ptr| stacks.get(&ptr)).context("no block")?;
        let told = told(block, "\n")?;
        assert!(told.starts_with(found) && (2..=5).contains(&found.lines().count()), "{found} for {told}");
    }

    let (lines, traced, pid) = run(&python, &["--flat-stacks", "--call-stack", "python:128"])?;
    let stacks = dumped(&traced, pid)?;
    for block in lines.iter().filter(|line| line["event"] == "block") {
        let found = block["ptr"].as_u64().and_then(|ptr| stacks.get(&ptr)).context("no block")?;
        assert_eq!(*found, told(block, " <- ")?);
    }

    let (_, traced, pid) = run(&python, &["--call-stack", "none"])?;
    assert!(dumped(&traced, pid)?.values().all(String::is_empty));
    assert_eq!(traced.report()?.0["targets"][0]["stacks"], Value::Null);

    // A share of one a second, saved up for one more: events beyond are there, without a stack, and counted.
    let (lines, traced, pid) = run(&python, &["--stack-rate", "1"])?;
    let stacks = dumped(&traced, pid)?;
    let blocks = lines.iter().filter(|line| line["event"] == "block").count() as u64;
    let facts = &traced.report()?.0["targets"][0]["stacks"];
    let limited = facts["without"].as_array().into_iter().flatten();
    let limited: u64 = limited
        .filter(|without| without["reason"] == "beyond a thread's share of stacks")
        .filter_map(|without| without["allocations"].as_u64())
        .sum();
    assert!(limited > blocks / 2, "{facts}");
    assert_eq!(stacks.values().filter(|stack| stack.is_empty()).count() as u64, limited, "{facts}");
    Ok(())
}

/// Function, file and line of a frame.
type Seen = (String, String, u64);

/// What py-spy sees of the threads of a process, each with its frames, innermost first: function, file, line.
fn seen_by_py_spy(program: &Path, pid: u32) -> Result<Vec<Vec<Seen>>> {
    let output = Command::new(program).args(["dump", "--json", "--pid", &pid.to_string()]).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let threads: Vec<Value> = serde_json::from_slice(&output.stdout)?;
    let frames = |thread: &Value| {
        let frames = thread["frames"].as_array().into_iter().flatten();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let told = |f: &Value| (text(&f["name"]), text(&f["filename"]), f["line"].as_u64().unwrap_or(0));
        frames.map(told).collect()
    };
    Ok(threads.iter().map(frames).collect())
}

/// By another program, which stops the process and reads it from outside: of threads that wait where they have allocated.
#[test]
fn stacks_are_what_py_spy_says() -> Result<()> {
    let py_spy = root().join("target/py-spy/bin/py-spy");
    if !GROUND.is_ready() {
        return Ok(());
    }
    if !py_spy.is_file() {
        assert!(!is_required("py-spy"), "py-spy is required and there is no {}", py_spy.display());
        eprintln!("SKIPPED: there is no {}, which `cargo xtask test` installs", py_spy.display());
        return Ok(());
    }
    for python in interpreters() {
        let dir = tempfile::tempdir()?;
        let (file, gate) = (dir.path().join("truth.jsonl"), dir.path().join("go"));
        let target = Target::start(program(&python, "parked.py", &file, &gate))?;
        let pid = target.pid();
        wait_for_truth(&file, "ready")?;
        let tracer = Tracer::start(&["-p", &pid.to_string(), "--call-stack", "python:128"])?.attached()?;
        std::fs::write(&gate, "")?;
        wait_for_truth(&file, "block")?;
        // From the truth to the wait it is not far, and it is known when a thread has come there.
        let parked = |threads: &Vec<Vec<Seen>>| {
            let is_parked =
                |frames: &&Vec<Seen>| frames.first().is_some_and(|(name, ..)| name.ends_with("park"));
            threads.iter().filter(is_parked).count() == 2
        };
        let mut seen = seen_by_py_spy(&py_spy, pid)?;
        for _ in 0..600 {
            if parked(&seen) {
                break;
            }
            thread::sleep(Duration::from_millis(100));
            seen = seen_by_py_spy(&py_spy, pid)?;
        }
        assert!(parked(&seen), "{}: {seen:?}", python.version);
        let (status, ..) = target.finish()?;
        assert!(status.success(), "{}: {status}", python.version);
        let traced = tracer.finish()?;
        let stacks = dumped(&traced, pid)?;
        let blocks: Vec<_> = truth(&file)?.into_iter().filter(|line| line["event"] == "block").collect();
        assert_eq!(blocks.len(), 2);
        for block in blocks {
            let stack = block["ptr"].as_u64().and_then(|ptr| stacks.get(&ptr)).context("no block")?;
            let is_same = |frames: &&Vec<Seen>| {
                let lines: Vec<_> = stack.lines().collect();
                // Before 3.11 it knows no qualified names.
                frames.len() == lines.len()
                    && frames.iter().zip(lines).all(|((name, file, line), found)| {
                        let qualified = found.strip_prefix(&format!("{file}({line}): "));
                        qualified.is_some_and(|q| q == name || q.ends_with(&format!(".{name}")))
                    })
            };
            assert_eq!(seen.iter().filter(is_same).count(), 1, "{}: {stack} in {seen:#?}", python.version);
        }
    }
    Ok(())
}
