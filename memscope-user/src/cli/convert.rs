//! `memscope-trace convert IN OUT`.

use std::path::PathBuf;

use clap::Args;

use super::{
    Verdict,
    list::List,
    offline::{each_row, shown},
    output::print,
    trace::FormatWord,
};
use crate::{
    dump::{Caller, Config, StackStyle, Writer},
    report::units,
};

const EXAMPLES: &str = "\
Examples:
  memscope-trace convert dump.csv converted                   for MindStudio Insight
  memscope-trace convert dump.arrows converted --format csv   a capture as CSV";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ConvertArgs {
    /// A dump, or a directory that stands for all dumps in it
    input: PathBuf,
    /// Directory to write to, laid out as by live tracing
    output: PathBuf,
    /// What to write [csv, db, capture]
    #[arg(long, alias = "data-format", value_name = "LIST", default_value = "db")]
    format: List<FormatWord>,
    /// Write each stack on one line: for tools that take every line for a row
    #[arg(long)]
    flat_stacks: bool,
}

pub(super) fn run(args: ConvertArgs) -> anyhow::Result<Verdict> {
    let formats = args.format.0.iter().map(|word| word.format()).collect();
    let stacks = if args.flat_stacks { StackStyle::Flat } else { StackStyle::Lines };
    let mut writer = Writer::create(Config {
        output: args.output,
        formats,
        stacks,
        max_size: None,
        caller: Caller::of_sudo(),
    })
    .map_err(|why| anyhow::anyhow!("{why}; name another directory to write to"))?;
    let input = shown(&args.input);
    let read = each_row(&[args.input], |numbered| writer.write(&numbered.row))?;
    anyhow::ensure!(
        read.rows > 0,
        "{input} has no row that can be read: nothing was written; name another dump"
    );
    let mut failed = None;
    for file in writer.finish() {
        print(format_args!("{}: {}\n", shown(&file.path), units::count_of(file.rows, "row")))?;
        failed = failed.or(file.failure.map(|why| {
            let (path, missing) = (shown(&file.path), units::count_of(file.missing_rows, "row"));
            anyhow::anyhow!(
                "{path}: {why}; missing: {missing}. Free some space or name another directory to write to, and convert again"
            )
        }));
    }
    if !read.unheld.is_empty() {
        let what =
            read.unheld.iter().map(|(what, rows)| format!("{what} ({})", units::count_of(*rows, "row")));
        let what = what.collect::<Vec<_>>().join(", ");
        print(format_args!("Not carried over, for it has no place in what is written: {what}\n"))?;
    }
    failed.map_or(Ok(Verdict::Fine), Err)
}
