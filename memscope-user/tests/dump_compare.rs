//! Comparing dumps.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use memscope::analysis::compare::*;
use memscope::dump::read::{Options, open};
use memscope::dump::write_comparison;
use memscope::model::{Count, DeviceId, Pool, StepId, StepRule};
use proptest::prelude::*;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/dumps").join(name)
}

fn sequences(path: &Path, level: Level) -> Sequences {
    let mut sequences = Sequences::new(level);
    open([path], Options::default()).expect("a dump").for_each(|row| sequences.observe(&row));
    sequences
}

fn compare(base: &Path, compare: &Path, level: Level) -> Table {
    table(sequences(base, level), sequences(compare, level))
}

fn lines(table: &Table) -> Vec<String> {
    let cell = |bytes: Option<i64>| bytes.map_or_else(|| "N/A".to_owned(), |bytes| bytes.to_string());
    table
        .rows
        .iter()
        .map(|row| {
            let (base, compare) = (cell(row.base), cell(row.compare));
            format!("{},{},{},{base},{compare},{}", row.level.event(), row.name, row.device, row.diff)
        })
        .collect()
}

#[test]
fn kernels_are_compared_as_msmemscope_does() {
    let table = compare(
        &fixture("memscope_dump_20250428113810.csv"),
        &fixture("memscope_dump_20250428113811.csv"),
        Level::Kernel,
    );
    let expected = fs::read_to_string(fixture("smoke_kernel.csv")).expect("there");
    assert_eq!(lines(&table), expected.lines().skip(2).collect::<Vec<_>>());
    assert_eq!((table.pool, table.alignment), (Some(Pool::Pta), Method::Exact));
}

#[test]
fn operators_end_before_the_pool_event_that_is_shown() {
    let dump = fixture("leak6.csv");
    let table = compare(&dump, &dump, Level::Op);
    assert!(table.rows.iter().all(|row| row.base == row.compare && row.diff == 0));
    // Two per step and the first: the pool event after the end of each is the next allocation or the free.
    let sizes: Vec<i64> = table.rows.iter().filter_map(|row| row.base).take(5).collect();
    assert_eq!(sizes, [16777728, 3146240, 16777728, 3146240, 17825280]);
    assert_eq!(compare(&dump, &dump, Level::Kernel).rows, []);
}

#[test]
fn the_table_is_written_as_msmemscope_does() {
    let table = compare(
        &fixture("memscope_dump_20250428113810.csv"),
        &fixture("memscope_dump_20250428113811.csv"),
        Level::Kernel,
    );
    let dir = tempfile::tempdir().expect("a directory");
    let first = write_comparison(dir.path(), None, &table).expect("writable");
    let second = write_comparison(dir.path(), None, &table).expect("writable");
    assert_ne!(first, second);
    assert_eq!(first.parent(), Some(dir.path().join("compare").as_path()));
    let expected = fs::read_to_string(fixture("smoke_kernel.csv")).expect("there");
    assert_eq!(fs::read_to_string(&first).expect("written"), expected);
    assert_eq!(fs::metadata(&first).expect("written").permissions().mode() & 0o7777, 0o600);

    // Names are no formulas here either.
    let dump = dir.path().join("memscope_dump_1.csv");
    let header = fs::read_to_string(fixture("leaks_in.csv")).expect("there");
    let header = header.lines().next().expect("a header");
    fs::write(&dump, format!("{header}\n1,OP_LAUNCH,ATEN_END,\"=1+1\",1,1,1,0,N/A,,,\n")).expect("room");
    let path = write_comparison(dir.path(), None, &compare(&dump, &dump, Level::Op)).expect("writable");
    let text = fs::read_to_string(path).expect("written");
    assert_eq!(text.lines().last(), Some("OP_LAUNCH,\"'=1+1\",0,0,0,0"));
}

/// Rows of process 1, by what they say: `step`, `end`, `op NAME`, `+POOL PTR SIZE [LINE]`, `-POOL PTR`, `finished`. All on
/// device 0.
fn dump(rows: &[String]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    let header = fs::read_to_string(fixture("leaks_in.csv")).expect("there");
    let mut text = format!("{}\n", header.lines().next().expect("a header"));
    for (id, row) in rows.iter().enumerate() {
        let words: Vec<&str> = row.split(' ').collect();
        let line =
            words.get(3).map_or_else(String::new, |line| format!("\"/src/job/train.py({line}): main\""));
        let (what, name, ptr, attr) = match words.as_slice() {
            ["finished"] => ("SYSTEM,ACL_FINI".to_owned(), "N/A", "N/A", String::new()),
            ["step"] => ("MSTX,Range_start".to_owned(), "\"step start\"", "N/A", "{range:1}".to_owned()),
            ["end"] => {
                ("MSTX,Range_end".to_owned(), "\"Range end from id 1\"", "N/A", "{range:1}".to_owned())
            }
            ["op", name] => ("OP_LAUNCH,ATEN_START".to_owned(), *name, "N/A", String::new()),
            [pool, ptr, size] | [pool, ptr, size, _] => {
                (format!("MALLOC,{}", &pool[1..]), "N/A", *ptr, format!("{{size:{size},owner:PTA@label}}"))
            }
            [pool, ptr] => (format!("FREE,{}", &pool[1..]), "N/A", *ptr, String::new()),
            other => panic!("{other:?}"),
        };
        text += &format!("{id},{what},{name},{id},1,1,0,{ptr},\"{attr}\",{line},\n");
    }
    fs::write(dir.path().join("memscope_dump_1.csv"), text).expect("room");
    dir
}

fn rows(text: &str) -> Vec<String> {
    text.split(',').map(|row| row.trim().to_owned()).collect()
}

fn profiles(path: &Path, sides: [Option<Side>; 2]) -> Vec<Profile> {
    let mut profiler = Profiler::new(StepRule::StepStart, sides);
    open([path], Options::default()).expect("a dump").for_each(|row| profiler.observe(&row));
    profiler.finish()
}

fn between_steps(path: &Path, base: u32, compare: u32) -> Difference {
    let sides = [base, compare].map(|step| Some(Side::Step(StepId(step))));
    let profiles = profiles(path, sides);
    difference(&profiles[0], &profiles[1])
}

const STEPS: &str = "op load, +PTA 1 1000,
    step, op add, +PTA 2 100, op mul, +PTA 3 50, -PTA 2, -PTA 3, end,
    step, op add, +PTA 2 100, op rand, +PTA 4 4194304, op mul, +PTA 3 50, -PTA 2, end,
    step, op mul, -PTA 3, op add, +PTA 5 100, op free, -PTA 5, -PTA 1, end";

#[test]
fn steps_differ_by_their_blocks() {
    let dir = dump(&rows(STEPS));
    let difference = between_steps(dir.path(), 1, 2);
    assert_eq!(
        difference.verdict.to_string(),
        "+4.00 MiB in step 2 against step 1: 1 block from rand, never freed, and 1 more; peak +4.00 MiB"
    );
    let [memory] = difference.memories.as_slice() else { panic!("one memory, not {difference:?}") };
    assert_eq!(memory.memory, Memory { layer: Layer::Pools, device: Some(DeviceId(0)) });
    let count = |blocks, bytes| Count { blocks, bytes };
    assert_eq!(
        (memory.base.clone(), memory.compare.clone()),
        (
            Use { calls: 0, allocated: count(2, 150), freed: count(2, 150), at_peak: 1150 },
            Use { calls: 0, allocated: count(3, 4194454), freed: count(1, 100), at_peak: 4195454 },
        )
    );
    let ops: Vec<(Option<&str>, i64, i64)> =
        memory.ops.iter().map(|op| (op.name.as_deref(), op.net_diff, op.peak_diff)).collect();
    assert_eq!(
        ops,
        [
            (Some("rand"), 4194304, 4194304),
            // It freed 150 in the first step, and 100 in the second.
            (Some("mul"), 50, 0),
            (Some("add"), 0, 0),
            (Some("load"), 0, 0),
        ]
    );
    let add = memory.ops.iter().find(|op| op.name.as_deref() == Some("add")).expect("there");
    assert_eq!(add.base, Use { calls: 1, allocated: count(1, 100), freed: count(0, 0), at_peak: 100 });
    assert_eq!(memory.owners.len(), 1);
    assert_eq!(memory.owners[0].name.as_deref(), Some("PTA@label"));
    let blocks: Vec<_> = memory
        .blocks
        .iter()
        .map(|d| {
            (
                d.like.op.as_deref(),
                d.like.size,
                d.base.allocated.blocks,
                d.compare.allocated.blocks,
                d.kept_diff,
            )
        })
        .collect();
    assert_eq!(
        blocks,
        [(Some("rand"), Some(4194304), 0, 1, 4194304), (Some("mul"), Some(50), 1, 1, 50)],
        "`add` has the same block in both"
    );
    assert_eq!(memory.blocks[0].compare.never_freed, count(1, 4194304));
    assert_eq!(memory.blocks[1].compare.never_freed, count(0, 0), "freed in the third step");
}

#[test]
fn verdicts_say_what_it_is() {
    let dir = dump(&rows(STEPS));
    let verdict = |base, compare| between_steps(dir.path(), base, compare).verdict.to_string();
    assert_eq!(
        verdict(2, 1),
        "-4.00 MiB in step 1 against step 2: 1 block less from rand, never freed, and 1 more; peak -4.00 MiB"
    );
    // The third step frees what it did not allocate.
    assert_eq!(
        verdict(1, 3),
        "-1.03 KiB in step 3 against step 1: 1.03 KiB more freed of what was there before; peak +4.00 MiB"
    );
    assert_eq!(verdict(1, 1), "±0 in step 1 against step 1");
    let whole = profiles(dir.path(), [Some(Side::Whole), None]);
    let [whole] = whole.as_slice() else { panic!("one profile") };
    assert_eq!(difference(whole, whole).verdict.to_string(), "±0 in the second dump against the first");
    // Without pools it is about the driver.
    let before = dump(&rows("+HAL 1 10"));
    let after = dump(&rows("+HAL 1 10, op x, +HAL 2 2048, +HAL 3 2048, -HAL 1"));
    let profile = |dir: &tempfile::TempDir| profiles(dir.path(), [Some(Side::Whole), None]).remove(0);
    assert_eq!(
        difference(&profile(&before), &profile(&after)).verdict.to_string(),
        "+3.99 KiB in the second dump against the first: 2 blocks from x, never freed; peak +4.00 KiB"
    );
}

fn whole(text: &str) -> Profile {
    profiles(dump(&rows(text)).path(), [Some(Side::Whole), None]).remove(0)
}

/// What a program frees when it has finished balances the books of each run, and hides what it kept until then.
#[test]
fn a_run_that_has_ended_is_compared_as_of_its_end() {
    let base = "op add, +PTA 1 1000 10, +PTA 2 500 11, -PTA 2, op free, finished, -PTA 1";
    let kept = "op add, +PTA 1 1000 10, +PTA 2 500 11, op mul, +PTA 3 4096 22, op add, +PTA 4 8192 22, -PTA 2, op free,
        finished, -PTA 1, -PTA 3, -PTA 4";
    let difference = difference(&whole(base), &whole(kept));
    assert_eq!(
        difference.verdict.to_string(),
        "+12.0 KiB in the second dump against the first: 2 blocks at job/train.py:22 in main, never freed; peak +12.0 KiB"
    );
    let [memory] = difference.memories.as_slice() else { panic!("one memory, not {difference:?}") };
    let lines: Vec<_> = memory
        .lines
        .iter()
        .map(|of| (of.place.as_ref().and_then(|place| place.line), of.kept_diff, of.base.kept.blocks))
        .collect();
    assert_eq!(lines, [(Some(22), 12288, 0)], "lines of which both have the same are left out");
    let places: Vec<_> =
        memory.blocks.iter().map(|of| of.place.as_ref().and_then(|place| place.line)).collect();
    assert_eq!(places, [Some(22), Some(22)]);
    let text = memscope::report::compare::render(&difference);
    assert!(
        text.contains(
            "\n  kept, by line of the program:\n    +12.0 KiB  PTA 2 blocks in the second dump only, at \
             job/train.py:22 in main, never freed\n"
        ),
        "{text}"
    );
    // The other way round.
    let text = memscope::report::compare::render(&memscope::analysis::compare::difference(
        &whole(kept),
        &whole(base),
    ));
    assert!(
        text.starts_with("-12.0 KiB in the second dump against the first: 2 blocks less at job/train.py:22"),
        "{text}"
    );
    assert!(text.contains("    -12.0 KiB  PTA 2 blocks in the first dump only"), "{text}");
}

/// Lines of an edited program are the same lines.
#[test]
fn lines_that_have_moved_are_the_same() {
    let base = "op add, +PTA 1 1000 10, +PTA 2 500 11, +PTA 3 512 11";
    let edited = "op add, +PTA 1 1000 12, +PTA 2 500 13, +PTA 3 512 13, +PTA 4 512 13";
    let difference = difference(&whole(base), &whole(edited));
    assert_eq!(
        difference.verdict.to_string(),
        "+512 B in the second dump against the first: 1 block from add at job/train.py:13 in main, never freed; peak +512 B"
    );
    assert_eq!(difference.memories[0].lines.len(), 1);
    // A line more is a line more.
    let more = "op add, +PTA 1 1000 10, +PTA 2 500 11, +PTA 3 512 11, +PTA 4 64 99";
    let verdict = memscope::analysis::compare::difference(&whole(base), &whole(more)).verdict.to_string();
    assert!(verdict.contains(": 1 block from add at job/train.py:99 in main"), "{verdict}");
}

/// Of two traces of different length, the longer one's operators have allocated and freed more.
#[test]
fn what_operators_have_more_of_is_put_into_proportion() {
    let round = "op add, +PTA 1 4096, op relu, -PTA 1";
    let long = [round; 3].join(", ");
    let text = memscope::report::compare::render(&difference(&whole(round), &whole(&long)));
    assert!(
        text.contains(
            "by the operator around it (what some allocate others free: in all ±0):\n    +8.00 KiB  add"
        ),
        "{text}"
    );
    let text = memscope::report::compare::render(&difference(&whole(round), &whole("op add, +PTA 1 9216")));
    assert!(text.contains("by the operator around it:\n"), "{text}");
}

#[test]
fn the_leak_of_a_real_dump_is_named() {
    let difference = between_steps(&fixture("leak6.csv"), 3, 5);
    assert_eq!(difference.verdict.to_string(), "±0 in step 5 against step 3; peak +6.00 MiB");
    // In the second step a segment was reused in another way than in the first.
    let [_, memory] =
        between_steps(&fixture("leak6.csv"), 1, 2).memories.try_into().expect("driver and pools");
    assert_eq!(memory.memory.layer, Layer::Driver);
    assert_eq!((memory.base.allocated.bytes, memory.compare.allocated.bytes), (20971520, 0));
}

proptest! {
    /// What the profiler keeps up to date step by step is what a look at all live blocks at every moment gives.
    #[test]
    fn shares_of_the_peak_are_those_at_the_peak(moves in prop::collection::vec((0..4u8, 0..6u64, 1..100u64), 1..60)) {
        let mut rows = Vec::new();
        let mut live: BTreeMap<u64, (String, u64)> = BTreeMap::new();
        let mut op = String::new();
        let mut peak = (0, BTreeMap::new());
        let mut steps = 0;
        for (what, ptr, size) in moves {
            match what {
                0 => {
                    op = format!("op{ptr}");
                    rows.push(format!("op {op}"));
                }
                1 if steps < 2 => {
                    rows.push("step".to_owned());
                    steps += 1;
                }
                _ if live.remove(&ptr).is_some() => rows.push(format!("-PTA {ptr}")),
                _ => {
                    rows.push(format!("+PTA {ptr} {size}"));
                    live.insert(ptr, (op.clone(), size));
                }
            }
            let total: u64 = live.values().map(|(_, size)| size).sum();
            if steps == 1 && total > peak.0 {
                let mut shares: BTreeMap<String, u64> = BTreeMap::new();
                live.values().for_each(|(op, size)| *shares.entry(op.clone()).or_default() += size);
                peak = (total, shares);
            }
        }
        let dir = dump(&rows);
        let found = between_steps(dir.path(), 1, 1);
        let Some(memory) = found.memories.first() else {
            prop_assert_eq!(peak.0, 0);
            return Ok(());
        };
        prop_assert_eq!(memory.base.at_peak, peak.0);
        let shares: BTreeMap<String, u64> = memory
            .ops
            .iter()
            .filter(|op| op.base.at_peak > 0)
            .map(|op| (op.name.as_deref().unwrap_or("").to_owned(), op.base.at_peak))
            .collect();
        prop_assert_eq!(shares, peak.1);
        prop_assert_eq!(memory.owners.iter().map(|owner| owner.base.at_peak).sum::<u64>(), peak.0);
    }
}
