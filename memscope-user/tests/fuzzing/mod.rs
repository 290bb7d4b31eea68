//! Damage for readers of what others wrote, the same in every run. `cargo xtask fuzz` sets the time for long runs.

use std::time::{Duration, Instant};

/// No damage may make a reader take longer.
const ROUND_MOST: Duration = Duration::from_secs(20);

/// SplitMix64.
pub struct Random(u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Less than `limit`; 0 when that is 0.
    pub fn below(&mut self, limit: usize) -> usize {
        self.next().checked_rem(limit as u64).unwrap_or(0) as usize
    }

    pub fn one_in(&mut self, chances: usize) -> bool {
        self.below(chances) == 0
    }

    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }
}

/// Says which round it was when one panics.
struct Round<'a> {
    what: &'a str,
    seed: u64,
}

impl Drop for Round<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}: again with MEMSCOPE_FUZZ_SEED={}", self.what, self.seed);
        }
    }
}

/// Runs `round` so many times, or for `MEMSCOPE_FUZZ_SECONDS`, from the seed `MEMSCOPE_FUZZ_SEED` on.
pub fn rounds(what: &str, count: u64, mut round: impl FnMut(&mut Random)) {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let time = number("MEMSCOPE_FUZZ_SECONDS").map(Duration::from_secs);
    let first = number("MEMSCOPE_FUZZ_SEED").unwrap_or(0);
    let begin = Instant::now();
    let mut done = 0;
    while time.map_or(done < count, |time| begin.elapsed() < time) {
        let begin = Instant::now();
        let said = Round { what, seed: first + done };
        round(&mut Random(said.seed));
        assert!(begin.elapsed() < ROUND_MOST, "it takes {:?}", begin.elapsed());
        done += 1;
    }
    println!("{what}: {done} rounds");
}

/// Damages bytes in one to eight places; `words` are what it is likely to stumble on.
pub fn damage(bytes: &mut Vec<u8>, words: &[&[u8]], random: &mut Random) {
    const NUMBERS: [u64; 10] =
        [0, 1, u64::MAX, 1 << 63, (1 << 63) - 1, 1 << 32, u32::MAX as u64, 1 << 31, 0xffff_f000, 0x80];
    for _ in 0..1 + random.below(8) {
        let at = random.below(bytes.len() + 1);
        let range = |random: &mut Random, bytes: &[u8]| {
            let most = 1 << random.below(12);
            let length = random.below((bytes.len() - at).min(most) + 1);
            at..at + length
        };
        match random.below(9) {
            0 => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << random.below(8);
                }
            }
            1 => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = random.next() as u8;
                }
            }
            2 | 3 => {
                let number = if random.one_in(3) { random.next() } else { *random.pick(&NUMBERS) };
                let number = number.to_le_bytes();
                let number = &number[..*random.pick(&[1, 2, 4, 8])];
                if let Some(place) = bytes.get_mut(at..at + number.len()) {
                    place.copy_from_slice(number);
                }
            }
            4 => drop(bytes.drain(range(random, bytes))),
            5 => {
                let copy = bytes[range(random, bytes)].to_vec();
                let to = random.below(bytes.len() + 1);
                bytes.splice(to..to, copy);
            }
            6 => {
                let copy = bytes[range(random, bytes)].to_vec();
                let to = random.below(bytes.len() + 1);
                let end = (to + copy.len()).min(bytes.len());
                bytes.splice(to..end, copy);
            }
            7 if !words.is_empty() => {
                let word = *random.pick(words);
                let end = if random.one_in(2) { at } else { (at + word.len()).min(bytes.len()) };
                bytes.splice(at..end, word.iter().copied());
            }
            _ if random.one_in(4) => bytes.truncate(at),
            _ => {}
        }
    }
}
