//! `cargo xtask fuzz`: the readers of what others wrote, on damaged input, for as long as one likes. A few seconds of it
//! are part of every test run.

use anyhow::ensure;

use crate::command::{cargo, run};

/// What is read, and the test that damages it: of the library itself, or from outside.
const TARGETS: [(&str, &[&str], &str); 6] = [
    ("csv", &["--test", "integration"], "fuzz_csv"),
    ("db", &["--test", "integration"], "fuzz_db"),
    ("capture", &["--test", "integration"], "fuzz_capture"),
    ("elf", &["--test", "integration"], "fuzz_elf"),
    ("code", &["--lib"], "fuzz_code"),
    ("modules", &["--lib"], "fuzz_modules"),
];

#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to read [csv, db, capture, elf, code, modules; default: all]
    target: Option<String>,
    /// So long for each
    #[arg(long, default_value_t = 120)]
    seconds: u64,
    /// Begin with this round; a failure says which one it was
    #[arg(long)]
    seed: Option<u64>,
}

pub fn fuzz(args: &Args) -> anyhow::Result<()> {
    let wanted = |name: &str| args.target.as_deref().is_none_or(|target| target == name);
    ensure!(TARGETS.iter().any(|(name, ..)| wanted(name)), "known are csv, db, capture, elf, code, modules");
    for (_, place, test) in TARGETS.into_iter().filter(|(name, ..)| wanted(name)) {
        let mut command = cargo();
        command.args(["test", "--quiet", "--package", "memscope-user"]).args(place);
        command.args(["--", "--nocapture", test]).env("MEMSCOPE_FUZZ_SECONDS", args.seconds.to_string());
        if let Some(seed) = args.seed {
            command.env("MEMSCOPE_FUZZ_SEED", seed.to_string());
        }
        run(&mut command)?;
    }
    Ok(())
}
