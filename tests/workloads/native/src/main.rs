//! `native-workload [OPTIONS] SCENE`: uses device memory through CANN as the scene says.

mod cann;
mod faults;
mod scene;
mod stacks;
mod switches;
mod truth;

use std::io::BufRead as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::{Parser, ValueEnum};
use scene::Scene;
use serde_json::json;
use truth::{Tally, Truth};

#[derive(Debug, Parser)]
#[command(about = "Uses device memory through CANN as the scene says, and tells what it did")]
struct Args {
    /// Begin only when this file exists
    #[arg(long, value_name = "FILE")]
    wait_file: Option<PathBuf>,
    /// Begin only when a line comes on the standard input
    #[arg(long)]
    wait_stdin: bool,
    /// Wait with the device in use already, not before
    #[arg(long)]
    wait_initialized: bool,
    /// Play the scene again and again for so long
    #[arg(long, value_name = "SECONDS")]
    loop_seconds: Option<f64>,
    /// Play the scene again and again until this file exists
    #[arg(long, value_name = "FILE")]
    until_file: Option<PathBuf>,
    /// Write what was done to this file, not to the standard output
    #[arg(long, value_name = "FILE")]
    truth: Option<PathBuf>,
    /// Device, as the process counts them
    #[arg(long, default_value_t = 0)]
    device: i32,
    /// How the process ends
    #[arg(long, value_enum, default_value_t = End::Reset)]
    end: End,
    #[command(subcommand)]
    scene: Scene,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum End {
    /// aclrtResetDevice, aclFinalize, exit
    Reset,
    /// Exit with the device in use
    Exit,
    /// SIGKILL by its own hand
    Kill,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let truth = Truth::new(args.truth.as_deref()).context("cannot write the truth file")?;
    if !args.wait_initialized {
        wait(&args, &truth)?;
    }
    cann::check(cann::aclInit(0), "aclInit")?;
    cann::check(cann::aclrtSetDevice(args.device), "aclrtSetDevice")?;
    if args.wait_initialized {
        wait(&args, &truth)?;
    }

    let begin = Instant::now();
    let duration = args.loop_seconds.map(Duration::from_secs_f64);
    let mut tally = Tally::default();
    let mut rounds = 0u64;
    loop {
        tally.add(args.scene.play(args.device, &truth)?);
        rounds += 1;
        let is_over = match &args.until_file {
            Some(file) => file.exists(),
            None => duration.is_none_or(|duration| begin.elapsed() >= duration),
        };
        if is_over {
            break;
        }
    }
    truth.tell("end", json!({ "rounds": rounds, "tally": tally }))?;

    match args.end {
        End::Reset => {
            cann::check(cann::aclrtResetDevice(args.device), "aclrtResetDevice")?;
            cann::check(cann::aclFinalize(), "aclFinalize")
        }
        End::Exit => Ok(()),
        End::Kill => {
            // SAFETY: ends this process, as asked.
            unsafe { libc::raise(libc::SIGKILL) };
            Ok(())
        }
    }
}

/// Tells that the process is ready and waits for the one who started it.
fn wait(args: &Args, truth: &Truth) -> anyhow::Result<()> {
    truth.tell("ready", json!({}))?;
    if args.wait_stdin {
        std::io::stdin().lock().read_line(&mut String::new()).context("cannot read the standard input")?;
    }
    while args.wait_file.as_deref().is_some_and(|file| !Path::exists(file)) {
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
