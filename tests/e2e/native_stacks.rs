//! Native stacks, against what the program knows by its making, and against gdb.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use memscope_e2e::{Ground, Target, Traced, Tracer, pointer, truth};
use serde_json::Value;

const GROUND: Ground = Ground::Native("v8");

/// What the functions of the workload whose callers are known begin with.
const OURS: &str = "native_workload::stacks::";

/// The workload of known stacks, after its first round, which is for what is done once.
fn ready(dir: &Path, rounds: &str) -> Result<(Target, PathBuf)> {
    start(GROUND.command(&[]), dir, rounds)
}

fn start(mut workload: Command, dir: &Path, rounds: &str) -> Result<(Target, PathBuf)> {
    let file = dir.join("truth.jsonl");
    workload.arg("--truth").arg(&file).arg("stacks").arg(dir).args(["--rounds", rounds]);
    let target = Target::start(workload)?;
    wait_for_round(&file, 1)?;
    Ok((target, file))
}

fn wait_for_round(file: &Path, round: u64) -> Result<()> {
    for _ in 0..6000 {
        let waits = |line: &Value| line["event"] == "waits" && line["round"] == round;
        if truth(file).is_ok_and(|lines| lines.iter().any(waits)) {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(5));
    }
    anyhow::bail!("{} never came to round {round}", file.display())
}

/// Plays a round under the tracer.
fn traced(target: &Target, dir: &Path, file: &Path, round: u64, options: &[&str]) -> Result<Traced> {
    let pid = target.pid().to_string();
    let tracer = Tracer::start(&[&["-p", pid.as_str()], options].concat())?.attached()?;
    std::fs::write(dir.join(round.to_string()), "")?;
    wait_for_round(file, round + 1)?;
    tracer.stop()
}

/// A frame of the dump: file, function, return address.
#[derive(Debug, Clone, PartialEq)]
struct Frame {
    module: String,
    function: String,
    address: u64,
}

/// Native stacks of a dump, in the order of allocations, with the addresses of their blocks; and whether they are whole.
fn dumped(traced: &Traced, pid: u32) -> Result<Vec<(u64, Vec<Frame>, bool)>> {
    let mut rows: Vec<_> = traced.dump(pid)?.into_iter().flat_map(|file| file.rows).collect();
    rows.retain(|row| row["Event"] == "MALLOC");
    rows.sort_by_key(|row| row["Timestamp(ns)"].parse::<u64>().unwrap_or(0));
    let stack = |row: &HashMap<String, String>| {
        let cell = &row["Call Stack(C)"];
        let frames = cell.lines().filter_map(|line| {
            let (place, address) = line.strip_suffix(']')?.rsplit_once(" [")?;
            let (module, symbol) = place.strip_suffix(')')?.rsplit_once('(')?;
            let function = format!("{:#}", rustc_demangle::demangle(symbol.rsplit_once('+')?.0));
            Some(Frame { module: module.to_owned(), function, address: pointer(address) })
        });
        (pointer(&row["Ptr"]), frames.collect(), !cell.ends_with("..."))
    };
    Ok(rows.iter().map(stack).collect())
}

/// Functions of ours, innermost first.
fn ours(frames: &[Frame]) -> Vec<&str> {
    let names = frames.iter().filter_map(|frame| frame.function.strip_prefix(OURS));
    names.filter(|name| !name.contains('{')).collect()
}

/// What must be on the stack of a block that the workload tells of.
fn told(block: &Value) -> Vec<String> {
    let mut functions: Vec<String> = block["functions"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|f| f.as_str().map(str::to_owned))
        .collect();
    if functions.last().is_some_and(|last| last == "*") {
        functions.pop();
    } else if block["whole"] == true {
        functions.push("play".to_owned());
    }
    functions
}

fn of_round(lines: &[Value], round: u64) -> Vec<&Value> {
    lines.iter().filter(|line| line["event"] == "stack" && line["round"] == round).collect()
}

#[test]
fn every_function_is_there_in_order() -> Result<()> {
    if !GROUND.is_ready() {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let (target, file) = ready(dir.path(), "3")?;
    let pid = target.pid();
    let traced = traced(&target, dir.path(), &file, 1, &["--call-stack", "c:128"])?;
    let stacks = dumped(&traced, pid)?;
    let lines = truth(&file)?;
    let blocks = of_round(&lines, 1);
    assert!(blocks.len() >= 7, "{blocks:?}");
    for block in blocks {
        let ptr = block["ptr"].as_u64();
        let (_, frames, whole) =
            stacks.iter().find(|(address, ..)| Some(*address) == ptr).context("a block is missing")?;
        let functions: Vec<&str> = frames.iter().map(|frame| &*frame.function).collect();
        assert_eq!(ours(frames), told(block), "{}: {functions:#?}", block["kind"]);
        assert_eq!(Value::Bool(*whole), block["whole"], "{}: {functions:#?}", block["kind"]);
        // The runtime called the driver, and the program called the runtime.
        assert!(functions.iter().take(3).any(|function| *function == "rtMalloc"), "{functions:#?}");
        if *whole {
            let on_thread = block["kind"] == "thread";
            let outermost = frames.last().context("no frames")?;
            // The C library begins a thread, in a function that is often without a symbol.
            let begins = if on_thread {
                outermost.module.contains("/libc.so")
            } else {
                outermost.function == "_start"
            };
            assert!(begins, "{functions:#?}");
            assert!(on_thread || functions.contains(&"native_workload::main"), "{functions:#?}");
        }
    }
    // Memory that CANN takes within a call that has a return probe: its trampoline is on the stack meanwhile.
    let within = |(_, frames, whole): &&(u64, Vec<Frame>, bool)| {
        *whole && frames.iter().any(|frame| frame.function.starts_with("aclrtCreateContext"))
    };
    let within: Vec<_> = stacks.iter().filter(within).collect();
    assert!(!within.is_empty(), "{stacks:#?}");
    assert!(within.iter().all(|(_, frames, _)| ours(frames) == ["context", "play"]), "{within:#?}");

    let facts = &traced.report()?.0["targets"][0]["native_stacks"];
    let (whole, cut) = (facts["whole"].as_u64().unwrap_or(0), facts["cut"].as_u64().unwrap_or(0));
    assert_eq!((whole + cut) as usize, stacks.len(), "{facts}");
    assert_eq!(facts["without"].as_array().map(Vec::len), Some(0), "{facts}");
    Ok(())
}

/// Chains in the order in which gdb finds them: return addresses, innermost first.
fn by_gdb(pid: u32, gate: &Path, dir: &Path, stops: usize) -> Result<Vec<Vec<u64>>> {
    let (script, output) = (dir.join("script.py"), dir.join("chains"));
    let text = format!(
        r#"
import gdb
for setting in ("pagination off", "confirm off", "backtrace past-main on", "backtrace past-entry on",
                "breakpoint pending off", "debuginfod enabled off"):
    try:
        gdb.execute("set " + setting)
    except gdb.error:
        pass
gdb.execute("handle SIGUSR1 nostop noprint pass")
gdb.execute("break *halMemAlloc")
open({gate:?}, "w").close()
with open({output:?}, "w") as out:
    for _ in range({stops}):
        gdb.execute("continue")
        frame, chain = gdb.newest_frame(), []
        while frame is not None:
            if frame.type() not in (gdb.INLINE_FRAME, gdb.TAILCALL_FRAME):
                chain.append("%x" % frame.pc())
            frame = frame.older()
        out.write(" ".join(chain[1:]) + "\n")
gdb.execute("delete")
gdb.execute("detach")
"#,
        gate = gate.display().to_string(),
        output = output.display().to_string(),
    );
    std::fs::write(&script, text)?;
    let pid = pid.to_string();
    // Without its breakpoint gdb waits for ever.
    let gdb = ["120", "gdb", "-nx", "-batch", "-p", &pid, "-x"];
    let found = Command::new("timeout").args(gdb).arg(&script).output()?;
    let chains = std::fs::read_to_string(&output).unwrap_or_default();
    ensure!(
        chains.lines().count() == stops,
        "gdb found {} of {stops} chains: {}",
        chains.lines().count(),
        String::from_utf8_lossy(&found.stderr)
    );
    Ok(chains.lines().map(|line| line.split(' ').map(pointer).collect()).collect())
}

/// The same process allocates twice in the same way: once as we see it, once as gdb does.
#[test]
fn stacks_are_what_gdb_finds() -> Result<()> {
    if !GROUND.is_ready() {
        return Ok(());
    }
    if !Command::new("gdb").arg("--version").output().is_ok_and(|output| output.status.success()) {
        eprintln!("SKIPPED: there is no gdb");
        return Ok(());
    }
    // With libraries of its own: of a file, the last tracer that detaches anywhere takes gdb's breakpoints for its probes.
    let (dir, parent) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let ground = parent.path().join("ground");
    GROUND.copy_to(&ground)?;
    let (target, file) = start(Command::new(ground.join("native-workload")), dir.path(), "4")?;
    let pid = target.pid();
    let traced = traced(&target, dir.path(), &file, 1, &["--call-stack", "c:128"])?;
    let stacks = dumped(&traced, pid)?;
    let chains = by_gdb(pid, &dir.path().join("2"), dir.path(), stacks.len())?;
    let mut whole_ones = 0;
    for ((_, frames, whole), chain) in stacks.iter().zip(&chains) {
        let ours: Vec<u64> = frames.iter().map(|frame| frame.address).collect();
        let functions: Vec<_> = frames.iter().map(|frame| &frame.function).collect();
        whole_ones += usize::from(*whole);
        if *whole {
            assert_eq!(ours, *chain, "{functions:#?}");
        } else {
            assert!(!ours.is_empty() && chain.starts_with(&ours), "{ours:x?} for {chain:x?}, {functions:#?}");
        }
    }
    assert!(whole_ones >= 8, "{stacks:#?}");
    Ok(())
}

/// A program without Python: its leaks are named by its own innermost function.
#[test]
fn leaks_are_named_by_native_functions() -> Result<()> {
    if !GROUND.is_ready() {
        return Ok(());
    }
    for json in [true, false] {
        let dir = tempfile::tempdir()?;
        let file = dir.path().join("truth.jsonl").to_string_lossy().into_owned();
        let words = ["--wait-stdin", "--truth", &file, "leak", "--steps", "8", "--marks"];
        let mut target = Target::start(GROUND.command(&words))?;
        let pid = target.pid().to_string();
        let options = ["-p", pid.as_str(), "--call-stack", "python,c"];
        let tracer = Tracer::start_with(&options, json)?.attached()?;
        target.tell("go")?;
        ensure!(target.finish()?.0.success());
        let traced = tracer.finish()?;
        if !json {
            let leaks: Vec<_> = traced.stdout.lines().filter(|line| line.contains("LEAK ")).collect();
            assert!(!leaks.is_empty(), "{}", traced.stdout);
            // Inlined where there is debug information to tell, and then without what is around it.
            let ours = |line: &&str| line.contains(" in allocate") || line.contains(" in native_workload::");
            assert!(leaks.iter().all(ours), "{leaks:#?}");
            assert!(traced.stdout.contains(" allocations (of pools those of 1.00 MiB and more)"));
            continue;
        }
        let report = traced.report()?;
        let leaks = report.0["devices"].as_array().into_iter().flatten();
        let leaks: Vec<_> = leaks.filter_map(|device| device["leaks"].as_array()).flatten().collect();
        assert!(!leaks.is_empty(), "{report:#?}", report = report.0);
        for leak in leaks {
            let native = leak["native"].as_array().context("no frames")?;
            let has = |function: &str| native.iter().any(|frame| frame["function"] == function);
            assert!(has("rtMalloc") && has("native_workload::main") && has("_start"), "{native:#?}");
            assert_eq!(leak["native_cut"], false);
            assert!(native.iter().all(|frame| frame["file"].is_string() && frame.get("line").is_some()));
        }
    }
    Ok(())
}

#[test]
fn depth_rate_and_size_are_the_users_choice() -> Result<()> {
    if !GROUND.is_ready() {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let (target, file) = ready(dir.path(), "5")?;
    let pid = target.pid();
    let all = dumped(&traced(&target, dir.path(), &file, 1, &["--call-stack", "c:128"])?, pid)?;

    // Fewer frames are the same ones, and said to be not all.
    let few = dumped(&traced(&target, dir.path(), &file, 2, &["--call-stack", "c:5"])?, pid)?;
    assert_eq!(few.len(), all.len());
    for ((_, few, whole), (_, all, _)) in few.iter().zip(&all) {
        assert!(few.len() == 5.min(all.len()) && all.starts_with(few) && !whole, "{few:#?} of {all:#?}");
    }

    // A share of one a second, saved up for one more: events beyond are there, without a stack, and counted.
    let options = ["--call-stack", "c", "--stack-rate", "1"];
    let limited = traced(&target, dir.path(), &file, 3, &options)?;
    let stacks = dumped(&limited, pid)?;
    let facts = &limited.report()?.0["targets"][0]["native_stacks"];
    let without = facts["without"].as_array().into_iter().flatten();
    let without: u64 = without
        .filter(|without| without["reason"] == "beyond a thread's share of stacks")
        .filter_map(|without| without["allocations"].as_u64())
        .sum();
    assert_eq!(stacks.len(), all.len());
    assert_eq!(stacks.iter().filter(|(_, frames, _)| frames.is_empty()).count() as u64, without, "{facts}");
    assert!(without as usize > all.len() / 2, "{facts}");
    Ok(())
}
