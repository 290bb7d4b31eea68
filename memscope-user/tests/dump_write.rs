//! What the dump writer leaves on disk.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use memscope::dump::read::{Options, open};
use memscope::dump::{
    Caller, Config, Fact, FileReport, Format, OutputError, Pipeline, Place, Row, StackStyle, Summary, Writer,
    rows_of,
};
use memscope::model::*;

const HEADER: &str = "ID,Event,Event Type,Name,Timestamp(ns),Process Id,Thread Id,Device Id,Ptr,Attr,Call Stack(Python),Call Stack(C)";

fn config(output: &Path) -> Config {
    Config {
        output: output.to_owned(),
        formats: vec![Format::Csv],
        stacks: StackStyle::Lines,
        max_size: None,
        caller: None,
    }
}

fn row(time: u64, kind: EventKind) -> Row {
    Row::from(Event { time: Nanos(time), tgid: Tgid(77), tid: Tid(78), kind })
}

fn on(device: u16, mut row: Row) -> Row {
    row.device = Some(DeviceId(device));
    row
}

fn pta(time: u64, device: u16, ptr: u64, size: u64, used: u64) -> Row {
    row(
        time,
        EventKind::Alloc(Alloc {
            pool: Pool::Pta,
            device: Some(DeviceId(device)),
            ptr: DevicePtr(ptr),
            size,
            totals: Some(Totals { allocated: used, reserved: 20971520 }),
            driver: None,
            stack: None,
        }),
    )
}

fn hal(time: u64, pool: Pool, device: Option<u16>, ptr: u64, size: u64) -> Row {
    row(
        time,
        EventKind::Alloc(Alloc {
            pool,
            device: device.map(DeviceId),
            ptr: DevicePtr(ptr),
            size,
            totals: None,
            driver: Some(DriverAlloc {
                module: Some(33),
                page: Some(PageType::Huge),
                create: false,
                api: Some(("aclrtMallocAlign32", size - 32)),
            }),
            stack: None,
        }),
    )
}

fn hal_free(time: u64, ptr: u64) -> Row {
    row(
        time,
        EventKind::Free(Free {
            pool: Pool::Hal,
            device: None,
            ptr: DevicePtr(ptr),
            size: None,
            totals: None,
        }),
    )
}

fn mark(time: u64, text: &str) -> Row {
    row(time, EventKind::Mark { text: text.into(), domain: None })
}

fn write(output: &Path, rows: impl IntoIterator<Item = Row>) -> Vec<FileReport> {
    let mut writer = Writer::create(config(output)).expect("the directory is writable");
    rows.into_iter().for_each(|row| writer.write(&row));
    writer.finish()
}

fn lines(path: &Path) -> Vec<String> {
    fs::read_to_string(path).expect("the file is readable").lines().map(str::to_owned).collect()
}

/// The rows of a query, texts in apostrophes.
fn query(path: &Path, sql: &str) -> Vec<String> {
    use rusqlite::types::ValueRef;
    let connection = rusqlite::Connection::open(path).expect("a database");
    let mut statement = connection.prepare(sql).expect("the table is there");
    let columns = statement.column_count();
    let rows = statement.query_map([], |row| {
        let cells = (0..columns).map(|column| match row.get_ref(column).expect("a column") {
            ValueRef::Integer(number) => number.to_string(),
            ValueRef::Text(text) => format!("'{}'", String::from_utf8_lossy(text)),
            other => panic!("{other:?}"),
        });
        Ok(cells.collect::<Vec<_>>().join("|"))
    });
    rows.expect("runs").collect::<Result<_, _>>().expect("readable")
}

fn is_digits(text: &str, count: usize) -> bool {
    text.len() == count && text.bytes().all(|b| b.is_ascii_digit())
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

#[test]
fn rows_are_those_of_msmemscope() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut alloc = pta(1001, 0, 0x1000, 512, 512);
    alloc.allocation_id = Some(AllocationId(1));
    let mut driver = hal(1002, Pool::Hal, Some(0), 0x12c041400000, 2097184);
    driver.allocation_id = Some(AllocationId(2));
    driver.owner = Some("train@weight".into());
    let mut free = on(0, hal_free(1010, 0x12c041400000));
    free.allocation_id = Some(AllocationId(2));
    free.size = Some(2097184);
    let pool_free = row(
        1011,
        EventKind::Free(Free {
            pool: Pool::Pta,
            device: Some(DeviceId(0)),
            ptr: DevicePtr(0x1000),
            size: Some(512),
            totals: Some(Totals { allocated: 0, reserved: 20971520 }),
        }),
    );
    let mut alive = on(
        0,
        Row::new(
            Nanos(1012),
            Tgid(77),
            Tid(77),
            Fact::NeverFreed { pool: Pool::PtaWorkspace, ptr: DevicePtr(0x2000) },
        ),
    );
    alive.allocation_id = Some(AllocationId(3));
    alive.size = Some(64);
    let failed = row(
        1013,
        EventKind::AllocFailed(AllocFailed {
            pool: Pool::Hal,
            function: "halMemAlloc",
            device: Some(DeviceId(0)),
            size: 1 << 40,
            code: 6,
            api: None,
            stack: None,
        }),
    );
    let reports = write(
        dir.path(),
        [
            row(1000, EventKind::AclInit),
            alloc,
            driver,
            on(0, mark(1003, "a, b")),
            on(
                0,
                row(
                    1004,
                    EventKind::RangeBegin {
                        range: 4,
                        text: "step start".into(),
                        domain: Some("d{1}".into()),
                    },
                ),
            ),
            on(0, row(1005, EventKind::Op { name: "aclnnAdd".into() })),
            on(0, row(1006, EventKind::Launch { name: Some("MatMul_1".into()), stream: Some(16) })),
            on(0, row(1007, EventKind::Launch { name: None, stream: Some(16) })),
            on(0, row(1008, EventKind::RangeEnd { range: Some(4) })),
            row(1009, EventKind::DeviceSet { device: DeviceId(0) }),
            free,
            pool_free,
            alive,
            failed,
            row(1014, EventKind::DeviceReset { device: DeviceId(0) }),
            row(1015, EventKind::AclFinalize),
            row(1016, EventKind::Exit),
        ],
    );
    let [report] = reports.as_slice() else { panic!("one file, not {reports:?}") };
    assert_eq!(
        lines(&report.path),
        [
            HEADER,
            "0,SYSTEM,ACL_INIT,N/A,1000,77,78,N/A,N/A,,,",
            r#"1,MALLOC,PTA,N/A,1001,77,78,0,0x0000000000001000,"{allocation_id:1,addr:0x0000000000001000,size:512,total:20971520,used:512,owner:PTA}",,"#,
            r#"2,MALLOC,HAL,N/A,1002,77,78,0,0x000012c041400000,"{allocation_id:2,addr:0x000012c041400000,size:2097184,owner:CANN@APP@train@weight,page_type:huge,alloc_type:alloc,api:aclrtMallocAlign32,api_size:2097152}",,"#,
            r#"3,MSTX,Mark,"a, b",1003,77,78,0,N/A,,,"#,
            r#"4,MSTX,Range_start,"step start",1004,77,78,0,N/A,"{range:4,domain:d%7B1%7D}",,"#,
            "5,OP_LAUNCH,ATEN_START,aclnnAdd,1005,77,78,0,N/A,,,",
            "6,OP_LAUNCH,ATEN_END,aclnnAdd,1005,77,78,0,N/A,,,",
            r#"7,KERNEL_LAUNCH,KERNEL_LAUNCH,MatMul_1,1006,77,78,0,N/A,"{streamId:16}",,"#,
            r#"8,KERNEL_LAUNCH,KERNEL_LAUNCH,N/A,1007,77,78,0,N/A,"{streamId:16}",,"#,
            r#"9,MSTX,Range_end,"Range end from id 4",1008,77,78,0,N/A,"{range:4}",,"#,
            r#"10,FREE,HAL,N/A,1010,77,78,0,0x000012c041400000,"{allocation_id:2,addr:0x000012c041400000,size:2097184}",,"#,
            r#"11,FREE,PTA,N/A,1011,77,78,0,0x0000000000001000,"{addr:0x0000000000001000,size:512,total:20971520,used:0}",,"#,
            r#"12,FREE,PTA_WORKSPACE,N/A,1012,77,77,0,0x0000000000002000,"{allocation_id:3,addr:0x0000000000002000,size:64,shadow:true}",,"#,
            r#"13,OOM_DETAIL,OOM_TRIGGER,OOM_Trigger,1013,77,78,0,N/A,"{func:halMemAlloc,req_size:1099511627776,ret:6,pool:HAL}",,"#,
            "14,SYSTEM,DEVICE_RESET,N/A,1014,77,78,0,N/A,,,",
            "15,SYSTEM,ACL_FINI,N/A,1015,77,78,N/A,N/A,,,",
            "16,SYSTEM,EXIT,N/A,1016,77,78,N/A,N/A,,,",
        ]
    );
    assert_eq!(report.rows, 17);
    assert_eq!(report.bytes, fs::metadata(&report.path).expect("the file is there").len());
    assert!(report.is_complete());
    assert_eq!((report.pid, report.device), (Tgid(77), Some(Place::Npu(DeviceId(0)))));
}

#[test]
fn databases_are_those_of_msmemscope() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut driver = hal(1002, Pool::Hal, Some(0), 0x12c041400000, 2097184);
    driver.allocation_id = Some(AllocationId(2));
    driver.owner = Some("train\"@weight".into());
    let mut writer = Writer::create(Config { formats: vec![Format::Db, Format::Csv], ..config(dir.path()) })
        .expect("the directory is writable");
    for row in [
        row(1000, EventKind::AclInit),
        driver,
        on(0, mark(1003, "=a\n, \"b\"")),
        on(0, row(1005, EventKind::Op { name: "-op".into() })),
        hal(1006, Pool::Host, None, 0x7f0000000000, 4096),
    ] {
        writer.write(&row);
    }
    let open: Vec<PathBuf> = writer.paths().collect();
    assert_eq!(open.len(), 4);
    for path in open.iter().filter(|path| path.extension().is_some_and(|extension| extension == "db")) {
        for file in fs::read_dir(path.parent().expect("a directory")).expect("made") {
            let file = file.expect("readable");
            assert_eq!(
                file.metadata().expect("there").permissions().mode() & 0o7777,
                0o600,
                "{:?}",
                file.path()
            );
        }
    }
    let reports = writer.finish();
    let [_, db, ..] = reports.as_slice() else { panic!("four files, not {reports:?}") };
    assert_eq!((db.format, db.rows, db.bytes), (Format::Db, 5, fs::metadata(&db.path).expect("there").len()));
    let files = fs::read_dir(db.path.parent().expect("a directory")).expect("made").count();
    assert_eq!(files, 2, "the log is gone");

    let peer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/dumps/leak6.db");
    let copy = dir.path().join("peer.db");
    fs::copy(peer, &copy).expect("room");
    for of_whole_file in ["SELECT sql FROM sqlite_schema", "PRAGMA journal_mode"] {
        assert_eq!(query(&db.path, of_whole_file), query(&copy, of_whole_file), "{of_whole_file}");
    }
    assert_eq!(
        query(&db.path, "SELECT * FROM memscope_dump"),
        [
            "0|'SYSTEM'|'ACL_INIT'|'N/A'|1000|77|78|'N/A'|'N/A'|'{}'|''|''",
            r#"1|'MALLOC'|'HAL'|'N/A'|1002|77|78|'0'|'0x000012c041400000'|'{"allocation_id":"2","addr":"0x000012c041400000","size":"2097184","owner":"CANN@APP@train\"@weight","page_type":"huge","alloc_type":"alloc","api":"aclrtMallocAlign32","api_size":"2097152"}'|''|''"#,
            r#"2|'MSTX'|'Mark'|'"=a\u{a}, "b""'|1003|77|78|'0'|'N/A'|'{}'|''|''"#,
            "3|'OP_LAUNCH'|'ATEN_START'|'-op'|1005|77|78|'0'|'N/A'|'{}'|''|''",
            "4|'OP_LAUNCH'|'ATEN_END'|'-op'|1005|77|78|'0'|'N/A'|'{}'|''|''",
        ]
    );
}

#[test]
fn every_process_has_a_directory_and_every_device_a_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let output = dir.path().join("deep/er");
    let mut other = pta(5, 3, 0x1000, 512, 512);
    other.tgid = Tgid(99);
    let reports = write(
        &output,
        [
            row(1, EventKind::AclInit),
            pta(2, 0, 0x1000, 512, 512),
            hal_free(3, 0x9000),
            hal(4, Pool::Host, None, 0x7f0000000000, 4096),
            other,
            hal_free(6, 0x9100),
        ],
    );
    let names: Vec<Vec<String>> = reports
        .iter()
        .map(|report| {
            let inside = report.path.strip_prefix(&output).expect("files are in the output directory");
            inside.iter().map(|part| part.to_str().expect("names are text").to_owned()).collect()
        })
        .collect();
    for (name, (pid, device)) in names.iter().zip([("77", "0"), ("77", "cpu"), ("99", "3")]) {
        let [project, device_dir, dump, file] = name.as_slice() else { panic!("four levels, not {name:?}") };
        let date = project
            .strip_prefix(&format!("msmemscope_{pid}_"))
            .and_then(|rest| rest.strip_suffix("_ascend"))
            .unwrap_or_else(|| panic!("{project}"));
        assert!(is_digits(date, 14), "{project}");
        assert_eq!((device_dir.as_str(), dump.as_str()), (format!("device_{device}").as_str(), "dump"));
        let date = file.strip_prefix("memscope_dump_").and_then(|rest| rest.strip_suffix(".csv"));
        assert!(date.is_some_and(|date| is_digits(date, 14)), "{file}");
    }
    assert_eq!(names[0][0], names[1][0]);
    for report in &reports {
        assert_eq!(
            fs::metadata(&report.path).expect("the file is there").permissions().mode() & 0o7777,
            0o600
        );
        for dir in report.path.ancestors().skip(1).take_while(|dir| dir.starts_with(&output)) {
            assert_eq!(
                fs::metadata(dir).expect("it is there").permissions().mode() & 0o027,
                0,
                "{}",
                dir.display()
            );
        }
    }
    // What has no device is in every file of its process: what came before the first one, too.
    assert_eq!(
        lines(&reports[0].path)[1..],
        [
            "0,SYSTEM,ACL_INIT,N/A,1,77,78,N/A,N/A,,,",
            r#"1,MALLOC,PTA,N/A,2,77,78,0,0x0000000000001000,"{addr:0x0000000000001000,size:512,total:20971520,used:512,owner:PTA}",,"#,
            r#"2,FREE,HAL,N/A,3,77,78,N/A,0x0000000000009000,"{addr:0x0000000000009000,size:0}",,"#,
            r#"4,FREE,HAL,N/A,6,77,78,N/A,0x0000000000009100,"{addr:0x0000000000009100,size:0}",,"#,
        ]
    );
    assert_eq!(
        lines(&reports[1].path)[1..],
        [
            "0,SYSTEM,ACL_INIT,N/A,1,77,78,N/A,N/A,,,",
            r#"3,MALLOC,HOST_PINNED,N/A,4,77,78,cpu,0x00007f0000000000,"{addr:0x00007f0000000000,size:4096,pinned:true,owner:CANN@APP,page_type:huge,alloc_type:alloc,api:aclrtMallocAlign32,api_size:4064}",,"#,
            r#"4,FREE,HAL,N/A,6,77,78,N/A,0x0000000000009100,"{addr:0x0000000000009100,size:0}",,"#,
        ]
    );
    assert!(lines(&reports[2].path)[1].starts_with("0,MALLOC,PTA,N/A,5,99,"));
}

#[test]
fn a_program_that_is_replaced_ends_its_files() {
    let dir = tempfile::tempdir().expect("a directory");
    let before = pta(1, 0, 0x1000, 512, 512);
    let after = pta(3, 0, 0x2000, 512, 512);
    let reports = write(dir.path(), [before, row(2, EventKind::Exec), after]);
    let [first, second] = reports.as_slice() else { panic!("two files, not {reports:?}") };
    assert!(lines(&first.path)[2].starts_with("1,SYSTEM,EXEC,N/A,2,"));
    assert!(lines(&second.path)[1].starts_with("0,MALLOC,PTA,N/A,3,"));
}

#[test]
fn rows_say_what_the_ledger_knows() {
    let event = |time, kind| Event { time: Nanos(time), tgid: Tgid(77), tid: Tid(78), kind };
    let alloc = |pool, device: Option<u16>, ptr, size| {
        EventKind::Alloc(Alloc {
            pool,
            device: device.map(DeviceId),
            ptr: DevicePtr(ptr),
            size,
            totals: None,
            driver: None,
            stack: None,
        })
    };
    let free = |ptr| {
        EventKind::Free(Free { pool: Pool::Hal, device: None, ptr: DevicePtr(ptr), size: None, totals: None })
    };
    let access = |ptr| {
        EventKind::Access(Access {
            pool: None,
            ptr: DevicePtr(ptr),
            size: 8,
            kind: AccessKind::Write,
            op: Some("op".into()),
        })
    };
    let mut ledger = Ledger::default();
    let mut rows = Vec::new();
    for event in [
        event(1, EventKind::DeviceSet { device: DeviceId(1) }),
        event(2, EventKind::Mark { text: "m".into(), domain: None }),
        event(3, alloc(Pool::Hal, Some(2), 0x1000, 512)),
        event(4, alloc(Pool::Hal, Some(2), 0x1000, 1024)),
        event(5, free(0x1000)),
        event(6, free(0x9000)),
        event(7, alloc(Pool::PtaWorkspace, None, 0x5000, 64)),
        event(8, alloc(Pool::PtaWorkspace, None, 0x5000, 64)),
        event(8, access(0x5000)),
        event(8, access(0x5001)),
        event(8, access(0x5040)),
        event(9, alloc(Pool::Hal, Some(2), 0x6000, 1)),
        event(10, EventKind::DeviceReset { device: DeviceId(2) }),
        event(11, EventKind::Exit),
    ] {
        let change = ledger.apply(&event);
        rows_of(&event, &change, &ledger, |row| rows.push(row));
    }
    let dir = tempfile::tempdir().expect("a directory");
    let reports = write(dir.path(), rows);
    let cells = |path: &Path| -> Vec<String> {
        let shown = [0, 1, 2, 4, 7, 8, 9];
        let mut lines: Vec<String> = Vec::new();
        for line in &self::lines(path)[1..] {
            let cells = peer_cells(line);
            lines.push(shown.map(|column| cells[column].trim_start_matches("0x000000000000")).join(" "));
        }
        lines
    };
    let [one, two] = reports.as_slice() else { panic!("two files, not {reports:?}") };
    assert_eq!(
        cells(&one.path),
        [
            "0 MSTX Mark 2 1 N/A ",
            "5 FREE HAL 6 N/A 9000 {addr:0x0000000000009000,size:0}",
            "6 MALLOC PTA_WORKSPACE 7 1 5000 {allocation_id:3,addr:0x0000000000005000,size:64,owner:PTA_WORKSPACE}",
            "7 FREE PTA_WORKSPACE 8 1 5000 {allocation_id:3,addr:0x0000000000005000,size:64,shadow:true}",
            "8 MALLOC PTA_WORKSPACE 8 1 5000 {allocation_id:3,addr:0x0000000000005000,size:64,owner:PTA_WORKSPACE}",
            "9 ACCESS WRITE 8 1 5000 {allocation_id:3,addr:0x0000000000005000,size:8,type:PTA_WORKSPACE}",
            "10 ACCESS WRITE 8 1 5001 {allocation_id:3,addr:0x0000000000005001,size:8,type:PTA_WORKSPACE}",
            "14 FREE PTA_WORKSPACE 11 1 5000 {allocation_id:3,addr:0x0000000000005000,size:64,shadow:true}",
            "15 SYSTEM EXIT 11 N/A N/A ",
        ]
    );
    assert_eq!(
        cells(&two.path),
        [
            "1 MALLOC HAL 3 2 1000 {allocation_id:1,addr:0x0000000000001000,size:512}",
            "2 FREE HAL 4 2 1000 {allocation_id:1,addr:0x0000000000001000,size:512,shadow:true}",
            "3 MALLOC HAL 4 2 1000 {allocation_id:2,addr:0x0000000000001000,size:1024}",
            "4 FREE HAL 5 2 1000 {allocation_id:2,addr:0x0000000000001000,size:1024}",
            "5 FREE HAL 6 N/A 9000 {addr:0x0000000000009000,size:0}",
            "11 MALLOC HAL 9 2 6000 {allocation_id:4,addr:0x0000000000006000,size:1}",
            "12 FREE HAL 10 2 6000 {allocation_id:4,addr:0x0000000000006000,size:1,shadow:true}",
            "13 SYSTEM DEVICE_RESET 10 2 N/A ",
            "15 SYSTEM EXIT 11 N/A N/A ",
        ]
    );
}

/// The driver frees all its memory by one function; whose it was is known by the block.
#[test]
fn frees_of_pinned_memory_are_in_its_file_alone() {
    let event = |time, kind| Event { time: Nanos(time), tgid: Tgid(77), tid: Tid(78), kind };
    let alloc = |pool, device, ptr| {
        let (totals, driver, stack) = (None, None, None);
        EventKind::Alloc(Alloc { pool, device, ptr: DevicePtr(ptr), size: 64, totals, driver, stack })
    };
    let free = |ptr| {
        EventKind::Free(Free { pool: Pool::Hal, device: None, ptr: DevicePtr(ptr), size: None, totals: None })
    };
    let mut ledger = Ledger::default();
    let mut rows = Vec::new();
    for event in [
        event(1, alloc(Pool::Hal, Some(DeviceId(0)), 0x1000)),
        event(2, alloc(Pool::Host, None, 0x2000)),
        event(3, free(0x2000)),
        event(4, free(0x1000)),
    ] {
        let change = ledger.apply(&event);
        rows_of(&event, &change, &ledger, |row| rows.push(row));
    }
    let dir = tempfile::tempdir().expect("a directory");
    let reports = write(dir.path(), rows);
    let [device, cpu] = reports.as_slice() else { panic!("two files, not {reports:?}") };
    let cells = |path: &Path| -> Vec<String> {
        let lines = lines(path);
        lines
            .iter()
            .skip(1)
            .map(|line| [1, 2, 7].map(|column| peer_cells(line)[column].clone()).join(" "))
            .collect()
    };
    assert_eq!(cells(&device.path), ["MALLOC HAL 0", "FREE HAL 0"]);
    assert_eq!(cells(&cpu.path), ["MALLOC HOST_PINNED cpu", "FREE HOST_PINNED cpu"]);
}

#[test]
fn two_traces_of_one_process_keep_apart() {
    let dir = tempfile::tempdir().expect("a directory");
    let first = write(dir.path(), [pta(1, 0, 0x1000, 512, 512)]);
    let second = write(dir.path(), [pta(2, 0, 0x1000, 512, 512)]);
    assert_ne!(first[0].path, second[0].path);
    assert_eq!((lines(&first[0].path).len(), lines(&second[0].path).len()), (2, 2));
}

#[test]
fn nothing_is_left_behind_when_nothing_was_traced() {
    let dir = tempfile::tempdir().expect("a directory");
    let output = dir.path().join("a/b");
    let reports = write(&output, [row(1, EventKind::AclInit)]);
    assert!(!dir.path().join("a").exists());
    let [report] = reports.as_slice() else { panic!("one report, not {reports:?}") };
    assert_eq!((report.device, report.rows, report.missing_rows), (None, 0, 1));
}

/// Splits as the comparison of msMemScope does: a cell that begins with a quotation mark ends at the next one.
fn peer_cells(line: &str) -> Vec<String> {
    let mut cells = Vec::new();
    let mut rest = Some(line);
    while let Some(text) = rest {
        let (cell, tail) = match text.strip_prefix('"') {
            Some(quoted) => {
                let (cell, tail) = quoted.split_once('"').expect("quotes are closed");
                (cell, if tail.is_empty() { None } else { Some(tail.strip_prefix(',').unwrap_or(tail)) })
            }
            None => match text.split_once(',') {
                Some((cell, tail)) => (cell, Some(tail)),
                None => (text, None),
            },
        };
        cells.push(cell.to_owned());
        rest = tail;
    }
    cells
}

#[test]
fn hostile_names_stay_in_their_cell() {
    let names = [
        "=1+1",
        "+cmd|' /C calc'!A0",
        "-2",
        "@SUM(A1)",
        " =1",
        "'=1",
        "''@x",
        "\u{ff1d}1",
        "a\nb",
        "a\r\nb\tc",
        "\u{1b}[2J",
        "say \"hi\"",
        "\"",
        "a\",\"b",
        "a,b",
        "\u{202e}gnp",
        "",
        ";=1",
        "a\u{0}b",
        "\u{2028}x",
        "\\u{22}",
        "梯度",
    ];
    let dir = tempfile::tempdir().expect("a directory");
    let rows = names.iter().flat_map(|name| {
        [
            on(0, mark(1, name)),
            on(0, row(2, EventKind::Op { name: (*name).into() })),
            on(0, row(3, EventKind::Mark { text: "m".into(), domain: Some((*name).into()) })),
        ]
    });
    let reports = write(dir.path(), rows);
    let text = fs::read_to_string(&reports[0].path).expect("the file is text");
    let lines: Vec<&str> = text.split('\n').collect();
    assert_eq!(lines.len(), 1 + 4 * names.len() + 1, "a row is a line");
    let mut standard = csv::ReaderBuilder::new().from_reader(text.as_bytes());
    let parsed: Vec<csv::StringRecord> =
        standard.records().collect::<Result<_, _>>().expect("every row has twelve cells");
    assert_eq!(parsed.len(), 4 * names.len());
    for (line, record) in lines[1..].iter().zip(&parsed) {
        assert_eq!(peer_cells(line), record.iter().collect::<Vec<_>>(), "readers agree");
        assert!(!line.contains(|c: char| c.is_control() || ('\u{2028}'..'\u{202f}').contains(&c)), "{line}");
        for cell in record {
            assert!(!cell.trim_start().starts_with(['=', '+', '-', '@', '\u{ff1d}']), "{cell} is a formula");
        }
    }
    let shown = |name: &str| {
        let at = names.iter().position(|known| *known == name).expect("a known name");
        parsed[4 * at][3].to_owned()
    };
    assert_eq!(shown("=1+1"), "'=1+1");
    assert_eq!(shown("'=1"), "''=1");
    assert_eq!(shown("say \"hi\""), "say \\u{22}hi\\u{22}");
    assert_eq!(shown("a\nb"), "a\\u{a}b");
    assert_eq!(shown("梯度"), "梯度");
}

#[test]
fn links_of_others_in_a_shared_directory_are_not_followed() {
    let dir = tempfile::tempdir().expect("a directory");
    let target = dir.path().join("target");
    fs::create_dir(&target).expect("a directory");
    let shared = dir.path().join("shared");
    fs::create_dir(&shared).expect("a directory");
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o1777)).expect("ours to change");
    let link = shared.join("out");
    symlink(&target, &link).expect("a link");

    // Our own link is the user's will.
    let reports = write(&link.join("x"), [pta(1, 0, 0x1000, 512, 512)]);
    assert!(reports[0].is_complete() && fs::read_dir(target.join("x")).expect("made").count() == 1);

    if !is_root() {
        eprintln!("not root: cannot make a link of another user");
        return;
    }
    std::os::unix::fs::lchown(&link, Some(12345), None).expect("root may");
    match Writer::create(config(&link.join("y"))).err() {
        Some(OutputError::UntrustedLink { part, owner: 12345, .. }) => assert_eq!(part, link),
        other => panic!("{other:?}"),
    }
    assert!(!target.join("y").exists());
    // Where only its owner can write, nobody else can have planted a link.
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o755)).expect("ours to change");
    assert!(Writer::create(config(&link.join("y"))).is_ok());
}

#[test]
fn files_belong_to_the_caller_of_sudo() {
    if !is_root() {
        eprintln!("not root: cannot give files away");
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let caller = Some(Caller { uid: 12345, gid: 23456 });
    let mut writer =
        Writer::create(Config { caller, ..config(&dir.path().join("out")) }).expect("root may write");
    writer.write(&pta(1, 0, 0x1000, 512, 512));
    let reports = writer.finish();
    let made: Vec<PathBuf> =
        reports[0].path.ancestors().take_while(|path| *path != dir.path()).map(Path::to_owned).collect();
    assert_eq!(made.len(), 5);
    for path in made {
        let stat = fs::metadata(&path).expect("it is there");
        assert_eq!((stat.uid(), stat.gid()), (12345, 23456), "{}", path.display());
    }
    assert_ne!(fs::metadata(dir.path()).expect("it is there").uid(), 12345);
}

#[test]
fn an_output_directory_that_cannot_be_is_an_error_at_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("file");
    fs::write(&file, "").expect("a file");
    let error = Pipeline::start(config(&file.join("out"))).err().expect("a file is no directory");
    assert!(matches!(&error, OutputError::NotADirectory { part, .. } if *part == file), "{error}");
    let told = memscope::trace::TraceError::from(error).to_string();
    assert!(told.ends_with("choose another one with --output"), "{told}");
    // Nobody can create files here, root neither.
    let error = Pipeline::start(config(Path::new("/proc/self"))).err().expect("not writable");
    assert!(matches!(error, OutputError::NotWritable { .. }), "{error}");
}

/// Runs this test binary again, for `test` alone, with `variable` set.
fn again(test: &str, variable: &str, value: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("we run"));
    let (_, here) = module_path!().split_once("::").expect("a module of the test binary");
    command
        .args([&format!("{here}::{test}"), "--exact", "--nocapture", "--test-threads=1"])
        .env(variable, value);
    command
}

/// What a writer left that was killed.
struct Killed {
    files: Vec<PathBuf>,
    /// Times and counts of the rows that it had taken, and the time of its end.
    taken: Vec<(Duration, usize)>,
    at: Duration,
    _dir: tempfile::TempDir,
}

impl Killed {
    /// Runs `test` again, which writes rows in these formats, and kills it after some time.
    fn new(test: &str, formats: Vec<Format>, after: Duration) -> Self {
        const CHILD: &str = "DUMP_TEST_KILLED_CHILD";
        if let Ok(output) = std::env::var(CHILD) {
            let config = Config { formats, ..config(Path::new(&output)) };
            let pipeline = Pipeline::start(config).expect("writable");
            for count in 1..=u64::MAX {
                pipeline.push(pta(count, 0, 0x1000 * count, 512, 512 * count));
                if count % 100 == 0 {
                    println!("at {count}");
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        }
        let dir = tempfile::tempdir().expect("a directory");
        let mut child = again(test, CHILD, &dir.path().display().to_string())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a child");
        let mut told = BufReader::new(child.stdout.take().expect("piped")).lines();
        let start = Instant::now();
        let mut taken = Vec::new();
        while start.elapsed() < after {
            let line = told.next().expect("it runs on").expect("text");
            if let Some(count) = line.strip_prefix("at ") {
                taken.push((start.elapsed(), count.parse::<usize>().expect("a number")));
            }
        }
        child.kill().expect("it runs");
        let at = start.elapsed();
        child.wait().expect("it ran");
        let project =
            fs::read_dir(dir.path()).expect("made").next().expect("one process").expect("readable").path();
        let files = fs::read_dir(project.join("device_0/dump")).expect("made");
        let files = files.map(|file| file.expect("readable").path()).collect();
        Killed { files, taken, at, _dir: dir }
    }

    fn file(&self, extension: &str) -> &Path {
        let mut found = self.files.iter().filter(|path| path.extension().is_some_and(|e| e == extension));
        found.next().expect("it was asked for")
    }

    /// Rows taken so long before the end.
    fn taken_before(&self, long: Duration) -> usize {
        let before = self.taken.iter().filter(|(at, _)| self.at - *at > long).map(|(_, count)| *count);
        before.max().expect("it ran for longer")
    }
}

#[test]
fn killed_at_any_time_the_dump_is_valid_to_its_last_row() {
    let test = "killed_at_any_time_the_dump_is_valid_to_its_last_row";
    let killed = Killed::new(test, vec![Format::Csv, Format::Db], Duration::from_millis(5000));
    let flushed = killed.taken_before(Duration::from_secs(3));
    let text = fs::read_to_string(killed.file("csv")).expect("text");
    assert!(text.ends_with(",,\n"), "the last row is whole");
    assert!(text.lines().count() > flushed, "rows reach the file within 3 s");
    for (number, line) in text.lines().skip(1).enumerate() {
        let start = format!("{number},MALLOC,PTA,N/A,{},77,78,0,", number + 1);
        assert!(line.starts_with(&start) && peer_cells(line).len() == 12, "{line}");
    }
    let times = query(killed.file("db"), "SELECT ID + 1, \"Timestamp(ns)\" FROM memscope_dump ORDER BY ID");
    assert!(times.len() >= flushed, "rows are committed within 3 s");
    for (number, time) in times.iter().enumerate() {
        assert_eq!(*time, format!("{0}|{0}", number + 1));
    }
}

#[test]
fn killed_at_any_time_the_capture_is_valid_to_its_last_batch() {
    let test = "killed_at_any_time_the_capture_is_valid_to_its_last_batch";
    let killed = Killed::new(test, vec![Format::Capture], Duration::from_millis(2500));
    let batched = killed.taken_before(Duration::from_millis(1200));
    let mut rows = open([killed.file("arrows")], Options::default()).expect("a stream");
    let times: Vec<u64> = rows.by_ref().map(|row| row.row.time.0).collect();
    assert!(times.len() >= batched, "{} rows of {batched} are in the file within 1.2 s", times.len());
    assert!(times.iter().copied().eq(1..=times.len() as u64));
}

/// Runs `test` again with a limit on the size of its files, which is a full disk to everybody but the signal that comes
/// with it, and returns the summary that it got. The limit is one of the process, so it has a process of its own.
fn summary_with_full_disk(test: &str, format: Format, output: &Path) -> Option<serde_json::Value> {
    const CHILD: &str = "DUMP_TEST_FULL_CHILD";
    let limit = if format == Format::Capture { 24_000 } else { 100_000 };
    if let Ok(output) = std::env::var(CHILD) {
        use nix::sys::resource::{Resource, setrlimit};
        setrlimit(Resource::RLIMIT_FSIZE, limit, limit).expect("lower is allowed");
        let config = Config { formats: vec![format], ..config(Path::new(&output)) };
        let pipeline = Pipeline::start(config).expect("writable");
        for count in 0..2000 {
            pipeline.push(pta(count, 0, 0x1000 * count, 512, 512 * count));
            if count % 200 == 199 {
                std::thread::sleep(Duration::from_millis(250));
            }
        }
        pipeline.push(pta(3000, 1, 0x1000, 512, 512));
        let summary = serde_json::to_vec(&pipeline.finish()).expect("serializes");
        fs::write(Path::new(&output).join("summary.json"), summary).expect("small enough");
        return None;
    }
    let status = again(test, CHILD, &output.display().to_string()).status().expect("a child");
    assert!(status.success(), "{status}: the limit must not end the process");
    Some(serde_json::from_slice(&fs::read(output.join("summary.json")).expect("written")).expect("json"))
}

#[test]
fn a_full_disk_ends_the_csv_at_its_last_whole_row() {
    let dir = tempfile::tempdir().expect("a directory");
    let test = "a_full_disk_ends_the_csv_at_its_last_whole_row";
    let Some(summary) = summary_with_full_disk(test, Format::Csv, dir.path()) else { return };
    let [full, other] = summary["files"].as_array().expect("files").as_slice() else { panic!("{summary}") };

    let path = Path::new(full["path"].as_str().expect("a path"));
    assert!(path.to_str().expect("text").ends_with(".incomplete.csv"), "{}", path.display());
    let text = fs::read_to_string(path).expect("renamed to what the report says");
    assert!(text.ends_with(",,\n") && text.len() < 100_000 && text.len() > 99_000);
    let rows = text.lines().count() - 1;
    assert_eq!(full["rows"], rows);
    assert_eq!(full["missing_rows"], 2000 - rows);
    assert_eq!(full["bytes"], text.len());
    assert_eq!(full["failure"]["action"], "write");
    assert!(full["failure"]["reason"].as_str().expect("a reason").contains("too large"), "{full}");

    assert_eq!(
        (&other["rows"], &other["missing_rows"], &other["failure"]),
        (&1.into(), &0.into(), &().into())
    );
}

#[test]
fn a_full_disk_ends_the_database_at_a_commit() {
    let dir = tempfile::tempdir().expect("a directory");
    let test = "a_full_disk_ends_the_database_at_a_commit";
    let Some(summary) = summary_with_full_disk(test, Format::Db, dir.path()) else { return };
    let [full, other] = summary["files"].as_array().expect("files").as_slice() else { panic!("{summary}") };

    let path = Path::new(full["path"].as_str().expect("a path"));
    assert_eq!(full["failure"]["action"], "write");
    let rows: u64 = query(path, "SELECT count(*) FROM memscope_dump")[0].parse().expect("a number");
    assert!((200..2000).contains(&rows), "{rows}");
    assert_eq!(full["rows"], rows);
    assert_eq!(full["missing_rows"], 2000 - rows);
    assert_eq!(
        (&other["rows"], &other["missing_rows"], &other["failure"]),
        (&1.into(), &0.into(), &().into())
    );
}

#[test]
fn a_full_disk_ends_the_capture_at_a_batch() {
    let dir = tempfile::tempdir().expect("a directory");
    let test = "a_full_disk_ends_the_capture_at_a_batch";
    let Some(summary) = summary_with_full_disk(test, Format::Capture, dir.path()) else { return };
    let [full, other] = summary["files"].as_array().expect("files").as_slice() else { panic!("{summary}") };

    let path = Path::new(full["path"].as_str().expect("a path"));
    assert!(path.to_str().expect("text").ends_with(".incomplete.arrows"), "{}", path.display());
    assert_eq!(full["failure"]["action"], "write");
    let mut read = open([path], Options::default()).expect("a stream");
    let rows = read.by_ref().count();
    assert_eq!(read.problems().total, 0, "it ends with a whole batch");
    assert!((100..2000).contains(&rows), "{rows}: {summary:#}");
    assert_eq!((&full["rows"], &full["missing_rows"]), (&rows.into(), &(2000 - rows).into()));
    assert_eq!(full["bytes"], fs::metadata(path).expect("there").len());
    assert_eq!(
        (&other["rows"], &other["missing_rows"], &other["failure"]),
        (&1.into(), &0.into(), &().into())
    );
}

#[test]
fn a_pipeline_writes_what_a_writer_writes() {
    let dir = tempfile::tempdir().expect("a directory");
    let rows = || (0..20_000).map(|n| pta(n, (n % 2) as u16, 0x1000 * n, 512, 512 * n));
    let direct = write(&dir.path().join("direct"), rows());
    let pipeline = Pipeline::start(config(&dir.path().join("piped"))).expect("writable");
    rows().for_each(|row| pipeline.push(row));
    let piped: Summary = pipeline.finish();
    assert!(piped.is_complete());
    assert_eq!((direct.len(), piped.files.len()), (2, 2));
    for (a, b) in direct.iter().zip(&piped.files) {
        assert_eq!(fs::read(&a.path).expect("readable"), fs::read(&b.path).expect("readable"));
    }
}
