//! Parts of a document.

use super::document::{Device, Document};
use super::units;
use crate::model::{DeviceId, StepId};

impl Document {
    /// Whether there is a leak that recurs. State that was built once, late, is listed but is no finding.
    pub fn has_leaks(&self) -> bool {
        self.devices.iter().any(|device| device.leaks.iter().any(|block| block.pattern == "recurring"))
    }

    /// Whether any block that is reported could be judged.
    pub fn leaks_judged(&self) -> bool {
        self.leaks_analysed && self.devices.iter().any(|device| self.steps_judged(device) > 0)
    }

    /// Of the steps that are reported, those of which it can be told what leaks.
    pub fn steps_judged(&self, device: &Device) -> u32 {
        self.steps_judged_from(device, StepId(2))
    }

    /// As [`Self::steps_judged`], from one of them on.
    pub fn steps_judged_from(&self, device: &Device, first: StepId) -> u32 {
        self.selection.steps.count_in(first.0..=device.last_step_ended.0.saturating_sub(1))
    }

    /// The most frequent marks and ranges, for people; empty when there were none.
    pub fn marks_seen(&self, at_most: usize) -> String {
        let marks = self.processes.iter().flat_map(|process| &process.marks).take(at_most);
        let marks: Vec<String> =
            marks.map(|mark| format!("\"{}\" ({}x)", mark.text, units::count(mark.count))).collect();
        marks.join(", ")
    }

    /// Keeps what is about the given devices; an empty list keeps all. Totals stay those of the trace.
    pub fn select(&mut self, devices: &[u16]) {
        if devices.is_empty() {
            return;
        }
        let keep = |device: Option<DeviceId>| device.is_none_or(|d| devices.contains(&d.0));
        let mut left_out: Vec<DeviceId> =
            self.devices.iter().filter(|of| !keep(of.device)).filter_map(|of| of.device).collect();
        left_out.sort_unstable();
        left_out.dedup();
        self.devices.retain(|device| keep(device.device));
        self.decomposition.retain(|of| keep(of.device));
        if let Some(inefficient) = &mut self.inefficient {
            inefficient.pools.retain(|pool| keep(pool.device));
        }
        self.selection.devices = devices.iter().copied().map(DeviceId).collect();
        self.selection.devices_left_out = left_out;
        if self.selected_nothing() {
            let list = |devices: &[DeviceId]| {
                let devices: Vec<String> = devices.iter().map(DeviceId::to_string).collect();
                devices.join(", ")
            };
            self.notes.push(format!(
                "nothing happened on device {} (--device); there was memory on device {}",
                list(&self.selection.devices),
                list(&self.selection.devices_left_out)
            ));
        }
    }

    /// Whether there was memory on devices, and on none of those that were asked for.
    pub fn selected_nothing(&self) -> bool {
        !self.selection.devices_left_out.is_empty() && self.devices.iter().all(|of| of.device.is_none())
    }

    /// Whether a step was seen.
    pub fn has_steps(&self) -> bool {
        self.processes.iter().any(|process| process.steps_seen > 0)
    }
}
