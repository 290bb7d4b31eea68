//! What changed between two dumps, or between two steps.

mod align;
mod difference;
mod lines;
mod table;

pub use align::Method;
pub use difference::{
    BlockDifference, Cause, Difference, Fates, Layer, Like, Memory, MemoryDifference, Profile, Profiler,
    Side, Use, UseDifference, Verdict, difference,
};
pub use table::{Level, Sequences, Table, TableRow, table};
