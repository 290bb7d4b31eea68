//! The library and the tool from outside. One binary: each of its own would cost seconds to link, and run alone.

// In a test, a panic is the report.
#![allow(clippy::unwrap_used)]

mod dump_capture;
mod dump_compare;
mod dump_leaks;
mod dump_read;
mod dump_write;
mod exercise;
mod fuzz;
mod fuzzing;
mod inefficient;
mod ledger_properties;
mod output;
mod resolvers;
mod sites_doc;
