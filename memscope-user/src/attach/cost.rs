//! What a hit of a probe costs on this machine: measured in a child that calls functions of ours, with the programs and the
//! mechanism that a trace would use.

use std::{
    arch::naked_asm,
    fs::File,
    hint::black_box,
    io::{self, BufRead, BufReader, Write},
    process::{Child, Command, Stdio},
};

use memscope_ebpf::{NO_ARG, ret};
use serde::Serialize;

use super::{AttachError, Attached, Attacher, Config, Mechanism, Scope, proc::Proc, process::Process};
use crate::{
    attach::process::{FileId, ProcessError},
    model::Tgid,
    probes::{
        catalogue::{At, Class, Fact, Probe, Shape},
        resolve::{Found, ResolvedFile},
    },
};

/// Functions that begin as most of those that are probed do: what the first instruction is decides how the kernel goes
/// past it.
macro_rules! functions {
    ($($name:ident),*) => {
        $(
            #[unsafe(naked)]
            extern "C" fn $name() {
                #[cfg(target_arch = "x86_64")]
                naked_asm!("push rbp", "pop rbp", "ret");
                #[cfg(target_arch = "aarch64")]
                naked_asm!("stp x29, x30, [sp, #-16]!", "ldp x29, x30, [sp], #16", "ret");
            }
        )*
    };
}
functions!(unprobed, at_entry, at_return);

type Function = extern "C" fn();

const FUNCTIONS: [Function; 3] = [unprobed, at_entry, at_return];

/// The word that makes the program the child; it is no verb for people.
pub const CHILD: &str = "cost-loop";

const fn probe(site: &'static str, shape: Shape) -> Probe {
    Probe {
        site,
        at: At::Symbol(site),
        libraries: &[],
        observes: Fact::DriverFree,
        shape,
        class: Class::Memory,
        unless: &[],
        since: "",
    }
}
static ENTRY: Probe = probe("our own, at entry", Shape::Enter);
static RETURN: Probe =
    probe("our own, at return", Shape::EnterReturn { out: NO_ARG, ret: ret::ZERO_IS_OK, structure: NO_ARG });

#[derive(Debug, thiserror::Error)]
pub enum CostError {
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error(transparent)]
    Process(#[from] ProcessError),
    #[error("the child that is to be measured failed: {0}")]
    Child(#[from] io::Error),
    #[error("the child that is to be measured can not be probed: {0}")]
    Probe(String),
}

/// ns of CPU time of the probed thread; lowest and highest of all rounds beside the median.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Price {
    pub median_ns: f64,
    pub lowest_ns: f64,
    pub highest_ns: f64,
}

impl Price {
    /// What calls cost more than others, round by round.
    fn of(rounds: &[[f64; 3]], which: usize) -> Option<Self> {
        let mut prices: Vec<f64> = rounds.iter().map(|round| round[which] - round[0]).collect();
        prices.sort_by(f64::total_cmp);
        Some(Self {
            median_ns: *prices.get(prices.len() / 2)?,
            lowest_ns: *prices.first()?,
            highest_ns: *prices.last()?,
        })
    }
}

/// Of one hit with its record, without a stack.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Prices {
    /// Of a probe at the entry of a function.
    pub entry: Price,
    /// Of probes at entry and return together.
    pub with_return: Price,
}

/// How much is measured.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    pub rounds: u32,
    /// Of each function in a round.
    pub calls: u32,
}

impl Effort {
    /// For a trace, beside it: 5 ms of a CPU's time for the calls.
    pub const BRIEF: Self = Self { rounds: 7, calls: 150 };
    pub const THOROUGH: Self = Self { rounds: 25, calls: 2000 };
}

/// Measures. Takes some 0.1 s, most of it waiting for the kernel to detach.
pub fn measure(
    proc: &Proc,
    mechanism: Option<Mechanism>,
    effort: Effort,
) -> Result<(Mechanism, Prices), CostError> {
    // Room for all records: no one reads them.
    let bytes = 128 * effort.rounds * effort.calls * 2;
    let (mut attacher, _records) = Attacher::new(Config {
        ring_bytes: bytes,
        classes: [Class::Memory].into(),
        mechanism,
        empty: false,
        stacks: None,
        native_stacks: None,
        call_threads: None,
        own_numbers: proc.has_own_numbers(),
    })?;
    let mut child = Loop::start(effort)?;
    let tgid = proc.number_of(child.0.id())?;
    attacher.attach_own(tgid)?;
    let rounds = child.run()?;
    let price = |which| {
        Price::of(&rounds, which).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "it told nothing"))
    };
    Ok((attacher.mechanism(), Prices { entry: price(1)?, with_return: price(2)? }))
}

impl Attacher {
    /// Attaches to our functions in a process that runs our program.
    fn attach_own(&mut self, tgid: Tgid) -> Result<(), CostError> {
        let proc = Proc::default();
        let number = proc.own_tgid().unwrap_or(Tgid(std::process::id()));
        let code = Process::open(&proc, number)?.mapped_code()?;
        let file = File::open("/proc/self/exe")?;
        let id = FileId::of(&file)?;
        let offset = |function: Function| {
            let address = function as usize as u64;
            let range = code.iter().find(|range| {
                range.start().zip(range.end()).is_some_and(|(start, end)| (start..end).contains(&address))
            })?;
            Some(address - range.start()? + range.offset)
        };
        let found = |probe: &'static Probe, function: Function| {
            let offset = offset(function).ok_or_else(|| CostError::Probe("it maps no such code".into()))?;
            Ok::<_, CostError>(Found { probe, offset, shape: probe.shape, report_layout: None })
        };
        let resolved = ResolvedFile {
            found: vec![found(&ENTRY, at_entry)?, found(&RETURN, at_return)?],
            ..ResolvedFile::default()
        };
        let scope = Scope::Process(tgid);
        let mut outcome = Attached::default();
        self.attach_file(
            scope,
            id,
            &file,
            &resolved,
            &"our own program".into(),
            &Default::default(),
            None,
            &mut outcome,
        );
        match self.sites().iter().find_map(|site| site.failure()) {
            Some(why) => Err(CostError::Probe(why.to_owned())),
            None => Ok(()),
        }
    }
}

/// The child. It is stopped when dropped.
struct Loop(Child);

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Loop {
    fn start(effort: Effort) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.args([CHILD, &effort.rounds.to_string(), &effort.calls.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().map(Self)
    }

    /// Lets it run; ns a call of each function, by rounds.
    fn run(&mut self) -> io::Result<Vec<[f64; 3]>> {
        drop(self.0.stdin.take());
        let output = self.0.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut rounds = Vec::new();
        for line in BufReader::new(output).lines() {
            let line = line?;
            let figures: Vec<f64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
            rounds.push(*figures.first_chunk().ok_or(io::ErrorKind::InvalidData)?);
        }
        Ok(rounds)
    }
}

/// What the child does: waits until its standard input is closed, and measures.
pub fn child(effort: Effort) -> io::Result<()> {
    io::copy(&mut io::stdin().lock(), &mut io::sink())?;
    for _ in 0..effort.rounds {
        let mut line = String::new();
        for function in FUNCTIONS {
            let function = black_box(function);
            let begin = cpu_ns();
            for _ in 0..effort.calls {
                function();
            }
            let spent = cpu_ns() - begin;
            line += &format!("{} ", spent as f64 / f64::from(effort.calls.max(1)));
        }
        writeln!(io::stdout(), "{}", line.trim_end())?;
    }
    Ok(())
}

fn cpu_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a timespec of ours.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// How much of the CPU time of the traced processes their probes took, since each was attached.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Share {
    pub prices: Prices,
    /// Hits of sites that are probed at their entry alone.
    pub entry_hits: u64,
    /// Of those that are probed at their return as well.
    pub return_hits: u64,
    /// Hits by their prices.
    pub probes_ns: f64,
    /// CPU time of the processes, user and system.
    pub target_ns: u64,
}

impl Share {
    pub fn new(prices: Prices, entry_hits: u64, return_hits: u64, target_ns: u64) -> Self {
        let probes_ns =
            entry_hits as f64 * prices.entry.median_ns + return_hits as f64 * prices.with_return.median_ns;
        Self { prices, entry_hits, return_hits, probes_ns, target_ns }
    }

    /// `None`: they did nothing yet that the kernel's clock of 10 ms would show.
    pub fn of_target(&self) -> Option<f64> {
        (self.target_ns > 0).then(|| (self.probes_ns / self.target_ns as f64).clamp(0.0, 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_are_differences_and_shares_their_sum() {
        let rounds = [[1.0, 801.0, 2001.0], [2.0, 1002.0, 1802.0], [1.0, 901.0, 2501.0]];
        let (entry, with_return) = (Price::of(&rounds, 1).unwrap(), Price::of(&rounds, 2).unwrap());
        assert_eq!((entry.lowest_ns, entry.median_ns, entry.highest_ns), (800.0, 900.0, 1000.0));
        assert_eq!(with_return.median_ns, 2000.0);
        assert_eq!(Price::of(&[], 1), None);
        let share = Share::new(Prices { entry, with_return }, 10_000, 500, 100_000_000);
        assert_eq!((share.probes_ns, share.of_target()), (10e6, Some(0.1)));
        assert_eq!(Share { target_ns: 0, ..share }.of_target(), None);
    }
}
