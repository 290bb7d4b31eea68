//! The tracer on the native workload: every fact that the simulated CANN can vouch for.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    os::unix::{
        fs::{FileExt, PermissionsExt},
        process::CommandExt,
    },
    path::Path,
    process::Command,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use memscope_e2e::{
    Block, Capability, DumpFile, Ground, Target, Tracer, checked_by, held, held_with, is_guest,
    leaks::{self, events, judged, padded},
    least_privileged, pace, pointer, truth, wait_for_truth,
};
use serde_json::Value;

const V8: Ground = Ground::Native("v8");
const V9: Ground = Ground::Native("v9");

fn leaks_are_exactly_the_truth(ground: Ground, extra: &[&str]) -> Result<()> {
    leaks::are_exactly_the_truth(ground, |pid| Tracer::start(&[&["-p", pid], extra].concat()))
}

#[test]
fn leaks_on_the_8x_layout() -> Result<()> {
    leaks_are_exactly_the_truth(V8, &[])
}

#[test]
fn leaks_on_the_9x_layout() -> Result<()> {
    leaks_are_exactly_the_truth(V9, &[])
}

/// A kernel that has no cookies is told apart from one that has, and the way that needs them is refused.
#[test]
fn leaks_through_perf_events_with_cookies() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let cookies = ["--mechanism", "perf-cookie"];
    if Tracer::check()?["attaching"].contains("one program a site") {
        let traced = Tracer::start(&[&cookies[..], &["-a"]].concat())?.finish()?;
        assert_eq!(traced.status.code(), Some(2), "{:?}", traced.messages);
        assert!(traced.messages.concat().contains("has no attach cookies"), "{:?}", traced.messages);
        return Ok(());
    }
    leaks_are_exactly_the_truth(V9, &cookies)
}

/// The programs that walk Python stacks ask most of a kernel's verifier.
#[test]
fn the_kernel_takes_the_programs_that_walk_stacks() -> Result<()> {
    if !memscope_e2e::is_root() {
        return Ok(());
    }
    let found = Tracer::check()?;
    assert_eq!(found["BPF programs"], "load, with ring buffer, Python and native stacks", "{found:?}");
    Ok(())
}

#[test]
fn leaks_through_a_program_for_each_site() -> Result<()> {
    leaks_are_exactly_the_truth(V9, &["--mechanism", "perf-site"])
}

/// Attached in the middle: what was allocated before is unknown, what comes is exact.
#[test]
fn a_late_attach_reports_what_came_after() -> Result<()> {
    if !V8.is_ready() {
        return Ok(());
    }
    let all = 200 * pace();
    let dir = tempfile::tempdir()?;
    let args = ["leak", "--steps", &all.to_string(), "--marks", "--step-ms", "50"];
    let (mut target, file) = held(V8, dir.path(), &args)?;
    let pid = target.pid();
    target.tell("go")?;
    thread::sleep(Duration::from_millis(500));
    let tracer = Tracer::start(&["-p", &pid.to_string()])?.attached()?;
    target.finish()?;
    let report = tracer.finish()?.report()?;
    let device = report.device(pid, 0)?;
    let steps = report.0["steps"].as_array().map(Vec::len).unwrap_or_default() as u64;
    assert!(steps > 20 && steps < all, "{steps} whole steps seen");
    // Our step n is the workload's step n + offset; the first one warms up.
    let offset = all - steps;
    let wanted: Vec<Block> = events(&truth(&file)?, "leak")
        .into_iter()
        .filter(|block| block.step >= offset + 2 && block.step < all)
        .map(|block| Block { step: block.step - offset, ..block })
        .collect();
    assert_eq!(report.blocks(device, "leaks"), wanted);
    Ok(())
}

#[test]
fn losses_are_counted_to_the_last_record() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let log = dir.path().join("calls.jsonl");
    let mut command = V9.command(&["--wait-stdin", "threads", "4", "1000"]);
    command.env("SIM_CANN_TRACE", &log);
    let mut target = Target::start(command)?;
    target.wait_for("ready", |line| line.contains("ready"))?;
    let pid = target.pid();
    let tracer = Tracer::start(&["-p", &pid.to_string(), "--ring-size", "64K", "--no-dump"])?.attached()?;
    // A tracer that gets no time for a while overflows its ring for certain: by a quarter of all calls.
    tracer.signal(libc::SIGSTOP);
    target.tell("go")?;
    for _ in 0..6000 {
        if fs::metadata(&log).is_ok_and(|log| log.len() > 500_000) {
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    tracer.signal(libc::SIGCONT);
    target.finish()?;
    let report = tracer.finish()?.report()?;

    let mut calls: BTreeMap<String, u64> = BTreeMap::new();
    for line in truth(&log)? {
        *calls.entry(line["fn"].as_str().unwrap_or_default().to_owned()).or_default() += 1;
    }
    let mut wanted = 0;
    for site in ["aclInit", "aclFinalize", "aclrtMalloc", "rtMalloc", "halMemAlloc", "halMemFree"] {
        let called = calls.get(site).copied().unwrap_or(0);
        assert_eq!(report.site(site).0, called, "hits of {site}");
        wanted += called;
    }
    assert!(wanted > 16_000, "{calls:?}");
    let hits: u64 =
        report.0["sites"].as_array().into_iter().flatten().filter_map(|s| s["hits"].as_u64()).sum();
    assert_eq!(report.received() + report.lost(), hits);
    let said = report.0["notes"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let loss = format!("{} event", report.lost());
    assert!(
        report.lost() == 0 || said.clone().any(|note| note.replace(',', "").starts_with(&loss)),
        "{:?}",
        report.0["notes"]
    );
    assert!(report.lost() > 0, "the ring was to overflow");
    Ok(())
}

/// Under a ring of the default size nothing is lost, and the sums of the ledger are those of the simulation.
#[test]
fn many_threads_are_traced_without_loss() -> Result<()> {
    if !V8.is_ready() {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let (mut target, _) = held(V8, dir.path(), &["threads", "4", "3000", "--handoff"])?;
    let pid = target.pid();
    let tracer = Tracer::start(&["-p", &pid.to_string()])?.attached()?;
    target.tell("go")?;
    target.finish()?;
    let traced = tracer.finish()?;
    let report = traced.report()?;
    assert_eq!(report.lost(), 0);
    let rows: Vec<_> = traced.dump(pid)?.into_iter().flat_map(|file| file.rows).collect();
    let user =
        |row: &&Row| DumpFile::attr(row, "size").is_some_and(|size| size == padded(64 << 10).to_string());
    assert_eq!(rows.iter().filter(user).filter(|row| row["Event"] == "MALLOC").count(), 12_000);
    assert_eq!(rows.iter().filter(user).filter(|row| row["Event"] == "FREE").count(), 12_000);
    let times: Vec<u64> = rows.iter().filter_map(|row| row["Timestamp(ns)"].parse().ok()).collect();
    assert_eq!(times.len(), rows.len());
    Ok(())
}

#[test]
fn two_processes_on_two_devices_are_told_apart_host_wide() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let (first_dir, second_dir) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let leak = ["leak", "--steps", "8", "--marks"];
    let (mut first, first_truth) = held(V9, first_dir.path(), &[&["--device", "0"], &leak[..]].concat())?;
    let (mut second, second_truth) = held(V9, second_dir.path(), &[&["--device", "1"], &leak[..]].concat())?;
    let mut bystander = Target::start({
        let mut command = Command::new("sh");
        command.args(["-c", "read line; echo untouched"]);
        command
    })?;
    let tracer = Tracer::start(&["-a"])?.attached_to(first.pid())?.attached_to(second.pid())?;
    let pids = [first.pid(), second.pid()];
    first.tell("go")?;
    second.tell("go")?;
    first.finish()?;
    second.finish()?;
    bystander.tell("go")?;
    let (status, lines, _) = bystander.finish()?;
    assert!(status.success() && lines == ["untouched"]);
    let report = tracer.stop()?.report()?;
    for (pid, device, file) in [(pids[0], 0, first_truth), (pids[1], 1, second_truth)] {
        let device = report.device(pid, device)?;
        let wanted = judged(&truth(&file)?, 8);
        let found: Vec<Block> = report
            .blocks(device, "leaks")
            .into_iter()
            .filter(|block| block.size != padded(8 << 20))
            .collect();
        assert_eq!(found, wanted, "process {pid}");
    }
    Ok(())
}

/// Two containers of one image map the same files under different names: each call is one event all the same, and
/// both reports are exact. By the process id of the host alone, too.
#[test]
fn containers_that_share_a_layer_are_counted_once() -> Result<()> {
    if !V9.is_ready() || !Ground::has_containers() {
        return Ok(());
    }
    let mut containers = Vec::new();
    for device in ["0", "1"] {
        let dir = tempfile::tempdir()?;
        let file = dir.path().join("truth.jsonl");
        let args = [
            "--wait-stdin",
            "--truth",
            &file.to_string_lossy(),
            "--device",
            device,
            "leak",
            "--steps",
            "8",
            "--marks",
        ];
        let target = Target::start(V9.container(dir.path(), &args)?)?;
        wait_for_truth(&file, "ready")?;
        containers.push((target.child_pid()?, target, file, dir));
    }
    let alone = Tracer::start(&["-p", &containers[0].0.to_string()])?.attached()?;
    let mut tracer = Tracer::start(&["-a"])?;
    for (pid, ..) in &containers {
        tracer = tracer.attached_to(*pid)?;
    }
    let mut all = Vec::new();
    for (pid, mut target, file, dir) in containers {
        target.tell("go")?;
        target.finish()?;
        all.push((pid, judged(&truth(&file)?, 8), dir));
    }
    let check = |report: &memscope_e2e::Report, pid: u32, device: u64, wanted: &[Block]| -> Result<()> {
        let mut found = report.blocks(report.device(pid, device)?, "leaks");
        found.retain(|block| block.size != padded(8 << 20));
        assert_eq!(found, wanted, "process {pid}");
        Ok(())
    };
    check(&alone.finish()?.report()?, all[0].0, 0, &all[0].1)?;
    let report = tracer.stop()?.report()?;
    let targets = report.0["targets"].as_array().into_iter().flatten();
    let own: Vec<_> = targets
        .filter(|target| all.iter().any(|(pid, ..)| target["pid"] == *pid))
        .map(|target| &target["own_pid"])
        .collect();
    assert_eq!(own, [1, 1], "the first process of its namespace");
    for (device, (pid, wanted, _)) in all.iter().enumerate() {
        check(&report, *pid, device as u64, wanted)?;
    }
    Ok(())
}

/// The words of a command line, of which `{}` is where the host's /proc is.
fn words<'w>(words: &'w [&'w str]) -> impl FnOnce(&str) -> Vec<String> + 'w {
    move |proc| words.iter().map(|word| word.replace("{}", proc)).collect()
}

/// A tracer that has other process ids than the kernel's programs and a /proc that shows them: the host's, mounted
/// elsewhere, tells it all that its own does not.
#[test]
fn a_tracer_in_a_container_takes_the_hosts_proc() -> Result<()> {
    for mechanism in [&[][..], &["--mechanism", "perf-site"]] {
        leaks::are_exactly_the_truth(V9, |pid| {
            Tracer::in_container(words(&[&["--proc", "{}", "-p", pid], mechanism].concat()))
        })?;
    }
    if !V8.is_ready() {
        return Ok(());
    }
    let workload = V8.command(&[]).get_program().to_string_lossy().into_owned();
    let command = ["--proc", "{}", "--", &workload, "leak", "--steps", "6", "--marks", "--step-ms", "50"];
    let traced = Tracer::in_container(words(&command))?.finish()?;
    assert_eq!(traced.status.code(), Some(0), "{:?}", traced.messages);
    let report = traced.report()?;
    assert_eq!(report.site("halMemAlloc").0, 17 + 6 * 4 + 1 + 2 + 2);
    assert!(
        report.0["targets"][0]["own_pid"].as_u64().is_some_and(|pid| pid < 100),
        "{:#}",
        report.0["targets"]
    );

    let says = |args: &[&str], code: i32, text: &str| -> Result<()> {
        let traced = Tracer::in_container(words(args))?.finish()?;
        let said = format!("{}{:?}", traced.stdout, traced.messages);
        assert_eq!(traced.status.code(), Some(code), "{args:?} {said}");
        assert!(said.contains(text), "{args:?} says {said}, without {text:?}");
        Ok(())
    };
    says(&["-a", "-d", "1"], 2, "--pid=host")?;
    says(&["-a", "-d", "1", "--proc", "/dev"], 2, "another file system")?;
    Ok(())
}

/// A process that starts while the host is traced is traced from its first allocation on.
#[test]
fn processes_that_come_later_are_found_host_wide() -> Result<()> {
    if !V8.is_ready() {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let (early, _) = held(V8, dir.path(), &["sleep", "0"])?;
    let tracer = Tracer::start(&["-a"])?.attached_to(early.pid())?;
    let later = tempfile::tempdir()?;
    let file = later.path().join("truth.jsonl");
    let target = Target::start(V8.command(&[
        "--truth",
        &file.to_string_lossy(),
        "leak",
        "--steps",
        "8",
        "--marks",
        "--step-ms",
        "50",
    ]))?;
    let pid = target.pid();
    target.finish()?;
    let report = tracer.stop()?.report()?;
    drop(early);
    let device = report.device(pid, 0)?;
    let mut found = report.blocks(device, "leaks");
    found.retain(|block| block.size != padded(8 << 20));
    assert_eq!(found, judged(&truth(&file)?, 8));
    assert!(report.site("aclInit").0 >= 1, "its first call was seen");
    Ok(())
}

#[test]
fn an_out_of_memory_is_reported_with_what_was_asked_and_held() -> Result<()> {
    for (ground, listed, options) in [(V8, 10, &[][..]), (V9, 4, &["--oom-blocks", "4"])] {
        if !ground.is_ready() {
            continue;
        }
        let dir = tempfile::tempdir()?;
        let file = dir.path().join("truth.jsonl");
        let mut command = ground.command(&[
            "--wait-stdin",
            "--truth",
            &file.to_string_lossy(),
            "oom",
            "--size",
            "67108864",
        ]);
        command.env("SIM_CANN_HBM_BYTES", (1u64 << 30).to_string());
        let mut target = Target::start(command)?;
        wait_for_truth(&file, "ready")?;
        let pid = target.pid();
        let tracer = Tracer::start(&[&["-p", &pid.to_string()], options].concat())?.attached()?;
        target.tell("go")?;
        let (status, ..) = target.finish()?;
        assert!(status.success());
        let report = tracer.finish()?.report()?;
        let lines = truth(&file)?;
        let oom = lines.iter().find(|line| line["event"] == "oom").context("no oom in the truth")?;
        let device = report.device(pid, 0)?;
        let found = device["oom"].as_array().context("no oom")?;
        assert_eq!(found.len(), 1, "{found:#?}");
        assert_eq!(found[0]["size"], padded(64 << 20));
        assert_eq!(found[0]["requested"], 64 << 20);
        assert_eq!(found[0]["api"], "aclrtMalloc");
        assert_eq!(found[0]["code"], 6);
        let largest = found[0]["largest"].as_array().context("no largest blocks")?;
        let held = oom["blocks"].as_u64().context("no count")?;
        assert_eq!(largest.len() as u64, held.min(listed));
        assert!(largest.iter().all(|block| block["size"] == padded(64 << 20)));
        let hal = found[0]["pools"]
            .as_array()
            .into_iter()
            .flatten()
            .find(|p| p["pool"] == "HAL")
            .context("no HAL")?;
        assert!(hal["live_bytes"].as_u64() >= Some(held * padded(64 << 20)));
    }
    Ok(())
}

#[test]
fn a_retry_with_normal_pages_is_no_out_of_memory() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("truth.jsonl");
    let mut command =
        V9.command(&["--wait-stdin", "--truth", &file.to_string_lossy(), "leak", "--steps", "4", "--marks"]);
    command.env("SIM_CANN_HUGE_FAIL", "1");
    let mut target = Target::start(command)?;
    wait_for_truth(&file, "ready")?;
    let pid = target.pid();
    let tracer = Tracer::start(&["-p", &pid.to_string()])?.attached()?;
    target.tell("go")?;
    target.finish()?;
    let report = tracer.finish()?.report()?;
    let device = report.device(pid, 0)?;
    let unrecovered =
        device["oom"].as_array().into_iter().flatten().filter(|oom| oom["recovered"] != true).count();
    assert_eq!(unrecovered, 0, "{:#}", device["oom"]);
    Ok(())
}

#[test]
fn physical_memory_is_counted_by_its_handles() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let (mut target, file) = held(V9, dir.path(), &["--end", "exit", "vmm"])?;
    let pid = target.pid();
    let tracer = Tracer::start(&["-p", &pid.to_string()])?.attached()?;
    target.tell("go")?;
    target.finish()?;
    let traced = tracer.finish()?;
    let rows: Vec<_> = traced.dump(pid)?.into_iter().flat_map(|file| file.rows).collect();
    let created: Vec<_> =
        rows.iter().filter(|row| DumpFile::attr(row, "alloc_type") == Some("create")).collect();
    let sizes: Vec<_> = created
        .iter()
        .filter(|r| r["Event"] == "MALLOC")
        .filter_map(|row| DumpFile::attr(row, "size"))
        .collect();
    assert_eq!(sizes, [(8u64 << 20).to_string(), (4u64 << 20).to_string()]);
    // Retained once, the first is free only when it is released for the second time; the second leaks (its handle
    // may have the value of the first, so blocks are told apart by their ids).
    let frees = |id: Option<&str>| {
        let of_block =
            rows.iter().filter(|row| row["Event"] == "FREE" && DumpFile::attr(row, "allocation_id") == id);
        of_block.map(|row| DumpFile::attr(row, "shadow").is_some()).collect::<Vec<_>>()
    };
    let ids: Vec<_> = created
        .iter()
        .filter(|r| r["Event"] == "MALLOC")
        .map(|r| DumpFile::attr(r, "allocation_id"))
        .collect();
    assert_eq!(ids.len(), 2);
    assert_eq!(frees(ids[0]), [false]);
    assert_eq!(frees(ids[1]), [true], "written at exit, for a block that was never freed");
    let leaked = truth(&file)?.iter().find(|l| l["event"] == "leak").and_then(|l| l["ptr"].as_u64());
    assert_eq!(Some(pointer(&created[1]["Ptr"])), leaked);
    Ok(())
}

#[test]
fn pinned_memory_and_other_owners_are_kept_apart() -> Result<()> {
    if !V8.is_ready() {
        return Ok(());
    }
    for (scene, wanted) in [("pinned", "HOST"), ("owners", "HAL")] {
        let dir = tempfile::tempdir()?;
        let (mut target, _) = held(V8, dir.path(), &["--end", "exit", scene])?;
        let pid = target.pid();
        let tracer = Tracer::start(&["-p", &pid.to_string()])?.attached()?;
        target.tell("go")?;
        target.finish()?;
        let report = tracer.finish()?.report()?;
        let pools: Vec<_> = report.0["devices"]
            .as_array()
            .into_iter()
            .flatten()
            .flat_map(|d| d["pools"].as_array().cloned().unwrap_or_default())
            .collect();
        let pool =
            pools.iter().find(|p| p["pool"] == wanted).with_context(|| format!("{scene}: {pools:?}"))?;
        assert!(pool["peak_bytes"].as_u64() >= Some(5 << 20), "{scene}: {pool}");
    }
    Ok(())
}

#[test]
fn the_pool_of_mindspore_is_seen_though_it_loads_late() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let seconds = (6 * pace()).to_string();
    let (mut target, _) = held(V9, dir.path(), &["--loop-seconds", &seconds, "--end", "exit", "mindspore"])?;
    let pid = target.pid();
    let tracer = Tracer::start(&["-p", &pid.to_string()])?.attached()?;
    target.tell("go")?;
    target.finish()?;
    let report = tracer.finish()?.report()?;
    let pools: Vec<_> = report.0["devices"]
        .as_array()
        .into_iter()
        .flatten()
        .flat_map(|d| d["pools"].as_array().cloned().unwrap_or_default())
        .collect();
    let pool = pools.iter().find(|p| p["pool"] == "MINDSPORE").with_context(|| format!("{pools:?}"))?;
    assert!(pool["peak_bytes"].as_u64() >= Some(48 << 20), "{pool}");
    Ok(())
}

#[test]
fn launches_are_counted_and_named_at_kernel_level() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let (mut target, _) = held(V9, dir.path(), &["kernel", "300"])?;
    let pid = target.pid();
    let tracer = Tracer::start(&["-p", &pid.to_string(), "--level", "kernel"])?.attached()?;
    target.tell("go")?;
    target.finish()?;
    let traced = tracer.finish()?;
    let mut names: BTreeMap<String, usize> = BTreeMap::new();
    for row in traced.dump(pid)?.iter().flat_map(|file| &file.rows).filter(|r| r["Event"] == "KERNEL_LAUNCH")
    {
        *names.entry(row["Name"].clone()).or_default() += 1;
    }
    assert_eq!(names.values().sum::<usize>(), 300, "{names:?}");
    assert_eq!(names.get("scale_add_1f2e3d"), Some(&100), "{names:?}");
    assert_eq!(names.get("fill"), Some(&100), "{names:?}");
    Ok(())
}

#[test]
fn what_copies_and_kernels_use_is_seen() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    // Programs at one function run in an order, whatever the mechanism.
    what_copies_and_kernels_use_is_seen_through(&["--mechanism", "perf-site"])?;
    what_copies_and_kernels_use_is_seen_through(&[])
}

fn what_copies_and_kernels_use_is_seen_through(mechanism: &[&str]) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let (mut target, _) = held(V9, dir.path(), &["kernel", "300"])?;
    let pid = target.pid();
    let process = pid.to_string();
    let args = ["-p", &process, "--level", "kernel", "--analysis", "inefficient"];
    let tracer = Tracer::start(&[&args, mechanism].concat())?.attached()?;
    target.tell("go")?;
    target.finish()?;
    let traced = tracer.finish()?;
    let files = traced.dump(pid)?;
    let rows: Vec<_> = files.iter().flat_map(|file| &file.rows).collect();
    let blocks = blocks_of(&rows, "65536");
    let [input, output] = blocks[..] else { anyhow::bail!("{blocks:?}") };
    let used = uses(&rows)?;
    let mut wanted = BTreeMap::from([(("aclrtMemcpyAsync", "WRITE", input, "65536"), 3)]);
    for kernel in ["scale_add_1f2e3d", "fill", "rtKernelLaunchWithHandleV2"] {
        for block in [input, output] {
            wanted.insert((kernel, "UNKNOWN", block, "0"), 100);
        }
    }
    assert_eq!(used, wanted);
    Ok(())
}

type Row = HashMap<String, String>;

/// The addresses of blocks of which so many bytes were asked.
fn blocks_of<'a>(rows: &[&'a Row], bytes: &str) -> Vec<&'a str> {
    let of_size = |row: &&&Row| row["Event"] == "MALLOC" && DumpFile::attr(row, "api_size") == Some(bytes);
    rows.iter().filter(of_size).map(|row| row["Ptr"].as_str()).collect()
}

/// Who used which block how: name, kind, address, bytes.
type Use<'a> = (&'a str, &'a str, &'a str, &'a str);

/// How often each use comes.
fn uses<'a>(rows: &[&'a Row]) -> Result<BTreeMap<Use<'a>, usize>> {
    let mut used = BTreeMap::new();
    for row in rows.iter().filter(|row| row["Event"] == "ACCESS") {
        let size = DumpFile::attr(row, "size").context("no size")?;
        *used.entry((&*row["Name"], &*row["Event Type"], &*row["Ptr"], size)).or_default() += 1;
    }
    Ok(used)
}

/// Packs of tensors: in place and elsewhere; of the longer one as many as a record has room for.
#[test]
fn what_operators_of_atb_use_is_seen() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    for mechanism in [&["--mechanism", "perf-site"][..], &[]] {
        let dir = tempfile::tempdir()?;
        // There from the beginning: what happens while a library is being probed is missed.
        let preload = |command: &mut Command| {
            command.env("LD_PRELOAD", "libatb.so");
        };
        let (mut target, _) = held_with(V9, dir.path(), &["atb"], preload)?;
        let pid = target.pid();
        let process = pid.to_string();
        let args = ["-p", &process, "--analysis", "inefficient"];
        let tracer = Tracer::start(&[&args, mechanism].concat())?.attached()?;
        target.tell("go")?;
        target.finish()?;
        let traced = tracer.finish()?;
        let report = traced.report()?;
        assert_eq!(report.lost(), 0);
        let site = report.0["sites"].as_array().into_iter().flatten();
        let site = site.into_iter().find(|site| site["site"] == "atb::OperationBase::Execute (operands)");
        assert_eq!(site.context("not attached")?["hits"], 3);
        let files = traced.dump(pid)?;
        let rows: Vec<_> = files.iter().flat_map(|file| &file.rows).collect();
        let blocks = blocks_of(&rows, "65536");
        let [a, b, c] = blocks[..] else { anyhow::bail!("{blocks:?}") };
        let used = uses(&rows)?;
        let wanted = BTreeMap::from([
            (("LinearOperation", "UNKNOWN", a, "65536"), 1),
            (("LinearOperation", "UNKNOWN", b, "65536"), 1),
            (("LinearOperation", "WRITE", c, "1024"), 1),
            (("GatherOperation", "UNKNOWN", a, "65536"), 64),
        ]);
        assert_eq!(used, wanted, "{mechanism:?}");
    }
    Ok(())
}

#[test]
fn a_command_is_traced_from_its_first_instruction_and_its_exit_code_passed_on() -> Result<()> {
    if !V8.is_ready() {
        return Ok(());
    }
    let workload = V8.command(&[]).get_program().to_string_lossy().into_owned();
    let traced = Tracer::start(&["--", &workload, "leak", "--steps", "6", "--marks"])?.finish()?;
    assert_eq!(traced.status.code(), Some(0));
    let report = traced.report()?;
    assert!(report.site("aclInit").0 >= 1, "and those of others before they were ruled out");
    // Runtime-internal blocks of the first aclrtSetDevice, 17 of them, and 6 steps of user blocks.
    let pid = report.0["targets"][0]["pid"].as_u64().context("no target")?;
    let rows: Vec<_> = traced.dump(pid as u32)?.into_iter().flat_map(|file| file.rows).collect();
    let allocations = rows
        .iter()
        .filter(|row| row["Event"] == "MALLOC" && ["HAL", "HOST_PINNED"].contains(&&*row["Event Type"]));
    assert_eq!(allocations.count(), 17 + 6 * 4 + 1 + 2 + 2);
    let traced = Tracer::start(&["--", "sh", "-c", "exit 7"])?.finish()?;
    assert_eq!(traced.status.code(), Some(7));
    // A shell between: children are followed.
    let step_ms = if is_guest() { 4000 } else { 500 };
    let line = format!("{workload} leak --steps 6 --marks --step-ms {step_ms}; exit 3");
    let traced = Tracer::start(&["--", "sh", "-c", &line])?.finish()?;
    assert_eq!(traced.status.code(), Some(3));
    let report = traced.report()?;
    assert!(report.site("halMemAlloc").0 > 0, "the child was found");
    // What it did before its sites were attached is said to be missing.
    assert!(report.0["notes"].to_string().contains("not probed yet"), "{:#}", report.0["notes"]);
    Ok(())
}

/// What a command leaves behind without a parent is traced like its other children, and named when the command ends.
#[test]
fn what_runs_on_after_the_command_is_told() -> Result<()> {
    if !V8.is_ready() {
        return Ok(());
    }
    let workload = V8.command(&[]).get_program().to_string_lossy().into_owned();
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("pid").to_string_lossy().into_owned();
    // A grandchild whose parent is gone at once.
    let daemon =
        format!("echo $$ > {file}; exec {workload} leak --steps {} --marks --step-ms 50", 600 * pace());
    let line = format!("(setsid sh -c '{daemon}' > {file}.out &); sleep {}; exit 3", 3 * pace());
    let traced = Tracer::start(&["--", "sh", "-c", &line])?.finish()?;
    let pid = fs::read_to_string(&file)?.trim().to_owned();
    ensure!(Command::new("kill").args(["-KILL", &pid]).status()?.success(), "it runs on");
    assert_eq!(traced.status.code(), Some(3), "{:?}", traced.messages);
    let report = traced.report()?;
    assert!(report.site("halMemAlloc").0 > 0, "the daemon was traced");
    let notes = report.0["notes"].to_string();
    let told = format!("process that it started runs on, not traced from here: {pid} (");
    assert!(notes.contains(&told) && notes.contains(&format!("memscope-trace -p {pid}")), "{notes}");

    let traced = Tracer::start(&["--", "sh", "-c", "sleep 0.2 & exit 0"])?.finish()?;
    assert!(!traced.report()?.0["notes"].to_string().contains("not traced from here"), "it ended in time");
    Ok(())
}

/// Chosen steps are judged by all, and keep their numbers in the dump.
#[test]
fn chosen_steps_are_those_of_the_whole_trace() -> Result<()> {
    if !V8.is_ready() {
        return Ok(());
    }
    let workload = V8.command(&[]).get_program().to_string_lossy().into_owned();
    let program = [&workload, "leak", "--steps", "16", "--marks"];
    let traced = Tracer::start(&[&["--steps", "4,6-7,12", "--"], &program[..]].concat())?.finish()?;
    let live = traced.report()?;
    let pid = live.0["targets"][0]["pid"].as_u64().context("no target")? as u32;
    let of = live.device(pid, 0)?;
    let sizes = |block: &Value| (block["step"].as_u64(), block["size"].as_u64());
    let leaks: Vec<_> = of["leaks"].as_array().into_iter().flatten().map(sizes).collect();
    let leaked = |step, kib: u64| (Some(step), Some(padded(kib << 10)));
    let (small, large, rest) = (1024, 3 * 1024, 96);
    assert_eq!(
        leaks,
        [
            leaked(4, small),
            leaked(7, small),
            leaked(7, large),
            leaked(7, rest),
            leaked(12, large),
            leaked(12, rest)
        ]
    );
    assert_eq!(of["late_total"]["blocks"], 4, "one of each step: {:#}", of["late_groups"]);
    assert_eq!(of["not_judged_total"]["blocks"], 0);
    assert_eq!(live.0["selection"]["steps"], serde_json::json!([[4, 4], [6, 7], [12, 12]]));

    let dump = traced.dir.path().to_string_lossy().into_owned();
    let offline = memscope_e2e::Report(Tracer::verb(&["leaks", &dump])?);
    let same = offline.device(pid, 0)?;
    for list in ["leaks", "late"] {
        assert_eq!(offline.blocks(same, list), live.blocks(of, list), "{list}");
    }
    assert_eq!(offline.0["steps"].as_array().map(Vec::len), Some(16));
    let one = memscope_e2e::Report(Tracer::verb(&["leaks", "--steps", "7", &dump])?);
    assert_eq!(one.blocks(one.device(pid, 0)?, "leaks").len(), 3);
    Ok(())
}

/// A breakpoint in the code of a process is what a probe is; when the tracer is gone, so are they.
#[test]
fn nothing_is_left_in_the_target_by_a_tracer_that_ended_or_was_killed() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    for killed in [false, true] {
        let dir = tempfile::tempdir()?;
        let (mut target, file) = held(V9, dir.path(), &["leak", "--steps", "5", "--marks"])?;
        let pid = target.pid().to_string();
        let listed = Tracer::start_probes(&["-p", &pid, "--json"])?;
        let rows: Value = serde_json::from_str(&listed)?;
        let rows = rows["sites"].as_array().context("no sites")?;
        let row = rows.iter().find(|row| row["site"] == "halMemAlloc").context("no halMemAlloc")?;
        let library = row["file"].as_str().context("no file")?;
        let offset = row["offset"].as_u64().context("no offset")?;
        let code = || code_at(target.pid(), library, offset);
        // As the file has it: a tracer of another test may look at the whole host.
        let mut untouched = [0; 4];
        fs::File::open(library)?.read_exact_at(&mut untouched, offset)?;
        let tracer = Tracer::start(&["-p", &pid])?.attached()?;
        ensure!(code()? != untouched, "nothing was attached");
        if killed {
            tracer.kill()?;
        } else {
            tracer.stop()?;
        }
        // Perf events of a process that was killed are closed when the kernel comes to it.
        let mut wait = 0..300;
        while code()? != untouched && wait.next().is_some() {
            thread::sleep(Duration::from_millis(100));
        }
        assert_eq!(code()?, untouched, "killed: {killed}");
        target.tell("go")?;
        let (status, ..) = target.finish()?;
        ensure!(status.success());
        ensure!(truth(&file)?.iter().any(|line| line["event"] == "end"));
    }
    Ok(())
}

/// The first instruction at an offset of a library, as it stands in the memory of a process that maps it.
fn code_at(pid: u32, library: &str, offset: u64) -> Result<[u8; 4]> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let hex = |word: &str| u64::from_str_radix(word, 16).unwrap_or(0);
    for line in maps.lines().filter(|line| line.ends_with(library)) {
        let words: Vec<_> = line.split_whitespace().collect();
        let (start, end) = words[0].split_once('-').map(|(s, e)| (hex(s), hex(e))).context("a range")?;
        let file_offset = hex(words[2]);
        if words[1].contains('x') && (file_offset..file_offset + (end - start)).contains(&offset) {
            let mut code = [0; 4];
            let memory = fs::File::open(format!("/proc/{pid}/mem"))?;
            memory.read_exact_at(&mut code, start + offset - file_offset)?;
            return Ok(code);
        }
    }
    anyhow::bail!("{pid} does not run {library} at {offset:#x}")
}

#[test]
fn a_target_that_is_killed_ends_with_a_full_report() -> Result<()> {
    if !V8.is_ready() {
        return Ok(());
    }
    for signal in [libc::SIGTERM, libc::SIGKILL] {
        let dir = tempfile::tempdir()?;
        let (mut target, _) = held(V8, dir.path(), &["leak", "--steps", "5000", "--marks"])?;
        let pid = target.pid();
        let tracer = Tracer::start(&["-p", &pid.to_string()])?.attached()?;
        target.tell("go")?;
        thread::sleep(Duration::from_millis(700 * pace()));
        target.signal(signal);
        target.finish()?;
        let traced = tracer.finish()?;
        let report = traced.report()?;
        let device = report.device(pid, 0)?;
        assert!(report.blocks(device, "leaks").len() > 5);
        let rows: usize = traced.dump(pid)?.iter().map(|file| file.rows.len()).sum();
        assert!(rows > 100, "{rows} rows");
    }
    Ok(())
}

/// Each error says what failed, why, and what to do, with exit code 2.
#[test]
fn errors_help() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let says = |args: &[&str], words: &[&str]| -> Result<()> {
        let traced = Tracer::start_with(args, false)?.finish()?;
        assert_eq!(traced.status.code(), Some(2), "{args:?}: {:?}", traced.messages);
        let text = traced.messages.join("\n");
        for word in words {
            assert!(text.contains(word), "{args:?} says {text:?}, without {word:?}");
        }
        Ok(())
    };
    says(&["-p", "4194000"], &["no process 4194000", "check"])?;
    let mut plain = Command::new("sleep").arg("60").spawn()?;
    let plain_pid = plain.id().to_string();
    let result = says(&["-p", &plain_pid], &["no Ascend library", "libascend_hal.so", "libtorch_npu.so"]);
    plain.kill()?;
    let proc_stat = format!("/proc/{plain_pid}/stat");
    while !fs::read_to_string(&proc_stat)?.contains(") Z") {
        thread::sleep(Duration::from_millis(5));
    }
    let zombie = says(&["-p", &plain_pid], &["has ended", "zombie"]);
    plain.wait()?;
    result.and(zombie)?;
    for (option, value) in [("-d", "-1"), ("-d", "1e300"), ("--ring-size", "1"), ("--analysis", "leaks,none")]
    {
        says(&["-a", option, value], &[value.trim_start_matches("leaks,")])?;
    }
    says(&["-a", "--no-dump", "--format", "db"], &["--no-dump", "--format"])?;
    says(&["--level", "warp", "-a"], &["warp", "op, kernel"])?;
    says(&["--steps", "0", "-a"], &["whole numbers from 1"])?;
    says(&["--steps", "7-3", "-a"], &["FIRST-LAST"])?;
    says(&["--step-mark", "(", "-a"], &["regex"])?;
    says(&["--no-such-option"], &["--no-such-option"])?;
    says(&[], &["whom to trace"])?;
    says(&["--", "/nowhere/program"], &["/nowhere/program", "No such file"])?;
    let file = tempfile::NamedTempFile::new()?;
    let inside = file.path().join("dumps");
    says(&["-a", "-o", &inside.to_string_lossy()], &["dumps"])?;
    Ok(())
}

#[test]
fn an_unprivileged_user_is_told_what_is_missing() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let binary =
        std::env::current_exe()?.ancestors().nth(2).context("no target directory")?.join("memscope-trace");
    let copy_dir = tempfile::tempdir()?;
    let copy = copy_dir.path().join("memscope-trace");
    fs::copy(&binary, &copy)?;
    fs::set_permissions(copy_dir.path(), fs::Permissions::from_mode(0o755))?;
    // Whoever stops being root has no capabilities left.
    let run = |args: &[&str]| Command::new(&copy).uid(65534).gid(65534).args(args).output();
    let output = run(&["-a", "--no-dump"])?;
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("CAP_BPF") && text.contains("CAP_PERFMON") && text.contains("root"), "{text}");
    assert!(text.contains("does not let memscope-trace use BPF") && !text.contains("BPF map"), "{text}");
    let output = run(&["check"])?;
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("BAD") && text.contains("CAP_SYS_PTRACE"), "{text}");
    // Of what can not be tried nothing is said.
    assert!(
        !text.contains("counts BPF maps") && !text.contains("5.8") && !text.contains("container"),
        "{text}"
    );
    Ok(())
}

#[test]
fn little_privilege_is_enough() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let user = least_privileged()?;
    let found = checked_by(&user)?;
    assert!(found.values().all(|(state, _)| state != "bad"), "{found:?}");
    leaks::are_exactly_the_truth(V9, |pid| Tracer::as_user(&user, &["-p", pid]))
}

/// One capability less: `check` and the trace name that one, and how to get it.
#[test]
fn little_privilege_that_is_too_little_is_named() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let all = least_privileged()?;
    let dir = tempfile::tempdir()?;
    let (mut target, _) = held(V9, dir.path(), &["leak", "--steps", "3", "--marks"])?;
    let pid = target.pid().to_string();
    let names = [
        (Capability::Bpf, "CAP_BPF"),
        (Capability::Perfmon, "CAP_PERFMON"),
        (Capability::SysPtrace, "CAP_SYS_PTRACE"),
        (Capability::DacReadSearch, "CAP_DAC_READ_SEARCH"),
    ];
    for (capability, name) in names {
        let mut user = all.clone();
        // It would stand for most others.
        user.capabilities.retain(|other| *other != capability && *other != Capability::SysAdmin);
        let (_, said) = checked_by(&user)?.remove("privileges").context("nothing about privileges")?;
        let told = |said: &str, other: &str| said.contains(&format!("lacks {other}"));
        assert!(told(&said, name) && said.contains("sudo setcap cap_bpf,"), "without {name}: {said}");
        assert!(names.iter().all(|(_, other)| *other == name || !told(&said, other)), "{said}");
        if all.capabilities.contains(&Capability::SysAdmin) && capability == Capability::DacReadSearch {
            continue;
        }
        let traced = Tracer::as_user(&user, &["-p", &pid, "-d", "1"])?.finish()?;
        let said = traced.messages.concat();
        assert!(said.contains(name) && said.contains("sudo setcap cap_bpf,"), "without {name}: {said}");
        let tells = capability == Capability::DacReadSearch;
        assert_eq!(traced.status.code(), Some(if tells { 0 } else { 2 }), "without {name}: {said}");
    }
    target.tell("go")?;
    target.finish()?;
    Ok(())
}

/// Once it is attached, root's tracer is root by name only, and libraries that come later are probed all the same.
#[test]
fn little_privilege_is_kept_after_attaching() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let (mut target, _) = held(V9, dir.path(), &["leak", "--steps", "3", "--marks"])?;
    let tracer = Tracer::start(&["-p", &target.pid().to_string()])?.attached()?;
    let held_by = |thread: &Path| -> Result<u64> {
        let status = fs::read_to_string(thread.join("status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("CapPrm:")).context("no CapPrm")?;
        Ok(u64::from_str_radix(line.trim(), 16)?)
    };
    let tasks = format!("/proc/{}/task", tracer.pid());
    let threads =
        || -> Result<Vec<u64>> { fs::read_dir(&tasks)?.map(|entry| held_by(&entry?.path())).collect() };
    let bit = |capability: Capability| 1u64 << capability as u64;
    let needs_admin = least_privileged()?.capabilities.contains(&Capability::SysAdmin);
    let kept = [
        Capability::Bpf,
        Capability::Perfmon,
        Capability::SysPtrace,
        Capability::DacReadSearch,
        Capability::CheckpointRestore,
    ];
    let mut kept = kept.into_iter().map(bit).sum::<u64>();
    if needs_admin {
        kept |= bit(Capability::SysAdmin);
    }
    // CAP_CHOWN, CAP_DAC_OVERRIDE and CAP_FOWNER, of the thread that writes the dump.
    let mut wanted = vec![1 | 1 << 1 | 1 << 3, kept];
    wanted.sort_unstable();
    let mut held = Vec::new();
    for _ in 0..500 {
        held = threads()?;
        held.sort_unstable();
        if held == wanted {
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(held, wanted, "{held:x?}");
    target.tell("go")?;
    target.finish()?;
    let report = tracer.finish()?.report()?;
    assert_eq!(report.lost(), 0);
    Ok(())
}

/// What the probes are said to have taken is what the program's own clock misses.
#[test]
fn the_share_of_probes_is_what_the_program_lost_to_them() -> Result<()> {
    if !V9.is_ready() {
        return Ok(());
    }
    let pair = |tracer: &dyn Fn(u32) -> Result<Option<Tracer>>| -> Result<(f64, Option<Tracer>)> {
        let dir = tempfile::tempdir()?;
        let (mut target, file) = held(V9, dir.path(), &["--wait-initialized", "pairs", "300000"])?;
        let tracer = tracer(target.pid())?;
        target.tell("go")?;
        target.finish()?;
        let lines = truth(&file)?;
        let told = lines.iter().find_map(|line| line["cpu_ns_per_pair"].as_f64());
        Ok((told.context("no CPU time")?, tracer))
    };
    let (untraced, _) = pair(&|_| Ok(None))?;
    let start = |pid: u32| Tracer::start(&["-p", &pid.to_string(), "--no-dump"])?.attached().map(Some);
    let (traced, tracer) = pair(&start)?;
    let report = tracer.context("a tracer")?.finish()?.report()?;
    let cost = &report.0["probe_cost"];
    let share = cost["of_target"].as_f64().with_context(|| format!("no share: {cost}"))?;
    let lost = 1.0 - untraced / traced;
    assert!(lost > 0.4 && (share - lost).abs() < 0.2, "{share} of {lost}: {cost:#}");
    Ok(())
}

#[test]
fn check_measures_what_a_hit_costs() -> Result<()> {
    if !memscope_e2e::is_root() {
        return Ok(());
    }
    let prices = Tracer::verb(&["check", "--bench"])?["probe_prices"].clone();
    let price = |of: &str| {
        let figure = |key: &str| prices[of][key].as_f64().unwrap_or(f64::NAN);
        let (low, median, high) = (figure("lowest_ns"), figure("median_ns"), figure("highest_ns"));
        assert!(low <= median && median <= high, "{prices:#}");
        median
    };
    let (entry, with_return) = (price("entry"), price("with_return"));
    // A breakpoint is two changes of mode at the least; an emulated machine takes its time.
    assert!(entry > 50.0 && with_return > 1.1 * entry && with_return < 1e6, "{prices:#}");
    Ok(())
}

/// `probes` attaches nothing and knows both what is there and what is not.
#[test]
fn probes_names_sites_in_a_process_and_in_a_file() -> Result<()> {
    if !V8.is_ready() {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let (target, _) = held(V8, dir.path(), &["sleep", "0"])?;
    let traced = Tracer::start_probes(&["-p", &target.pid().to_string(), "--json"])?;
    let rows: Value = serde_json::from_str(&traced)?;
    let rows = rows["sites"].as_array().context("no sites")?;
    let row = |site: &str| rows.iter().find(|row| row["site"] == site).with_context(|| format!("no {site}"));
    let hal = row("halMemAlloc")?;
    assert!(hal["file"].as_str().is_some_and(|f| f.ends_with("libascend_hal.so")));
    assert!(hal["offset"].as_u64() > Some(0) && hal["reason"].is_null());
    assert_eq!(row("aclrtMalloc")?["file"].as_str().map(|f| f.ends_with("libascendcl.so")), Some(true));
    assert!(row("rtMalloc (counted)")?["reason"].as_str().is_some_and(|why| why.contains("halMemAlloc")));
    let file = hal["file"].as_str().unwrap_or_default();
    let listed = Tracer::start_probes(&["--file", file])?;
    assert!(listed.contains("halMemFree") && listed.contains("nothing was attached"), "{listed}");
    Ok(())
}
