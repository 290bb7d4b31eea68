//! Splitting CSV into rows and cells.
//!
//! Dumps are not always CSV as a library would have it: msMemScope writes the texts of marks between quotation marks
//! without doubling those inside, and stacks over several lines. A general parser that meets one stray quotation mark
//! takes the rest of the file for one cell. Here a quotation mark closes a cell only where a separator follows, cells
//! before the stacks end with their line, and after a malformed row reading goes on with the next line.

use std::io::{self, Read};
use std::ops::Range;

use memchr::{memchr, memchr2};

use crate::dump::COLUMNS;

const COUNT: usize = COLUMNS.len();

/// Only from here on may a cell have several lines.
const FIRST_STACK: usize = 10;

/// No row is longer; a quotation mark without its counterpart costs at most this much reading ahead.
const MAX_ROW: usize = 1 << 20;

/// Bytes read at a time.
const CHUNK: usize = 1 << 18;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(in crate::dump) enum SplitError {
    #[error("{} instead of {COUNT}", crate::report::units::count_of(*.0 as u64, "cell"))]
    Cells(usize),
    #[error("more than {COUNT} cells")]
    TooManyCells,
    #[error("the quotation mark before cell {0} is not closed")]
    OpenQuote(usize),
    #[error("the file ends within this row")]
    CutOff,
    #[error("the row has more than {MAX_ROW} bytes")]
    TooLong,
}

/// The cells of one row.
#[derive(Clone)]
pub(in crate::dump) struct Cells<'a> {
    text: &'a [u8],
    ranges: Ranges,
}

type Ranges = [Range<usize>; COUNT];

impl<'a> Cells<'a> {
    /// Splits the text of one row, as it was delivered by [`Lines`].
    pub fn split(text: &'a [u8]) -> Result<Self, SplitError> {
        let split = split(text, true)?.ok_or(SplitError::CutOff)?;
        Ok(Cells { text, ranges: split.ranges })
    }

    /// The bytes of a cell, without the quotation marks around it. Doubled ones inside are still doubled.
    pub fn get(&self, column: usize) -> &'a [u8] {
        self.ranges.get(column).and_then(|range| self.text.get(range.clone())).unwrap_or_default()
    }

    /// The row, as it is in the file.
    pub fn text(&self) -> &'a [u8] {
        self.text
    }
}

/// The rows of a CSV file.
pub(in crate::dump) struct Lines<R> {
    input: R,
    buffer: Vec<u8>,
    /// Where in the buffer the next row begins.
    start: usize,
    /// Line of the file on which it begins, from 1.
    line: u64,
    at_end: bool,
}

impl<R: Read> Lines<R> {
    /// `line`: the number of the line with which `input` begins.
    pub fn new(input: R, line: u64) -> Self {
        Lines { input, buffer: Vec::new(), start: 0, line, at_end: false }
    }

    /// The line on which the next row begins.
    pub fn line(&self) -> u64 {
        self.line
    }

    /// The next row and the number of its first line, or what is wrong with it.
    pub fn next(&mut self) -> io::Result<Option<(u64, Result<Cells<'_>, SplitError>)>> {
        let result = loop {
            self.skip_blank_lines();
            let text = self.rest();
            if text.is_empty() {
                if self.at_end {
                    return Ok(None);
                }
                self.fill()?;
                continue;
            }
            match split(text, self.at_end) {
                Ok(None) if !self.at_end && text.len() < MAX_ROW => self.fill()?,
                Ok(None) => break Err(if self.at_end { SplitError::CutOff } else { SplitError::TooLong }),
                Ok(Some(split)) => break Ok(split),
                Err(error) => break Err(error),
            }
        };
        let (start, line) = (self.start, self.line);
        match result {
            Ok(Split { length, lines, ranges }) => {
                self.start += length;
                self.line += lines;
                let text = self.buffer.get(start..self.start).unwrap_or_default();
                Ok(Some((line, Ok(Cells { text, ranges }))))
            }
            Err(error) => {
                self.skip_line()?;
                while self.is_rest_of_row()? {
                    self.skip_line()?;
                }
                Ok(Some((line, Err(error))))
            }
        }
    }

    fn rest(&self) -> &[u8] {
        self.buffer.get(self.start..).unwrap_or_default()
    }

    fn skip_blank_lines(&mut self) {
        loop {
            match self.rest() {
                [b'\n', ..] => self.start += 1,
                [b'\r', b'\n', ..] => self.start += 2,
                _ => return,
            }
            self.line += 1;
        }
    }

    /// Whether the next line, after a malformed row, is one of its stack: neither a row nor the beginning of one.
    fn is_rest_of_row(&mut self) -> io::Result<bool> {
        loop {
            let text = self.rest();
            let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
            let is_read = self.at_end || memchr(b'\n', text).is_some() || text.len() >= MAX_ROW;
            if !is_read {
                self.fill()?;
                continue;
            }
            let is_blank = matches!(text, [] | [b'\n', ..] | [b'\r', b'\n', ..]);
            let begins_row = digits > 0 && text.get(digits) == Some(&b',');
            return Ok(!is_blank && !begins_row && split(text, true).is_err());
        }
    }

    fn skip_line(&mut self) -> io::Result<()> {
        loop {
            if let Some(end) = memchr(b'\n', self.rest()) {
                self.start += end + 1;
                self.line += 1;
                return Ok(());
            }
            self.start = self.buffer.len();
            if self.at_end {
                return Ok(());
            }
            self.fill()?;
        }
    }

    /// Reads on, behind what is still unread.
    fn fill(&mut self) -> io::Result<()> {
        self.buffer.drain(..self.start);
        self.start = 0;
        let unread = self.buffer.len();
        self.buffer.resize(unread + CHUNK, 0);
        let result = loop {
            match self.input.read(self.buffer.get_mut(unread..).unwrap_or_default()) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => break result,
            }
        };
        let count = *result.as_ref().unwrap_or(&0);
        self.buffer.truncate(unread + count);
        self.at_end = count == 0;
        result.map(|_| ())
    }
}

struct Split {
    /// Bytes of the row, with its end of line.
    length: usize,
    lines: u64,
    ranges: Ranges,
}

/// Splits the row at the beginning of `text`; `None`: its end is not in `text`. Quotation marks inside a cell are
/// first taken to be doubled, and where that makes no row, to be written as they are.
fn split(text: &[u8], at_end: bool) -> Result<Option<Split>, SplitError> {
    match split_quoted(text, at_end, true) {
        Err(error) => split_quoted(text, at_end, false).map_err(|_| error),
        split => split,
    }
}

fn split_quoted(text: &[u8], at_end: bool, doubled: bool) -> Result<Option<Split>, SplitError> {
    let mut ranges: Ranges = Default::default();
    let mut lines = 0;
    let mut at = 0;
    for (column, range) in ranges.iter_mut().enumerate() {
        let rest = text.get(at..).unwrap_or_default();
        if rest.first() == Some(&b'"') {
            match closing_quote(rest, column >= FIRST_STACK, at_end, doubled) {
                Closing::At(close) => {
                    let cell = rest.get(1..close).unwrap_or_default();
                    if column >= FIRST_STACK {
                        lines += memchr::memchr_iter(b'\n', cell).count() as u64;
                    }
                    *range = at + 1..at + close;
                    at += close + 1;
                }
                Closing::Unknown => return Ok(None),
                Closing::Nowhere => return Err(SplitError::OpenQuote(column + 1)),
            }
        } else {
            let end = match memchr2(b',', b'\n', rest) {
                Some(end) => end,
                None if at_end => rest.len(),
                None => return Ok(None),
            };
            let cell = rest.get(..end).unwrap_or_default();
            // A carriage return is part of the end of line.
            let cut = usize::from(cell.last() == Some(&b'\r') && rest.get(end) != Some(&b','));
            *range = at..at + end - cut;
            at += end - cut;
        }
        let end = match text.get(at..).unwrap_or_default() {
            [b',', ..] => {
                at += 1;
                continue;
            }
            [b'\n', ..] => 1,
            [b'\r', b'\n', ..] => 2,
            rest => rest.len(),
        };
        if column + 1 < COUNT {
            let cut_off = at_end && at + end == text.len() && text.last() != Some(&b'\n');
            return Err(if cut_off { SplitError::CutOff } else { SplitError::Cells(column + 1) });
        }
        return Ok(Some(Split { length: at + end, lines: lines + 1, ranges }));
    }
    Err(SplitError::TooManyCells)
}

enum Closing {
    At(usize),
    /// Perhaps behind the end of the text.
    Unknown,
    Nowhere,
}

/// Where the quotation mark is that closes the one at the beginning of `text`.
fn closing_quote(text: &[u8], several_lines: bool, at_end: bool, doubled: bool) -> Closing {
    let open_end = if at_end { Closing::Nowhere } else { Closing::Unknown };
    let mut from = 1;
    loop {
        let rest = text.get(from..).unwrap_or_default();
        let found = if several_lines { memchr(b'"', rest) } else { memchr2(b'"', b'\n', rest) };
        let Some(found) = found else { return open_end };
        let at = from + found;
        match text.get(at..).unwrap_or_default() {
            [b'"', b',' | b'\n', ..] | [b'"', b'\r', b'\n', ..] => return Closing::At(at),
            [b'"'] | [b'"', b'\r'] => return if at_end { Closing::At(at) } else { Closing::Unknown },
            [b'"', b'"', ..] if doubled => from = at + 2,
            [b'"', ..] => from = at + 1,
            _ => return Closing::Nowhere,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Row = (u64, Result<Vec<String>, SplitError>);

    /// Reads `text` in pieces of `piece` bytes.
    fn rows(text: &str, piece: usize) -> Vec<Row> {
        struct Pieces<'a>(&'a [u8], usize);
        impl Read for Pieces<'_> {
            fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
                let count = self.1.min(out.len());
                self.0.read(&mut out[..count])
            }
        }
        let mut lines = Lines::new(Pieces(text.as_bytes(), piece), 1);
        let mut rows = Vec::new();
        while let Some((line, row)) = lines.next().expect("memory is readable") {
            let cells = row.map(|cells| {
                assert_eq!(Cells::split(cells.text()).expect("as before").ranges, cells.ranges);
                (0..COUNT).map(|column| String::from_utf8_lossy(cells.get(column)).into_owned()).collect()
            });
            rows.push((line, cells));
        }
        rows
    }

    fn cells(line: u64, text: &str) -> Row {
        (line, Ok(text.split('|').map(str::to_owned).collect()))
    }

    #[test]
    fn cells_are_found_in_every_dialect() {
        let text = concat!(
            "1,b,c,N/A,5,6,7,8,9,,,\n",
            "\n",
            "1,b,c,\"a, b\",5,6,7,8,9,\"{k:v,k:v}\",,\r\n",
            "1,b,c,\"say \"\"hi\"\"\",5,6,7,8,9,\"{}\",\"f(1): g\nh(2): i\",\"C\"\n",
            "1,b,c,\"say \"hi\" there\",5,6,7,8,9,\"{}\",,\n",
            "1,b,c,\"say \"hi\"\",5,6,7,8,9,\"{}\",,\n",
            "1,b,c,a \"b\" c,5,6,7,8,9,x,,y",
        );
        let expected = [
            cells(1, "1|b|c|N/A|5|6|7|8|9|||"),
            cells(3, "1|b|c|a, b|5|6|7|8|9|{k:v,k:v}||"),
            cells(4, "1|b|c|say \"\"hi\"\"|5|6|7|8|9|{}|f(1): g\nh(2): i|C"),
            cells(6, "1|b|c|say \"hi\" there|5|6|7|8|9|{}||"),
            cells(7, "1|b|c|say \"hi\"|5|6|7|8|9|{}||"),
            cells(8, "1|b|c|a \"b\" c|5|6|7|8|9|x||y"),
        ];
        for piece in [1, 2, 7, 1000] {
            assert_eq!(rows(text, piece), expected, "in pieces of {piece}");
        }
    }

    #[test]
    fn a_malformed_row_costs_itself_only() {
        let good = "1,b,c,N/A,5,6,7,8,9,,,";
        let text = format!(
            "{good}\nfew,cells\n{good}\n1,b,c,\"open,5,6,7,8,9,{{}},,\n{good}\n{good},,\n{good}\n\
             1,b,c,d,5,6,7,8,9,,\"stack\nwithout end\n{good}\n1,b,c,d,5"
        );
        let good = cells(0, "1|b|c|N/A|5|6|7|8|9|||").1;
        for piece in [1, 10, 1000] {
            let found: Vec<Row> = rows(&text, piece);
            assert_eq!(
                found,
                [
                    (1, good.clone()),
                    (2, Err(SplitError::Cells(2))),
                    (3, good.clone()),
                    (4, Err(SplitError::OpenQuote(4))),
                    (5, good.clone()),
                    (6, Err(SplitError::TooManyCells)),
                    (7, good.clone()),
                    // With what is left of its stack.
                    (8, Err(SplitError::OpenQuote(11))),
                    (10, good.clone()),
                    (11, Err(SplitError::CutOff)),
                ],
                "in pieces of {piece}"
            );
        }
    }

    #[test]
    fn an_endless_row_is_given_up() {
        let good = "1,b,c,N/A,5,6,7,8,9,,,";
        let text = format!("1,b,c,\"{}\n{good}\n", "x".repeat(3 * MAX_ROW));
        let found = rows(&text, usize::MAX);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0], (1, Err(SplitError::TooLong)));
        assert_eq!(found[1], (2, cells(2, "1|b|c|N/A|5|6|7|8|9|||").1));
    }
}
