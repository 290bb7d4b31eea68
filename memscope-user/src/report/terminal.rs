//! The report as people read it: what leaks first, then what is needed to judge it, then what to do next.

mod leaks;
mod memory;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::document::{BlockFacts, Device, Document, StackOf, WithoutStack};
use super::{decompose, inefficient, units};
use crate::model::{DeviceId, Frame, Name, Stack, Tgid, Tid, Whose};
use leaks::{Group, groups};

/// Single blocks shown with each out-of-memory, unless it is said otherwise: who holds the memory is said before.
const OOM_BLOCKS_SHOWN: usize = 3;

/// Sites that failed; the rest is counted.
const SITES_SHOWN: usize = 10;

/// Processes of which it is told how many stacks there are.
const TARGETS_SHOWN: usize = 10;

/// Confidence above which inferred steps need no warning.
const SURE: f64 = 0.75;

/// How much of it, and how.
#[derive(Debug, Clone, Copy)]
pub struct View {
    /// With ANSI sequences, for a terminal.
    pub colour: bool,
    /// Each leak's whole stack.
    pub all_frames: bool,
    /// Blocks shown with each out-of-memory, of the largest and of the latest.
    pub oom_blocks: usize,
}

impl Default for View {
    fn default() -> Self {
        View { colour: false, all_frames: false, oom_blocks: OOM_BLOCKS_SHOWN }
    }
}

impl View {
    /// `None`: as many as usual.
    pub fn with_oom_blocks(blocks: Option<u16>) -> Self {
        View { oom_blocks: blocks.map_or(OOM_BLOCKS_SHOWN, usize::from), ..View::default() }
    }
}

/// Renders the report.
pub fn render(document: &Document, view: View) -> String {
    let report = Report::new(document, view);
    let mut out = String::new();
    // A program that failed of it is what its user is here for.
    let failed = report.has_failed();
    if failed {
        report.out_of_memory(&mut out);
    }
    report.headline(&mut out);
    report.inferred_steps(&mut out);
    if !failed {
        report.out_of_memory(&mut out);
    }
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

/// Out-of-memories alone.
pub fn render_oom(document: &Document, view: View) -> String {
    let mut out = String::new();
    Report::new(document, view).out_of_memory(&mut out);
    if out.is_empty() {
        line(&mut out, "No allocation failed.");
    }
    out
}

struct Report<'a> {
    document: &'a Document,
    /// With devices, each with its programs. More than one process: each is named; more than one program: too.
    processes: BTreeMap<Tgid, BTreeSet<u32>>,
    view: View,
    paint: Paint,
    leaking: Vec<Group<'a>>,
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

impl<'a> Report<'a> {
    fn new(document: &'a Document, view: View) -> Self {
        let mut processes: BTreeMap<Tgid, BTreeSet<u32>> = BTreeMap::new();
        for device in &document.devices {
            processes.entry(device.pid).or_default().insert(device.program);
        }
        let (paint, leaking) = (Paint { colour: view.colour }, groups(document, "recurring"));
        Report { document, processes, view, paint, leaking }
    }
}

impl Report<'_> {
    /// Whether a request for memory was refused for good.
    fn has_failed(&self) -> bool {
        self.document.devices.iter().any(|device| device.oom.iter().any(|oom| !oom.recovered))
    }

    fn headline(&self, out: &mut String) {
        let document = self.document;
        let leaking = &self.leaking;
        let judged = document.devices.iter().map(|device| device.last_step_ended.0.saturating_sub(1)).max();
        let lower_bound = if document.events.lost > 0 { "at least " } else { "" };
        let text = if !document.leaks_analysed {
            "Leaks were not looked for.".to_owned()
        } else if !leaking.is_empty() {
            let blocks: usize = leaking.iter().map(|group| group.blocks.len()).sum();
            let bytes = units::sum(leaking.iter().map(|group| group.bytes));
            let kinds = if leaking.len() == 1 { "1 leak" } else { &format!("{} leaks", leaking.len()) };
            let inferred = document.processes.iter().filter_map(|process| process.steps_inferred.as_ref());
            let hedge = match inferred.map(|steps| steps.confidence).reduce(f64::min) {
                Some(confidence) if confidence < SURE => ", if the steps are right",
                _ => "",
            };
            let blocks = units::blocks(blocks as u64);
            let text = format!("{lower_bound}{kinds}: {} in {blocks}{hedge}", units::bytes(bytes));
            self.paint.alarm(&capitalised(&text))
        } else {
            let selected = &document.selection.steps;
            match judged {
                _ if document.selected_nothing() => {
                    "Leaks not judged: there was no memory on the selected devices (--device).".to_owned()
                }
                None if document.offline => {
                    let unread = document.dump.as_ref().is_some_and(|dump| !dump.complete);
                    let readable = if unread { " that could be read" } else { "" };
                    format!("Leaks not judged: the dump has no row of an allocation or a free{readable}.")
                }
                None => "Leaks not judged: no device memory was allocated or freed.".to_owned(),
                Some(_) if !document.steps_wanted => {
                    "Leaks not judged: there are no steps (--steps-from none).".to_owned()
                }
                Some(_) if !document.has_steps() => "Leaks not judged: no step was seen.".to_owned(),
                Some(0 | 1) => {
                    "Leaks not judged: too few steps. A block is judged from step 2 on, when a later step has ended."
                        .to_owned()
                }
                Some(last) if !selected.is_all() => match document.leaks_judged() {
                    true => format!("No recurring leak among what was allocated in the selected steps of 2-{last}."),
                    false => format!("Leaks not judged: of the selected steps none is among those that were, 2-{last}."),
                },
                Some(2) => "No recurring leak among what was allocated in step 2; others were not judged.".to_owned(),
                Some(last) => format!("No recurring leak among what was allocated in steps 2-{last}."),
            }
        };
        line(out, &text);
        if !document.selection.steps.is_all() {
            let text = format!(
                "Selected steps (--steps): {}. Leaked, late and not judged blocks are those allocated in them, as \
                 judged by all steps; all else is of the whole trace.",
                document.selection.steps
            );
            line(out, &text);
        }
        if document.leaks_analysed && document.has_steps() {
            self.without_steps(out);
        }
        if document.events.lost > 0 {
            let text = format!(
                "{} lost: figures are a lower bound, and a block whose free was lost looks leaked.",
                units::were(document.events.lost, "event")
            );
            line(out, &self.paint.alarm(&text));
            self.lost_frees(out);
        }
    }

    /// Processes that used memory and were not judged, while others were.
    fn without_steps(&self, out: &mut String) {
        let processes = &self.document.processes;
        let has_steps: BTreeSet<_> =
            processes.iter().filter(|process| process.steps_seen > 0).map(|process| process.pid).collect();
        for process in processes.iter().filter(|process| !has_steps.contains(&process.pid)) {
            let devices = self.document.devices.iter().filter(|device| {
                (device.pid, device.program) == (process.pid, process.program)
                    && device.pools.iter().any(|facts| facts.peak_bytes > 0)
            });
            if devices.count() > 0 {
                let who = self.process(process.pid, process.program);
                line(out, &format!("{}: leaks not judged: no step was seen.", capitalised(who.trim_end())));
            }
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
            if inferred.basis != "optimizer" {
                text.push_str(" (one may be several rounds of your loop)");
            }
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

    /// All frames of a stack, innermost first, where they are asked for.
    fn frames(&self, out: &mut String, stack: &Stack) {
        if !self.view.all_frames {
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
        let told = self.document.targets.iter().filter_map(|target| {
            let facts = target.stacks.as_ref().filter(|facts| facts.refused.is_none())?;
            let with = facts.own + facts.via;
            let all = with + units::sum(facts.without.iter().map(|without| without.allocations));
            // A program without an interpreter lacks nothing.
            let has_python = target.python.is_some() || with > 0;
            (all > 0 && has_python).then_some((target, facts, with, all))
        });
        let told: Vec<_> = told.collect();
        for (target, facts, with, all) in told.iter().take(TARGETS_SHOWN) {
            let mut text = format!(
                "Python stacks: {}{} of {}",
                self.target(target.pid),
                units::count(*with),
                units::count_of(*all, "allocation")
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
        more(out, told.len(), TARGETS_SHOWN);
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
            // Events are lost by the tracer that writes the dump, which is another thing than rows that can not be read.
            true => {
                let lost =
                    if events.lost == 0 { "no event".into() } else { units::count_of(events.lost, "event") };
                format!(
                    "Dump: {} read; {lost} lost when it was traced",
                    units::count_of(events.received, "row")
                )
            }
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
        more(out, failed.len(), SITES_SHOWN);
        for process in document.processes.iter().filter(|process| process.finalized) {
            if document.devices.iter().any(|device| {
                (device.pid, device.program) == (process.pid, process.program) && !device.leaks.is_empty()
            }) {
                let who = match self.process(process.pid, process.program).trim_end() {
                    "" => String::new(),
                    who => format!("{who}: "),
                };
                let text = format!(
                    "Note: {who}leaks are as of aclFinalize; what was freed after it does not count as freed"
                );
                line(out, &text);
            }
        }
        for note in &document.notes {
            line(out, &format!("Note: {note}"));
        }
        if let Some(dump) = &document.dump {
            let mut text = format!("Dump: {}", dump.path);
            let incomplete = (!dump.complete).then_some("incomplete");
            let told: Vec<_> = incomplete.into_iter().chain(dump.reason.as_deref()).collect();
            if !told.is_empty() {
                let _ = write!(text, " ({})", told.join(": "));
            }
            line(out, &text);
        }
    }

    fn next(&self, out: &mut String) {
        let document = self.document;
        let leaking = &self.leaking;
        let text = if self.has_failed() {
            "free or shrink what holds most above, or what leaks".to_owned()
        } else if let Some(block) = leaking.first().and_then(|group| group.blocks.first()) {
            let mut text = "see what your code keeps of each step's results".to_owned();
            whence(&mut text, block);
            if let Some(dump) = document.dump.as_ref().filter(|dump| dump.is_text) {
                let _ = write!(
                    text,
                    "; the dump's rows before the block: grep -rn -B 20 {:x} {}",
                    block.ptr.0, dump.path
                );
            }
            text
        } else if let Some((_, trend)) = self.trends().first() {
            let mut text = "see what is added in each step to the memory that is allocated".to_owned();
            made_at(&mut text, "", trend.place.as_ref(), trend.op.as_ref());
            text
        } else if document.selected_nothing() {
            let used = document.selection.devices_left_out.iter().map(|device| format!("npu:{device}"));
            format!("trace a device that is used: --device {}", used.collect::<Vec<_>>().join(","))
        } else if document.devices.is_empty() && document.offline {
            "write a dump with allocations and frees in it: --events alloc,free,launch".to_owned()
        } else if document.devices.is_empty() && document.sites.iter().any(|site| site.attached) {
            "trace it while it works: nothing was allocated or freed meanwhile".to_owned()
        } else if document.devices.is_empty() {
            let hint = match document.targets.first() {
                Some(target) if !document.processes.iter().all(|process| process.ended.is_some()) => {
                    format!("-p {}", target.pid)
                }
                Some(_) => "--file LIBRARY".to_owned(),
                None => {
                    line(out, "Next: see which processes have Ascend libraries: memscope-trace check");
                    return;
                }
            };
            format!("see which sites can be probed at all: memscope-trace probes {hint}")
        } else if document.leaks_analysed && !document.steps_wanted {
            "leaks are judged by steps: leave --steps-from none out".to_owned()
        } else if document.leaks_analysed && !document.has_steps() {
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

    /// When what was seen begins.
    fn beginning(&self) -> &'static str {
        if self.document.offline { "the dump's beginning" } else { "attach" }
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

/// Says how many of a list were not shown.
fn more(out: &mut String, all: usize, shown: usize) {
    if let Some(more) = all.checked_sub(shown).filter(|more| *more > 0) {
        line(out, &format!("  and {} more (--json lists them)", units::count(more as u64)));
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

/// The line of the program, else the operator.
fn made_at(text: &mut String, comma: &str, place: Option<&Frame>, op: Option<&Name>) {
    if let Some(place) = place {
        let _ = write!(text, "{comma} at {}", units::place(place));
    } else if let Some(op) = op {
        let _ = write!(text, "{comma} around {op}");
    }
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

#[cfg(test)]
mod tests;
