//! From the ring buffer to events, and from events to a report.

pub mod decode;
mod names;
mod operands;
mod ranges;
pub mod tape;
