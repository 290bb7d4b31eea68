//! Damaged dumps of every format: what can not be read is a problem or an error, never a panic, an endless loop or a huge
//! allocation; and what can be read can be analysed and shown, whatever it says.

use std::fs;

use crate::exercise;
use crate::fuzzing::{Random, damage, rounds};
use memscope::dump::Format;

/// Exercises damaged copies of one of these files.
fn fuzz(what: &str, count: u64, name: &str, words: &[&[u8]], pick: impl Fn(&mut Random) -> Vec<u8>) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join(name);
    rounds(what, count, |random| {
        let mut bytes = pick(random);
        damage(&mut bytes, words, random);
        fs::write(&path, &bytes).expect("room");
        exercise::dump(&path);
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
    let files = exercise::dumps(Format::Csv);
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
    let files = exercise::dumps(Format::Db);
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
    let files = exercise::dumps(Format::Capture);
    let words: [&[u8]; 6] =
        [&[0xff; 8], &[0; 8], &[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0], b"MALLOC", b"FREE", b"memscope"];
    fuzz("capture", 1500, "memscope_dump_1.arrows", &words, |random| random.pick(&files).clone());
}
