//! What the files of all formats have in common.

use super::record::Record;
use super::row::Row;

/// The file of one table. After an error it takes nothing more.
pub(super) trait TableFile: Send {
    fn put(&mut self, id: u64, row: &Row, record: &Record<'_>) -> Result<(), Stopped>;

    /// Hands what was taken to the kernel: everything, or for formats of large batches what has waited for most of a
    /// second.
    fn flush(&mut self) -> Result<(), Stopped>;

    /// Ends the file.
    fn close(self: Box<Self>) -> Result<Closed, Stopped>;
}

/// What a file came to.
pub(super) struct Closed {
    /// Name of the file; of the last one where there are several.
    pub name: String,
    /// Bytes of all files.
    pub bytes: u64,
    /// Rows that were in files that are gone.
    pub removed_rows: u64,
}

/// Why and in what state a file was given up.
pub(super) struct Stopped {
    pub reason: String,
    /// Name of the file now.
    pub name: String,
    /// Rows that were taken but are not in the file.
    pub lost_rows: u64,
    /// Rows that were in files that are gone.
    pub removed_rows: u64,
    /// Bytes of the file.
    pub bytes: u64,
}
