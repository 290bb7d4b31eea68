//! The line that is updated in place while tracing.

use crate::analysis::Online;
use crate::analysis::reconcile::Reconciliation;
use crate::model::{Pool, Process};

use super::units;

/// Pools of frameworks, the first that is in use is shown.
const SHOWN: [Pool; 3] = [Pool::Pta, Pool::Mindspore, Pool::Atb];

/// What there is to see at this moment, in one line without a line end:
/// `step 131   device 1.24 GiB   PTA 18.1 / 48.0 MiB (+3.00 MiB/step)   events 1.2 k/s   lost 0`.
///
/// The pool's figures are allocated and reserved bytes. Several processes are added up. `probes` is what share of the
/// processes' CPU time their probes took.
pub fn line(online: &Online, events_per_second: f64, lost: u64, probes: Option<f64>) -> String {
    let running: Vec<(usize, &Process)> = online
        .ledger
        .processes()
        .iter()
        .enumerate()
        .filter(|(_, process)| process.ended().is_none() && !process.devices().is_empty())
        .collect();
    let mut parts = Vec::new();
    match &running[..] {
        [] if online.ledger.processes().iter().any(|process| !process.devices().is_empty()) => {
            parts.push("all have ended".to_owned());
        }
        [] => parts.push("nothing allocated yet".to_owned()),
        [(_, process)] => match process.steps().current().0 {
            0 => parts.push("no step yet".to_owned()),
            step => parts.push(format!("step {step}")),
        },
        several => parts.push(units::count_of(several.len() as u64, "process")),
    }
    let memories = || {
        running.iter().flat_map(|(position, process)| {
            process
                .devices()
                .iter()
                .filter(|memory| memory.device.is_some())
                .map(|memory| (*position, memory))
        })
    };
    let device = units::sum(memories().map(|(_, memory)| Reconciliation::of(memory.while_used()).known()));
    if device > 0 {
        parts.push(format!("device {}", units::bytes(device)));
    }
    if let Some(pool) =
        SHOWN.into_iter().find(|pool| memories().any(|(_, memory)| memory.pool(*pool).was_used()))
    {
        let used = units::sum(memories().map(|(_, memory)| memory.pool(pool).used()));
        let reserved = units::sum(
            memories().filter_map(|(_, memory)| memory.pool(pool).totals).map(|totals| totals.reserved),
        );
        let trends: Vec<i64> = memories()
            .filter_map(|(position, memory)| online.fluctuation.trend(position, memory.device, pool))
            .collect();
        let mut part = format!("{pool} {}", used_of(used, reserved));
        if !trends.is_empty() {
            part.push_str(&format!(
                " ({}/step)",
                units::growth(trends.into_iter().fold(0, i64::saturating_add))
            ));
        }
        parts.push(part);
    }
    parts.push(format!("events {}", units::rate(events_per_second)));
    parts.push(format!("lost {}", units::count(lost)));
    if let Some(share) = probes {
        parts.push(format!("probes {:.1} % of its CPU time", share * 100.0));
    }
    parts.join("   ")
}

/// `18.1 / 48.0 MiB`, `900 KiB / 2.00 MiB`; only the first when the other is not known.
fn used_of(used: u64, reserved: u64) -> String {
    let (used, reserved) = (units::bytes(used), (reserved > 0).then(|| units::bytes(reserved)));
    match (used.split_once(' '), reserved) {
        (Some((number, unit)), Some(reserved)) if reserved.ends_with(&format!(" {unit}")) => {
            format!("{number} / {reserved}")
        }
        (_, Some(reserved)) => format!("{used} / {reserved}"),
        (_, None) => used,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::StepRule;
    use crate::model::testing::{Script, leak6};

    fn after(events: &[crate::model::Event]) -> Online {
        let mut online = Online::new(StepRule::default(), true);
        for event in events {
            online.apply(event);
        }
        online
    }

    #[test]
    fn one_process() {
        let events = leak6();
        let until = |count: usize| {
            let ends = events
                .iter()
                .enumerate()
                .filter(|(_, event)| matches!(event.kind, crate::model::EventKind::RangeEnd { .. }));
            ends.map(|(index, _)| index + 1).nth(count - 1).unwrap_or(events.len())
        };
        let online = after(&events[..until(5)]);
        assert_eq!(
            line(&online, 1234.0, 0, None),
            "step 5   device 40.0 MiB   PTA 16.0 / 40.0 MiB (+3.00 MiB/step)   events 1.2 k/s   lost 0"
        );
        let online = after(&events[..4]);
        assert_eq!(
            line(&online, 0.0, 12_345, Some(0.0123)),
            "no step yet   device 20.0 MiB   PTA 1.00 / 20.0 MiB   events 0 /s   lost 12,345   \
             probes 1.2 % of its CPU time"
        );
    }

    #[test]
    fn nothing_yet() {
        assert_eq!(line(&after(&[]), 0.0, 0, None), "nothing allocated yet   events 0 /s   lost 0");
        let mut script = Script::new();
        script.op("aclnnAdd");
        assert_eq!(
            line(&after(&script.events), 2.0, 0, None),
            "nothing allocated yet   events 2 /s   lost 0"
        );
        script.alloc(0x10, 512).push(crate::model::testing::MAIN, crate::model::EventKind::Exit);
        assert_eq!(line(&after(&script.events), 0.0, 0, None), "all have ended   events 0 /s   lost 0");
    }
}
