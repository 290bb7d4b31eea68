//! One capture, in one file or in segments.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_ipc::writer::{IpcWriteOptions, StreamWriter};
use arrow_ipc::{CompressionType, MetadataVersion};
use arrow_schema::{ArrowError, Schema};

use crate::dump::output::Dir;
use crate::dump::record::Record;
use crate::dump::row::Row;
use crate::dump::table::{Closed, Stopped, TableFile};

use super::alive::Alive;
use super::batch::{Gathered, schema};
use super::{EXTENSION, FORMAT, METADATA_FORMAT, METADATA_ROWS_BEFORE, METADATA_SEGMENT, segment_stem};

/// Rows wait for others at most this long, and until the flush after it.
const WAIT: Duration = Duration::from_millis(700);

/// Bytes that columns are aligned to. Readers decompress them to where they like; padding would be half of a small batch.
const ALIGNMENT: usize = 8;

/// Segments that fit into the bound: what is lost at a time is one of them.
const SEGMENTS: u64 = 4;

pub(in crate::dump) struct CaptureFile {
    dir: Dir,
    stem: String,
    /// `None`: as large as it gets.
    bound: Option<Bound>,
    segment: Segment,
    gathered: Gathered,
    encoder: StreamWriter<Vec<u8>>,
    written_at: Instant,
    /// Rows that are gathered, or in a batch that is being written.
    unwritten: u64,
    /// Rows that are gone, in segments that have been removed.
    removed_rows: u64,
    /// The file of the segment.
    file: File,
}

struct Bound {
    /// Bytes of all segments.
    bytes: u64,
    alive: Alive,
    /// Segments before the one that is written, oldest first.
    earlier: VecDeque<Segment>,
}

struct Segment {
    /// From 1; `None` where there is only one.
    number: Option<u64>,
    bytes: u64,
    /// Bytes at its beginning that repeat what earlier segments say.
    carried_bytes: u64,
    /// Without those carried over.
    rows: u64,
}

impl CaptureFile {
    /// Creates `<stem>.arrows`, or with a bound in bytes its first segment.
    pub fn create(dir: Dir, stem: String, bound: Option<u64>) -> io::Result<Self> {
        let number = bound.map(|_| 1);
        let (file, gathered, encoder) = begin(&dir, &stem, number, 0)?;
        let segment = Segment { number, bytes: 0, carried_bytes: 0, rows: 0 };
        let bound = bound.map(|bytes| Bound { bytes, alive: Alive::default(), earlier: VecDeque::new() });
        let written_at = Instant::now();
        let (unwritten, removed_rows) = (0, 0);
        let mut capture = CaptureFile {
            dir,
            stem,
            bound,
            segment,
            gathered,
            encoder,
            written_at,
            unwritten,
            removed_rows,
            file,
        };
        // A stream without its schema is none.
        capture.write_encoded()?;
        Ok(capture)
    }

    fn name(&self) -> String {
        format!("{}.{EXTENSION}", segment_stem(&self.stem, self.segment.number))
    }

    /// Writes what has been gathered as one batch.
    fn write_batch(&mut self) -> io::Result<()> {
        self.written_at = Instant::now();
        if self.gathered.rows() == 0 {
            return Ok(());
        }
        let batch = self.gathered.take().map_err(io_error)?;
        self.encoder.write(&batch).map_err(io_error)?;
        self.write_encoded()?;
        self.segment.rows += std::mem::take(&mut self.unwritten);
        Ok(())
    }

    fn write_encoded(&mut self) -> io::Result<()> {
        let bytes = std::mem::take(self.encoder.get_mut());
        self.file.write_all(&bytes)?;
        self.segment.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Goes on in another segment when this one has its share of the bound, and removes the oldest until there is room
    /// for another share.
    fn rotate(&mut self) -> io::Result<()> {
        let Some(bound) = &mut self.bound else { return Ok(()) };
        let share = bound.bytes / SEGMENTS;
        if self.segment.bytes - self.segment.carried_bytes < share {
            return Ok(());
        }
        self.encoder.finish().map_err(io_error)?;
        self.write_encoded()?;
        let Some(bound) = &mut self.bound else { return Ok(()) };
        let number = self.segment.number.map(|number| number + 1);
        let rows_before = self.removed_rows
            + self.segment.rows
            + bound.earlier.iter().map(|segment| segment.rows).sum::<u64>();
        let next = Segment { number, bytes: 0, carried_bytes: 0, rows: 0 };
        let (file, gathered, encoder) = begin(&self.dir, &self.stem, number, rows_before)?;
        bound.earlier.push_back(std::mem::replace(&mut self.segment, next));
        (self.file, self.gathered, self.encoder) = (file, gathered, encoder);
        self.write_carried()?;
        self.remove_oldest(share);
        Ok(())
    }

    fn write_carried(&mut self) -> io::Result<()> {
        let alive = self.bound.as_mut().map(|bound| std::mem::take(&mut bound.alive));
        let mut result = Ok(());
        if let Some(alive) = &alive {
            alive.records(|id, row, record| {
                if result.is_ok() {
                    self.gathered.push(id, row, record, true);
                    if self.gathered.is_full() {
                        result = self.write_batch();
                    }
                }
            });
        }
        if let (Some(bound), Some(alive)) = (&mut self.bound, alive) {
            bound.alive = alive;
        }
        result?;
        self.write_batch()?;
        self.write_encoded()?;
        self.segment.carried_bytes = self.segment.bytes;
        Ok(())
    }

    fn remove_oldest(&mut self, share: u64) {
        let Some(bound) = &mut self.bound else { return };
        let current = self.segment.bytes + share;
        while bound.earlier.iter().map(|segment| segment.bytes).sum::<u64>() + current > bound.bytes
            && let Some(oldest) = bound.earlier.pop_front()
        {
            let name = format!("{}.{EXTENSION}", segment_stem(&self.stem, oldest.number));
            if let Err(error) = self.dir.remove(&name) {
                tracing::warn!("{}: cannot remove {name}: {error}", self.dir.path().display());
            }
            self.removed_rows += oldest.rows;
        }
    }

    fn try_put(&mut self, id: u64, row: &Row, record: &Record<'_>) -> io::Result<()> {
        self.gathered.push(id, row, record, false);
        self.unwritten += 1;
        if let Some(bound) = &mut self.bound {
            bound.alive.observe(id, row);
        }
        if self.gathered.is_full() {
            self.write_batch()?;
            self.rotate()?;
        }
        Ok(())
    }

    fn try_flush(&mut self) -> io::Result<()> {
        if self.written_at.elapsed() < WAIT {
            return Ok(());
        }
        self.write_batch()?;
        self.rotate()
    }

    fn try_close(&mut self) -> io::Result<()> {
        self.write_batch()?;
        self.encoder.finish().map_err(io_error)?;
        self.write_encoded()
    }

    fn earlier_bytes(&self) -> u64 {
        self.bound.iter().flat_map(|bound| &bound.earlier).map(|segment| segment.bytes).sum()
    }

    /// Cuts the file back to its last whole batch and says in its name that there is an end missing.
    fn stop(&mut self, error: &io::Error) -> Stopped {
        if let Err(error) = self.file.set_len(self.segment.bytes) {
            tracing::warn!(
                "{}: cannot cut off the half-written last batch: {error}",
                self.dir.path().display()
            );
        }
        let stem = segment_stem(&self.stem, self.segment.number);
        let name = self.dir.mark_incomplete(&stem, EXTENSION);
        let bytes = self.earlier_bytes() + self.segment.bytes;
        Stopped {
            reason: error.to_string(),
            name,
            lost_rows: self.unwritten,
            removed_rows: self.removed_rows,
            bytes,
        }
    }
}

impl TableFile for CaptureFile {
    fn put(&mut self, id: u64, row: &Row, record: &Record<'_>) -> Result<(), Stopped> {
        self.try_put(id, row, record).map_err(|error| self.stop(&error))
    }

    fn flush(&mut self) -> Result<(), Stopped> {
        self.try_flush().map_err(|error| self.stop(&error))
    }

    fn close(mut self: Box<Self>) -> Result<Closed, Stopped> {
        self.try_close().map_err(|error| self.stop(&error))?;
        let bytes = self.earlier_bytes() + self.segment.bytes;
        Ok(Closed { name: self.name(), bytes, removed_rows: self.removed_rows })
    }
}

type Begun = (File, Gathered, StreamWriter<Vec<u8>>);

/// Creates a segment. Its schema waits in the encoder.
fn begin(dir: &Dir, stem: &str, number: Option<u64>, rows_before: u64) -> io::Result<Begun> {
    let mut metadata = HashMap::from([(METADATA_FORMAT.to_owned(), FORMAT.to_owned())]);
    if let Some(number) = number {
        metadata.insert(METADATA_SEGMENT.to_owned(), number.to_string());
        metadata.insert(METADATA_ROWS_BEFORE.to_owned(), rows_before.to_string());
    }
    let schema: Arc<Schema> = schema(metadata).into();
    let options = IpcWriteOptions::try_new(ALIGNMENT, false, MetadataVersion::V5)
        .and_then(|options| options.try_with_compression(Some(CompressionType::ZSTD)))
        .map_err(io_error)?;
    let encoder = StreamWriter::try_new_with_options(Vec::new(), &schema, options);
    let encoder = encoder.map_err(io_error)?;
    let file = dir.create(&format!("{}.{EXTENSION}", segment_stem(stem, number)))?;
    Ok((file, Gathered::new(schema), encoder))
}

fn io_error(error: ArrowError) -> io::Error {
    io::Error::other(error)
}
