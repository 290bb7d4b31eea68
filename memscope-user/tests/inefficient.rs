//! Inefficient memory, from dumps: msMemScope's verdicts, and that tracing live says the same.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memscope::analysis::Analysis;
use memscope::analysis::inefficient::{Config, Finding, Inefficient, Report, Rules};
use memscope::dump::read::{NumberedRow, Options, open};
use memscope::dump::{Fact, Format, Framework, Row, Writer, rows_of};
use memscope::model::{
    Access, AccessKind, Alloc, AllocationId, DeviceId, DevicePtr, Event, EventKind, Free, Ledger, Nanos,
    Pool, StepRule, Tgid, Tid,
};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures").join(name)
}

/// What was found, and the patterns of each block in the order in which they were found, as msMemScope lists them.
fn analyse(rows: impl Iterator<Item = NumberedRow>, config: Config) -> (Report, BTreeMap<u64, String>) {
    let mut inefficient = Inefficient::new(config);
    let mut verdicts: BTreeMap<u64, Vec<&str>> = BTreeMap::new();
    let mut note = |finding: &Finding| {
        let id = finding.allocation_id.expect("dumps have ids").0;
        let patterns = verdicts.entry(id).or_default();
        let name = finding.pattern.name();
        if !patterns.contains(&name) {
            patterns.push(name);
        }
    };
    rows.for_each(|row| inefficient.observe_row(&row, &mut note));
    inefficient.finish(&mut note);
    let verdicts = verdicts.into_iter().map(|(id, patterns)| (id, patterns.join(","))).collect();
    (inefficient.report(), verdicts)
}

fn number(text: &str) -> u64 {
    text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// The `inefficient_type` of the rows of a dump, by allocation.
fn expected_of(dump: &str) -> BTreeMap<u64, String> {
    dump.lines()
        .filter_map(|line| {
            let (before, verdict) = line.split_once("inefficient_type:")?;
            let (_, id) = before.split_once("allocation_id:")?;
            let (id, _) = id.split_once(',')?;
            let (verdict, _) = verdict.split_once('}')?;
            Some((number(id), verdict.to_owned()))
        })
        .collect()
}

#[test]
fn verdicts_are_those_of_msmemscope_offline() {
    let mut rows = open([fixture("dumps/ineff_in.csv")], Options::default()).expect("a dump");
    let (_, verdicts) = analyse(rows.by_ref(), Config::new(Rules::Memscope { idle: 5 }));
    assert_eq!(rows.problems().total, 0);
    let expected = expected_of(&fs::read_to_string(fixture("dumps/ineff_out_5.csv")).expect("there"));
    assert_eq!(expected.len(), 2, "{expected:?}");
    assert_eq!(verdicts, expected);
}

/// Rows of `peer.tsv`, and its verdicts.
fn peer() -> (Vec<NumberedRow>, BTreeMap<u64, String>) {
    let text = fs::read_to_string(fixture("inefficient/peer.tsv")).expect("there");
    let lines: Vec<Vec<&str>> =
        text.lines().filter(|line| !line.starts_with('#')).map(|line| line.split('\t').collect()).collect();
    let mut unfolded: Vec<&[&str]> = Vec::new();
    let mut at = 0;
    while at < lines.len() {
        match lines[at][..] {
            ["repeat", times] => {
                let length = lines[at..].iter().position(|line| line[0] == "until").expect("an end");
                for _ in 0..number(times) {
                    unfolded.extend(lines[at + 1..at + length].iter().map(Vec::as_slice));
                }
                at += length + 1;
            }
            _ => {
                unfolded.push(&lines[at]);
                at += 1;
            }
        }
    }
    let mut expected = BTreeMap::new();
    let rows = unfolded.into_iter().enumerate().map(|(id, fields)| {
        let [event, op, pool, allocation, size, ptr, verdict] = fields[..] else { panic!("{fields:?}") };
        let name = || Arc::from(op);
        let pool = if pool == "HAL" { Pool::Hal } else { Pool::Pta };
        let ptr = || DevicePtr(u64::from_str_radix(ptr.trim_start_matches("0x"), 16).expect("an address"));
        let fact = match event {
            "begin" => Fact::OpBegin { framework: Framework::Aten, name: name() },
            "end" => Fact::OpEnd { framework: Framework::Aten, name: name() },
            "malloc" => Fact::Event(EventKind::Alloc(Alloc {
                pool,
                device: None,
                ptr: ptr(),
                size: number(size),
                totals: None,
                driver: None,
                stack: None,
            })),
            "free" => Fact::Event(EventKind::Free(Free {
                pool,
                device: None,
                ptr: ptr(),
                size: Some(number(size)),
                totals: None,
            })),
            "write" => Fact::Event(EventKind::Access(Access {
                pool: Some(pool),
                ptr: ptr(),
                size: number(size),
                kind: AccessKind::Write,
                op: Some(name()),
            })),
            other => panic!("{other}"),
        };
        let mut row = Row::new(Nanos(1000 * id as u64), Tgid(4536), Tid(4536), fact);
        row.device = Some(DeviceId(0));
        row.allocation_id = (allocation != "-").then(|| AllocationId(number(allocation)));
        if verdict != "-" {
            expected.insert(number(allocation), verdict.to_owned());
        }
        NumberedRow { id: id as u64, file: 0, line: id as u64 + 2, negative_size: false, row }
    });
    let rows = rows.collect();
    (rows, expected)
}

#[test]
fn verdicts_are_those_of_msmemscope_online() {
    let (rows, expected) = peer();
    assert_eq!((rows.len(), expected.len()), (12473, 5));
    let (report, verdicts) = analyse(rows.into_iter(), Config::new(Rules::MEMSCOPE));
    assert_eq!(verdicts, expected);

    let [pool] = &report.pools[..] else { panic!("{:?}", report.pools) };
    assert_eq!(
        (pool.pool, pool.device, pool.blocks, pool.operators),
        (Pool::Pta, Some(DeviceId(0)), 7, 3115)
    );
    // `filler`, `idle` and `tick`.
    assert_eq!(pool.peak_bytes, 7_340_544 + 8_389_120 + 512);
    let groups: Vec<_> = pool
        .groups
        .iter()
        .map(|group| (group.pattern.name(), group.findings, group.largest, group.saved_at_peak))
        .collect();
    assert_eq!(
        groups,
        [
            // `filler` is the only one of them that is alive at the peak.
            ("late_deallocation", 3, 7_340_544, 7_340_544),
            // While `idle` is used, as much is alive as while it is not.
            ("temporary_idleness", 1, 8_389_120, 0),
            ("early_allocation", 1, 5_243_392, 0),
        ]
    );
    let idle = &pool.groups[1].examples[0];
    assert_eq!((idle.operators, idle.to.call - idle.from.call), (3101, 3102));
    assert_eq!((idle.wasted, idle.op.as_deref()), (3101 * 8_389_120, Some("aten.empty.memory_format")));
    let late = &pool.groups[0].examples[1];
    // Last `add_`, `empty` of `filler`, free.
    assert_eq!((late.from.call, late.call_between, late.to.call), (13, Some(14), 15));
}

/// What the peer's script does, as live tracing reports it: operators without an end, accesses by address, and none of
/// `empty`, for which the wheels call nothing.
fn live_events() -> Vec<Event> {
    let (rows, _) = peer();
    let mut events: Vec<Event> = rows
        .into_iter()
        .filter_map(|numbered| {
            let kind = match numbered.row.fact {
                Fact::OpBegin { name, .. } if name.contains("empty") => return None,
                Fact::Event(EventKind::Access(Access { op: Some(op), .. })) if op.contains("empty") => {
                    return None;
                }
                Fact::OpBegin { name, .. } => EventKind::Op { name },
                Fact::Event(EventKind::Alloc(alloc)) => {
                    EventKind::Alloc(Alloc { device: Some(DeviceId(0)), ..alloc })
                }
                Fact::Event(kind) => kind,
                _ => return None,
            };
            Some(Event { time: numbered.row.time, tgid: numbered.row.tgid, tid: numbered.row.tid, kind })
        })
        .collect();
    // A block whose free is lost, one that the end of the process takes, and a free of one that was there before.
    let (tgid, tid) = (Tgid(4536), Tid(4537));
    let mut push = |kind| {
        let time = Nanos(1_000_000_000 + 1000 * events.len() as u64);
        events.push(Event { time, tgid, tid, kind });
    };
    let alloc = |ptr, size| {
        let (pool, device) = (Pool::Pta, Some(DeviceId(0)));
        EventKind::Alloc(Alloc {
            pool,
            device,
            ptr: DevicePtr(ptr),
            size,
            totals: None,
            driver: None,
            stack: None,
        })
    };
    let access = |ptr, kind| {
        let (pool, op) = (Some(Pool::Pta), Some(Arc::from("aclnnMm")));
        EventKind::Access(Access { pool, ptr: DevicePtr(ptr), size: 16, kind, op })
    };
    let free = |ptr| {
        let pool = Pool::Pta;
        EventKind::Free(Free { pool, device: None, ptr: DevicePtr(ptr), size: Some(16), totals: None })
    };
    push(alloc(0x1000, 2048));
    push(alloc(0x1000, 1024));
    push(alloc(0x8000, 4096));
    push(free(0x77));
    push(EventKind::Op { name: Arc::from("aclnnMm") });
    push(access(0x1000, AccessKind::Read));
    push(access(0x8010, AccessKind::Write));
    push(free(0x1000));
    push(EventKind::Exit);
    events
}

#[test]
fn live_and_from_a_dump_the_findings_are_the_same() {
    for rules in [Rules::MEMSCOPE, Rules::DRGPUM] {
        let dir = tempfile::tempdir().expect("a directory");
        let formats = vec![Format::Csv];
        let config = memscope::dump::Config {
            output: dir.path().to_owned(),
            formats,
            stacks: memscope::dump::StackStyle::Lines,
            max_size: None,
            caller: None,
        };
        let mut writer = Writer::create(config).expect("writable");
        let mut ledger = Ledger::new(StepRule::default());
        let mut live = Inefficient::new(Config::new(rules));
        for event in live_events() {
            let change = ledger.apply(&event);
            live.observe(&event, &change, &ledger);
            rows_of(&event, &change, &ledger, |row| writer.write(&row));
        }
        writer.finish();
        live.finish(&mut |_| {});
        let live = live.report();
        assert!(live.pools[0].groups.len() >= 3, "{live:?}");

        let rows = open([dir.path()], Options::default()).expect("a dump");
        let (offline, verdicts) = analyse(rows, Config::new(rules));
        assert_eq!(offline, live);
        if rules == Rules::MEMSCOPE {
            let (_, mut expected) = peer();
            // Some block was freed before these were used, even though nobody knows which.
            expected.extend([12, 13].map(|id| (id, "early_allocation".to_owned())));
            assert_eq!(verdicts, expected, "as msMemScope from within");
        }
    }
}
