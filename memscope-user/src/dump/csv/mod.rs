//! Dumps as CSV.

mod write;

pub(super) use write::{CsvFile, Stopped};
