//! Leaks between marks, from dumps.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use memscope::analysis::offline_leaks::{Config, OfflineLeaks, Report};
use memscope::dump::Place;
use memscope::dump::read::{Options, open};
use memscope::model::{DeviceId, Pool, Tgid};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/dumps").join(name)
}

fn analyse(path: &Path, mark: &str, start_index: usize, pool: Option<Pool>) -> Report {
    let mut leaks = OfflineLeaks::new(Config { mark: mark.into(), start_index, pool });
    let mut rows = open([path], Options::default()).expect("a dump");
    rows.by_ref().for_each(|row| leaks.observe(&row));
    assert_eq!(rows.problems().total, 0);
    leaks.finish()
}

/// What msMemScope prints of the same result.
fn as_msmemscope_prints(report: &Report) -> String {
    let mut out = String::new();
    for device in &report.devices {
        let place = device.device;
        let _ = writeln!(out, "INFO: Starting to analyze data for device {place}...");
        let _ = writeln!(out, "\nLeak Analysis Results for the Custom Range:");
        let _ = writeln!(out, "====== ERROR: Detected memory leaks on device {place} ======");
        for leak in &device.leaks {
            let _ = writeln!(
                out,
                "Direct Hal memory leak of {} Mb(s) at 0x{:016x} in Index {}.",
                leak.size as f64 / 1048576.0,
                leak.ptr.0,
                leak.id
            );
        }
    }
    out
}

#[test]
fn driver_leaks_are_those_of_msmemscope() {
    for start_index in [0, 1] {
        let report = analyse(&fixture("leaks_in.csv"), "test", start_index, Some(Pool::Hal));
        let expected = fs::read_to_string(fixture(&format!("leaks_out_{start_index}.txt"))).expect("there");
        assert_eq!(as_msmemscope_prints(&report), expected);
    }
}

#[test]
fn all_pools_are_checked() {
    let report = analyse(&fixture("leaks_in.csv"), "test", 0, None);
    let [device] = report.devices.as_slice() else { panic!("one device, not {report:?}") };
    let leaks: Vec<(Pool, u64, u64)> =
        device.leaks.iter().map(|leak| (leak.pool, leak.size, leak.id)).collect();
    assert_eq!(leaks, [(Pool::Pta, 512, 7)], "it lies in the driver's block");
    assert_eq!(device.between.expect("enough marks").map(|mark| mark.id), [2, 9, 12]);
}

#[test]
fn too_few_marks_are_said() {
    for (mark, start_index, marks) in [("test", 2, 4), ("other", 0, 1), ("none", 0, 0)] {
        let report = analyse(&fixture("leaks_in.csv"), mark, start_index, None);
        let [device] = report.devices.as_slice() else { panic!("one device, not {report:?}") };
        assert_eq!((device.marks, device.between, device.leaks.len()), (marks, None, 0), "{mark}");
    }
}

/// Rows of a process; `device` is a cell.
fn dump(rows: &[(&str, u32, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    let mut text = String::from(
        "ID,Event,Event Type,Name,Timestamp(ns),Process Id,Thread Id,Device Id,Ptr,Attr,Call Stack(Python),Call Stack(C)\n",
    );
    for (id, (what, pid, device)) in rows.iter().enumerate() {
        let words: Vec<&str> = what.split(' ').collect();
        let (event, event_type, name, ptr) = match words.as_slice() {
            ["mark"] => ("MSTX", "Mark", "m", "N/A"),
            ["op", name] => ("OP_LAUNCH", "ATEN_START", *name, "N/A"),
            ["reset"] => ("SYSTEM", "DEVICE_RESET", "N/A", "N/A"),
            ["+", pool, ptr] => ("MALLOC", *pool, "N/A", *ptr),
            ["-", pool, ptr] => ("FREE", *pool, "N/A", *ptr),
            other => panic!("{other:?}"),
        };
        let attr = if ptr == "N/A" { "" } else { "\"{size:64}\"" };
        let _ = writeln!(text, "{id},{event},{event_type},{name},{id},{pid},{pid},{device},{ptr},{attr},,");
    }
    fs::write(dir.path().join("memscope_dump_1.csv"), text).expect("room");
    dir
}

fn leaks_of(dir: &tempfile::TempDir) -> Vec<(Tgid, Place, Vec<u64>)> {
    let report = analyse(dir.path(), "m", 0, None);
    report
        .devices
        .into_iter()
        .map(|device| (device.pid, device.device, device.leaks.into_iter().map(|leak| leak.ptr.0).collect()))
        .collect()
}

#[test]
fn devices_go_by_their_own_marks_or_those_of_their_process() {
    let npu = |device| Place::Npu(DeviceId(device));
    let dir = dump(&[
        ("+ PTA 1", 1, "0"),
        ("mark", 1, "0"),
        ("+ PTA 2", 1, "0"),
        ("+ PTA 3", 1, "1"),
        ("+ HOST_PINNED 4", 1, "cpu"),
        ("+ HAL 5", 1, "1"),
        ("mark", 1, "0"),
        ("+ PTA 6", 1, "1"),
        ("- HAL 5", 1, "N/A"),
        ("mark", 1, "0"),
        ("- PTA 3", 1, "1"),
        // Another process, whose devices have marks of their own.
        ("mark", 2, "0"),
        ("+ PTA 1", 2, "1"),
        ("mark", 2, "1"),
        ("+ PTA 2", 2, "0"),
        ("+ PTA 3", 2, "1"),
        ("mark", 2, "1"),
        ("mark", 2, "0"),
        ("+ PTA 4", 2, "0"),
        ("mark", 2, "1"),
        ("mark", 2, "0"),
    ]);
    assert_eq!(
        leaks_of(&dir),
        [
            (Tgid(1), npu(0), vec![2]),
            (Tgid(1), npu(1), vec![3]),
            (Tgid(1), Place::Cpu, vec![4]),
            (Tgid(2), npu(0), vec![2]),
            (Tgid(2), npu(1), vec![3]),
        ]
    );
}

#[test]
fn a_reset_gives_everything_back_and_leaks_name_their_operator() {
    let rows = [
        ("mark", 1, "0"),
        ("op aclnnAdd", 1, "0"),
        ("+ PTA 1", 1, "0"),
        ("+ PTA 1", 1, "1"),
        ("reset", 1, "1"),
        ("mark", 1, "0"),
        ("mark", 1, "0"),
    ];
    let report = analyse(dump(&rows).path(), "m", 0, None);
    let [zero, one] = report.devices.as_slice() else { panic!("two devices, not {report:?}") };
    assert_eq!(zero.leaks[0].op.as_deref(), Some("aclnnAdd"));
    assert!(one.leaks.is_empty() && one.between.is_some());
}

/// What a pool cuts into blocks is no leak beside its blocks, unless driver memory is asked for.
#[test]
fn segments_are_left_out() {
    let rows = [
        ("mark", 1, "0"),
        ("+ HAL 256", 1, "0"),
        ("+ PTA 260", 1, "0"),
        ("+ HAL 512", 1, "0"),
        ("+ PTA 1024", 1, "0"),
        ("- PTA 1024", 1, "0"),
        ("mark", 1, "0"),
        ("+ HAL 2048", 1, "0"),
        ("mark", 1, "0"),
    ];
    let dir = dump(&rows);
    let found = |pool| -> Vec<(Pool, u64)> {
        let report = analyse(dir.path(), "m", 0, pool);
        report.devices[0].leaks.iter().map(|leak| (leak.pool, leak.id)).collect()
    };
    assert_eq!(found(None), [(Pool::Pta, 2), (Pool::Hal, 3)]);
    assert_eq!(found(Some(Pool::Hal)), [(Pool::Hal, 1), (Pool::Hal, 3)]);
}
