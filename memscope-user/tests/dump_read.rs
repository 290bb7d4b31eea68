//! What is read from dumps of all kinds.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memscope::analysis::{Online, fluctuation::Swing};
use memscope::dump::read::{NumberedRow, Options, Problems, ReadError, Rows, open};
use memscope::dump::{Config, Fact, Format, Framework, Place, Row, StackStyle, Writer, live_rows, rows_of};
use memscope::model::*;
use proptest::prelude::*;

const HEADER: &str = "ID,Event,Event Type,Name,Timestamp(ns),Process Id,Thread Id,Device Id,Ptr,Attr,Call Stack(Python),Call Stack(C)";

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/dumps").join(name)
}

fn read_all(mut rows: Rows) -> (Vec<NumberedRow>, Problems) {
    let all: Vec<NumberedRow> = rows.by_ref().collect();
    let problems = rows.problems().clone();
    (all, problems)
}

fn read(path: &Path) -> (Vec<NumberedRow>, Problems) {
    read_all(open([path], Options::default()).expect("a dump"))
}

/// Reads a dump with these lines after the header.
fn read_text(lines: &str) -> (Vec<NumberedRow>, Problems) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("dump.csv");
    fs::write(&path, format!("{HEADER}\n{lines}")).expect("room");
    read(&path)
}

fn only(lines: &str) -> Row {
    let (rows, problems) = read_text(lines);
    assert_eq!(problems, Problems::default());
    let [row] = rows.as_slice() else { panic!("one row, not {rows:?}") };
    row.row.clone()
}

fn kind(lines: &str) -> EventKind {
    only(lines).event().expect("an event").kind
}

#[test]
fn rows_of_a_block_stand_where_they_happened() {
    let (rows, problems) = read(&fixture("leak6.csv"));
    assert_eq!(problems.total, 0);
    assert_eq!(rows.len(), 70, "all rows but the header");
    let ids: Vec<u64> = rows.iter().map(|row| row.id).collect();
    assert!(ids.is_sorted(), "{ids:?}");
    assert!(rows.iter().map(|row| row.row.time).is_sorted());
    assert_eq!(
        rows[2].row.event().expect("an event"),
        Event {
            time: Nanos(1795964702754740776),
            tgid: Tgid(23999),
            tid: Tid(23999),
            kind: EventKind::Alloc(Alloc {
                pool: Pool::Hal,
                device: Some(DeviceId(0)),
                ptr: DevicePtr(0x7f04e0200000),
                size: 20971520,
                totals: None,
                // It does not say whose it is.
                driver: Some(DriverAlloc {
                    module: None,
                    page: Some(PageType::Normal),
                    create: false,
                    api: None
                }),
                stack: None,
            }),
        }
    );
    assert_eq!((rows[2].id, rows[2].line, rows[2].row.allocation_id), (2, 68, Some(AllocationId(1))));
    // Written at exit for blocks that were never freed.
    let alive: Vec<u64> =
        rows.iter().filter(|row| matches!(row.row.fact, Fact::NeverFreed { .. })).map(|row| row.id).collect();
    assert_eq!(alive, [69, 71]);
    // Beginnings and ends of ranges belong together.
    let ranges: Vec<u64> = rows
        .iter()
        .filter_map(|row| match row.row.fact {
            Fact::Event(EventKind::RangeBegin { range, .. }) => Some(range),
            Fact::Event(EventKind::RangeEnd { range }) => range,
            _ => None,
        })
        .collect();
    assert_eq!(ranges, [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]);
}

#[test]
fn a_database_reads_like_the_csv_of_the_same_workload() {
    // Two runs: times and addresses differ.
    let shape = |name: &str| -> Vec<String> {
        let (rows, problems) = read(&fixture(name));
        assert_eq!(problems.total, 0);
        let mut shapes = Vec::new();
        for NumberedRow { id, row, .. } in rows {
            let mut fact = row.fact;
            match &mut fact {
                Fact::Event(EventKind::Alloc(alloc)) => alloc.ptr = DevicePtr(0),
                Fact::Event(EventKind::Free(free)) => free.ptr = DevicePtr(0),
                Fact::NeverFreed { ptr, .. } => *ptr = DevicePtr(0),
                _ => {}
            }
            shapes.push(format!("{id} {fact:?} {:?} {:?}", row.allocation_id, row.device));
        }
        shapes
    };
    let (csv, db) = (shape("leak6.csv"), shape("leak6.db"));
    assert_eq!(db.len(), 70);
    // What is freed at exit, and in which order, is up to the interpreter.
    let during = |shapes: &[String]| shapes[..60].to_vec();
    assert_eq!(during(&csv), during(&db));
}

#[test]
fn a_hostile_database_is_an_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("dump.db");
    let open_with = |sql: &str| {
        let _ = fs::remove_file(&path);
        rusqlite::Connection::open(&path).expect("room").execute_batch(sql).expect("runs");
        open([&path], Options::default())
    };
    assert!(matches!(open_with("CREATE TABLE other (a)"), Err(ReadError::NoTable { .. })));
    assert!(matches!(open_with("CREATE TABLE memscope_dump (ID, Event)"), Err(ReadError::NoTable { .. })));
    // A view could run for ever.
    let columns = HEADER.split(',').map(|name| format!("1 AS \"{name}\"")).collect::<Vec<_>>().join(",");
    assert!(matches!(
        open_with(&format!("CREATE VIEW memscope_dump AS SELECT {columns}")),
        Err(ReadError::NoTable { .. })
    ));

    let columns = HEADER.split(',').map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(",");
    let rows = open_with(&format!(
        "CREATE TABLE memscope_dump ({columns});
         INSERT INTO memscope_dump VALUES (1,'MSTX','Mark','\"m\"',5,1,1,'0','N/A','{{}}','','');
         INSERT INTO memscope_dump VALUES ('2','MSTX',x'4d61726b','m','6',1,1,0,NULL,NULL,NULL,NULL);
         INSERT INTO memscope_dump VALUES (-3,'MSTX','Mark','m',7,1,1,'0','N/A','{{}}','','');
         INSERT INTO memscope_dump VALUES (4,'MSTX','Mark','m',8.5,1,1,'0','N/A','{{}}','','');
         INSERT INTO memscope_dump VALUES (5,'MSTX','Mark','m',9,1,1,'0','N/A','[1]','','');"
    ));
    let (rows, problems) = read_all(rows.expect("the table is there"));
    assert_eq!(rows.iter().map(|row| (row.id, row.line)).collect::<Vec<_>>(), [(1, 1), (2, 2)]);
    let mut lines: Vec<u64> = problems.first.iter().map(|problem| problem.line).collect();
    lines.sort_unstable();
    assert_eq!(lines, [3, 4, 5]);

    // Cut off in the middle.
    let whole = fs::read(fixture("leak6.db")).expect("there");
    fs::write(&path, &whole[..whole.len() / 2]).expect("room");
    match open([&path], Options::default()) {
        Ok(rows) => assert!(read_all(rows).1.total > 0),
        Err(error) => assert_eq!(error.to_string().matches("malformed").count(), 1, "{error}"),
    }
}

#[test]
fn a_dump_of_msmemscope_gives_its_own_report() {
    let mut online = Online::new(StepRule::StepStart, true);
    for row in open([fixture("leak6.csv")], Options::default()).expect("a dump") {
        if let Some(event) = row.row.event() {
            online.apply(&event);
        }
    }
    let process = &online.ledger.processes()[0];
    assert_eq!(process.steps().list().len(), 6);
    let pool = process.device(Some(DeviceId(0))).expect("used").pool(Pool::Pta);
    assert_eq!(pool.peak_allocated, 37751808);
    assert_eq!(pool.live_bytes, 0, "what torch_npu tidied up at exit");
    // Figures of its terminal report: leaks of 3.000488 Mb at steps 2 to 5, and these gaps.
    let verdicts = online.leaks.as_ref().expect("asked for").verdicts(0, process);
    let leaks: Vec<(u64, u32)> = verdicts.leaks.iter().map(|(block, _)| (block.size, block.step.0)).collect();
    assert_eq!(leaks, [(3146240, 2), (3146240, 3), (3146240, 4), (3146240, 5)]);
    let gaps: Vec<_> = online.fluctuation.extremes(0).filter(|gap| gap.pool == Pool::Pta).collect();
    let [gap] = gaps.as_slice() else { panic!("one pool on one device, not {gaps:?}") };
    let shown = |swing: Swing| {
        format!("{:.4} {:.4} {}", swing.ratio * 100.0, swing.min_bytes as f64 / 1048576.0, swing.step)
    };
    assert_eq!((shown(gap.most), shown(gap.least)), ("29.1716 7.0015 2".into(), "52.7830 19.0034 6".into()));
}

/// Live tracing and reading the dump of the same trace must come to the same.
#[test]
fn the_ledger_of_a_dump_is_the_one_of_the_trace() {
    let alloc = |pool, ptr: u64, size: u64, totals: Option<(u64, u64)>| {
        EventKind::Alloc(Alloc {
            pool,
            device: (pool != Pool::Host).then_some(DeviceId(0)),
            ptr: DevicePtr(ptr),
            size,
            totals: totals.map(|(allocated, reserved)| Totals { allocated, reserved }),
            driver: (pool == Pool::Hal).then_some(DriverAlloc {
                module: Some(33),
                page: Some(PageType::Huge),
                create: false,
                api: Some(("aclrtMallocAlign32", size)),
            }),
            stack: None,
        })
    };
    let free = |pool, ptr: u64, size: Option<u64>| {
        let device = size.map(|_| DeviceId(0));
        EventKind::Free(Free { pool, device, ptr: DevicePtr(ptr), size, totals: None })
    };
    let range = |range| EventKind::RangeBegin { range, text: "step start".into(), domain: Some("d".into()) };
    let kinds = [
        EventKind::AclInit,
        EventKind::DeviceSet { device: DeviceId(0) },
        free(Pool::Hal, 0x100, None),
        alloc(Pool::Hal, 0x10000, 20 << 20, None),
        alloc(Pool::Pta, 0x10000, 512, Some((512, 20 << 20))),
        EventKind::Op { name: "op".into() },
        alloc(Pool::PtaWorkspace, 0x5000, 64, Some((64, 64))),
        alloc(Pool::PtaWorkspace, 0x5000, 128, Some((128, 128))),
        range(9),
        EventKind::Launch { name: None, stream: Some(3) },
        alloc(Pool::Pta, 0x10200, 1024, Some((1536, 20 << 20))),
        alloc(Pool::Pta, 0x10200, 2048, Some((2560, 20 << 20))),
        EventKind::RangeEnd { range: Some(9) },
        range(12),
        free(Pool::Pta, 0x10000, Some(512)),
        EventKind::RangeEnd { range: Some(12) },
        alloc(Pool::Host, 0x7000, 99, None),
        free(Pool::Hal, 0x10000, None),
    ];
    let mut live = Ledger::default();
    let dir = tempfile::tempdir().expect("a directory");
    let mut writer = Writer::create(config(dir.path())).expect("writable");
    for (time, kind) in kinds.into_iter().enumerate() {
        let event = Event { time: Nanos(time as u64), tgid: Tgid(7), tid: Tid(8), kind };
        let change = live.apply(&event);
        rows_of(&event, &change, &live, |row| writer.write(&row));
    }
    let process = live.process(Tgid(7)).expect("it had events");
    live_rows(process, Nanos(1000)).for_each(|row| writer.write(&row));
    writer.finish();

    let mut read = Ledger::default();
    let mut balance: BTreeMap<Option<AllocationId>, i64> = BTreeMap::new();
    for row in open([dir.path()], Options::default()).expect("a dump") {
        match &row.row.fact {
            Fact::Event(EventKind::Alloc(_)) => *balance.entry(row.row.allocation_id).or_default() += 1,
            Fact::Event(EventKind::Free(_)) | Fact::NeverFreed { .. } => {
                *balance.entry(row.row.allocation_id).or_default() -= 1;
            }
            _ => {}
        }
        if let Some(event) = row.row.event() {
            read.apply(&event);
        }
    }
    let state = |ledger: &Ledger| {
        let process = ledger.process(Tgid(7)).expect("it had events");
        let mut blocks: Vec<Block> = process.blocks().cloned().collect();
        blocks.sort_by_key(|block| block.id);
        let uses: Vec<_> = Pool::ALL
            .into_iter()
            .map(|pool| (pool, process.unknown_frees(pool), process.lost_frees(pool)))
            .collect();
        format!(
            "{blocks:?}\n{uses:?}\n{:?}\n{:?}\n{}",
            process.devices(),
            process.steps().list(),
            process.kernels()
        )
    };
    assert_eq!(state(&read), state(&live));
    // The block from before attach is the only one without its other half.
    balance.retain(|_, balance| *balance != 0);
    assert_eq!(balance, BTreeMap::from([(None, -1)]));
}

#[test]
fn sums_of_sizes_are_what_the_allocator_said() {
    let mut used = 0;
    for row in open([fixture("leak6.csv")], Options::default()).expect("a dump") {
        match row.row.event().map(|event| event.kind) {
            Some(EventKind::Alloc(Alloc { pool: Pool::Pta, size, totals, .. })) => {
                used += size;
                assert_eq!(totals.map(|totals| totals.allocated), Some(used));
            }
            Some(EventKind::Free(Free { pool: Pool::Pta, size, totals, .. })) => {
                used -= size.expect("pools say it");
                assert_eq!(totals.map(|totals| totals.allocated), Some(used));
            }
            _ => {}
        }
    }
}

#[test]
fn the_2025_format_is_understood() {
    let (rows, problems) = read(&fixture("memscope_dump_20250428113810.csv"));
    assert_eq!(problems.total, 0);
    assert_eq!(rows.len(), 330);
    assert!(rows.iter().map(|row| (row.row.time, row.id)).is_sorted());
    let count = |which: &dyn Fn(&EventKind) -> bool| {
        rows.iter().filter(|row| row.row.event().is_some_and(|event| which(&event.kind))).count()
    };
    let allocs = |pool| move |kind: &EventKind| matches!(kind, EventKind::Alloc(alloc) if alloc.pool == pool);
    assert_eq!(count(&allocs(Pool::Pta)), 241);
    assert_eq!((count(&allocs(Pool::Hal)), count(&allocs(Pool::Host))), (38, 10));
    let frees = |pool| move |kind: &EventKind| matches!(kind, EventKind::Free(free) if free.pool == pool);
    assert_eq!(count(&frees(Pool::Pta)), 14);
    assert_eq!(count(&frees(Pool::Hal)) + count(&frees(Pool::Host)), 9);
    assert_eq!(count(&|kind| matches!(kind, EventKind::Launch { name: None, .. })), 12);
    assert_eq!(count(&|kind| matches!(kind, EventKind::AclInit)), 2);
    assert_eq!(
        count(
            &|kind| matches!(kind, EventKind::Mark { text, .. } if &**text == "[mstx]: mstxMarkA :------training start----- ")
        ),
        2
    );
    assert_eq!(
        count(
            &|kind| matches!(kind, EventKind::RangeBegin { range: 1, text, .. } if &**text == "step start")
        ),
        2
    );
    assert_eq!(
        rows[0].row.event(),
        Some(Event {
            time: Nanos(1746006014162153000),
            tgid: Tgid(2523740),
            tid: Tid(2523740),
            kind: EventKind::AclInit
        })
    );
    assert_eq!(
        kind(
            "2,MALLOC,HAL,N/A,1746006014361575,1,1,0,20615843020800,\"{addr:20615843020800,size:16384,owner:,MID:7}\",,\n"
        ),
        EventKind::Alloc(Alloc {
            pool: Pool::Hal,
            device: Some(DeviceId(0)),
            ptr: DevicePtr(20615843020800),
            size: 16384,
            totals: None,
            driver: Some(DriverAlloc { module: Some(7), page: None, create: false, api: None }),
            stack: None,
        })
    );
    let (rows, _) = read_text(
        "1,FREE,PTA,N/A,1746006014361575,1,1,1,20623381625344,\"{addr:20623381625344,size:-512,owner:,total:2097152,used:3537408}\",,\n",
    );
    assert!(rows[0].negative_size);
    assert_eq!(
        rows[0].row.fact,
        Fact::Event(EventKind::Free(Free {
            pool: Pool::Pta,
            device: Some(DeviceId(1)),
            ptr: DevicePtr(20623381625344),
            size: Some(512),
            totals: Some(Totals { allocated: 3537408, reserved: 2097152 }),
        }))
    );
}

#[test]
fn host_memory_of_the_2025_format_is_freed_as_such() {
    let (rows, _) = read_text(concat!(
        "1,MALLOC,HAL,N/A,1746006014361575,1,1,host,4096,\"{addr:4096,size:8,owner:,MID:7}\",,\n",
        "2,MALLOC,HAL,N/A,1746006014361576,1,1,0,8192,\"{addr:8192,size:8,owner:,MID:7}\",,\n",
        "3,FREE,HAL,N/A,1746006014361577,1,1,N/A,4096,\"{addr:4096,size:8,owner:,MID:-1}\",,\n",
        "4,FREE,HAL,N/A,1746006014361578,1,1,N/A,8192,\"{addr:8192,size:8,owner:,MID:-1}\",,\n",
        "5,FREE,HAL,N/A,1746006014361579,1,1,N/A,4096,\"{addr:4096,size:8,owner:,MID:-1}\",,\n",
    ));
    let pools: Vec<Pool> = rows
        .iter()
        .map(|row| match &row.row.fact {
            Fact::Event(EventKind::Alloc(alloc)) => alloc.pool,
            Fact::Event(EventKind::Free(free)) => free.pool,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(pools, [Pool::Host, Pool::Hal, Pool::Host, Pool::Hal, Pool::Hal]);
    assert_eq!(rows[0].row.place(), Some(Place::Cpu));
}

#[test]
fn attributes_come_in_any_order_and_may_be_missing() {
    let expected = |size, owner: Option<&str>| {
        let mut row = only("1,MALLOC,PTA,N/A,5,1,1,0,0x10,\"{size:7}\",,\n");
        if let Fact::Event(EventKind::Alloc(alloc)) = &mut row.fact {
            alloc.size = size;
        }
        row.owner = owner.map(Name::from);
        row
    };
    for (attr, size, owner) in [
        ("{owner:PTA@ops,size:7,addr:0x10}", 7, Some("ops")),
        ("{ size:7, inefficient_type:early_allocation,late_deallocation,owner:PTA@a@b}", 7, Some("a@b")),
        ("{shape:[1,2,],size:9,total:,used:}", 9, None),
        ("size:9", 9, None),
        ("{size:9,owner:PTA}", 9, None),
        ("{size:9,owner:custom@label}", 9, Some("custom@label")),
        ("{size:9,future_key:{a:b}}", 9, None),
    ] {
        assert_eq!(
            only(&format!("1,MALLOC,PTA,N/A,5,1,1,0,0x10,\"{attr}\",,\n")),
            expected(size, owner),
            "{attr}"
        );
    }
    // The address can be taken from either place.
    assert_eq!(only("1,MALLOC,PTA,N/A,5,1,1,0,N/A,\"{size:7,addr:16}\",,\n"), expected(7, None));
    let alive = only("1,FREE,HAL,N/A,5,1,1,0,0x10,\"{allocation_id:3,size:7,shadow:true}\",,\n");
    assert_eq!(alive.fact, Fact::NeverFreed { pool: Pool::Hal, ptr: DevicePtr(0x10) });
    assert_eq!((alive.event(), alive.size, alive.allocation_id), (None, Some(7), Some(AllocationId(3))));
}

#[test]
fn pages_modules_and_places_are_told_apart() {
    let driver = |attr: &str| match kind(&format!("1,MALLOC,HAL,N/A,5,1,1,0,0x10,\"{{size:7,{attr}}}\",,\n"))
    {
        EventKind::Alloc(alloc) => alloc.driver.map(|driver| (driver.module, driver.page, driver.create)),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        driver("owner:CANN@HCCL,page_type:huge,alloc_type:alloc"),
        Some((Some(3), Some(PageType::Huge), false))
    );
    assert_eq!(
        driver("owner:CANN@APP@x,page_type:giant,alloc_type:create"),
        Some((Some(33), Some(PageType::Giant), true))
    );
    // An unknown module is not the same as a foreign one.
    assert_eq!(driver("page_type:normal,alloc_type:alloc"), Some((None, Some(PageType::Normal), false)));
    assert_eq!(driver("owner:CANN@UNKNOWN"), None);
    assert_eq!(driver("owner:CANN@APP"), Some((Some(33), None, false)));
    for (device, place) in [
        ("3", Some(Place::Npu(DeviceId(3)))),
        ("cpu", Some(Place::Cpu)),
        ("host", Some(Place::Cpu)),
        ("10000", Some(Place::Cpu)),
        ("N/A", None),
        ("9999", None),
    ] {
        let row = only(&format!("1,MALLOC,HAL,N/A,5,1,1,{device},0x10,\"{{size:7}}\",,\n"));
        assert_eq!(row.place(), place, "{device}");
    }
    for (event_type, pool) in [
        ("PTA_WORKSPACE", Pool::PtaWorkspace),
        ("ATB", Pool::Atb),
        ("MINDSPORE", Pool::Mindspore),
        ("MindSpore", Pool::Mindspore),
        ("HOST_PINNED", Pool::Host),
    ] {
        match kind(&format!("1,MALLOC,{event_type},N/A,5,1,1,0,0x10,\"{{size:7}}\",,\n")) {
            EventKind::Alloc(alloc) => assert_eq!(alloc.pool, pool),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn names_and_stacks_are_read_in_every_spelling() {
    let text = |cell: &str| match kind(&format!("1,MSTX,Mark,{cell},5,1,1,0,N/A,,,\n")) {
        EventKind::Mark { text, .. } => text.to_string(),
        other => panic!("{other:?}"),
    };
    assert_eq!(text("\"step\""), "step");
    assert_eq!(text("step "), "step ");
    assert_eq!(text("\"a, \"\"b\"\"\""), "a, \"b\"");
    assert_eq!(text("\"a \"b\" c\""), "a \"b\" c");
    assert_eq!(text("\"'=1\""), "=1");
    assert_eq!(text("\"'quoted'\""), "'quoted'");
    // A dump can be as hostile as a process.
    assert_eq!(text("\u{1b}[2J"), "\\u{1b}[2J");
    let (rows, problems) = read_text(concat!(
        "1,MALLOC,PTA,N/A,5,1,1,0,0x10,\"{size:7}\",\"a.py(1): f\nb.py(2): g\n\",\"lib(+0x1)\nmain\"\n",
        "2,OP_LAUNCH,ATB_END,op,6,1,1,0,N/A,,NA,\n",
        "3,OP_LAUNCH,ATEN_START,op,7,1,1,0,N/A,,,\r\n",
    ));
    assert_eq!(problems, Problems::default());
    assert_eq!(rows.iter().map(|row| row.line).collect::<Vec<_>>(), [2, 6, 7]);
    assert_eq!(rows[1].row.fact, Fact::OpEnd { framework: Framework::Atb, name: "op".into() });
    assert_eq!(rows[2].row.event().map(|event| event.kind), Some(EventKind::Op { name: "op".into() }));
}

#[test]
fn ranges_without_a_number_are_paired() {
    let ranges = |lines: &str| -> Vec<Option<u64>> {
        read_text(lines)
            .0
            .iter()
            .map(|row| match row.row.fact {
                Fact::Event(EventKind::RangeBegin { range, .. }) => Some(range),
                Fact::Event(EventKind::RangeEnd { range }) => range,
                ref other => panic!("{other:?}"),
            })
            .collect()
    };
    let begin = |time: u64, tid: u64| format!("{time},MSTX,Range_start,\"r\",{time},1,{tid},0,N/A,,,\n");
    let end = |time: u64, tid: u64, range: u64| {
        format!("{time},MSTX,Range_end,\"Range end from id {range}\",{time},1,{tid},0,N/A,,,\n")
    };
    // By their numbers, across threads.
    let text = [begin(1, 1), begin(2, 1), end(3, 2, 1), end(4, 1, 2)].concat();
    assert_eq!(ranges(&text), [Some(1), Some(2), Some(1), Some(2)]);
    // By nesting, where the numbers began earlier than the dump.
    let text = [begin(1, 1), begin(2, 1), begin(3, 2), end(4, 1, 8), end(5, 1, 7), end(6, 1, 6)].concat();
    assert_eq!(ranges(&text), [Some(1), Some(2), Some(3), Some(2), Some(1), None]);
    // By what the row says.
    let text = concat!(
        "1,MSTX,Range_start,\"r\",1,1,1,0,N/A,\"{range:77}\",,\n",
        "2,MSTX,Range_end,\"Range end from id 1\",2,1,1,0,N/A,\"{range:77}\",,\n",
    );
    assert_eq!(ranges(text), [Some(77), Some(77)]);
}

#[test]
fn what_is_malformed_is_named_and_the_rest_is_read() {
    let (rows, problems) = read_text(concat!(
        "0,SYSTEM,ACL_INIT,N/A,1,1,1,N/A,N/A,,,\n",
        "x,MSTX,Mark,m,2,1,1,0,N/A,,,\n",
        "2,MSTX,Mark,m,yesterday,1,1,0,N/A,,,\n",
        "3,MSTX,Mark,m,4,-1,1,0,N/A,,,\n",
        "4,MSTX,Mark,m,5,1,1,npu,N/A,,,\n",
        "5,MALLOC,PTA,N/A,6,1,1,0,0x10,\"{addr:0x10}\",,\n",
        "6,MALLOC,PTA,N/A,7,1,1,0,0xzz,\"{size:1}\",,\n",
        "7,MSTX\n",
        "8,NEW_EVENT,NEW_TYPE,N/A,9,1,1,0,N/A,,,\n",
        "9,MSTX,Mark,good,10,1,1,0,N/A,,,\n",
        "10,MALLOC,PTA,N/A,11,1,1,0,0x10,\"{size:18446744073709551616}\",,\n",
        "11,MALLOC,PTA,N/A,12,1,1,0,0x10,\"{size:1e9}\",,\n",
        "12,MALLOC,PTA,N/A,13,1,1,0,0x10,\"{size:-512}\",,\n",
        "13,FREE,PTA,N/A,14,1,1,0,0x10,\"{size:abc}\",,\n",
        "14,ACCESS,READ,N/A,15,1,1,0,0x10,\"{size:abc}\",,\n",
        "15,NEW_EVENT,NEW_TYPE,N/A,16,1,1,0,N/A,,,\n",
        "16,MALLOC,NEW_POOL,N/A,17,1,1,0,0x10,\"{size:1}\",,\n",
        "17,SNAPSHOT,MEMORY_SNAPSHOT,N/A,18,1,1,0,N/A,,,\n",
        "18,KERNEL_LAUNCH,KERNEL_EXECUTE_END,N/A,19,1,1,0,N/A,,,\n",
        "19,MSTX,Mark,cut o",
    ));
    assert_eq!(rows.iter().map(|row| row.id).collect::<Vec<_>>(), [0, 9]);
    let shown: Vec<String> = problems.first.iter().map(ToString::to_string).collect();
    let expected = [
        "3: column ID: `x` is not a number",
        "4: column Timestamp(ns): `yesterday` is not a number",
        "5: column Process Id: `-1` is not a number",
        "6: column Device Id: `npu` is not a device",
        "7: a MALLOC row without size in column Attr",
        "8: column Ptr: `0xzz` is not an address",
        "9: 2 cells instead of 12",
        "10: Event and Event Type: `NEW_EVENT,NEW_TYPE` is no kind of row that is known here",
        "12: column Attr, size: `18446744073709551616` is not a number of bytes",
        "13: column Attr, size: `1e9` is not a number of bytes",
        "14: column Attr, size: `-512` is not a number of bytes",
        "15: column Attr, size: `abc` is not a number of bytes",
        "16: column Attr, size: `abc` is not a number of bytes",
        "18: Event and Event Type: `MALLOC,NEW_POOL` is no kind of row that is known here",
        "21: the file ends within this row",
    ];
    assert_eq!(shown.len(), expected.len(), "{shown:?}");
    assert_eq!((problems.total, problems.unknown), (1 + expected.len() as u64, 3));
    assert_eq!(
        problems.to_string(),
        "13 rows could not be read; 3 rows were of a kind that is not known here"
    );
    for (shown, expected) in shown.iter().zip(expected) {
        assert!(shown.ends_with(&format!("dump.csv:{expected}")), "{shown} / {expected}");
    }
}

/// A row that is cut within its stack is one row, however many lines the stack has.
#[test]
fn a_row_whose_stack_is_cut_counts_once() {
    let (rows, problems) = read_text(concat!(
        "0,SYSTEM,ACL_INIT,N/A,1,1,1,N/A,N/A,,,\n",
        "1,MALLOC,PTA,N/A,2,1,1,0,0x10,\"{allocation_id:1,size:8}\",a.py(1): f\n",
        "b.py(2): g, h\n",
        "c.py(3): <module>\",\n",
        "2,MSTX,Mark,good,3,1,1,0,N/A,,,\n",
        "3,MALLOC,PTA,N/A,4,1,1,0,0x20,\"{allocation_id:2,size:8}\",\"d.py(4): f\n",
        "e.py(5): g\n",
    ));
    assert_eq!(rows.iter().map(|row| row.id).collect::<Vec<_>>(), [0, 2]);
    let lines: Vec<u64> = problems.first.iter().map(|problem| problem.line).collect();
    assert_eq!(lines, [3, 7], "{:?}", problems.first);
    assert_eq!(problems.to_string(), "2 rows could not be read");
}

#[test]
fn what_is_no_dump_is_an_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("x.csv");
    let error = |text: &[u8]| {
        fs::write(&path, text).expect("room");
        open([&path], Options::default()).err().expect("an error")
    };
    assert!(matches!(error(b""), ReadError::Empty { .. }));
    assert!(matches!(error(b"a,b,c\n1,2,3\n"), ReadError::NotADump { .. }));
    let shown = error(b"\x1b[2J\xff").to_string();
    assert!(shown.contains("begins with `\\u{1b}[2J\u{fffd}`"), "{shown}");
    assert!(matches!(open([dir.path().join("none")], Options::default()), Err(ReadError::Read { .. })));
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).expect("a directory");
    assert!(matches!(open([&empty], Options::default()), Err(ReadError::NothingFound { .. })));
    // A dump that holds nothing yet is one.
    fs::write(&path, format!("\u{feff}{HEADER} \r\n")).expect("room");
    assert_eq!(read(&path), (vec![], Problems::default()));
    fs::write(&path, HEADER).expect("room");
    assert_eq!(read(&path), (vec![], Problems::default()));
}

/// Blocks that live for `lifetime` rows and are written when they die, as msMemScope does.
fn by_death(count: u64, lifetime: u64) -> String {
    let mut text = format!("{HEADER}\n");
    for n in 0..count {
        let (birth, death) = (2 * n, 2 * (n + lifetime) + 1);
        text += &format!("{birth},MALLOC,PTA,N/A,{birth},1,1,0,{n},\"{{allocation_id:{n},size:8}}\",,\n");
        text += &format!("{death},FREE,PTA,N/A,{death},1,1,0,{n},\"{{allocation_id:{n},size:8}}\",,\n");
    }
    text
}

#[test]
fn order_does_not_depend_on_how_far_rows_are_out_of_place() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("dump.csv");
    // In place, within the window, beyond it in memory, and beyond it on disk.
    for (lifetime, memory) in [(0, 0), (1000, 0), (17_000, usize::MAX), (17_000, 1 << 20)] {
        let count = 20_000;
        fs::write(&path, by_death(count, lifetime)).expect("room");
        let (rows, problems) = read_all(open([&path], Options { memory }).expect("a dump"));
        assert_eq!(problems.total, 0);
        assert_eq!(rows.len() as u64, 2 * count);
        assert!(rows.iter().map(|row| row.id).is_sorted(), "{lifetime} rows late, {memory} bytes");
    }
}

#[test]
fn malformed_rows_are_named_when_the_file_must_be_sorted() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("dump.csv");
    let mut text = by_death(20_000, 17_000);
    text += "torn\n80005,MALLOC,PTA,N/A,80005,1,1,0,1,\"{}\",,\n";
    fs::write(&path, text).expect("room");
    for memory in [usize::MAX, 1 << 20] {
        let (rows, problems) = read_all(open([&path], Options { memory }).expect("a dump"));
        assert_eq!(rows.len(), 40_000);
        let lines: Vec<u64> = problems.first.iter().map(|problem| problem.line).collect();
        assert_eq!((problems.total, lines), (2, vec![40_002, 40_003]));
    }
}

#[test]
fn files_of_a_trace_are_read_as_one() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut writer = Writer::create(config(dir.path())).expect("writable");
    let rows: Vec<Row> = (0..3000)
        .map(|n| match n % 7 {
            0 => row_at(n, Fact::Event(EventKind::AclInit)),
            m => {
                let mut row = row_at(n, Fact::Event(EventKind::Mark { text: "m".into(), domain: None }));
                row.device = Some(DeviceId((m % 3) as u16));
                row
            }
        })
        .collect();
    rows.iter().for_each(|row| writer.write(row));
    assert_eq!(writer.finish().len(), 3);
    let (read, problems) = read(dir.path());
    assert_eq!(problems.total, 0);
    assert_eq!(read.iter().map(|row| row.row.clone()).collect::<Vec<_>>(), rows, "each row once, in order");
}

/// Copies of a trace, in either format, as they come to lie beside it: each row counts once.
#[test]
fn a_trace_that_is_there_twice_counts_once() {
    let (once, _) = read(&fixture("leak6.csv"));
    let facts = |rows: &[NumberedRow]| rows.iter().map(|row| row.row.clone()).collect::<Vec<Row>>();
    let dir = tempfile::tempdir().expect("a directory");
    let original = dir.path().join("memscope_dump_1.csv");
    fs::copy(fixture("leak6.csv"), &original).expect("room");
    // Converted into its own directory, and numbered anew by that; as its beginning, copied while it grew.
    let mut writer = Writer::create(Config { formats: vec![Format::Csv, Format::Db], ..config(dir.path()) })
        .expect("writable");
    once.iter().for_each(|row| writer.write(&row.row));
    let mut paths: Vec<PathBuf> = writer.finish().into_iter().map(|file| file.path).collect();
    paths.push(dir.path().join("beginning.csv"));
    let text = fs::read_to_string(&original).expect("there");
    let beginning: Vec<&str> = text.lines().take(60).collect();
    fs::write(&paths[2], beginning.join("\n") + "\n").expect("room");
    paths.push(original.clone());
    for copy in &paths {
        let (rows, problems) = (open([&original, copy], Options::default()).map(read_all)).expect("dumps");
        assert_eq!(problems, Problems::default());
        assert_eq!(rows.len(), once.len(), "{copy:?}");
        let mut rows = open([&original, copy], Options::default()).expect("dumps");
        assert_eq!(rows.by_ref().count(), once.len());
        let [overlap] = &rows.overlaps()[..] else { panic!("{copy:?}: {:?}", rows.overlaps()) };
        assert_eq!((overlap.process, overlap.paths[0] == original), (Tgid(23999), true));
        assert!(overlap.shared > 40, "{copy:?}: {overlap}");
        let says = overlap.to_string();
        assert!(
            says.contains(if *copy == original { "was named twice" } else { "rows in common" }),
            "{says}"
        );
    }
    // The directory that it was converted into.
    let (rows, _) = read(dir.path());
    assert_eq!(facts(&rows), facts(&once));
}

/// A dump that was appended to itself, or of which each row came to be there twice.
#[test]
fn rows_that_a_file_has_twice_count_once() {
    let (once, _) = read(&fixture("leak6.csv"));
    let dir = tempfile::tempdir().expect("a directory");
    let text = fs::read_to_string(fixture("leak6.csv")).expect("there");
    let body = text.split_once('\n').expect("rows").1;
    let appended = dir.path().join("appended.csv");
    fs::write(&appended, format!("{text}{body}")).expect("room");
    let database = dir.path().join("twice.db");
    fs::copy(fixture("leak6.db"), &database).expect("room");
    let connection = rusqlite::Connection::open(&database).expect("a database");
    connection.execute("INSERT INTO memscope_dump SELECT * FROM memscope_dump", []).expect("room");
    drop(connection);
    for path in [&appended, &database] {
        let mut rows = open([path], Options::default()).expect("a dump");
        assert_eq!(rows.by_ref().count(), once.len(), "{path:?}");
        let [overlap] = &rows.overlaps()[..] else { panic!("{path:?}: {:?}", rows.overlaps()) };
        let says = overlap.to_string();
        assert!(says.contains("has 70 rows more than once"), "{says}");
    }
    // Of one moment, but each with a number of its own: a program may set a mark twice.
    let (rows, _) = read_text("1,MSTX,Mark,m,5,1,1,0,N/A,,,\n2,MSTX,Mark,m,5,1,1,0,N/A,,,\n");
    assert_eq!(rows.len(), 2);
}

/// Two tracers at once see the same events at slightly different times: there is no telling which is which.
#[test]
fn two_traces_of_a_process_at_once_are_named() {
    let dir = tempfile::tempdir().expect("a directory");
    let [one, other, later] = [0, 1, 1_000].map(|shift| {
        let path = dir.path().join(format!("{shift}.csv"));
        let lines: Vec<String> = (0..9)
            .map(|n| {
                let time = 100 + 10 * n + shift;
                format!("{n},MALLOC,PTA,N/A,{time},1,1,0,{n},\"{{size:512}}\",,")
            })
            .collect();
        fs::write(&path, format!("{HEADER}\n{}\n", lines.join("\n"))).expect("room");
        path
    });
    let overlaps = |paths: [&PathBuf; 2]| {
        let mut rows = open(paths, Options::default()).expect("dumps");
        assert_eq!(rows.by_ref().count(), 18);
        rows.overlaps()
    };
    let [overlap] = &overlaps([&one, &other])[..] else { panic!("one") };
    assert_eq!(overlap.shared, 0);
    assert!(overlap.to_string().contains("two traces of process 1 at the same time"), "{overlap}");
    assert_eq!(overlaps([&one, &later]), [], "one trace after another");
}

fn config(output: &Path) -> Config {
    Config {
        output: output.to_owned(),
        formats: vec![Format::Csv],
        stacks: StackStyle::Lines,
        max_size: None,
        caller: None,
    }
}

fn row_at(time: u64, fact: Fact) -> Row {
    Row::new(Nanos(time), Tgid(7), Tid(8), fact)
}

fn any_stack() -> impl Strategy<Value = Option<Stack>> {
    let frame = (any_text(), any_text(), 1..u32::MAX)
        .prop_map(|(function, file, line)| (Frame { function, file, line: Some(line) }, Origin::User));
    (prop::collection::vec(frame, 0..5), any::<bool>())
        .prop_map(|(frames, via)| Stack::new(frames, if via { Whose::Via } else { Whose::Own }, false))
}

fn any_text() -> impl Strategy<Value = Name> {
    let hostile = prop::sample::select(vec![
        "=1",
        "'=1",
        "''",
        "\"",
        "a\"b",
        "\"\"",
        ",",
        "a,b",
        "{",
        "}",
        "%2C",
        "%",
        ":",
        " ",
        "N/A",
        "",
        "'",
        "+",
        "@",
        "-",
        "step start",
        "a:b",
        "梯度",
        "\\",
        "\\u{a}",
    ]);
    prop::collection::vec(prop_oneof![hostile.prop_map(str::to_owned), "[ -~]{0,8}", "\\PC{0,4}"], 0..4)
        .prop_map(|parts| memscope::text::sanitize(parts.concat().as_bytes()).into())
        // Names that dumps use for what has none, and the spelling of a quotation mark, are not told apart.
        .prop_filter("ambiguous", |name: &Name| !["", "N/A"].contains(&&**name) && !name.contains("\\u{22}"))
}

fn any_pool() -> impl Strategy<Value = Pool> {
    prop::sample::select(Pool::ALL.to_vec())
}

fn any_totals() -> impl Strategy<Value = Option<Totals>> {
    prop::option::of(
        (any::<u64>(), any::<u64>()).prop_map(|(allocated, reserved)| Totals { allocated, reserved }),
    )
}

fn any_driver() -> impl Strategy<Value = Option<DriverAlloc>> {
    let page = prop::sample::select(vec![PageType::Normal, PageType::Huge, PageType::Giant]);
    let api = prop::option::of((prop::sample::select(vec!["aclrtMalloc", "rtMalloc"]), any::<u64>()));
    prop::option::of((0..75u8, page, any::<bool>(), api).prop_map(|(module, page, create, api)| {
        DriverAlloc { module: Some(module), page: Some(page), create, api }
    }))
}

fn any_fact() -> impl Strategy<Value = Fact> {
    let device = any::<u16>().prop_map(|device| Some(DeviceId(device % 9000)));
    let ptr = any::<u64>().prop_map(DevicePtr);
    prop_oneof![
        (any_pool(), device.clone(), ptr.clone(), any::<u64>(), any_totals(), any_driver(), any_stack())
            .prop_map(|(pool, device, ptr, size, totals, driver, stack)| {
                let host = pool == Pool::Host;
                let driver = driver.filter(|_| host || pool == Pool::Hal);
                let device = device.filter(|_| !host);
                let stack = stack.map(Arc::new);
                Fact::Event(EventKind::Alloc(Alloc { pool, device, ptr, size, totals, driver, stack }))
            }),
        (any_pool(), device.clone(), ptr.clone(), prop::option::of(1..u64::MAX), any_totals()).prop_map(
            |(pool, device, ptr, size, totals)| {
                let device = device.filter(|_| pool != Pool::Host);
                Fact::Event(EventKind::Free(Free { pool, device, ptr, size, totals }))
            }
        ),
        (any_pool(), any::<u64>(), any::<i32>()).prop_map(|(pool, size, code)| {
            let device = (pool != Pool::Host).then_some(DeviceId(3));
            let api = Some(("aclrtMalloc", 5));
            Fact::Event(EventKind::AllocFailed(AllocFailed {
                pool,
                function: "halMemAlloc",
                device,
                size,
                code,
                api,
                stack: None,
            }))
        }),
        any_text().prop_map(|name| Fact::OpBegin { framework: Framework::Atb, name }),
        any_text().prop_map(|name| Fact::OpEnd { framework: Framework::Aten, name }),
        (prop::option::of(any_text()), prop::option::of(any::<u64>()))
            .prop_map(|(name, stream)| Fact::Event(EventKind::Launch { name, stream })),
        (any_text(), prop::option::of(any_text()))
            .prop_map(|(text, domain)| Fact::Event(EventKind::Mark { text, domain })),
        (any_text(), prop::option::of(any_text()), any::<u64>())
            .prop_map(|(text, domain, range)| Fact::Event(EventKind::RangeBegin { range, text, domain })),
        (1..u64::MAX).prop_map(|range| Fact::Event(EventKind::RangeEnd { range: Some(range) })),
        Just(Fact::Event(EventKind::DeviceReset { device: DeviceId(2) })),
        (ptr.clone(), any::<u64>(), ptr.clone())
            .prop_map(|(ptr, size, handle)| Fact::Event(EventKind::Map { ptr, size, handle })),
        ptr.clone().prop_map(|ptr| Fact::Event(EventKind::Unmap { ptr })),
        Just(Fact::Event(EventKind::AclInit)),
        Just(Fact::Event(EventKind::AclFinalize)),
        any::<u64>().prop_map(|events| Fact::Lost { events }),
        any::<u64>().prop_map(|number| Fact::StepEnd { number }),
        (any_pool(), ptr.clone()).prop_map(|(pool, ptr)| Fact::NeverFreed { pool, ptr }),
        (prop::option::of(any_pool()), ptr, any::<u64>(), prop::option::of(any_text())).prop_map(
            |(pool, ptr, size, op)| {
                Fact::Event(EventKind::Access(Access { pool, ptr, size, kind: AccessKind::Read, op }))
            }
        ),
    ]
}

fn any_row() -> impl Strategy<Value = Row> {
    let id = prop::option::of(any::<u64>().prop_map(AllocationId));
    (any_fact(), id, any_text().prop_filter("labels are not empty", |l| !l.is_empty()), 0..4u16).prop_map(
        |(fact, id, owner, device)| {
            let mut row = row_at(0, fact);
            row.device = Some(DeviceId(device));
            match &row.fact {
                Fact::Event(EventKind::Alloc(alloc)) => {
                    row.allocation_id = id;
                    row.device = None;
                    row.owner = (alloc.pool != Pool::Host || alloc.driver.is_some()).then_some(owner);
                }
                Fact::Event(EventKind::Free(_)) => {
                    row.allocation_id = id;
                    row.device = None;
                }
                Fact::NeverFreed { pool, .. } => {
                    row.allocation_id = id;
                    row.size = Some(5);
                    row.device = row.device.filter(|_| *pool != Pool::Host);
                }
                Fact::Event(EventKind::Access(access)) => {
                    row.allocation_id = id;
                    row.device = row.device.filter(|_| access.pool != Some(Pool::Host));
                }
                Fact::Event(EventKind::AllocFailed(_) | EventKind::DeviceReset { .. }) => row.device = None,
                _ => {}
            }
            row
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_is_read(mut rows in prop::collection::vec(any_row(), 1..40)) {
        for (time, row) in rows.iter_mut().enumerate() {
            row.time = Nanos(time as u64);
        }
        for format in [Format::Csv, Format::Db, Format::Capture] {
            let dir = tempfile::tempdir().expect("a directory");
            let config = Config { formats: vec![format], ..config(dir.path()) };
            let mut writer = Writer::create(config).expect("writable");
            rows.iter().for_each(|row| writer.write(row));
            writer.finish();
            let (read, problems) = read(dir.path());
            prop_assert_eq!(problems, Problems::default());
            prop_assert_eq!(&read.into_iter().map(|row| row.row).collect::<Vec<_>>(), &rows);
        }
    }

    #[test]
    fn no_text_upsets_the_reader(text in "(([0-9]{1,3}|MALLOC|MSTX|PTA|Mark|\"|\\{size:[0-9]\\}|\\PC{0,3}),?){0,40}\n?", bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("dump.csv");
        for rest in [text.as_bytes(), &bytes] {
            fs::write(&path, [HEADER.as_bytes(), b"\n", rest, b"\n1,MSTX,Mark,good,10,1,1,0,N/A,,,\n"].concat()).expect("room");
            let (read, problems) = read(&path);
            // The good row is found, or was made part of a malformed one.
            prop_assert!(read.iter().any(|row| row.id == 1) || problems.total > 0);
        }
    }
}
