//! The segments of one capture as one source.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::dump::parse::{Attrs, Dialect, Fields, Parser, RowError, Unheld};
use crate::dump::read::{Key, Keyed, Problem, ProblemKind, ReadError, Source};

use super::batch::{Columns, schema};
use super::message::Batches;
use super::{Column, FORMAT, METADATA_FORMAT, METADATA_ROWS_BEFORE};

/// Rows by which a row may be late to be put in order.
const WINDOW: usize = 1 << 12;

pub(in crate::dump) fn is_capture(file: &mut File) -> io::Result<bool> {
    let mut start = Vec::new();
    file.take(4).read_to_end(&mut start)?;
    Ok(start == [0xff; 4])
}

/// A capture, opened at its first segment.
pub(in crate::dump) struct CaptureSource {
    segments: VecDeque<Arc<Path>>,
    current: Option<Segment>,
    parser: Parser,
    /// Rows to come, in order.
    waiting: VecDeque<Keyed>,
    problems: VecDeque<Problem>,
}

struct Segment {
    path: Arc<Path>,
    batches: Batches,
    /// The batch that is read, and the row that comes next.
    columns: Option<(Columns, usize)>,
    rows: u64,
    /// Nothing more can be read.
    ended: bool,
    /// Whether what it repeats of earlier segments is to be taken: those are not there.
    carried: bool,
}

impl CaptureSource {
    /// `segments`: in order.
    pub fn open(segments: Vec<PathBuf>, unheld: Unheld) -> Result<Self, ReadError> {
        let mut segments: VecDeque<Arc<Path>> = segments.into_iter().map(Arc::from).collect();
        let mut problems = VecDeque::new();
        let current = match segments.pop_front() {
            Some(path) => {
                let (segment, rows_before) = Segment::open(path, true)?;
                if rows_before > 0 {
                    let kind = ProblemKind::Removed { rows: rows_before };
                    problems.push_back(Problem { path: segment.path.clone(), line: 0, kind });
                }
                Some(segment)
            }
            None => None,
        };
        let parser = Parser::new(Dialect::Plain, unheld);
        Ok(CaptureSource { segments, current, parser, waiting: VecDeque::new(), problems })
    }

    /// Reads a row, until there are none; what can not be read becomes a problem.
    fn read(&mut self) -> bool {
        loop {
            let Some(segment) = &mut self.current else {
                let Some(path) = self.segments.pop_front() else { return false };
                match Segment::open(path.clone(), false) {
                    Ok((segment, _)) => self.current = Some(segment),
                    Err(error) => {
                        self.problems.push_back(Problem::io(&path, 0, &io::Error::other(error)));
                    }
                }
                continue;
            };
            match segment.next(&mut self.parser) {
                Some(Ok(row)) => {
                    insert(&mut self.waiting, row);
                    return true;
                }
                Some(Err(problem)) => self.problems.push_back(problem),
                None => self.current = None,
            }
        }
    }
}

/// Puts a row in its place; nearly always that is the last one.
fn insert(waiting: &mut VecDeque<Keyed>, row: Keyed) {
    if waiting.back().is_none_or(|last| last.key <= row.key) {
        return waiting.push_back(row);
    }
    let at = waiting.partition_point(|before| before.key <= row.key);
    waiting.insert(at, row);
}

impl Source for CaptureSource {
    fn next(&mut self) -> Option<Result<Keyed, Problem>> {
        while self.waiting.len() <= WINDOW && self.read() {}
        match self.problems.pop_front() {
            Some(problem) => Some(Err(problem)),
            None => self.waiting.pop_front().map(Ok),
        }
    }
}

impl Segment {
    /// With the number of rows in the segments before it.
    fn open(path: Arc<Path>, carried: bool) -> Result<(Self, u64), ReadError> {
        let file = File::open(&path).map_err(|source| ReadError::read(&path, source))?;
        let refused = |why: String| ReadError::NotACapture { path: path.to_path_buf(), why };
        let batches = Batches::open(file).map_err(|error| refused(error.to_string()))?;
        let of_stream = batches.schema();
        let format = of_stream.metadata().get(METADATA_FORMAT).map(String::as_str);
        if of_stream.fields() != schema(Default::default()).fields() || format != Some(FORMAT) {
            return Err(refused("it has other columns, or is of a later version".into()));
        }
        let rows_before = of_stream.metadata().get(METADATA_ROWS_BEFORE).and_then(|rows| rows.parse().ok());
        Ok((
            Segment { path, batches, columns: None, rows: 0, ended: false, carried },
            rows_before.unwrap_or(0),
        ))
    }

    fn next(&mut self, parser: &mut Parser) -> Option<Result<Keyed, Problem>> {
        loop {
            let Some((columns, next)) = &mut self.columns else {
                if self.ended {
                    return None;
                }
                match self.batches.next() {
                    Ok(Some(batch)) => self.columns = Columns::of(batch).map(|columns| (columns, 0)),
                    Ok(None) => return None,
                    Err(error) => {
                        self.ended = true;
                        return Some(Err(Problem::io(&self.path, self.rows, &io::Error::other(error))));
                    }
                }
                continue;
            };
            let row = *next;
            if row >= columns.rows() {
                self.columns = None;
                continue;
            }
            *next += 1;
            self.rows += 1;
            if columns.flag(Column::Carried, row) && !self.carried {
                continue;
            }
            match parse(parser, columns, row, self.rows) {
                Ok(Some(row)) => return Some(Ok(row)),
                Ok(None) => {}
                Err(error) => return Some(Err(Problem::row(&self.path, self.rows, error))),
            }
        }
    }
}

/// Columns that hold numbers, and the attribute that each of the last is.
const NUMBERS: [(Column, &[u8]); 16] = [
    (Column::Id, b""),
    (Column::Time, b""),
    (Column::Pid, b""),
    (Column::Tid, b""),
    (Column::Device, b""),
    (Column::Ptr, b""),
    (Column::AllocationId, b"allocation_id"),
    (Column::Size, b"size"),
    (Column::Total, b"total"),
    (Column::Used, b"used"),
    (Column::ApiSize, b"api_size"),
    (Column::StreamId, b"streamId"),
    (Column::Range, b"range"),
    (Column::Handle, b"handle"),
    (Column::ReqSize, b"req_size"),
    (Column::Ret, b"ret"),
];

/// Columns that hold the texts of attributes.
const TEXTS: [(Column, &[u8]); 7] = [
    (Column::Owner, b"owner"),
    (Column::Pool, b"pool"),
    (Column::PageType, b"page_type"),
    (Column::AllocType, b"alloc_type"),
    (Column::Api, b"api"),
    (Column::Domain, b"domain"),
    (Column::Func, b"func"),
];

fn parse(parser: &mut Parser, columns: &Columns, row: usize, line: u64) -> Result<Option<Keyed>, RowError> {
    let numbers =
        NUMBERS.map(|(column, _)| columns.number(column, row).map(|number| Digits::of(column, number)));
    let number = |column: Column| {
        let at = NUMBERS.iter().position(|(of, _)| *of == column);
        at.and_then(|at| numbers.get(at)?.as_ref()).map(Digits::text)
    };
    let text = |column| columns.text(column, row).map(str::as_bytes);
    let mut attrs = Attrs::default();
    for ((_, key), digits) in NUMBERS.iter().zip(&numbers) {
        if let Some(digits) = digits {
            attrs.set(key, digits.text());
        }
    }
    for (column, key) in TEXTS {
        if let Some(text) = text(column) {
            attrs.set(key, text);
        }
    }
    if columns.flag(Column::Shadow, row) {
        attrs.set(b"shadow", b"true");
    }
    let parsed = parser.parse(&Fields {
        id: number(Column::Id).unwrap_or_default(),
        event: text(Column::Event).unwrap_or_default(),
        event_type: text(Column::EventType).unwrap_or_default(),
        name: text(Column::Name).unwrap_or_default(),
        time: number(Column::Time).unwrap_or_default(),
        pid: number(Column::Pid).unwrap_or_default(),
        tid: number(Column::Tid).unwrap_or_default(),
        device: number(Column::Device).unwrap_or_default(),
        ptr: number(Column::Ptr).unwrap_or_default(),
        attrs,
        python: text(Column::Python).unwrap_or_default(),
        native: text(Column::Native).unwrap_or_default(),
    })?;
    Ok(parsed.map(|parsed| Keyed { key: Key { time: parsed.row.time.0, id: parsed.id, line }, parsed }))
}

/// A number as text, which is what rows are parsed from.
struct Digits {
    text: [u8; 20],
    start: u8,
}

impl Digits {
    fn of(column: Column, number: u64) -> Self {
        let mut digits = Digits { text: [0; 20], start: 20 };
        let signed = (column == Column::Ret).then_some(number as i64);
        let mut rest = signed.map_or(number, i64::unsigned_abs);
        loop {
            digits.put(b'0' + (rest % 10) as u8);
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        if signed.is_some_and(|number| number < 0) {
            digits.put(b'-');
        }
        digits
    }

    fn put(&mut self, byte: u8) {
        self.start = self.start.saturating_sub(1);
        if let Some(place) = self.text.get_mut(usize::from(self.start)) {
            *place = byte;
        }
    }

    fn text(&self) -> &[u8] {
        self.text.get(usize::from(self.start)..).unwrap_or_default()
    }
}
