//! `memscope-trace oom DUMP`.

use std::path::PathBuf;

use clap::Args;

use super::{
    Verdict,
    offline::document,
    output::{print, print_report},
    steps::StepArgs,
};
use crate::{
    analysis::Online,
    report::terminal::{View, render_oom},
};

const EXAMPLES: &str = "\
Examples:
  memscope-trace oom memscopeDumpResults   of all dumps in the directory
  memscope-trace oom dump.csv --blocks 20  with more of the blocks that were held";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct OomArgs {
    /// Dumps: files (csv, db, capture), or directories that stand for all dumps in them
    #[arg(required = true, value_name = "DUMP")]
    dumps: Vec<PathBuf>,
    /// List so many of the largest and of the latest blocks [default: 3, with --json 10]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u16).range(1..=1000))]
    blocks: Option<u16>,
    #[command(flatten)]
    step: StepArgs,
    /// As one JSON document: the report of live tracing
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: OomArgs) -> anyhow::Result<Verdict> {
    let (rule, source) = args.step.parse()?;
    let mut online = Online::new(rule.clone(), false)
        .with_steps_from(&rule, source)
        .with_oom_blocks(args.blocks.map(usize::from));
    let document = document(&args.dumps, &mut online)?;
    if args.json {
        print_report(&document)?;
    } else {
        print(render_oom(&document, View::with_oom_blocks(args.blocks)))?;
    }
    Ok(Verdict::Fine)
}
