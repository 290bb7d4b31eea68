//! bpftrace doing the same job: a line for each allocation and free, with what our records of them say.

use std::{
    fs,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, bail};

use super::{
    median,
    native::{Held, wait_with_cpu},
    spread,
};
use crate::{
    command::on_path,
    setup::{self, Need},
    sim::{Layout, Sim},
};

const PAIRS: &str = "20000";

/// CPU time in ns for each allocation and its free.
#[derive(Default)]
struct Costs {
    program: Vec<f64>,
    tool: Vec<f64>,
}

pub fn bench(rounds: usize, sim: &Sim) -> anyhow::Result<()> {
    let need = Need { what: "bpftrace", packages: &["bpftrace"], there: on_path("bpftrace") };
    if let Err(e) = setup::install(&[need]) {
        println!("\nThe comparison with bpftrace is left out: {e}");
        return Ok(());
    }
    let [mut untraced, mut ours, mut theirs] = [const { Costs { program: Vec::new(), tool: Vec::new() } }; 3];
    let mut lost = 0;
    for _ in 0..rounds {
        one(sim, &mut untraced, |_| Ok(None))?;
        one(sim, &mut ours, |held| Ok(Some(held.trace(&[])?)))?;
        one(sim, &mut theirs, |held| Ok(Some(start(sim, held)?)))
            .map(|text| lost += text.matches("Lost ").count())?;
    }
    let noise = spread(&untraced.program) * 100.0;
    let untraced = median(untraced.program);
    let [(ours, our_tool), (theirs, their_tool)] =
        [ours, theirs].map(|costs| (median(costs.program) - untraced, median(costs.tool)));
    println!("\n| aclrtMalloc + aclrtFree, ns of CPU a pair | memscope-trace | bpftrace | ratio |");
    println!("|---|---|---|---|");
    println!(
        "| the program pays (untraced {untraced:.0}, noise ±{noise:.0} %) | {ours:.0} | {theirs:.0} | {:.2} |",
        ours / theirs
    );
    println!("| the tool itself | {our_tool:.0} | {their_tool:.0} | {:.2} |", our_tool / their_tool);
    let (ours, theirs) = (ours + our_tool, theirs + their_tool);
    println!("| together | {ours:.0} | {theirs:.0} | {:.2} |", ours / theirs);
    println!(
        "\n(memscope-trace writes a dump and a report, bpftrace lines to a file; it said {lost} times that it lost some)"
    );
    Ok(())
}

/// Runs the workload once; what the tool left in its file.
fn one(
    sim: &Sim,
    costs: &mut Costs,
    watch: impl FnOnce(&Held) -> anyhow::Result<Option<Child>>,
) -> anyhow::Result<String> {
    let mut held = Held::start(sim, &["pairs", PAIRS])?;
    let tool = watch(&held)?;
    held.play()?;
    if let Some(mut tool) = tool {
        let (_, seconds) = wait_with_cpu(&mut tool)?;
        costs.tool.push(seconds * 1e9 / PAIRS.parse::<f64>()?);
    }
    costs.program.push(held.figure("cpu_ns_per_pair")?);
    Ok(fs::read_to_string(held.dir().join("bpftrace.txt")).unwrap_or_default())
}

/// Attaches bpftrace to the functions that our probes are at.
fn start(sim: &Sim, held: &Held) -> anyhow::Result<Child> {
    let library = |name: &str| sim.lib64.join(name).display().to_string();
    let (acl, runtime, driver) =
        (library(Layout::V9.acl()), library("libruntime.so"), library("libascend_hal.so"));
    let program = format!(
        r#"uprobe:{acl}:aclrtMalloc {{ @asked[tid] = arg1; }}
uprobe:{runtime}:rtMalloc {{ @runtime[tid] = arg1; }}
uprobe:{driver}:halMemAlloc {{ @out[tid] = arg0; @size[tid] = arg1; @flag[tid] = arg2; }}
uretprobe:{driver}:halMemAlloc /@out[tid]/ {{
  printf("%llu %d %d alloc %llx %llu %llx %llu %d\n", nsecs, pid, tid, *(uint64 *)@out[tid], @size[tid], @flag[tid],
    @asked[tid], retval);
  delete(@out[tid]);
}}
uprobe:{driver}:halMemFree {{ printf("%llu %d %d free %llx\n", nsecs, pid, tid, arg0); }}
BEGIN {{ printf("ready\n"); }}
END {{ clear(@asked); clear(@runtime); clear(@out); clear(@size); clear(@flag); }}"#
    );
    let file = held.dir().join("bpftrace.txt");
    let out = fs::File::create(&file)?;
    let mut command = Command::new("bpftrace");
    command.args(["-p", &held.pid().to_string(), "-e", &program]);
    let child = command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out).spawn();
    let mut child = child.context("can not start bpftrace")?;
    for _ in 0..2000 {
        if fs::read_to_string(&file)?.contains("ready") {
            // It says so before the last probe is attached.
            thread::sleep(Duration::from_millis(500));
            return Ok(child);
        }
        if child.try_wait()?.is_some() {
            break;
        }
        thread::sleep(Duration::from_millis(5));
    }
    bail!("bpftrace did not attach: {}", fs::read_to_string(&file)?)
}
