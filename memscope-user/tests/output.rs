//! Standard output of every verb: what becomes of it when it can not be written, and what its documents begin with.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

const DUMP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/dumps/leak6.csv");
const MARKS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/dumps/leaks_in.csv");
const INEFFICIENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/dumps/ineff_in.csv");
const FORMATS: &str = include_str!("../../docs/output-formats.md");

fn tracer(args: &[&str], stdout: impl Into<Stdio>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_memscope-trace"));
    command.args(args).stdin(Stdio::null()).stdout(stdout).stderr(Stdio::piped());
    command.spawn().and_then(|child| child.wait_with_output()).expect("the tracer runs")
}

/// What each verb is called with to print text. Where it is followed by `true`, `--json` prints a document.
fn verbs(output: &Path) -> Vec<(Vec<&str>, bool)> {
    let output = output.to_str().expect("a plain name");
    vec![
        (vec!["--help"], false),
        (vec!["--version"], false),
        (vec!["leaks", DUMP], true),
        (vec!["leaks", MARKS, "--mstx-info", "test"], true),
        (vec!["compare", DUMP, DUMP, "-o", output], true),
        (vec!["compare", DUMP, "--steps", "2,3"], true),
        (vec!["inefficient", DUMP], true),
        (vec!["decompose", DUMP], true),
        (vec!["oom", DUMP], true),
        (vec!["convert", DUMP, output], false),
        (vec!["probes"], true),
        (vec!["check"], true),
    ]
}

fn with_json<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [args, &["--json"]].concat()
}

#[test]
fn a_full_disk_is_an_error_and_no_panic() {
    let dir = tempfile::tempdir().expect("a directory");
    for (args, has_json) in verbs(dir.path()) {
        for args in [Some(args.clone()), has_json.then(|| with_json(&args))].into_iter().flatten() {
            let full = File::options().write(true).open("/dev/full").expect("there");
            let output = tracer(&args, full);
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
            assert!(said.contains("cannot write to standard output: No space left"), "{args:?}: {said}");
            assert!(!said.contains("panicked"), "{args:?}: {said}");
        }
    }
}

#[test]
fn a_reader_that_has_gone_is_no_error() {
    let dir = tempfile::tempdir().expect("a directory");
    for (args, has_json) in verbs(dir.path()) {
        for args in [Some(args.clone()), has_json.then(|| with_json(&args))].into_iter().flatten() {
            let (reader, writer) = std::io::pipe().expect("a pipe");
            drop(reader);
            let output = tracer(&args, writer);
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(0), "{args:?}: {said}");
            assert!(!said.contains("memscope-trace:") && !said.contains("panicked"), "{args:?}: {said}");
        }
    }
}

/// What was found stands, whoever reads of it.
#[test]
fn a_reader_that_has_gone_does_not_swallow_the_findings() {
    for args in [
        vec!["leaks", DUMP, "--fail-on", "leaks"],
        vec!["inefficient", INEFFICIENT, "--fail-on", "inefficient"],
    ] {
        for args in [args.clone(), with_json(&args)] {
            let (reader, writer) = std::io::pipe().expect("a pipe");
            drop(reader);
            let output = tracer(&args, writer);
            assert_eq!(output.status.code(), Some(1), "{args:?}");
        }
    }
}

/// Who names marks asks about them alone.
#[test]
fn marks_that_are_not_there_are_no_answer() {
    let of = |args: &[&str]| {
        let output = tracer(&[&["leaks", MARKS, "--mstx-info"], args].concat(), Stdio::piped());
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    assert_eq!(of(&["test"]).0, Some(0));
    for args in [["test", "--start-index", "9"].as_slice(), &["tset"]] {
        let (code, says) = of(args);
        assert_eq!(code, Some(2), "{args:?}: {says}");
        assert!(says.contains("three are needed from index"), "{args:?}: {says}");
    }
    assert!(of(&["tset"]).1.contains("others are \"test\" (4x)"));
}

#[test]
fn what_can_not_be_compared_is_an_error() {
    let dir = tempfile::tempdir().expect("a directory");
    let (header, output) = (dir.path().join("header.csv"), dir.path().join("out"));
    let text = fs::read_to_string(DUMP).expect("there");
    fs::write(&header, text.lines().next().unwrap_or_default()).expect("room");
    let [header, output] = [&header, &output].map(|path| path.to_str().expect("a plain name"));
    for (args, reason) in [
        (vec!["compare", header, DUMP, "-o", output], "header.csv has no rows"),
        (vec!["compare", DUMP, header, "-o", output], "header.csv has no rows"),
        (vec!["compare", DUMP, "--steps", "3,900"], "leak6.csv has steps 1 to 6, not 900"),
        (
            vec!["compare", DUMP, DUMP, "--steps", "3,900", "-o", output],
            "leak6.csv has steps 1 to 6, not 900",
        ),
    ] {
        let done = tracer(&args, Stdio::piped());
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.contains(reason), "{args:?}: {said}");
    }
}

/// A search for text finds nothing in a database, wherever it lies.
#[test]
fn rows_are_searched_for_where_they_are_text() {
    for (name, is_text) in [("leak6.csv", true), ("leak6.db", false)] {
        let dir = tempfile::tempdir().expect("a directory");
        let extension = name.rsplit('.').next().expect("one");
        let fixture = Path::new(DUMP).with_file_name(name);
        fs::copy(fixture, dir.path().join(format!("memscope_dump_1.{extension}"))).expect("room");
        let output = tracer(&["leaks", dir.path().to_str().expect("a plain name")], Stdio::piped());
        let says = String::from_utf8_lossy(&output.stdout);
        assert_eq!(says.contains("grep -rn"), is_text, "{name}: {says}");
        assert!(says.contains("\nNext: see what your code keeps"), "{name}: {says}");
    }
}

/// What is not told in what is written is told by whoever wrote it.
#[test]
fn conversion_invents_nothing_and_tells_what_it_drops() {
    const ROWS: &str = r#"
1,MALLOC,HAL,N/A,5,1,1,0,0x10,"{allocation_id:1,addr:0x10,size:7,page_type:huge,alloc_type:alloc}",,
2,MALLOC,HAL,N/A,6,1,1,0,0x20,"{addr:32,size:7,owner:,MID:7}",,
3,MALLOC,HAL,N/A,7,1,1,0,0x30,"{addr:48,size:7}",,
4,ACCESS,READ,N/A,8,1,1,0,0x10,"{addr:16,size:7,type:HAL,dtype:float,shape:[1,2,]}",,
5,ACCESS,READ,N/A,9,1,1,0,0x10,"{addr:16,size:7,type:HAL,dtype:float}",,
6,KERNEL_LAUNCH,KERNEL_LAUNCH,k,10,1,1,0,N/A,,,
7,SNAPSHOT,MEMORY,N/A,11,1,1,0,N/A,,,
"#;
    let dir = tempfile::tempdir().expect("a directory");
    let (input, output) = (dir.path().join("in.csv"), dir.path().join("out"));
    let header = fs::read_to_string(DUMP).expect("there").lines().next().unwrap_or_default().to_owned();
    fs::write(&input, header + ROWS).expect("room");
    let [input, output] = [&input, &output].map(|path| path.to_str().expect("a plain name"));
    let done = tracer(&["convert", input, output, "--format", "csv"], Stdio::piped());
    let says = String::from_utf8_lossy(&done.stdout);
    assert!(
        says.ends_with("what is written: SNAPSHOT,MEMORY (1 row), dtype (2 rows), shape (1 row)\n"),
        "{says}"
    );
    let written = fs::read_to_string(says.split(": ").next().expect("a path")).expect("a file");
    let attrs: Vec<&str> =
        written.lines().skip(1).map(|row| row.split('{').nth(1).unwrap_or_default()).collect();
    assert!(attrs[0].ends_with(r#"size:7,page_type:huge,alloc_type:alloc}",,"#), "{attrs:?}");
    assert!(attrs[1].ends_with(r#"size:7,owner:CANN@RUNTIME}",,"#), "{attrs:?}");
    assert!(attrs[2].ends_with(r#"size:7}",,"#), "{attrs:?}");
    assert_eq!(attrs[5], "", "no stream was named");
}

/// A section, with its table of fields.
fn documented(heading: &str) -> String {
    let section = FORMATS.split(&format!("\n## {heading}\n")).nth(1).expect("the section");
    section.split("\n## ").next().unwrap_or_default().to_owned()
}

#[test]
fn every_document_says_what_it_is_and_has_documented_fields_only() {
    let dir = tempfile::tempdir().expect("a directory");
    let texts = [documented("The report as JSON"), documented("Documents of other verbs")];
    for (args, _) in verbs(dir.path()).into_iter().filter(|(_, has_json)| *has_json) {
        let output = tracer(&with_json(&args), Stdio::piped());
        let document: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(document["schema"], 1, "{args:?}");
        assert_eq!(document["tool"]["name"], "memscope-trace", "{args:?}");
        let is_report = document.get("leaks_analysed").is_some();
        let text = &texts[usize::from(!is_report)];
        let verb = format!("| `{}", args[0]);
        let of_verb = |row: &&str| is_report || row.starts_with("| all |") || row.starts_with(&verb);
        let named = |field: &str| {
            let names = [format!("`{field}`"), format!("`{field}[]`")];
            text.lines().filter(of_verb).any(|row| {
                let fields = row.split('|').nth(if is_report { 1 } else { 2 }).unwrap_or_default();
                names.iter().any(|name| fields.contains(name.as_str()))
            })
        };
        let fields = document.as_object().expect("an object").keys();
        let missing: Vec<&String> = fields.filter(|field| !named(field)).collect();
        assert!(missing.is_empty(), "{args:?}: {missing:?} are not in docs/output-formats.md");
    }
    assert!(fs::read_dir(dir.path().join("compare")).is_ok(), "compare wrote its table where it was told to");
}
