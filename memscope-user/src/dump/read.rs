//! Reading dumps: any number of files of any format, as one stream of rows in order of time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::fmt;
use std::fs::File;
use std::io;
use std::mem::{Discriminant, discriminant};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use rustc_hash::FxHashMap;

use crate::model::{DevicePtr, EventKind, Name, Tgid, Tid};
use crate::report::units;
use crate::text::sanitize;

use super::capture::{CaptureSource, captures_of, is_capture};
use super::csv::CsvSource;
use super::db::{DbSource, is_database};
use super::parse::{Continuity, Parsed, RowError, Unheld};
use super::row::{Fact, Place, Row};

/// Rows handed over at a time.
const BATCH: usize = 1024;

/// Batches that reading may be ahead.
const AHEAD: usize = 8;

/// Problems of a dump that are kept to be shown; all are counted.
const PROBLEMS_KEPT: usize = 100;

/// Rows of one moment that are looked for in other files: more happen at once only where everything that is alive ends.
const MOMENT_MOST: usize = 1 << 17;

/// Why a dump can not be read at all.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("cannot read {}: {source}; name a dump, or a directory that holds dumps", .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error(
        "cannot read {}: {why}; it was cut off, or copied while it was written: copy it again, with the file {}-wal if \
         there is one",
        .path.display(), .path.display()
    )]
    Damaged { path: PathBuf, why: String },
    #[error(
        "{} is empty: what was to write it was killed before it wrote a row, as msMemScope is with its target; name \
         another dump",
        .path.display()
    )]
    Empty { path: PathBuf },
    #[error(
        "{} is not a dump: it begins with `{begin}` and not with the columns {}; name a file that memscope-trace or \
         msMemScope wrote",
        .path.display(), super::COLUMNS.join(",")
    )]
    NotADump { path: PathBuf, begin: String },
    #[error(
        "{} is not a dump: it has no table {table} with the columns {}; name a file that memscope-trace or msMemScope \
         wrote",
        .path.display(), super::COLUMNS.join(",")
    )]
    NoTable { path: PathBuf, table: &'static str },
    #[error("nothing of {} can be read as a capture: {why}; name another dump", .path.display())]
    NotACapture { path: PathBuf, why: String },
    #[error(
        "no dump (memscope_dump_*.csv, .arrows or .db) in {} or below; name the directory that was traced to \
         (--output), or a dump of another name itself",
        .path.display()
    )]
    NothingFound { path: PathBuf },
    #[error(
        "cannot sort {}: {source}; {} needs room for the file once more, or set TMPDIR to another directory",
        .path.display(), std::env::temp_dir().display()
    )]
    Sort { path: PathBuf, source: io::Error },
    #[error("cannot start a thread to read with: {0}")]
    Thread(io::Error),
}

impl ReadError {
    pub(super) fn read(path: &Path, source: io::Error) -> Self {
        ReadError::Read { path: path.to_owned(), source }
    }

    pub(super) fn not_a_dump(path: &Path, begin: &[u8]) -> Self {
        let begin = sanitize(begin.get(..begin.len().min(60)).unwrap_or_default()).into_owned();
        ReadError::NotADump { path: path.to_owned(), begin }
    }
}

/// A part of a dump that can not be read. The rest is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}:{line}: {kind}", .path.display())]
pub struct Problem {
    pub path: Arc<Path>,
    /// Line of a CSV file, row of a database or a capture.
    pub line: u64,
    pub kind: ProblemKind,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProblemKind {
    #[error(transparent)]
    Row(#[from] RowError),
    #[error(
        "{rows} rows are gone that were before this one (--max-size); the blocks alive then are all there"
    )]
    Removed { rows: u64 },
    /// What follows in this file is missing.
    #[error("reading ends here: {0}")]
    Io(String),
}

impl Problem {
    pub(super) fn row(path: &Arc<Path>, line: u64, error: RowError) -> Self {
        Problem { path: path.clone(), line, kind: error.into() }
    }

    pub(super) fn io(path: &Arc<Path>, line: u64, error: &io::Error) -> Self {
        Problem { path: path.clone(), line, kind: ProblemKind::Io(error.to_string()) }
    }
}

/// What could not be read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Problems {
    pub total: u64,
    /// Those of them that are not about a row but about where the reading of a file ends.
    pub ends: u64,
    /// Those that say how many rows had gone before the trace ended.
    pub removals: u64,
    /// Rows of a kind that is not known here.
    pub unknown: u64,
    /// The first of them; of each unknown kind the first row.
    pub first: Vec<Problem>,
}

impl Problems {
    fn add(&mut self, problem: Problem) {
        self.total += 1;
        match &problem.kind {
            ProblemKind::Row(RowError::Kind(_)) => {
                self.unknown += 1;
                if self.first.iter().any(|told| told.kind == problem.kind) {
                    return;
                }
            }
            ProblemKind::Row(_) => {}
            ProblemKind::Io(_) => self.ends += 1,
            ProblemKind::Removed { .. } => self.removals += 1,
        }
        if self.first.len() < PROBLEMS_KEPT {
            self.first.push(problem);
        }
    }
}

/// What is missing, in short.
impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Problems { total, ends, removals, unknown, .. } = *self;
        let rows = total.saturating_sub(ends + removals + unknown);
        let mut parts = Vec::new();
        if rows > 0 {
            parts.push(format!("{} could not be read", units::count_of(rows, "row")));
        }
        if unknown > 0 {
            parts.push(format!("{} of a kind that is not known here", units::were(unknown, "row")));
        }
        if ends > 0 {
            let files = units::count_of(ends, "file");
            parts
                .push(format!("reading ended early in {files}, of which the rest, however much, is missing"));
        }
        if removals > 0 {
            let files = units::count_of(removals, "capture");
            parts.push(format!("the oldest rows of {files} had to go for --max-size"));
        }
        f.write_str(&parts.join("; "))
    }
}

/// Two files of the same process and device that say something about the same time, or one that says it twice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overlap {
    pub paths: [PathBuf; 2],
    pub process: Tgid,
    /// Rows that are in both, and count once: the same trace twice, as its dump and a conversion of it. None: two traces.
    pub shared: u64,
    /// The rows are there more than once within one file.
    pub within: bool,
}

impl fmt::Display for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Overlap { paths, process, shared, within } = self;
        let [one, other] = paths.each_ref().map(|path| sanitize(path.as_os_str().as_encoded_bytes()));
        match shared {
            0 => write!(
                f,
                "{one} and {other} are two traces of process {process} at the same time: its memory counts twice; \
                 name one of them"
            ),
            rows if *within => write!(
                f,
                "{one} has {} more than once, under the same ID and at the same time, which count once",
                units::count_of(*rows, "row")
            ),
            _ if one == other => write!(f, "{one} was named twice and counts once"),
            rows => write!(
                f,
                "{one} and {other} have {} in common, which count once",
                units::count_of(*rows, "row")
            ),
        }
    }
}

/// A row, and where it is from.
#[derive(Debug, Clone, PartialEq)]
pub struct NumberedRow {
    /// Column ID: counts the rows of a process.
    pub id: u64,
    /// Index into [`Rows::files`].
    pub file: usize,
    /// Line of a CSV file, row of a database or a capture.
    pub line: u64,
    /// The size is written with a minus sign, as the 2025 format does for frees.
    pub negative_size: bool,
    pub row: Row,
}

#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Bytes that sorting may use before it goes to disk.
    pub memory: usize,
}

impl Default for Options {
    fn default() -> Self {
        Options { memory: 512 << 20 }
    }
}

/// What rows are ordered by: time in ns, number, and line where both are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub time: u64,
    pub id: u64,
    pub line: u64,
}

/// A row with its place in the order.
pub(super) struct Keyed {
    pub key: Key,
    pub parsed: Parsed,
}

impl Keyed {
    fn says_the_same(&self, key: Key, parsed: &Parsed) -> bool {
        (self.key.time, self.key.id) == (key.time, key.id) && self.parsed == *parsed
    }
}

impl PartialEq for Keyed {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl Eq for Keyed {}

impl PartialOrd for Keyed {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Keyed {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key.cmp(&other.key)
    }
}

/// One file, in order of time.
pub(super) trait Source: Send {
    fn next(&mut self) -> Option<Result<Keyed, Problem>>;
}

/// The rows of one or more dumps, in order of time, and of their numbers where that is the same. They are read on a
/// thread of their own.
pub struct Rows {
    files: Vec<PathBuf>,
    problems: Problems,
    pairs: Pairs,
    unheld: Unheld,
    batch: std::vec::IntoIter<NumberedRow>,
    batches: Receiver<Batch>,
    /// Reads; until it is known how that ended.
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Batch {
    rows: Vec<NumberedRow>,
    problems: Vec<Problem>,
    pairs: Pairs,
}

/// Of two files, lower index first, the process that they overlap in, and rows that they have in common; of one file with
/// itself, rows that it has again.
type Pairs = BTreeMap<(usize, usize), (Tgid, u64)>;

/// Opens dumps to be read as one. A directory stands for all dumps in it.
pub fn open<P: AsRef<Path>>(paths: impl IntoIterator<Item = P>, options: Options) -> Result<Rows, ReadError> {
    let mut files = Vec::new();
    for path in paths {
        let path = path.as_ref();
        if path.is_dir() {
            let before = files.len();
            find(path, &mut files).map_err(|source| ReadError::read(path, source))?;
            if files.len() == before {
                return Err(ReadError::NothingFound { path: path.to_owned() });
            }
        } else {
            files.push(path.to_owned());
        }
    }
    let mut captures = Vec::new();
    let mut others = Vec::new();
    for file in files {
        let of = if looks_like(&file, is_capture)? { &mut captures } else { &mut others };
        of.push(file);
    }
    let captures = captures_of(captures.into_iter());
    let memory = options.memory / others.len().max(1);
    let unheld = Unheld::default();
    let others_sources = others.iter().map(|path| open_file(path, memory, &unheld));
    let files: Vec<PathBuf> = others
        .iter()
        .cloned()
        .chain(captures.iter().filter_map(|segments| segments.first().cloned()))
        .collect();
    let sources = others_sources
        .chain(
            captures
                .into_iter()
                .map(|segments| Ok(Box::new(CaptureSource::open(segments, unheld.clone())?) as _)),
        )
        .collect::<Result<Vec<_>, _>>()?;
    let (sender, batches) = sync_channel(AHEAD);
    let thread = std::thread::Builder::new()
        .name("read".into())
        .spawn(move || merge(sources, &sender))
        .map_err(ReadError::Thread)?;
    Ok(Rows {
        files,
        problems: Problems::default(),
        pairs: Pairs::new(),
        unheld,
        batch: Vec::new().into_iter(),
        batches,
        thread: Some(thread),
    })
}

impl Rows {
    /// The files; of a capture in segments, the first.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// What could not be read so far: all of it, once there are no more rows. With any, the rows are not all there
    /// were.
    pub fn problems(&self) -> &Problems {
        &self.problems
    }

    /// What rows say that no [`Row`] holds, with their number, once there are no more rows: keys of column Attr, and Event
    /// and Event Type of rows that say nothing else.
    pub fn unheld(&self) -> BTreeMap<String, u64> {
        self.unheld.counts()
    }

    /// Files that are not independent of each other, as far as rows have been read.
    pub fn overlaps(&self) -> Vec<Overlap> {
        let path = |file: usize| self.files.get(file).cloned().unwrap_or_default();
        let overlap = |(&(one, other), &(process, shared))| Overlap {
            paths: [path(one), path(other)],
            process,
            shared,
            within: one == other,
        };
        self.pairs.iter().map(overlap).collect()
    }
}

impl Iterator for Rows {
    type Item = NumberedRow;

    fn next(&mut self) -> Option<NumberedRow> {
        loop {
            if let Some(row) = self.batch.next() {
                return Some(row);
            }
            let Ok(batch) = self.batches.recv() else {
                if let Some(problem) = self.thread.take().and_then(|thread| failure(thread, &self.files)) {
                    self.problems.add(problem);
                }
                return None;
            };
            batch.problems.into_iter().for_each(|problem| self.problems.add(problem));
            for (pair, (process, shared)) in batch.pairs {
                self.pairs.entry(pair).or_insert((process, 0)).1 += shared;
            }
            self.batch = batch.rows.into_iter();
        }
    }
}

/// What is missing when a thread that reads has panicked: a fault of ours, which must not look like the end of a dump.
pub(super) fn failure(thread: JoinHandle<()>, files: &[PathBuf]) -> Option<Problem> {
    let path = files.first().map(PathBuf::as_path).unwrap_or(Path::new(""));
    let kind = || ProblemKind::Io("the reader failed, a fault of memscope-trace: please report it".into());
    thread.join().is_err().then(|| Problem { path: path.into(), line: 0, kind: kind() })
}

/// Collects the dumps in a directory, at any depth, sorted by path. Where there are dumps in several formats, they are
/// the same ones again, captures perhaps without the oldest rows.
fn find(dir: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    let mut entries = std::fs::read_dir(dir)?.collect::<io::Result<Vec<_>>>()?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    let (mut csv, mut captures, mut db) = (Vec::new(), Vec::new(), Vec::new());
    for entry in entries {
        let kind = entry.file_type()?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if kind.is_dir() {
            find(&entry.path(), files)?;
        } else if kind.is_file() && name.starts_with("memscope_dump_") {
            if name.ends_with(".csv") {
                csv.push(entry.path());
            } else if name.ends_with(".arrows") {
                captures.push(entry.path());
            } else if name.ends_with(".db") {
                db.push(entry.path());
            }
        }
    }
    if let Some(found) = [csv, db, captures].iter_mut().find(|found| !found.is_empty()) {
        files.append(found);
    }
    Ok(())
}

fn looks_like(path: &Path, kind: impl Fn(&mut File) -> io::Result<bool>) -> Result<bool, ReadError> {
    let mut file = File::open(path).map_err(|source| ReadError::read(path, source))?;
    kind(&mut file).map_err(|source| ReadError::read(path, source))
}

fn open_file(path: &Path, memory: usize, unheld: &Unheld) -> Result<Box<dyn Source>, ReadError> {
    if looks_like(path, is_database)? {
        return Ok(Box::new(DbSource::open(path.into(), unheld.clone())?));
    }
    let file = File::open(path).map_err(|source| ReadError::read(path, source))?;
    Ok(Box::new(CsvSource::open(path.into(), file, memory, unheld.clone())?))
}

/// Merges the files and sends what comes of it, until nobody takes it any more.
fn merge(mut sources: Vec<Box<dyn Source>>, sender: &SyncSender<Batch>) {
    let files = sources.len();
    let mut batch = Batch::default();
    let mut next: BinaryHeap<Reverse<(Keyed, usize)>> = BinaryHeap::new();
    let mut continuity = Continuity::default();
    let mut moment = Moment::default();
    let mut takes = Takes::default();
    let mut pull = |index: usize, batch: &mut Batch| -> Option<Keyed> {
        let source = sources.get_mut(index)?;
        loop {
            match source.next()? {
                Ok(row) => return Some(row),
                Err(problem) => batch.problems.push(problem),
            }
        }
    };
    for index in 0..files {
        next.extend(pull(index, &mut batch).map(|row| Reverse((row, index))));
    }
    while let Some(Reverse((Keyed { key, mut parsed }, file))) = next.pop() {
        // Files are in order of time and number: what one says twice is next to itself.
        while let Some(following) = pull(file, &mut batch) {
            if following.says_the_same(key, &parsed) {
                note(&mut batch.pairs, [file, file], parsed.row.tgid, 1);
                continue;
            }
            next.push(Reverse((following, file)));
            break;
        }
        let at_once = next.peek().is_some_and(|Reverse((other, _))| other.key.time == key.time);
        if let Some(owner) = moment.owner(key.time, at_once, file, &parsed.row) {
            // What concerns a process as a whole is in the file of each of its devices.
            if parsed.row.place().is_some() {
                note(&mut batch.pairs, [owner, file], parsed.row.tgid, 1);
            }
            continue;
        }
        if let Some(before) = takes.returns(file, &parsed.row) {
            note(&mut batch.pairs, [before, file], parsed.row.tgid, 0);
        }
        continuity.apply(&mut parsed);
        let Parsed { id, row, negative_size, .. } = parsed;
        batch.rows.push(NumberedRow { id, file, line: key.line, negative_size, row });
        if batch.rows.len() >= BATCH && sender.send(std::mem::take(&mut batch)).is_err() {
            return;
        }
    }
    // Nobody listens: nobody misses it.
    let _ = sender.send(batch);
}

fn note(pairs: &mut Pairs, [one, other]: [usize; 2], process: Tgid, rows: u64) {
    pairs.entry((one.min(other), one.max(other))).or_insert((process, 0)).1 += rows;
}

/// Who does what to what. Of one moment, two such rows in two files are the same row: rows without a device are in every
/// file of their process, and files may be copies of each other in whole or in part, numbered differently.
#[derive(PartialEq, Eq, Hash)]
struct Identity {
    tgid: Tgid,
    tid: Tid,
    place: Option<Place>,
    fact: (Discriminant<Fact>, Option<Discriminant<EventKind>>),
    ptr: Option<DevicePtr>,
    text: Option<Name>,
}

impl Identity {
    fn of(row: &Row) -> Self {
        let kind = match &row.fact {
            Fact::Event(kind) => Some(kind),
            _ => None,
        };
        let (ptr, text) = match (&row.fact, kind) {
            (Fact::OpBegin { name, .. } | Fact::OpEnd { name, .. }, _) => (None, Some(name)),
            (Fact::NeverFreed { ptr, .. }, _) => (Some(*ptr), None),
            (_, Some(EventKind::Alloc(alloc))) => (Some(alloc.ptr), None),
            (_, Some(EventKind::Free(free))) => (Some(free.ptr), None),
            (_, Some(EventKind::Access(access))) => (Some(access.ptr), access.op.as_ref()),
            (_, Some(EventKind::Op { name })) => (None, Some(name)),
            (_, Some(EventKind::Launch { name, .. })) => (None, name.as_ref()),
            (_, Some(EventKind::Mark { text, .. } | EventKind::RangeBegin { text, .. })) => {
                (None, Some(text))
            }
            _ => (None, None),
        };
        Identity {
            tgid: row.tgid,
            tid: row.tid,
            place: row.place(),
            fact: (discriminant(&row.fact), kind.map(discriminant)),
            ptr,
            text: text.cloned(),
        }
    }
}

/// The rows of one moment, and the file that has each.
#[derive(Default)]
struct Moment {
    time: u64,
    owners: FxHashMap<Identity, usize>,
}

impl Moment {
    /// The file that has said this before, if it is another one. `at_once`: the next row is of the same moment.
    fn owner(&mut self, time: u64, at_once: bool, file: usize, row: &Row) -> Option<usize> {
        if self.time != time {
            self.time = time;
            self.owners.clear();
        }
        if !at_once && self.owners.is_empty() {
            return None;
        }
        let identity = Identity::of(row);
        if self.owners.len() >= MOMENT_MOST {
            return self.owners.get(&identity).copied().filter(|owner| *owner != file);
        }
        let owner = *self.owners.entry(identity).or_insert(file);
        (owner != file).then_some(owner)
    }
}

/// Which files tell of a place of a process, in turn. One trace has one file for it, and the next trace begins when that
/// has ended.
#[derive(Default)]
struct Takes {
    places: FxHashMap<(Tgid, Place), Vec<usize>>,
}

impl Takes {
    /// The file that told before, where this one has told even earlier.
    fn returns(&mut self, file: usize, row: &Row) -> Option<usize> {
        let told = self.places.entry((row.tgid, row.place()?)).or_default();
        match told.iter().position(|known| *known == file) {
            Some(at) if at + 1 == told.len() => None,
            Some(at) => {
                let before = told.last().copied();
                told.remove(at);
                told.push(file);
                before
            }
            None => {
                told.push(file);
                None
            }
        }
    }
}
