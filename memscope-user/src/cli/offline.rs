//! What the verbs that read dumps share.

use std::{
    io::Write,
    path::{Path, PathBuf},
};

use crate::dump::read::{NumberedRow, Options, Rows, open};

/// Reads dumps as one, to the end; what could not be read is said on standard error, and the rest counts.
pub(super) fn each_row(paths: &[PathBuf], mut row: impl FnMut(&NumberedRow)) -> anyhow::Result<Read> {
    let mut rows: Rows = open(paths, Options::default())?;
    let mut count = 0u64;
    for numbered in rows.by_ref() {
        count += 1;
        row(&numbered);
    }
    let problems = rows.problems();
    for problem in &problems.first {
        tracing::warn!("{problem}");
    }
    let unread = problems.total;
    if unread > 0 {
        tracing::warn!("{unread} rows could not be read: what follows rests on the other {count}");
    }
    Ok(Read { rows: count, unread })
}

/// What was read of dumps.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub(super) struct Read {
    pub rows: u64,
    /// Rows, or ends of files, that could not be read.
    pub unread: u64,
}

pub(super) fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    Ok(std::io::stdout().lock().write_all(&text)?)
}

pub(super) fn shown(path: &Path) -> String {
    crate::text::sanitize(path.as_os_str().as_encoded_bytes()).into_owned()
}
