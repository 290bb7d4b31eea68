//! The table of a comparison as msMemScope writes it.

use std::ffi::OsStr;
use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::analysis::compare::Table;

use super::csv::write_text;
use super::output::{Caller, OutputError, Root};
use super::writer::make_dated;

#[derive(Debug, thiserror::Error)]
pub enum ComparisonError {
    #[error("{0}; choose another one with --output")]
    Output(#[from] OutputError),
    #[error("cannot write {}: {source}; free some space or choose another directory with --output", .path.display())]
    Write { path: PathBuf, source: io::Error },
}

/// Writes `<output>/compare/memory_compare_<date>.csv` and returns its path.
pub fn write_comparison(
    output: &Path,
    caller: Option<Caller>,
    table: &Table,
) -> Result<PathBuf, ComparisonError> {
    let root = Root::open(output, caller)?;
    let failed = |path: &Path, source| ComparisonError::Write { path: path.to_owned(), source };
    let dir = root.dir.enter(OsStr::new("compare"));
    let dir = dir.map_err(|source| failed(&output.join("compare"), source))?;
    let name = |date: &dyn Display| format!("memory_compare_{date}");
    let (stem, file) = make_dated(name, |stem| dir.create(&format!("{stem}.csv")))
        .map_err(|(stem, source)| failed(&dir.path().join(format!("{stem}.csv")), source))?;
    match write(file, table) {
        Ok(()) => Ok(dir.path().join(format!("{stem}.csv"))),
        Err(source) => Err(failed(&dir.path().join(dir.mark_incomplete(&stem, "csv")), source)),
    }
}

fn write(file: File, table: &Table) -> io::Result<()> {
    let mut out = BufWriter::new(file);
    out.write_all(b",,,Base,Compare\n")?;
    out.write_all(b"Event,Name,Device Id,Allocated Memory(byte),Allocated Memory(byte),Diff Memory(byte)\n")?;
    let mut name = Vec::new();
    let cell = |bytes: Option<i64>| bytes.map_or_else(|| "N/A".to_owned(), |bytes| bytes.to_string());
    for row in &table.rows {
        name.clear();
        write_text(&mut name, &row.name);
        write!(out, "{},", row.level.event())?;
        out.write_all(&name)?;
        writeln!(out, ",{},{},{},{}", row.device, cell(row.base), cell(row.compare), row.diff)?;
    }
    out.flush()
}
