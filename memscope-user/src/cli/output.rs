//! Standard output. Everything that a verb prints goes through here, so that a full disk or a closed pipe is an error to
//! be told and not a panic.

use std::{
    fmt,
    io::{self, IsTerminal, Write},
};

use serde::Serialize;

use crate::report::document::{Document, SCHEMA, Tool};

/// What could not be written is lost: the caller must hear of it.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output: {0}")]
struct Lost(#[source] io::Error);

/// A document of a verb's own, behind what every document begins with.
#[derive(Serialize)]
struct Versioned<'a, T> {
    schema: u32,
    tool: Tool,
    #[serde(flatten)]
    content: &'a T,
}

pub(super) fn print(text: impl fmt::Display) -> anyhow::Result<()> {
    write(text.to_string().as_bytes())
}

/// The report of live tracing, which is versioned already.
pub(super) fn print_report(document: &Document) -> anyhow::Result<()> {
    print_json(document)
}

/// A document that is not that report.
pub(super) fn print_document(content: &impl Serialize) -> anyhow::Result<()> {
    print_json(&Versioned { schema: SCHEMA, tool: Tool::this(), content })
}

fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    write(&text)
}

/// Whether a reader sees colours there and has not declined them.
pub(super) fn has_colour() -> bool {
    io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

fn write(bytes: &[u8]) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        // Whoever read our output has had enough; what was found stands.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        outcome => Ok(outcome.map_err(Lost)?),
    }
}
