//! `memscope-trace check`.

use clap::Args;

use super::Verdict;
use crate::check::{self, State};

#[derive(Debug, Args)]
pub struct CheckArgs {
    /// As one JSON document
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: CheckArgs) -> anyhow::Result<Verdict> {
    let lines = check::run();
    if args.json {
        println!("{}", serde_json::to_string_pretty(&lines)?);
    } else {
        for line in &lines {
            let mark = match line.state {
                State::Good => "ok  ",
                State::Limited => "note",
                State::Bad => "BAD ",
            };
            println!("{mark}  {:<20} {}", line.subject, line.finding);
            if let Some(advice) = &line.advice {
                println!("      {:<20} -> {advice}", "");
            }
        }
    }
    let ready = lines.iter().all(|line| line.state != State::Bad);
    if !args.json {
        println!(
            "{}",
            if ready { "This host is ready." } else { "This host is not ready: see the lines marked BAD." }
        );
    }
    Ok(if ready { Verdict::Fine } else { Verdict::NotReady })
}
