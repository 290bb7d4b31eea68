//! What the events mean: one file per analysis, all over the same event stream.
