//! What leaks, grows, is freed late or could not be judged.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::Arc;

use super::{Report, around, at, line, made_at, threads, whence};
use crate::analysis::leaks::size_class;
use crate::model::{Count, Frame, Name, Pool, Stack, StepId, StepSet};
use crate::report::document::{BlockFacts, Device, Document, GrowthFacts, LateFacts};
use crate::report::units;

/// Lines of each list; the rest is counted.
pub(super) const GROUPS_SHOWN: usize = 20;
const CALLERS_SHOWN: usize = 4;
/// Of so many blocks at least it is said that fewer come lately: when less than two of five are of the later half.
const SLOWING_MIN: usize = 32;
const LATE_SHOWN: usize = 10;
const NOT_JUDGED_SHOWN: usize = 5;

/// What makes blocks one line of the report: the line of the program, else size class and operator; in one pool.
type Likeness<'a> = (Pool, Result<&'a Frame, (u16, Option<&'a Name>)>);

fn likeness(block: &BlockFacts) -> Likeness<'_> {
    (block.pool, block.stack.place().ok_or((size_class(block.size), block.op.as_ref())))
}

/// Leaked blocks that are alike.
pub(super) struct Group<'a> {
    pub device: &'a Device,
    pub pool: Pool,
    /// In order of allocation.
    pub blocks: Vec<&'a BlockFacts>,
    pub bytes: u64,
}

impl Report<'_> {
    pub(super) fn leaks(&self, out: &mut String) {
        let groups = &self.leaking;
        for group in groups.iter().take(GROUPS_SHOWN) {
            let steps: BTreeSet<StepId> = group.blocks.iter().map(|block| block.step).collect();
            let (Some(first), Some(begin)) = (group.blocks.first(), steps.first()) else { continue };
            // Since it began: what was before says nothing of what will be.
            let judged = self.document.steps_judged_from(group.device, *begin);
            let mut text = format!(
                "{} {} {}: +{}/step",
                self.paint.alarm("LEAK"),
                self.place(group.device),
                group.pool,
                units::bytes(group.bytes / u64::from(judged.max(1))),
            );
            let has_place = first.stack.place().is_some();
            if has_place {
                at(&mut text, "", &first.stack);
            } else {
                around(&mut text, "", first);
            }
            line(out, &text);
            let mut text = format!("     {} in {}", units::bytes(group.bytes), group.blocks_and_sizes());
            let _ = write!(text, ", {}", self.step_list(&steps, group.device));
            if has_place {
                around(&mut text, ",", first);
            }
            text.push_str(&threads(&group.blocks));
            let _ = write!(text, ", first at {}", first.ptr);
            line(out, &text);
            if slows_down(group, group.device.last_step_ended.0.saturating_sub(1)) {
                line(
                    out,
                    "     fewer of them lately: a cache that fills up looks like this, and stops when it is full",
                );
            }
            self.callers(out, group);
        }
        if let Some(more) = groups.len().checked_sub(GROUPS_SHOWN).filter(|more| *more > 0) {
            let bytes = units::sum(groups.iter().skip(GROUPS_SHOWN).map(|group| group.bytes));
            line(
                out,
                &format!("  and {more} smaller ones of {} in all (--json lists them)", units::bytes(bytes)),
            );
        }

        self.kept(out, "settled", "Grew and then stopped, no leak unless it goes on");
        self.kept(out, "once", "Built once and kept, no leak unless it comes again");
    }

    /// What is kept and looks like no leak, with the largest kind.
    fn kept(&self, out: &mut String, pattern: &str, what: &str) {
        let groups = groups(self.document, pattern);
        let Some(largest) = groups.first() else { return };
        let blocks = groups.iter().map(|group| group.blocks.len() as u64).sum();
        let mut text = format!(
            "{what}: {} in {}",
            units::bytes(units::sum(groups.iter().map(|group| group.bytes))),
            units::blocks(blocks)
        );
        let steps: BTreeSet<StepId> = largest.blocks.iter().map(|block| block.step).collect();
        let (place, pool) = (self.place(largest.device), largest.pool);
        if groups.len() > 1 {
            let (bytes, blocks) = (units::bytes(largest.bytes), largest.blocks_and_sizes());
            let _ = write!(text, "; most {place} {pool} {bytes} in {blocks}");
        } else {
            let _ = write!(text, ", {place} {pool}");
        }
        let _ = write!(text, " in {}", self.step_list(&steps, largest.device));
        if let Some(first) = largest.blocks.first() {
            whence(&mut text, first);
            let _ = write!(text, ", first at {}", first.ptr);
        }
        line(out, &text);
    }

    fn step_list(&self, steps: &BTreeSet<StepId>, device: &Device) -> String {
        step_list(steps, device.last_step_ended.0.saturating_sub(1), &self.document.selection.steps)
    }

    /// Below a leak: who called the line, for it may be that of a helper, and the stacks when all are wanted.
    fn callers(&self, out: &mut String, group: &Group<'_>) {
        let stacks = || group.blocks.iter().filter_map(|block| Some((*block, block.stack.0.as_ref()?)));
        let Some((_, first)) = stacks().next() else { return };
        let in_common = |stack: &Stack| {
            let pairs = stack.callers().iter().zip(first.callers());
            pairs.take_while(|(one, other)| one == other).count()
        };
        let apart = stacks().map(|(_, stack)| in_common(stack)).min();
        let mut by_caller: BTreeMap<Option<&Frame>, (Count, &Arc<Stack>)> = BTreeMap::new();
        for (block, stack) in stacks() {
            let caller = apart.and_then(|depth| stack.callers().get(depth));
            by_caller.entry(caller).or_insert((Count::default(), stack)).0.add(block.size);
        }
        let mut by_caller: Vec<_> = by_caller.into_iter().collect();
        by_caller.sort_by_key(|(_, (count, _))| std::cmp::Reverse(count.bytes));
        let several = by_caller.len() > 1;
        if !several && let Some(caller) = first.caller() {
            line(out, &format!("     called by {}", units::place(caller)));
        }
        for (caller, (count, stack)) in by_caller.iter().take(CALLERS_SHOWN) {
            if several {
                let caller = caller.map_or("the program itself".to_owned(), units::place);
                let (bytes, blocks) = (units::bytes(count.bytes), units::blocks(count.blocks));
                line(out, &format!("     {bytes} in {blocks} by {caller}"));
            }
            self.frames(out, stack);
        }
        if let Some(more) = by_caller.len().checked_sub(CALLERS_SHOWN).filter(|more| *more > 0) {
            line(out, &format!("     and by {more} more callers (--json lists them)"));
        }
    }

    pub(super) fn growth(&self, out: &mut String) {
        let trends = self.trends();
        for (device, trend) in trends.iter().take(GROUPS_SHOWN) {
            let mut text = format!(
                "{} {} {}: +{}/step",
                self.paint.alarm("GROWS"),
                self.place(device),
                trend.pool,
                units::bytes(trend.bytes_per_step),
            );
            made_at(&mut text, "", trend.place.as_ref(), trend.op.as_ref());
            line(out, &text);
            let text = format!(
                "     {} live at the end of step {}, {} at that of step {}; its blocks are freed, but more take their place",
                units::bytes(trend.first_bytes),
                trend.first_step,
                units::bytes(trend.last_bytes),
                trend.last_step,
            );
            line(out, &text);
        }
        if let Some(more) = trends.len().checked_sub(GROUPS_SHOWN).filter(|more| *more > 0) {
            line(out, &format!("  and {more} slower ones (--json lists them)"));
        }
    }

    /// Steepest first.
    pub(super) fn trends(&self) -> Vec<(&Device, &GrowthFacts)> {
        let devices = self.document.devices.iter();
        let mut trends: Vec<_> =
            devices.flat_map(|device| device.growth.iter().map(move |trend| (device, trend))).collect();
        trends.sort_by_key(|(_, trend)| std::cmp::Reverse(trend.bytes_per_step));
        trends
    }

    /// Blocks that were freed late, a line for each line of the program.
    pub(super) fn late(&self, out: &mut String) {
        let mut kinds: Vec<Late<'_>> = Vec::new();
        for device in &self.document.devices {
            let mut alike: BTreeMap<_, Late<'_>> = BTreeMap::new();
            for group in &device.late_groups {
                let likeness: Likeness<'_> =
                    (group.pool, group.place.as_ref().ok_or((size_class(group.largest), group.op.as_ref())));
                let kind = alike.entry(likeness).or_insert_with(|| Late::new(device, group));
                kind.add(group);
            }
            kinds.extend(alike.into_values());
        }
        kinds.sort_by_key(|kind| std::cmp::Reverse(kind.count.bytes));
        for Late { device, group, count, steps: (first, last), held, one_op } in kinds.iter().take(LATE_SHOWN)
        {
            let steps = |number: u32| units::count_of(number.into(), "step");
            let held = match *held {
                (min, max) if min == max => steps(max),
                (min, max) => format!("{min} to {}", steps(max)),
            };
            let mut text = format!(
                "Late: {} {}: {}, {} in all, freed {held} after allocation in {}",
                self.place(device),
                group.pool,
                units::blocks(count.blocks),
                units::bytes(count.bytes),
                if first == last { format!("step {first}") } else { format!("steps {first}-{last}") },
            );
            if let Some(op) = group.op.as_ref().filter(|_| *one_op) {
                let _ = write!(text, ", around {op}");
            }
            if let Some(place) = &group.place {
                let _ = write!(text, ", at {}", units::place(place));
            }
            line(out, &text);
        }
        if let Some(more) = kinds.len().checked_sub(LATE_SHOWN).filter(|more| *more > 0) {
            let kinds = units::count_of(more as u64, "smaller kind");
            line(out, &format!("  and {kinds} of late blocks (--json lists them)"));
        }
    }

    pub(super) fn not_judged(&self, out: &mut String) {
        let devices = &self.document.devices;
        let blocks = units::sum(devices.iter().map(|device| device.not_judged_total.blocks));
        if blocks == 0 {
            return;
        }
        let bytes = units::sum(devices.iter().map(|device| device.not_judged_total.bytes));
        let mut heading = format!("Not judged: {}, {}", units::blocks(blocks), units::bytes(bytes));
        // That its youngest blocks are not judged is no news of what leaks.
        let is_leaking = |device: &Device, block: &BlockFacts| {
            self.leaking.iter().any(|group| {
                std::ptr::eq(group.device, device)
                    && group.blocks.first().is_some_and(|leaked| likeness(leaked) == likeness(block))
                    && group.blocks.iter().any(|leaked| leaked.size >= block.size)
            })
        };
        let (leaking, mut largest): (Vec<_>, Vec<_>) = devices
            .iter()
            .flat_map(|device| device.not_judged.iter().map(move |block| (device, block)))
            .partition(|(device, block)| is_leaking(device, block));
        let more = blocks.saturating_sub((leaking.len() + largest.len().min(NOT_JUDGED_SHOWN)) as u64);
        let others = !largest.is_empty() || more > 0;
        if !others {
            heading.push_str(", of what leaks above");
        }
        line(out, &self.paint.heading(&heading));
        largest.sort_by_key(|(_, block)| std::cmp::Reverse(block.size));
        for (device, block) in largest.into_iter().take(NOT_JUDGED_SHOWN) {
            let mut text = format!(
                "  {} {} {} at {}, step {}",
                self.place(device),
                block.pool,
                units::bytes(block.size),
                block.ptr,
                block.step
            );
            whence(&mut text, block);
            text.push_str(&threads(&[block]));
            if let Some(reason) = &block.reason {
                let _ = write!(text, " ({reason})");
            }
            line(out, &text);
        }
        if !leaking.is_empty() && others {
            line(out, &format!("  {} of what leaks above", units::count(leaking.len() as u64)));
        }
        if more > 0 {
            line(out, &format!("  and {} smaller", units::count(more)));
        }
    }
}

/// Whether clearly fewer of the blocks are of the later half of the steps that were judged, from the second on.
fn slows_down(group: &Group<'_>, last_judged: u32) -> bool {
    let blocks = group.blocks.len();
    let later =
        group.blocks.iter().filter(|block| 2 * u64::from(block.step.0) > u64::from(last_judged) + 2).count();
    blocks >= SLOWING_MIN && 5 * later < 2 * blocks
}

/// Leaks of a pattern, alike ones together, most bytes first.
pub(super) fn groups<'a>(document: &'a Document, pattern: &str) -> Vec<Group<'a>> {
    let mut groups = Vec::new();
    for device in &document.devices {
        // A line of the program is one leak, whatever the sizes and operators there.
        let mut alike: BTreeMap<Likeness<'_>, Vec<&BlockFacts>> = BTreeMap::new();
        for block in device.leaks.iter().filter(|block| block.pattern == pattern) {
            alike.entry(likeness(block)).or_default().push(block);
        }
        groups.extend(alike.into_iter().map(|((pool, ..), blocks)| {
            let bytes = units::sum(blocks.iter().map(|block| block.size));
            Group { device, pool, blocks, bytes }
        }));
    }
    groups.sort_by_key(|group| std::cmp::Reverse(group.bytes));
    groups
}

impl Group<'_> {
    fn blocks_and_sizes(&self) -> String {
        let blocks = units::blocks(self.blocks.len() as u64);
        if self.blocks.len() == 1 {
            return blocks;
        }
        let sizes = || self.blocks.iter().map(|block| block.size);
        let largest = units::bytes(sizes().max().unwrap_or(0));
        let up_to = if sizes().all(|size| units::bytes(size) == largest) { "" } else { "up to " };
        format!("{blocks} of {up_to}{largest}")
    }
}

/// Late blocks of a line.
struct Late<'a> {
    device: &'a Device,
    /// The first of them.
    group: &'a LateFacts,
    count: Count,
    steps: (StepId, StepId),
    /// Least and most steps from allocation to free.
    held: (u32, u32),
    /// All were allocated around the same operator.
    one_op: bool,
}

impl<'a> Late<'a> {
    fn new(device: &'a Device, group: &'a LateFacts) -> Self {
        let steps = (group.first_step, group.last_step);
        let held = (group.held_min, group.held_max);
        Late { device, group, count: Count::default(), steps, held, one_op: true }
    }

    fn add(&mut self, group: &LateFacts) {
        self.count.blocks += group.blocks;
        self.count.bytes = self.count.bytes.saturating_add(group.bytes);
        self.steps = (self.steps.0.min(group.first_step), self.steps.1.max(group.last_step));
        self.held = (self.held.0.min(group.held_min), self.held.1.max(group.held_max));
        self.one_op &= self.group.op == group.op;
    }
}

/// `step 5`, `steps 2-6`, `steps 2-5, 8`, `23 of the steps 2-99`; and whether it has stopped. Nothing is said of steps
/// that are not among the selected ones.
pub(super) fn step_list(steps: &BTreeSet<StepId>, last_judged: u32, selected: &StepSet) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for StepId(step) in steps.iter().copied() {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == step => *last = step,
            _ => runs.push((step, step)),
        }
    }
    let (Some((first, _)), Some((_, last))) = (runs.first().copied(), runs.last().copied()) else {
        return "no step".to_owned();
    };
    let mut text = match &runs[..] {
        [(first, last)] if first == last => format!("step {first}"),
        few if few.len() <= 3 => {
            let runs: Vec<String> = few
                .iter()
                .map(
                    |(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") },
                )
                .collect();
            format!("steps {}", runs.join(", "))
        }
        _ if selected.is_all() => format!("{} of the steps {first}-{last}", steps.len()),
        _ => {
            let among = selected.count_in(first..=last);
            format!("{} of the {among} selected steps from {first} to {last}", steps.len())
        }
    };
    let gap = |(_, last): (u32, u32), (next, _): (u32, u32)| selected.count_in(last + 1..=next);
    let widest_gap = runs.windows(2).map(|pair| gap(pair[0], pair[1])).max().unwrap_or(1);
    let quiet = selected.count_in(last + 1..=last_judged);
    if quiet > 2 * widest_gap {
        let _ = match selected.is_all() {
            true => write!(text, " (none in steps {}-{last_judged})", last + 1),
            false => write!(text, " (none in the {quiet} selected steps after)"),
        };
    }
    text
}
