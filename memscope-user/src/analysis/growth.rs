//! What grows from step to step although no block of it leaks: a cache that is copied into a larger one
//! (`torch.cat` of keys and values), a list that is rebuilt each step.
//!
//! The live bytes of each line of the program (where that is not known: of each operator) are taken at the ends of
//! steps, and a line is laid through them by least squares. What follows it well and keeps rising grows. The first
//! whole step is left out as warm-up, and the last one's end too, for a program's end frees before another step says so.
//!
//! Blocks that leak grow as well: who shows both takes those off ([`Leaks`](super::leaks::Leaks)).

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use crate::model::{Block, Change, DeviceId, Event, Frame, Ledger, Name, Pool, Process, StepId};

use super::Analysis;

/// The first step whose end counts.
const FIRST: u32 = 2;

/// Ends of steps that it takes to speak of growth.
const ENDS_MIN: u32 = 6;

/// Ends at which there was more than at the one before.
const RISES_MIN: u32 = 4;

/// Share of the variance that the line explains. A single jump in the middle has 0.75; what grows by equal parts in a pool
/// that rounds up to 2 MiB from 1 MiB on has 0.83.
const FIT_MIN: f64 = 0.8;

/// Growth in all, as a share of the mean.
const SHARE_MIN: f64 = 0.1;

/// Steps without a new maximum, at least, after which it grows no more.
const QUIET_MIN: u32 = 5;

/// Lines that are told apart, per process: their names come from the target.
const SOURCES_MAX: usize = 1 << 16;

/// Whose blocks: of a pool on a device, of one line, or of one operator where the line is not known.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Source {
    pub pool: Pool,
    pub device: Option<DeviceId>,
    pub place: Option<Frame>,
    pub op: Option<Name>,
}

impl Source {
    pub fn of(block: &Block) -> Self {
        let place = block.place().cloned();
        let op = if place.is_none() { block.op.clone() } else { None };
        Source { pool: block.pool, device: block.device, place, op }
    }
}

/// The live bytes of a source over the ends of steps.
#[derive(Debug, Clone, PartialEq)]
pub struct Trend {
    pub source: Source,
    /// Bytes a step: the slope of the line.
    pub per_step: f64,
    /// Bytes at the first end of a step that counts, and at the last.
    pub first_bytes: u64,
    pub last_bytes: u64,
    pub first_step: StepId,
    pub last_step: StepId,
    /// Ends of steps at which there was more than at the one before.
    pub rises: u32,
    /// Share of the variance that the line explains, 0 to 1.
    pub fit: f64,
}

#[derive(Debug, Default)]
pub struct Growth {
    /// By position in [`Ledger::processes`].
    processes: Vec<Of>,
}

#[derive(Debug, Default)]
struct Of {
    sources: FxHashMap<Source, Series>,
    /// Bytes of blocks from before attach that were freed lately, by step. Whose they were is not known: while they go,
    /// each line climbs to what it had before.
    old: FxHashMap<(Pool, Option<DeviceId>), BytesByStep>,
}

type BytesByStep = VecDeque<(u32, u64)>;

impl Of {
    /// Bytes a step over the last steps.
    fn old_per_step(&self, source: &Source, last_ended: u32) -> f64 {
        let freed = self.old.get(&(source.pool, source.device)).into_iter().flatten();
        let lately = freed.filter(|(step, _)| step + ENDS_MIN > last_ended).map(|(_, bytes)| *bytes);
        lately.fold(0_u64, u64::saturating_add) as f64 / f64::from(ENDS_MIN)
    }
}

/// Sums over the ends of steps up to the one before `step`, in which the live bytes changed last.
#[derive(Debug, Clone, Default)]
struct Series {
    live: u64,
    step: u32,
    ends: u32,
    rises: u32,
    first: Option<(u32, u64)>,
    last: u64,
    /// The most there was, at the end of which step it was first there, and the longest it took to a new maximum.
    most: u64,
    record: u32,
    pause: u32,
    t: f64,
    tt: f64,
    y: f64,
    yy: f64,
    ty: f64,
}

impl Series {
    /// Counts the ends of steps that have gone by without a change.
    fn settle(&mut self, step: u32) {
        let (from, to) = (self.step.max(FIRST), step);
        self.step = self.step.max(step);
        if from >= to {
            return;
        }
        let first = *self.first.get_or_insert((from, self.live));
        if first.0 != from && self.live > self.last {
            self.rises += 1;
        }
        if self.live > self.most || first.0 == from {
            self.pause = self.pause.max(from - self.record.max(first.0));
            (self.most, self.record) = (self.live, from);
        }
        self.last = self.live;
        self.ends += to - from;
        // Of consecutive numbers, counted from the first so that squares stay small.
        let (a, b) = (f64::from(from - first.0), f64::from(to - first.0));
        let sum = |n: f64| n * (n - 1.0) / 2.0;
        let squares = |n: f64| (n - 1.0) * n * (2.0 * n - 1.0) / 6.0;
        let (t, y) = (sum(b) - sum(a), self.live as f64);
        self.t += t;
        self.tt += squares(b) - squares(a);
        self.y += y * (b - a);
        self.yy += y * y * (b - a);
        self.ty += y * t;
    }

    fn trend(&self, source: &Source) -> Option<Trend> {
        let (first_step, first_bytes) = self.first?;
        let n = f64::from(self.ends);
        let of_t = n * self.tt - self.t * self.t;
        let of_y = n * self.yy - self.y * self.y;
        let common = n * self.ty - self.t * self.y;
        if self.ends < ENDS_MIN || self.rises < RISES_MIN || common <= 0.0 || of_t <= 0.0 || of_y <= 0.0 {
            return None;
        }
        let last_step = first_step + self.ends - 1;
        let quiet = last_step.saturating_sub(self.record);
        if quiet >= QUIET_MIN.max(self.pause.saturating_mul(3)) {
            return None;
        }
        let (per_step, fit) = (common / of_t, (common / of_t) * (common / of_y));
        let grows = per_step * (n - 1.0) >= SHARE_MIN * self.y / n;
        (grows && fit >= FIT_MIN).then(|| Trend {
            source: source.clone(),
            per_step,
            first_bytes,
            last_bytes: self.last,
            first_step: StepId(first_step),
            last_step: StepId(last_step),
            rises: self.rises,
            fit: fit.min(1.0),
        })
    }
}

impl Analysis for Growth {
    fn observe(&mut self, event: &Event, change: &Change, ledger: &Ledger) {
        let Some(position) = ledger.position(event.tgid) else { return };
        let Some(process) = ledger.processes().get(position) else { return };
        // What is freed from then on is tidied up.
        if process.finalized() {
            return;
        }
        match change {
            Change::Allocated { block, replaced } => {
                if let Some(old) = replaced {
                    self.change(position, old, process, u64::saturating_sub);
                }
                if let Some(block) = process.block(*block) {
                    self.change(position, block, process, u64::saturating_add);
                }
            }
            Change::Freed(block) => self.change(position, block, process, u64::saturating_sub),
            Change::UnknownFree { pool, device, size: Some(size) } => {
                let step = process.steps().current().0;
                let freed = self.of(position).old.entry((*pool, *device)).or_default();
                match freed.back_mut().filter(|(last, _)| *last == step) {
                    Some((_, bytes)) => *bytes = bytes.saturating_add(*size),
                    None => freed.push_back((step, *size)),
                }
                while freed.len() > ENDS_MIN as usize + 1 {
                    freed.pop_front();
                }
            }
            Change::StepsRetracted => {
                let of = self.of(position);
                of.old.clear();
                for series in of.sources.values_mut() {
                    *series = Series { live: series.live, ..Series::default() };
                }
            }
            _ => {}
        }
    }
}

impl Growth {
    /// What grows in the process at this position of [`Ledger::processes`]; most bytes first.
    pub fn trends(&self, position: usize, process: &Process) -> Vec<Trend> {
        let Some(of) = self.processes.get(position) else { return Vec::new() };
        let last_ended = process.steps().last_ended().0;
        let mut trends: Vec<Trend> = of
            .sources
            .iter()
            .filter_map(|(source, series)| {
                let mut series = series.clone();
                series.settle(last_ended);
                series.trend(source)
            })
            .filter(|trend| of.old_per_step(&trend.source, last_ended) < trend.per_step / 2.0)
            .collect();
        trends.sort_by(|a, b| {
            b.per_step.total_cmp(&a.per_step).then_with(|| a.source.place.cmp(&b.source.place))
        });
        trends
    }

    fn of(&mut self, position: usize) -> &mut Of {
        if self.processes.len() <= position {
            self.processes.resize_with(position + 1, Of::default);
        }
        &mut self.processes[position]
    }

    fn change(&mut self, position: usize, block: &Block, process: &Process, by: fn(u64, u64) -> u64) {
        if !matches!(block.pool, Pool::Pta | Pool::Atb | Pool::Mindspore) {
            return;
        }
        let sources = &mut self.of(position).sources;
        let source = Source::of(block);
        if sources.len() >= SOURCES_MAX && !sources.contains_key(&source) {
            return;
        }
        let series = sources.entry(source).or_default();
        series.settle(process.steps().current().0);
        series.live = by(series.live, block.size);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::{MAIN, MIB, PID, Script};
    use crate::model::{DevicePtr, EventKind, Free, Whose};

    const KIB: u64 = 1024;

    fn trends(script: &Script) -> Vec<Trend> {
        let (mut ledger, mut growth) = (Ledger::default(), Growth::default());
        for event in &script.events {
            let change = ledger.apply(event);
            growth.observe(event, &change, &ledger);
        }
        growth.trends(0, ledger.process(PID).expect("a process"))
    }

    /// In each step a block takes the place of the last one; `size` by step.
    fn replaced(steps: u64, size: impl Fn(u64) -> u64) -> Script {
        let mut script = Script::new();
        for step in 1..=steps {
            script.step(|s| {
                s.alloc_at(Some(7), Whose::Own, 0x1000 * step, size(step));
                if step > 1 {
                    s.free(0x1000 * (step - 1));
                }
                // What comes and goes.
                s.alloc_at(Some(8), Whose::Own, 0x900_0000, 3 * MIB).free(0x900_0000);
            });
        }
        script
    }

    #[test]
    fn a_block_that_is_copied_into_a_larger_one_each_step_grows() {
        let script = replaced(20, |step| step * 32 * KIB);
        let found = trends(&script);
        let [trend] = &found[..] else { panic!("{found:?}") };
        assert_eq!(trend.source.place.as_ref().and_then(|place| place.line), Some(7));
        assert_eq!((trend.first_step, trend.last_step), (StepId(2), StepId(19)));
        assert_eq!((trend.first_bytes, trend.last_bytes), (64 * KIB, 19 * 32 * KIB));
        assert!((trend.per_step - 32.0 * 1024.0).abs() < 1.0 && trend.fit > 0.999, "{trend:?}");
        assert_eq!(trend.rises, 17);
    }

    /// A pool gives blocks of 2 MiB granularity: some steps bring nothing, and some less.
    #[test]
    fn it_need_not_grow_in_every_step() {
        let found = trends(&replaced(40, |step| (step / 4) * 2 * MIB + (step % 2) * 512 * KIB));
        assert_eq!(found.len(), 1, "{found:?}");
    }

    #[test]
    fn what_stays_jumps_once_or_comes_back_does_not_grow() {
        assert_eq!(trends(&replaced(40, |_| MIB)), []);
        assert_eq!(trends(&replaced(40, |step| if step < 20 { MIB } else { 9 * MIB })), []);
        assert_eq!(trends(&replaced(40, |step| (step % 10) * MIB)), [], "a cache for each request");
        assert_eq!(trends(&replaced(40, |step| (step * 7919 % 31) * MIB)), [], "batches of any length");
        assert_eq!(trends(&replaced(40, |step| step.min(10) * MIB)), [], "a cache that is full");
        assert_eq!(trends(&replaced(40, |step| 100 * MIB + step * KIB)), [], "less than a tenth");
        assert_eq!(trends(&replaced(6, |step| step * MIB)), [], "too few steps");
    }

    /// Whatever its blocks' sizes: full, it is no growth however long it took to fill.
    #[test]
    fn what_rose_and_is_flat_does_not_grow() {
        for steps in 31..60 {
            assert_eq!(trends(&replaced(steps, |step| step.min(25) * MIB)), [], "{steps} steps");
        }
        assert_eq!(trends(&replaced(26, |step| step.min(25) * MIB)).len(), 1, "it may go on");
        // New maxima each four steps.
        assert_eq!(trends(&replaced(44, |step| (step / 4) * MIB)).len(), 1);
    }

    /// Attached in the middle: what is there of a ring climbs until all of it has been replaced.
    #[test]
    fn what_takes_the_place_of_blocks_from_before_attach_does_not_grow() {
        let attached = |steps: u64, old: u64| {
            let mut script = Script::new();
            for step in 1..=steps {
                script.step(|s| {
                    s.alloc_at(Some(7), Whose::Own, 0x1000 * step, 64 * KIB);
                    if step <= old {
                        let free = Free {
                            pool: Pool::Pta,
                            device: Some(DeviceId(0)),
                            ptr: DevicePtr(0x90_0000 + 0x1000 * step),
                            size: Some(64 * KIB),
                            totals: None,
                        };
                        s.push(MAIN, EventKind::Free(free));
                    }
                });
            }
            trends(&script)
        };
        assert_eq!(attached(30, 30), []);
        assert_eq!(attached(30, 8).len(), 1, "those from before have gone, and it grows on");
    }

    #[test]
    fn what_the_end_of_the_program_frees_changes_nothing() {
        let mut script = replaced(20, |step| step * MIB);
        script.free(0x1000 * 20);
        let before = trends(&script);
        script.push(MAIN, EventKind::AclFinalize);
        script.free(0x1000 * 19);
        assert_eq!(trends(&script), before);
        assert_eq!(before.len(), 1);
    }

    #[test]
    fn steps_that_were_none_are_forgotten() {
        let mut script = replaced(20, |step| step * MIB);
        script.push(MAIN, EventKind::StepsRetracted);
        assert_eq!(trends(&script), []);
    }
}
