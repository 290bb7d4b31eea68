//! docs/support.md, made from what the guests said.

use std::{collections::BTreeSet, fmt::Write};

use super::machine::Report;

const HEAD: &str = "\
# Kernels

Made by `cargo xtask vm`, which boots the stock Debian kernels below in QEMU and runs the end-to-end tests of the native
workload in each, and those of Python stacks on the CPython 3.9, 3.11 and 3.13 of Debian; nothing here was written by hand.
It is written once all of them have passed, each at the commit that stands beside it; a second one is that of tests that had
failed and were run again.

";

const TAIL: &str = "
What a kernel has is found by trying, never by its version number; `memscope-trace check` says what was found and
`--mechanism` forces a lesser way. What came when, in the kernel's own releases:

| | since | without it |
|---|---|---|
| BPF ring buffer | 5.8 | no tracing; `memscope-trace check` says so |
| compare-and-swap in programs | 5.12 | calls are kept in a map, which takes a hash to find them |
| attach cookies | 5.15 | a copy of its program for each site |
| `uprobe_multi` | 6.6 | a perf event for each site; detaching takes longer, after the report |
| `uprobe_multi` for one process | 6.6.35, 6.9.5, 6.10 | other processes with the same libraries pay for a probe hit, too |
";

pub fn document(reports: &[Report]) -> String {
    let mut text = String::from(HEAD);
    text += "| kernel | machine | package | attaching | drawback | passed | at commit |\n|---|---|---|---|---|---|---|\n";
    for report in reports {
        let attaching = report.finding("attaching");
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} of {} | {} |",
            report.kernel.version,
            report.kernel.arch.name(),
            debian_version(&report.release),
            attaching.map_or("", |line| &line.finding),
            attaching.and_then(|line| line.advice.as_deref()).unwrap_or("none"),
            report.tests.values().filter(|passed| **passed).count(),
            report.tests.len(),
            report.commit,
        );
    }
    text += "\n## What was tested\n\n| |";
    for report in reports {
        let _ = write!(text, " {} {} |", report.kernel.version, report.kernel.arch.name());
    }
    text += "\n|---|";
    text += &"---|".repeat(reports.len());
    text.push('\n');
    let names: BTreeSet<_> = reports.iter().flat_map(|report| report.tests.keys()).collect();
    for name in names {
        let _ = write!(text, "| {} |", name.replace('_', " "));
        for report in reports {
            let mark = match report.tests.get(name) {
                Some(true) => "yes",
                Some(false) => "NO",
                None => "",
            };
            let _ = write!(text, " {mark} |");
        }
        text.push('\n');
    }
    text + TAIL
}

/// The version of the package, from what `uname` says: `... #1 SMP Debian 5.10.223-1 (2024-08-10)`.
fn debian_version(release: &str) -> &str {
    let mut words = release.split_whitespace().skip_while(|word| *word != "Debian");
    words.nth(1).unwrap_or(release)
}
