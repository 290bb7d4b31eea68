//! Damaged dumps of every format: what can not be read is a problem or an error, never a panic, an endless loop or a huge
//! allocation; and what can be read can be analysed and shown, whatever it says.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use crate::fuzzing::{Random, damage, rounds};
use arrow_array::RecordBatch;
use arrow_ipc::reader::StreamReader;
use arrow_ipc::writer::StreamWriter;
use memscope::analysis::Online;
use memscope::analysis::compare::{self, Level, Profiler, Sequences, Side};
use memscope::analysis::inefficient::{Config as InefficientConfig, Inefficient, Rules};
use memscope::analysis::offline_leaks::{Config as MarksConfig, OfflineLeaks};
use memscope::dump::read::{Options, open};
use memscope::dump::{Config, Format, StackStyle, Writer, rows_of};
use memscope::model::*;
use memscope::report::document::{Document, Trace};
use memscope::report::terminal::render;

const FIXTURES: [&str; 5] = [
    "ineff_in.csv",
    "leak6.csv",
    "leaks_in.csv",
    "memscope_dump_20250428113810.csv",
    "memscope_dump_20250428113811.csv",
];

fn fixture(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/dumps").join(name);
    fs::read(path).expect("it is there")
}

/// Opens a dump and does everything with it that a verb does.
fn exercise(path: &Path) {
    let Ok(mut rows) = open([path], Options { memory: 1 << 16 }) else { return };
    let rule = StepRule::default();
    let mut online = Online::new(rule.clone(), true)
        .with_steps_from(&rule, StepsFrom::MarksOrOps)
        .with_inefficient(InefficientConfig::new(Rules::MEMSCOPE))
        .with_decompose();
    let mut drgpum = Inefficient::new(InefficientConfig::new(Rules::DRGPUM));
    let mark = MarksConfig { mark: "test".into(), start_index: 0, pool: None };
    let mut leaks = OfflineLeaks::new(mark);
    let mut sides = [Level::Op, Level::Kernel].map(Sequences::new);
    let mut profiler = Profiler::new(rule, [Some(Side::Whole), Some(Side::Step(StepId(2)))]);
    for row in rows.by_ref() {
        leaks.observe(&row);
        profiler.observe(&row);
        drgpum.observe_row(&row, &mut |_| {});
        sides.iter_mut().for_each(|side| side.observe(&row));
        if let Some(event) = row.row.event() {
            online.feed(event, |_, _, _| {});
        }
    }
    let problems = rows.problems().first.iter().map(ToString::to_string);
    let fault = problems.into_iter().find(|problem| problem.contains("fault of memscope-trace"));
    assert_eq!(fault, None, "a reader panicked");
    online.finish(|_, _, _| {});
    drgpum.finish(&mut |_| {});
    let _ = (drgpum.report(), leaks.finish());
    let [ops, kernels] = sides;
    let _ = compare::table(ops, kernels);
    if let [base, other] = profiler.finish().as_slice() {
        let _ = compare::difference(base, other).verdict.to_string();
    }
    let document = Document::new(Trace::default(), &online);
    let text = render(&document, false, true);
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "the report is safe to print: {text:?}");
}

/// Events of every kind, one after another.
fn events() -> Vec<Event> {
    let (device, pool) = (Some(DeviceId(0)), Pool::Pta);
    let frame = Frame { function: "main".into(), file: "train.py".into(), line: Some(7) };
    let stack = Stack::new(vec![(frame, Origin::User)], Whose::Own, false).map(Arc::new);
    let totals = Some(Totals { allocated: 512, reserved: 2 << 20 });
    let driver =
        DriverAlloc { module: 33, page: PageType::Huge, create: true, api: Some(("aclrtMalloc", 5)) };
    let mut kinds = vec![EventKind::AclInit, EventKind::DeviceSet { device: DeviceId(0) }];
    for step in 1..=4u64 {
        kinds.push(EventKind::Mark { text: "test".into(), domain: Some("d".into()) });
        kinds.push(EventKind::RangeBegin { range: step, text: "step start".into(), domain: None });
        for n in 0..12u64 {
            let (ptr, size) = (DevicePtr(0x1000 * (1 + n + 100 * step)), 512 * (1 + n));
            let name: Name = format!("aclnnOp{n}").into();
            let alloc = Alloc { pool, device, ptr, size, totals, driver: None, stack: stack.clone() };
            let access =
                Access { pool: Some(pool), ptr, size, kind: AccessKind::Write, op: Some(name.clone()) };
            kinds.push(EventKind::Op { name: name.clone() });
            kinds.push(EventKind::Alloc(alloc));
            kinds.push(EventKind::Launch { name: Some(name), stream: n });
            kinds.push(EventKind::Access(access));
            if n > 0 {
                kinds.push(EventKind::Free(Free { pool, device, ptr, size: Some(size), totals }));
            }
        }
        kinds.push(EventKind::Map {
            ptr: DevicePtr(0x5000_0000 * step),
            size: 2 << 20,
            handle: DevicePtr(0x9000_0000 * step),
        });
        kinds.push(EventKind::Unmap { ptr: DevicePtr(0x5000_0000 * (step - 1)) });
        let (pool, ptr, size) = (Pool::Hal, DevicePtr(0x9000_0000 * step), 2 << 20);
        kinds.push(EventKind::Alloc(Alloc {
            pool,
            device,
            ptr,
            size,
            totals: None,
            driver: Some(driver.clone()),
            stack: None,
        }));
        kinds.push(EventKind::AllocFailed(AllocFailed {
            pool,
            function: "halMemAlloc",
            device,
            size: 1 << 40,
            code: -6,
            api: None,
            stack: stack.clone(),
        }));
        kinds.push(EventKind::RangeEnd { range: Some(step) });
    }
    kinds.extend([EventKind::DeviceReset { device: DeviceId(0) }, EventKind::AclFinalize, EventKind::Exit]);
    let event = |(time, kind)| Event { time: Nanos(time as u64), tgid: Tgid(7), tid: Tid(7), kind };
    kinds.into_iter().enumerate().map(event).collect()
}

/// Our own dump of these events.
fn ours(format: Format) -> Vec<u8> {
    let dir = tempfile::tempdir().expect("a directory");
    let mut writer = Writer::create(Config {
        output: dir.path().to_owned(),
        formats: vec![format],
        stacks: StackStyle::Lines,
        max_size: None,
        caller: None,
    })
    .expect("writable");
    let mut ledger = Ledger::default();
    for event in events() {
        let change = ledger.apply(&event);
        rows_of(&event, &change, &ledger, |row| writer.write(&row));
    }
    let reports = writer.finish();
    fs::read(&reports[0].path).expect("written")
}

/// A capture that is not compressed, so that damage reaches what is in it.
fn uncompressed(capture: &[u8]) -> Vec<u8> {
    let reader = StreamReader::try_new(capture, None).expect("a stream");
    let schema = reader.schema();
    let mut writer = StreamWriter::try_new(Vec::new(), &schema).expect("in memory");
    let batches: Vec<RecordBatch> = reader.collect::<Result<_, _>>().expect("whole batches");
    // In several batches.
    for batch in batches {
        for at in (0..batch.num_rows()).step_by(100) {
            writer.write(&batch.slice(at, (batch.num_rows() - at).min(100))).expect("in memory");
        }
    }
    writer.into_inner().expect("in memory")
}

/// Exercises damaged copies of one of these files.
fn fuzz(what: &str, count: u64, name: &str, words: &[&[u8]], pick: impl Fn(&mut Random) -> Vec<u8>) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join(name);
    rounds(what, count, |random| {
        let mut bytes = pick(random);
        damage(&mut bytes, words, random);
        fs::write(&path, &bytes).expect("room");
        exercise(&path);
    });
}

/// Some lines of a file, with its header.
fn excerpt(text: &[u8], random: &mut Random) -> Vec<u8> {
    let lines: Vec<&[u8]> = text.split_inclusive(|byte| *byte == b'\n').collect();
    let from = 1 + random.below(lines.len() - 1);
    let to = (from + 1 + random.below(200)).min(lines.len());
    [&lines[..1], &lines[from..to]].concat().concat()
}

#[test]
fn fuzz_csv() {
    let mut files: Vec<Vec<u8>> = FIXTURES.iter().map(|name| fixture(name)).collect();
    files.push(ours(Format::Csv));
    let words: [&[u8]; 28] = [
        b",",
        b"\"",
        b"\"\"",
        b"\n",
        b"\r\n",
        b"{",
        b"}",
        b":",
        b"-",
        b"0x",
        b"N/A",
        b"host",
        b"cpu",
        b"MALLOC",
        b"FREE",
        b"PTA",
        b"HAL",
        b"ACCESS",
        b"size:18446744073709551615",
        b"size:-5",
        b"18446744073709551616",
        b"shadow:true",
        b"allocation_id:1",
        b"step start",
        b"Range_end",
        b"\xff\xfe",
        b"via main:",
        b" <- ",
    ];
    fuzz("csv", 400, "memscope_dump_1.csv", &words, |random| {
        let file = random.below(files.len());
        excerpt(&files[file], random)
    });
}

#[test]
fn fuzz_db() {
    let files = [fixture("leak6.db"), ours(Format::Db)];
    let words: [&[u8]; 8] = [
        b"memscope_dump",
        b"{\"size\":\"",
        b"CREATE TABLE",
        b"CREATE VIEW",
        b"\"Timestamp(ns)\"",
        b"MALLOC",
        b"}",
        b"\0",
    ];
    fuzz("db", 150, "memscope_dump_1.db", &words, |random| random.pick(&files).clone());
}

#[test]
fn fuzz_capture() {
    let compressed = ours(Format::Capture);
    let files = [uncompressed(&compressed), compressed];
    let words: [&[u8]; 6] =
        [&[0xff; 8], &[0; 8], &[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0], b"MALLOC", b"FREE", b"memscope"];
    fuzz("capture", 1500, "memscope_dump_1.arrows", &words, |random| random.pick(&files).clone());
}
