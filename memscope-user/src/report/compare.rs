//! What changed, as people read it.

use crate::analysis::compare::{Difference, Layer};

use super::terminal::{device_name, line};
use super::units;

/// Operators shown of each memory; the rest is counted.
const OPERATORS_SHOWN: usize = 20;

pub fn render(difference: &Difference) -> String {
    let mut out = String::new();
    line(&mut out, &difference.verdict.to_string());
    for memory in &difference.memories {
        let of = &memory.memory;
        let text = format!(
            "{}, {}: net {} ({} against {}), peak {}",
            device_name(of.device),
            layer(of.layer),
            units::growth(memory.compare.net() - memory.base.net()),
            units::growth(memory.compare.net()),
            units::growth(memory.base.net()),
            units::growth(memory.compare.at_peak as i64 - memory.base.at_peak as i64),
        );
        line(&mut out, &text);
        let changed: Vec<_> = memory.ops.iter().filter(|op| op.net_diff != 0 || op.peak_diff != 0).collect();
        for op in changed.iter().take(OPERATORS_SHOWN) {
            let name = op.name.as_deref().unwrap_or("before the first operator");
            let (net, peak) = (units::growth(op.net_diff), units::growth(op.peak_diff));
            line(&mut out, &format!("  {name}: net {net}, at the peak {peak}"));
        }
        if changed.len() > OPERATORS_SHOWN {
            line(&mut out, &format!("  and {} more (--json has all)", changed.len() - OPERATORS_SHOWN));
        }
    }
    out
}

fn layer(layer: Layer) -> &'static str {
    match layer {
        Layer::Pools => "pools",
        Layer::Driver => "driver",
        Layer::Host => "pinned host memory",
    }
}
