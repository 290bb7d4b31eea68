//! What happened at all sites so far, and what that has cost the targets.

use std::time::Duration;

use memscope_ebpf::Counters;

use super::Session;
use crate::attach::cost::{self, Effort, Share};

/// Over all sites: records lost, and entries of functions without and with a return probe.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sums {
    pub(super) lost: u64,
    pub(super) entry: u64,
    pub(super) with_return: u64,
}

/// Both of one moment.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Look {
    pub(super) sums: Sums,
    pub(super) used: Duration,
}

impl Session<'_> {
    /// What happened at all sites so far. Each counter is a call into the kernel: one pass for all who ask.
    fn sums(&self) -> Sums {
        let mut sums = Sums::default();
        for (site, counters) in self.attacher.tallies() {
            sums.lost += lost(&counters);
            match site.probe.shape.has_return() {
                true => sums.with_return += counters.entries(),
                false => sums.entry += counters.entries(),
            }
        }
        sums
    }

    /// Hits of which there is no record, for no reason that was counted.
    pub(super) fn unaccounted(&self) -> u64 {
        let (mut due, mut lost_total) = (0, 0);
        for (_, counters) in self.attacher.tallies() {
            due += counters.hits;
            lost_total += lost(&counters);
        }
        due.saturating_sub(self.decoder.received + lost_total)
    }

    /// Has it measured what a hit costs, on a thread of its own: the trace does not wait for it.
    pub(super) fn measure_prices(&self) {
        let (prices, proc, mechanism) =
            (self.prices.clone(), self.config.proc.clone(), self.attacher.mechanism());
        let measuring = move || match cost::measure(&proc, Some(mechanism), Effort::BRIEF) {
            Ok((_, measured)) => {
                let _ = prices.set(measured);
            }
            Err(e) => tracing::debug!("what a probe costs is not known: {e}"),
        };
        let _ = std::thread::Builder::new().name("cost".into()).spawn(measuring);
    }

    /// What happened at all sites so far, and the CPU time that the targets have used meanwhile.
    pub(super) fn look(&mut self) -> Look {
        let mut used = Duration::ZERO;
        for (tgid, target) in &mut self.targets {
            if target.ended.is_none()
                && let Some(now) = self.config.proc.cpu_time(*tgid)
            {
                target.cpu.1 = now;
            }
            used += target.cpu.1.saturating_sub(target.cpu.0);
        }
        Look { sums: self.sums(), used }
    }

    /// What the probes had cost the targets by then; `None` as long as it is not known what a hit costs.
    pub(super) fn share(&self, look: Look) -> Option<Share> {
        let Look { sums, used } = look;
        let prices = *self.prices.get()?;
        Some(Share::new(prices, sums.entry, sums.with_return, used.as_nanos() as u64))
    }
}

pub(super) fn lost(counters: &Counters) -> u64 {
    counters.ring_full + counters.map_full
}
