//! What memory there is, how it came and went, and why a request was refused.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::{Report, at, line, made_at, more, threads, whence};
use crate::analysis::reserve::Point;
use crate::model::{Pool, StepId};
use crate::report::document::{
    BlockFacts, Device, FreeFacts, OomFacts, PoolFacts, ReconciliationFacts, ReserveFacts,
};
use crate::report::units;

/// Lines of each list; the rest is counted.
const OOMS_SHOWN: usize = 5;
const DEVICES_SHOWN: usize = 20;
const GAPS_SHOWN: usize = 20;
pub(super) const HOLDERS_SHOWN: usize = 8;

impl Report<'_> {
    pub(super) fn fluctuation(&self, out: &mut String) {
        let rows: Vec<[String; 4]> = self
            .document
            .devices
            .iter()
            .flat_map(|device| device.fluctuation.iter().map(move |facts| (device, facts)))
            .filter(|(_, facts)| facts.min_ratio < 1.0)
            .map(|(device, facts)| {
                let cell = |ratio: f64, min: u64, step: StepId| {
                    format!("{:.1} % ({}, step {step})", ratio * 100.0, units::bytes(min))
                };
                [
                    self.place(device),
                    facts.pool.to_string(),
                    cell(facts.min_ratio, facts.min_bytes, facts.min_step),
                    cell(facts.max_ratio, facts.max_min_bytes, facts.max_step),
                ]
            })
            .collect();
        if rows.is_empty() {
            return;
        }
        line(out, &self.paint.heading("Fluctuation within a step: smallest use, in % of the largest"));
        let head = ["", "", "widest swing", "narrowest swing"].map(str::to_owned);
        table(out, std::iter::once(&head).chain(&rows));
    }

    pub(super) fn memory(&self, out: &mut String) {
        if self.document.devices.is_empty() {
            return;
        }
        line(out, &self.paint.heading("Memory"));
        // Of many processes, those that used most.
        let mut devices: Vec<&Device> = self.document.devices.iter().collect();
        if devices.len() > DEVICES_SHOWN {
            let peak = |device: &Device| units::sum(device.pools.iter().map(|facts| facts.peak_bytes));
            devices.sort_by_key(|device| std::cmp::Reverse(peak(device)));
        }
        for device in devices.iter().take(DEVICES_SHOWN) {
            let mut text = format!("  {}", self.place(device));
            if let Some(reconciliation) = &device.reconciliation {
                let _ = write!(text, ": {}", driver_line(reconciliation, self.beginning()));
            }
            line(out, &text);
            let rows: Vec<[String; 3]> = device
                .pools
                .iter()
                .filter(|facts| facts.pool != Pool::Hal)
                .map(|facts| {
                    let seen = format!(
                        "seen since {}: {} live in {}, peak {}",
                        self.beginning(),
                        units::bytes(facts.live_bytes),
                        units::blocks(facts.blocks),
                        units::bytes(facts.peak_bytes)
                    );
                    let own = facts
                        .allocated
                        .map(|_| totals(facts, device.reconciliation.as_ref(), self.beginning()));
                    [format!("  {}", facts.pool), own.unwrap_or_default(), seen]
                })
                .collect();
            table(out, &rows);
            for series in &device.reserve {
                if let Some(text) = reserve(series) {
                    line(out, &format!("    {}: {text}", series.pool));
                }
            }
            for free in device.free.iter().filter(|free| free.space.free_bytes > 0) {
                line(out, &format!("    {}: {}", free.pool, free_space(free, None)));
            }
        }
        more(out, devices.len(), DEVICES_SHOWN);
        self.gaps(out);
    }

    /// Frees that no allocation was seen of, and allocations that no free was seen of.
    fn gaps(&self, out: &mut String) {
        let lost = self.document.events.lost > 0;
        let or_lost = if lost { " or whose allocation was lost" } else { "" };
        let before_attach = format!("freed that came from before {}{or_lost}", self.beginning());
        let mut lines = Vec::new();
        for process in &self.document.processes {
            for gaps in &process.pools {
                let whose = format!("{}{}", self.process(process.pid, process.program), gaps.pool);
                for (count, what) in [
                    (gaps.unknown_frees, before_attach.as_str()),
                    (gaps.lost_frees, "whose address was handed out again before a free was seen"),
                ] {
                    if count.blocks > 0 {
                        lines.push(format!("  {whose}: {} {what}", units::blocks(count.blocks)));
                    }
                }
            }
        }
        lines.iter().take(GAPS_SHOWN).for_each(|text| line(out, text));
        more(out, lines.len(), GAPS_SHOWN);
    }

    pub(super) fn out_of_memory(&self, out: &mut String) {
        let all = || {
            self.document.devices.iter().flat_map(|device| device.oom.iter().map(move |oom| (device, oom)))
        };
        // A loop that goes on after a refusal is refused again.
        let mut places: Vec<Vec<(&Device, &OomFacts)>> = Vec::new();
        for (device, oom) in all().filter(|(_, oom)| !oom.recovered) {
            match places.iter_mut().find(|known| is_same_place(known[0], (device, oom))) {
                Some(known) => known.push((device, oom)),
                None => places.push(vec![(device, oom)]),
            }
        }
        for ooms in places.iter().take(OOMS_SHOWN) {
            let (device, first) = ooms[0];
            self.one_oom(out, device, first);
            let again = &ooms[1..];
            if let Some((_, last)) = again.last() {
                let largest = again.iter().map(|(_, oom)| oom.requested).max().unwrap_or(0);
                let text = format!(
                    "  and {} refused there, of at most {}, the last in step {}",
                    units::were(again.len() as u64, "more request"),
                    units::bytes(largest),
                    last.step
                );
                line(out, &text);
            }
        }
        let not_listed = units::sum(self.document.processes.iter().map(|process| process.oom_not_listed));
        let more = units::sum(places.iter().skip(OOMS_SHOWN).map(|ooms| ooms.len() as u64)) + not_listed;
        if more > 0 {
            line(out, &format!("  and {}", units::count_of(more, "more out-of-memory")));
        }
        let recovered = all().filter(|(_, oom)| oom.recovered).count();
        if recovered > 0 {
            let requests: BTreeSet<u64> =
                all().filter(|(_, oom)| oom.recovered).map(|(_, oom)| oom.requested).collect();
            let largest = requests.last().copied().unwrap_or(0);
            let text = format!(
                "{} of at most {} succeeded after the pool had given memory back or on another try",
                units::count_of(recovered as u64, "refused request"),
                units::bytes(largest)
            );
            line(out, &text);
        }
    }

    fn one_oom(&self, out: &mut String, device: &Device, oom: &OomFacts) {
        let mut text = format!(
            "{} {}: {} of {} refused",
            self.paint.alarm("OUT OF MEMORY"),
            self.place(device),
            oom.api.unwrap_or(oom.function),
            units::bytes(oom.requested),
        );
        let _ = write!(text, " ({} returned {})", oom.function, oom.code);
        if oom.attempts > 1 {
            let _ = write!(text, " {} times", oom.attempts);
        }
        let _ = write!(text, ", step {}", oom.step);
        if let Some(op) = &oom.op {
            let _ = write!(text, ", around {op}");
        }
        at(&mut text, ",", &oom.stack);
        let _ = write!(text, ", thread {}", oom.tid);
        line(out, &text);
        if let Some(stack) = &oom.stack.0 {
            self.frames(out, stack);
        }
        let pools: Vec<String> = oom
            .pools
            .iter()
            .map(|facts| match facts.pool {
                Pool::Hal => {
                    format!("driver {} since {}", units::bytes(facts.live_bytes), self.beginning())
                }
                pool => format!("{pool} {}", totals(facts, None, self.beginning())),
            })
            .collect();
        if !pools.is_empty() {
            line(out, &format!("  at that moment: {}", pools.join("; ")));
        }
        for free in &oom.free {
            line(out, &format!("  {}: {}", free.pool, free_space(free, Some(oom.requested))));
        }
        holders(out, oom);
        self.blocks(out, "largest live blocks", &oom.largest);
        let known: BTreeSet<_> = oom.largest.iter().map(|block| block.allocation_id).collect();
        if oom.latest.iter().any(|block| !known.contains(&block.allocation_id)) {
            self.blocks(out, "latest live blocks", &oom.latest);
        }
    }

    fn blocks(&self, out: &mut String, heading: &str, blocks: &[BlockFacts]) {
        if !blocks.is_empty() {
            line(out, &format!("  {heading}:"));
        }
        for block in blocks.iter().take(self.view.oom_blocks) {
            let mut text = format!(
                "    {:>9}  {} at {}, step {}",
                units::bytes(block.size),
                block.pool,
                block.ptr,
                block.step
            );
            whence(&mut text, block);
            text.push_str(&threads(&[block]));
            line(out, &text);
        }
    }
}

/// Who held the memory when a request was refused.
/// Whether both were asked for at one place of the program, as far as that is told.
fn is_same_place((device, oom): (&Device, &OomFacts), (other_device, other): (&Device, &OomFacts)) -> bool {
    std::ptr::eq(device, other_device)
        && (oom.function, oom.api, &oom.op) == (other.function, other.api, &other.op)
        && oom.stack.place() == other.stack.place()
}

fn holders(out: &mut String, oom: &OomFacts) {
    let has_lines = oom.holders.iter().any(|holder| holder.place.is_some());
    if !oom.holders.is_empty() {
        line(out, if has_lines { "  held by line of the program:" } else { "  held by operator:" });
    }
    for holder in oom.holders.iter().take(HOLDERS_SHOWN) {
        let mut text = format!(
            "    {:>9}  {} in {}",
            units::bytes(holder.count.bytes),
            holder.pool,
            units::blocks(holder.count.blocks)
        );
        if holder.count.blocks > 1 {
            let _ = write!(text, " of up to {}", units::bytes(holder.largest));
        }
        made_at(&mut text, ",", holder.place.as_ref(), holder.op.as_ref());
        line(out, &text);
    }
    let more = oom.holders.get(HOLDERS_SHOWN..).unwrap_or_default();
    let others = more.len() as u64 + oom.other_holders.holders;
    if others > 0 {
        let bytes =
            units::sum(more.iter().map(|holder| holder.count.bytes).chain([oom.other_holders.count.bytes]));
        let kind = if has_lines { "other line" } else { "other operator" };
        line(out, &format!("    {:>9}  held by {}", units::bytes(bytes), units::count_of(others, kind)));
    }
}

/// How much is free in how many pieces, and whether a request would have fitted.
pub(super) fn free_space(free: &FreeFacts, request: Option<u64>) -> String {
    let space = free.space;
    let mut text = format!(
        "{} free in {} of {}, in {}",
        units::bytes(space.free_bytes),
        units::count_of(space.segments, "segment"),
        units::bytes(space.segment_bytes),
        units::count_of(space.pieces, "piece"),
    );
    if space.pieces > 0 {
        let _ = write!(text, ", the largest {}", units::bytes(space.largest_free));
    }
    if request.is_some_and(|request| space.free_bytes >= request && space.largest_free < request) {
        text.push_str(": enough, but in pieces that are too small");
    }
    if space.empty_segments > 0 {
        let empty = units::count_of(space.empty_segments, "empty segment");
        let _ = write!(text, "; {empty} of {}", units::bytes(space.empty_bytes));
    }
    if space.sparse_segments > 0 {
        let (of, kept) = (units::bytes(space.sparse_bytes), units::bytes(space.sparse_used));
        let sparse = units::count_of(space.sparse_segments, "segment");
        let _ = write!(text, "; {sparse} of {of} less than a quarter full, for {kept}");
    }
    text
}

/// What a pool handed out and had reserved over steps; `None` of a single one.
pub(super) fn reserve(series: &ReserveFacts) -> Option<String> {
    let points = &series.points;
    let (first, last) = points.first().zip(points.last()).filter(|_| points.len() > 1)?;
    let peak = points.iter().map(|point| point.peak_allocated).max()?;
    let begin = first.step.0 + 1 - first.steps.min(first.step.0);
    let mut text = format!(
        "over steps {begin}-{} at most {} allocated, {} reserved",
        last.step,
        units::bytes(peak),
        units::bytes(last.reserved)
    );
    match points.windows(2).rev().find(|pair| pair[0].reserved != pair[1].reserved) {
        Some(pair) => {
            let (before, after) = (pair[0].reserved, pair[1].reserved);
            let how = if after > before { "grew" } else { "shrank" };
            let bytes = units::bytes(before.abs_diff(after));
            let _ = write!(text, " in step {}, which last {how} by {bytes} in ", last.step);
            let _ = match pair[1].steps {
                1 => write!(text, "step {}", pair[1].step),
                several => write!(text, "steps {}-{}", pair[1].step.0 + 1 - several, pair[1].step),
            };
        }
        None => text.push_str(" throughout"),
    }
    // It had room for all that was needed, and took more. What it had given back before is no such room.
    if points.windows(2).any(|pair| {
        pair[1].reserved > pair[0].reserved
            && pair[1].least_reserved >= pair[1].peak_allocated
            && pair[1].peak_allocated <= points_peak(points, pair[0].step)
    }) {
        text.push_str("; it grew in steps that allocated no more than those before: what was free was in pieces too small, of another stream, or in segments for blocks of other sizes");
    }
    Some(text)
}

/// The most that was allocated up to a step.
fn points_peak(points: &[Point], step: StepId) -> u64 {
    let up_to = points.iter().take_while(|point| point.step <= step);
    up_to.map(|point| point.peak_allocated).max().unwrap_or(0)
}

fn driver_line(facts: &ReconciliationFacts, beginning: &str) -> String {
    let mut text = format!("{} from the driver since {beginning}", units::bytes(facts.driver_bytes));
    let modules: Vec<String> = facts
        .modules
        .iter()
        .map(|module| {
            format!("{} {}", module.module.as_deref().unwrap_or("unknown module"), units::bytes(module.bytes))
        })
        .collect();
    if modules.len() > 1 || facts.modules.iter().any(|module| module.module.is_some()) {
        let _ = write!(text, " ({})", modules.join(", "));
    }
    let segments: Vec<String> = facts
        .segments
        .iter()
        .filter(|segments| segments.driver_bytes > 0)
        .map(|segments| format!("{} in segments of {}", units::bytes(segments.driver_bytes), segments.pool))
        .collect();
    if facts.driver_bytes > 0 {
        let _ = write!(
            text,
            ": {}{} in no pool",
            segments.iter().map(|text| format!("{text}, ")).collect::<String>(),
            units::bytes(facts.unexplained_bytes)
        );
    }
    text
}

/// The allocator's own figures.
fn totals(facts: &PoolFacts, reconciliation: Option<&ReconciliationFacts>, beginning: &str) -> String {
    let (Some(allocated), Some(reserved)) = (facts.allocated, facts.reserved) else {
        return format!("{} in blocks", units::bytes(facts.live_bytes));
    };
    let mut text = format!("{} allocated of {} reserved", units::bytes(allocated), units::bytes(reserved));
    let before = reconciliation
        .and_then(|facts_of| facts_of.segments.iter().find(|segments| segments.pool == facts.pool))
        .and_then(|segments| segments.before_attach)
        .filter(|before| *before > 0);
    if let Some(before) = before {
        let _ = write!(text, " ({} before {beginning})", units::bytes(before));
    }
    text
}

/// Left-aligned columns, indented.
fn table<'a, const N: usize>(out: &mut String, rows: impl IntoIterator<Item = &'a [String; N]> + Clone) {
    let mut widths = [0; N];
    for row in rows.clone() {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    for row in rows {
        let mut text = String::new();
        for (width, cell) in widths.iter().zip(row) {
            let _ = write!(text, "  {cell:<width$}");
        }
        line(out, text.trim_end());
    }
}
