//! `memscope-trace check`.

use std::fmt::Write;

use clap::Args;
use serde::Serialize;

use super::{
    Verdict,
    output::{print, print_document},
};
use crate::check::{self, Line, State};

#[derive(Debug, Args)]
pub struct CheckArgs {
    /// As one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Checked {
    ready: bool,
    checks: Vec<Line>,
}

pub(super) fn run(args: CheckArgs) -> anyhow::Result<Verdict> {
    let checks = check::run();
    let checked = Checked { ready: checks.iter().all(|line| line.state != State::Bad), checks };
    if args.json {
        print_document(&checked)?;
    } else {
        print(text(&checked)?)?;
    }
    Ok(if checked.ready { Verdict::Fine } else { Verdict::NotReady })
}

fn text(checked: &Checked) -> Result<String, std::fmt::Error> {
    let mut out = String::new();
    for line in &checked.checks {
        let mark = match line.state {
            State::Good => "ok  ",
            State::Limited => "note",
            State::Bad => "BAD ",
        };
        writeln!(out, "{mark}  {:<20} {}", line.subject, line.finding)?;
        if let Some(advice) = &line.advice {
            writeln!(out, "      {:<20} -> {advice}", "")?;
        }
    }
    let verdict = if checked.ready {
        "This host is ready."
    } else {
        "This host is not ready: see the lines marked BAD."
    };
    writeln!(out, "{verdict}")?;
    Ok(out)
}
