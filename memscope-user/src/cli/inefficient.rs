//! `memscope-trace inefficient DUMP`, and the options that it shares with live tracing.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::{
    Verdict,
    list::{Bytes, List, words},
    offline::{Read, each_row},
    output::{print, print_document},
};
use crate::{
    analysis::inefficient::{Config, Inefficient, Pattern, Report, Rules},
    report::inefficient::render,
};

#[derive(Debug, Args)]
pub struct RuleArgs {
    /// Whose rules say what is inefficient [memscope, drgpum; default: memscope]
    #[arg(long, value_name = "NAME")]
    rules: Option<RulesWord>,
    /// Pass over blocks of fewer bytes
    #[arg(long, value_name = "BYTES", allow_negative_numbers = true)]
    mem_size: Option<Bytes>,
    /// What counts as temporary idleness: more calls than this between two uses (memscope) [default: 3000], so many
    /// operators or more (drgpum) [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    idle_threshold: Option<u32>,
    /// drgpum: operators between allocation and first use from which on it is early [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    early_threshold: Option<u32>,
    /// drgpum: operators between last use and free from which on it is late [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    late_threshold: Option<u32>,
    /// What to look for [early_allocation, late_deallocation, temporary_idleness; with drgpum also unused_allocation,
    /// redundant_allocation, dead_write, leak; default: all]
    #[arg(long = "type", value_name = "LIST")]
    patterns: Option<List<PatternWord>>,
}

words! { RulesWord: "set of rules" { Memscope = "memscope", Drgpum = "drgpum" } }
words! { PatternWord: "type" {
    Early = "early_allocation", Late = "late_deallocation", Idle = "temporary_idleness", Unused = "unused_allocation",
    Redundant = "redundant_allocation", DeadWrite = "dead_write", Leak = "leak",
} }

impl PatternWord {
    fn pattern(self) -> Pattern {
        match self {
            Self::Early => Pattern::EarlyAllocation,
            Self::Late => Pattern::LateDeallocation,
            Self::Idle => Pattern::TemporaryIdleness,
            Self::Unused => Pattern::UnusedAllocation,
            Self::Redundant => Pattern::RedundantAllocation,
            Self::DeadWrite => Pattern::DeadWrite,
            Self::Leak => Pattern::Leak,
        }
    }
}

impl RuleArgs {
    /// Whether any of them was.
    pub(super) fn given(&self) -> bool {
        let thresholds = [self.idle_threshold, self.early_threshold, self.late_threshold];
        let mut given = thresholds.iter().map(Option::is_some);
        self.rules.is_some() || self.mem_size.is_some() || self.patterns.is_some() || given.any(|given| given)
    }

    pub(super) fn config(&self) -> anyhow::Result<Config> {
        let rules = match (self.rules.unwrap_or(RulesWord::Memscope), Rules::MEMSCOPE, Rules::DRGPUM) {
            (RulesWord::Memscope, Rules::Memscope { idle }, _) => {
                anyhow::ensure!(
                    self.early_threshold.is_none() && self.late_threshold.is_none(),
                    "--early-threshold and --late-threshold are of --rules drgpum: msMemScope's rules have no such numbers"
                );
                Rules::Memscope { idle: self.idle_threshold.map_or(idle, u64::from) }
            }
            (RulesWord::Drgpum, _, Rules::Drgpum { early, late, idle }) => Rules::Drgpum {
                early: self.early_threshold.map_or(early, u64::from),
                late: self.late_threshold.map_or(late, u64::from),
                idle: self.idle_threshold.map_or(idle, u64::from),
            },
            (_, rules, _) => rules,
        };
        let mut config = Config { min_bytes: self.mem_size.map_or(0, |size| size.0), ..Config::new(rules) };
        if let Some(list) = &self.patterns {
            config.patterns = list.0.iter().map(|word| word.pattern()).collect();
            let unknown = config.patterns.iter().find(|pattern| !rules.patterns().contains(pattern));
            if let Some(pattern) = unknown {
                anyhow::bail!("--type {} is not one of these rules': --rules drgpum has it", pattern.name());
            }
        }
        Ok(config)
    }
}

const EXAMPLES: &str = "\
Examples:
  memscope-trace inefficient memscopeDumpResults --mem-size 1M   of blocks of 1 MiB and more
  memscope-trace inefficient dump.csv --rules drgpum --type unused_allocation
                                                                 what was never used

Exit codes: 0 fine, 1 findings with --fail-on inefficient, 2 error.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct InefficientArgs {
    /// Dumps with accesses (written with --analysis inefficient): files (csv, db, capture), or directories that stand for all
    /// dumps in them
    #[arg(required = true, value_name = "DUMP")]
    dumps: Vec<PathBuf>,
    #[command(flatten)]
    rules: RuleArgs,
    /// As one JSON document
    #[arg(long)]
    json: bool,
    /// Exit with code 1 when something is found without which the peak were lower [inefficient]
    #[arg(long, value_name = "LIST")]
    fail_on: Option<List<FailOn>>,
}

words! { FailOn: "finding of this verb" { Inefficient = "inefficient" } }

/// As in the report of live tracing.
#[derive(Serialize)]
struct Found {
    #[serde(flatten)]
    read: Read,
    inefficient: Report,
}

pub(super) fn run(args: InefficientArgs) -> anyhow::Result<Verdict> {
    let mut inefficient = Inefficient::new(args.rules.config()?);
    let read = each_row(&args.dumps, |row| inefficient.observe_row(row, &mut |_| {}))?;
    inefficient.finish(&mut |_| {});
    let found = Found { read, inefficient: inefficient.report() };
    if args.json {
        print_document(&found)?;
    } else {
        print(render(&found.inefficient, false))?;
    }
    let lowers = found.inefficient.lowers_a_peak();
    Ok(if lowers && args.fail_on.is_some() { Verdict::Findings } else { Verdict::Fine })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        rules: RuleArgs,
    }

    fn config(words: &[&str]) -> anyhow::Result<Config> {
        Line::try_parse_from([&["test"], words].concat())?.rules.config()
    }

    #[test]
    fn thresholds_belong_to_their_rules() {
        assert_eq!(config(&[]).unwrap(), Config::new(Rules::MEMSCOPE));
        let idle = config(&["--idle-threshold", "7", "--mem-size", "1K"]).unwrap();
        assert_eq!((idle.rules, idle.min_bytes), (Rules::Memscope { idle: 7 }, 1024));
        let drgpum = config(&["--rules", "drgpum", "--late-threshold", "4"]).unwrap();
        assert_eq!(drgpum.rules, Rules::Drgpum { early: 1, late: 4, idle: 1 });
        assert!(config(&["--late-threshold", "4"]).is_err());
    }

    #[test]
    fn types_belong_to_their_rules() {
        let one = config(&["--type", "late_deallocation"]).unwrap();
        assert_eq!(one.patterns, [Pattern::LateDeallocation]);
        assert!(config(&["--type", "dead_write"]).is_err());
        assert!(config(&["--rules", "drgpum", "--type", "dead_write"]).is_ok());
    }
}
