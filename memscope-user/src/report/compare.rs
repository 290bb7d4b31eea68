//! What changed, as people read it.

use std::fmt::Write;

use crate::analysis::compare::{BlockDifference, Difference, Layer, MemoryDifference, Side};

use super::terminal::{device_name, line};
use super::units;

/// Operators shown of each memory; the rest is counted.
const OPERATORS_SHOWN: usize = 20;

/// So many times the sum of all, what one operator allocates more is freed by others.
const CANCEL: u64 = 4;

/// Lines of the program shown of each memory, or kinds of blocks; the rest is counted.
const LINES_SHOWN: usize = 10;

pub fn render(difference: &Difference) -> String {
    let mut out = String::new();
    line(&mut out, &difference.verdict.to_string());
    for memory in &difference.memories {
        let of = &memory.memory;
        let text = format!(
            "{}, {}: net {} ({} against {}), peak {}",
            device_name(of.device),
            layer(of.layer),
            units::growth(memory.compare.net().saturating_sub(memory.base.net())),
            units::growth(memory.compare.net()),
            units::growth(memory.base.net()),
            units::growth(memory.peak_diff()),
        );
        line(&mut out, &text);
        kept(&mut out, difference, memory);
        operators(&mut out, memory);
    }
    out
}

fn kept(out: &mut String, difference: &Difference, memory: &MemoryDifference) {
    let has_lines = memory.lines.iter().any(|of| of.place.is_some());
    let all = if has_lines { &memory.lines } else { &memory.blocks };
    let changed: Vec<_> = all.iter().filter(|of| of.kept_diff != 0).collect();
    if changed.is_empty() {
        return;
    }
    line(out, if has_lines { "  kept, by line of the program:" } else { "  kept, by operator and size:" });
    for of in changed.iter().take(LINES_SHOWN) {
        line(out, &blocks(difference, of));
    }
    if let Some(more) = changed.len().checked_sub(LINES_SHOWN).filter(|more| *more > 0) {
        line(out, &format!("    and {more} more (--json has all)"));
    }
}

/// Blocks of which one side keeps more.
fn blocks(difference: &Difference, of: &BlockDifference) -> String {
    let (more, less, names) = match of.kept_diff {
        1.. => (of.compare, of.base, [name(difference.compare, "second"), name(difference.base, "first")]),
        _ => (of.base, of.compare, [name(difference.base, "first"), name(difference.compare, "second")]),
    };
    let [with, without] = names;
    let mut text = format!(
        "    {:>9}  {} {}",
        units::growth(of.kept_diff),
        of.like.pool,
        units::blocks(more.kept.blocks)
    );
    if let Some(size) = of.like.size {
        let _ = write!(text, " of {}", units::bytes(size));
    }
    let _ = match less.kept.blocks {
        0 => write!(text, " in {with} only"),
        others => write!(text, " in {with}, {} in {without}", units::count(others)),
    };
    if let Some(op) = &of.like.op {
        let _ = write!(text, ", around {op}");
    }
    if let Some(place) = &of.place {
        let _ = write!(text, ", at {}", units::place(place));
    }
    text.push_str(if more.never_freed == more.kept { ", never freed" } else { ", freed later" });
    text
}

fn name(side: Side, dump: &str) -> String {
    match side {
        Side::Whole => format!("the {dump} dump"),
        Side::Step(step) => format!("step {step}"),
    }
}

/// What was allocated less what was freed while an operator ran or after it.
fn operators(out: &mut String, memory: &MemoryDifference) {
    let changed: Vec<_> = memory.ops.iter().filter(|op| op.net_diff != 0 || op.peak_diff != 0).collect();
    if changed.is_empty() {
        return;
    }
    // Two traces of different length: what the longer one has allocated and freed more stands at different operators.
    let sum = memory.ops.iter().fold(0i64, |sum, op| sum.saturating_add(op.net_diff));
    let most = changed.iter().map(|op| op.net_diff.unsigned_abs()).max().unwrap_or(0);
    let mut text = "  allocated less freed, by the operator around it".to_owned();
    if most / CANCEL > sum.unsigned_abs() {
        let _ = write!(text, " (what some allocate others free: in all {})", units::growth(sum));
    }
    text.push(':');
    line(out, &text);
    for op in changed.iter().take(OPERATORS_SHOWN) {
        let name = op.name.as_deref().unwrap_or("before the first operator");
        let (net, peak) = (units::growth(op.net_diff), units::growth(op.peak_diff));
        line(out, &format!("    {net:>9}  {name}, at the peak {peak}"));
    }
    if let Some(more) = changed.len().checked_sub(OPERATORS_SHOWN).filter(|more| *more > 0) {
        line(out, &format!("    and {more} more (--json has all)"));
    }
}

fn layer(layer: Layer) -> &'static str {
    match layer {
        Layer::Pools => "pools",
        Layer::Driver => "driver",
        Layer::Host => "pinned host memory",
    }
}
