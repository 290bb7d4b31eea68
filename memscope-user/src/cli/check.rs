//! `memscope-trace check`.

use std::fmt::Write;

use clap::Args;
use serde::Serialize;

use super::{
    ProcArgs, Verdict,
    output::{print, print_document},
};
use crate::{
    attach::cost::Prices,
    check::{self, Line, State},
};

#[derive(Debug, Args)]
pub struct CheckArgs {
    #[command(flatten)]
    proc: ProcArgs,
    /// Measure what a hit of a probe costs on this machine, in a child of our own
    #[arg(long)]
    bench: bool,
    /// As one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Checked {
    ready: bool,
    checks: Vec<Line>,
    /// With `--bench`.
    probe_prices: Option<Prices>,
}

pub(super) fn run(args: CheckArgs) -> anyhow::Result<Verdict> {
    let proc = args.proc.open()?;
    let mut checks = check::run(&proc);
    let mut probe_prices = None;
    if args.bench {
        let (line, prices) = check::bench(&proc);
        checks.push(line);
        probe_prices = prices;
    }
    let ready = checks.iter().all(|line| line.state != State::Bad);
    let checked = Checked { ready, checks, probe_prices };
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
