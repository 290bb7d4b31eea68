//! Parts of a document.

use super::document::{BlockFacts, Document, LateFacts};
use super::units;
use crate::model::{DeviceId, StepId};

impl Document {
    /// Whether there is a leak that recurs. State that was built once, late, is listed but is no finding.
    pub fn has_leaks(&self) -> bool {
        self.devices.iter().any(|device| device.leaks.iter().any(|block| block.pattern == "recurring"))
    }

    /// Whether any block was judged.
    pub fn leaks_judged(&self) -> bool {
        self.leaks_analysed && self.devices.iter().any(|device| device.last_step_ended.0 > 2)
    }

    /// The most frequent marks and ranges, for people; empty when there were none.
    pub fn marks_seen(&self, at_most: usize) -> String {
        let marks = self.processes.iter().flat_map(|process| &process.marks).take(at_most);
        let marks: Vec<String> =
            marks.map(|mark| format!("\"{}\" ({}x)", mark.text, units::count(mark.count))).collect();
        marks.join(", ")
    }

    /// Keeps what is about the given devices and steps; an empty list keeps all. Totals stay those of the trace.
    pub fn select(&mut self, devices: &[u16], steps: &[u32]) {
        if !devices.is_empty() {
            let mut seen: Vec<String> =
                self.devices.iter().filter_map(|of| of.device).map(|device| device.to_string()).collect();
            if !seen.is_empty()
                && self.devices.iter().all(|of| of.device.is_none_or(|d| !devices.contains(&d.0)))
            {
                seen.dedup();
                let wanted: Vec<String> = devices.iter().map(u16::to_string).collect();
                self.notes.push(format!(
                    "nothing happened on device {} (--device); there was memory on device {}",
                    wanted.join(", "),
                    seen.join(", ")
                ));
            }
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
