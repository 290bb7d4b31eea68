//! One CSV file in order of time, in bounded memory.
//!
//! msMemScope writes the rows of a block when it dies: a file can be in any order. So the file is first read for the
//! keys alone. Where each row is at most a window away from its place, as in what we write, rows are put in order
//! while they are read; else the file is sorted, on disk when it is larger than the memory allowed.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use crate::dump::COLUMNS;
use crate::dump::parse::{Attrs, Dialect, Fields, Parser, RowError, Unheld, key};
use crate::dump::read::{Key, Keyed, Problem, ReadError, Source};

use super::scan::{Cells, Lines};
use super::sort::{Merge, Sorter};

/// Rows by which a row may be late to be put in order while reading.
const WINDOW: usize = 1 << 14;

/// Longest header that is looked at.
const HEADER_MAX: usize = 4096;

/// A dump in CSV, opened and looked through.
pub(in crate::dump) struct CsvSource {
    path: Arc<Path>,
    order: Order,
    parser: Parser,
}

enum Order {
    /// As in the file, but for rows that are up to `window` places late.
    Nearly { lines: Lines<File>, window: usize, waiting: BinaryHeap<Reverse<Keyed>>, at_end: bool },
    /// Sorted; what could not be sorted comes first.
    Sorted { problems: VecDeque<Problem>, rows: Merge },
}

impl CsvSource {
    /// `memory`: bytes that sorting may use before it goes to disk.
    pub fn open(path: Arc<Path>, mut file: File, memory: usize, unheld: Unheld) -> Result<Self, ReadError> {
        let body = check_header(&path, &mut file)?;
        let lines = || -> Result<Lines<File>, ReadError> {
            let mut file = file.try_clone().map_err(|source| ReadError::read(&path, source))?;
            file.seek(SeekFrom::Start(body)).map_err(|source| ReadError::read(&path, source))?;
            Ok(Lines::new(file, 2))
        };
        let order = match lateness(lines()?) {
            Some(window) => {
                Order::Nearly { lines: lines()?, window, waiting: BinaryHeap::new(), at_end: false }
            }
            None => {
                let (problems, rows) = sort(&path, lines()?, memory)?;
                Order::Sorted { problems, rows }
            }
        };
        Ok(CsvSource { path, order, parser: Parser::new(Dialect::Csv, unheld) })
    }
}

impl Source for CsvSource {
    fn next(&mut self) -> Option<Result<Keyed, Problem>> {
        let CsvSource { path, order, parser } = self;
        match order {
            Order::Nearly { lines, window, waiting, at_end } => {
                while !*at_end && waiting.len() <= *window {
                    match lines.next() {
                        Ok(None) => *at_end = true,
                        Ok(Some((line, cells))) => {
                            match cells.map_err(RowError::from).and_then(|cells| parse(parser, line, &cells))
                            {
                                Ok(Some(row)) if *window == 0 => return Some(Ok(row)),
                                Ok(Some(row)) => waiting.push(Reverse(row)),
                                Ok(None) => {}
                                Err(error) => return Some(Err(Problem::row(path, line, error))),
                            }
                        }
                        Err(error) => {
                            *at_end = true;
                            return Some(Err(Problem::io(path, lines.line(), &error)));
                        }
                    }
                }
                waiting.pop().map(|Reverse(row)| Ok(row))
            }
            Order::Sorted { problems, rows } => {
                if let Some(problem) = problems.pop_front() {
                    return Some(Err(problem));
                }
                loop {
                    let (key, text) = match rows.next()? {
                        Ok(row) => row,
                        Err(error) => return Some(Err(Problem::io(path, 0, &error))),
                    };
                    match Cells::split(text)
                        .map_err(RowError::from)
                        .and_then(|cells| parse(parser, key.line, &cells))
                    {
                        Ok(Some(row)) => return Some(Ok(row)),
                        Ok(None) => {}
                        Err(error) => return Some(Err(Problem::row(path, key.line, error))),
                    }
                }
            }
        }
    }
}

fn parse(parser: &mut Parser, line: u64, cells: &Cells<'_>) -> Result<Option<Keyed>, RowError> {
    let attrs = Attrs::from_csv(cells.get(9), |key| parser.unheld(key));
    let parsed = parser.parse(&Fields {
        id: cells.get(0),
        event: cells.get(1),
        event_type: cells.get(2),
        name: cells.get(3),
        time: cells.get(4),
        pid: cells.get(5),
        tid: cells.get(6),
        device: cells.get(7),
        ptr: cells.get(8),
        attrs,
        python: cells.get(10),
        native: cells.get(11),
    })?;
    Ok(parsed.map(|parsed| Keyed { key: Key { time: parsed.row.time.0, id: parsed.id, line }, parsed }))
}

fn key_of(line: u64, cells: &Cells<'_>) -> Result<Key, RowError> {
    let (id, time) = key(cells.get(0), cells.get(4))?;
    Ok(Key { time, id, line })
}

/// Where the rows begin.
fn check_header(path: &Path, file: &mut File) -> Result<u64, ReadError> {
    let mut start = vec![0; HEADER_MAX];
    let mut length = 0;
    while let Some(rest) = start.get_mut(length..).filter(|rest| !rest.is_empty()) {
        match io::Read::read(file, rest) {
            Ok(0) => break,
            Ok(count) => length += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(source) => return Err(ReadError::read(path, source)),
        }
    }
    start.truncate(length);
    if start.is_empty() {
        return Err(ReadError::Empty { path: path.to_owned() });
    }
    let end = memchr::memchr(b'\n', &start);
    let line = start.get(..end.unwrap_or(length)).unwrap_or_default();
    let text = String::from_utf8_lossy(line);
    if text.trim_start_matches('\u{feff}').trim() != COLUMNS.join(",") {
        return Err(ReadError::not_a_dump(path, line));
    }
    Ok(end.map_or(length, |end| end + 1) as u64)
}

/// By how many places the latest row is late; `None` when by more than the window.
fn lateness(mut lines: Lines<File>) -> Option<usize> {
    // The largest key up to each of the last rows, ascending.
    let mut highest: VecDeque<(u64, u64)> = VecDeque::with_capacity(WINDOW + 1);
    let mut latest = 0;
    while let Ok(Some((line, cells))) = lines.next() {
        let Ok(Key { time, id, .. }) = cells.map_err(RowError::from).and_then(|cells| key_of(line, &cells))
        else {
            continue;
        };
        let key = (time, id);
        match highest.back().copied() {
            Some(before) if before > key => {
                let place = highest.partition_point(|highest| *highest <= key);
                latest = latest.max(highest.len() - place);
                if latest > WINDOW {
                    return None;
                }
                highest.push_back(before);
            }
            _ => highest.push_back(key),
        }
        if highest.len() > WINDOW + 1 {
            highest.pop_front();
        }
    }
    Some(latest)
}

fn sort(path: &Path, mut lines: Lines<File>, memory: usize) -> Result<(VecDeque<Problem>, Merge), ReadError> {
    let failed = |source| ReadError::Sort { path: path.to_owned(), source };
    let path: Arc<Path> = path.into();
    let mut problems = VecDeque::new();
    let mut sorter = Sorter::new(memory);
    loop {
        match lines.next() {
            Ok(None) => break,
            Ok(Some((line, cells))) => {
                let cells = match cells {
                    Ok(cells) => cells,
                    Err(error) => {
                        problems.push_back(Problem::row(&path, line, error.into()));
                        continue;
                    }
                };
                match key_of(line, &cells) {
                    Ok(key) => sorter.push(key, cells.text()).map_err(failed)?,
                    Err(error) => problems.push_back(Problem::row(&path, line, error)),
                }
            }
            Err(error) => {
                problems.push_back(Problem::io(&path, lines.line(), &error));
                break;
            }
        }
    }
    Ok((problems, sorter.finish().map_err(failed)?))
}
