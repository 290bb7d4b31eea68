//! Nothing but context switches: what an attached tracer costs those who only take turns.

use std::{
    io::{Read, Write, pipe},
    thread,
};

use anyhow::Context;
use serde_json::json;

use crate::truth::{Tally, Truth, cpu_ns, monotonic_ns};

/// Two threads hand a byte to and fro, and sleep in between.
pub fn ping_pong(count: u64, truth: &Truth) -> anyhow::Result<Tally> {
    let (mut from_here, mut to_there) = pipe()?;
    let (mut from_there, mut to_here) = pipe()?;
    let mut byte = [0];
    let (begin, cpu) = (monotonic_ns(), cpu_ns());
    thread::scope(|scope| {
        let other = scope.spawn(move || -> std::io::Result<()> {
            let mut byte = [0];
            for _ in 0..count {
                from_here.read_exact(&mut byte)?;
                to_here.write_all(&byte)?;
            }
            Ok(())
        });
        for _ in 0..count {
            to_there.write_all(&byte)?;
            from_there.read_exact(&mut byte)?;
        }
        other.join().ok().context("the other thread panicked")??;
        anyhow::Ok(())
    })?;
    let each = |from: u64, to: u64| (to - from) as f64 / count.max(1) as f64;
    let time = json!({ "ns_per_turn": each(begin, monotonic_ns()), "cpu_ns_per_turn": each(cpu, cpu_ns()) });
    truth.tell("ping-pong", time)?;
    Ok(Tally::default())
}
