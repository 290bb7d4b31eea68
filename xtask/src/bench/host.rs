//! What an attached tracer costs besides hits: attaching and detaching all sites, a target that is quiet, and a target that
//! does nothing but switch between threads.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, ensure};

use super::{median, native::Held, spread};
use crate::sim::Sim;

/// Each way of attaching that newer kernels have.
const MECHANISMS: [(&str, &str); 3] =
    [("multi", "uprobe_multi"), ("perf-cookie", "perf events"), ("perf-site", "a program a site")];
/// Everything that can be probed is.
const ALL_SITES: [&str; 4] = ["--level", "kernel", "--analysis", "leaks,inefficient,decompose"];
const QUIET: Duration = Duration::from_secs(10);
const TURNS: &str = "100000";

pub fn bench(rounds: usize, sim: &Sim) -> anyhow::Result<()> {
    println!("\n| attaching by | sites | start to attached, ms | end to detached, ms | spread |");
    println!("|---|---|---|---|---|");
    for (mechanism, name) in MECHANISMS {
        let mut times = Vec::new();
        for _ in 0..rounds {
            times.push(attach_and_detach(sim, mechanism)?);
        }
        let sites = times.first().map_or(0, |time| time.sites);
        let (attaching, detaching): (Vec<f64>, Vec<f64>) =
            times.iter().map(|time| (time.attaching_ms, time.detaching_ms)).unzip();
        let noise = [spread(&attaching), spread(&detaching)].map(|noise| format!("±{:.0} %", noise * 100.0));
        println!(
            "| {name} | {sites} | {:.0} | {:.0} | {} |",
            median(attaching),
            median(detaching),
            noise.join(", ")
        );
    }
    println!();
    let idle = (0..rounds).map(|_| idle(sim)).collect::<anyhow::Result<Vec<f64>>>()?;
    println!(
        "A target that is attached but quiet: {:.2} ms of the tracer's CPU time a second ({:.2} to {:.2}); of the target's \
         none.",
        median(idle.clone()),
        idle.iter().copied().fold(f64::INFINITY, f64::min),
        idle.iter().copied().fold(0.0, f64::max)
    );
    turns(rounds, sim)
}

struct Times {
    sites: usize,
    attaching_ms: f64,
    detaching_ms: f64,
}

/// A target that does nothing, once traced for a second.
fn attach_and_detach(sim: &Sim, mechanism: &str) -> anyhow::Result<Times> {
    let target = Held::start(sim, &["sleep", "0"])?;
    let options = [&["-d", "1", "--no-dump", "--mechanism", mechanism], &ALL_SITES[..]].concat();
    let status = target.trace(&options)?.wait()?;
    let over = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_nanos() as f64;
    ensure!(status.success(), "the tracer failed: {status}");
    let report = target.report()?;
    let at = |what: &str| report["timing"][what].as_f64().with_context(|| format!("no {what}"));
    let sites = report["sites"].as_array().into_iter().flatten();
    Ok(Times {
        sites: sites.filter(|site| site["attached"] == true).count(),
        attaching_ms: (at("attached_ns")? - at("started_ns")?) / 1e6,
        detaching_ms: (over - at("ended_ns")?) / 1e6,
    })
}

/// ms of CPU time a second that the tracer takes while nothing happens. The target must take none.
fn idle(sim: &Sim) -> anyhow::Result<f64> {
    let target = Held::start(sim, &["sleep", "0"])?;
    let mut tracer = target.trace(&["--no-dump"])?;
    // What it does in its first second is not what it does later.
    thread::sleep(Duration::from_secs(2));
    let (before, begin) = ((cpu_ms(tracer.id())?, cpu_ms(target.pid())?), Instant::now());
    thread::sleep(QUIET);
    let after = (cpu_ms(tracer.id())?, cpu_ms(target.pid())?);
    let took = begin.elapsed().as_secs_f64();
    drop(target);
    tracer.wait()?;
    ensure!(after.1 == before.1, "the target was to be quiet, and took {} ms", after.1 - before.1);
    Ok((after.0 - before.0) / took)
}

/// CPU time of all threads that a process has now, as the scheduler counts it.
fn cpu_ms(pid: u32) -> anyhow::Result<f64> {
    let mut total = 0.0;
    for task in fs::read_dir(Path::new("/proc").join(pid.to_string()).join("task"))? {
        let text = fs::read_to_string(task?.path().join("schedstat"))?;
        let ns: f64 = text.split(' ').next().unwrap_or_default().parse()?;
        total += ns / 1e6;
    }
    Ok(total)
}

/// Two threads that take turns, with and without a tracer.
fn turns(rounds: usize, sim: &Sim) -> anyhow::Result<()> {
    let ways = [None, Some("multi"), Some("perf-cookie"), Some("perf-site")];
    let mut figures = ways.map(|_| Vec::new());
    for _ in 0..rounds {
        // By turns, so that a slow spell of the machine falls on all of them.
        for (mechanism, figures) in ways.iter().zip(&mut figures) {
            let mut target = Held::start(sim, &["ping-pong", TURNS])?;
            let tracer =
                mechanism.map(|name| target.trace(&["--no-dump", "--mechanism", name])).transpose()?;
            target.play()?;
            if let Some(mut tracer) = tracer {
                tracer.wait()?;
            }
            figures.push(target.figure("cpu_ns_per_turn")?);
        }
    }
    let noise = spread(&figures[0]) * 100.0;
    println!("\n| two threads taking turns | ns of CPU a turn | to untraced | noise |");
    println!("|---|---|---|---|");
    let untraced = median(figures[0].clone());
    let names = ["untraced"].into_iter().chain(MECHANISMS.map(|(_, name)| name));
    for (name, figures) in names.zip(figures) {
        let figure = median(figures);
        println!("| {name} | {figure:.0} | {:.3} | ±{noise:.1} % |", figure / untraced);
    }
    Ok(())
}
