//! The dump has a thread of its own, so that a slow disk never holds up the collector: while the collector waits,
//! the ring buffer in the kernel overflows, and events are lost to everything, not to the dump alone.

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use serde::Serialize;

use crate::attach::privilege;
use crate::model::{Nanos, Tgid, Tid};

use super::output::OutputError;
use super::row::{Fact, Row};
use super::writer::{Config, FileReport, Writer};

/// Rows that may wait for the writer. Beyond that they are dropped and counted: 2^18 rows are some 50 MB, and a
/// few seconds of the fastest trace.
const QUEUE_ROWS: usize = 1 << 18;

/// The writer is woken early when this many rows wait.
const WAKE_ROWS: usize = 1 << 13;

/// How long a row can be in memory only, at most, when the disk keeps up.
const FLUSH_INTERVAL: Duration = Duration::from_millis(200);

/// Takes rows from the collector and writes them on a thread of its own.
pub struct Pipeline {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Vec<FileReport>>>,
}

/// What the dump came to.
#[derive(Debug, Default, Serialize)]
pub struct Summary {
    pub files: Vec<FileReport>,
    /// Rows that were dropped because the disk could not keep up. Where they are missing, each file of the process
    /// has a SYSTEM/LOST row.
    pub dropped_rows: u64,
    /// The writer thread ended by a bug; `files` is empty, the files are valid up to their last whole row.
    pub crashed: bool,
}

impl Summary {
    pub fn is_complete(&self) -> bool {
        !self.crashed && self.dropped_rows == 0 && self.files.iter().all(FileReport::is_complete)
    }
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
}

#[derive(Default)]
struct Queue {
    rows: Vec<Row>,
    /// Rows that found the queue full, since it was last emptied.
    gaps: Vec<Gap>,
    dropped_rows: u64,
    /// Files that exist, as of the last flush.
    paths: Vec<PathBuf>,
    closed: bool,
}

struct Gap {
    tgid: Tgid,
    time: Nanos,
    rows: u64,
}

impl Shared {
    /// A panic of one side leaves the queue consistent: every change is a single push or swap.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pipeline {
    /// Opens the output directory and starts the writer; fails when nothing can be written there.
    pub fn start(config: Config) -> Result<Self, OutputError> {
        let output = config.output.clone();
        let writer = Writer::create(config)?;
        let shared = Arc::new(Shared::default());
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("dump".into())
            .spawn(move || {
                privilege::keep_for_files();
                run(writer, &of_thread)
            })
            .map_err(|source| OutputError::Create { path: output, source })?;
        Ok(Pipeline { shared, thread: Some(thread) })
    }

    /// Takes a row; never waits for the disk.
    pub fn push(&self, row: Row) {
        let mut queue = self.shared.lock();
        if queue.rows.len() < QUEUE_ROWS {
            queue.rows.push(row);
            if queue.rows.len() == WAKE_ROWS {
                self.shared.wake.notify_one();
            }
            return;
        }
        queue.dropped_rows += 1;
        match queue.gaps.iter_mut().find(|gap| gap.tgid == row.tgid) {
            Some(gap) => gap.rows += 1,
            None => queue.gaps.push(Gap { tgid: row.tgid, time: row.time, rows: 1 }),
        }
    }

    /// The files that exist now.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.shared.lock().paths.clone()
    }

    /// Writes what waits, ends all files and says what became of them.
    pub fn finish(mut self) -> Summary {
        self.close()
    }

    fn close(&mut self) -> Summary {
        self.shared.lock().closed = true;
        self.shared.wake.notify_one();
        let Some(thread) = self.thread.take() else { return Summary::default() };
        let files = thread.join();
        let dropped_rows = self.shared.lock().dropped_rows;
        let crashed = files.is_err();
        Summary { files: files.unwrap_or_default(), dropped_rows, crashed }
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.close();
    }
}

fn run(mut writer: Writer, shared: &Shared) -> Vec<FileReport> {
    // A file-size limit is to be an error of one file, not the end of the tracer. Blocked for this thread alone: the
    // signal goes to the thread that writes, and an ignored signal would be inherited by a traced command.
    let mut limit = SigSet::empty();
    limit.add(Signal::SIGXFSZ);
    if let Err(errno) = limit.thread_block() {
        tracing::warn!("cannot block SIGXFSZ: {errno}; a file-size limit would end the trace");
    }

    let mut rows = Vec::new();
    let mut next_flush = Instant::now() + FLUSH_INTERVAL;
    loop {
        let (gaps, closed) = {
            let mut queue = shared.lock();
            loop {
                let left = next_flush.saturating_duration_since(Instant::now());
                if queue.closed || queue.rows.len() >= WAKE_ROWS || left.is_zero() {
                    break;
                }
                queue = shared.wake.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
            }
            std::mem::swap(&mut queue.rows, &mut rows);
            (std::mem::take(&mut queue.gaps), queue.closed)
        };
        for row in rows.drain(..) {
            writer.write(&row);
        }
        for Gap { tgid, time, rows } in gaps {
            writer.write(&Row::new(time, tgid, Tid(tgid.0), Fact::Lost { events: rows }));
        }
        if Instant::now() >= next_flush {
            writer.flush();
            shared.lock().paths = writer.paths().collect();
            next_flush = Instant::now() + FLUSH_INTERVAL;
        }
        if closed {
            return writer.finish();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dump::{Format, StackStyle};
    use crate::model::{Event, EventKind};

    fn mark(time: u64) -> Row {
        let kind = EventKind::Mark { text: "m".into(), domain: None };
        let mut row = Row::from(Event { time: Nanos(time), tgid: Tgid(7), tid: Tid(7), kind });
        row.device = Some(crate::model::DeviceId(0));
        row
    }

    #[test]
    fn rows_that_find_no_room_are_counted_and_the_dump_says_where() {
        let dir = tempfile::tempdir().expect("a directory");
        let config = Config {
            output: dir.path().into(),
            formats: vec![Format::Csv],
            stacks: StackStyle::Lines,
            max_size: None,
            caller: None,
        };
        let writer = Writer::create(config).expect("writable");
        let shared = Arc::new(Shared::default());
        let mut pipeline = Pipeline { shared: Arc::clone(&shared), thread: None };
        let rows = QUEUE_ROWS as u64;
        (0..rows + 3).for_each(|time| pipeline.push(mark(time)));
        // The writer starts only now, as if it had been stuck.
        pipeline.thread = Some(std::thread::spawn(move || run(writer, &shared)));
        let summary = pipeline.finish();

        assert_eq!(summary.dropped_rows, 3);
        assert!(!summary.is_complete());
        let [file] = summary.files.as_slice() else { panic!("one file, not {:?}", summary.files) };
        let text = std::fs::read_to_string(&file.path).expect("readable");
        assert_eq!(text.lines().last(), Some(format!("{rows},SYSTEM,LOST,3,{rows},7,7,N/A,N/A,,,").as_str()));
        assert_eq!(file.rows, rows + 1);
    }
}
