//! The simulation against its own ground truth: the native workload's account of what it did must be what
//! the libraries logged.

use std::process::Command;

use serde_json::Value;

use super::{Layout, ensure};

/// Runs the native workload; what it told, and what the libraries logged of `functions`.
fn play(
    layout: Layout,
    arguments: &[&str],
    env: &[(&str, &str)],
    functions: &str,
) -> (Vec<Value>, Vec<Value>) {
    let sim = ensure(layout, None, None).unwrap_or_else(|error| panic!("{error}"));
    let log = tempfile::NamedTempFile::new().unwrap_or_else(|error| panic!("{error}"));
    let mut command = Command::new(sim.workload);
    command.args(arguments).envs(env.iter().copied());
    command.env("SIM_CANN_TRACE", log.path()).env("SIM_CANN_TRACE_ONLY", functions);
    let output = command.output().unwrap_or_else(|error| panic!("{error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    let lines = |text: &[u8]| -> Vec<Value> {
        let lines = text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
        lines.map(|line| serde_json::from_slice(line).unwrap_or_else(|error| panic!("{error}"))).collect()
    };
    (lines(&output.stdout), lines(&std::fs::read(log.path()).unwrap_or_default()))
}

fn count(log: &[Value], function: &str, keys: &[(&str, u64)]) -> usize {
    let fits = |line: &&Value| line["fn"] == function && keys.iter().all(|(key, value)| line[key] == *value);
    log.iter().filter(fits).count()
}

/// Allocations that the runtime makes for itself on one device.
const INTERNAL: usize = 17;

#[test]
fn every_call_of_many_threads_is_logged_once_a_layer() {
    for layout in [Layout::V8, Layout::V9] {
        let layers = "aclrtMalloc,rtMalloc,halMemAlloc,aclrtFree,rtFree,halMemFree";
        let (_, log) = play(layout, &["threads", "4", "2000"], &[], layers);
        for function in ["aclrtMalloc", "rtMalloc", "aclrtFree", "rtFree"] {
            assert_eq!(count(&log, function, &[("ret", 0)]), 8000, "{function} {layout:?}");
        }
        assert_eq!(count(&log, "halMemAlloc", &[("ret", 0), ("module", 33)]), 8000);
        assert_eq!(count(&log, "halMemAlloc", &[("ret", 0), ("module", 7)]), INTERNAL);
        assert_eq!(count(&log, "halMemFree", &[("ret", 0)]), 8000 + INTERNAL);
    }
}

#[test]
fn huge_pages_first_asks_twice_when_there_are_none() {
    let env = [("SIM_CANN_HUGE_FAIL", "1")];
    let (_, log) = play(Layout::V8, &["pairs", "10", "--size", "4194304"], &env, "halMemAlloc");
    assert_eq!(count(&log, "halMemAlloc", &[("module", 33), ("ret", 6)]), 10);
    assert_eq!(count(&log, "halMemAlloc", &[("module", 33), ("ret", 0)]), 10);
}

#[test]
fn a_full_device_says_so_in_the_code_of_each_layer() {
    let env = [("SIM_CANN_HBM_BYTES", "268435456")];
    let (truth, log) = play(Layout::V8, &["oom", "--size", "33554432"], &env, "aclrtMalloc,halMemAlloc");
    // 256 MiB less the runtime's own 20.4 MiB; a block, padded by ACL, takes 17 huge pages of 2 MiB.
    let oom = truth.iter().find(|line| line["event"] == "oom");
    assert_eq!(oom.map(|oom| oom["blocks"].clone()), Some(Value::from(6)));
    assert_eq!(count(&log, "aclrtMalloc", &[("ret", 207001)]), 1);
    // Once on huge pages, once on normal ones.
    assert_eq!(count(&log, "halMemAlloc", &[("ret", 6)]), 2);
}

#[test]
fn a_reset_device_takes_its_memory_back_and_an_exit_does_not() {
    let functions = "halMemAlloc,halMemFree,halDeviceClose";
    let (_, log) = play(Layout::V8, &["--end", "reset", "leak", "--step-ms", "0"], &[], functions);
    let closed = log.iter().find(|line| line["fn"] == "halDeviceClose");
    assert!(closed.is_some_and(|close| close["reclaimed"].as_u64() > Some(8 << 20)), "{closed:?}");
    let (_, log) = play(Layout::V8, &["--end", "exit", "sleep", "0"], &[], functions);
    assert_eq!((count(&log, "halMemAlloc", &[]), count(&log, "halMemFree", &[])), (INTERNAL, 0));
    assert_eq!(count(&log, "halDeviceClose", &[]), 0);
}

#[test]
fn visible_devices_are_renumbered_for_the_driver() {
    let env = [("ASCEND_RT_VISIBLE_DEVICES", "5,3")];
    let (_, log) = play(Layout::V8, &["two-devices"], &env, "halMemAlloc");
    let user = ("module", 33);
    assert_eq!(count(&log, "halMemAlloc", &[user, ("device", 5)]), 3);
    assert_eq!(count(&log, "halMemAlloc", &[user, ("device", 3)]), 2);
}

#[test]
fn a_retained_handle_is_released_twice() {
    let (_, log) = play(Layout::V9, &["vmm"], &[], "halMemCreate,halMemRelease,halMemMap,halMemUnmap");
    assert_eq!(count(&log, "halMemCreate", &[("ret", 0), ("module", 33), ("side", 1)]), 2);
    assert_eq!(count(&log, "halMemRelease", &[("ret", 0)]), 2);
    assert_eq!(count(&log, "halMemMap", &[("ret", 0)]), 2);
    assert_eq!(count(&log, "halMemUnmap", &[("ret", 0)]), 2);
}

#[test]
fn every_way_to_launch_ends_in_the_driver() {
    let (_, log) = play(Layout::V9, &["kernel", "300"], &[], "");
    for function in ["aclrtLaunchKernelWithHostArgs", "rtKernelLaunch", "rtKernelLaunchWithHandleV2"] {
        assert_eq!(count(&log, function, &[("ret", 0)]), 100, "{function}");
    }
    let copies = count(&log, "aclrtMemcpyAsync", &[]);
    assert_eq!(count(&log, "halSqTaskSend", &[("ret", 0)]), 300 + copies);
}
