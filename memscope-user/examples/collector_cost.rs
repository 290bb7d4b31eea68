//! What the collector costs: records a second of one core, from a recorded stream through decoding, ledger and leak analysis.
//!
//!     memscope-trace -p PID --record STREAM ...
//!     cargo run --release --example collector_cost STREAM

use std::path::Path;

use memscope::analysis::Online;
use memscope::collect::decode::Decoder;
use memscope::collect::tape::Tape;
use memscope::model::{StepRule, StepsFrom};
use memscope_ebpf::{Header, Plain};

/// Records of each measurement.
const RECORDS: usize = 20_000_000;
/// Of which so many make a trace, the stream again and again.
const TRACE: usize = 1_000_000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("which stream?")?;
    let tape = Tape::read(Path::new(&path))?;
    if tape.is_empty() {
        return Err("the stream is empty".into());
    }
    println!("records in the stream: {}", tape.len());
    let decoding = measure(&tape, |tape| {
        let mut events = 0u64;
        let mut decoder = decoder(tape);
        play(tape, |record| {
            decoder.decode(record, |_| events += 1);
        });
        events
    });
    println!("decoding: {decoding:.2} million records/s");
    let rule = StepRule::default();
    for (what, source) in [
        ("decoding, ledger and leak analysis", StepsFrom::Marks),
        ("the same, with steps inferred where none are marked", StepsFrom::MarksOrOps),
    ] {
        let all = measure(&tape, |tape| {
            let mut decoder = decoder(tape);
            let mut online = Online::new(rule.clone(), true).with_steps_from(&rule, source);
            let mut events = Vec::new();
            play(tape, |record| {
                decoder.decode(record, |event| events.push(event));
                events.drain(..).for_each(|event| online.feed(event, |_, _, _| {}));
            });
            online.finish(|_, _, _| {});
            decoder.received
        });
        println!("{what}: {all:.2} million records/s");
    }
    Ok(())
}

/// Hands out the records of the stream, again and again, each time later.
fn play(tape: &Tape, mut take: impl FnMut(&[u8])) {
    let time = |record: &[u8]| Header::read(record).map(|header| header.time_ns);
    let times = || tape.records().filter_map(time);
    let span = times().max().unwrap_or(0) - times().min().unwrap_or(0) + 1;
    let mut later = Vec::new();
    for round in 0..rounds(tape) as u64 {
        for record in tape.records() {
            let Some(at) = time(record) else { continue };
            later.clear();
            later.extend_from_slice(&(at + round * span).to_le_bytes());
            later.extend_from_slice(&record[8..]);
            take(&later);
        }
    }
}

fn rounds(tape: &Tape) -> usize {
    TRACE.div_ceil(tape.len())
}

fn decoder(tape: &Tape) -> Decoder {
    let mut decoder = Decoder::new(0, Box::new(|_, _, _| None));
    tape.introduce_sites(&mut decoder);
    decoder
}

/// Million records a second of CPU time.
fn measure(tape: &Tape, pass: impl Fn(&Tape) -> u64) -> f64 {
    let trace = rounds(tape) * tape.len();
    let passes = RECORDS.div_ceil(trace);
    let begin = cpu_seconds();
    for _ in 0..passes {
        std::hint::black_box(pass(tape));
    }
    (passes * trace) as f64 / (cpu_seconds() - begin) / 1e6
}

/// CPU time of this process: other work on the machine does not count.
fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec of ours.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
