//! What the ledger costs: events per second of one core, and bytes per live block.
//!
//!     cargo run --release --example ledger_cost

use std::sync::Arc;

use memscope::analysis::leaks::Leaks;
use memscope::analysis::{Analysis, Online};
use memscope::model::{
    Alloc, DeviceId, DevicePtr, Event, EventKind, Free, Ledger, Name, Nanos, Pool, StepRule, StepsFrom, Tgid,
    Tid, Totals,
};

const EVENTS: usize = 20_000_000;
/// Blocks of a large model: alive all the time.
const RESIDENT: u64 = 20_000;
/// Not a power of two: a vector or a map is then neither at its best nor at its worst.
const LIVE: u64 = 3_000_000;

fn main() {
    let names: Vec<Name> = (0..200).map(|n| Arc::from(format!("aclnnOperator{n}"))).collect();
    let events = training(&names);

    let mut ledger = Ledger::new(StepRule::default());
    let mut leaks = Leaks::default();
    report("ledger and leaks", events.len(), || {
        for _ in 0..EVENTS / events.len() {
            for event in &events {
                let change = ledger.apply(event);
                leaks.observe(event, &change, &ledger);
            }
        }
    });
    let mut online = Online::new(StepRule::default(), true);
    report("all online analyses", events.len(), || {
        for _ in 0..EVENTS / events.len() {
            for event in &events {
                online.apply(event);
            }
        }
    });
    let rule = StepRule::default();
    let mut inferring = Online::new(rule.clone(), true).with_steps_from(&rule, StepsFrom::Ops);
    report("the same, with steps inferred", events.len(), || {
        for _ in 0..EVENTS / events.len() {
            for event in &events {
                inferring.feed(event.clone(), |_, _, _| {});
            }
        }
    });
    drop((ledger, leaks, online, inferring));

    let before = resident_bytes();
    let mut online = Online::new(StepRule::default(), true);
    for index in 0..LIVE {
        if let Some(name) = names.get(index as usize % names.len()) {
            online.apply(&event(index, EventKind::Op { name: name.clone() }));
        }
        online.apply(&event(index, alloc(0x1200_0000_0000 + index * 512, 512)));
    }
    let bytes = resident_bytes().saturating_sub(before);
    println!("{LIVE} live blocks: {} bytes each", bytes / LIVE);
}

fn report(what: &str, batch: usize, run: impl FnOnce()) {
    let begin = cpu_seconds();
    run();
    let events = EVENTS / batch * batch;
    println!("{what}: {:.1} million events/s", events as f64 / (cpu_seconds() - begin) / 1e6);
}

/// CPU time of this process: other work on the machine does not count.
fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec of ours.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Steps of a training loop: per operator two allocations and the frees of what it has used up, half of the
/// blocks living for a hundred operators (activations), and one batch that outlives its step.
fn training(names: &[Name]) -> Vec<Event> {
    let mut events = Vec::new();
    let mut held: std::collections::VecDeque<u64> = (0..RESIDENT).collect();
    let address = |block: u64| 0x1200_0000_0000 + block * 2048;
    let mut next = RESIDENT;
    for block in 0..RESIDENT {
        events.push(event(0, alloc(address(block), 1536)));
    }
    for step in 0..20 {
        let time = events.len() as u64;
        events.push(event(
            time,
            EventKind::RangeBegin { range: step, text: Arc::from("step start"), domain: None },
        ));
        for name in names.iter().cycle().take(10_000) {
            let time = events.len() as u64;
            events.push(event(time, EventKind::Op { name: name.clone() }));
            events.push(event(time, alloc(address(next), 1536)));
            events.push(event(time, free(address(next))));
            events.push(event(time, alloc(address(next + 1), 1024)));
            held.push_back(next + 1);
            next += 2;
            if let Some(oldest) = held.pop_front() {
                events.push(event(time, free(address(oldest))));
            }
        }
        events.push(event(events.len() as u64, EventKind::RangeEnd { range: Some(step) }));
    }
    for block in held {
        events.push(event(events.len() as u64, free(address(block))));
    }
    events
}

fn event(time: u64, kind: EventKind) -> Event {
    Event { time: Nanos(time), tgid: Tgid(1), tid: Tid(1), kind }
}

fn alloc(ptr: u64, size: u64) -> EventKind {
    EventKind::Alloc(Alloc {
        pool: Pool::Pta,
        device: Some(DeviceId(0)),
        ptr: DevicePtr(ptr),
        size,
        totals: Some(Totals { allocated: 1 << 30, reserved: 2 << 30 }),
        driver: None,
        stack: None,
    })
}

fn free(ptr: u64) -> EventKind {
    EventKind::Free(Free {
        pool: Pool::Pta,
        device: Some(DeviceId(0)),
        ptr: DevicePtr(ptr),
        size: None,
        totals: Some(Totals { allocated: 1 << 30, reserved: 2 << 30 }),
    })
}

/// Of this process; 0 when the kernel does not say.
fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|statm| statm.split_whitespace().nth(1)?.parse::<u64>().ok())
        .unwrap_or(0);
    pages * 4096
}
