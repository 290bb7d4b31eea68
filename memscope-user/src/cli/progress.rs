//! Progress on standard error: one line kept up to date on a terminal, single lines elsewhere.

use std::{
    io::{IsTerminal, Write, stderr},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{
    report::status,
    trace::{Live, Progress},
};

/// Where no terminal shows it, the status is a line now and then.
const PLAIN_INTERVAL: Duration = Duration::from_secs(30);

/// A line on standard error; nobody has to be there to read it.
pub(super) fn say(line: &str) {
    let _ = writeln!(stderr(), "{line}");
}

pub struct Terminal {
    quiet: bool,
    bar: Option<ProgressBar>,
    last_plain: Instant,
    /// Time and events at the last status, for the rate.
    last: (Duration, u64),
}

impl Terminal {
    pub fn new(quiet: bool) -> Self {
        let bar = (!quiet && stderr().is_terminal()).then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(4));
            if let Ok(style) = ProgressStyle::with_template("{msg}") {
                bar.set_style(style);
            }
            bar
        });
        Self { quiet, bar, last_plain: Instant::now(), last: (Duration::ZERO, 0) }
    }

    pub fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn line(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| say(line)),
            None => say(line),
        }
    }
}

impl Progress for Terminal {
    fn began(&mut self, line: String) {
        if !self.quiet {
            self.line(&line);
        }
    }

    fn note(&mut self, line: String) {
        self.line(&format!("memscope-trace: {line}"));
    }

    fn status(&mut self, live: &Live<'_>) {
        if self.quiet {
            return;
        }
        if self.bar.is_none() {
            if self.last_plain.elapsed() < PLAIN_INTERVAL {
                return;
            }
            self.last_plain = Instant::now();
        }
        let (time, received) = std::mem::replace(&mut self.last, (live.elapsed, live.received));
        let seconds = live.elapsed.saturating_sub(time).as_secs_f64();
        let rate = if seconds > 0.0 { (live.received - received) as f64 / seconds } else { 0.0 };
        let line = status::line(live.online, rate, live.lost, live.probes);
        match &self.bar {
            Some(bar) => bar.set_message(line),
            None => say(&line),
        }
    }
}
