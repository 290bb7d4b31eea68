//! Reading and writing dumps.
