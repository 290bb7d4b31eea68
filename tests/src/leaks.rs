//! The leaks that the native workload has told of, and what a report must say of them.

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::{Block, Ground, Tracer, held, pointer, truth};

/// Bytes that the driver is asked for when a program asks `aclrtMalloc` for `size`.
pub fn padded(size: u64) -> u64 {
    (size + 32).next_multiple_of(32)
}

pub fn events(lines: &[Value], event: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = lines
        .iter()
        .filter(|line| line["event"] == event)
        .map(|line| Block {
            step: line["step"].as_u64().unwrap_or(0),
            ptr: line["ptr"].as_u64().unwrap_or(0),
            size: padded(line["size"].as_u64().unwrap_or(0)),
        })
        .collect();
    blocks.sort();
    blocks
}

/// Leaks that can be judged: the first step warms up, and no later step says what becomes of the last one's.
pub fn judged(lines: &[Value], steps: u64) -> Vec<Block> {
    let mut blocks = events(lines, "leak");
    blocks.retain(|block| block.step > 1 && block.step < steps);
    blocks
}

/// Traces the leaking scene by a tracer of the process whose id it gets, and compares.
pub fn are_exactly_the_truth(ground: Ground, tracer: impl FnOnce(&str) -> Result<Tracer>) -> Result<()> {
    if !ground.is_ready() {
        return Ok(());
    }
    let dir = tempfile::tempdir()?;
    let (mut target, file) = held(ground, dir.path(), &["leak", "--steps", "13", "--marks"])?;
    let pid = target.pid();
    let tracer = tracer(&pid.to_string())?.attached()?;
    target.tell("go")?;
    let (status, ..) = target.finish()?;
    ensure!(status.success());
    let traced = tracer.finish()?;
    let report = traced.report()?;
    let device = report.device(pid, 0)?;
    let lines = truth(&file)?;

    let (mut once, mut recurring) = (Vec::new(), Vec::new());
    for (block, leak) in report.blocks(device, "leaks").into_iter().zip(sorted(device, "leaks")) {
        if leak["pattern"] == "once" { once.push(block) } else { recurring.push(block) }
    }
    assert_eq!(recurring, judged(&lines, 13));
    let not_judged = report.blocks(device, "not_judged");
    let mut last = events(&lines, "leak").into_iter().filter(|block| block.step == 13).peekable();
    assert!(last.peek().is_some() && last.all(|block| not_judged.contains(&block)), "{not_judged:?}");
    assert_eq!(once, events(&lines, "state"));
    let late = report.blocks(device, "late");
    assert!(late.iter().all(|block| block.size == padded(2 << 20)) && late.len() >= 8, "{late:?}");
    assert_eq!(report.lost(), 0);
    assert_eq!(report.0["steps"].as_array().map(Vec::len), Some(13));
    let hits: u64 =
        report.0["sites"].as_array().into_iter().flatten().filter_map(|s| s["hits"].as_u64()).sum();
    assert_eq!(report.received(), hits, "each hit is one record");
    Ok(())
}

/// The rows of a list in the order in which `Report::blocks` has them.
pub fn sorted(device: &Value, list: &str) -> Vec<Value> {
    let mut rows = device[list].as_array().cloned().unwrap_or_default();
    rows.sort_by_key(|row| (row["step"].as_u64(), row["ptr"].as_str().map(pointer), row["size"].as_u64()));
    rows
}
