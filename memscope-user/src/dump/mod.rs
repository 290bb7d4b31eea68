//! Reading and writing dumps.
//!
//! A dump is a table of twelve columns, one row per event, in the format of msMemScope (current format). The live
//! collector turns each [`crate::model::Event`] into a [`Row`] and hands it to a [`Pipeline`]; offline verbs read
//! rows back.
//! `docs/output-formats.md` describes what is written.

mod capture;
mod comparison;
mod csv;
mod db;
mod output;
mod parse;
mod pipeline;
pub mod read;
mod record;
mod row;
mod stack;
mod table;
mod writer;

pub use comparison::{ComparisonError, write_comparison};
pub use output::{Caller, OutputError};
pub use parse::RowError;
pub use pipeline::{Pipeline, Summary};
pub use row::{Fact, Framework, Place, Row, live_rows, rows_of};
pub use stack::StackStyle;
pub use writer::{Config, FileReport, Format, WriteFailure, Writer};

/// Names of the twelve columns, in order.
pub const COLUMNS: [&str; 12] = [
    "ID",
    "Event",
    "Event Type",
    "Name",
    "Timestamp(ns)",
    "Process Id",
    "Thread Id",
    "Device Id",
    "Ptr",
    "Attr",
    "Call Stack(Python)",
    "Call Stack(C)",
];
