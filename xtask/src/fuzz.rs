//! `cargo xtask fuzz`: the readers of what others wrote, on input that libFuzzer makes from what it learns of the code it
//! reaches, for as long as one likes. A few seconds of damaged input, the same each time, are part of every test run.

use std::fs;

use anyhow::{Context, ensure};

use crate::command::{cargo, root, run};

/// Targets in `fuzz/fuzz_targets`, and the longest input of each in bytes.
const TARGETS: [(&str, u32); 7] = [
    ("csv", 1 << 13),
    ("db", 1 << 16),
    ("capture", 1 << 17),
    ("elf", 1 << 14),
    ("code", 1 << 12),
    ("modules", 1 << 14),
    ("records", 1 << 13),
];

/// What `cargo fuzz` would set: counters in all that is compiled. Stable compilers know these.
const FLAGS: [&str; 7] = [
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=1",
];

/// No input may make a reader take longer, in seconds, or use more memory, in MiB.
const SECONDS_MOST: u32 = 20;
const MEMORY_MOST: u32 = 1024;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to read [csv, db, capture, elf, code, modules, records; default: all]
    target: Option<String>,
    /// So long for each
    #[arg(long, default_value_t = 120)]
    seconds: u64,
}

pub fn fuzz(args: &Args) -> anyhow::Result<()> {
    let wanted = |name: &str| args.target.as_deref().is_none_or(|target| target == name);
    let targets: Vec<_> = TARGETS.into_iter().filter(|(name, _)| wanted(name)).collect();
    ensure!(!targets.is_empty(), "known are {}", TARGETS.map(|(name, _)| name).join(", "));
    let machine = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let dir = root().join("target/fuzz");
    let mut build = cargo();
    build.args([
        "build",
        "--release",
        "--locked",
        "--manifest-path",
        "fuzz/Cargo.toml",
        "--target",
        &machine,
    ]);
    build
        .arg("--target-dir")
        .arg(&dir)
        .env("CARGO_ENCODED_RUSTFLAGS", FLAGS.join("\x1f"))
        .env_remove("RUSTFLAGS");
    build.args(targets.iter().flat_map(|(name, _)| ["--bin", name]));
    run(&mut build)?;
    for (name, longest) in targets {
        let [corpus, seeds] = ["corpus", "seeds"].map(|kind| dir.join(kind).join(name));
        for place in [&corpus, &seeds] {
            fs::create_dir_all(place).with_context(|| format!("can not make {}", place.display()))?;
        }
        let mut target = std::process::Command::new(dir.join(&machine).join("release").join(name));
        target.current_dir(&dir).env("MEMSCOPE_FUZZ_SEEDS", &seeds).args([&corpus, &seeds]);
        target.arg(format!("-max_total_time={}", args.seconds)).arg(format!("-max_len={longest}"));
        target.arg(format!("-timeout={SECONDS_MOST}")).arg(format!("-rss_limit_mb={MEMORY_MOST}"));
        target.args(["-print_final_stats=1", &format!("-artifact_prefix={name}-")]);
        run(&mut target)?;
    }
    Ok(())
}
