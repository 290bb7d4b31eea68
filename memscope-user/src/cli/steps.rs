//! What counts as a step: the same options for live tracing and dumps.

use clap::Args;
use regex::Regex;

use super::list::words;
use crate::model::{StepRule, StepsFrom};

#[derive(Debug, Args)]
pub struct StepArgs {
    /// Steps are the ranges or marks whose text matches [default: ranges called "step start"]
    #[arg(long, value_name = "REGEX")]
    step_mark: Option<Regex>,
    /// Take steps from the marks alone, from operators alone, or have none [marks, ops, none; default: from marks, and
    /// from operators in processes that mark no step]
    #[arg(long, value_name = "SOURCE")]
    steps_from: Option<Source>,
}

words! { Source: "source of steps" { Marks = "marks", Ops = "ops", None = "none" } }

impl StepArgs {
    /// What is a step, and where steps come from.
    pub(super) fn parse(&self) -> anyhow::Result<(StepRule, StepsFrom)> {
        let source = match self.steps_from {
            None => StepsFrom::MarksOrOps,
            Some(Source::Marks) => StepsFrom::Marks,
            Some(Source::Ops) => StepsFrom::Ops,
            Some(Source::None) => StepsFrom::None,
        };
        let without_marks = matches!(source, StepsFrom::Ops | StepsFrom::None);
        anyhow::ensure!(
            !(without_marks && self.step_mark.is_some()),
            "--step-mark chooses among marks, and --steps-from ops or none takes no notice of them: leave one out"
        );
        Ok((self.step_mark.clone().map_or(StepRule::StepStart, StepRule::Matching), source))
    }
}
