//! Standard output of every verb: what becomes of it when it can not be written, and what its documents begin with.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

const DUMP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/dumps/leak6.csv");
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
        (vec!["leaks", DUMP, "--mstx-info", "step start"], true),
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
