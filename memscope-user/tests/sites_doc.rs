//! docs/sites.md is the catalogue in prose order: made from it, and checked against it here.
//! `UPDATE_DOCS=1 cargo test --test sites_doc` writes it anew.

use std::{fmt::Write, fs, path::Path};

use memscope::probes::catalogue::{At, CATALOGUE, Class, Shape};

fn markdown() -> String {
    let mut text = String::from(
        "# Sites\n\n\
         Every function that memscope-trace probes, where it is found. Made from the catalogue \
         (`memscope-user/src/probes/catalogue.rs`); `memscope-trace probes -p PID` shows where they are in a \
         process, `--file LIB` where in a file.\n\n\
         Entry: the arguments are read when the function is entered. Return: its result is read when it returns.\n",
    );
    let classes = [
        (Class::Memory, "Allocations and frees"),
        (Class::Mark, "Marks and ranges"),
        (Class::Op, "Operators"),
        (Class::Launch, "Kernel launches (`--level kernel`)"),
        (Class::Access, "Which operator uses which block (`--analysis inefficient`, `decompose`)"),
        (Class::LaunchAccess, "Which kernel uses which block (the same with `--level kernel`)"),
        (Class::Queue, "Which call the task queue runs an operator for (where `TASK_QUEUE_ENABLE=2`)"),
        (Class::Context, "Devices, process, libraries"),
    ];
    for (class, title) in classes {
        let _ = write!(
            text,
            "\n## {title}\n\n| site | expected in | found by | read at | instead of | since |\n|---|---|---|---|---|---|\n"
        );
        for probe in CATALOGUE.iter().filter(|p| p.class == class) {
            let libraries =
                if probe.libraries.is_empty() { "any library".into() } else { probe.libraries.join(", ") };
            let by = match probe.at {
                At::Symbol(symbol) if symbol == probe.site => "its symbol".to_owned(),
                At::Symbol(symbol) => format!("`{symbol}`"),
                At::TorchNpu(_) => "what its code does (stripped)".to_owned(),
                At::MstxPython(_) => "the module's method table (stripped)".to_owned(),
            };
            let when = match probe.shape {
                Shape::EnterReturn { .. } | Shape::Mark { id: true, .. } => "entry and return",
                _ => "entry",
            };
            let _ = writeln!(
                text,
                "| {} | {libraries} | {by} | {when} | {} | {} |",
                probe.site,
                probe.unless.join(", "),
                probe.since
            );
        }
    }
    text.push_str(
        "\nA site with something under \"instead of\" is attached only while none of those is found: it stands in for them.\n",
    );
    text
}

#[test]
fn the_document_is_the_catalogue() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/sites.md");
    let made = markdown();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, &made).expect("docs/ is writable");
    }
    assert_eq!(
        fs::read_to_string(&path).unwrap_or_default(),
        made,
        "run UPDATE_DOCS=1 cargo test --test sites_doc"
    );
}
