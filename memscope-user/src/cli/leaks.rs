//! `memscope-trace leaks DUMP`.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::{
    Verdict,
    list::{List, StepRange, step_set, words},
    offline::{Read, document, each_row},
    output::{print, print_document, print_report},
    steps::StepArgs,
    trace::NOTHING_JUDGED,
};
use crate::{
    analysis::{
        Online,
        offline_leaks::{Config, OfflineLeaks, Report},
    },
    model::Pool,
    report::{between_marks::render, terminal},
};

const EXAMPLES: &str = "\
Examples:
  memscope-trace leaks memscopeDumpResults --fail-on leaks         what each step leaves behind
  memscope-trace leaks dump.csv --mstx-info step --start-index 3   between marks 3, 4 and 5 of a text

Exit codes: 0 fine, 1 a leak with --fail-on leaks, 2 error, or nothing could be judged.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct LeaksArgs {
    /// Dumps: files (csv, db, capture), or directories that stand for all dumps in them
    #[arg(required = true, value_name = "DUMP")]
    dumps: Vec<PathBuf>,
    /// Marks of this text bound the search: allocated between A and B and not freed before C. Without it, the
    /// rule of live tracing is applied to the steps of the dump
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["step_mark", "steps_from"])]
    mstx_info: Option<String>,
    /// Which of these marks is A, from 0; B and C are the next two
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        allow_negative_numbers = true,
        value_parser = clap::value_parser!(u32),
        requires = "mstx_info",
        help_heading = "With --mstx-info"
    )]
    start_index: u32,
    /// Blocks of this pool only [HAL, PTA, PTA_WORKSPACE, ATB, MINDSPORE, HOST]
    #[arg(long, value_name = "POOL", value_parser = pool, requires = "mstx_info",
        help_heading = "With --mstx-info")]
    pool: Option<Pool>,
    /// Report what was allocated in these steps only, such as 3-7,12; it is judged by all steps of the dump
    #[arg(long, value_name = "LIST", conflicts_with = "mstx_info")]
    steps: Option<List<StepRange>>,
    #[command(flatten)]
    step: StepArgs,
    /// As one JSON document; without --mstx-info it is the report of live tracing
    #[arg(long)]
    json: bool,
    /// Exit with code 1 when this is found [leaks]
    #[arg(long, value_name = "LIST")]
    fail_on: Option<List<FailOn>>,
}

words! { FailOn: "finding of this verb" { Leaks = "leaks" } }

fn pool(word: &str) -> Result<Pool, String> {
    let known = || Pool::ALL.map(Pool::name).join(", ");
    Pool::ALL.into_iter().find(|pool| pool.name() == word).ok_or_else(|| format!("known are {}", known()))
}

pub(super) fn run(args: LeaksArgs) -> anyhow::Result<Verdict> {
    let fail = args.fail_on.is_some();
    let between = args.mstx_info.clone();
    // Who names marks asks about them alone: that they are not there is no answer.
    let must_judge = fail || between.is_some();
    let (found, judged) = match between {
        Some(mark) => between_marks(&args, mark)?,
        None => over_steps(&args, fail)?,
    };
    Ok(if !judged && must_judge && !found {
        Verdict::NotJudged
    } else if found && fail {
        Verdict::Findings
    } else {
        Verdict::Fine
    })
}

/// Whether there are leaks, and whether any block was judged.
fn over_steps(args: &LeaksArgs, fail: bool) -> anyhow::Result<(bool, bool)> {
    let (rule, source) = args.step.parse()?;
    let mut online = Online::new(rule.clone(), true)
        .with_steps_from(&rule, source)
        .showing_steps(step_set(args.steps.clone()));
    let mut document = document(&args.dumps, &mut online)?;
    if fail && !document.leaks_judged() {
        document.notes.push(NOTHING_JUDGED.to_owned());
    }
    if args.json {
        print_report(&document)?;
    } else {
        print(terminal::render(&document, terminal::View::default()))?;
    }
    Ok((document.has_leaks(), document.leaks_judged()))
}

#[derive(Serialize)]
struct Found {
    #[serde(flatten)]
    read: Read,
    #[serde(flatten)]
    report: Report,
}

/// The same.
fn between_marks(args: &LeaksArgs, mark: String) -> anyhow::Result<(bool, bool)> {
    let mut leaks =
        OfflineLeaks::new(Config { mark, start_index: args.start_index as usize, pool: args.pool });
    let read = each_row(&args.dumps, |numbered| leaks.observe(numbered))?;
    let found = Found { read, report: leaks.finish() };
    let any = found.report.devices.iter().any(|device| !device.leaks.is_empty());
    let judged = found.report.devices.iter().any(|device| device.between.is_some());
    if args.json {
        print_document(&found)?;
    } else {
        print(render(&found.report))?;
    }
    Ok((any, judged))
}
