//! One database. Rows are committed in bulk, at the latest with each flush: a commit for each row, as msMemScope does
//! it, takes 4 ms.

use std::fmt::Write as _;
use std::io;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, params};

use crate::dump::COLUMNS;
use crate::dump::output::Dir;
use crate::dump::record::{Label, Owner, Record, Value};
use crate::dump::row::Row;
use crate::dump::stack::{self, StackStyle};
use crate::dump::table::{Closed, Stopped, TableFile};
use crate::text::sanitize;

use super::{TABLE, TYPES};

/// Ending of the name.
const EXTENSION: &str = "db";

/// Rows of one commit, at most.
const COMMIT_ROWS: u64 = 10_000;

/// How long to wait for a reader, as msMemScope does.
const BUSY_TIMEOUT: Duration = Duration::from_millis(5000);

pub(in crate::dump) struct DbFile {
    dir: Dir,
    stem: String,
    /// `None` once it is closed.
    connection: Option<Connection>,
    insert: String,
    stacks: StackStyle,
    attrs: String,
    stack: String,
    native: String,
    /// Rows since the last commit.
    uncommitted: u64,
}

impl DbFile {
    /// Creates `<stem>.db`.
    pub fn create(dir: Dir, stem: String, stacks: StackStyle) -> io::Result<Self> {
        let name = format!("{stem}.{EXTENSION}");
        // SQLite opens by path: the file is made here, exclusively and for its owner alone, and SQLite takes no path
        // with a symbolic link in it.
        drop(dir.create(&name)?);
        let path = dir.real_path()?.join(&name);
        let connection = open(&path).map_err(io::Error::other)?;
        let places = vec!["?"; COLUMNS.len()].join(",");
        let insert = format!("INSERT INTO {TABLE} VALUES ({places})");
        let (attrs, stack, native) = Default::default();
        Ok(DbFile {
            dir,
            stem,
            connection: Some(connection),
            insert,
            stacks,
            attrs,
            stack,
            native,
            uncommitted: 0,
        })
    }

    fn insert(&mut self, id: u64, row: &Row, record: &Record<'_>) -> rusqlite::Result<()> {
        let Some(connection) = &self.connection else { return Ok(()) };
        if self.uncommitted == 0 {
            connection.execute_batch("BEGIN")?;
        }
        self.uncommitted += 1;
        let mut insert = connection.prepare_cached(&self.insert)?;
        let name = match &record.name {
            Label::None => "N/A".to_owned(),
            Label::Number(number) => number.to_string(),
            Label::Text(name) => sanitize(name.as_bytes()).into_owned(),
            Label::Mark(text) => format!("\"{}\"", sanitize(text.as_bytes())),
        };
        let place = record.place.map_or_else(|| "N/A".to_owned(), |place| place.to_string());
        let ptr = record.ptr.map_or_else(|| "N/A".to_owned(), |ptr| format!("0x{:016x}", ptr.0));
        json_of(&mut self.attrs, record);
        self.stack.clear();
        self.native.clear();
        if let Some(stack) = record.stack {
            stack::write(&mut self.stack, stack, self.stacks, |out, line| out.push_str(line));
            stack::write_native(&mut self.native, stack, self.stacks, |out, line| out.push_str(line));
        }
        insert.execute(params![
            id as i64,
            record.event,
            record.event_type,
            name,
            row.time.0 as i64,
            row.tgid.0,
            row.tid.0,
            place,
            ptr,
            self.attrs,
            self.stack,
            self.native,
        ])?;
        Ok(())
    }

    fn commit(&mut self) -> rusqlite::Result<()> {
        if let Some(connection) = &self.connection
            && self.uncommitted > 0
        {
            connection.execute_batch("COMMIT")?;
            self.uncommitted = 0;
        }
        Ok(())
    }

    /// Gives up what is not committed and says in the name of the file that there is an end missing.
    fn stop(&mut self, error: rusqlite::Error) -> Stopped {
        if let Some(connection) = self.connection.take() {
            // Closing rolls back.
            drop(connection);
        }
        let name = format!("{}.{EXTENSION}", self.stem);
        // Committed rows can still be in the log beside the file when there was no room to move them. Only under its
        // old name will the file be read together with them.
        let has_log = self.dir.size_of(&format!("{name}-wal")).is_some_and(|bytes| bytes > 0);
        let name = if has_log { name } else { self.dir.mark_incomplete(&self.stem, EXTENSION) };
        let bytes = self.dir.size_of(&name).unwrap_or(0);
        Stopped { reason: error.to_string(), name, lost_rows: self.uncommitted, removed_rows: 0, bytes }
    }
}

fn open(path: &std::path::Path) -> rusqlite::Result<Connection> {
    let flags =
        OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_NOFOLLOW;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    // A killed tracer loses nothing that is committed; only a crash of the machine could.
    connection.pragma_update(None, "synchronous", "OFF")?;
    let columns: Vec<String> =
        COLUMNS.iter().zip(TYPES).map(|(name, declared)| format!("\"{name}\" {declared}")).collect();
    connection.execute_batch(&format!("CREATE TABLE {TABLE} ({})", columns.join(", ")))?;
    Ok(connection)
}

impl TableFile for DbFile {
    fn put(&mut self, id: u64, row: &Row, record: &Record<'_>) -> Result<(), Stopped> {
        self.insert(id, row, record).map_err(|error| self.stop(error))?;
        if self.uncommitted >= COMMIT_ROWS { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), Stopped> {
        self.commit().map_err(|error| self.stop(error))
    }

    fn close(mut self: Box<Self>) -> Result<Closed, Stopped> {
        self.flush()?;
        if let Some(connection) = self.connection.take()
            && let Err((connection, error)) = connection.close()
        {
            drop(connection);
            return Err(self.stop(error));
        }
        let name = format!("{}.{EXTENSION}", self.stem);
        let bytes = self.dir.size_of(&name).unwrap_or(0);
        Ok(Closed { name, bytes, removed_rows: 0 })
    }
}

/// Column Attr: an object in which every value is a string.
fn json_of(out: &mut String, record: &Record<'_>) {
    out.clear();
    out.push('{');
    for (index, (key, value)) in record.attrs.iter().enumerate() {
        let separator = if index > 0 { "," } else { "" };
        // Writing to a string can not fail.
        let _ = write!(out, "{separator}\"{key}\":");
        let _ = match value {
            Value::Number(number) => write!(out, "\"{number}\""),
            Value::Signed(number) => write!(out, "\"{number}\""),
            Value::Address(ptr) => write!(out, "\"0x{:016x}\"", ptr.0),
            Value::Word(word) => write!(out, "\"{word}\""),
            Value::Text(text) => write!(out, "{}", json_string(text)),
            Value::Owner(Owner { framework, module, labels }) => {
                let labels = [Some(*framework), *module, *labels];
                write!(out, "{}", json_string(&labels.into_iter().flatten().collect::<Vec<_>>().join("@")))
            }
        };
    }
    out.push('}');
}

fn json_string(text: &str) -> String {
    serde_json::Value::from(sanitize(text.as_bytes())).to_string()
}
