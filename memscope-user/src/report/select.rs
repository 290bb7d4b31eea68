//! Parts of a document.

use super::document::{BlockFacts, Document, LateFacts};
use crate::model::{DeviceId, StepId};

impl Document {
    /// Whether there is a leak that recurs. State that was built once, late, is listed but is no finding.
    pub fn has_leaks(&self) -> bool {
        self.devices.iter().any(|device| device.leaks.iter().any(|block| block.pattern == "recurring"))
    }

    /// Keeps what is about the given devices and steps; an empty list keeps all. Totals stay those of the trace.
    pub fn select(&mut self, devices: &[u16], steps: &[u32]) {
        if !devices.is_empty() {
            let keep = |device: Option<DeviceId>| device.is_none_or(|d| devices.contains(&d.0));
            self.devices.retain(|device| keep(device.device));
            self.decomposition.retain(|of| keep(of.device));
            if let Some(inefficient) = &mut self.inefficient {
                inefficient.pools.retain(|pool| keep(pool.device));
            }
        }
        if !steps.is_empty() {
            let keep = |step: StepId| steps.contains(&step.0);
            self.steps.retain(|step| keep(step.step));
            for device in &mut self.devices {
                let of_step = |block: &BlockFacts| keep(block.step);
                device.leaks.retain(of_step);
                device.late.retain(of_step);
                device.not_judged.retain(of_step);
                let apart = |group: &LateFacts| {
                    steps.iter().any(|step| (group.first_step.0..=group.last_step.0).contains(step))
                };
                device.late_groups.retain(apart);
            }
        }
    }
}
