//! What people read, and what their programs read.

pub mod between_marks;
pub mod compare;
pub mod decompose;
pub mod document;
pub mod inefficient;
mod select;
pub mod status;
pub mod terminal;
pub(crate) mod units;
