//! Leaks between marks, as people read them.

use crate::analysis::offline_leaks::Report;

use super::terminal::line;
use super::units;

pub fn render(report: &Report) -> String {
    let mut out = String::new();
    if report.devices.is_empty() {
        line(&mut out, "The dump has no device.");
    }
    for device in &report.devices {
        let who = format!("Process {}, device {}", device.pid, device.device);
        let Some([a, _, c]) = device.between else {
            let text = format!(
                "{who}: {} marks {:?}, three are needed from index {} on",
                device.marks, report.mark, report.start_index
            );
            line(&mut out, &text);
            continue;
        };
        let bytes = units::sum(device.leaks.iter().map(|leak| leak.size));
        let text = format!(
            "{who}: {} blocks, {bytes} bytes, allocated from row {} on and not freed before row {}",
            device.leaks.len(),
            a.id,
            c.id
        );
        line(&mut out, &text);
        for leak in &device.leaks {
            let op = leak.op.as_deref().map(|op| format!(", around {op}")).unwrap_or_default();
            let text = format!(
                "  {} {} bytes at {}, row {}, thread {}{op}",
                leak.pool, leak.size, leak.ptr, leak.id, leak.tid
            );
            line(&mut out, &text);
        }
    }
    out
}
