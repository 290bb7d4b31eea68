//! The report as people read it: what leaks first, then what is needed to judge it, then what to do next.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::Arc;

use crate::analysis::leaks::size_class;
use crate::analysis::reserve::Point;
use crate::model::{Count, DeviceId, Frame, Name, Pool, Stack, StepId, Tgid, Tid, Whose};

use super::document::{
    BlockFacts, Device, Document, FreeFacts, GrowthFacts, LateFacts, OomFacts, PoolFacts,
    ReconciliationFacts, ReserveFacts, StackOf, WithoutStack,
};
use super::{decompose, inefficient, units};

/// Lines of each list; the rest is counted.
const GROUPS_SHOWN: usize = 20;
const CALLERS_SHOWN: usize = 4;
const LATE_SHOWN: usize = 10;
const NOT_JUDGED_SHOWN: usize = 5;
const OOMS_SHOWN: usize = 5;
const HOLDERS_SHOWN: usize = 8;

/// Single blocks shown with each out-of-memory, unless it is said otherwise: who holds the memory is said before.
pub const OOM_BLOCKS_SHOWN: usize = 3;

const SITES_SHOWN: usize = 10;

/// Confidence above which inferred steps need no warning.
const SURE: f64 = 0.75;

/// Renders the report. `colour`: with ANSI sequences, for a terminal. `all_frames`: each leak's whole stack.
pub fn render(document: &Document, colour: bool, all_frames: bool) -> String {
    let report = Report::new(document, colour, all_frames);
    let mut out = String::new();
    report.headline(&mut out);
    report.inferred_steps(&mut out);
    report.out_of_memory(&mut out);
    report.leaks(&mut out);
    report.growth(&mut out);
    report.late(&mut out);
    report.not_judged(&mut out);
    report.fluctuation(&mut out);
    if let Some(found) = &document.inefficient {
        inefficient::write_report(&mut out, found, &report.paint);
    }
    if !document.decomposition.is_empty() {
        decompose::write_trees(&mut out, document, &report.paint);
    }
    report.memory(&mut out);
    report.trace(&mut out);
    report.next(&mut out);
    out
}

/// Out-of-memories alone, with so many of the largest and of the latest blocks.
pub fn render_oom(document: &Document, colour: bool, blocks_shown: usize) -> String {
    let report = Report { blocks_shown, ..Report::new(document, colour, false) };
    let mut out = String::new();
    report.out_of_memory(&mut out);
    if out.is_empty() {
        line(&mut out, "No allocation failed.");
    }
    out
}

struct Report<'a> {
    document: &'a Document,
    /// With devices, each with its programs. More than one process: each is named; more than one program: too.
    processes: BTreeMap<Tgid, BTreeSet<u32>>,
    /// Stacks are shown whole.
    all_frames: bool,
    /// Single blocks beside an out-of-memory.
    blocks_shown: usize,
    paint: Paint,
}

pub(super) struct Paint {
    pub colour: bool,
}

impl Paint {
    fn with(&self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    pub fn alarm(&self, text: &str) -> String {
        self.with("1;31", text)
    }

    pub fn heading(&self, text: &str) -> String {
        self.with("1", text)
    }
}

/// What makes leaked blocks one line of the report: the line of the program, else size class and operator.
type Likeness<'a> = Result<&'a Frame, (u16, Option<&'a Name>)>;

/// Leaked blocks that are alike.
struct Group<'a> {
    device: &'a Device,
    pool: Pool,
    /// In order of allocation.
    blocks: Vec<&'a BlockFacts>,
    bytes: u64,
}

impl<'a> Report<'a> {
    fn new(document: &'a Document, colour: bool, all_frames: bool) -> Self {
        let mut processes: BTreeMap<Tgid, BTreeSet<u32>> = BTreeMap::new();
        for device in &document.devices {
            processes.entry(device.pid).or_default().insert(device.program);
        }
        let (paint, blocks_shown) = (Paint { colour }, OOM_BLOCKS_SHOWN);
        Report { document, processes, all_frames, blocks_shown, paint }
    }
}

impl Report<'_> {
    fn headline(&self, out: &mut String) {
        let document = self.document;
        let leaking = self.groups("recurring");
        let judged = document.devices.iter().map(|device| device.last_step_ended.0.saturating_sub(1)).max();
        let lower_bound = if document.events.lost > 0 { "at least " } else { "" };
        let text = if !document.leaks_analysed {
            "Leaks were not looked for.".to_owned()
        } else if !leaking.is_empty() {
            let blocks: usize = leaking.iter().map(|group| group.blocks.len()).sum();
            let bytes = units::sum(leaking.iter().map(|group| group.bytes));
            let kinds = if leaking.len() == 1 { "1 leak" } else { &format!("{} leaks", leaking.len()) };
            let text =
                format!("{lower_bound}{kinds}: {} in {}", units::bytes(bytes), units::blocks(blocks as u64));
            self.paint.alarm(&capitalised(&text))
        } else {
            match judged {
                None if document.offline => {
                    "Leaks not judged: the dump has no row of an allocation or a free.".to_owned()
                }
                None => "Leaks not judged: no device memory was allocated or freed.".to_owned(),
                Some(_) if document.steps.is_empty() => "Leaks not judged: no step was seen.".to_owned(),
                Some(0 | 1) => {
                    "Leaks not judged: too few steps. A block is judged from step 2 on, when a later step has ended."
                        .to_owned()
                }
                Some(2) => "No recurring leak among what was allocated in step 2; others were not judged.".to_owned(),
                Some(last) => format!("No recurring leak among what was allocated in steps 2-{last}."),
            }
        };
        line(out, &text);
        if document.events.lost > 0 {
            let text = format!(
                "{} lost: figures are a lower bound, and a block whose free was lost looks leaked.",
                units::were(document.events.lost, "event")
            );
            line(out, &self.paint.alarm(&text));
            self.lost_frees(out);
        }
    }

    /// How sure it is that steps are steps.
    fn inferred_steps(&self, out: &mut String) {
        for process in &self.document.processes {
            let Some(inferred) = process.steps_inferred else { continue };
            let alike =
                if inferred.basis == "optimizer" { "end with the same optimizer" } else { "are equal" };
            let mut text = format!(
                "{}steps inferred from operators: {} of {} {alike}",
                self.process(process.pid, process.program),
                inferred.equal,
                inferred.periods,
            );
            if inferred.confidence < SURE {
                text.push_str("; they may be something else (--step-mark names the mark or range that comes once a step)");
            }
            line(out, &capitalised(&text));
        }
    }

    /// Where an allocator holds less than its live blocks would, the rest has been freed unseen.
    fn lost_frees(&self, out: &mut String) {
        for device in &self.document.devices {
            for facts in &device.pools {
                let excess =
                    facts.allocated.map_or(0, |allocated| facts.live_bytes.saturating_sub(allocated));
                if excess > 0 {
                    let text = format!(
                        "  {} {}: at least {} of what looks alive has been freed",
                        self.place(device),
                        facts.pool,
                        units::bytes(excess)
                    );
                    line(out, &text);
                }
            }
        }
    }

    fn leaks(&self, out: &mut String) {
        let groups = self.groups("recurring");
        for group in groups.iter().take(GROUPS_SHOWN) {
            let judged = group.judged();
            let steps: BTreeSet<StepId> = group.blocks.iter().map(|block| block.step).collect();
            let Some(first) = group.blocks.first() else { continue };
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
            let _ = write!(text, ", {}", step_list(&steps, judged + 1));
            if has_place {
                around(&mut text, ",", first);
            }
            text.push_str(&threads(&group.blocks));
            let _ = write!(text, ", first at {}", first.ptr);
            line(out, &text);
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
        let groups = self.groups(pattern);
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
        let _ = write!(text, " in {}", step_list(&steps, largest.judged() + 1));
        if let Some(first) = largest.blocks.first() {
            whence(&mut text, first);
            let _ = write!(text, ", first at {}", first.ptr);
        }
        line(out, &text);
    }

    /// Below a leak: who called the line, where it was called from several places, and the stacks when all are wanted.
    fn callers(&self, out: &mut String, group: &Group<'_>) {
        let stacks = || group.blocks.iter().filter_map(|block| Some((*block, block.stack.0.as_ref()?)));
        let Some((_, first)) = stacks().next() else { return };
        let apart = (0..).find(|depth| {
            let caller = first.callers().get(*depth);
            caller.is_none() || stacks().any(|(_, stack)| stack.callers().get(*depth) != caller)
        });
        let mut by_caller: BTreeMap<Option<&Frame>, (Count, &Arc<Stack>)> = BTreeMap::new();
        for (block, stack) in stacks() {
            let caller = apart.and_then(|depth| stack.callers().get(depth));
            by_caller.entry(caller).or_insert((Count::default(), stack)).0.add(block.size);
        }
        let mut by_caller: Vec<_> = by_caller.into_iter().collect();
        by_caller.sort_by_key(|(_, (count, _))| std::cmp::Reverse(count.bytes));
        let several = by_caller.len() > 1;
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

    fn growth(&self, out: &mut String) {
        let trends = self.trends();
        for (device, trend) in trends.iter().take(GROUPS_SHOWN) {
            let mut text = format!(
                "{} {} {}: +{}/step",
                self.paint.alarm("GROWS"),
                self.place(device),
                trend.pool,
                units::bytes(trend.bytes_per_step),
            );
            whence_of(&mut text, trend);
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
    fn trends(&self) -> Vec<(&Device, &GrowthFacts)> {
        let devices = self.document.devices.iter();
        let mut trends: Vec<_> =
            devices.flat_map(|device| device.growth.iter().map(move |trend| (device, trend))).collect();
        trends.sort_by_key(|(_, trend)| std::cmp::Reverse(trend.bytes_per_step));
        trends
    }

    /// Blocks that were freed late, a line for each line of the program and number of steps.
    fn late(&self, out: &mut String) {
        let mut kinds: Vec<Late<'_>> = Vec::new();
        for device in &self.document.devices {
            let mut alike: BTreeMap<_, Late<'_>> = BTreeMap::new();
            for group in &device.late_groups {
                let likeness: Likeness<'_> =
                    group.place.as_ref().ok_or((size_class(group.largest), group.op.as_ref()));
                let kind = alike
                    .entry((group.pool, likeness, group.held_min, group.held_max))
                    .or_insert_with(|| Late::new(device, group));
                kind.add(group);
            }
            kinds.extend(alike.into_values());
        }
        kinds.sort_by_key(|kind| std::cmp::Reverse(kind.count.bytes));
        for Late { device, group, count, steps: (first, last), one_op } in kinds.iter().take(LATE_SHOWN) {
            let steps = |number: u32| units::count_of(number.into(), "step");
            let held = match (group.held_min, group.held_max) {
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

    fn not_judged(&self, out: &mut String) {
        let devices = &self.document.devices;
        let blocks = units::sum(devices.iter().map(|device| device.not_judged_total.blocks));
        if blocks == 0 {
            return;
        }
        let bytes = units::sum(devices.iter().map(|device| device.not_judged_total.bytes));
        let heading = format!("Not judged: {}, {}", units::blocks(blocks), units::bytes(bytes));
        line(out, &self.paint.heading(&heading));
        let mut largest: Vec<(&Device, &BlockFacts)> = devices
            .iter()
            .flat_map(|device| device.not_judged.iter().map(move |block| (device, block)))
            .collect();
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
        if let Some(more) = blocks.checked_sub(NOT_JUDGED_SHOWN as u64).filter(|more| *more > 0) {
            line(out, &format!("  and {} smaller", units::count(more)));
        }
    }

    fn fluctuation(&self, out: &mut String) {
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

    fn memory(&self, out: &mut String) {
        if self.document.devices.is_empty() {
            return;
        }
        line(out, &self.paint.heading("Memory"));
        for device in &self.document.devices {
            let mut text = format!("  {}", self.place(device));
            if let Some(reconciliation) = &device.reconciliation {
                let _ = write!(text, ": {}", driver_line(reconciliation));
            }
            line(out, &text);
            let rows: Vec<[String; 3]> = device
                .pools
                .iter()
                .filter(|facts| facts.pool != Pool::Hal)
                .map(|facts| {
                    let seen = format!(
                        "seen since attach: {} live in {}, peak {}",
                        units::bytes(facts.live_bytes),
                        units::blocks(facts.blocks),
                        units::bytes(facts.peak_bytes)
                    );
                    let own = facts.allocated.map(|_| totals(facts, device.reconciliation.as_ref()));
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
        for process in &self.document.processes {
            for gaps in &process.pools {
                if gaps.unknown_frees.blocks > 0 {
                    let text = format!(
                        "  {}{}: {} freed that came from before attach{}",
                        self.process(process.pid, process.program),
                        gaps.pool,
                        units::blocks(gaps.unknown_frees.blocks),
                        if self.document.events.lost > 0 { " or whose allocation was lost" } else { "" },
                    );
                    line(out, &text);
                }
                if gaps.lost_frees.blocks > 0 {
                    let text = format!(
                        "  {}{}: {} whose address was handed out again before a free was seen",
                        self.process(process.pid, process.program),
                        gaps.pool,
                        units::blocks(gaps.lost_frees.blocks),
                    );
                    line(out, &text);
                }
            }
        }
    }

    fn out_of_memory(&self, out: &mut String) {
        let all = || {
            self.document.devices.iter().flat_map(|device| device.oom.iter().map(move |oom| (device, oom)))
        };
        let fatal: Vec<_> = all().filter(|(_, oom)| !oom.recovered).collect();
        for (device, oom) in fatal.iter().take(OOMS_SHOWN) {
            self.one_oom(out, device, oom);
        }
        let not_listed = units::sum(self.document.processes.iter().map(|process| process.oom_not_listed));
        let more = fatal.len().saturating_sub(OOMS_SHOWN) as u64 + not_listed;
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
                Pool::Hal => format!("driver {} since attach", units::bytes(facts.live_bytes)),
                pool => format!("{pool} {}", totals(facts, None)),
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
        for block in blocks.iter().take(self.blocks_shown) {
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

    /// All frames of a stack, innermost first, where they are asked for.
    fn frames(&self, out: &mut String, stack: &Stack) {
        if !self.all_frames {
            return;
        }
        let whose = if stack.whose() == Whose::Via { "via main: " } else { "" };
        for frame in stack.frames() {
            line(out, &format!("    {whose}{}", units::frame(frame)));
        }
        if stack.is_cut() {
            line(out, "    and further ones (--call-stack python:DEPTH)");
        }
        let Some(native) = stack.native() else { return };
        for frame in native.frames() {
            line(out, &format!("    native: {}", units::frame(&frame.frame)));
        }
        if native.is_cut() {
            line(out, "    and further ones, which are not known (--call-stack c:DEPTH)");
        }
    }

    /// How many allocations have a Python stack, and why others have none.
    fn stacks(&self, out: &mut String) {
        for target in &self.document.targets {
            let Some(facts) = &target.stacks else { continue };
            let without = units::sum(facts.without.iter().map(|without| without.allocations));
            let all = facts.own + facts.via + without;
            if all == 0 || facts.refused.is_some() {
                continue;
            }
            let mut text = format!(
                "Python stacks: {}{} of {}",
                self.target(target.pid),
                units::count(facts.own + facts.via),
                units::count_of(all, "allocation")
            );
            if facts.via > 0 {
                let _ =
                    write!(text, ", {} of them by the main thread's backward pass", units::count(facts.via));
            }
            without_stack(&mut text, &facts.without);
            if facts.gone_frames > 0 {
                let _ =
                    write!(text, "; the code of {} was gone", units::count_of(facts.gone_frames, "frame"));
            }
            line(out, &text);
        }
    }

    /// The same of native stacks.
    fn native_stacks(&self, out: &mut String) {
        for target in &self.document.targets {
            let Some(facts) = &target.native_stacks else { continue };
            let without = units::sum(facts.without.iter().map(|without| without.allocations));
            let (with, all) = (facts.whole + facts.cut, facts.whole + facts.cut + without);
            if all == 0 {
                continue;
            }
            let mut text = format!(
                "Native stacks: {}{} of {} (of pools those of {} and more)",
                self.target(target.pid),
                units::count(with),
                units::count_of(all, "allocation"),
                units::bytes(facts.pool_bytes)
            );
            if facts.cut > 0 {
                let _ = write!(text, ", {} of them without their outermost frames", units::count(facts.cut));
            }
            without_stack(&mut text, &facts.without);
            line(out, &text);
        }
    }

    fn trace(&self, out: &mut String) {
        let document = self.document;
        let events = document.events;
        let lost = if events.lost == 0 { "none".to_owned() } else { units::count(events.lost) };
        let mut text = match document.offline {
            true => format!("Dump: {} read, {lost} lost", units::count_of(events.received, "row")),
            false => format!("Events: {} received, {lost} lost", units::count(events.received)),
        };
        let attached = document.sites.iter().filter(|site| site.attached).count();
        if !document.sites.is_empty() {
            let _ = write!(text, "; {attached} of {} sites attached", document.sites.len());
        }
        line(out, &text);
        self.stacks(out);
        self.native_stacks(out);
        let failed: Vec<_> = document.sites.iter().filter(|site| site.reason.is_some()).collect();
        for site in failed.iter().take(SITES_SHOWN) {
            let mut text = format!("  {}", site.site);
            if let Some(file) = &site.file {
                let _ = write!(text, " in {file}");
            }
            if let Some(reason) = &site.reason {
                let _ = write!(text, ": {reason}");
            }
            line(out, &text);
        }
        if failed.len() > SITES_SHOWN {
            line(out, &format!("  and {} more (--json lists them)", failed.len() - SITES_SHOWN));
        }
        for process in document.processes.iter().filter(|process| process.finalized) {
            if document.devices.iter().any(|device| {
                (device.pid, device.program) == (process.pid, process.program) && !device.leaks.is_empty()
            }) {
                let text = format!(
                    "Note: {}leaks are as of aclFinalize; what was freed after it does not count as freed",
                    self.process(process.pid, process.program)
                );
                line(out, &text);
            }
        }
        for note in &document.notes {
            line(out, &format!("Note: {note}"));
        }
        if let Some(dump) = &document.dump {
            let mut text = format!("Dump: {}", dump.path);
            if !dump.complete {
                text.push_str(" (incomplete");
                if let Some(reason) = &dump.reason {
                    let _ = write!(text, ": {reason}");
                }
                text.push(')');
            }
            line(out, &text);
        }
    }

    fn next(&self, out: &mut String) {
        let document = self.document;
        let leaking = self.groups("recurring");
        let text = if document.devices.iter().any(|device| device.oom.iter().any(|oom| !oom.recovered)) {
            "free or shrink what holds most above, or what leaks".to_owned()
        } else if let Some(block) = leaking.first().and_then(|group| group.blocks.first()) {
            let mut text = "see what your code keeps of each step's results".to_owned();
            whence(&mut text, block);
            if let Some(dump) = &document.dump {
                let _ = write!(
                    text,
                    "; the dump's rows before the block: grep -rn -B 20 {:x} {}",
                    block.ptr.0, dump.path
                );
            }
            text
        } else if let Some((_, trend)) = self.trends().first() {
            let mut text = "see what is added in each step to the memory that is allocated".to_owned();
            whence_of(&mut text, trend);
            text
        } else if document.devices.is_empty() && document.offline {
            "write a dump with allocations and frees in it: --events alloc,free,launch".to_owned()
        } else if document.devices.is_empty() && document.sites.iter().any(|site| site.attached) {
            "trace it while it works: nothing was allocated or freed meanwhile".to_owned()
        } else if document.devices.is_empty() {
            let hint = match document.targets.first() {
                Some(target) if !document.processes.iter().all(|process| process.ended.is_some()) => {
                    format!("-p {}", target.pid)
                }
                _ => "--file LIBRARY".to_owned(),
            };
            format!("see which sites can be probed at all: memscope-trace probes {hint}")
        } else if document.leaks_analysed && document.steps.is_empty() {
            let marks = document.marks_seen(3);
            if marks.is_empty() {
                "mark each step of the loop, for instance with mstx.range_start(\"step start\", None) and mstx.range_end"
                    .to_owned()
            } else {
                format!(
                    "trace longer than a step, or name the mark or range that comes once a step: --step-mark REGEX. Seen: {marks}"
                )
            }
        } else if document.leaks_analysed
            && document.devices.iter().all(|device| device.last_step_ended.0 < 3)
        {
            "trace longer: at least 3 steps".to_owned()
        } else if document.leaks_analysed {
            let how = if document.offline { "" } else { ": -d SECONDS" };
            format!("a leak that does not show in this many steps needs a longer trace{how}")
        } else {
            return;
        };
        line(out, &format!("Next: {text}"));
    }

    /// Leaks of a pattern, alike ones together, most bytes first.
    fn groups(&self, pattern: &str) -> Vec<Group<'_>> {
        let mut groups = Vec::new();
        for device in &self.document.devices {
            // A line of the program is one leak, whatever the sizes and operators there.
            let mut alike: BTreeMap<(Pool, Likeness<'_>), Vec<&BlockFacts>> = BTreeMap::new();
            for block in device.leaks.iter().filter(|block| block.pattern == pattern) {
                let likeness = block.stack.place().ok_or((size_class(block.size), block.op.as_ref()));
                alike.entry((block.pool, likeness)).or_default().push(block);
            }
            groups.extend(alike.into_iter().map(|((pool, ..), blocks)| {
                let bytes = units::sum(blocks.iter().map(|block| block.size));
                Group { device, pool, blocks, bytes }
            }));
        }
        groups.sort_by_key(|group| std::cmp::Reverse(group.bytes));
        groups
    }

    fn place(&self, device: &Device) -> String {
        format!("{}{}", self.process(device.pid, device.program), device_name(device.device))
    }

    fn target(&self, pid: Tgid) -> String {
        if self.document.targets.len() > 1 { format!("process {pid}: ") } else { String::new() }
    }

    fn process(&self, pid: Tgid, program: u32) -> String {
        match self.processes.get(&pid) {
            Some(programs) if programs.len() > 1 => format!("process {pid} (program {program}) "),
            _ if self.processes.len() > 1 => format!("process {pid} "),
            _ => String::new(),
        }
    }
}

/// Blocks of a line that were freed after as many steps.
struct Late<'a> {
    device: &'a Device,
    /// The first of them.
    group: &'a LateFacts,
    count: Count,
    steps: (StepId, StepId),
    /// All were allocated around the same operator.
    one_op: bool,
}

impl<'a> Late<'a> {
    fn new(device: &'a Device, group: &'a LateFacts) -> Self {
        let steps = (group.first_step, group.last_step);
        Late { device, group, count: Count::default(), steps, one_op: true }
    }

    fn add(&mut self, group: &LateFacts) {
        self.count.blocks += group.blocks;
        self.count.bytes = self.count.bytes.saturating_add(group.bytes);
        self.steps = (self.steps.0.min(group.first_step), self.steps.1.max(group.last_step));
        self.one_op &= self.group.op == group.op;
    }
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

    /// Steps that were judged.
    fn judged(&self) -> u32 {
        self.device.last_step_ended.0.saturating_sub(2)
    }
}

/// Who held the memory when a request was refused.
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
        match (&holder.place, &holder.op) {
            (Some(place), _) => drop(write!(text, ", at {}", units::place(place))),
            (None, Some(op)) => drop(write!(text, ", around {op}")),
            (None, None) => {}
        }
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

pub(super) fn line(out: &mut String, text: &str) {
    out.push_str(text);
    out.push('\n');
}

pub(super) fn capitalised(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map(|first| first.to_uppercase().chain(chars).collect()).unwrap_or_default()
}

pub(super) fn device_name(device: Option<DeviceId>) -> String {
    match device {
        Some(device) => format!("device {device}"),
        None => "host".to_owned(),
    }
}

/// Where in the program it was: the operator, else the runtime function; and the line that wanted it.
fn whence(text: &mut String, block: &BlockFacts) {
    around(text, ",", block);
    at(text, ",", &block.stack);
}

fn whence_of(text: &mut String, trend: &GrowthFacts) {
    match (&trend.place, &trend.op) {
        (Some(place), _) => write!(text, " at {}", units::place(place)),
        (None, Some(op)) => write!(text, " around {op}"),
        (None, None) => Ok(()),
    }
    .unwrap_or_default();
}

fn around(text: &mut String, comma: &str, block: &BlockFacts) {
    if let Some(op) = &block.op {
        let _ = write!(text, "{comma} around {op}");
    } else if let Some(api) = block.api {
        let _ = write!(text, "{comma} by {api}");
    }
}

fn without_stack(text: &mut String, reasons: &[WithoutStack]) {
    for without in reasons {
        let _ = write!(text, "; {} {}", units::count(without.allocations), without.reason);
    }
}

pub(super) fn at(text: &mut String, comma: &str, stack: &StackOf) {
    if let Some(place) = stack.place() {
        let _ = write!(text, "{comma} {} {}", stack.preposition(), units::place(place));
    }
}

fn threads(blocks: &[&BlockFacts]) -> String {
    let threads: BTreeSet<Tid> = blocks.iter().map(|block| block.tid).collect();
    match (threads.len(), threads.first()) {
        (1, Some(tid)) => format!(", thread {tid}"),
        (several, _) => format!(", {several} threads"),
    }
}

/// `step 5`, `steps 2-6`, `steps 2-5, 8`, `23 of steps 2-99`; and whether it has stopped.
fn step_list(steps: &BTreeSet<StepId>, last_judged: u32) -> String {
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
        _ => format!("{} of steps {first}-{last}", steps.len()),
    };
    let widest_gap = runs.windows(2).map(|pair| pair[1].0 - pair[0].1).max().unwrap_or(1);
    if last_judged > last + 2 * widest_gap {
        let _ = write!(text, " (none in steps {}-{last_judged})", last + 1);
    }
    text
}

/// How much is free in how many pieces, and whether a request would have fitted.
fn free_space(free: &FreeFacts, request: Option<u64>) -> String {
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
fn reserve(series: &ReserveFacts) -> Option<String> {
    let points = &series.points;
    let (first, last) = points.first().zip(points.last()).filter(|_| points.len() > 1)?;
    let peak = points.iter().map(|point| point.peak_allocated).max()?;
    let begin = first.step.0 + 1 - first.steps.min(first.step.0);
    let mut text = format!(
        "over steps {begin}-{} at most {} allocated of {} reserved",
        last.step,
        units::bytes(peak),
        units::bytes(last.reserved)
    );
    match points.windows(2).rev().find(|pair| pair[0].reserved != pair[1].reserved) {
        Some(pair) => {
            let (before, after) = (pair[0].reserved, pair[1].reserved);
            let how = if after > before { "grew" } else { "shrank" };
            let _ = write!(text, ", which last {how} by {} in ", units::bytes(before.abs_diff(after)));
            let _ = match pair[1].steps {
                1 => write!(text, "step {}", pair[1].step),
                several => write!(text, "steps {}-{}", pair[1].step.0 + 1 - several, pair[1].step),
            };
        }
        None => text.push_str(", the same throughout"),
    }
    // It had room for all that was ever needed, and took more.
    if points.windows(2).any(|pair| {
        pair[1].reserved > pair[0].reserved && pair[1].peak_allocated <= points_peak(points, pair[0].step)
    }) {
        text.push_str("; it grew in steps that allocated no more than those before: what was free was in pieces too small, or of another stream");
    }
    Some(text)
}

/// The most that was allocated up to a step.
fn points_peak(points: &[Point], step: StepId) -> u64 {
    let up_to = points.iter().take_while(|point| point.step <= step);
    up_to.map(|point| point.peak_allocated).max().unwrap_or(0)
}

fn driver_line(facts: &ReconciliationFacts) -> String {
    let mut text = format!("{} from the driver since attach", units::bytes(facts.driver_bytes));
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
fn totals(facts: &PoolFacts, reconciliation: Option<&ReconciliationFacts>) -> String {
    let (Some(allocated), Some(reserved)) = (facts.allocated, facts.reserved) else {
        return format!("{} in blocks", units::bytes(facts.live_bytes));
    };
    let mut text = format!("{} allocated of {} reserved", units::bytes(allocated), units::bytes(reserved));
    let before = reconciliation
        .and_then(|facts_of| facts_of.segments.iter().find(|segments| segments.pool == facts.pool))
        .and_then(|segments| segments.before_attach)
        .filter(|before| *before > 0);
    if let Some(before) = before {
        let _ = write!(text, " ({} before attach)", units::bytes(before));
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

#[cfg(test)]
mod tests;
