//! How much a pool's use swings within a step: the smallest use divided by the largest.
//!
//! As msMemScope defines it: the use right after each event of the pool, per device, between one step's end
//! and the next (so what precedes a step's beginning counts for that step); steps after the first only. A
//! step without an event of the pool, or with an empty pool throughout, has no ratio. The use is what the
//! allocator says of itself, where it does.

use std::collections::VecDeque;

use crate::model::{Change, DeviceId, Event, Ledger, Pool, Process, StepId};

use super::Analysis;

/// Ends of steps over which a trend is taken.
const TREND_ENDS: usize = 9;

/// The ratio of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Swing {
    /// Smallest use divided by largest, 0 to 1.
    pub ratio: f64,
    pub step: StepId,
    /// Bytes of the smallest use.
    pub min_bytes: u64,
}

/// The steps of a pool on a device that swung most and least.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Extremes {
    pub pool: Pool,
    pub device: Option<DeviceId>,
    /// Smallest ratio.
    pub most: Swing,
    /// Largest ratio.
    pub least: Swing,
}

#[derive(Debug, Default)]
pub struct Fluctuation {
    /// By position in [`Ledger::processes`].
    processes: Vec<Vec<Gauge>>,
}

#[derive(Debug)]
struct Gauge {
    pool: Pool,
    device: Option<DeviceId>,
    /// Smallest and largest use since the last end of a step.
    range: Option<(u64, u64)>,
    most: Option<Swing>,
    least: Option<Swing>,
    /// Use at the last ends of steps.
    ends: VecDeque<u64>,
}

impl Analysis for Fluctuation {
    fn observe(&mut self, event: &Event, change: &Change, ledger: &Ledger) {
        let (pool, device) = match change {
            Change::Allocated { block, .. } | Change::Reported(block) => {
                match ledger.process(event.tgid).and_then(|process| process.block(*block)) {
                    Some(block) => (block.pool, block.device),
                    None => return,
                }
            }
            Change::Freed(block) => (block.pool, block.device),
            Change::UnknownFree { pool, device, .. } => (*pool, *device),
            Change::Step { ended: Some(step), .. } => {
                self.end(event, *step, ledger);
                return;
            }
            Change::StepsRetracted => {
                let gauges =
                    ledger.position(event.tgid).and_then(|position| self.processes.get_mut(position));
                gauges.into_iter().for_each(Vec::clear);
                return;
            }
            _ => return,
        };
        self.sample(event, pool, device, ledger);
    }
}

impl Fluctuation {
    /// Pools of the process at this position of [`Ledger::processes`] that had a ratio in any step.
    pub fn extremes(&self, position: usize) -> impl Iterator<Item = Extremes> {
        self.gauges(position).filter_map(|gauge| {
            Some(Extremes { pool: gauge.pool, device: gauge.device, most: gauge.most?, least: gauge.least? })
        })
    }

    /// Mean growth of a pool's use from one step's end to the next, over the last few: bytes per step.
    pub fn trend(&self, position: usize, device: Option<DeviceId>, pool: Pool) -> Option<i64> {
        let gauge = self.gauges(position).find(|gauge| gauge.pool == pool && gauge.device == device)?;
        let (first, last) = (*gauge.ends.front()?, *gauge.ends.back()?);
        let steps = i128::try_from(gauge.ends.len() - 1).ok().filter(|steps| *steps > 0)?;
        i64::try_from((i128::from(last) - i128::from(first)) / steps).ok()
    }

    fn gauges(&self, position: usize) -> impl Iterator<Item = &Gauge> {
        self.processes.get(position).into_iter().flatten()
    }

    fn sample(&mut self, event: &Event, pool: Pool, device: Option<DeviceId>, ledger: &Ledger) {
        let Some(position) = ledger.position(event.tgid) else { return };
        let Some(process) = ledger.processes().get(position) else { return };
        if process.steps().current() <= StepId(1) {
            return;
        }
        if let Some(used) = used(process, pool, device) {
            let gauge = self.gauge(position, pool, device);
            gauge.range = Some(match gauge.range {
                Some((min, max)) => (min.min(used), max.max(used)),
                None => (used, used),
            });
        }
    }

    fn end(&mut self, event: &Event, step: StepId, ledger: &Ledger) {
        let Some(position) = ledger.position(event.tgid) else { return };
        let Some(process) = ledger.processes().get(position) else { return };
        for memory in process.devices() {
            for pool in Pool::ALL.into_iter().filter(|pool| memory.pool(*pool).was_used()) {
                let gauge = self.gauge(position, pool, memory.device);
                if gauge.ends.len() == TREND_ENDS {
                    gauge.ends.pop_front();
                }
                gauge.ends.push_back(memory.pool(pool).used());
                gauge.end(step);
            }
        }
    }

    fn gauge(&mut self, position: usize, pool: Pool, device: Option<DeviceId>) -> &mut Gauge {
        if self.processes.len() <= position {
            self.processes.resize_with(position + 1, Vec::new);
        }
        let gauges = &mut self.processes[position];
        let at = gauges.iter().position(|gauge| gauge.pool == pool && gauge.device == device);
        let at = at.unwrap_or_else(|| {
            gauges.push(Gauge { pool, device, range: None, most: None, least: None, ends: VecDeque::new() });
            gauges.len() - 1
        });
        &mut gauges[at]
    }
}

impl Gauge {
    fn end(&mut self, step: StepId) {
        let Some((min, max)) = self.range.take().filter(|(_, max)| *max > 0) else { return };
        let swing = Swing { ratio: min as f64 / max as f64, step, min_bytes: min };
        if self.most.is_none_or(|most| swing.ratio < most.ratio) {
            self.most = Some(swing);
        }
        if self.least.is_none_or(|least| swing.ratio > least.ratio) {
            self.least = Some(swing);
        }
    }
}

fn used(process: &Process, pool: Pool, device: Option<DeviceId>) -> Option<u64> {
    process.device(device).map(|memory| memory.pool(pool).used())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Online;
    use crate::model::StepRule;
    use crate::model::testing::{MIB, Script};

    fn online(script: &Script) -> Online {
        let mut online = Online::new(StepRule::default(), false);
        for event in &script.events {
            online.apply(event);
        }
        online
    }

    fn extremes(script: &Script) -> Vec<Extremes> {
        online(script).fluctuation.extremes(0).collect()
    }

    fn swing(ratio: f64, step: u32, min_bytes: u64) -> Swing {
        Swing { ratio, step: StepId(step), min_bytes }
    }

    /// A pool event after which so many bytes are allocated.
    fn used(s: &mut Script, bytes: u64) {
        s.alloc_in(Pool::Pta, 0, 0x1000, 1, Some((bytes, 100)));
    }

    #[test]
    fn the_allocators_own_figure_is_used() {
        let mut script = Script::new();
        for uses in [&[1, 100][..], &[20, 80, 40], &[90, 100], &[10, 10], &[60, 80, 30]] {
            script.step(|s| uses.iter().for_each(|bytes| used(s, *bytes)));
        }
        let found = extremes(&script);
        let [pta] = &found[..] else { panic!("{found:?}") };
        assert_eq!((pta.pool, pta.device), (Pool::Pta, Some(DeviceId(0))));
        assert_eq!(pta.most, swing(0.25, 2, 20), "step 1 does not count");
        assert_eq!(pta.least, swing(1.0, 4, 10));
    }

    #[test]
    fn else_our_own_sum_is() {
        let mut script = Script::new();
        script.step(|_| {}).step(|s| {
            s.alloc(0x1000, 3 * MIB).alloc(0x2000, MIB).free(0x1000);
        });
        assert_eq!(extremes(&script)[0].most, swing(0.25, 2, MIB));
    }

    #[test]
    fn steps_without_events_or_bytes_have_no_ratio() {
        let mut script = Script::new();
        script.step(|s| used(s, 5)).step(|_| {}).step(|s| used(s, 0));
        assert_eq!(extremes(&script), []);
        script.step(|s| {
            used(s, 0);
            used(s, 8);
        });
        assert_eq!(extremes(&script)[0].most, swing(0.0, 4, 0), "an empty pool is a use like any other");
    }

    #[test]
    fn what_is_between_two_steps_counts_for_the_second() {
        let mut script = Script::new();
        script.step(|_| {});
        used(&mut script, 1);
        script.step(|s| used(s, 50));
        used(&mut script, 100);
        script.step(|s| used(s, 80));
        let found = extremes(&script);
        assert_eq!((found[0].most, found[0].least), (swing(0.8, 3, 80), swing(1.0, 2, 50)));
    }

    #[test]
    fn devices_are_apart() {
        let mut script = Script::new();
        script.step(|_| {}).step(|s| {
            s.alloc_on(0, 0x1000, MIB).alloc_on(1, 0x2000, MIB).alloc_on(1, 0x3000, MIB);
        });
        let found: Vec<_> = extremes(&script).iter().map(|e| (e.device.map(|d| d.0), e.most.ratio)).collect();
        assert_eq!(found, [(Some(0), 1.0), (Some(1), 0.5)]);
    }

    #[test]
    fn a_trend_is_the_mean_growth_over_the_last_ends() {
        let mut script = Script::new();
        let trend = |script: &Script| online(script).fluctuation.trend(0, Some(DeviceId(0)), Pool::Pta);
        script.step(|s| used(s, 1000));
        assert_eq!(trend(&script), None, "one end is no trend");
        for end in [1010, 1000, 1020] {
            script.step(|s| used(s, end));
        }
        assert_eq!(trend(&script), Some(6));
        for step in 0..20 {
            script.step(|s| used(s, 900 - 5 * step));
        }
        assert_eq!(trend(&script), Some(-5), "the beginning is forgotten");
    }
}
