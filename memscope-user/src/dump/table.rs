//! What the files of all formats have in common.

use super::record::Record;
use super::row::Row;

/// The file of one table. After an error it takes nothing more.
pub(super) trait TableFile: Send {
    fn put(&mut self, id: u64, row: &Row, record: &Record<'_>) -> Result<(), Stopped>;

    /// Hands everything taken so far to the kernel.
    fn flush(&mut self) -> Result<(), Stopped>;

    /// Ends the file and returns its bytes.
    fn close(self: Box<Self>) -> Result<u64, Stopped>;
}

/// Why and in what state a file was given up.
pub(super) struct Stopped {
    pub reason: String,
    /// Name of the file now.
    pub name: String,
    /// Rows that were taken but are not in the file.
    pub lost_rows: u64,
    /// Bytes of the file.
    pub bytes: u64,
}
