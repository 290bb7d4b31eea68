//! The command line. Its types stay here: each command turns them into a plain configuration.

mod check;
mod compare;
mod convert;
mod decompose;
mod inefficient;
mod leaks;
mod list;
mod offline;
mod oom;
mod output;
mod probes;
mod progress;
mod steps;
mod trace;

use std::{
    ffi::OsString,
    io::{self, IsTerminal},
    path::PathBuf,
    process::ExitCode,
};

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use tracing_subscriber::{EnvFilter, filter::LevelFilter};

use crate::attach::{
    cost,
    proc::{Proc, ProcError},
};

const EXAMPLES: &str = "\
Examples:
  memscope-trace -p 48213                  trace a running job; Ctrl-C ends with the report
  memscope-trace -p 48213 -d 60 --json     one minute, the report as JSON on standard output
  memscope-trace -a --fail-on leaks -d 600 every NPU process of this host; exit code 1 when one leaks
  memscope-trace -- python train.py        from the first instruction on; passes the exit code on
  memscope-trace -p 48213 --step-mark '^iteration'
                                           steps are the ranges or marks whose text matches
  memscope-trace -p 48213 --analysis leaks,inefficient
                                           and which memory is held without being used
  memscope-trace probes -p 48213           what would be probed where, attaching nothing
  memscope-trace check                     is this host ready?

Exit codes: 0 fine, 1 findings named by --fail-on, 2 error; with `-- COMMAND`, the command's own.";

/// Traces the device memory of Ascend NPU processes from outside: nothing is preloaded, restarted or changed
/// in them.
#[derive(Debug, Parser)]
#[command(name = "memscope-trace", version, disable_version_flag = true, after_help = EXAMPLES,
    args_conflicts_with_subcommands = true, subcommand_negates_reqs = true, args_override_self = true, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    trace: trace::TraceArgs,
    #[command(flatten)]
    logging: LoggingArgs,
    /// Print the version
    #[arg(short = 'V', long, action = clap::ArgAction::Version, help_heading = "General")]
    version: (),
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List the probed sites; with a process or a file, where each would be attached
    Probes(probes::ProbesArgs),
    /// Find leaks in dumps: between marks, or over steps
    Leaks(leaks::LeaksArgs),
    /// Compare two dumps, or two steps
    Compare(compare::CompareArgs),
    /// Find memory in dumps that is held without being used
    Inefficient(inefficient::InefficientArgs),
    /// Whose memory it is, from dumps: by module, pool, operator, label, and what it is for
    Decompose(decompose::DecomposeArgs),
    /// What was asked, free and held when an allocation failed
    Oom(oom::OomArgs),
    /// Write a dump in another format
    Convert(convert::ConvertArgs),
    /// Is this host ready? Each line says what to do when it is not
    Check(check::CheckArgs),
    /// The child that `check --bench` measures
    #[command(name = cost::CHILD, hide = true)]
    CostLoop { rounds: u32, calls: u32 },
}

#[derive(Debug, Args)]
struct LoggingArgs {
    /// Only errors and the report
    #[arg(short, long, global = true, help_heading = "General")]
    quiet: bool,
    /// More about what is done (the same as --log-level debug)
    #[arg(short, long, global = true, help_heading = "General")]
    verbose: bool,
    /// Messages on standard error [debug, info, warning, error; default: info]
    #[arg(long, global = true, value_name = "LEVEL", help_heading = "General",
        value_parser = ["debug", "info", "warning", "warn", "error"], hide_possible_values = true)]
    log_level: Option<String>,
}

/// Where processes are looked for.
#[derive(Debug, Args)]
struct ProcArgs {
    /// Where the host's /proc is mounted, for a tracer in a container that does not share the host's process ids; PID is
    /// always one of those in there
    #[arg(long = "proc", value_name = "DIR")]
    root: Option<PathBuf>,
}

impl ProcArgs {
    fn open(self) -> Result<Proc, ProcError> {
        self.root.map_or_else(|| Ok(Proc::default()), Proc::open)
    }
}

impl LoggingArgs {
    fn level(&self) -> LevelFilter {
        match self.log_level.as_deref() {
            Some("debug") => LevelFilter::DEBUG,
            Some("info") => LevelFilter::INFO,
            Some("warning" | "warn") => LevelFilter::WARN,
            Some(_) => LevelFilter::ERROR,
            None if self.verbose => LevelFilter::DEBUG,
            None if self.quiet => LevelFilter::ERROR,
            None => LevelFilter::INFO,
        }
    }

    fn start(&self) {
        let filter = EnvFilter::builder().with_default_directive(self.level().into()).parse_lossy("");
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(io::stderr)
            .with_ansi(io::stderr().is_terminal())
            .without_time()
            .with_target(false)
            .log_internal_errors(false)
            .init();
    }
}

/// What a command says to the shell.
enum Verdict {
    Fine,
    Findings,
    /// Of a command that was started.
    Passed(u8),
    NotReady,
    /// There was to be a verdict, and there was nothing to judge.
    NotJudged,
}

impl From<Verdict> for ExitCode {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Fine => ExitCode::SUCCESS,
            Verdict::Findings => ExitCode::from(1),
            Verdict::Passed(code) => ExitCode::from(code),
            Verdict::NotReady | Verdict::NotJudged => ExitCode::from(2),
        }
    }
}

/// Parses the process's arguments, runs, and says how it went.
pub fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    let parsed = Cli::command().try_get_matches_from(words).and_then(|m| Cli::from_arg_matches(&m));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(answer) => return answered(&answer),
    };
    cli.logging.start();
    let result = match cli.command {
        Some(Command::Probes(args)) => probes::run(args),
        Some(Command::Leaks(args)) => leaks::run(args),
        Some(Command::Compare(args)) => compare::run(args),
        Some(Command::Inefficient(args)) => inefficient::run(args),
        Some(Command::Decompose(args)) => decompose::run(args),
        Some(Command::Oom(args)) => oom::run(args),
        Some(Command::Convert(args)) => convert::run(args),
        Some(Command::Check(args)) => check::run(args),
        Some(Command::CostLoop { rounds, calls }) => {
            cost::child(cost::Effort { rounds, calls }).map(|()| Verdict::Fine).map_err(Into::into)
        }
        None => trace::run(cli.trace, cli.logging.quiet),
    };
    match result {
        Ok(verdict) => verdict.into(),
        // Whoever read our output has had enough.
        Err(e) if is_broken_pipe(&e) => ExitCode::SUCCESS,
        Err(e) => {
            progress::say(&format!("memscope-trace: {}", explain(&e)));
            ExitCode::from(2)
        }
    }
}

/// What the parser says itself: help and version on standard output, errors elsewhere.
fn answered(answer: &clap::Error) -> ExitCode {
    match answer.print() {
        Err(e) if !answer.use_stderr() && e.kind() != io::ErrorKind::BrokenPipe => {
            progress::say(&format!("memscope-trace: cannot write to standard output: {e}"));
            ExitCode::from(2)
        }
        _ => ExitCode::from(u8::try_from(answer.exit_code()).unwrap_or(2)),
    }
}

/// The error and what caused it; most of ours name their cause themselves.
fn explain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .any(|e| e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    /// Of each help text, what is said to be an example can be typed.
    #[test]
    fn examples_parse() {
        let cli = super::Cli::command();
        for verb in ["leaks", "compare", "inefficient", "decompose", "oom", "convert"] {
            let help =
                cli.find_subcommand(verb).and_then(|verb| verb.get_after_help()).map(ToString::to_string);
            let help = help.unwrap_or_default();
            let mut examples =
                help.lines().filter_map(|line| line.strip_prefix("  memscope-trace ")).peekable();
            assert!(examples.peek().is_some(), "{verb}");
            for example in examples {
                // What it does follows after two spaces.
                let words = example.split("  ").next().unwrap_or_default().split(' ');
                let words = std::iter::once("memscope-trace").chain(words);
                assert!(super::Cli::command().try_get_matches_from(words).is_ok(), "{example}");
            }
        }
    }

    #[test]
    fn a_verb_judges_its_own_findings_only() {
        let parse = |line: &str| super::Cli::command().try_get_matches_from(line.split(' '));
        for (verb, own, other) in [("leaks", "leaks", "inefficient"), ("inefficient", "inefficient", "leaks")]
        {
            assert!(parse(&format!("memscope-trace {verb} dump --fail-on {own}")).is_ok());
            let error = parse(&format!("memscope-trace {verb} dump --fail-on {other}")).unwrap_err();
            let says = error.to_string();
            assert!(says.contains(&format!("is no finding of this verb; known are: {own}")), "{says}");
            assert_eq!(error.exit_code(), 2);
        }
    }

    /// A number below the least is an error about that number, not about an option called -1.
    #[test]
    fn negative_numbers_are_named_as_such() {
        for line in [
            "leaks dump --mstx-info m --start-index -1",
            "inefficient dump --mem-size -1",
            "inefficient dump --idle-threshold -1",
            "oom dump --blocks -1",
        ] {
            let words = format!("memscope-trace {line}");
            let says = super::Cli::command().try_get_matches_from(words.split(' ')).unwrap_err().to_string();
            assert!(says.contains("invalid value '-1'") && !says.contains("tip"), "{says}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
