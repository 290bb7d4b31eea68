//! Whose memory it is, as a tree: the driver's by module, then each pool with what it hands out.

use std::collections::BTreeSet;
use std::fmt::Write;

use crate::analysis::decompose::{Class, ClassShare, Decomposition, Share};
use crate::model::{Frame, Name, Pool};

use super::document::{Device, Document};
use super::terminal::{Paint, device_name, line};
use super::units;

/// Lines, operators and labels shown of each pool; the rest is added up.
const NAMES_SHOWN: usize = 8;

/// Columns of the tree, where names are not longer.
const WIDTH: usize = 32;

/// Renders the trees alone.
pub fn render(document: &Document, colour: bool) -> String {
    let mut out = String::new();
    write_trees(&mut out, document, &Paint { colour });
    if out.is_empty() {
        line(&mut out, "No device memory was allocated.");
    }
    let mut classes = document.decomposition.iter().flat_map(|of| &of.classes).peekable();
    if classes.peek().is_some() && classes.all(|class| class.class == Class::Unknown) {
        let how = "write a dump with the accesses that tell what blocks are for: --analysis decompose";
        line(&mut out, &format!("Next: {how}"));
    }
    out
}

pub(super) fn write_trees(out: &mut String, document: &Document, paint: &Paint) {
    let known: BTreeSet<_> = document.decomposition.iter().map(|of| (of.pid, of.program)).collect();
    for device in document.devices.iter().filter(|device| device.device.is_some()) {
        let pools = document
            .decomposition
            .iter()
            .find(|of| (of.pid, of.program, of.device) == (device.pid, device.program, device.device));
        let process = match known.iter().filter(|(pid, _)| *pid == device.pid).count() {
            _ if known.len() < 2 => String::new(),
            1 => format!("process {} ", device.pid),
            _ => format!("process {} (program {}) ", device.pid, device.program),
        };
        let heading =
            format!("Memory of {process}{}: now, and at the peak of its pools", device_name(device.device));
        line(out, &paint.heading(&heading));
        driver(out, device);
        if let Some(pools) = pools {
            write_pools(out, pools);
        }
    }
}

fn driver(out: &mut String, device: &Device) {
    let Some(reconciliation) = &device.reconciliation else { return };
    for module in &reconciliation.modules {
        let name = module.module.as_deref().unwrap_or("unknown module");
        line(out, &format!("  CANN@{name:<25} {:>10}", units::bytes(module.bytes)));
    }
}

fn write_pools(out: &mut String, of: &Decomposition) {
    let mut pools: Vec<Pool> = of.classes.iter().map(|class| class.pool).collect();
    pools.dedup();
    for pool in pools {
        let sum = |part: fn(&Share) -> u64| {
            units::sum(of.classes.iter().filter(|class| class.pool == pool).map(|class| part(&class.share)))
        };
        let mut text = row(
            pool.name(),
            2,
            &Share { live_bytes: sum(|s| s.live_bytes), peak_bytes: sum(|s| s.peak_bytes), live_blocks: 0 },
        );
        if let Some((_, totals)) = of.totals.iter().find(|(of, _)| *of == pool) {
            let _ = write!(
                text,
                "  of {} reserved, {} unused",
                units::bytes(totals.reserved),
                units::bytes(totals.reserved.saturating_sub(totals.allocated))
            );
            let before = totals.allocated.saturating_sub(sum(|s| s.live_bytes));
            if before > 0 {
                let _ =
                    write!(text, ", {} from before the trace, which is not told apart", units::bytes(before));
            }
        }
        line(out, &text);
        for class in of.classes.iter().filter(|class| class.pool == pool) {
            line(out, &class_row(class));
        }
        if of.lines.iter().any(|line| line.pool == pool && line.place.is_some()) {
            let name = |place: Option<&Frame>| place.map_or_else(|| "not known".to_owned(), units::place);
            let lines = of.lines.iter().filter(|line| line.pool == pool);
            names(out, "by line of the program", lines.map(|line| (name(line.place.as_ref()), &line.share)));
        }
        let named = |name: Option<&Name>, path: &str| {
            name.map_or_else(|| "none".to_owned(), |name| format!("{pool}{path}{name}"))
        };
        let operators = of.operators.iter().filter(|operator| operator.pool == pool);
        names(out, "by operator", operators.map(|of| (named(of.name.as_ref(), "@ops@"), &of.share)));
        let labels = || of.labels.iter().filter(|label| label.pool == pool);
        if labels().any(|label| label.name.is_some()) {
            names(out, "by range", labels().map(|of| (named(of.name.as_ref(), "@"), &of.share)));
        }
    }
}

fn class_row(class: &ClassShare) -> String {
    let inferred = if class.inferred { " (inferred)" } else { "" };
    row(&format!("{}{inferred}", class.class.name()), 4, &class.share)
}

/// The first of what is sorted by bytes.
fn names<'a>(out: &mut String, heading: &str, shares: impl Iterator<Item = (String, &'a Share)>) {
    let shares: Vec<(String, &Share)> = shares.collect();
    line(out, &format!("    {heading}"));
    let shown = || shares.iter().take(NAMES_SHOWN);
    let width = shown().map(|(name, _)| name.chars().count()).fold(WIDTH - 6, usize::max);
    for (name, share) in shown() {
        line(out, &row(&format!("{name:<width$}"), 6, share));
    }
    if let Some(more) = shares.get(NAMES_SHOWN..).filter(|more| !more.is_empty()) {
        let sum = |part: fn(&Share) -> u64| units::sum(more.iter().map(|(_, share)| part(share)));
        let share =
            Share { live_bytes: sum(|s| s.live_bytes), peak_bytes: sum(|s| s.peak_bytes), live_blocks: 0 };
        line(out, &row(&format!("{:<width$}", format!("{} more", more.len())), 6, &share));
    }
}

/// Bytes now and at the peak.
fn row(name: &str, indent: usize, share: &Share) -> String {
    let width = WIDTH - indent;
    format!(
        "{:indent$}{name:<width$} {:>10} {:>10}",
        "",
        units::bytes(share.live_bytes),
        units::bytes(share.peak_bytes)
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::analysis::Online;
    use crate::model::testing::{MAIN, MIB, Script};
    use crate::model::{EventKind, Module, Origin, Stack, StepRule, Whose};
    use crate::report::document::Trace;

    #[test]
    fn the_tree_goes_from_the_driver_to_the_operators() {
        let mut script = Script::new();
        script.hal(0x1000, 3 * MIB, Module::RUNTIME).hal(0x4000_0000, 20 * MIB, Module::APP).op("aclnnMm");
        script.alloc_in(Pool::Pta, 0, 0x4000_0000, 5 * MIB, Some((5 * MIB, 20 * MIB)));
        let frame = Frame { function: "main".into(), file: "/src/job/train.py".into(), line: Some(9) };
        let stack = Stack::new(vec![(frame, Origin::User)], Whose::Own, false).map(Arc::new);
        if let Some(EventKind::Alloc(alloc)) = script.events.last_mut().map(|event| &mut event.kind) {
            alloc.stack = stack;
        }
        script.alloc_in(Pool::Pta, 0, 0x4100_0000, 2 * MIB, Some((7 * MIB, 20 * MIB)));
        script.free_in(Pool::Pta, 0x4100_0000, Some((5 * MIB, 20 * MIB)));
        let mut online = Online::new(StepRule::default(), false).with_decompose();
        for event in &script.events {
            online.apply(event);
        }
        let text = render(&Document::new(Trace::default(), &online), false);
        assert_eq!(
            text,
            "\
Memory of device 0: now, and at the peak of its pools
  CANN@APP                         20.0 MiB
  CANN@RUNTIME                     3.00 MiB
  PTA                              5.00 MiB   7.00 MiB  of 20.0 MiB reserved, 15.0 MiB unused
    unknown                        5.00 MiB   7.00 MiB
    by line of the program
      job/train.py:9 in main       5.00 MiB   5.00 MiB
      not known                         0 B   2.00 MiB
    by operator
      PTA@ops@aclnnMm              5.00 MiB   7.00 MiB
Next: write a dump with the accesses that tell what blocks are for: --analysis decompose
"
        );
        // As it was when the process said that it had finished, whatever it tidies up.
        script.push(MAIN, EventKind::AclFinalize).free_in(Pool::Pta, 0x4000_0000, Some((0, 20 * MIB)));
        let mut finished = Online::new(StepRule::default(), false).with_decompose();
        for event in &script.events {
            finished.apply(event);
        }
        let pools = |online: &Online| {
            let text = render(&Document::new(Trace::default(), online), false);
            text.lines().find(|line| line.starts_with("  PTA")).map(str::to_owned)
        };
        assert_eq!(pools(&finished), pools(&online));
        let attached_late: Vec<_> = script.events.iter().skip(4).cloned().collect();
        let mut online = Online::new(StepRule::default(), false).with_decompose();
        for event in &attached_late {
            online.apply(event);
        }
        assert!(pools(&online).is_some_and(|line| line.ends_with("5.00 MiB from before the trace, which is not told apart")));
        let nothing = Document::new(Trace::default(), &Online::new(StepRule::default(), false));
        assert_eq!(render(&nothing, false), "No device memory was allocated.\n");
    }
}
