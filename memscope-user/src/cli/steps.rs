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
    pub(super) fn rule(&self) -> StepRule {
        self.step_mark.clone().map_or(StepRule::StepStart, StepRule::Matching)
    }

    pub(super) fn source(&self) -> StepsFrom {
        match self.steps_from {
            None => StepsFrom::MarksOrOps,
            Some(Source::Marks) => StepsFrom::Marks,
            Some(Source::Ops) => StepsFrom::Ops,
            Some(Source::None) => StepsFrom::None,
        }
    }
}
