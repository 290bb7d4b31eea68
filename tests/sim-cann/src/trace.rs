//! The ground truth: with `SIM_CANN_TRACE=FILE` each library appends one JSON object a line for each call
//! worth comparing with what a tracer saw.
//!
//! `fn` is the called function, `ns` and `end_ns` CLOCK_MONOTONIC nanoseconds at its begin and end, `pid`
//! and `tid` the caller, `ret` its result; other keys are arguments, addresses as integers. A line is one
//! `write` with O_APPEND, so lines of concurrent threads and processes never mix and a line exists if and
//! only if the call was made. `SIM_CANN_TRACE_ONLY=fn,fn` keeps only the functions named.

use std::fmt::{Display, Write as _};
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::OnceLock;

use crate::now_ns;

/// A line longer than this is cut in its texts, since the kernel appends one `write` as a whole.
const MAX_TEXT: usize = 1024;

struct Log {
    file: File,
    /// Empty: all.
    only: Vec<String>,
}

fn log() -> Option<&'static Log> {
    static LOG: OnceLock<Option<Log>> = OnceLock::new();
    LOG.get_or_init(|| {
        let path = std::env::var_os("SIM_CANN_TRACE").filter(|path| !path.is_empty())?;
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path).ok()?;
        let only = std::env::var("SIM_CANN_TRACE_ONLY").unwrap_or_default();
        Some(Log { file, only: only.split(',').filter(|name| !name.is_empty()).map(String::from).collect() })
    })
    .as_ref()
}

/// A call in progress. It costs one branch when nothing is logged.
#[must_use = "a call is logged by `done`"]
pub struct Call {
    line: Option<String>,
}

/// Begins the line of a call of function `name`.
pub fn enter(name: &str) -> Call {
    let wanted = log().is_some_and(|log| log.only.is_empty() || log.only.iter().any(|only| only == name));
    let line = wanted.then(|| {
        // SAFETY: both system calls only read the identity of the caller.
        let (pid, tid) = unsafe { (libc::getpid(), libc::gettid()) };
        format!("{{\"fn\":\"{name}\",\"pid\":{pid},\"tid\":{tid},\"ns\":{}", now_ns())
    });
    Call { line }
}

impl Call {
    /// Adds a number (or an address).
    pub fn num(mut self, key: &str, value: impl Display) -> Self {
        if let Some(line) = &mut self.line {
            let _ = write!(line, ",\"{key}\":{value}");
        }
        self
    }

    /// Adds a list of addresses.
    pub fn list(mut self, key: &str, values: &[usize]) -> Self {
        if let Some(line) = &mut self.line {
            let _ = write!(line, ",\"{key}\":{values:?}");
        }
        self
    }

    /// Adds a text, escaped for JSON.
    pub fn text(mut self, key: &str, value: &str) -> Self {
        if let Some(line) = &mut self.line {
            let _ = write!(line, ",\"{key}\":\"");
            for c in value.chars().take(MAX_TEXT) {
                match c {
                    '"' | '\\' => line.extend(['\\', c]),
                    c if (c as u32) < 0x20 => {
                        let _ = write!(line, "\\u{:04x}", c as u32);
                    }
                    c => line.push(c),
                }
            }
            line.push('"');
        }
        self
    }

    /// Writes the line and hands back `result`.
    pub fn done<R: Display>(self, result: R) -> R {
        if let (Some(mut line), Some(log)) = (self.line, log()) {
            let _ = write!(line, ",\"end_ns\":{},\"ret\":{result}}}", now_ns());
            line.push('\n');
            let _ = (&log.file).write(line.as_bytes());
        }
        result
    }
}
