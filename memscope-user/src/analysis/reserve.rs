//! What pools hand out against what they have reserved, step by step: whether a pool that grows does so because more is
//! needed, or because what it has is in pieces.
//!
//! The figures are the allocators' own, at the ends of steps; steps after the first only, which is when pools fill up.

use crate::model::{Block, Change, DeviceId, Event, EventKind, Ledger, Pool, Process, StepId};

use super::Analysis;

/// Points of a series. When there are more, two and two become one, so that memory does not grow with steps.
const POINTS: usize = 256;

/// Some steps, one after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Point {
    /// The last of them.
    pub step: StepId,
    pub steps: u32,
    /// Bytes handed out at the end of the last.
    pub allocated: u64,
    /// The largest that they were during these steps.
    pub peak_allocated: u64,
    /// Bytes reserved at the end of the last.
    pub reserved: u64,
    /// The least that they were during these steps: less than before when segments were given back, 0 when it is not
    /// known how many.
    pub least_reserved: u64,
}

impl Point {
    fn followed_by(self, next: Point) -> Point {
        let peak_allocated = self.peak_allocated.max(next.peak_allocated);
        let least_reserved = self.least_reserved.min(next.least_reserved);
        Point { steps: self.steps + next.steps, peak_allocated, least_reserved, ..next }
    }
}

/// The steps of a pool on a device.
#[derive(Debug, Clone)]
pub struct Series {
    pub pool: Pool,
    pub device: Option<DeviceId>,
    points: Vec<Point>,
    /// Steps of each point but the last.
    steps_each: u32,
    /// Largest use since the last end of a step.
    peak: u64,
    /// The least that was reserved after segments were given back since then.
    least: u64,
}

#[derive(Debug, Default)]
pub struct Reserve {
    /// By position in [`Ledger::processes`].
    processes: Vec<Vec<Series>>,
}

impl Reserve {
    /// Pools of the process at this position of [`Ledger::processes`] that had a step.
    pub fn series(&self, position: usize) -> impl Iterator<Item = &Series> {
        self.processes.get(position).into_iter().flatten().filter(|series| !series.points.is_empty())
    }

    /// The driver was given memory back that may be a segment's: of a `known` one the totals are corrected already.
    fn given_back(&mut self, position: usize, process: &Process, device: Option<DeviceId>, known: bool) {
        if process.steps().current() <= StepId(1) {
            return;
        }
        for memory in process.devices().iter().filter(|memory| device.is_none() || memory.device == device) {
            for pool in Pool::ALL {
                let Some(totals) = memory.pool(pool).totals else { continue };
                let series = self.of(position, pool, memory.device);
                let reserved = if known { totals.reserved } else { 0 };
                series.least = series.least.min(reserved);
            }
        }
    }

    fn of(&mut self, position: usize, pool: Pool, device: Option<DeviceId>) -> &mut Series {
        if self.processes.len() <= position {
            self.processes.resize_with(position + 1, Vec::new);
        }
        let all = &mut self.processes[position];
        let at = all.iter().position(|series| series.pool == pool && series.device == device);
        let at = at.unwrap_or_else(|| {
            all.push(Series { pool, device, points: Vec::new(), steps_each: 1, peak: 0, least: u64::MAX });
            all.len() - 1
        });
        &mut all[at]
    }
}

impl Series {
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    fn push(&mut self, point: Point) {
        match self.points.last_mut() {
            Some(last) if last.steps < self.steps_each => *last = last.followed_by(point),
            _ => self.points.push(point),
        }
        let is_whole = self.points.last().is_some_and(|last| last.steps == self.steps_each);
        if self.points.len() == POINTS && is_whole {
            let pairs = self.points.chunks(2);
            self.points = pairs.filter_map(|pair| pair.iter().copied().reduce(Point::followed_by)).collect();
            self.steps_each = self.steps_each.saturating_mul(2);
        }
    }
}

impl Analysis for Reserve {
    fn observe(&mut self, event: &Event, change: &Change, ledger: &Ledger) {
        let (Some(position), Some(process)) = (ledger.position(event.tgid), ledger.process(event.tgid))
        else {
            return;
        };
        let (pool, device) = match change {
            Change::Allocated { block, .. } | Change::Reported(block) => match process.block(*block) {
                Some(block) => (block.pool, block.device),
                None => return,
            },
            Change::Step { ended: Some(step), .. } if *step > StepId(1) => {
                for memory in process.devices() {
                    for pool in Pool::ALL {
                        let Some(totals) = memory.pool(pool).totals else { continue };
                        let series = self.of(position, pool, memory.device);
                        let before = series.points.last().map_or(u64::MAX, |point| point.reserved);
                        series.push(Point {
                            step: *step,
                            steps: 1,
                            allocated: totals.allocated,
                            peak_allocated: series.peak.max(totals.allocated),
                            reserved: totals.reserved,
                            least_reserved: series.least.min(before).min(totals.reserved),
                        });
                        (series.peak, series.least) = (0, u64::MAX);
                    }
                }
                return;
            }
            Change::Freed(Block { pool: Pool::Hal, device, .. }) => {
                self.given_back(position, process, *device, true);
                return;
            }
            Change::UnknownFree { pool: Pool::Hal, device, .. } => {
                self.given_back(position, process, *device, false);
                return;
            }
            _ if matches!(event.kind, EventKind::Unmap { .. }) => {
                self.given_back(position, process, None, true);
                return;
            }
            Change::StepsRetracted => {
                self.processes.get_mut(position).into_iter().for_each(Vec::clear);
                return;
            }
            _ => return,
        };
        // Only an allocation can make the use larger.
        let memory = process.device(device);
        if process.steps().current() > StepId(1)
            && let Some(totals) = memory.and_then(|memory| memory.pool(pool).totals)
        {
            let series = self.of(position, pool, device);
            series.peak = series.peak.max(totals.allocated);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Online;
    use crate::model::testing::Script;
    use crate::model::{Module, StepRule};

    fn points(script: &Script) -> Vec<Point> {
        let mut online = Online::new(StepRule::default(), false);
        script.events.iter().for_each(|event| drop(online.apply(event)));
        let mut series = online.reserve.series(0);
        let points = series.next().map(|series| series.points().to_vec()).unwrap_or_default();
        assert!(series.next().is_none(), "one pool on one device");
        points
    }

    /// A pool event after which so many bytes are allocated and reserved.
    fn totals(s: &mut Script, allocated: u64, reserved: u64) {
        s.alloc_in(Pool::Pta, 0, 0x1000, 1, Some((allocated, reserved)));
    }

    #[test]
    fn a_step_has_what_was_allocated_and_reserved_at_its_end() {
        let mut script = Script::new();
        for (peak, end, reserved) in [(9, 9, 10), (30, 20, 40), (20, 20, 40), (60, 10, 80)] {
            script.step(|s| {
                totals(s, peak, reserved);
                totals(s, end, reserved);
            });
        }
        script.step(|_| {});
        let point = |step, allocated, peak_allocated, reserved, least_reserved| Point {
            step: StepId(step),
            steps: 1,
            allocated,
            peak_allocated,
            reserved,
            least_reserved,
        };
        assert_eq!(
            points(&script),
            [
                point(2, 20, 30, 40, 40),
                point(3, 20, 20, 40, 40),
                point(4, 10, 60, 80, 40),
                point(5, 10, 10, 80, 80)
            ]
        );
    }

    #[test]
    fn what_is_given_back_within_a_step_is_known_to_be() {
        let mut script = Script::new();
        let (segment, size) = (0x100_0000, 20 << 20);
        script.hal(segment, size, Module::APP);
        for step in 1..=3 {
            script.step(|s| {
                s.alloc_in(Pool::Pta, 0, segment, 1, Some((1, size)));
                if step > 1 {
                    s.free_in(Pool::Pta, segment, Some((0, size))).free_in(Pool::Hal, segment, None);
                    s.hal(segment, size, Module::APP).alloc_in(Pool::Pta, 0, segment, 1, Some((1, size)));
                }
                s.free_in(Pool::Pta, segment, Some((0, size)));
            });
        }
        let least: Vec<u64> = points(&script).iter().map(|point| point.least_reserved).collect();
        assert_eq!(least, [0, 0]);
    }

    #[test]
    fn long_traces_have_coarser_points() {
        let mut script = Script::new();
        let steps = 1 + 3 * POINTS as u64;
        for step in 1..=steps {
            script.step(|s| totals(s, step, 2 * step));
        }
        let points = points(&script);
        assert!(points.len() < POINTS && points.len() > POINTS / 2, "{}", points.len());
        assert_eq!(
            points.iter().map(|point| u64::from(point.steps)).sum::<u64>(),
            steps - 1,
            "none is missing"
        );
        let last = points[points.len() - 1];
        assert_eq!((last.step, last.allocated, last.reserved), (StepId(steps as u32), steps, 2 * steps));
        assert!(points.iter().all(|point| point.peak_allocated == u64::from(point.step.0)));
        assert!(points.windows(2).all(|pair| pair[0].step.0 + pair[1].steps == pair[1].step.0));
    }
}
