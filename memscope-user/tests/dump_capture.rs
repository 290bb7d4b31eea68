//! Captures: compressed, bounded, readable by others.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{TimestampNanosecondType, UInt64Type};
use arrow_ipc::reader::StreamReader;
use memscope::analysis::Online;
use memscope::dump::read::{NumberedRow, Options, ProblemKind, Problems, ReadError, open};
use memscope::dump::{Config, Fact, FileReport, Format, Row, StackStyle, Writer, rows_of};
use memscope::model::{
    Alloc, DeviceId, DevicePtr, Event, EventKind, Frame, Free, Ledger, Nanos, Origin, Pool, Stack, StepId,
    StepRule, Tgid, Tid, Whose,
};

fn config(output: &Path, max_size: Option<u64>) -> Config {
    Config {
        output: output.to_owned(),
        formats: vec![Format::Capture],
        stacks: StackStyle::Lines,
        max_size,
        caller: None,
    }
}

fn read(path: impl AsRef<Path>) -> (Vec<NumberedRow>, Problems) {
    let mut rows = open([path], Options::default()).expect("a dump");
    let read = rows.by_ref().collect();
    (read, rows.problems().clone())
}

/// A loop that keeps one block of each step.
struct Loop {
    ledger: Ledger,
    writer: Writer,
    time: u64,
    next: u64,
    /// What was written.
    rows: Vec<Row>,
}

impl Loop {
    fn new(config: Config) -> Self {
        let writer = Writer::create(config).expect("writable");
        Loop { ledger: Ledger::new(StepRule::default()), writer, time: 0, next: 0, rows: Vec::new() }
    }

    fn put(&mut self, kind: EventKind) {
        self.time += 1;
        let event = Event { time: Nanos(self.time), tgid: Tgid(7), tid: Tid(7), kind };
        let change = self.ledger.apply(&event);
        rows_of(&event, &change, &self.ledger, |row| {
            self.writer.write(&row);
            self.rows.push(row);
        });
    }

    fn alloc(&mut self, size: u64) -> DevicePtr {
        // Hard to compress.
        self.next += 1;
        let ptr = DevicePtr(self.next.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 8);
        let frame = Frame { function: "main".into(), file: "train.py".into(), line: Some(7) };
        self.put(EventKind::Alloc(Alloc {
            pool: Pool::Pta,
            device: Some(DeviceId(0)),
            ptr,
            size,
            totals: None,
            driver: None,
            stack: Stack::new(vec![(frame, Origin::User)], Whose::Own, false).map(Arc::new),
        }));
        ptr
    }

    fn step(&mut self, blocks: u64) {
        let range = self.time;
        self.put(EventKind::RangeBegin { range, text: "step start".into(), domain: None });
        for n in 0..blocks {
            self.put(EventKind::Op { name: format!("op{n}").into() });
            let ptr = self.alloc(512 + n);
            // The last is kept.
            if n + 1 < blocks {
                let (pool, device) = (Pool::Pta, Some(DeviceId(0)));
                self.put(EventKind::Free(Free { pool, device, ptr, size: Some(512 + n), totals: None }));
            }
        }
        self.put(EventKind::RangeEnd { range: Some(range) });
    }

    fn finish(self) -> (FileReport, Vec<Row>) {
        let mut reports = self.writer.finish();
        assert_eq!(reports.len(), 1, "{reports:?}");
        assert!(reports[0].failure.is_none(), "{reports:?}");
        (reports.remove(0), self.rows)
    }
}

fn segments(report: &FileReport) -> Vec<PathBuf> {
    let dir = report.path.parent().expect("in a directory");
    let mut files: Vec<_> =
        fs::read_dir(dir).expect("made").map(|file| file.expect("readable").path()).collect();
    files.sort_by_key(|path| fs::metadata(path).expect("there").modified().expect("known"));
    files
}

#[test]
fn others_read_it_as_arrow() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut made = Loop::new(config(dir.path(), None));
    made.step(3);
    let (report, _) = made.finish();
    assert!(report.path.extension().is_some_and(|extension| extension == "arrows"), "{report:?}");
    assert_eq!(report.bytes, fs::metadata(&report.path).expect("there").len());
    let batches = StreamReader::try_new(File::open(&report.path).expect("there"), None).expect("a stream");
    let batches: Vec<_> = batches.collect::<Result<_, _>>().expect("whole batches");
    let [batch] = batches.as_slice() else { panic!("one batch, not {}", batches.len()) };
    assert_eq!(batch.num_rows() as u64, report.rows);
    let text =
        |name: &str, row| batch.column_by_name(name).expect("there").as_string::<i32>().value(row).to_owned();
    let is_null = |name: &str, row| batch.column_by_name(name).expect("there").is_null(row);
    // The beginning of the step, two rows of the first operator, and its allocation.
    assert_eq!(text("name", 0), "step start");
    assert_eq!((text("event", 3), text("event_type", 3)), ("MALLOC".into(), "PTA".into()));
    assert_eq!(text("python_stack", 3), "train.py(7): main");
    assert_eq!(text("owner", 3), "PTA");
    assert!(is_null("name", 3) && is_null("size", 0) && is_null("used", 3));
    let size = batch.column_by_name("size").expect("there").as_primitive::<UInt64Type>();
    assert_eq!(size.value(3), 512);
    let time = batch.column_by_name("time").expect("there").as_primitive::<TimestampNanosecondType>();
    assert_eq!((time.value(3), time.timezone()), (3, Some("UTC")));
}

#[test]
fn the_oldest_events_go_and_no_block_that_is_alive() {
    const BOUND: u64 = 1 << 18;
    let dir = tempfile::tempdir().expect("a directory");
    let mut made = Loop::new(config(dir.path(), Some(BOUND)));
    // Before any step.
    let weight = made.alloc(4096);
    let steps = 40;
    (0..steps).for_each(|_| made.step(1200));
    let on_disk: u64 =
        segments_of(dir.path()).iter().map(|path| fs::metadata(path).expect("there").len()).sum();
    assert!(on_disk <= BOUND, "{on_disk} bytes while it is written");
    let (report, rows) = made.finish();
    let files = segments(&report);
    assert!(files.len() >= 2, "{files:?}");
    let on_disk: u64 = files.iter().map(|path| fs::metadata(path).expect("there").len()).sum();
    assert_eq!(on_disk, report.bytes);
    assert!(on_disk <= BOUND, "{on_disk}");
    assert_eq!(report.path, *files.last().expect("some"));
    let lines =
        rows.iter().map(|row| if matches!(row.fact, Fact::Event(EventKind::Op { .. })) { 2 } else { 1 });
    assert_eq!(report.rows + report.removed_rows, lines.sum::<u64>());
    assert!(report.removed_rows > 0 && report.is_complete());

    let (read, problems) = read(dir.path());
    assert_eq!(problems.total, 1, "{problems:?}");
    let ProblemKind::Removed { rows: removed } = problems.first[0].kind else { panic!("{problems:?}") };
    assert_eq!(removed, report.removed_rows);
    // What is left is the end of what there was, each row once.
    let carried = read.len() as u64 - report.rows;
    let left: Vec<&Row> = read.iter().skip(carried as usize).map(|row| &row.row).collect();
    let last = rows.last().expect("some");
    assert_eq!(left.last().expect("some").time, last.time);
    let ids: Vec<u64> = read.iter().map(|row| row.id).collect();
    assert!(ids.windows(2).all(|pair| pair[0] < pair[1]), "in order, none twice");

    // The blocks are those of the trace, with their steps, operators and lines.
    let mut online = Online::new(StepRule::default(), true);
    read.iter().filter_map(|row| row.row.event()).for_each(|event| online.feed(event, |_, _, _| {}));
    online.finish(|_, _, _| {});
    let process = online.ledger.process(Tgid(7)).expect("it is there");
    let mut blocks: Vec<_> = process.blocks().collect();
    blocks.sort_by_key(|block| block.time);
    assert_eq!(blocks.len(), 1 + steps);
    assert_eq!((blocks[0].ptr, blocks[0].step, blocks[0].op.as_deref()), (weight, StepId(0), None));
    for (block, step) in blocks.iter().skip(1).zip(1..) {
        assert_eq!((block.step, block.op.as_deref()), (StepId(step), Some("op1199")));
        assert_eq!(
            block.stack.as_ref().and_then(|stack| stack.place()).and_then(|frame| frame.line),
            Some(7)
        );
    }
    // One segment by itself knows them, too.
    let (of_last, problems) = self::read(&report.path);
    assert_eq!(problems.to_string(), "the oldest rows of 1 capture had to go for --max-size");
    let mut ledger = Ledger::new(StepRule::default());
    of_last.iter().filter_map(|row| row.row.event()).for_each(|event| drop(ledger.apply(&event)));
    assert_eq!(ledger.process(Tgid(7)).expect("there").blocks().count(), 1 + steps);
}

fn segments_of(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).expect("readable") {
            let path = entry.expect("readable").path();
            if path.is_dir() { dirs.push(path) } else { files.push(path) }
        }
    }
    files
}

#[test]
fn segments_are_one_dump_however_they_are_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut made = Loop::new(config(dir.path(), Some(1 << 18)));
    (0..40).for_each(|_| made.step(1200));
    let (report, _) = made.finish();
    let mut files = segments(&report);
    let (whole, _) = read(dir.path());
    files.reverse();
    let mut rows = open(&files, Options::default()).expect("a dump");
    assert_eq!(rows.by_ref().collect::<Vec<_>>(), whole);
    assert_eq!(rows.files().len(), 1);
}

#[test]
fn formats_beside_one_another_are_the_same_dump_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let formats = vec![Format::Csv, Format::Capture, Format::Db];
    let mut writer = Writer::create(Config { formats, ..config(dir.path(), None) }).expect("writable");
    for time in 1..=3 {
        let mut row = Row::from(Event {
            time: Nanos(time),
            tgid: Tgid(7),
            tid: Tid(7),
            kind: EventKind::Mark { text: "m".into(), domain: None },
        });
        row.device = Some(DeviceId(0));
        writer.write(&row);
        let alloc = EventKind::Alloc(Alloc {
            pool: Pool::Pta,
            device: Some(DeviceId(0)),
            ptr: DevicePtr(time),
            size: 1,
            totals: None,
            driver: None,
            stack: None,
        });
        writer.write(&Row::from(Event { time: Nanos(time), tgid: Tgid(7), tid: Tid(7), kind: alloc }));
    }
    let reports = writer.finish();
    assert_eq!(reports.len(), 3);
    assert_eq!(read(dir.path()).0.len(), 6);
    for report in reports {
        assert_eq!(read(&report.path).0.len(), 6, "{report:?}");
    }
}

#[test]
fn a_file_that_is_cut_off_is_read_to_its_last_whole_batch() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut made = Loop::new(config(dir.path(), None));
    (0..5).for_each(|_| made.step(1200));
    let (report, _) = made.finish();
    let whole = fs::read(&report.path).expect("there");
    let (all, _) = read(&report.path);
    let mut counts = Vec::new();
    for length in (2000..whole.len()).step_by(whole.len() / 50) {
        fs::write(&report.path, &whole[..length]).expect("room");
        let (rows, problems) = read(&report.path);
        assert_eq!(rows, all[..rows.len()]);
        assert!(problems.total <= 1, "{problems:?}");
        counts.push(rows.len());
    }
    assert!(counts.is_sorted() && counts.first() < counts.last(), "{counts:?}");
    // Without the end that says so, it is whole all the same.
    fs::write(&report.path, &whole[..whole.len() - 8]).expect("room");
    assert_eq!(read(&report.path), (all, Problems::default()));
}

#[test]
fn other_streams_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("other.arrows");
    let field = arrow_schema::Field::new("id", arrow_schema::DataType::UInt64, false);
    let schema = arrow_schema::Schema::new(vec![field]);
    let mut writer = arrow_ipc::writer::StreamWriter::try_new(Vec::new(), &schema).expect("a stream");
    writer.finish().expect("in memory");
    fs::write(&path, writer.get_ref()).expect("room");
    let error = open([&path], Options::default()).err().expect("no capture");
    assert!(matches!(&error, ReadError::NotACapture { why, .. } if why.contains("columns")), "{error}");
    fs::write(&path, [0xff; 200]).expect("room");
    assert!(matches!(open([&path], Options::default()), Err(ReadError::NotACapture { .. })));
}
