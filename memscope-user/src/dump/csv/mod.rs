//! Dumps as CSV.

mod read;
mod scan;
mod sort;
mod write;

pub(super) use read::CsvSource;
pub(super) use scan::SplitError;
pub(super) use write::{CsvFile, decode_text, write_text};
