//! Sorting rows that may not fit into memory: sorted runs in a temporary file, merged while they are read back.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crate::dump::read::Key;

/// Bytes of a run read at a time.
const PAGE: usize = 1 << 16;

/// Bytes before each row of a run: its key and its length.
const ROW_HEAD: usize = 4 * size_of::<u64>();

/// Takes rows in any order.
pub(super) struct Sorter {
    memory: usize,
    /// The run that is being gathered: texts, one after another, and where they are.
    text: Vec<u8>,
    rows: Vec<(Key, Range<usize>)>,
    spilled: Option<Spill>,
}

struct Spill {
    file: File,
    length: u64,
    runs: Vec<Range<u64>>,
}

impl Sorter {
    /// `memory`: bytes to use at most before going to disk.
    pub fn new(memory: usize) -> Self {
        Sorter { memory, text: Vec::new(), rows: Vec::new(), spilled: None }
    }

    pub fn push(&mut self, key: Key, text: &[u8]) -> io::Result<()> {
        let used = self.text.len() + self.rows.len() * size_of::<(Key, Range<usize>)>();
        if used + text.len() > self.memory && !self.rows.is_empty() {
            self.spill()?;
        }
        let start = self.text.len();
        self.text.extend_from_slice(text);
        self.rows.push((key, start..self.text.len()));
        Ok(())
    }

    fn spill(&mut self) -> io::Result<()> {
        self.rows.sort_unstable_by_key(|(key, _)| *key);
        let spilled = match &mut self.spilled {
            Some(spilled) => spilled,
            // Without a name: it is gone with the process, however that ends.
            empty => empty.insert(Spill { file: tempfile::tempfile()?, length: 0, runs: Vec::new() }),
        };
        let mut out = io::BufWriter::with_capacity(1 << 20, &spilled.file);
        let start = spilled.length;
        for (key, place) in &self.rows {
            let text = self.text.get(place.clone()).unwrap_or_default();
            for number in [key.time, key.id, key.line, text.len() as u64] {
                out.write_all(&number.to_le_bytes())?;
            }
            out.write_all(text)?;
            spilled.length += (ROW_HEAD + text.len()) as u64;
        }
        out.flush()?;
        drop(out);
        spilled.runs.push(start..spilled.length);
        self.rows.clear();
        self.text.clear();
        Ok(())
    }

    pub fn finish(mut self) -> io::Result<Merge> {
        let Some(Spill { file, runs, .. }) = (match self.spilled {
            Some(_) => {
                self.spill()?;
                self.spilled.take()
            }
            None => None,
        }) else {
            self.rows.sort_unstable_by_key(|(key, _)| *key);
            return Ok(Merge::Memory { text: self.text, rows: self.rows.into_iter() });
        };
        let mut runs: Vec<Run> =
            runs.into_iter().map(|rest| Run { rest, page: Vec::new(), at: 0, row: Vec::new() }).collect();
        let mut next = BinaryHeap::with_capacity(runs.len());
        for (index, run) in runs.iter_mut().enumerate() {
            next.extend(run.advance(&file)?.map(|key| Reverse((key, index))));
        }
        Ok(Merge::Disk { file, runs, next, current: None })
    }
}

/// Gives the rows back in order.
pub(super) enum Merge {
    Memory {
        text: Vec<u8>,
        rows: std::vec::IntoIter<(Key, Range<usize>)>,
    },
    Disk {
        file: File,
        runs: Vec<Run>,
        next: BinaryHeap<Reverse<(Key, usize)>>,
        /// The run whose row was given last.
        current: Option<usize>,
    },
}

impl Merge {
    pub fn next(&mut self) -> Option<io::Result<(Key, &[u8])>> {
        match self {
            Merge::Memory { text, rows } => {
                let (key, place) = rows.next()?;
                Some(Ok((key, text.get(place).unwrap_or_default())))
            }
            Merge::Disk { file, runs, next, current } => {
                if let Some(index) = current.take() {
                    match runs.get_mut(index)?.advance(file) {
                        Ok(key) => next.extend(key.map(|key| Reverse((key, index)))),
                        Err(error) => {
                            next.clear();
                            return Some(Err(error));
                        }
                    }
                }
                let Reverse((key, index)) = next.pop()?;
                *current = Some(index);
                Some(Ok((key, &runs.get(index)?.row)))
            }
        }
    }
}

/// A sorted part of the temporary file.
pub(super) struct Run {
    /// What is still in the file.
    rest: Range<u64>,
    /// What was read of it, used up to `at`.
    page: Vec<u8>,
    at: usize,
    /// The current row.
    row: Vec<u8>,
}

impl Run {
    /// Goes to the next row and returns its key.
    fn advance(&mut self, file: &File) -> io::Result<Option<Key>> {
        if self.at == self.page.len() && self.rest.is_empty() {
            return Ok(None);
        }
        let mut number = || {
            let mut bytes = [0; size_of::<u64>()];
            self.read(file, &mut bytes).map(|()| u64::from_le_bytes(bytes))
        };
        let key = Key { time: number()?, id: number()?, line: number()? };
        let length = number()? as usize;
        let mut row = std::mem::take(&mut self.row);
        row.resize(length, 0);
        let result = self.read(file, &mut row);
        self.row = row;
        result.map(|()| Some(key))
    }

    fn read(&mut self, file: &File, out: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < out.len() {
            if self.at == self.page.len() {
                let left = usize::try_from(self.rest.end - self.rest.start).unwrap_or(usize::MAX);
                if left == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                self.page.resize(left.min(PAGE), 0);
                file.read_exact_at(&mut self.page, self.rest.start)?;
                self.rest.start += self.page.len() as u64;
                self.at = 0;
            }
            let count = (self.page.len() - self.at).min(out.len() - done);
            out[done..done + count].copy_from_slice(&self.page[self.at..self.at + count]);
            self.at += count;
            done += count;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_come_back_in_order_from_memory_and_from_disk() {
        // Every third number backwards, with texts from nothing to larger than a page.
        let rows: Vec<(Key, Vec<u8>)> = (0..5000u64)
            .map(|n| {
                let time = (n * 7919) % 4999;
                let length = if n % 1000 == 0 { PAGE + 17 } else { (n % 50) as usize };
                (Key { time, id: n % 3, line: n }, vec![n as u8; length])
            })
            .collect();
        let mut expected = rows.clone();
        expected.sort();
        for memory in [usize::MAX, 1 << 18, 1000, 0] {
            let mut sorter = Sorter::new(memory);
            for (key, text) in &rows {
                sorter.push(*key, text).expect("room on disk");
            }
            let runs = sorter.spilled.as_ref().map_or(0, |spilled| spilled.runs.len());
            assert_eq!(runs > 0, memory != usize::MAX);
            let mut merge = sorter.finish().expect("room on disk");
            let mut found = Vec::new();
            while let Some(row) = merge.next() {
                let (key, text) = row.expect("the file is readable");
                found.push((key, text.to_vec()));
            }
            assert!(found == expected, "with {memory} bytes");
        }
    }
}
