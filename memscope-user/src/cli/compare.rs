//! `memscope-trace compare BASE COMPARE`, `memscope-trace compare --steps A,B DUMP`.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use super::{
    Verdict,
    list::{List, Ordinal, words},
    offline::{Read, each_row_and_step, inferred_steps, shown},
    output::{print, print_document},
    steps::StepArgs,
};
use crate::{
    analysis::compare::{self, Difference, Profile, Profiler, Sequences, Side, Table},
    dump::{Caller, write_comparison},
    model::{StepId, StepsFrom},
    report::compare::render,
};

const EXAMPLES: &str = "\
Examples:
  memscope-trace compare before.csv after.csv   two runs
  memscope-trace compare dump.db --steps 3,40   two steps of one";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct CompareArgs {
    /// Two dumps; or one, with --steps
    #[arg(required = true, num_args = 1..=2, value_name = "DUMP")]
    dumps: Vec<PathBuf>,
    /// Compare these two steps: of the one dump, or the first step of the first with the second of the second
    #[arg(long, value_name = "A,B")]
    steps: Option<List<Ordinal>>,
    /// What msMemScope's table aligns [op, kernel]
    #[arg(long, value_name = "LEVEL", default_value = "op")]
    level: CompareLevel,
    #[command(flatten)]
    step: StepArgs,
    /// Directory for msMemScope's table (compare/memory_compare_<date>.csv)
    #[arg(short, long, value_name = "DIR", default_value = "memscopeDumpResults")]
    output: PathBuf,
    /// As one JSON document
    #[arg(long)]
    json: bool,
}

words! { CompareLevel: "level" { Op = "op" | "0", Kernel = "kernel" | "1" } }

#[derive(Serialize)]
struct Compared {
    #[serde(flatten)]
    read: Read,
    difference: Difference,
    /// msMemScope's comparison, where two dumps were compared.
    table: Option<Table>,
    table_path: Option<PathBuf>,
}

pub(super) fn run(args: CompareArgs) -> anyhow::Result<Verdict> {
    let steps = match args.steps.as_ref().map(|list| list.0.as_slice()) {
        None => None,
        Some([a, b]) => Some((StepId(a.0), StepId(b.0))),
        Some(other) => anyhow::bail!("--steps takes two steps, not {}", other.len()),
    };
    let compared = match (args.dumps.as_slice(), steps) {
        ([dump], Some((a, b))) => {
            let sides = [Some(Side::Step(a)), Some(Side::Step(b))];
            let (profiler, _, read) = read(dump, &args, sides)?;
            has_steps(dump, &profiler, &[a, b])?;
            let profiles = profiler.finish();
            let [base, other] = profiles.as_slice() else {
                anyhow::bail!("the dump does not have both steps {} and {}", a, b);
            };
            Compared { read, difference: compare::difference(base, other), table: None, table_path: None }
        }
        ([_], None) => anyhow::bail!("compare takes two dumps, or one and --steps A,B"),
        ([base, other], steps) => {
            let side = |step: Option<StepId>| [Some(step.map_or(Side::Whole, Side::Step)), None];
            let profile = |path: &PathBuf, step| -> anyhow::Result<(Profile, Sequences, Read)> {
                let (profiler, sequences, read) = read(path, &args, side(step))?;
                has_steps(path, &profiler, step.as_slice())?;
                let profile = profiler.finish().into_iter().next();
                let profile =
                    profile.ok_or_else(|| anyhow::anyhow!("{} does not have that step", shown(path)))?;
                Ok((profile, sequences, read))
            };
            let (base, base_sequences, base_read) = profile(base, steps.map(|s| s.0))?;
            let (other, other_sequences, other_read) = profile(other, steps.map(|s| s.1))?;
            let table = compare::table(base_sequences, other_sequences);
            let path = write_comparison(&args.output, Caller::of_sudo(), &table)?;
            Compared {
                read: base_read.and(other_read),
                difference: compare::difference(&base, &other),
                table: Some(table),
                table_path: Some(path),
            }
        }
        _ => anyhow::bail!("compare takes two dumps, or one and --steps A,B"),
    };
    if args.json {
        print_document(&compared)?;
        return Ok(Verdict::Fine);
    }
    let mut text = render(&compared.difference);
    if let Some(path) = &compared.table_path {
        text += &format!("msMemScope's table: {}\n", shown(path));
    }
    print(text)?;
    Ok(Verdict::Fine)
}

fn has_steps(dump: &Path, profiler: &Profiler, steps: &[StepId]) -> anyhow::Result<()> {
    let last = profiler.last_step();
    let mut lacking: Vec<_> = steps.iter().filter(|step| **step > last).map(ToString::to_string).collect();
    lacking.dedup();
    let dump = shown(dump);
    anyhow::ensure!(
        lacking.is_empty() || last > StepId(0),
        "{dump} has no steps: name the mark or range that comes once a step by --step-mark"
    );
    anyhow::ensure!(lacking.is_empty(), "{dump} has steps 1 to {last}, not {}", lacking.join(" and "));
    Ok(())
}

/// Profiles parts of a dump. Its steps are inferred where it has none of its own and some are asked for: that takes
/// reading it once more, for where a step began is known only later.
fn read(
    dump: &PathBuf,
    args: &CompareArgs,
    sides: [Option<Side>; 2],
) -> anyhow::Result<(Profiler, Sequences, Read)> {
    let level = match args.level {
        CompareLevel::Op => compare::Level::Op,
        CompareLevel::Kernel => compare::Level::Kernel,
    };
    let (rule, source) = args.step.parse()?;
    let within_one = sides.iter().all(Option::is_some);
    let by_step = sides.iter().any(|side| matches!(side, Some(Side::Step(_))));
    let mut inferred = match source {
        StepsFrom::Ops if by_step => Some(inferred_steps(dump, &rule, source)?),
        _ => None,
    };
    loop {
        let may_infer = by_step && source == StepsFrom::MarksOrOps && inferred.is_none();
        let mut sequences = Sequences::new(level);
        let mut profiler = Profiler::new(rule.clone(), sides).with_steps_from(source);
        let read = each_row_and_step(dump, inferred.unwrap_or_default(), |row| {
            // Two steps of one dump are not aligned: that would keep every operator.
            if !within_one {
                sequences.observe(row);
            }
            profiler.observe(row);
        })?;
        anyhow::ensure!(
            read.rows > 0,
            "{} has no rows, so that there is nothing to compare: name a dump of a run that was traced",
            shown(dump)
        );
        if !may_infer || profiler.last_step() > StepId(0) {
            return Ok((profiler, sequences, read));
        }
        inferred = Some(inferred_steps(dump, &rule, source)?);
    }
}
