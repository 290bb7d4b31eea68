//! Comparing dumps.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use memscope::analysis::compare::{Level, Method, Sequences, Table, table};
use memscope::dump::read::{Options, open};
use memscope::dump::write_comparison;
use memscope::model::Pool;

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
