//! Writes a dump of any size, as long training would leave it: what offline verbs are measured with
//! (`cargo xtask bench --offline`). The same arguments give the same dump.
//!
//!     cargo run --release --example large_dump -- DIR ROWS [--changed]

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;

use memscope::dump::{Config, Format, StackStyle, Writer, live_rows, rows_of};
use memscope::model::{
    Access, AccessKind, Alloc, AllocFailed, DeviceId, DevicePtr, Event, EventKind, Frame, Free, Ledger, Name,
    Nanos, Origin, Pool, Stack, StepRule, Tgid, Tid, Totals, Whose,
};

/// Operators of one step.
const OPERATORS: u64 = 2000;
/// Blocks that live from the first step on.
const PARAMETERS: u64 = 2000;
/// Operators between the allocation of an activation and its free.
const LIFETIME: usize = 700;
/// Steps from one out-of-memory to the next.
const STEPS_TO_FAILURE: u64 = 50;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let usage = "large_dump DIR ROWS [--changed]";
    let output: PathBuf = args.next().ok_or(usage)?.into();
    let rows: u64 = args.next().ok_or(usage)?.parse()?;
    let changed = args.next().is_some_and(|word| word == "--changed");
    let config = Config {
        output,
        formats: vec![Format::Csv],
        stacks: StackStyle::Lines,
        max_size: None,
        caller: None,
    };
    let mut trace = Trace::new(Writer::create(config)?, changed);
    trace.begin();
    while trace.rows < rows {
        trace.step();
    }
    for file in trace.end() {
        if let Some(failure) = file.failure {
            return Err(failure.into());
        }
        println!("{}", file.path.display());
    }
    Ok(())
}

struct Trace {
    writer: Writer,
    ledger: Ledger,
    names: Vec<Name>,
    stacks: Vec<Arc<Stack>>,
    /// Runs other operators now and then, and leaks.
    changed: bool,
    random: u64,
    time: u64,
    steps: u64,
    operators: u64,
    /// Addresses and sizes that were freed, oldest first: a block of the size that is asked for is seldom found.
    free: VecDeque<u64>,
    next_address: u64,
    allocated: u64,
    activations: VecDeque<(u64, u64)>,
    rows: u64,
}

impl Trace {
    fn new(writer: Writer, changed: bool) -> Self {
        let stack = |n: u32| {
            let frame = |depth: u32| {
                let (file, origin) = match depth {
                    0..5 => (
                        "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py",
                        Origin::Framework,
                    ),
                    _ => ("/home/user/project/model/layers.py", Origin::User),
                };
                let function = format!("TransformerEncoderLayer.forward_{n}_{depth}").into();
                (Frame { function, file: file.into(), line: Some(100 + n + depth) }, origin)
            };
            Stack::new((0..8).map(frame).collect(), Whose::Own, false).map(Arc::new)
        };
        Trace {
            writer,
            ledger: Ledger::new(StepRule::default()),
            names: (0..200).map(|n| format!("aclnnOperator{n}").into()).collect(),
            stacks: (0..300).filter_map(stack).collect(),
            changed,
            random: 1,
            time: 1_750_000_000_000_000_000,
            steps: 0,
            operators: 0,
            free: VecDeque::new(),
            next_address: 0x1240_0000_0000,
            allocated: 0,
            activations: VecDeque::new(),
            rows: 0,
        }
    }

    /// SplitMix64.
    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.random;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn put(&mut self, kind: EventKind) {
        self.time += 1500;
        let event = Event { time: Nanos(self.time), tgid: Tgid(4711), tid: Tid(4711), kind };
        let change = self.ledger.apply(&event);
        let Trace { writer, rows, ledger, .. } = self;
        rows_of(&event, &change, ledger, |row| {
            *rows += 1 + u64::from(matches!(event.kind, EventKind::Op { .. }));
            writer.write(&row);
        });
    }

    fn totals(&self) -> Option<Totals> {
        Some(Totals { allocated: self.allocated, reserved: 64 << 30 })
    }

    fn alloc(&mut self, size: u64) -> (u64, u64) {
        let reused = if self.free.len() > 4 * LIFETIME { self.free.pop_front() } else { None };
        let ptr = reused.unwrap_or(self.next_address);
        if reused.is_none() {
            self.next_address += 4 << 20;
        }
        self.allocated += size;
        let stack = self.random() as usize % self.stacks.len();
        self.put(EventKind::Alloc(Alloc {
            pool: Pool::Pta,
            device: Some(DeviceId(0)),
            ptr: DevicePtr(ptr),
            size,
            totals: self.totals(),
            driver: None,
            stack: self.stacks.get(stack).cloned(),
        }));
        (ptr, size)
    }

    fn free(&mut self, (ptr, size): (u64, u64)) {
        self.allocated -= size;
        self.free.push_back(ptr);
        self.put(EventKind::Free(Free {
            pool: Pool::Pta,
            device: Some(DeviceId(0)),
            ptr: DevicePtr(ptr),
            size: Some(size),
            totals: self.totals(),
        }));
    }

    fn access(&mut self, ptr: u64, kind: AccessKind, op: &Name) {
        let access =
            Access { pool: Some(Pool::Pta), ptr: DevicePtr(ptr), size: 512, kind, op: Some(op.clone()) };
        self.put(EventKind::Access(access));
    }

    fn begin(&mut self) {
        self.put(EventKind::AclInit);
        self.put(EventKind::DeviceSet { device: DeviceId(0) });
        for n in 0..PARAMETERS {
            self.alloc(512 * (1 + n % 1000));
        }
    }

    fn step(&mut self) {
        self.steps += 1;
        let range = self.steps;
        // A mark each third: what `leaks --mstx-info` looks for.
        if self.steps.is_multiple_of(3) {
            self.put(EventKind::Mark { text: "epoch".into(), domain: None });
        }
        self.put(EventKind::RangeBegin { range, text: "step start".into(), domain: None });
        for n in 0..OPERATORS {
            self.operator(n);
        }
        if self.steps.is_multiple_of(STEPS_TO_FAILURE) {
            self.put(EventKind::AllocFailed(AllocFailed {
                pool: Pool::Hal,
                function: "halMemAlloc",
                device: Some(DeviceId(0)),
                size: 8 << 30,
                code: 6,
                api: None,
                stack: None,
            }));
        }
        self.put(EventKind::RangeEnd { range: Some(range) });
    }

    fn operator(&mut self, n: u64) {
        self.operators += 1;
        // Every so often another operator than in the other dump, or one more.
        let other = self.changed && self.operators.is_multiple_of(4001);
        let name = self.names[(n as usize * 7 + usize::from(other)) % self.names.len()].clone();
        if other && self.operators.is_multiple_of(2) {
            self.put(EventKind::Op { name: name.clone() });
        }
        self.put(EventKind::Op { name: name.clone() });
        let size = 512 * (1 + n % 997);
        let block = self.alloc(size);
        self.access(block.0, AccessKind::Write, &name);
        if let Some((ptr, _)) = self.activations.back().copied() {
            self.access(ptr, AccessKind::Read, &name);
        }
        // One block of each step is never freed.
        if self.changed && n == 1000 {
            return;
        }
        self.activations.push_back(block);
        if self.activations.len() > LIFETIME
            && let Some(oldest) = self.activations.pop_front()
        {
            self.free(oldest);
        }
    }

    fn end(mut self) -> Vec<memscope::dump::FileReport> {
        for process in self.ledger.processes() {
            live_rows(process, Nanos(self.time)).for_each(|row| self.writer.write(&row));
        }
        self.writer.finish()
    }
}
