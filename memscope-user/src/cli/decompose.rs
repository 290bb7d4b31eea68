//! `memscope-trace decompose DUMP`.

use std::path::PathBuf;

use clap::Args;

use super::{
    Verdict,
    offline::document,
    output::{print, print_report},
    steps::StepArgs,
};
use crate::{analysis::Online, report::decompose::render};

const EXAMPLES: &str = "\
Examples:
  memscope-trace decompose memscopeDumpResults   of all dumps in the directory
  memscope-trace decompose dump.csv --json       for other programs";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct DecomposeArgs {
    /// Dumps: files (csv, db, capture), or directories that stand for all dumps in them. What blocks are for is inferred only
    /// from dumps with accesses (written with --analysis decompose)
    #[arg(required = true, value_name = "DUMP")]
    dumps: Vec<PathBuf>,
    #[command(flatten)]
    step: StepArgs,
    /// As one JSON document: the report of live tracing
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: DecomposeArgs) -> anyhow::Result<Verdict> {
    let (rule, source) = args.step.parse()?;
    let mut online = Online::new(rule.clone(), false).with_steps_from(&rule, source).with_decompose();
    let document = document(&args.dumps, &mut online)?;
    if args.json {
        print_report(&document)?;
    } else {
        print(render(&document, false))?;
    }
    Ok(Verdict::Fine)
}
