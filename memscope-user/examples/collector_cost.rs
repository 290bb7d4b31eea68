//! What the collector costs: records a second of one core, from a recorded stream through decoding, ledger and leak analysis.
//!
//!     memscope-trace -p PID --record STREAM ...
//!     cargo run --release --example collector_cost STREAM

use std::path::Path;
use std::time::{Duration, Instant};

use memscope::analysis::Online;
use memscope::collect::decode::Decoder;
use memscope::collect::tape::Tape;
use memscope::model::{StepRule, StepsFrom};

/// Records of each measurement, by passes over the stream.
const RECORDS: usize = 20_000_000;

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
        for record in tape.records() {
            decoder.decode(record, |_| events += 1);
        }
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
            for record in tape.records() {
                decoder.decode(record, |event| events.push(event));
                events.drain(..).for_each(|event| online.feed(event, |_, _, _| {}));
            }
            online.finish(|_, _, _| {});
            decoder.received
        });
        println!("{what}: {all:.2} million records/s");
    }
    Ok(())
}

fn decoder(tape: &Tape) -> Decoder {
    let mut decoder = Decoder::new(0, |_, _, _| None);
    tape.introduce_sites(&mut decoder);
    decoder
}

/// Million records a second.
fn measure(tape: &Tape, pass: impl Fn(&Tape) -> u64) -> f64 {
    let passes = RECORDS.div_ceil(tape.len());
    let mut time = Duration::ZERO;
    for _ in 0..passes {
        let begin = Instant::now();
        std::hint::black_box(pass(tape));
        time += begin.elapsed();
    }
    (passes * tape.len()) as f64 / time.as_secs_f64() / 1e6
}
