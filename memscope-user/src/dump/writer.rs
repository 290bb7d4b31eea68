//! Where rows go: a directory per process, a file per device.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt::Display;
use std::io;
use std::path::PathBuf;

use rustc_hash::FxHashMap;
use serde::Serialize;

use crate::model::{EventKind, Tgid};

use super::capture::{self, CaptureFile};
use super::csv::CsvFile;
use super::db::DbFile;
use super::output::{Caller, Dir, OutputError, Root};
use super::record::{Record, records};
use super::row::{Fact, Place, Row};
use super::stack::StackStyle;
use super::table::{Closed, Stopped, TableFile};

/// Device-less rows kept for the files that a process opens later.
const KEPT_ROWS: usize = 1024;

/// Seconds that a name may run ahead of the clock to be unique.
const NAME_AHEAD: i64 = 60;

#[derive(Debug, Clone)]
pub struct Config {
    /// The output directory; made when missing.
    pub output: PathBuf,
    pub formats: Vec<Format>,
    pub stacks: StackStyle,
    /// Bytes of the capture of one device of a process, at most: of more, the oldest rows go.
    pub max_size: Option<u64>,
    /// Who gets the files; [`Caller::of_sudo`] unless there is a reason for somebody else.
    pub caller: Option<Caller>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    Csv,
    /// SQLite, which MindStudio Insight opens.
    Db,
    /// Arrow, compressed: for long traces.
    Capture,
}

/// How files are written, of all processes.
#[derive(Debug, Clone)]
struct Style {
    formats: Vec<Format>,
    stacks: StackStyle,
    max_size: Option<u64>,
}

/// What became of one file.
#[derive(Debug, Serialize)]
pub struct FileReport {
    /// The file; or the directory, when not even that could be made.
    pub path: PathBuf,
    pub format: Format,
    pub pid: Tgid,
    /// `None` for rows without a device that met no file to go into.
    pub device: Option<Place>,
    /// Rows in the file.
    pub rows: u64,
    /// Bytes of the file.
    pub bytes: u64,
    /// Rows that belong into the file and are not in it.
    pub missing_rows: u64,
    /// The oldest rows, which had to go for [`Config::max_size`].
    pub removed_rows: u64,
    /// Why the file ends early.
    pub failure: Option<WriteFailure>,
}

impl FileReport {
    pub fn is_complete(&self) -> bool {
        self.missing_rows == 0 && self.failure.is_none()
    }
}

#[derive(Debug, Clone, thiserror::Error, Serialize)]
#[error("cannot {action}: {reason}")]
pub struct WriteFailure {
    /// What was tried: `write`, `create the file`, `create the directory`.
    pub action: &'static str,
    pub reason: String,
}

impl WriteFailure {
    fn new(action: &'static str, error: &io::Error) -> Self {
        WriteFailure { action, reason: error.to_string() }
    }
}

/// Writes the rows of all processes of a trace. Errors of single files end those files only, and are reported by
/// [`Writer::finish`].
pub struct Writer {
    root: Root,
    style: Style,
    projects: FxHashMap<Tgid, Project>,
    reports: Vec<FileReport>,
}

impl Writer {
    /// Opens the output directory; fails when nothing can be written there.
    pub fn create(config: Config) -> Result<Self, OutputError> {
        let root = Root::open(&config.output, config.caller)?;
        let Config { formats, stacks, max_size, .. } = config;
        let style = Style { formats, stacks, max_size };
        Ok(Writer { root, style, projects: FxHashMap::default(), reports: Vec::new() })
    }

    pub fn write(&mut self, row: &Row) {
        let style = &self.style;
        let project = self.projects.entry(row.tgid).or_insert_with(|| Project::new(row.tgid, style.clone()));
        project.write(&self.root.dir, row);
        // The program that comes next is another process in all but its number.
        if row.fact == Fact::Event(EventKind::Exec)
            && let Some(project) = self.projects.remove(&row.tgid)
        {
            project.finish(&mut self.reports);
        }
    }

    /// Hands everything taken so far to the kernel.
    pub fn flush(&mut self) {
        let ended: Vec<Tgid> =
            self.projects.iter_mut().filter_map(|(tgid, p)| p.flush().then_some(*tgid)).collect();
        for tgid in ended {
            if let Some(project) = self.projects.remove(&tgid) {
                project.finish(&mut self.reports);
            }
        }
    }

    /// The files that exist now.
    pub fn paths(&self) -> impl Iterator<Item = PathBuf> {
        let open = self.projects.values().flat_map(|project| project.tables.values().flatten());
        open.map(|table| table.path.clone()).chain(self.reports.iter().map(|report| report.path.clone()))
    }

    /// Ends all files and says what became of them, sorted by path.
    pub fn finish(mut self) -> Vec<FileReport> {
        for (_, project) in self.projects.drain() {
            project.finish(&mut self.reports);
        }
        self.root.remove_unused();
        self.reports.sort_by(|a, b| a.path.cmp(&b.path));
        self.reports
    }
}

/// The rows of one process.
struct Project {
    tgid: Tgid,
    style: Style,
    /// Made with the first file.
    dir: Option<Result<Dir, Refused>>,
    next_id: u64,
    tables: BTreeMap<Place, Vec<Table>>,
    /// Rows without a device, with their first id, for files to come.
    kept: Vec<(u64, Row)>,
    /// Rows without a device that came when there was no file, beyond what is kept.
    unplaced: u64,
    end: End,
}

#[derive(Clone)]
struct Refused {
    path: PathBuf,
    failure: WriteFailure,
}

/// A process that has exited is closed when nothing has come for one more flush.
#[derive(PartialEq)]
enum End {
    Running,
    Exited,
    Quiet,
}

impl Project {
    fn new(tgid: Tgid, style: Style) -> Self {
        Project {
            tgid,
            style,
            dir: None,
            next_id: 0,
            tables: BTreeMap::new(),
            kept: Vec::new(),
            unplaced: 0,
            end: End::Running,
        }
    }

    fn write(&mut self, root: &Dir, row: &Row) {
        let first_id = self.next_id;
        let mut devices_unknown = false;
        records(row, |record| {
            let id = self.next_id;
            self.next_id += 1;
            match record.place {
                Some(place) => {
                    for table in self.tables_of(root, place) {
                        table.put(id, row, &record);
                    }
                }
                None => {
                    devices_unknown = true;
                    for table in self.tables.values_mut().flatten() {
                        table.put(id, row, &record);
                    }
                }
            }
        });
        if devices_unknown {
            self.keep(first_id, row);
        }
        if row.fact == Fact::Event(EventKind::Exit) {
            self.end = End::Exited;
        }
    }

    /// Keeps a device-less row for files that are opened later: what concerns the process as a whole, and what came
    /// before the first file.
    fn keep(&mut self, first_id: u64, row: &Row) {
        let of_process = !matches!(
            row.fact,
            Fact::Event(
                EventKind::Free(_) | EventKind::Op { .. } | EventKind::Launch { .. } | EventKind::Access(_)
            ) | Fact::OpBegin { .. }
                | Fact::OpEnd { .. }
                | Fact::NeverFreed { .. }
        );
        if self.tables.is_empty() || of_process {
            if self.kept.len() < KEPT_ROWS {
                self.kept.push((first_id, row.clone()));
            } else if self.tables.is_empty() {
                self.unplaced += 1;
            }
        }
    }

    fn tables_of(&mut self, root: &Dir, place: Place) -> &mut [Table] {
        let Project { tgid, style, dir, tables, kept, .. } = self;
        tables.entry(place).or_insert_with(|| {
            let dir = dir.get_or_insert_with(|| make_project_dir(root, *tgid));
            let mut tables: Vec<Table> =
                style.formats.iter().map(|format| Table::open(dir.as_ref(), *format, style, place)).collect();
            for (first_id, row) in kept.iter() {
                let mut id = *first_id;
                records(row, |record| {
                    tables.iter_mut().for_each(|table| table.put(id, row, &record));
                    id += 1;
                });
            }
            tables
        })
    }

    /// Returns whether the process is over and nothing more is to come.
    fn flush(&mut self) -> bool {
        self.tables.values_mut().flatten().for_each(Table::flush);
        match self.end {
            End::Running => false,
            End::Exited => {
                self.end = End::Quiet;
                false
            }
            End::Quiet => true,
        }
    }

    fn finish(mut self, reports: &mut Vec<FileReport>) {
        let unplaced = self.unplaced + if self.tables.is_empty() { self.kept.len() as u64 } else { 0 };
        for (place, tables) in std::mem::take(&mut self.tables) {
            reports.extend(tables.into_iter().map(|table| table.finish(self.tgid, place)));
        }
        if unplaced > 0 {
            reports.extend(self.style.formats.iter().map(|format| FileReport {
                path: PathBuf::new(),
                format: *format,
                pid: self.tgid,
                device: None,
                rows: 0,
                bytes: 0,
                missing_rows: unplaced,
                removed_rows: 0,
                failure: None,
            }));
        }
    }
}

/// Makes something with the date of now in its name, or of one of the seconds to come when that is taken. Returns its
/// name, too.
pub(super) fn make_dated<T>(
    name: impl Fn(&dyn Display) -> String,
    mut make: impl FnMut(&str) -> io::Result<T>,
) -> Result<(String, T), (String, io::Error)> {
    let now = jiff::ZonedDateTime::now();
    let mut ahead = 0;
    loop {
        let date = now.saturating_add(jiff::SignedDuration::from_secs(ahead));
        let name = name(&date.strftime("%Y%m%d%H%M%S"));
        match make(&name) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && ahead < NAME_AHEAD => ahead += 1,
            Ok(made) => return Ok((name, made)),
            Err(error) => return Err((name, error)),
        }
    }
}

/// Makes `msmemscope_<pid>_<date>_ascend`. Another trace of the same process may have begun within this second.
fn make_project_dir(root: &Dir, tgid: Tgid) -> Result<Dir, Refused> {
    let name = |date: &dyn Display| format!("msmemscope_{tgid}_{date}_ascend");
    match make_dated(name, |name| root.make(OsStr::new(name))) {
        Ok((_, dir)) => Ok(dir),
        Err((name, error)) => Err(Refused {
            path: root.path().join(name),
            failure: WriteFailure::new("create the directory", &error),
        }),
    }
}

/// One file, or the memory of why there is none.
struct Table {
    path: PathBuf,
    format: Format,
    file: Option<Box<dyn TableFile>>,
    rows: u64,
    bytes: u64,
    missing_rows: u64,
    removed_rows: u64,
    failure: Option<WriteFailure>,
}

impl Table {
    fn open(project: Result<&Dir, &Refused>, format: Format, style: &Style, place: Place) -> Self {
        let mut table = Table {
            path: PathBuf::new(),
            format,
            file: None,
            rows: 0,
            bytes: 0,
            missing_rows: 0,
            removed_rows: 0,
            failure: None,
        };
        let project = match project {
            Ok(project) => project,
            Err(refused) => {
                table.path.clone_from(&refused.path);
                table.failure = Some(refused.failure.clone());
                return table;
            }
        };
        let device = format!("device_{place}");
        let dir = project.enter(OsStr::new(&device)).and_then(|dir| dir.enter(OsStr::new("dump")));
        let dir = match dir {
            Ok(dir) => dir,
            Err(error) => {
                table.path = project.path().join(device);
                table.failure = Some(WriteFailure::new("create the directory", &error));
                return table;
            }
        };
        let stem = format!("memscope_dump_{}", jiff::ZonedDateTime::now().strftime("%Y%m%d%H%M%S"));
        table.path = dir.path().join(&stem);
        let file: io::Result<Box<dyn TableFile>> = match format {
            Format::Csv => {
                table.path.set_extension("csv");
                CsvFile::create(dir, stem, style.stacks).map(|file| Box::new(file) as _)
            }
            Format::Db => {
                table.path.set_extension("db");
                DbFile::create(dir, stem, style.stacks).map(|file| Box::new(file) as _)
            }
            Format::Capture => {
                table.path.set_file_name(capture::first_name(&stem, style.max_size));
                CaptureFile::create(dir, stem, style.max_size).map(|file| Box::new(file) as _)
            }
        };
        match file {
            Ok(file) => table.file = Some(file),
            Err(error) => table.failure = Some(WriteFailure::new("create the file", &error)),
        }
        table
    }

    fn put(&mut self, id: u64, row: &Row, record: &Record<'_>) {
        match &mut self.file {
            Some(file) => {
                self.rows += 1;
                let result = file.put(id, row, record);
                self.check(result);
            }
            None => self.missing_rows += 1,
        }
    }

    fn flush(&mut self) {
        if let Some(file) = &mut self.file {
            let result = file.flush();
            self.check(result);
        }
    }

    fn check(&mut self, result: Result<(), Stopped>) {
        if let Err(stopped) = result {
            self.stop(stopped);
        }
    }

    fn stop(&mut self, stopped: Stopped) {
        let Stopped { reason, name, lost_rows, removed_rows, bytes } = stopped;
        tracing::warn!("{}: {reason}; this file ends here", self.path.display());
        self.rows -= lost_rows + removed_rows;
        self.missing_rows += lost_rows;
        self.removed_rows = removed_rows;
        self.failure = Some(WriteFailure { action: "write", reason });
        self.path.set_file_name(name);
        self.bytes = bytes;
        self.file = None;
    }

    fn finish(mut self, pid: Tgid, place: Place) -> FileReport {
        match self.file.take().map(|file| file.close()) {
            Some(Ok(Closed { name, bytes, removed_rows })) => {
                self.path.set_file_name(name);
                (self.bytes, self.removed_rows) = (bytes, removed_rows);
                self.rows -= removed_rows;
            }
            Some(Err(stopped)) => self.stop(stopped),
            None => {}
        }
        let Table { path, format, rows, bytes, missing_rows, removed_rows, failure, .. } = self;
        FileReport {
            path,
            format,
            pid,
            device: Some(place),
            rows,
            bytes,
            missing_rows,
            removed_rows,
            failure,
        }
    }
}
