//! What the workload did: one JSON object a line.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use serde::Serialize;
use serde_json::{Value, json};

use crate::cann::Address;

/// A block that the workload keeps.
#[derive(Debug, Clone, Serialize)]
pub struct Block {
    pub ptr: Address,
    /// Bytes asked for.
    pub size: usize,
    pub device: i32,
    /// In which step, where there are steps.
    pub step: Option<u64>,
}

/// Sums over a scene. Blocks that are still held at its end count as leaked.
#[derive(Debug, Default, Serialize)]
pub struct Tally {
    /// Successful allocations.
    pub allocations: u64,
    pub frees: u64,
    /// Allocations that failed.
    pub failures: u64,
    pub launches: u64,
    pub leaked: Vec<Block>,
}

impl Tally {
    pub fn add(&mut self, other: Self) {
        self.allocations += other.allocations;
        self.frees += other.frees;
        self.failures += other.failures;
        self.launches += other.launches;
        self.leaked.extend(other.leaked);
    }
}

/// Where the truth goes.
pub struct Truth {
    out: Mutex<Box<dyn Write + Send>>,
}

impl Truth {
    /// To a file, or to the standard output.
    pub fn new(path: Option<&Path>) -> io::Result<Self> {
        let out: Box<dyn Write + Send> = match path {
            Some(path) => Box::new(File::create(path)?),
            None => Box::new(io::stdout()),
        };
        Ok(Self { out: Mutex::new(out) })
    }

    /// Writes `fields` as the line of event `event`, at once.
    pub fn tell(&self, event: &str, fields: impl Serialize) -> anyhow::Result<()> {
        let mut line = json!({ "event": event, "pid": std::process::id(), "ns": monotonic_ns() });
        if let (Value::Object(line), Value::Object(fields)) = (&mut line, serde_json::to_value(fields)?) {
            line.extend(fields);
        }
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        writeln!(out, "{line}")?;
        out.flush()?;
        Ok(())
    }
}

/// CLOCK_MONOTONIC, in which tracers date events.
pub fn monotonic_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

/// CPU time that the process has used.
pub fn cpu_ns() -> u64 {
    clock_ns(libc::CLOCK_PROCESS_CPUTIME_ID)
}

fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec to write to.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
