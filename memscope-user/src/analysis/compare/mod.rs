//! What changed between two dumps, or between two steps.

mod align;
mod table;

pub use align::Method;
pub use table::{Level, Sequences, Table, TableRow, table};
