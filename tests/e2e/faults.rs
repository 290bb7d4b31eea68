//! What goes wrong around the tracer: processes that are killed, disks that are full, buffers and maps that overflow, texts
//! that mean harm, files that are damaged. Nothing hangs, nothing is lost unsaid, nothing gets through.

use std::{
    collections::{BTreeSet, HashSet, VecDeque},
    ffi::OsStr,
    fs,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use memscope_e2e::{Ground, Target, Tracer, dumps, held, held_with, truth, wait_for_truth};
use memscope_ebpf::CALL_SLOTS;
use serde_json::Value;

const V9: Ground = Ground::Native("v9");

/// How often a test repeats what it does at random; MEMSCOPE_REPEAT makes it more.
fn times(usual: usize) -> usize {
    std::env::var("MEMSCOPE_REPEAT").ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// Whether this kernel says where its tasks keep what.
fn describes_itself() -> bool {
    Path::new("/sys/kernel/btf/vmlinux").exists()
}

/// SplitMix64.
struct Random(u64);

impl Random {
    /// Less than `limit`.
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }
}

/// The target reads back all that it writes to its blocks. `MEMSCOPE_REPEAT=200` for more of it.
#[test]
fn the_tracer_may_be_killed_at_any_time() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let verified = |file: &Path| -> Result<Vec<Value>> {
        Ok(truth(file)?.into_iter().filter(|line| line["event"] == "verified").collect())
    };
    let dir = tempfile::tempdir()?;
    let (mut alone, file) = held(V9, dir.path(), &["verify", "2000"])?;
    alone.tell("go")?;
    ensure!(alone.finish()?.0.success());
    let digest = verified(&file)?.first().context("nothing was verified")?["digest"].clone();

    let over = dir.path().join("over");
    let over_name = over.to_string_lossy().into_owned();
    let (mut target, file) = held(V9, dir.path(), &["--until-file", &over_name, "verify", "2000"])?;
    let pid = target.pid().to_string();
    target.tell("go")?;
    let mut random = Random(20261130);
    for round in 0..times(24) {
        let args: &[&str] = match round % 24 {
            // The kernel takes seconds to close its perf events.
            7 => &["-p", &pid, "--mechanism", "perf-site"],
            by if by % 3 == 0 => &["-a"],
            by if by % 3 == 1 => &["-p", &pid, "--call-stack", "c", "--native-min", "0"],
            _ => &["-p", &pid],
        };
        let tracer = Tracer::start(args)?;
        // While it loads its programs and attaches them, and when it traces.
        let tracer = if round % 2 == 0 { tracer } else { tracer.attached()? };
        thread::sleep(Duration::from_micros(random.below(150_000)));
        let traced = tracer.kill()?;
        for file in dumps(traced.dir.path(), target.pid())? {
            assert!(file.rows.iter().all(|row| row.len() == 12), "{}", file.path.display());
        }
        assert!(target.is_running(), "it ended in round {round}");
    }
    let before = verified(&file)?.len();
    fs::write(&over, "")?;
    let (status, ..) = target.finish()?;
    assert!(status.success(), "{status}");
    let rounds = verified(&file)?;
    assert!(before > 20, "it worked on meanwhile: {before} rounds");
    assert!(rounds.iter().all(|round| round["digest"] == digest), "{rounds:?}");
    let longest = rounds.iter().filter_map(|round| round["longest_ns"].as_u64()).max();
    assert!(longest.is_some_and(|ns| ns < 5_000_000_000), "a block took {longest:?} ns");
    Ok(())
}

/// Whoever kills it, and wherever: the report says so, and names the call that never returned.
#[test]
fn a_target_that_is_killed_within_a_call_is_said_to_have_been() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let gate = dir.path().join("gate");
    let scene = ["--wait-initialized", "pairs", "10"];
    let (mut target, _) = held_with(V9, dir.path(), &scene, |command| {
        command.env("SIM_CANN_ALLOC_GATE", &gate);
    })?;
    let pid = target.pid();
    let tracer = Tracer::start(&["-p", &pid.to_string()])?.attached()?;
    fs::write(&gate, "")?;
    target.tell("go")?;
    thread::sleep(Duration::from_millis(300));
    target.signal(libc::SIGKILL);
    target.finish()?;
    let report = tracer.finish()?.report()?;
    let ended = &report.0["targets"][0]["ended"];
    if describes_itself() {
        assert_eq!(ended["signal"], "SIGKILL", "{:#}", report.0);
        let note = report.0["notes"].to_string();
        assert!(note.contains("was killed by SIGKILL, within halMemAlloc"), "{note}");
    } else {
        assert_eq!((&ended["signal"], &ended["exit_code"]), (&Value::Null, &Value::Null));
    }
    assert_eq!(ended["within"], serde_json::json!(["halMemAlloc"]));
    assert_eq!(report.lost(), 0);
    Ok(())
}

#[test]
fn how_a_target_ended_is_reported() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let ending = |prepare: fn(&mut Command), scene: &[&str]| -> Result<(Value, String)> {
        let (mut target, _) = held_with(V9, dir.path(), scene, prepare)?;
        let tracer = Tracer::start(&["-p", &target.pid().to_string(), "--no-dump"])?.attached()?;
        target.tell("go")?;
        target.finish()?;
        let report = tracer.finish()?.report()?;
        Ok((report.0["targets"][0]["ended"].clone(), report.0["notes"].to_string()))
    };
    let known = describes_itself();
    let code = |code: i32| if known { Value::from(code) } else { Value::Null };
    let (well, notes) = ending(|_| {}, &["pairs", "10"])?;
    assert_eq!(well["exit_code"], code(0), "{well}");
    assert!(!notes.contains("ended with"), "{notes}");
    // A device of 64 KiB has no room for the blocks.
    let small = |command: &mut Command| {
        command.env("SIM_CANN_HBM_BYTES", "67108864");
    };
    let (badly, notes) = ending(small, &["pairs", "10", "--size", "268435456"])?;
    assert_eq!(badly["exit_code"], code(1), "{badly}");
    assert!(!known || notes.contains("ended with exit code 1"), "{notes}");

    // Of a command that it started itself the tracer knows on every kernel.
    let workload = V9.command(&[]).get_program().to_string_lossy().into_owned();
    let command = ["--without-btf", "--no-dump", "--", &workload, "--end", "kill", "pairs", "10"];
    let traced = Tracer::start(&command)?.finish()?;
    assert_eq!(traced.status.code(), Some(128 + libc::SIGKILL));
    let report = traced.report()?;
    assert_eq!(report.0["targets"][0]["ended"]["signal"], "SIGKILL", "{:#}", report.0["targets"]);
    Ok(())
}

/// A file system of its own, small, and perhaps not to be written to.
struct Disk(tempfile::TempDir);

impl Disk {
    fn mount(kib: u32) -> Result<Self> {
        let disk = Self(tempfile::tempdir()?);
        disk.call_mount(&["-t", "tmpfs", "-o", &format!("size={kib}k"), "tmpfs"])?;
        Ok(disk)
    }

    fn make_unwritable(&self) -> Result<()> {
        self.call_mount(&["-o", "remount,ro"])
    }

    fn call_mount(&self, args: &[&str]) -> Result<()> {
        let status = Command::new("mount").args(args).arg(self.0.path()).status()?;
        ensure!(status.success(), "mount {args:?} failed");
        Ok(())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).stderr(Stdio::null()).status();
    }
}

/// Whatever the format: the dump ends, and says so, and the report is whole.
#[test]
fn a_full_disk_ends_the_dump_and_not_the_trace() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    for (format, kib) in [("csv", 256), ("db", 256), ("capture", 16)] {
        let disk = Disk::mount(kib)?;
        let dir = tempfile::tempdir()?;
        let (mut target, file) =
            held(V9, dir.path(), &["leak", "--steps", "600", "--marks", "--step-ms", "0"])?;
        let pid = target.pid().to_string();
        let output = disk.path().to_string_lossy().into_owned();
        let tracer = Tracer::start(&["-p", &pid, "-o", &output, "--format", format])?.attached()?;
        target.tell("go")?;
        let (pid, _) = (target.pid(), target.finish()?);
        let report = tracer.finish()?.report()?;
        assert_eq!(report.0["dump"]["complete"], false, "{format}: {:#}", report.0["dump"]);
        let reason = report.0["dump"]["reason"].as_str().unwrap_or_default();
        assert!(reason.contains("No space left") || reason.contains("full"), "{format}: {reason}");
        assert!(reason.contains("missing: "), "{format}: {reason}");
        let leaks = report.device(pid, 0)?["leaks"].as_array().context("no leaks")?;
        let recurring = leaks.iter().filter(|leak| leak["pattern"] == "recurring").count();
        let judged = truth(&file)?.into_iter().filter(|line| {
            line["event"] == "leak" && line["step"].as_u64().is_some_and(|step| step > 1 && step < 600)
        });
        assert_eq!(recurring, judged.count(), "{format}: the report is complete all the same");
    }
    Ok(())
}

#[test]
fn a_directory_that_can_not_be_written_to_is_refused_or_ends_the_dump() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let disk = Disk::mount(1024)?;
    let output = disk.path().join("dumps").to_string_lossy().into_owned();
    let dir = tempfile::tempdir()?;
    let (mut target, _) = held(V9, dir.path(), &["leak", "--steps", "40", "--marks"])?;
    let pid = target.pid().to_string();
    let tracer = Tracer::start(&["-p", &pid, "-o", &output])?.attached()?;
    // Nothing is open there yet.
    disk.make_unwritable()?;
    target.tell("go")?;
    thread::sleep(Duration::from_millis(100));
    let refused = Tracer::start(&["-p", &pid, "-o", &output])?.finish()?;
    assert_eq!(refused.status.code(), Some(2));
    let said = refused.messages.concat();
    assert!(said.contains("Read-only") && said.contains(&output) && said.contains("--output"), "{said}");
    target.finish()?;
    let report = tracer.finish()?.report()?;
    let reason = report.0["dump"]["reason"].as_str().unwrap_or_default();
    assert!(reason.contains("Read-only") && reason.contains("missing: "), "{:#}", report.0["dump"]);
    assert_eq!(report.0["steps"].as_array().map(Vec::len), Some(40));

    // Nor does a report vanish without a word.
    let full = Tracer::start_with(&["--no-dump", "--report", "/dev/full", "--", "true"], false)?.finish()?;
    assert_eq!(full.status.code(), Some(2), "{:?}", full.messages);
    assert!(full.messages.concat().contains("can not write the report"), "{:?}", full.messages);
    assert!(full.stdout.contains("Events: "), "{}", full.stdout);
    Ok(())
}

/// More threads within calls than there is room for, where none has a slot: they are counted. Where they have, there is
/// room for all.
#[test]
fn calls_that_find_no_room_are_counted() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    const THREADS: &str = "1000";
    for (room, fits) in [(Some("256"), false), (Some("16384"), true), (None, true)] {
        let dir = tempfile::tempdir()?;
        let gate = dir.path().join("gate");
        let scene = ["--wait-initialized", "threads", THREADS, "1"];
        let (mut target, _) = held_with(V9, dir.path(), &scene, |command| {
            command.env("SIM_CANN_ALLOC_GATE", &gate);
        })?;
        let pid = target.pid().to_string();
        let room = room.map(|room| ["--call-threads", room]);
        let room: Vec<_> = room.into_iter().flatten().collect();
        let tracer = Tracer::start(&[&["-p", &pid, "--no-dump"], room.as_slice()].concat())?.attached()?;
        // All are within the driver at one time.
        fs::write(&gate, "")?;
        target.tell("go")?;
        thread::sleep(Duration::from_millis(700));
        fs::remove_file(&gate)?;
        target.finish()?;
        let report = tracer.finish()?.report()?;
        let hits: u64 =
            report.0["sites"].as_array().into_iter().flatten().filter_map(|site| site["hits"].as_u64()).sum();
        assert_eq!(report.received() + report.lost(), hits);
        let notes = report.0["notes"].to_string();
        if fits {
            assert_eq!(report.lost(), 0, "{notes}");
        } else {
            assert!(report.lost() > 100, "{notes}");
            let said = format!("of {} calls no return was seen", report.lost());
            assert!(notes.replace(',', "").contains(&said), "{said}: {notes}");
        }
    }
    Ok(())
}

/// Two threads whose ids lead to one slot, both within a call of one site at one time: neither takes the other's.
#[test]
fn threads_that_share_a_slot_are_told_apart() -> Result<()> {
    let next_id = Path::new("/proc/sys/kernel/ns_last_pid");
    if !V9.is_ready() || !next_id.exists() {
        return Ok(());
    }
    const SCENE: [&str; 5] = ["--wait-initialized", "leak", "--steps", "8", "--marks"];
    let (first_dir, second_dir) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let gate = first_dir.path().join("gate");
    let (mut first, _) = held_with(V9, first_dir.path(), &SCENE, |command| {
        command.env("SIM_CANN_ALLOC_GATE", &gate);
    })?;
    let most: u32 = fs::read_to_string("/proc/sys/kernel/pid_max")?.trim().parse()?;
    let sharing = || {
        let ids = (first.pid() % CALL_SLOTS..most).step_by(CALL_SLOTS as usize);
        ids.filter(|id| *id > 1 && !Path::new(&format!("/proc/{id}")).exists()).collect::<Vec<_>>()
    };
    let mut second = None;
    // Whoever else starts a process may be faster.
    for _ in 0..50 {
        let id = *sharing().first().context("no process id is free that leads to the same slot")?;
        fs::write(next_id, (id - 1).to_string())?;
        let (target, _) = held(V9, second_dir.path(), &SCENE)?;
        if target.pid() == id {
            second = Some(target);
            break;
        }
    }
    let mut second = second.context("another process always got the id")?;
    let pids = [first.pid(), second.pid()];
    let tracer = Tracer::start(&["-a"])?.attached_to(pids[0])?.attached_to(pids[1])?;
    fs::write(&gate, "")?;
    first.tell("go")?;
    thread::sleep(Duration::from_millis(700));
    second.tell("go")?;
    second.finish()?;
    fs::remove_file(&gate)?;
    first.finish()?;
    let traced = tracer.stop()?;
    let allocations = |pid| -> Result<usize> {
        let rows = traced.dump(pid)?.into_iter().flat_map(|file| file.rows);
        Ok(rows.filter(|row| row["Event"] == "MALLOC").count())
    };
    let found = allocations(pids[0])?;
    assert!(found > 0);
    assert_eq!(found, allocations(pids[1])?);
    Ok(())
}

/// What a terminal must not be sent, and no file should hold.
fn is_harmful(c: char) -> bool {
    c.is_control() && c != '\n' || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2028}' | '\u{2029}')
}

/// Looks at each text of a document.
fn each_text(value: &Value, look: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => look(text),
        Value::Array(items) => items.iter().for_each(|item| each_text(item, look)),
        Value::Object(fields) => fields.iter().for_each(|(key, item)| {
            look(key);
            each_text(item, look);
        }),
        _ => {}
    }
}

/// Marks, operators, kernels, file names and command lines that mean harm come through to no one: not to the terminal,
/// not into the JSON, not into any dump.
#[test]
fn no_text_of_a_target_gets_through() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let parent = tempfile::tempdir()?;
    let evil = parent.path().join(OsStr::from_bytes(b"=1+1\x1b[2J\n\"x\",'y' \xff\xfe"));
    V9.copy_to(&evil)?;
    let file = evil.join("\x1b[31m");
    let mut command = Command::new(evil.join("native-workload"));
    command.args(["--wait-stdin", "--truth"]).arg(&file).args(["hostile", "44"]);
    let mut target = Target::start(command)?;
    wait_for_truth(&file, "ready")?;
    let pid = target.pid().to_string();
    let kernels = ["--level", "kernel", "--analysis", "leaks,inefficient,decompose", "--show-frames", "all"];
    let all =
        [&["-p", &pid, "--format", "csv,db,capture"], &kernels[..], &["--call-stack", "python,c"]].concat();
    let json = Tracer::start(&all)?.attached()?;
    let text = Tracer::start_with(&[&["-p", &pid], &kernels[..]].concat(), false)?.attached()?;
    target.tell("go")?;
    ensure!(target.finish()?.0.success());

    let (json, text) = (json.finish()?, text.finish()?);
    let mut verbs = Vec::new();
    for verb in ["leaks", "inefficient", "decompose", "oom"] {
        verbs.push(Tracer::prints(&[verb, &json.dir.path().to_string_lossy()])?);
    }
    for printed in verbs.iter().chain([&text.stdout]).chain(&text.messages).chain(&json.messages) {
        assert!(!printed.contains(is_harmful), "{printed:?}");
        assert!(
            !printed.lines().any(|line| line.starts_with("9,MALLOC") || line.starts_with("lines")),
            "{printed}"
        );
    }
    assert!(text.stdout.contains("\\u{1b}[2J"), "the texts are shown, spelled out: {}", text.stdout);

    let report = json.report()?;
    let mut texts = 0;
    each_text(&report.0, &mut |text| {
        texts += 1;
        assert!(!text.contains(|c| is_harmful(c) || c == '\n'), "{text:?}");
        assert!(text.len() < 4096, "{} bytes: {text:.100}", text.len());
    });
    assert!(texts > 100);
    assert!(report.blocks(report.device(target_pid(&pid)?, 0)?, "leaks").len() > 30);

    let mut rows = 0;
    for file in json.dump(target_pid(&pid)?)? {
        let text = fs::read_to_string(&file.path)?;
        assert!(!text.contains(is_harmful), "{}", file.path.display());
        for row in &file.rows {
            rows += 1;
            assert_eq!(row.len(), 12, "{row:?}");
            for (column, cell) in row {
                let formula = cell.trim_start().starts_with(['=', '+', '-', '@']);
                assert!(!formula || cell.parse::<i64>().is_ok(), "a formula: {cell:?}");
                assert!(!cell.contains('\n') || column.starts_with("Call Stack"), "{column}: {cell:?}");
            }
        }
    }
    assert!(rows > 200, "{rows} rows");
    let files = Command::new("find").arg(json.dir.path()).args(["-name", "*.db"]).output()?;
    let files = String::from_utf8(files.stdout)?;
    ensure!(!files.is_empty(), "no database");
    for file in files.lines() {
        let bytes = fs::read(file)?;
        assert!(!bytes.windows(2).any(|two| two == b"\x1b["), "{file}");
    }
    Ok(())
}

fn target_pid(text: &str) -> Result<u32> {
    Ok(text.parse()?)
}

/// The workload on a copy of its libraries, held at its beginning; with the directory of the copy and the file of its truth.
fn held_on_copy(parent: &Path, words: &[&str]) -> Result<(Target, PathBuf, PathBuf)> {
    let (ground, file) = (parent.join("ground"), parent.join("truth.jsonl"));
    V9.copy_to(&ground)?;
    let mut command = Command::new(ground.join("native-workload"));
    command.args(["--wait-stdin", "--truth"]).arg(&file).args(words);
    let target = Target::start(command)?;
    wait_for_truth(&file, "ready")?;
    Ok((target, ground, file))
}

/// What counts is the file that is mapped, whatever its name leads to by now.
#[test]
fn libraries_that_were_deleted_or_replaced_on_disk_are_traced() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let parent = tempfile::tempdir()?;
    let (mut target, ground, file) = held_on_copy(parent.path(), &["leak", "--steps", "12", "--marks"])?;
    for (index, entry) in fs::read_dir(ground.join("lib64"))?.enumerate() {
        let path = entry?.path();
        fs::remove_file(&path)?;
        match index % 3 {
            0 => {}
            1 => fs::write(&path, "no library")?,
            _ => {
                fs::copy("/proc/self/exe", &path)?;
            }
        }
    }
    let pid = target.pid();
    let tracer = Tracer::start(&["-p", &pid.to_string(), "--call-stack", "c"])?.attached()?;
    target.tell("go")?;
    ensure!(target.finish()?.0.success());
    let report = tracer.finish()?.report()?;
    let device = report.device(pid, 0)?;
    let leaked = truth(&file)?.iter().filter(|line| line["event"] == "leak").count();
    let found = report.blocks(device, "leaks").len() + report.blocks(device, "not_judged").len();
    assert!(found >= leaked && leaked > 5, "{found} of {leaked}");
    let frames = device["leaks"][0]["native"].as_array().context("no native stack")?;
    let named = frames.iter().filter_map(|frame| frame["function"].as_str());
    let functions: Vec<&str> = named.collect();
    assert!(functions.iter().any(|name| name.contains("native_workload::")), "{functions:?}");
    Ok(())
}

/// Who cuts a library short takes the processes with it that run on it, and not the tracer, which has it mapped too.
#[test]
fn a_library_that_is_cut_short_does_not_end_the_trace() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let parent = tempfile::tempdir()?;
    let over = parent.path().join("over");
    let until = over.to_str().context("a path that is no text")?;
    let words = ["--until-file", until, "leak", "--steps", "20", "--marks"];
    let (mut target, ground, file) = held_on_copy(parent.path(), &words)?;
    let pid = target.pid();
    let tracer =
        Tracer::start(&["-p", &pid.to_string(), "--call-stack", "c", "--native-min", "0"])?.attached()?;
    target.tell("go")?;
    wait_for_truth(&file, "leak")?;
    thread::sleep(Duration::from_millis(300));
    // There are stacks in the ring buffer that it has not seen.
    tracer.signal(libc::SIGSTOP);
    thread::sleep(Duration::from_millis(100));
    for name in ["native-workload", "lib64/libruntime.so", "lib64/libascend_hal.so"] {
        // Into the file itself; a program that runs can not be opened for writing, but can be cut.
        let path = std::ffi::CString::new(ground.join(name).into_os_string().into_encoded_bytes())?;
        // SAFETY: a NUL-terminated path of ours.
        unsafe { libc::truncate(path.as_ptr(), 0) };
    }
    thread::sleep(Duration::from_millis(100));
    tracer.signal(libc::SIGCONT);
    fs::write(&over, "")?;
    target.signal(libc::SIGKILL);
    target.finish()?;
    let report = tracer.finish()?.report()?;
    assert!(report.blocks(report.device(pid, 0)?, "leaks").len() > 3, "{:#}", report.0["devices"]);
    Ok(())
}

/// Open descriptors and resident KiB of a process. Links and programs are left out: they are of libraries, and those that
/// programs of other tests bring are probed for as long as the trace goes.
fn footprint(pid: u32) -> Result<(usize, u64)> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let kib = line.trim().trim_end_matches(" kB").parse()?;
    let is_of_process = |to: &Path| !to.to_string_lossy().starts_with("anon_inode:bpf");
    let links = fs::read_dir(format!("/proc/{pid}/fd"))?.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok());
    Ok((links.filter(|to| is_of_process(to)).count(), kib))
}

/// Starts short processes, four at a time: some allocate, load libraries late, exec, fail or are killed, some use no
/// device.
fn churn(dir: &Path, count: usize) -> Result<()> {
    let workload = V9.command(&[]).get_program().to_string_lossy().into_owned();
    let mut running: VecDeque<std::process::Child> = VecDeque::new();
    for index in 0..count {
        let scene: &[&str] = match index % 5 {
            0 => &["--end", "exit", "leak", "--steps", "3", "--marks", "--step-ms", "0"],
            1 => &["--end", "kill", "pairs", "20"],
            2 => &["--end", "exit", "mindspore"],
            3 => &["two-devices"],
            _ => &[],
        };
        let truth = dir.join("churn.jsonl");
        let mut command = match index % 10 {
            4 | 9 => Command::new("true"),
            5 => {
                let mut shell = Command::new("sh");
                shell.args(["-c", "true; exec \"$0\" \"$@\"", &workload]);
                shell
            }
            _ => Command::new(&workload),
        };
        if !scene.is_empty() {
            command.arg("--truth").arg(&truth).args(scene);
        }
        running.push_back(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?);
        if running.len() == 4 {
            running.pop_front().map(|mut child| child.wait()).transpose()?;
        }
    }
    running.into_iter().try_for_each(|mut child| child.wait().map(|_| ()))?;
    Ok(())
}

/// Other tests run meanwhile, and their processes are traced as well.
#[test]
fn processes_that_come_and_go_leave_nothing_in_the_tracer() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    // Where steps are inferred, events wait for ten seconds, and files with them.
    let tracer = Tracer::start(&["-a", "--steps-from", "marks"])?;
    churn(dir.path(), 40)?;
    thread::sleep(Duration::from_millis(1500));
    let (files, kib) = footprint(tracer.pid())?;
    let count = 4 * times(30);
    churn(dir.path(), count)?;
    thread::sleep(Duration::from_millis(1500));
    let (more_files, more_kib) = footprint(tracer.pid())?;
    let report = tracer.stop()?.report()?;
    let targets = report.0["targets"].as_array().map_or(0, Vec::len);
    let said = report.0["notes"].to_string();
    assert!(
        targets > count / 2 || said.contains("ended before they could be looked at"),
        "{targets}: {said}"
    );
    assert!(more_files <= files + count / 2, "{files} descriptors, then {more_files}");
    let each = more_kib.saturating_sub(kib) / count as u64;
    assert!(each < 100, "{each} KiB stay of each process: {kib}, then {more_kib}");
    Ok(())
}

/// Each process has sites of its own, and the map of sites room for those of a hundred processes at a time.
#[test]
fn processes_of_one_name_are_traced_one_after_another() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let parent = tempfile::tempdir()?;
    let ground = parent.path().join("ground");
    V9.copy_to(&ground)?;
    let program = ground.join("short-lived");
    fs::rename(ground.join("native-workload"), &program)?;
    // The trace ends when all of the name have ended.
    let mut stays = Command::new(&program);
    stays.args(["--wait-stdin", "--wait-initialized", "sleep", "0"]);
    let stays = Target::start(stays)?;
    let tracer = Tracer::start(&["--comm", "short-lived", "--no-dump", "--call-stack", "none"])?;
    let mut tracer = tracer.attached_to(stays.pid())?;
    let mut pids = HashSet::from([u64::from(stays.pid())]);
    let mut footprints = Vec::new();
    let count = times(40);
    for index in 0..count {
        let mut command = Command::new(&program);
        command.args([
            "--wait-stdin",
            "--wait-initialized",
            "--end",
            "exit",
            "leak",
            "--steps",
            "5",
            "--marks",
        ]);
        let mut child = Target::start(command)?;
        pids.insert(u64::from(child.pid()));
        tracer = tracer.attached_to(child.pid())?;
        child.tell("go")?;
        ensure!(child.finish()?.0.success());
        if index == 9 || index + 1 == count {
            // Its probes are detached meanwhile.
            thread::sleep(Duration::from_secs(1));
            footprints.push(footprint(tracer.pid())?);
        }
    }
    let report = tracer.stop()?.report()?;
    let targets =
        report.0["targets"].as_array().into_iter().flatten().filter_map(|target| target["pid"].as_u64());
    assert_eq!(targets.collect::<HashSet<_>>(), pids);
    let (first, last) = (footprints.first().context("none")?, footprints.last().context("none")?);
    assert!(last.0 <= first.0 + 8, "descriptors and KiB over time: {footprints:?}");
    let sites = report.0["sites"].as_array().context("no sites")?;
    let of_hal: Vec<_> = sites.iter().filter(|site| site["site"] == "halMemAlloc").collect();
    assert_eq!(of_hal.len(), 2, "one row for the process that is there, and one for all others: {of_hal:#?}");
    let (hits, lost) = report.site("halMemAlloc");
    assert!(hits > 10 * pids.len() as u64 && lost == 0, "{hits}");
    assert_eq!(report.lost(), 0, "{:#}", report.0["notes"]);
    Ok(())
}

/// A process that gets the id of one that has ended is another one, with devices of its own.
#[test]
fn an_id_that_comes_again_is_another_process() -> Result<()> {
    const LAST: &str = "/proc/sys/kernel/ns_last_pid";
    if !V9.is_ready() || !Path::new(LAST).exists() {
        return Ok(());
    }
    let dirs = [tempfile::tempdir()?, tempfile::tempdir()?];
    let scene = ["leak", "--steps", "6", "--marks", "--step-ms", "1"];
    let (mut first, first_truth) = held(V9, dirs[0].path(), &scene)?;
    let pid = first.pid();
    let tracer = Tracer::start(&["-a"])?.attached_to(pid)?;
    first.tell("go")?;
    ensure!(first.finish()?.0.success());
    let mut again = None;
    for _ in 0..200 {
        fs::write(LAST, (pid - 1).to_string())?;
        let (target, file) = held_with(V9, dirs[1].path(), &scene, |command| {
            command.env("ASCEND_RT_VISIBLE_DEVICES", "3");
        })?;
        if target.pid() == pid {
            again = Some((target, file));
            break;
        }
    }
    let (mut second, second_truth) = again.context("the id was never free")?;
    let tracer = tracer.attached_to_another(pid)?;
    second.tell("go")?;
    ensure!(second.finish()?.0.success());
    let report = tracer.stop()?.report()?;
    for (device, file) in [(0, first_truth), (3, second_truth)] {
        let leaked = truth(&file)?.into_iter().filter(|line| {
            line["event"] == "leak" && line["step"].as_u64().is_some_and(|step| step > 1 && step < 6)
        });
        let leaked: BTreeSet<u64> = leaked.filter_map(|line| line["ptr"].as_u64()).collect();
        let found = report.blocks(report.device(pid, device)?, "leaks").into_iter().map(|block| block.ptr);
        let found: BTreeSet<u64> = found.collect();
        assert!(found.is_superset(&leaked), "device {device}: {found:x?}, {leaked:x?}");
    }
    Ok(())
}
