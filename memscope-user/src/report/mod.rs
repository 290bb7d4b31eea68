//! What people read, and what their programs read.

pub mod document;
