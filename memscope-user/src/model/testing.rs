//! Events for tests, written as a program would cause them.

use std::sync::Arc;

use super::{
    Alloc, AllocFailed, DeviceId, DevicePtr, DriverAlloc, Event, EventKind, Frame, Free, Module, Nanos,
    Origin, PageType, Pool, Stack, Tgid, Tid, Totals, Whose,
};

pub const MIB: u64 = 1 << 20;

/// A sequence of events of one process. Time advances by one microsecond an event.
#[derive(Debug, Default)]
pub struct Script {
    pub events: Vec<Event>,
    ranges: u64,
}

pub const PID: Tgid = Tgid(100);
pub const MAIN: Tid = Tid(100);

impl Script {
    pub fn new() -> Self {
        Script::default()
    }

    pub fn push(&mut self, tid: Tid, kind: EventKind) -> &mut Self {
        let time = Nanos(1_000_000 + 1000 * self.events.len() as u64);
        self.events.push(Event { time, tgid: PID, tid, kind });
        self
    }

    pub fn op(&mut self, name: &str) -> &mut Self {
        self.push(MAIN, EventKind::Op { name: Arc::from(name) })
    }

    pub fn launch(&mut self) -> &mut Self {
        self.push(MAIN, EventKind::Launch { name: None, stream: Some(1) })
    }

    pub fn alloc(&mut self, ptr: u64, size: u64) -> &mut Self {
        self.alloc_on(0, ptr, size)
    }

    pub fn alloc_on(&mut self, device: u16, ptr: u64, size: u64) -> &mut Self {
        self.alloc_in(Pool::Pta, device, ptr, size, None)
    }

    pub fn alloc_in(
        &mut self,
        pool: Pool,
        device: u16,
        ptr: u64,
        size: u64,
        totals: Option<(u64, u64)>,
    ) -> &mut Self {
        let device = Some(DeviceId(device));
        let totals = totals.map(|(allocated, reserved)| Totals { allocated, reserved });
        let alloc = Alloc { pool, device, ptr: DevicePtr(ptr), size, totals, driver: None, stack: None };
        self.push(MAIN, EventKind::Alloc(alloc))
    }

    /// On a line of `train.py`, called through a package; or there is no stack.
    pub fn alloc_at(&mut self, line: Option<u32>, whose: Whose, ptr: u64, size: u64) -> &mut Self {
        match line {
            Some(line) => self.alloc_with(&[line, 99], whose, ptr, size),
            None => self.alloc(ptr, size),
        }
    }

    /// On these lines of `train.py`, innermost first.
    pub fn alloc_by(&mut self, lines: &[u32], ptr: u64, size: u64) -> &mut Self {
        self.alloc_with(lines, Whose::Own, ptr, size)
    }

    fn alloc_with(&mut self, lines: &[u32], whose: Whose, ptr: u64, size: u64) -> &mut Self {
        self.alloc(ptr, size);
        if let Some(Event { kind: EventKind::Alloc(alloc), .. }) = self.events.last_mut() {
            let frame = |file: &str, line, function: &str| Frame {
                function: Arc::from(function),
                file: Arc::from(file),
                line: Some(line),
            };
            let inner =
                frame("/usr/lib/python3/dist-packages/torch/nn/modules/module.py", 7, "Module.forward");
            let mut frames = vec![(inner, Origin::Framework)];
            frames.extend(lines.iter().map(|line| {
                let function = if *line == 99 { "<module>" } else { "main" };
                (frame("/home/me/project/train.py", *line, function), Origin::User)
            }));
            alloc.stack = Stack::new(frames, whose, false).map(Arc::new);
        }
        self
    }

    pub fn hal(&mut self, ptr: u64, size: u64, module: Module) -> &mut Self {
        self.hal_of(MAIN, ptr, size, module)
    }

    pub fn hal_of(&mut self, tid: Tid, ptr: u64, size: u64, module: Module) -> &mut Self {
        let driver = DriverAlloc {
            module: Some(module.0),
            page: Some(PageType::Huge),
            create: false,
            api: Some(("aclrtMalloc", size)),
        };
        let (pool, device) = (Pool::Hal, Some(DeviceId(0)));
        let alloc = Alloc {
            pool,
            device,
            ptr: DevicePtr(ptr),
            size,
            totals: None,
            driver: Some(driver),
            stack: None,
        };
        self.push(tid, EventKind::Alloc(alloc))
    }

    pub fn free(&mut self, ptr: u64) -> &mut Self {
        self.free_in(Pool::Pta, ptr, None)
    }

    pub fn free_in(&mut self, pool: Pool, ptr: u64, totals: Option<(u64, u64)>) -> &mut Self {
        let device = (pool != Pool::Hal).then_some(DeviceId(0));
        let totals = totals.map(|(allocated, reserved)| Totals { allocated, reserved });
        self.push(MAIN, EventKind::Free(Free { pool, device, ptr: DevicePtr(ptr), size: None, totals }))
    }

    pub fn fail(&mut self, tid: Tid, size: u64, asked: u64) -> &mut Self {
        let failed = AllocFailed {
            pool: Pool::Hal,
            function: "halMemAlloc",
            device: Some(DeviceId(0)),
            size,
            code: 6,
            api: Some(("aclrtMallocAlign32", asked)),
            stack: None,
        };
        self.push(tid, EventKind::AllocFailed(failed))
    }

    pub fn mark(&mut self, text: &str) -> &mut Self {
        self.mark_of(MAIN, text)
    }

    pub fn mark_of(&mut self, tid: Tid, text: &str) -> &mut Self {
        self.push(tid, EventKind::Mark { text: Arc::from(text), domain: None })
    }

    /// Begins a range and returns its id.
    pub fn range(&mut self, tid: Tid, text: &str) -> u64 {
        self.ranges += 1;
        let range = self.ranges;
        self.push(tid, EventKind::RangeBegin { range, text: Arc::from(text), domain: None });
        range
    }

    pub fn range_end(&mut self, tid: Tid, range: u64) -> &mut Self {
        self.push(tid, EventKind::RangeEnd { range: Some(range) })
    }

    /// One step on the main thread, with what happens in it.
    pub fn step(&mut self, body: impl FnOnce(&mut Script)) -> &mut Self {
        let range = self.range(MAIN, "step start");
        body(self);
        self.range_end(MAIN, range)
    }
}

/// The six steps of `tests/fixtures/leak6.tsv`.
pub fn leak6() -> Vec<Event> {
    let mut begun = 0;
    include_str!("../../../tests/fixtures/leak6.tsv")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let fields: Vec<&str> = line.split('\t').collect();
            let [_, time, event, what, ptr, size, reserved, allocated] = fields[..] else {
                panic!("eight fields: {line}");
            };
            let number = |text: &str| text.parse::<u64>().unwrap_or_else(|e| panic!("{text}: {e}"));
            let ptr = || DevicePtr(u64::from_str_radix(ptr.trim_start_matches("0x"), 16).unwrap_or_default());
            let pool = || if what == "HAL" { Pool::Hal } else { Pool::Pta };
            let totals = || {
                (reserved != "-").then(|| Totals { allocated: number(allocated), reserved: number(reserved) })
            };
            let device = Some(DeviceId(0));
            let kind = match event {
                "acl_init" => EventKind::AclInit,
                "acl_finalize" => EventKind::AclFinalize,
                "op" => EventKind::Op { name: Arc::from(what) },
                "range_begin" => {
                    begun += 1;
                    EventKind::RangeBegin { range: begun, text: Arc::from(what), domain: None }
                }
                "range_end" => EventKind::RangeEnd { range: Some(number(what)) },
                "malloc" => EventKind::Alloc(Alloc {
                    pool: pool(),
                    device,
                    ptr: ptr(),
                    size: number(size),
                    totals: totals(),
                    driver: None,
                    stack: None,
                }),
                "free" => EventKind::Free(Free {
                    pool: pool(),
                    device,
                    ptr: ptr(),
                    size: Some(number(size)),
                    totals: totals(),
                }),
                other => panic!("unknown event {other}"),
            };
            Event { time: Nanos(number(time)), tgid: Tgid(23999), tid: Tid(23999), kind }
        })
        .collect()
}
