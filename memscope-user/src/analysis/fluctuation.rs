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
