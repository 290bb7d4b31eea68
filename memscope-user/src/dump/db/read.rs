//! One database in order of time. SQLite sorts, in memory that does not depend on the number of rows.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use rusqlite::config::DbConfig;
use rusqlite::limits::Limit;
use rusqlite::types::ValueRef;
use rusqlite::{Connection, OpenFlags};

use crate::dump::COLUMNS;
use crate::dump::parse::{Attrs, Dialect, Fields, Parser, RowError, Unheld};
use crate::dump::read::{Key, Keyed, Problem, ReadError, Source, failure};

use super::TABLE;

/// The first bytes of every SQLite database.
const MAGIC: &[u8; 16] = b"SQLite format 3\0";

/// Rows handed over at a time.
const BATCH: usize = 1024;

/// Bytes of the largest cell taken.
const CELL_MAX: i32 = 16 << 20;

pub(in crate::dump) fn is_database(file: &mut File) -> io::Result<bool> {
    let mut start = Vec::new();
    file.take(MAGIC.len() as u64).read_to_end(&mut start)?;
    Ok(start == MAGIC)
}

/// A dump in SQLite. A statement lives as long as its connection and no longer, so both stay on a thread of theirs.
pub(in crate::dump) struct DbSource {
    batch: std::vec::IntoIter<Result<Keyed, Problem>>,
    batches: Receiver<Vec<Result<Keyed, Problem>>>,
    path: Arc<Path>,
    /// Reads; until it is known how that ended.
    thread: Option<JoinHandle<()>>,
}

impl DbSource {
    pub fn open(path: Arc<Path>, unheld: Unheld) -> Result<Self, ReadError> {
        let connection = open(&path)?;
        let (sender, batches) = sync_channel(4);
        let of_thread = path.clone();
        let thread = std::thread::Builder::new()
            .name("read db".into())
            .spawn(move || {
                if let Err(error) = send_rows(&connection, &of_thread, unheld, &sender) {
                    let error = io::Error::other(said(&error));
                    // Nobody listens: nobody misses it.
                    let _ = sender.send(vec![Err(Problem::io(&of_thread, 0, &error))]);
                }
            })
            .map_err(ReadError::Thread)?;
        Ok(DbSource { batch: Vec::new().into_iter(), batches, path, thread: Some(thread) })
    }
}

impl Source for DbSource {
    fn next(&mut self) -> Option<Result<Keyed, Problem>> {
        loop {
            if let Some(row) = self.batch.next() {
                return Some(row);
            }
            self.batch = match self.batches.recv() {
                Ok(batch) => batch.into_iter(),
                Err(_) => {
                    let files = [self.path.to_path_buf()];
                    return failure(self.thread.take()?, &files).map(Err);
                }
            };
        }
    }
}

fn open(path: &Path) -> Result<Connection, ReadError> {
    let failed = |error| ReadError::Damaged { path: path.to_owned(), why: said(&error) };
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    // SQLite leaves files beside a database of which it must expect that it is being written. Without a log there is
    // nothing to expect, and the directory need not even be writable.
    let connection = match immutable(path) {
        Some(uri) if !has_log(path) => Connection::open_with_flags(uri, flags | OpenFlags::SQLITE_OPEN_URI),
        _ => Connection::open_with_flags(path, flags),
    };
    let connection = connection.map_err(failed)?;
    let columns = columns_of(&connection);
    if columns.map_err(failed)? != COLUMNS {
        return Err(ReadError::NoTable { path: path.to_owned(), table: TABLE });
    }
    Ok(connection)
}

/// What SQLite says, once: with its code it says it twice.
fn said(error: &rusqlite::Error) -> String {
    match error {
        rusqlite::Error::SqliteFailure(_, Some(text)) => text.clone(),
        other => other.to_string(),
    }
}

fn has_log(path: &Path) -> bool {
    let mut log = path.as_os_str().to_owned();
    log.push("-wal");
    std::fs::metadata(log).is_ok_and(|log| log.len() > 0)
}

fn immutable(path: &Path) -> Option<String> {
    let path = path.to_str()?.replace('%', "%25").replace('?', "%3f").replace('#', "%23");
    Some(format!("file:{path}?immutable=1"))
}

/// The columns of the table, in order; none when it is not there, or is no table.
fn columns_of(connection: &Connection) -> rusqlite::Result<Vec<String>> {
    // The file can be as hostile as a process.
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_TRUSTED_SCHEMA, false)?;
    connection.set_limit(Limit::SQLITE_LIMIT_LENGTH, CELL_MAX)?;
    connection.pragma_update(None, "cell_size_check", true)?;
    let sql = "SELECT info.name FROM sqlite_schema AS list, pragma_table_info(list.name) AS info \
               WHERE list.type = 'table' AND list.name = ?1 AND list.sql NOT LIKE 'CREATE VIRTUAL%' ORDER BY info.cid";
    let mut statement = connection.prepare(sql)?;
    statement.query_map([TABLE], |row| row.get(0))?.collect()
}

fn send_rows(
    connection: &Connection,
    path: &Arc<Path>,
    unheld: Unheld,
    sender: &SyncSender<Vec<Result<Keyed, Problem>>>,
) -> rusqlite::Result<()> {
    let columns: Vec<String> = COLUMNS.iter().take(11).map(|name| format!("\"{name}\"")).collect();
    let columns = columns.join(", ");
    let sql = format!("SELECT rowid, {columns} FROM {TABLE} ORDER BY \"Timestamp(ns)\", \"ID\", rowid");
    let mut statement = connection.prepare(&sql)?;
    let mut rows = statement.query([])?;
    let mut parser = Parser::new(Dialect::Db, unheld);
    let mut batch = Vec::with_capacity(BATCH);
    while let Some(row) = rows.next()? {
        let number = row.get::<_, i64>(0)?.unsigned_abs();
        match parse(&mut parser, row) {
            Ok(Some(parsed)) => batch.push(Ok(Keyed { key: Key { line: number, ..parsed.key }, ..parsed })),
            Ok(None) => continue,
            Err(error) => batch.push(Err(Problem::row(path, number, error))),
        }
        if batch.len() >= BATCH && sender.send(std::mem::take(&mut batch)).is_err() {
            return Ok(());
        }
    }
    // Nobody listens: nobody misses it.
    let _ = sender.send(batch);
    Ok(())
}

fn parse(parser: &mut Parser, row: &rusqlite::Row<'_>) -> Result<Option<Keyed>, RowError> {
    let mut numbers: [String; 11] = Default::default();
    for (column, number) in numbers.iter_mut().enumerate() {
        match row.get_ref(column + 1) {
            Ok(ValueRef::Integer(value)) => *number = value.to_string(),
            Ok(ValueRef::Real(value)) => *number = value.to_string(),
            _ => {}
        }
    }
    let cell = |column: usize| match row.get_ref(column + 1) {
        Ok(ValueRef::Text(text) | ValueRef::Blob(text)) => text,
        Ok(ValueRef::Integer(_) | ValueRef::Real(_)) => {
            numbers.get(column).map(String::as_bytes).unwrap_or_default()
        }
        _ => &[],
    };
    let values = json_values(cell(9))?;
    let mut attrs = Attrs::default();
    for (key, value) in &values {
        if !attrs.set(key.as_bytes(), value.as_bytes()) {
            parser.unheld(key.as_bytes());
        }
    }
    let parsed = parser.parse(&Fields {
        id: cell(0),
        event: cell(1),
        event_type: cell(2),
        name: cell(3),
        time: cell(4),
        pid: cell(5),
        tid: cell(6),
        device: cell(7),
        ptr: cell(8),
        attrs,
        python: cell(10),
        native: cell(11),
    })?;
    Ok(parsed.map(|parsed| Keyed { key: Key { time: parsed.row.time.0, id: parsed.id, line: 0 }, parsed }))
}

fn json_values(attr: &[u8]) -> Result<Vec<(String, String)>, RowError> {
    if attr.is_empty() {
        return Ok(Vec::new());
    }
    let object: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(attr).map_err(|error| RowError::Json(error.to_string()))?;
    let values = object.into_iter().map(|(key, value)| match value {
        serde_json::Value::String(text) => (key, text),
        other => (key, other.to_string()),
    });
    Ok(values.collect())
}
