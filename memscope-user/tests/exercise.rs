//! What readers are fuzzed with and what is done with what they read: in tests, and by the targets in `fuzz/`.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

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
use memscope::probes::{elf::Library, mstx_python, torch_npu};
use memscope::report::document::{Document, Trace};
use memscope::report::terminal::{View, render};

const DUMPS: [&str; 5] = [
    "ineff_in.csv",
    "leak6.csv",
    "leaks_in.csv",
    "memscope_dump_20250428113810.csv",
    "memscope_dump_20250428113811.csv",
];

const LIBRARIES: [&str; 4] =
    ["pool-x86_64.so", "pool-aarch64.so", "pool-old-x86_64.so", "pool-old-aarch64.so"];

fn fixture(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name);
    fs::read(path).expect("it is there")
}

/// Dumps of a format.
pub fn dumps(format: Format) -> Vec<Vec<u8>> {
    let ours = ours(format);
    match format {
        Format::Csv => DUMPS.iter().map(|name| fixture(&format!("dumps/{name}"))).chain([ours]).collect(),
        Format::Db => vec![fixture("dumps/leak6.db"), ours],
        Format::Capture => vec![uncompressed(&ours), ours],
    }
}

/// Libraries like torch_npu's.
pub fn libraries() -> Vec<Vec<u8>> {
    LIBRARIES.iter().map(|name| fixture(&format!("resolvers/{name}"))).collect()
}

/// Opens a dump and does everything with it that a verb does.
pub fn dump(path: &Path) {
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
    let text = render(&document, View { all_frames: true, ..View::default() });
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "the report is safe to print: {text:?}");
}

/// Events of every kind, one after another.
fn events() -> Vec<Event> {
    let (device, pool) = (Some(DeviceId(0)), Pool::Pta);
    let frame = Frame { function: "main".into(), file: "train.py".into(), line: Some(7) };
    let stack = Stack::new(vec![(frame, Origin::User)], Whose::Own, false).map(Arc::new);
    let totals = Some(Totals { allocated: 512, reserved: 2 << 20 });
    let driver = DriverAlloc {
        module: Some(33),
        page: Some(PageType::Huge),
        create: true,
        api: Some(("aclrtMalloc", 5)),
    };
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
            kinds.push(EventKind::Launch { name: Some(name), stream: Some(n) });
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

/// Our own dump of events of every kind.
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

/// Everything that can be asked of a file.
pub fn library(file: &File) {
    let Ok(library) = Library::open(file.try_clone().expect("a descriptor"), "damaged.so") else { return };
    let _ = (library.key(), library.soname(), library.needed());
    for name in ["expect_report", "pool_malloc", "absent"] {
        if let Ok(Some(offset)) = library.symbol(name) {
            let _ = library.first_instruction(offset);
        }
    }
    let _ = torch_npu::resolve_queue(&library);
    if let Ok(found) = torch_npu::resolve(&library) {
        // What is found is code, however wrong the file.
        let marks = [found.mark, found.range_start, found.range_end, found.range_push, found.range_pop];
        let marks = marks.into_iter().flatten().map(|m| m.offset);
        for offset in marks.chain(found.pool_report.map(|r| r.offset)) {
            library.first_instruction(offset).expect("code");
        }
    }
    let _ = mstx_python::resolve(&library);
}
