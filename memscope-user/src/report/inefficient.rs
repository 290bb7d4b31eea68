//! Inefficient memory as people read it: what would lower the peak most comes first.

use std::fmt::Write;

use crate::analysis::inefficient::{Finding, Group, Pattern, PoolReport, Report, Rules};
use crate::model::Tgid;

use super::terminal::{Paint, capitalised, device_name, line};
use super::units;

/// Groups shown of each pool, and findings of each group; the rest is counted.
const GROUPS_SHOWN: usize = 10;
const EXAMPLES_SHOWN: usize = 1;

/// Renders the report of a dump. `colour`: with ANSI sequences, for a terminal.
pub fn render(report: &Report, colour: bool) -> String {
    let mut out = String::new();
    write_report(&mut out, report, &Paint { colour });
    if report.pools.is_empty() {
        line(
            &mut out,
            "Next: write a dump with uses of blocks in it: --analysis inefficient, or --events alloc,free,launch,access",
        );
    }
    out
}

pub(super) fn write_report(out: &mut String, report: &Report, paint: &Paint) {
    line(out, &paint.heading(&format!("Inefficient memory, by the rules of {}", rules(report))));
    if report.pools.is_empty() {
        line(out, "  no operator was seen to use any block: nothing can be said");
        return;
    }
    let mut processes: Vec<Tgid> = report.pools.iter().map(|pool| pool.pid).collect();
    processes.dedup();
    for pool in &report.pools {
        let process = if processes.len() > 1 { format!("process {} ", pool.pid) } else { String::new() };
        write_pool(out, pool, &process, paint);
    }
}

fn rules(report: &Report) -> String {
    let config = &report.config;
    let mut text = match config.rules {
        Rules::Memscope { idle } => {
            format!("msMemScope (idle: more than {} between two uses)", units::count_of(idle, "call"))
        }
        Rules::Drgpum { early, late, idle } => format!(
            "DrGPUM (operators between: early {}, late {}, idle {} or more)",
            units::count(early),
            units::count(late),
            units::count(idle)
        ),
    };
    if config.min_bytes > 0 {
        let _ = write!(text, ", blocks of {} or more", units::bytes(config.min_bytes));
    }
    text
}

fn write_pool(out: &mut String, pool: &PoolReport, process: &str, paint: &Paint) {
    let mut text = format!("  {process}{} {}: ", device_name(pool.device), pool.pool);
    if pool.groups.is_empty() {
        let _ = write!(text, "nothing found in {} with ", units::blocks(pool.blocks));
        let _ = write!(
            text,
            "{} by {}",
            units::count_of(pool.accesses, "use"),
            units::count_of(pool.operators, "operator")
        );
    } else {
        let _ = write!(text, "peak {}", units::bytes(pool.peak_bytes));
        let saved = pool.peak_bytes.saturating_sub(pool.peak_without);
        if saved > 0 {
            let _ = write!(text, ", {} without all that follows", units::bytes(pool.peak_without));
        } else {
            text.push_str(", which nothing that follows would lower");
        }
    }
    line(out, &text);
    for group in pool.groups.iter().take(GROUPS_SHOWN) {
        write_group(out, group, paint);
    }
    if let Some(more) = pool.groups.get(GROUPS_SHOWN..).filter(|more| !more.is_empty()) {
        let findings = units::sum(more.iter().map(|group| group.findings));
        line(
            out,
            &format!(
                "    and {} more in {} (--json lists them)",
                units::count(findings),
                units::count_of(more.len() as u64, "group")
            ),
        );
    }
}

fn write_group(out: &mut String, group: &Group, paint: &Paint) {
    let name = capitalised(&group.pattern.name().replace('_', " "));
    let mut text = format!("    {}", paint.heading(&name));
    around(&mut text, group);
    let times = if group.findings == 1 {
        "once".to_owned()
    } else {
        format!("{} times", units::count(group.findings))
    };
    let _ = write!(text, ": {times}, ");
    let at_most = if group.findings == 1 { "" } else { "up to " };
    let _ = write!(text, "{at_most}{}, {}", units::bytes(group.largest), operators(group));
    match group.saved_at_peak {
        _ if group.pattern == Pattern::DeadWrite => {}
        0 => text.push_str("; the peak stays"),
        saved => {
            let _ = write!(text, "; the peak would be {} less", paint.alarm(&units::bytes(saved)));
        }
    }
    line(out, &text);
    for finding in group.examples.iter().take(EXAMPLES_SHOWN) {
        line(out, &example(finding));
    }
}

fn operators(group: &Group) -> String {
    let (min, max) = (group.operators_min, group.operators_max);
    let number = if min == max {
        units::count(max)
    } else {
        format!("{} to {}", units::count(min), units::count(max))
    };
    let plural = if (min, max) == (1, 1) { "operator" } else { "operators" };
    let never_used = |finding: &Finding| finding.from_allocation;
    let since = match &group.examples[..] {
        examples if !examples.is_empty() && examples.iter().all(never_used) => {
            "the allocation, without a use"
        }
        examples if examples.iter().any(never_used) => "the last use, or the allocation where there was none",
        _ => "the last use",
    };
    match group.pattern {
        Pattern::EarlyAllocation => format!("{number} {plural} before the first use"),
        Pattern::LateDeallocation => format!("{number} {plural} after {since}"),
        Pattern::TemporaryIdleness => format!("{number} {plural} between two uses"),
        Pattern::UnusedAllocation => format!("held for {number} {plural} and never used"),
        Pattern::RedundantAllocation => {
            format!("held for {number} {plural} while a block of that size was done with")
        }
        Pattern::DeadWrite => format!("initialised again after {number} {plural} without a use between"),
        Pattern::Leak => format!("{number} {plural} after the last use, not freed by the end of the trace"),
    }
}

fn example(finding: &Finding) -> String {
    let mut text = format!("      {} at {}", units::bytes(finding.size), finding.ptr);
    if let Some(id) = finding.allocation_id {
        let _ = write!(text, ", allocation {id}");
    }
    let (from, to) = (finding.from.call, finding.to.call);
    let begun =
        if finding.from_allocation { "never used since its allocation in call" } else { "last used in call" };
    let _ = match (finding.pattern, finding.call_between) {
        (Pattern::EarlyAllocation, Some(between)) => {
            write!(text, ": allocated in call {from}, another block freed in {between}, first used in {to}")
        }
        (Pattern::LateDeallocation, Some(between)) => {
            write!(text, ": {begun} {from}, another block allocated in {between}, freed in {to}")
        }
        (Pattern::EarlyAllocation, None) => write!(text, ": allocated in call {from}, first used in {to}"),
        (Pattern::LateDeallocation, None) => write!(text, ": {begun} {from}, freed in {to}"),
        (Pattern::TemporaryIdleness, _) if finding.from_allocation => {
            write!(text, ": allocated in call {from}, first used in {to}")
        }
        (Pattern::TemporaryIdleness, _) => write!(text, ": used in calls {from} and {to}, not between"),
        (Pattern::DeadWrite, _) => write!(text, ": written in calls {from} and {to}"),
        _ => write!(text, ": calls {from} to {to}"),
    };
    if let Some(instead) = finding.instead_of {
        let _ = write!(text, ", instead of allocation {instead}");
    }
    text
}

fn around(text: &mut String, group: &Group) {
    if let Some(op) = &group.op {
        let _ = write!(text, " around {op}");
    }
    if let Some(place) = &group.place {
        let comma = if group.op.is_some() { "," } else { "" };
        let _ = write!(text, "{comma} at {}", units::place(place));
        if let Some(caller) = &group.caller {
            let _ = write!(text, " called by {}", units::place(caller));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::analysis::inefficient::{Config, Moment};
    use crate::model::{AllocationId, DeviceId, DevicePtr, Frame, Nanos, Pool};

    const MIB: u64 = 1 << 20;

    fn finding(pattern: Pattern, size: u64, calls: [u64; 2], call_between: Option<u64>) -> Finding {
        let [from, to] = calls.map(|call| Moment { call, timestamp_ns: Nanos(call) });
        Finding {
            pattern,
            pid: Tgid(1),
            pool: Pool::Pta,
            device: Some(DeviceId(0)),
            allocation_id: Some(AllocationId(6)),
            ptr: DevicePtr(0xabc0),
            size,
            op: Some(Arc::from("aclnnMm")),
            place: None,
            caller: None,
            from,
            to,
            from_allocation: false,
            call_between,
            operators: to.call - from.call - 1,
            wasted: size,
            instead_of: (pattern == Pattern::RedundantAllocation).then_some(AllocationId(3)),
            peak_without: None,
        }
    }

    fn group(example: Finding, findings: u64, saved: u64) -> Group {
        Group {
            pattern: example.pattern,
            op: example.op.clone(),
            place: example.place.clone(),
            caller: example.caller.clone(),
            findings,
            largest: example.size,
            operators_min: if findings == 1 { example.operators } else { 1 },
            operators_max: example.operators,
            wasted: example.wasted,
            peak_without: 64 * MIB - saved,
            saved_at_peak: saved,
            examples: vec![example],
        }
    }

    fn report(rules: Rules, groups: Vec<Group>) -> Report {
        let saved = groups.iter().map(|group| group.saved_at_peak).sum::<u64>();
        let pool = PoolReport {
            pid: Tgid(1),
            pool: Pool::Pta,
            device: Some(DeviceId(0)),
            operators: 3115,
            blocks: 7,
            accesses: 6223,
            peak_bytes: 64 * MIB,
            peak_without: 64 * MIB - saved,
            groups,
        };
        Report { config: Config::new(rules), pools: vec![pool] }
    }

    #[test]
    fn what_lowers_the_peak_is_said_first_with_its_numbers() {
        let late = finding(Pattern::LateDeallocation, 7 * MIB, [14, 3121], Some(18));
        let early = finding(Pattern::EarlyAllocation, 5 * MIB, [6, 8], Some(7));
        let frame = |function: &str, line| Frame {
            function: function.into(),
            file: "/src/job/train.py".into(),
            line: Some(line),
        };
        let (frame, caller) = (frame("new", 9), frame("main", 20));
        let late = Group { place: Some(frame), caller: Some(caller), ..group(late, 3, 7 * MIB) };
        let groups = vec![late, group(early, 1, 0)];
        assert_eq!(
            render(&report(Rules::MEMSCOPE, groups), false),
            "\
Inefficient memory, by the rules of msMemScope (idle: more than 3,000 calls between two uses)
  device 0 PTA: peak 64.0 MiB, 57.0 MiB without all that follows
    Late deallocation around aclnnMm, at job/train.py:9 in new called by job/train.py:20 in main: 3 times, up to 7.00 MiB, 1 to 3,106 operators after the last use; \
the peak would be 7.00 MiB less
      7.00 MiB at 0xabc0, allocation 6: last used in call 14, another block allocated in 18, freed in 3121
    Early allocation around aclnnMm: once, 5.00 MiB, 1 operator before the first use; the peak stays
      5.00 MiB at 0xabc0, allocation 6: allocated in call 6, another block freed in 7, first used in 8
"
        );
    }

    #[test]
    fn every_pattern_has_its_words() {
        let groups = Pattern::ALL.map(|pattern| group(finding(pattern, MIB, [2, 9], None), 1, 0)).to_vec();
        let text = render(&report(Rules::DRGPUM, groups), false);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "Inefficient memory, by the rules of DrGPUM (operators between: early 1, late 1, idle 1 or more)"
        );
        assert_eq!(lines[1], "  device 0 PTA: peak 64.0 MiB, which nothing that follows would lower");
        for (line, expected) in lines[2..].iter().step_by(2).zip([
            "Early allocation around aclnnMm: once, 1.00 MiB, 6 operators before the first use; the peak stays",
            "Late deallocation around aclnnMm: once, 1.00 MiB, 6 operators after the last use; the peak stays",
            "Temporary idleness around aclnnMm: once, 1.00 MiB, 6 operators between two uses; the peak stays",
            "Unused allocation around aclnnMm: once, 1.00 MiB, held for 6 operators and never used; the peak stays",
            "Redundant allocation around aclnnMm: once, 1.00 MiB, held for 6 operators while a block of that size was done \
             with; the peak stays",
            "Dead write around aclnnMm: once, 1.00 MiB, initialised again after 6 operators without a use between",
            "Leak around aclnnMm: once, 1.00 MiB, 6 operators after the last use, not freed by the end of the trace; the \
             peak stays",
        ]) {
            assert_eq!(line.trim_start(), expected);
        }
        assert!(text.contains("calls 2 to 9, instead of allocation 3\n"), "{text}");

        let never =
            Finding { from_allocation: true, ..finding(Pattern::LateDeallocation, MIB, [2, 9], None) };
        let text = render(&report(Rules::DRGPUM, vec![group(never, 1, 0)]), false);
        assert!(text.contains("6 operators after the allocation, without a use;"), "{text}");
        assert!(
            text.contains("allocation 6: never used since its allocation in call 2, freed in 9\n"),
            "{text}"
        );
    }

    #[test]
    fn nothing_found_and_nothing_seen_are_told_apart() {
        let mut report = report(Rules::MEMSCOPE, Vec::new());
        assert!(
            render(&report, false)
                .ends_with("PTA: nothing found in 7 blocks with 6,223 uses by 3,115 operators\n")
        );
        report.config.min_bytes = MIB;
        report.pools.clear();
        let text = render(&report, true);
        assert!(text.contains("between two uses), blocks of 1.00 MiB or more\x1b[0m\n"), "{text}");
        assert!(
            text.contains("nothing can be said\nNext: write a dump with uses of blocks in it: --"),
            "{text}"
        );
    }

    #[test]
    fn long_lists_are_cut_and_the_rest_counted() {
        let one = || group(finding(Pattern::LateDeallocation, MIB, [2, 9], None), 5, 0);
        let text = render(&report(Rules::MEMSCOPE, (0..12).map(|_| one()).collect()), false);
        assert_eq!(text.lines().count(), 2 + 2 * GROUPS_SHOWN + 1);
        assert!(text.ends_with("    and 10 more in 2 groups (--json lists them)\n"), "{text}");
    }
}
