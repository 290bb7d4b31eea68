//! One CSV file: only whole rows ever reach the file.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Write};

use crate::dump::COLUMNS;
use crate::dump::output::Dir;
use crate::dump::record::{Label, Owner, Record, Value};
use crate::dump::row::Row;
use crate::dump::stack::{self, StackStyle};
use crate::dump::table::{Closed, Stopped, TableFile};
use crate::text::sanitize;

/// Bytes gathered before they are written without waiting for a flush.
const CAPACITY: usize = 64 * 1024;

/// Ending of the name.
const EXTENSION: &str = "csv";

pub(in crate::dump) struct CsvFile {
    dir: Dir,
    stem: String,
    file: File,
    stacks: StackStyle,
    buffer: Vec<u8>,
    /// Where in the buffer each row ends.
    ends: Vec<usize>,
    /// Bytes in the file, all of them whole rows.
    written: u64,
}

impl CsvFile {
    /// Creates `<stem>.csv`.
    pub fn create(dir: Dir, stem: String, stacks: StackStyle) -> io::Result<Self> {
        let file = dir.create(&format!("{stem}.{EXTENSION}"))?;
        let mut buffer = Vec::with_capacity(CAPACITY + 4096);
        buffer.extend_from_slice(COLUMNS.join(",").as_bytes());
        buffer.push(b'\n');
        let ends = vec![buffer.len()];
        Ok(CsvFile { dir, stem, file, stacks, buffer, ends, written: 0 })
    }

    /// Cuts the file back to its last whole row and says in its name that there is an end missing.
    fn stop(&mut self, done: usize, error: io::Error) -> Stopped {
        let whole_rows = self.ends.partition_point(|end| *end <= done);
        let whole = whole_rows.checked_sub(1).and_then(|last| self.ends.get(last)).copied().unwrap_or(0);
        let header_lost = self.written == 0 && whole == 0;
        let lost_rows = (self.ends.len() - whole_rows) as u64 - u64::from(header_lost);
        self.written += whole as u64;
        self.buffer.clear();
        self.ends.clear();
        if let Err(error) = self.file.set_len(self.written) {
            tracing::warn!(
                "{}: cannot cut off the half-written last row: {error}",
                self.dir.path().display()
            );
        }
        let name = self.dir.mark_incomplete(&self.stem, EXTENSION);
        Stopped { reason: error.to_string(), name, lost_rows, removed_rows: 0, bytes: self.written }
    }
}

impl TableFile for CsvFile {
    fn put(&mut self, id: u64, row: &Row, record: &Record<'_>) -> Result<(), Stopped> {
        encode(&mut self.buffer, id, row, record, self.stacks);
        self.ends.push(self.buffer.len());
        if self.buffer.len() >= CAPACITY { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), Stopped> {
        let mut done = 0;
        while let Some(rest) = self.buffer.get(done..).filter(|rest| !rest.is_empty()) {
            match self.file.write(rest) {
                Ok(0) => return Err(self.stop(done, io::ErrorKind::WriteZero.into())),
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.stop(done, error)),
            }
        }
        self.written += done as u64;
        self.buffer.clear();
        self.ends.clear();
        Ok(())
    }

    fn close(mut self: Box<Self>) -> Result<Closed, Stopped> {
        self.flush()?;
        let name = format!("{}.{EXTENSION}", self.stem);
        Ok(Closed { name, bytes: self.written, removed_rows: 0 })
    }
}

/// Appends the row of a record. Its cells hold no quotation mark, and no line break except within stacks, so that
/// every reader agrees on where rows and cells end: the comparison of msMemScope refuses a whole file for one doubled
/// quotation mark.
fn encode(out: &mut Vec<u8>, id: u64, row: &Row, record: &Record<'_>, stacks: StackStyle) {
    // Writing to a vector can not fail.
    let _ = write!(out, "{id},{},{},", record.event, record.event_type);
    match &record.name {
        Label::None => out.extend_from_slice(b"N/A"),
        Label::Number(number) => {
            let _ = write!(out, "{number}");
        }
        Label::Text(name) => write_text(out, name),
        Label::Mark(text) => {
            out.push(b'"');
            out.extend_from_slice(cell_text(text).as_bytes());
            out.push(b'"');
        }
    }
    let _ = write!(out, ",{},{},{},", row.time, row.tgid, row.tid);
    let _ = match record.place {
        Some(place) => write!(out, "{place},"),
        None => write!(out, "N/A,"),
    };
    let _ = match record.ptr {
        Some(ptr) => write!(out, "0x{:016x},", ptr.0),
        None => write!(out, "N/A,"),
    };
    if !record.attrs.is_empty() {
        out.extend_from_slice(b"\"{");
        for (index, (key, value)) in record.attrs.iter().enumerate() {
            let _ = write!(out, "{}{key}:", if index > 0 { "," } else { "" });
            let _ = match value {
                Value::Number(number) => write!(out, "{number}"),
                Value::Signed(number) => write!(out, "{number}"),
                Value::Address(ptr) => write!(out, "0x{:016x}", ptr.0),
                Value::Word(word) => write!(out, "{word}"),
                Value::Text(text) => write!(out, "{}", attr_text(text)),
                Value::Owner(Owner { framework, module, labels }) => {
                    let _ = write!(out, "{framework}");
                    let labels = labels.map(attr_text);
                    module
                        .iter()
                        .copied()
                        .chain(labels.as_deref())
                        .try_for_each(|label| write!(out, "@{label}"))
                }
            };
        }
        out.extend_from_slice(b"}\"");
    }
    out.push(b',');
    if let Some(stack) = record.stack {
        let mut text = String::with_capacity(1024);
        stack::write(&mut text, stack, stacks, |out, line| out.push_str(&cell_text(line)));
        write_stack(out, &text);
        out.push(b',');
        text.clear();
        stack::write_native(&mut text, stack, stacks, |out, line| out.push_str(&cell_text(line)));
        write_stack(out, &text);
        out.push(b'\n');
    } else {
        out.extend_from_slice(b",\n");
    }
}

fn write_stack(out: &mut Vec<u8>, text: &str) {
    if !text.is_empty() {
        out.push(b'"');
        out.extend_from_slice(text.as_bytes());
        out.push(b'"');
    }
}

/// Appends a text of the target as a cell, in quotation marks where it needs them.
pub(in crate::dump) fn write_text(out: &mut Vec<u8>, text: &str) {
    let text = cell_text(text);
    let plain = text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.:/<>[]()*&~".contains(&b));
    let quote: &[u8] = if plain { b"" } else { b"\"" };
    out.extend_from_slice(quote);
    out.extend_from_slice(text.as_bytes());
    out.extend_from_slice(quote);
}

/// A text of the target as a cell: control characters and quotation marks are spelled out, and an apostrophe is put
/// before what a spreadsheet would take for a formula. [`decode_text`] is the inverse for what a target can send.
pub(super) fn cell_text(text: &str) -> Cow<'_, str> {
    let mut text = sanitize(text.as_bytes());
    if text.contains('"') {
        text = Cow::Owned(text.replace('"', QUOTE));
    }
    if looks_like_formula(&text) {
        text = Cow::Owned(format!("'{text}"));
    }
    text
}

/// How a quotation mark is spelled.
const QUOTE: &str = "\\u{22}";

/// Whether a spreadsheet could take the text for a formula, or if it could without the apostrophes before it.
fn looks_like_formula(text: &str) -> bool {
    text.trim_start_matches(|c: char| c == '\'' || c.is_whitespace())
        .starts_with(['=', '+', '-', '@', '\u{ff1d}', '\u{ff0b}', '\u{ff0d}', '\u{ff20}'])
}

/// The text that [`cell_text`] made a cell of.
pub(in crate::dump) fn decode_text(cell: &str) -> Cow<'_, str> {
    let text = match cell.strip_prefix('\'') {
        Some(rest) if looks_like_formula(cell) => rest,
        _ => cell,
    };
    if text.contains(QUOTE) { Cow::Owned(text.replace(QUOTE, "\"")) } else { Cow::Borrowed(text) }
}

/// A text of the target as a value within `{key:value,...}`, percent-encoded where it would end the value.
fn attr_text(text: &str) -> Cow<'_, str> {
    let text = sanitize(text.as_bytes());
    if !text.contains(['%', ',', '{', '}', '"']) {
        return text;
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            '%' => out.push_str("%25"),
            ',' => out.push_str("%2C"),
            '{' => out.push_str("%7B"),
            '}' => out.push_str("%7D"),
            '"' => out.push_str("%22"),
            other => out.push(other),
        }
    }
    Cow::Owned(out)
}
