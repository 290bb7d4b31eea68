//! Leaks between marks, as people read them.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::analysis::offline_leaks::{DeviceReport, Leak, Report};
use crate::model::{Frame, Name, Pool};

use super::terminal::{at, line};
use super::units;

/// Lines shown of each device; the rest is counted.
const GROUPS_SHOWN: usize = 20;

pub fn render(report: &Report) -> String {
    let mut out = String::new();
    if report.devices.is_empty() {
        line(&mut out, "The dump has no device.");
    }
    for device in &report.devices {
        write_device(&mut out, report, device);
    }
    out
}

fn write_device(out: &mut String, report: &Report, device: &DeviceReport) {
    let who = format!("Process {}, device {}", device.pid, device.device);
    let Some([a, b, c]) = device.between else {
        let mut text = format!(
            "{who}: {} {:?}, three are needed from index {} on",
            units::count_of(device.marks as u64, "mark"),
            report.mark,
            report.start_index
        );
        if device.ranges > 0 {
            let ranges = units::count_of(device.ranges as u64, "range");
            let _ = write!(
                text,
                "; it is the text of {ranges}, and these are steps: leave --mstx-info out, or name them by --step-mark"
            );
        }
        let others = device.other_marks.iter();
        let others: Vec<_> = others.map(|(text, times)| format!("{text:?} ({times}x)")).collect();
        if !others.is_empty() {
            let _ = write!(text, "; others are {}", others.join(", "));
        }
        return line(out, &text);
    };
    let bytes = units::sum(device.leaks.iter().map(|leak| leak.size));
    let exact = if bytes >= 1024 { format!(" ({} bytes)", units::count(bytes)) } else { String::new() };
    let text = format!(
        "{who}: {}, {}{exact}, allocated between rows {} and {} and not freed before row {}",
        units::blocks(device.leaks.len() as u64),
        units::bytes(bytes),
        a.id,
        b.id,
        c.id
    );
    line(out, &text);
    let groups = groups(&device.leaks);
    for group in groups.iter().take(GROUPS_SHOWN) {
        write_group(out, group);
    }
    if let Some(more) = groups.get(GROUPS_SHOWN..).filter(|more| !more.is_empty()) {
        let bytes = units::sum(more.iter().flatten().map(|leak| leak.size));
        let text =
            format!("  and {} more kinds of {} in all (--json lists them)", more.len(), units::bytes(bytes));
        line(out, &text);
    }
}

fn write_group(out: &mut String, group: &[&Leak]) {
    let Some(first) = group.first() else { return };
    let largest = group.iter().map(|leak| leak.size).max().unwrap_or_default();
    let bytes = units::sum(group.iter().map(|leak| leak.size));
    let mut text = format!("  {} {}", first.pool, units::bytes(bytes));
    if group.len() > 1 {
        let up_to = if group.iter().all(|leak| leak.size == largest) { "" } else { "up to " };
        let _ = write!(text, " in {} of {up_to}{}", units::blocks(group.len() as u64), units::bytes(largest));
    }
    at(&mut text, ",", &first.stack);
    if let Some(op) = &first.op {
        let _ = write!(text, ", around {op}");
    }
    let _ = write!(text, ", thread {}, ", first.tid);
    text.push_str(if group.len() > 1 { "first at " } else { "at " });
    let _ = write!(text, "{}, row {}", first.ptr, first.id);
    line(out, &text);
}

/// The line of the program; where that is not known, operator and size.
type Likeness<'a> = Result<&'a Frame, (Option<&'a Name>, u64)>;

/// Blocks that are alike, in order of allocation; most bytes first.
fn groups(leaks: &[Leak]) -> Vec<Vec<&Leak>> {
    let mut groups: BTreeMap<(Pool, Likeness<'_>), Vec<&Leak>> = BTreeMap::new();
    for leak in leaks {
        let likeness = leak.stack.place().ok_or((leak.op.as_ref(), leak.size));
        groups.entry((leak.pool, likeness)).or_default().push(leak);
    }
    let mut groups: Vec<_> = groups.into_values().collect();
    groups.sort_by_key(|group| std::cmp::Reverse(units::sum(group.iter().map(|leak| leak.size))));
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::offline_leaks::MarkAt;
    use crate::dump::Place;
    use crate::model::{DeviceId, DevicePtr, Nanos, Origin, Stack, Tgid, Tid, Whose};
    use crate::report::document::StackOf;

    fn leak(id: u64, size: u64, at: Option<u32>) -> Leak {
        let frame =
            |line| Frame { function: "main".into(), file: "/src/job/train.py".into(), line: Some(line) };
        let stack = at.and_then(|line| Stack::new(vec![(frame(line), Origin::User)], Whose::Own, false));
        Leak {
            id,
            pool: Pool::Pta,
            ptr: DevicePtr(0x1000 * id),
            size,
            op: Some("aclnnAdds".into()),
            stack: StackOf(stack.map(std::sync::Arc::new)),
            tid: Tid(7),
            timestamp_ns: Nanos(id),
        }
    }

    fn report(leaks: Vec<Leak>) -> Report {
        let mark = |id| MarkAt { id, timestamp_ns: Nanos(id) };
        let between = Some([mark(1), mark(20), mark(30)]);
        let device = Place::Npu(DeviceId(0));
        let device = DeviceReport {
            pid: Tgid(7),
            device,
            marks: 3,
            ranges: 0,
            other_marks: Vec::new(),
            between,
            leaks,
        };
        Report { mark: "step start".into(), start_index: 0, devices: vec![device] }
    }

    #[test]
    fn a_leak_is_a_line_of_the_program() {
        let leaks = vec![
            leak(2, 1_049_088, Some(92)),
            leak(3, 512, None),
            leak(4, 2048, Some(92)),
            leak(5, 512, None),
        ];
        assert_eq!(
            render(&report(leaks)),
            "\
Process 7, device 0: 4 blocks, 1.00 MiB (1,052,160 bytes), allocated between rows 1 and 20 and not freed before row 30
  PTA 1.00 MiB in 2 blocks of up to 1.00 MiB, at job/train.py:92 in main, around aclnnAdds, thread 7, first at \
0x2000, row 2
  PTA 1.00 KiB in 2 blocks of 512 B, around aclnnAdds, thread 7, first at 0x3000, row 3
"
        );
        assert!(
            render(&report(vec![leak(2, 512, None)]))
                .starts_with("Process 7, device 0: 1 block, 512 B, alloc")
        );
        let json = serde_json::to_value(report(vec![leak(2, 512, Some(3))])).expect("JSON");
        assert_eq!(json["devices"][0]["leaks"][0]["python"][0]["line"], 3);
    }

    #[test]
    fn ranges_are_no_marks_and_that_is_said() {
        let mut report = report(Vec::new());
        report.devices[0].between = None;
        report.devices[0].marks = 1;
        assert_eq!(
            render(&report),
            "Process 7, device 0: 1 mark \"step start\", three are needed from index 0 on\n"
        );
        report.devices[0].other_marks = vec![("begin".into(), 3), ("end".into(), 2)];
        assert!(render(&report).ends_with("from index 0 on; others are \"begin\" (3x), \"end\" (2x)\n"));
        report.devices[0].other_marks.clear();
        (report.devices[0].marks, report.devices[0].ranges) = (0, 73);
        let text = render(&report);
        assert!(
            text.contains("0 marks") && text.contains("text of 73 ranges, and these are steps"),
            "{text}"
        );
    }
}
