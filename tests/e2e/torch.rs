//! The tracer on the real torch and torch_npu wheels, above the simulated CANN.

use std::{
    collections::{BTreeSet, HashMap},
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use memscope_e2e::{Block, DumpFile, Ground, Report, Target, Traced, Tracer, pointer, truth};
use serde_json::{Value, json};

/// The 8.x layout of CANN, and the 9.x layout.
const GROUNDS: [Ground; 2] = [Ground::Torch("2.7.1"), Ground::Torch("2.14.0")];

/// The file, beside the truth, whose being there ends a loop.
const STOP: &str = "stop";

struct Run {
    target: Target,
    file: PathBuf,
    _dir: tempfile::TempDir,
}

impl Run {
    /// Starts a training loop, which tells the truth to a file and goes on until [`Run::end_after`] ends it: whatever
    /// time the tracer takes to attach, there are steps left.
    fn start(ground: Ground, args: &[&str]) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let file = dir.path().join("truth.jsonl");
        let path = file.to_string_lossy().into_owned();
        let stop = file.with_file_name(STOP).to_string_lossy().into_owned();
        let endless = ["train_leak.py", "--truth", &path, "--steps", "0", "--stop-file", &stop];
        let command = ground.command(&[&endless, args].concat());
        Ok(Self { target: Target::start(command)?, file, _dir: dir })
    }

    /// Starts it held: it has imported everything and waits for [`Run::go`].
    fn held(ground: Ground, program: &str, args: &[&str], env: &[(&str, &str)]) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let gate = dir.path().join("go").to_string_lossy().into_owned();
        let file = dir.path().join("truth.jsonl");
        let path = file.to_string_lossy().into_owned();
        let words = [&[program, "--truth", &path, "--wait-file", &gate], args].concat();
        let target = Target::fork(ground, &words, env)?;
        let run = Self { target, file, _dir: dir };
        run.wait_for(|line| line["event"] == "ready")?;
        Ok(run)
    }

    fn go(&self) -> Result<()> {
        Ok(std::fs::write(self._dir.path().join("go"), "")?)
    }

    /// Waits until the truth has such a line.
    fn wait_for(&self, wanted: impl Fn(&Value) -> bool) -> Result<()> {
        for _ in 0..12_000 {
            if truth(&self.file).is_ok_and(|lines| lines.iter().any(&wanted)) {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(10));
        }
        anyhow::bail!("{} does not have what was waited for", self.file.display())
    }

    /// Lets the loop do so many more steps and end; which step was its last.
    fn end_after(&self, steps: u64) -> Result<u64> {
        let marked = |line: &Value| (line["event"] == "mark").then(|| line["step"].as_u64()).flatten();
        let now = truth(&self.file)?.iter().filter_map(marked).max().unwrap_or(0);
        self.wait_for(|line| marked(line) >= Some(now + steps))?;
        std::fs::write(self.file.with_file_name(STOP), "")?;
        self.wait_for(|line| line["event"] == "end")?;
        truth(&self.file)?.iter().filter_map(marked).max().context("no step")
    }

    /// Waits for the end of both; what they say.
    fn finish(self, tracer: Tracer) -> Result<(u32, Vec<Value>, Traced)> {
        let Self { target, file, _dir } = self;
        let pid = target.pid();
        let (status, lines, errors) = target.finish()?;
        ensure!(status.success(), "{status}: {lines:?} {errors}");
        Ok((pid, truth(&file)?, tracer.finish()?))
    }
}

fn tell(lines: &[Value], event: &str, kind: Option<&str>) -> Vec<Block> {
    let wanted = |line: &&Value| line["event"] == event && kind.is_none_or(|kind| line["kind"] == kind);
    lines
        .iter()
        .filter(wanted)
        .map(|line| Block {
            step: line["step"].as_u64().unwrap_or(0),
            ptr: line["ptr"].as_u64().unwrap_or(0),
            size: line["nbytes"].as_u64().unwrap_or(0),
        })
        .collect()
}

/// The pool rounds a request up, and leaves a rest of less than 1 MiB with the block.
fn assert_same(found: &[Block], wanted: &[Block], what: &str) {
    let keys = |blocks: &[Block]| blocks.iter().map(|b| (b.step, b.ptr)).collect::<BTreeSet<_>>();
    assert_eq!(keys(found), keys(wanted), "{what}: {found:?} is not {wanted:?}");
    assert_eq!(found.len(), wanted.len(), "{what}");
    for block in found {
        let asked = wanted.iter().find(|b| (b.step, b.ptr) == (block.step, block.ptr)).map_or(0, |b| b.size);
        assert!(
            block.size >= asked && block.size <= asked + (1 << 20) + 1024,
            "{what}: {block:?} for {asked} bytes"
        );
    }
}

/// At each mark in the dump, the pool's totals are what torch_npu said at that mark.
fn totals_agree_at_every_mark(lines: &[Value], traced: &Traced, pid: u32, device: u64) -> Result<usize> {
    let files = traced.dump(pid)?;
    let name = format!("/device_{device}/");
    let file =
        files.iter().find(|f| f.path.to_string_lossy().contains(&name)).context("no dump of the device")?;
    let mut marks = lines.iter().filter(|line| line["event"] == "mark" && line["device"] == device);
    let mut totals = None;
    let mut compared = 0;
    for row in &file.rows {
        if row["Event Type"] == "PTA" {
            totals = DumpFile::attr(row, "used")
                .map(str::to_owned)
                .zip(DumpFile::attr(row, "total").map(str::to_owned));
        } else if row["Event Type"] == "Mark" {
            let text = row["Name"].trim_matches('"');
            let mark = marks
                .find(|mark| mark["text"] == text)
                .with_context(|| format!("no mark {text:?} in the truth"))?;
            let Some((used, total)) = &totals else { continue };
            assert_eq!(*used, mark["allocated"].to_string(), "allocated at {text}");
            assert_eq!(*total, mark["reserved"].to_string(), "reserved at {text}");
            compared += 1;
        }
    }
    Ok(compared)
}

/// A leaked block has the very stack on which the program allocated it: its own one, or for a gradient that of the
/// thread that called the backward pass.
fn assert_stack(leak: &Value, lines: &[Value]) {
    let ptr = leak["ptr"].as_str().map(memscope_e2e::pointer);
    let told = lines.iter().rfind(|line| line["event"] == "leak" && line["ptr"].as_u64() == ptr);
    let Some(told) = told else {
        let functions = leak["python"].as_array().into_iter().flatten().map(|frame| &frame["function"]);
        let functions: Vec<_> = functions.filter_map(Value::as_str).collect();
        assert_eq!(functions[0].rsplit('.').next(), Some("empty"), "{leak}");
        assert_eq!(functions.last(), Some(&"<module>"), "{leak}");
        return;
    };
    if told["via"].is_null() {
        assert_eq!(leak["python"], told["python"], "{leak}");
        assert_eq!(leak["via"], json!([]));
        return;
    }
    assert_eq!(leak["python"], json!([]), "{leak}");
    let (via, told) = (leak["via"].as_array(), told["via"].as_array());
    let (Some(via), Some(told)) = (via, told) else { panic!("{leak}") };
    // Within, there are the functions of torch that lead into the backward pass.
    assert!(via.ends_with(told) && via.len() > told.len(), "{leak}");
}

/// What the report must say of `train_leak.py` with so many steps, wherever it was attached.
fn assert_leaks(report: &Report, pid: u32, lines: &[Value], steps: u64) -> Result<u64> {
    assert_leaks_since(2, report, pid, lines, steps)
}

/// The same, of what the script allocates in this step and later.
fn assert_leaks_since(first: u64, report: &Report, pid: u32, lines: &[Value], steps: u64) -> Result<u64> {
    let device = report.device(pid, 0)?;
    let seen = report.0["steps"].as_array().map(Vec::len).unwrap_or_default() as u64;
    // Our step n is the script's step n + offset.
    let offset = steps - seen;
    let shifted = |blocks: Vec<Block>, from: u64, to: u64| -> Vec<Block> {
        let inside = blocks.into_iter().filter(|b| b.step >= offset + from && b.step <= offset + to);
        inside.map(|b| Block { step: b.step - offset, ..b }).collect()
    };
    let pta: Vec<&Value> =
        device["leaks"].as_array().into_iter().flatten().filter(|leak| leak["pool"] == "PTA").collect();
    assert_eq!(pta.len(), device["leaks"].as_array().map_or(0, Vec::len), "only the pool's blocks leak");
    let mut found = report.blocks(device, "leaks");
    let before = shifted(tell(lines, "leak", None), 0, first.saturating_sub(1));
    found.retain(|block| block.step >= first && before.iter().all(|b| b.ptr != block.ptr));
    // The last step's blocks can not be judged; the first step warms up.
    let mut wanted = shifted(tell(lines, "leak", None), first, seen - 1);
    let state = shifted(tell(lines, "keep", Some("state")), first, seen - 1);
    wanted.extend(state.iter().cloned());
    assert_same(&found, &wanted, "leaks");
    for leak in pta {
        let ptr = leak["ptr"].as_str().map(memscope_e2e::pointer);
        if state.iter().any(|block| Some(block.ptr) == ptr) {
            assert_eq!(leak["pattern"], "once", "state that is built late is no headline");
        }
        assert!(leak["op"].as_str().is_some_and(|op| op.starts_with("aclnn")), "{leak}");
        assert_stack(leak, lines);
    }
    assert_eq!(report.lost(), 0);
    Ok(seen)
}

/// Every allocation has a stack, and every frame its name.
fn assert_stacks_are_whole(target: &Value) {
    let stacks = &target["stacks"];
    assert_eq!((&stacks["without"], &stacks["gone_frames"]), (&json!([]), &json!(0)), "{stacks}");
    assert!(stacks["own"].as_u64() > Some(100) && stacks["via"].as_u64() > Some(100), "{stacks}");
    assert!(target["python"].as_str().is_some_and(|version| version.starts_with("3.")), "{target}");
}

/// The main job: attached to a loop that runs, the leak is named to the block.
#[test]
fn a_running_training_loop_is_traced_and_its_leaks_are_exactly_the_truth() -> Result<()> {
    for ground in GROUNDS {
        if !ground.is_ready() {
            continue;
        }
        let run = Run::start(ground, &["--step-ms", "50", "--last-block", "--leak-gradients"])?;
        run.wait_for(|line| line["event"] == "mark" && line["step"] == 3)?;
        let tracer = Tracer::start(&["-p", &run.target.pid().to_string()])?.attached()?;
        let steps = run.end_after(24)?;
        let (pid, lines, traced) = run.finish(tracer)?;
        let report = traced.report()?;
        let seen = assert_leaks(&report, pid, &lines, steps)?;
        assert!(seen >= 24, "{seen} whole steps seen");
        let device = report.device(pid, 0)?;
        let last = tell(&lines, "keep", Some("last"));
        let not_judged = report.blocks(device, "not_judged");
        assert!(not_judged.iter().any(|b| b.ptr == last[0].ptr && b.size >= 64 << 20), "{not_judged:?}");
        assert_eq!(
            report.blocks(device, "not_judged").iter().map(|b| b.size).max(),
            Some(not_judged.iter().map(|b| b.size).max().unwrap_or(0))
        );
        let late = report.blocks(device, "late");
        let dropped: BTreeSet<u64> = tell(&lines, "drop", Some("late")).iter().map(|b| b.ptr).collect();
        assert!(late.iter().filter(|b| dropped.contains(&b.ptr)).count() >= 5, "{late:?}");
        let compared = totals_agree_at_every_mark(&lines, &traced, pid, 0)?;
        assert!(compared as u64 >= seen, "{compared} marks compared, {seen} steps");
        let via = device["leaks"].as_array().into_iter().flatten().filter(|leak| leak["via"] != json!([]));
        assert!(via.count() >= 3, "gradients are leaked too");
        let target = &report.0["targets"][0];
        assert_stacks_are_whole(target);
        assert!(
            target["torch_npu"]
                .as_str()
                .is_some_and(|v| ground == Ground::Torch("2.7.1") || v.starts_with("2.14")),
            "{target}"
        );
        assert_eq!(target["devices"], json!([0]));
    }
    Ok(())
}

/// The ways in which programs keep what they should not, and one in which they may.
#[test]
fn what_programs_keep_is_told_by_the_line_that_keeps_it() -> Result<()> {
    const JUDGED: u64 = 36;
    let ground = GROUNDS[0];
    if !ground.is_ready() {
        return Ok(());
    }
    for kind in ["varying", "helper", "concat", "filled"] {
        let run = Run::held(ground, "keep.py", &[kind, "--end", "os-exit"], &[])?;
        let pid = run.target.pid();
        let tracer = Tracer::start(&["-p", &pid.to_string(), "--fail-on", "leaks"])?.attached()?;
        run.go()?;
        let (pid, lines, traced) = run.finish(tracer)?;
        let report = traced.report()?;
        let device = report.device(pid, 0)?;
        let blocks = || device["leaks"].as_array().into_iter().flatten();
        // What the first step allocates warms up, the last one is not judged, and nor are blocks of a line that also
        // holds a ring as long as they may be part of it.
        let kept = lines.iter().filter(|line| line["event"] == "keep" && line["kind"] == kind);
        let wanted: BTreeSet<(u64, u64, u64)> = kept
            .map(|line| (&line["step"], &line["ptr"], &line["line"]))
            .filter_map(|(step, ptr, line)| Some((step.as_u64()?, ptr.as_u64()?, line.as_u64()?)))
            .filter(|(step, ..)| (2..=JUDGED).contains(step))
            .collect();
        let found: BTreeSet<(u64, u64, u64)> = blocks()
            .filter_map(|leak| {
                let line = leak["python"].as_array()?.iter().find(|frame| frame["function"] == "main")?;
                let ptr = memscope_e2e::pointer(leak["ptr"].as_str()?);
                Some((leak["step"].as_u64()?, ptr, line["line"].as_u64()?))
            })
            .filter(|(step, ..)| *step <= JUDGED)
            .collect();
        assert_eq!(found, wanted, "{kind}");
        let pattern = if kind == "filled" { "settled" } else { "recurring" };
        assert!(blocks().all(|leak| leak["pattern"] == pattern), "{kind}: {device}");
        let findings = matches!(kind, "varying" | "helper");
        assert_eq!(traced.status.code(), Some(i32::from(findings)), "{kind}");
        let growth: Vec<&Value> = device["growth"].as_array().into_iter().flatten().collect();
        match (kind, &growth[..]) {
            ("concat", [trend]) => {
                let per_step = trend["bytes_per_step"].as_u64().unwrap_or(0);
                assert!((25 << 10..50 << 10).contains(&per_step), "{trend}");
                assert_eq!(trend["place"]["function"], "main", "{trend}");
            }
            (kind, growth) => assert!(kind != "concat" && growth.is_empty(), "{kind}: {growth:?}"),
        }
    }
    Ok(())
}

/// A steady ring of batches, a bounded cache, late frees and state, and no leak.
#[test]
fn a_loop_without_leaks_has_none() -> Result<()> {
    let ground = GROUNDS[0];
    if !ground.is_ready() {
        return Ok(());
    }
    let run = Run::start(ground, &["--step-ms", "50", "--no-leaks", "--optimizer", "adamw"])?;
    run.wait_for(|line| line["event"] == "mark" && line["step"] == 2)?;
    let tracer = Tracer::start(&["-p", &run.target.pid().to_string(), "--fail-on", "leaks"])?.attached()?;
    let steps = run.end_after(18)?;
    let (pid, lines, traced) = run.finish(tracer)?;
    assert_leaks(&traced.report()?, pid, &lines, steps)?;
    assert_eq!(traced.status.code(), Some(0), "state built once is no finding");
    Ok(())
}

/// The trace ends while the loop goes on, in the middle of the ring.
#[test]
fn a_trace_that_ends_before_the_loop_reports_no_ring_as_leaks() -> Result<()> {
    let ground = GROUNDS[0];
    if !ground.is_ready() {
        return Ok(());
    }
    let run = Run::start(ground, &["--step-ms", "150"])?;
    run.wait_for(|line| line["event"] == "mark" && line["step"] == 8)?;
    let pid = run.target.pid();
    let tracer = Tracer::start(&["-p", &pid.to_string(), "-d", "4", "--fail-on", "leaks"])?.attached()?;
    let traced = tracer.finish()?;
    assert_eq!(traced.status.code(), Some(1), "leaks were found");
    let report = traced.report()?;
    let lines = truth(&run.file)?;
    let leaked: BTreeSet<u64> = tell(&lines, "leak", None).iter().map(|b| b.ptr).collect();
    let found = report.blocks(report.device(pid, 0)?, "leaks");
    let wrong: Vec<_> = found.iter().filter(|b| !leaked.contains(&b.ptr)).collect();
    assert!(found.len() >= 5 && wrong.is_empty(), "{wrong:?}");
    Ok(())
}

#[test]
fn from_the_first_instruction_the_live_bytes_are_the_allocators_own() -> Result<()> {
    for ground in GROUNDS {
        if !ground.is_ready() {
            continue;
        }
        let args = ["--steps", "10", "--last-block", "--empty-cache", "--end", "os-exit"];
        let run = Run::held(ground, "train_leak.py", &args, &[])?;
        let tracer = Tracer::start(&["-p", &run.target.pid().to_string()])?.attached()?;
        run.go()?;
        let (pid, lines, traced) = run.finish(tracer)?;
        let report = traced.report()?;
        assert_leaks(&report, pid, &lines, 10)?;
        let marks = totals_agree_at_every_mark(&lines, &traced, pid, 0)?;
        assert_eq!(marks, 11, "before the first step, and at the end of each");
        // Seen from the first block on, the sum of the blocks is the allocator's total.
        let files = traced.dump(pid)?;
        let mut live = 0i128;
        for row in files.iter().flat_map(|f| &f.rows).filter(|r| r["Event Type"] == "PTA") {
            let size: i128 = DumpFile::attr(row, "size").context("no size")?.parse()?;
            live += if row["Event"] == "MALLOC" { size } else { -size };
            if let Some(used) = DumpFile::attr(row, "used") {
                assert_eq!(used, live.to_string(), "{row:?}");
            }
        }
        // Driver memory is the pool's segments, to the byte.
        let device = report.device(pid, 0)?;
        let pta = report.pool(device, "PTA").context("no PTA")?;
        let last = lines.iter().rfind(|line| line["event"] == "mark").context("no mark")?;
        let emptied = lines.iter().find(|line| line["event"] == "emptied").context("not emptied")?;
        assert!(emptied["reserved"].as_u64() < last["reserved"].as_u64(), "{emptied} after {last}");
        assert_eq!(pta["allocated"], emptied["allocated"]);
        assert_eq!(pta["reserved"], emptied["reserved"], "no block was allocated or freed since");
        assert_eq!(device["reconciliation"]["unexplained_bytes"], 0, "{:#}", device["reconciliation"]);
    }
    Ok(())
}

#[test]
fn a_target_that_dies_in_a_step_leaves_a_full_report() -> Result<()> {
    let ground = GROUNDS[0];
    if !ground.is_ready() {
        return Ok(());
    }
    for how in ["os._exit", "SIGTERM", "SIGKILL"] {
        let mut args = vec!["--steps", "400", "--step-ms", "50"];
        if how == "os._exit" {
            args.extend(["--exit-in-step", "12"]);
        }
        let run = Run::held(ground, "train_leak.py", &args, &[])?;
        let pid = run.target.pid();
        let tracer = Tracer::start(&["-p", &pid.to_string()])?.attached()?;
        run.go()?;
        match how {
            "os._exit" => run.wait_for(|line| line["event"] == "exit")?,
            _ => {
                run.wait_for(|line| line["event"] == "mark" && line["step"] == 11)?;
                run.target.signal(if how == "SIGTERM" { libc::SIGTERM } else { libc::SIGKILL });
            }
        }
        let lines = truth(&run.file)?;
        let traced = tracer.finish()?;
        let report = traced.report()?;
        let device = report.device(pid, 0)?;
        let found: BTreeSet<u64> = report.blocks(device, "leaks").iter().map(|b| b.ptr).collect();
        let wanted = tell(&lines, "leak", None).into_iter().filter(|b| (2..=9).contains(&b.step));
        for block in wanted {
            assert!(found.contains(&block.ptr), "{how}: {block:?} is missing");
        }
        assert!(totals_agree_at_every_mark(&lines, &traced, pid, 0)? >= 10, "{how}: the dump is readable");
    }
    Ok(())
}

#[test]
fn two_devices_of_one_process_both_get_the_steps() -> Result<()> {
    for ground in GROUNDS {
        if !ground.is_ready() {
            continue;
        }
        let run = Run::held(ground, "two_devices.py", &["--steps", "6"], &[])?;
        let tracer = Tracer::start(&["-p", &run.target.pid().to_string()])?.attached()?;
        run.go()?;
        let (pid, lines, traced) = run.finish(tracer)?;
        let report = traced.report()?;
        for device in [0, 1] {
            let wanted: Vec<Block> = lines
                .iter()
                .filter(|line| line["event"] == "leak" && line["device"] == device)
                .map(|line| Block {
                    step: line["step"].as_u64().unwrap_or(0),
                    ptr: line["ptr"].as_u64().unwrap_or(0),
                    size: line["nbytes"].as_u64().unwrap_or(0),
                })
                .filter(|block| (2..6).contains(&block.step))
                .collect();
            assert_eq!(wanted.len(), 4);
            assert_same(&report.blocks(report.device(pid, device)?, "leaks"), &wanted, "leaks of a device");
        }
    }
    Ok(())
}

#[test]
fn an_out_of_memory_of_the_pool_is_reported() -> Result<()> {
    for ground in GROUNDS {
        if !ground.is_ready() {
            continue;
        }
        let memory = (1u64 << 30).to_string();
        let run = Run::held(ground, "oom.py", &["--block-mib", "60"], &[("SIM_CANN_HBM_BYTES", &memory)])?;
        let tracer = Tracer::start(&["-p", &run.target.pid().to_string()])?.attached()?;
        run.go()?;
        let (pid, lines, traced) = run.finish(tracer)?;
        let report = traced.report()?;
        let truth = lines.iter().find(|line| line["event"] == "oom").context("no oom in the truth")?;
        let held = truth["blocks"].as_u64().context("no count")?;
        let device = report.device(pid, 0)?;
        let ooms: Vec<_> =
            device["oom"].as_array().into_iter().flatten().filter(|o| o["recovered"] != true).collect();
        assert_eq!(ooms.len(), 1, "{:#}", device["oom"]);
        let oom = ooms[0];
        assert!(oom["requested"].as_u64() >= Some(60 << 20), "{oom}");
        let pta =
            oom["pools"].as_array().into_iter().flatten().find(|p| p["pool"] == "PTA").context("no PTA")?;
        assert!(pta["allocated"].as_u64() >= Some(held * (60 << 20)), "{pta}");
        let largest = oom["largest"].as_array().context("no largest blocks")?;
        assert_eq!(largest.len(), 10);
        assert!(largest.iter().all(|b| b["size"].as_u64() >= Some(60 << 20)));
        assert_eq!(oom["latest"].as_array().map(Vec::len), Some(10));
        // What is reserved and not allocated is free in the segments, to the byte.
        let free = &oom["free"][0];
        let slack = pta["reserved"].as_u64().zip(pta["allocated"].as_u64()).map(|(r, a)| r - a);
        assert_eq!((&free["pool"], free["free_bytes"].as_u64()), (&"PTA".into(), slack), "{free}");
        assert!(free["largest_free"].as_u64() < Some(60 << 20), "{free}");
        let dump = traced.dir.path().to_string_lossy().into_owned();
        let offline = Report(Tracer::verb(&["oom", &dump])?);
        let offline = &offline.device(pid, 0)?["oom"];
        assert_eq!(offline, &device["oom"]);
    }
    Ok(())
}

/// Blocks that another stream still uses when Python drops them: allocated falls at once, as torch counts it.
#[test]
fn frees_deferred_across_streams_are_counted_as_torch_counts_them() -> Result<()> {
    for ground in GROUNDS {
        if !ground.is_ready() {
            continue;
        }
        let run = Run::held(ground, "deferred_free.py", &["--steps", "6"], &[])?;
        let tracer = Tracer::start(&["-p", &run.target.pid().to_string()])?.attached()?;
        run.go()?;
        let (pid, lines, traced) = run.finish(tracer)?;
        assert!(totals_agree_at_every_mark(&lines, &traced, pid, 0)? >= 17);
        let report = traced.report()?;
        assert!(report.blocks(report.device(pid, 0)?, "leaks").is_empty());
    }
    Ok(())
}

/// Traced or not, the program computes and allocates the same.
#[test]
fn the_targets_output_is_the_same_with_and_without_us() -> Result<()> {
    let ground = GROUNDS[0];
    if !ground.is_ready() {
        return Ok(());
    }
    let marks = |lines: &[Value]| -> Vec<(String, String, String)> {
        let of = |line: &Value, key: &str| line[key].to_string();
        let marks = lines.iter().filter(|line| line["event"] == "mark");
        marks.map(|line| (of(line, "text"), of(line, "loss"), of(line, "allocated"))).collect()
    };
    let plain = Run::held(ground, "train_leak.py", &["--steps", "8"], &[])?;
    plain.go()?;
    let (status, ..) = plain.target.finish()?;
    ensure!(status.success());
    let untraced = marks(&truth(&plain.file)?);
    assert_eq!(untraced.len(), 9);
    let run = Run::held(ground, "train_leak.py", &["--steps", "8"], &[])?;
    let tracer = Tracer::start(&["-p", &run.target.pid().to_string(), "--level", "kernel"])?.attached()?;
    run.go()?;
    let (_, lines, _) = run.finish(tracer)?;
    assert_eq!(marks(&lines), untraced);
    Ok(())
}

/// `-- COMMAND`: the libraries come by import, seconds after the start, and nothing is missed.
#[test]
fn a_python_program_is_traced_from_its_start() -> Result<()> {
    for ground in GROUNDS {
        if !ground.is_ready() {
            continue;
        }
        let dir = tempfile::tempdir()?;
        let file = dir.path().join("truth.jsonl");
        let command = ground.command(&["train_leak.py", "--steps", "8", "--truth", &file.to_string_lossy()]);
        let words: Vec<String> = std::iter::once(command.get_program())
            .chain(command.get_args())
            .map(|word| word.to_string_lossy().into_owned())
            .collect();
        let mut args = vec!["--"];
        args.extend(words.iter().map(String::as_str));
        let traced = Tracer::start(&args)?.finish()?;
        assert_eq!(traced.status.code(), Some(0), "{:?}", traced.messages);
        let report = traced.report()?;
        let pid = report.0["steps"][0]["pid"].as_u64().context("no step")? as u32;
        let lines = truth(Path::new(&file))?;
        assert_leaks(&report, pid, &lines, 8)?;
        assert!(report.site("aclInit").0 >= 1, "the first call of all was seen");
        // The pool gives segments back, the device is reset, tensors are freed: in this order.
        let device = report.device(pid, 0)?;
        let pta = report.pool(device, "PTA").context("no PTA")?;
        let segments = &device["reconciliation"]["segments"][0];
        let last = lines.iter().rfind(|line| line["event"] == "mark").context("no mark")?;
        assert_eq!((&pta["allocated"], &segments["allocated"]), (&last["allocated"], &last["allocated"]));
        assert_eq!((&segments["before_attach"], &pta["reserved"]), (&json!(0), &segments["driver_bytes"]));
    }
    Ok(())
}

/// Segments that grow: reserved addresses, physical handles mapped into them.
#[test]
fn expandable_segments_are_the_pools_to_the_byte() -> Result<()> {
    let ground = GROUNDS[0];
    if !ground.is_ready() {
        return Ok(());
    }
    let conf = [("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True")];
    let run = Run::held(ground, "train_leak.py", &["--steps", "8", "--end", "os-exit"], &conf)?;
    let tracer = Tracer::start(&["-p", &run.target.pid().to_string()])?.attached()?;
    run.go()?;
    let (pid, lines, traced) = run.finish(tracer)?;
    let report = traced.report()?;
    assert!(report.site("halMemCreate").0 > 0 && report.site("halMemMap").0 > 0, "{:#}", report.0["sites"]);
    assert_leaks(&report, pid, &lines, 8)?;
    assert_eq!(totals_agree_at_every_mark(&lines, &traced, pid, 0)?, 9);
    let device = report.device(pid, 0)?;
    assert_eq!(device["reconciliation"]["unexplained_bytes"], 0, "{:#}", device["reconciliation"]);
    Ok(())
}

/// Where physical memory is mapped is in the dump, so that what is free in growing segments is known from it, too.
#[test]
fn free_memory_of_expandable_segments_is_known_from_the_dump() -> Result<()> {
    let ground = GROUNDS[0];
    if !ground.is_ready() {
        return Ok(());
    }
    let conf = [("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True"), ("SIM_CANN_HBM_BYTES", "1073741824")];
    let run = Run::held(ground, "oom.py", &["--block-mib", "60"], &conf)?;
    let tracer =
        Tracer::start(&["-p", &run.target.pid().to_string(), "--format", "csv,capture"])?.attached()?;
    run.go()?;
    let (pid, _, traced) = run.finish(tracer)?;
    let live = traced.report()?;
    let oom = &live.device(pid, 0)?["oom"];
    let free =
        oom.as_array().into_iter().flatten().flat_map(|oom| oom["free"].as_array().into_iter().flatten());
    let mut pta = free.into_iter().filter(|free| free["pool"] == "PTA");
    assert!(pta.any(|free| free["segment_bytes"].as_u64() > Some(0)), "{oom:#}");
    for extension in ["csv", "arrows"] {
        let dumps = dumps_of(traced.dir.path(), extension)?;
        let words: Vec<&str> = ["oom"].into_iter().chain(dumps.iter().map(String::as_str)).collect();
        assert_eq!(&Report(Tracer::verb(&words)?).device(pid, 0)?["oom"], oom, "{extension}");
    }
    Ok(())
}

/// Operators before each of these times, in ns of the wall clock.
fn operators_before(files: &[DumpFile], times: impl Iterator<Item = u64>) -> Vec<usize> {
    let rows = files.iter().flat_map(|file| &file.rows).filter(|row| row["Event Type"] == "ATEN_START");
    let mut operators: Vec<u64> = rows.map(|row| row["Timestamp(ns)"].parse().unwrap_or(0)).collect();
    operators.sort_unstable();
    times.map(|time| operators.partition_point(|operator| *operator < time)).collect()
}

/// The loop with its marks taken out: steps begin between the same operators, and what leaks is the same.
#[test]
fn without_marks_steps_are_inferred_where_they_are() -> Result<()> {
    const STEPS: u64 = 30;
    for (ground, optimizer) in [(GROUNDS[0], "sgd"), (GROUNDS[0], "adamw"), (GROUNDS[1], "adamw")] {
        if !ground.is_ready() {
            continue;
        }
        let steps = STEPS.to_string();
        let args = ["--no-marks", "--steps", &steps, "--pause-ms", "30", "--optimizer", optimizer];
        let run = Run::held(ground, "train_leak.py", &args, &[])?;
        let tracer = Tracer::start(&["-p", &run.target.pid().to_string()])?.attached()?;
        run.go()?;
        let (pid, lines, traced) = run.finish(tracer)?;
        let report = traced.report()?;
        let wall = wall_clock_offset();
        let told = lines.iter().filter(|line| line["event"] == "step");
        let begins = told.filter_map(|line| line["ns"].as_u64()).map(|ns| ns.saturating_add_signed(wall));
        let files = traced.dump(pid)?;
        let wanted = operators_before(&files, begins);
        let steps = report.0["steps"].as_array().into_iter().flatten();
        let found = operators_before(&files, steps.filter_map(|step| step["begin_ns"].as_u64()));
        assert_eq!(wanted.len() as u64, STEPS);
        let right = found.iter().filter(|at| wanted.contains(at)).count();
        let what = format!("{ground:?} {optimizer}: {found:?} for {wanted:?}");
        assert!(right * 100 >= 95 * wanted.len() && right * 100 >= 95 * found.len(), "{what}");

        let processes = report.0["processes"].as_array().into_iter().flatten();
        let why = processes.map(|process| &process["steps_inferred"]).find(|why| !why.is_null());
        let why = why.context("it does not say that steps are inferred")?;
        assert_eq!(why["basis"], "optimizer", "{why}");
        assert!(why["confidence"].as_f64() > Some(0.8), "{why}");
        assert!(report.0["steps"].as_array().into_iter().flatten().all(|step| step["inferred"] == true));
        // Where the loop pauses is learned from its first steps.
        assert_leaks_since(4, &report, pid, &lines, STEPS)?;

        // From the dump the same steps and leaks come out, unless they are not to be inferred.
        let dump = traced.dir.path().to_string_lossy().into_owned();
        let offline = Report(Tracer::verb(&["leaks", &dump])?);
        assert_eq!(offline.0["steps"], report.0["steps"]);
        assert_eq!(offline.device(pid, 0)?["leaks"], report.device(pid, 0)?["leaks"]);
        let marked = Tracer::verb(&["leaks", &dump, "--steps-from", "marks"])?;
        assert_eq!(marked["steps"], serde_json::json!([]));
        let compared = Tracer::verb(&["compare", "--steps", "6,7", &dump])?;
        assert_eq!(compared["difference"]["verdict"]["compare"]["step"], 7, "{compared}");
        let calls = |side: &str| -> u64 {
            let memories = compared["difference"]["memories"].as_array().into_iter().flatten();
            let ops = memories.flat_map(|memory| memory["ops"].as_array().into_iter().flatten());
            ops.filter_map(|op| op[side]["calls"].as_u64()).sum()
        };
        assert!(calls("base") == calls("compare") && calls("base") > 10, "whole steps: {compared}");
    }
    Ok(())
}

/// What msMemScope finds from within its own workload, found from outside; and in the dump as while tracing.
#[test]
fn inefficient_blocks_are_found_as_msmemscope_finds_them() -> Result<()> {
    for ground in GROUNDS {
        if !ground.is_ready() {
            continue;
        }
        let run = Run::held(ground, "inefficient.py", &[], &[])?;
        let pid = run.target.pid();
        let tracer =
            Tracer::start(&["-p", &pid.to_string(), "--analysis", "leaks,inefficient"])?.attached()?;
        run.go()?;
        let (pid, lines, traced) = run.finish(tracer)?;
        let report = traced.report()?;
        assert_eq!(report.lost(), 0);
        assert_eq!(report.0["inefficient"]["idle"], 3000);
        let pools = |document: &Value| -> Vec<Value> {
            let pools = document["inefficient"]["pools"].as_array().into_iter().flatten();
            pools.filter(|pool| pool["pool"] == "PTA").cloned().collect()
        };
        let live = pools(&report.0);
        let [pta] = &live[..] else { anyhow::bail!("{:#}", report.0["inefficient"]) };
        let groups = pta["groups"].as_array().context("no groups")?;
        let mut found: Vec<(u64, String)> = groups
            .iter()
            .flat_map(|group| group["examples"].as_array().into_iter().flatten())
            .map(|finding| {
                let pattern = finding["pattern"].as_str().unwrap_or_default().to_owned();
                (finding["ptr"].as_str().map_or(0, memscope_e2e::pointer), pattern)
            })
            .collect();
        found.sort();
        let mut wanted: Vec<(u64, String)> = lines
            .iter()
            .filter(|line| line["event"] == "block" && !line["kind"].is_null())
            .map(|line| {
                (line["ptr"].as_u64().unwrap_or(0), line["kind"].as_str().unwrap_or_default().to_owned())
            })
            .collect();
        wanted.sort();
        assert_eq!(wanted.len(), 5);
        assert_eq!(found, wanted, "{pta:#}");
        let saved: Vec<_> = groups.iter().map(|group| group["saved_at_peak"].as_u64()).collect();
        assert!(saved.is_sorted_by(|a, b| a >= b) && saved[0] >= Some(6 << 20), "{pta:#}");
        let ops = groups.iter().filter_map(|group| group["op"].as_str());
        assert!(ops.count() >= 2, "groups name operators: {pta:#}");

        let files = traced.dump(pid)?;
        let rows = || files.iter().flat_map(|file| &file.rows).filter(|row| row["Event"] == "ACCESS");
        let writes =
            rows().filter(|row| row["Event Type"] == "WRITE" && row["Name"].starts_with("aclnnInplaceAdd"));
        assert!(writes.count() > 3100, "each add_ writes to its tensor");
        assert!(rows().all(|row| DumpFile::attr(row, "allocation_id").is_some()));
        let dump = traced.dir.path().to_string_lossy().into_owned();
        assert_eq!(pools(&Tracer::verb(&["inefficient", &dump])?), live);
        let drgpum = Tracer::verb(&["inefficient", &dump, "--rules", "drgpum", "--mem-size", "1M"])?;
        assert!(
            pools(&drgpum)[0]["groups"].as_array().is_some_and(|groups| !groups.is_empty()),
            "{drgpum:#}"
        );
    }
    Ok(())
}

/// The dumps of one format below a directory.
fn dumps_of(dir: &Path, extension: &str) -> Result<Vec<String>> {
    let (mut found, mut dirs) = (Vec::new(), vec![dir.to_owned()]);
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir)? {
            let path = entry?.path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|of| of == extension) {
                found.push(path.to_string_lossy().into_owned());
            }
        }
    }
    Ok(found)
}

/// What is found while tracing is found in the dump afterwards, whatever its format and whichever verb.
#[test]
fn live_and_from_every_dump_the_findings_are_the_same() -> Result<()> {
    for ground in GROUNDS {
        if !ground.is_ready() {
            continue;
        }
        let run = Run::held(ground, "train_leak.py", &["--steps", "14", "--leak-gradients"], &[])?;
        let pid = run.target.pid().to_string();
        let analyses = ["--analysis", "leaks,inefficient,decompose", "--format", "csv,db,capture"];
        let tracer = Tracer::start(&[&["-p", &pid], &analyses[..]].concat())?.attached()?;
        run.go()?;
        let (pid, _, traced) = run.finish(tracer)?;
        let live = traced.report()?;
        assert_eq!(live.lost(), 0);
        assert!(!live.blocks(live.device(pid, 0)?, "leaks").is_empty());
        assert!(live.0["inefficient"]["pools"].as_array().is_some_and(|pools| !pools.is_empty()));
        for extension in ["csv", "db", "arrows"] {
            let dumps = dumps_of(traced.dir.path(), extension)?;
            let verb = |verb: &str| {
                let words: Vec<&str> = [verb].into_iter().chain(dumps.iter().map(String::as_str)).collect();
                Tracer::verb(&words)
            };
            let leaks = Report(verb("leaks")?);
            for list in [
                "leaks",
                "late",
                "late_groups",
                "late_total",
                "not_judged",
                "not_judged_total",
                "fluctuation",
                "reserve",
            ] {
                let [live, offline] = [&live, &leaks].map(|report| report.device(pid, 0).map(|of| &of[list]));
                assert_eq!(live?, offline?, "{list} of {dumps:?}");
            }
            let steps = |report: &Report| report.0["steps"].as_array().map(Vec::len);
            assert_eq!(steps(&leaks), steps(&live), "{dumps:?}");
            assert_eq!(verb("inefficient")?["inefficient"], live.0["inefficient"], "{dumps:?}");
            assert_eq!(verb("decompose")?["decomposition"], live.0["decomposition"], "{dumps:?}");
            let oom = Report(verb("oom")?);
            assert_eq!(oom.device(pid, 0)?["oom"], live.device(pid, 0)?["oom"], "{dumps:?}");
            let steps =
                [&["compare", "--steps", "3,6"], &dumps.iter().map(String::as_str).collect::<Vec<_>>()[..1]];
            let compared = Tracer::verb(&steps.concat())?;
            // Step 6 leaks what step 3 does not.
            assert!(compared["difference"]["verdict"]["net_diff"].as_i64() > Some(0), "{compared:#}");
        }
    }
    Ok(())
}

/// What msMemScope says of its own workload, said from outside.
#[test]
fn a_constant_leak_has_the_figures_that_msmemscope_gives_it() -> Result<()> {
    for ground in GROUNDS {
        if !ground.is_ready() {
            continue;
        }
        let run = Run::held(ground, "steady_leak.py", &[], &[])?;
        let tracer = Tracer::start(&["-p", &run.target.pid().to_string()])?.attached()?;
        run.go()?;
        let (pid, lines, traced) = run.finish(tracer)?;
        let report = traced.report()?;
        let device = report.device(pid, 0)?;
        let leaks = report.blocks(device, "leaks");
        let wanted: Vec<Block> =
            tell(&lines, "leak", None).into_iter().filter(|leak| (2..=5).contains(&leak.step)).collect();
        assert_same(&leaks, &wanted, "leaks");
        // 3.000488 Mb each.
        assert!(leaks.iter().all(|leak| leak.size == 3_146_240), "{leaks:?}");
        let swings = device["fluctuation"].as_array().into_iter().flatten();
        let swing = swings.into_iter().find(|of| of["pool"] == "PTA").context("no fluctuation")?;
        let percent = |ratio: &str| (swing[ratio].as_f64().unwrap_or(0.0) * 1e6).round() / 1e4;
        assert_eq!((percent("min_ratio"), &swing["min_step"]), (29.1716, &2.into()), "{swing}");
        assert_eq!((percent("max_ratio"), &swing["max_step"]), (52.7830, &6.into()), "{swing}");
    }
    Ok(())
}

/// Weights, gradients, the optimizer's state and data on its way, told apart from outside.
#[test]
fn what_memory_is_for_is_inferred() -> Result<()> {
    const RECIPE: &[&str] = &["--recipe"];
    for (ground, model, optimizer, recipe) in [
        (GROUNDS[0], "mlp", "sgd", &[][..]),
        (GROUNDS[0], "mlp", "adamw", RECIPE),
        (GROUNDS[0], "linear", "sgd", RECIPE),
        (GROUNDS[0], "transformer", "sgd", &[]),
        (GROUNDS[0], "transformer", "adamw", &[]),
        (GROUNDS[1], "mlp", "sgd", RECIPE),
        (GROUNDS[1], "transformer", "adamw", RECIPE),
    ] {
        if !ground.is_ready() {
            continue;
        }
        let args = [&["--model", model, "--optimizer", optimizer], recipe].concat();
        let run = Run::held(ground, "decompose.py", &args, &[])?;
        let pid = run.target.pid();
        let tracer = Tracer::start(&["-p", &pid.to_string(), "--analysis", "decompose"])?.attached()?;
        run.go()?;
        let (_, lines, traced) = run.finish(tracer)?;
        let report = traced.report()?;
        assert_eq!(report.lost(), 0);
        let decomposition = report.0["decomposition"].as_array().into_iter().flatten();
        let device = decomposition.into_iter().find(|of| of["device"] == 0).context("no decomposition")?;
        let truth: Vec<(u64, &Value)> = lines
            .iter()
            .filter(|line| line["event"] == "tensor")
            .map(|line| (line["ptr"].as_u64().unwrap_or(0), &line["kind"]))
            .collect();
        let (mut right, mut all, mut wrong) = (0, 0, Vec::new());
        for block in device["blocks"].as_array().into_iter().flatten().filter(|block| block["pool"] == "PTA")
        {
            let (ptr, size) =
                (block["ptr"].as_str().map_or(0, memscope_e2e::pointer), block["size"].as_u64().unwrap_or(0));
            let kind = truth.iter().find(|(at, _)| (ptr..ptr + size).contains(at)).map(|(_, kind)| *kind);
            all += size;
            if kind == Some(&block["class"]) {
                right += size;
            } else {
                wrong.push(format!("{kind:?}: {block}"));
            }
        }
        let what = format!("{ground:?} {model} {optimizer} {recipe:?}: {right} of {all} bytes; {wrong:#?}");
        eprintln!("{}", what.lines().next().unwrap_or_default());
        assert!(all > 1 << 20 && right * 100 >= 95 * all, "{what}");

        let kinds: BTreeSet<String> = truth.iter().map(|(_, kind)| kind.to_string()).collect();
        assert_eq!(kinds.len(), 4, "{kinds:?}");
        let sum = |list: &str| -> u64 {
            let shares = device[list].as_array().into_iter().flatten();
            shares.filter_map(|share| share["live_bytes"].as_u64()).sum()
        };
        let live = device["live_bytes"].as_u64().unwrap_or(0);
        assert_eq!([sum("classes"), sum("operators"), sum("labels")], [live; 3]);
        let labels = device["labels"].as_array().into_iter().flatten();
        assert!(
            labels
                .into_iter()
                .any(|label| label["name"] == "backward" && label["live_bytes"].as_u64() > Some(0)),
            "{device:#}"
        );

        let dump = traced.dir.path().to_string_lossy().into_owned();
        let offline = Tracer::verb(&["decompose", &dump])?;
        assert_eq!(offline["decomposition"], report.0["decomposition"]);
        let files = traced.dump(pid)?;
        let mut rows = files.iter().flat_map(|file| &file.rows);
        assert!(
            rows.any(|row| DumpFile::attr(row, "owner")
                .is_some_and(|owner| { owner.starts_with("PTA@ops@aclnn") && owner.ends_with("@backward") })),
            "owners name operator and range"
        );
    }
    Ok(())
}

/// Functions of frameworks say whose memory it is, without a mark and without a hook.
#[test]
fn memory_is_labelled_by_functions_of_frameworks() -> Result<()> {
    let ground = GROUNDS[0];
    if !ground.is_ready() {
        return Ok(());
    }
    let run = Run::held(ground, "windows.py", &["--end", "os-exit"], &[])?;
    let pid = run.target.pid();
    let tracer = Tracer::start(&["-p", &pid.to_string(), "--analysis", "decompose"])?.attached()?;
    run.go()?;
    let (_, lines, traced) = run.finish(tracer)?;
    let report = traced.report()?;
    let decomposition = report.0["decomposition"].as_array().into_iter().flatten();
    let device = decomposition.into_iter().find(|of| of["device"] == 0).context("no decomposition")?;
    let tensors: Vec<_> = lines.iter().filter(|line| line["event"] == "tensor").collect();
    assert_eq!(tensors.len(), 8, "{tensors:?}");
    let files = traced.dump(pid)?;
    let rows: Vec<_> =
        files.iter().flat_map(|file| &file.rows).filter(|row| row["Event"] == "MALLOC").collect();
    for tensor in tensors {
        let ptr = tensor["ptr"].as_u64();
        let blocks = device["blocks"].as_array().into_iter().flatten();
        let block = blocks
            .into_iter()
            .find(|block| block["pool"] == "PTA" && block["ptr"].as_str().map(pointer) == ptr)
            .with_context(|| format!("no block of {tensor}"))?;
        assert_eq!(block["label"], tensor["label"], "{block}");
        let row = rows
            .iter()
            .find(|row| row["Event Type"] == "PTA" && Some(pointer(&row["Ptr"])) == ptr)
            .with_context(|| format!("no row of {tensor}"))?;
        let owner = DumpFile::attr(row, "owner").context("no owner")?;
        match tensor["label"].as_str() {
            Some(label) => assert!(owner.ends_with(&format!("@{label}")), "{owner} for {tensor}"),
            None => assert!(!owner.contains("vllm"), "{owner} for {tensor}"),
        }
    }
    let dump = traced.dir.path().to_string_lossy().into_owned();
    assert_eq!(Tracer::verb(&["decompose", &dump])?["decomposition"], report.0["decomposition"]);
    Ok(())
}

/// Wall clock minus monotonic clock, in ns.
fn wall_clock_offset() -> i64 {
    let read = |id| {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is a timespec of ours.
        unsafe { libc::clock_gettime(id, &raw mut time) };
        time.tv_sec * 1_000_000_000 + time.tv_nsec
    };
    read(libc::CLOCK_REALTIME) - read(libc::CLOCK_MONOTONIC)
}

/// A workspace is asked for by the thread that runs the task queue, long after the call that it is for: each is of that call.
#[test]
fn workspaces_of_the_task_queue_have_the_lines_of_their_calls() -> Result<()> {
    let ground = GROUNDS[0];
    if !ground.is_ready() {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let [file, gate] = ["truth.jsonl", "go"].map(|name| dir.path().join(name));
    let words = ["task_queue.py", "--truth", &file.to_string_lossy(), "--wait-file", &gate.to_string_lossy()];
    let mut command = ground.command(&words);
    // Read by torch_npu when it is used first, and by the tracer.
    command.env("TASK_QUEUE_ENABLE", "2");
    let run = Run { target: Target::start(command)?, file, _dir: dir };
    run.wait_for(|line| line["event"] == "ready")?;
    let tracer = Tracer::start(&["-p", &run.target.pid().to_string(), "--call-stack", "python:128"])?;
    let tracer = tracer.attached()?;
    run.go()?;
    let (pid, lines, traced) = run.finish(tracer)?;

    let told = |call: &Value| {
        let frame = |frame: &Value| {
            let text = |key: &str| frame[key].as_str().unwrap_or_default().to_owned();
            format!("{}({}): {}", text("file"), frame["line"], text("function"))
        };
        call["python"].as_array().into_iter().flatten().map(frame).collect::<Vec<_>>()
    };
    let calls: Vec<_> = lines.iter().filter(|line| line["event"] == "call").map(told).collect();
    let files = traced.dump(pid)?;
    let rows = files.iter().flat_map(|file| &file.rows);
    let workspaces: Vec<_> = rows
        .filter(|row| row["Event"] == "MALLOC" && row["Event Type"] == "PTA_WORKSPACE")
        // Not the one that its segment was made for, which comes without having been used.
        .filter(|row| DumpFile::attr(row, "used") != Some("0"))
        .map(|row| row["Call Stack(Python)"].clone())
        .collect();
    let of_threads = lines.iter().filter(|line| line["event"] == "threads");
    let mut of_threads: HashMap<_, _> =
        of_threads.map(|line| (told(line).concat(), line["calls"].as_u64().unwrap_or(0))).collect();
    let all = calls.len() as u64 + of_threads.values().sum::<u64>();
    assert!(of_threads.len() == 3 && workspaces.len() as u64 == all, "{workspaces:#?} {of_threads:?}");
    let (in_order, at_once) = workspaces.split_at(calls.len());
    let mut seen = 0;
    for (workspace, call) in in_order.iter().zip(&calls) {
        if workspace.is_empty() {
            continue;
        }
        seen += 1;
        // That of the backward pass is the main thread's, within torch, where it waits.
        assert!(workspace.ends_with(&call.join("\n")), "{workspace} is not {call:?}");
    }
    // No line more often than it has called.
    for workspace in at_once.iter().filter(|workspace| !workspace.is_empty()) {
        let line = workspace.lines().next().unwrap_or_default();
        let left = of_threads.get_mut(line).with_context(|| workspace.clone())?;
        *left = left.checked_sub(1).with_context(|| format!("{line} has not called so often"))?;
        seen += 1;
    }
    // A task can be run before the thread that has enqueued it has told its number.
    assert!(seen > all / 2, "{seen} of {all}: {}", traced.report()?.0["targets"][0]["stacks"]);
    Ok(())
}
