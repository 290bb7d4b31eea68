//! Dumps as SQLite databases, as MindStudio Insight opens them: one table of the twelve columns.

mod read;
mod write;

pub(super) use read::{DbSource, is_database};
pub(super) use write::DbFile;

const TABLE: &str = "memscope_dump";

/// Declared types of the twelve columns, in order.
const TYPES: [&str; 12] = [
    "INTEGER", "TEXT", "TEXT", "TEXT", "INTEGER", "INTEGER", "INTEGER", "TEXT", "TEXT", "TEXT", "TEXT",
    "TEXT",
];
