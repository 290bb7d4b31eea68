//! Out of memory: what was asked, what was there, who held it.
//!
//! A program that is refused tries again: with another page size, after its pool has given back what it had
//! cached. Refusals of one request in a row on one thread are one out-of-memory with several attempts, and
//! the last attempt says how things stood. When the request succeeds in the end, nobody has noticed: it has
//! recovered. Anything else that the thread does meanwhile (an operator, a mark, a free of its own) shows that the
//! refusal has come back to the program; what it asks for then is another request.

use std::cmp::Reverse;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use serde::Serialize;

use crate::model::{
    AllocFailed, Block, Change, Count, DeviceId, Event, EventKind, Frame, FreeSpace, Ledger, Name, Nanos,
    Pool, PoolUse, Process, Stack, StepId, Tgid, Tid,
};

use super::Analysis;

/// Out-of-memories that are kept, per process: the first ones. The others are counted.
const KEPT: usize = 100;

/// Holders listed with each.
const HOLDERS_LISTED: usize = 20;

/// Live blocks listed with each, of the largest and of the latest, unless it is said otherwise.
const LISTED: usize = 10;

/// One out-of-memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Oom {
    pub pool: Pool,
    pub device: Option<DeviceId>,
    /// The function that refused, and what it returned.
    pub function: &'static str,
    pub code: i32,
    /// Bytes it was asked for.
    pub size: u64,
    /// The runtime function above it, and the bytes asked of that.
    pub api: Option<(&'static str, u64)>,
    pub tid: Tid,
    pub first: Nanos,
    pub last: Nanos,
    pub step: StepId,
    pub op: Option<Name>,
    /// Where in the program it was asked for, where that is known.
    pub stack: Option<Arc<Stack>>,
    pub attempts: u32,
    /// The request succeeded right after.
    pub recovered: bool,
    /// The device's pools at the last attempt.
    pub pools: Vec<(Pool, PoolUse)>,
    /// Who held the memory at the last attempt, most bytes first.
    pub holders: Vec<Holder>,
    /// Those that are not listed.
    pub other_holders: OtherHolders,
    /// Largest blocks at the last attempt, largest first. Segments are left out: their blocks are there.
    pub largest: Vec<Block>,
    /// The blocks allocated last, latest first.
    pub latest: Vec<Block>,
    /// What was free within the segments of pools.
    pub free: Vec<(Pool, FreeSpace)>,
}

/// Live blocks of a pool that one line of the program has allocated; of those of which that is not known, the ones around
/// one operator.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Holder {
    pub pool: Pool,
    pub place: Option<Frame>,
    /// Where the place is not known.
    pub op: Option<Name>,
    #[serde(flatten)]
    pub count: Count,
    /// Bytes of the largest.
    pub largest: u64,
}

/// Holders past those that are listed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct OtherHolders {
    pub holders: u64,
    #[serde(flatten)]
    pub count: Count,
}

impl Oom {
    /// Bytes that the program asked for.
    pub fn request(&self) -> u64 {
        self.api.map_or(self.size, |(_, asked)| asked)
    }
}

#[derive(Debug)]
pub struct OutOfMemory {
    listed: usize,
    /// By position in [`Ledger::processes`].
    processes: Vec<Failures>,
    /// The process's failure that a thread may still be trying to overcome.
    open: FxHashMap<(Tgid, Tid), Open>,
}

impl Default for OutOfMemory {
    fn default() -> Self {
        OutOfMemory::listing(LISTED)
    }
}

#[derive(Debug, Default)]
struct Failures {
    kept: Vec<Oom>,
    not_kept: Count,
}

#[derive(Debug, Clone, Copy)]
struct Open {
    /// Position in `kept`; `None` when it was not kept.
    at: Option<usize>,
    request: u64,
    size: u64,
}

impl Analysis for OutOfMemory {
    fn observe(&mut self, event: &Event, change: &Change, ledger: &Ledger) {
        match (&event.kind, change) {
            (EventKind::AllocFailed(failed), Change::Failed { device }) => {
                self.failed(event, failed, *device, ledger);
            }
            (EventKind::Alloc(alloc), _) if !self.open.is_empty() => {
                if let Some(open) = self.open.remove(&(event.tgid, event.tid)) {
                    let asked = alloc.driver.as_ref().and_then(|driver| driver.api).map(|(_, asked)| asked);
                    let same = asked == Some(open.request) || asked.is_none() && alloc.size == open.size;
                    if same && let Some(oom) = self.kept(event.tgid, open.at, ledger) {
                        oom.recovered = true;
                    }
                }
            }
            (EventKind::Exec | EventKind::Exit, _) => self.open.retain(|(tgid, _), _| *tgid != event.tgid),
            _ if self.open.is_empty() => {}
            (EventKind::Free(free), _) if is_driver(free.pool) && caches(event.tgid, ledger) => {}
            _ => {
                self.open.remove(&(event.tgid, event.tid));
            }
        }
    }
}

fn is_driver(pool: Pool) -> bool {
    matches!(pool, Pool::Hal | Pool::Host)
}

/// Whether a framework's pool stands between the program and the driver: then what is given back to the driver
/// after a refusal is the pool's cache, and the request goes on.
fn caches(tgid: Tgid, ledger: &Ledger) -> bool {
    let devices = ledger.process(tgid).map(Process::devices).unwrap_or_default();
    devices.iter().any(|d| Pool::ALL.into_iter().any(|pool| !is_driver(pool) && d.pool(pool).was_used()))
}

impl OutOfMemory {
    /// With so many of the largest and of the latest blocks.
    pub fn listing(blocks: usize) -> Self {
        OutOfMemory { listed: blocks, processes: Vec::new(), open: FxHashMap::default() }
    }

    /// Of the process at this position of [`Ledger::processes`], in order of time.
    pub fn of(&self, position: usize) -> &[Oom] {
        self.processes.get(position).map_or(&[], |failures| &failures.kept)
    }

    /// Those that there was no room for, with the bytes asked.
    pub fn not_kept(&self, position: usize) -> Count {
        self.processes.get(position).map(|failures| failures.not_kept).unwrap_or_default()
    }

    fn failed(&mut self, event: &Event, failed: &AllocFailed, device: Option<DeviceId>, ledger: &Ledger) {
        let Some(position) = ledger.position(event.tgid) else { return };
        let Some(process) = ledger.processes().get(position) else { return };
        let request = failed.api.map_or(failed.size, |(_, asked)| asked);
        let key = (event.tgid, event.tid);
        let again =
            self.open.get(&key).copied().filter(|open| open.request == request || open.size == failed.size);
        if self.processes.len() <= position {
            self.processes.resize_with(position + 1, Failures::default);
        }
        let listed = self.listed;
        let failures = &mut self.processes[position];

        let at = match again {
            Some(open) => open.at,
            None if failures.kept.len() < KEPT => Some(failures.kept.len()),
            None => {
                failures.not_kept.add(request);
                None
            }
        };
        self.open.insert(key, Open { at, request, size: failed.size });
        let Some(at) = at else { return };
        let before = failures.kept.get(at);
        let (holders, other_holders) = holders(process, device);
        let oom = Oom {
            pool: failed.pool,
            device,
            function: failed.function,
            code: failed.code,
            size: failed.size,
            api: failed.api.or(before.and_then(|oom| oom.api)),
            tid: event.tid,
            first: before.map_or(event.time, |oom| oom.first),
            last: event.time,
            step: process.steps().current(),
            op: process.current_op(event.tid).cloned(),
            stack: failed.stack.clone(),
            attempts: before.map_or(0, |oom| oom.attempts) + 1,
            recovered: false,
            pools: pools(process, device),
            holders,
            other_holders,
            largest: first(listed, process, device, |block| (Reverse(block.size), block.id)),
            latest: first(listed, process, device, |block| Reverse(block.id)),
            free: free(process, device),
        };
        match failures.kept.get_mut(at) {
            Some(kept) => *kept = oom,
            None => failures.kept.push(oom),
        }
    }

    fn kept(&mut self, tgid: Tgid, at: Option<usize>, ledger: &Ledger) -> Option<&mut Oom> {
        self.processes.get_mut(ledger.position(tgid)?)?.kept.get_mut(at?)
    }
}

fn pools(process: &Process, device: Option<DeviceId>) -> Vec<(Pool, PoolUse)> {
    let memory = process.device(device);
    Pool::ALL
        .into_iter()
        .filter_map(|pool| Some((pool, *memory?.pool(pool))))
        .filter(|(_, pool)| pool.was_used())
        .collect()
}

/// Segments are left out: their blocks are there.
fn blocks(process: &Process, device: Option<DeviceId>) -> impl Iterator<Item = &Block> {
    process.blocks().filter(move |block| block.device == device && block.segment_of.is_none())
}

/// A pool, and the line of the program; where that is not known, the operator.
type Held<'a> = (Pool, Result<&'a Frame, Option<&'a Name>>);

fn holders(process: &Process, device: Option<DeviceId>) -> (Vec<Holder>, OtherHolders) {
    let mut by_line: FxHashMap<Held<'_>, (Count, u64)> = FxHashMap::default();
    for block in blocks(process, device) {
        let place = block.place().ok_or(block.op.as_ref());
        let (count, largest) = by_line.entry((block.pool, place)).or_default();
        count.add(block.size);
        *largest = block.size.max(*largest);
    }
    let mut all: Vec<_> = by_line.into_iter().collect();
    all.sort_unstable_by_key(|(who, (count, _))| (Reverse(count.bytes), *who));
    let mut others = OtherHolders::default();
    for (_, (count, _)) in all.iter().skip(HOLDERS_LISTED) {
        others.holders += 1;
        others.count.blocks += count.blocks;
        others.count.bytes = others.count.bytes.saturating_add(count.bytes);
    }
    let listed = all.into_iter().take(HOLDERS_LISTED).map(|((pool, place), (count, largest))| Holder {
        pool,
        place: place.ok().cloned(),
        op: place.err().flatten().cloned(),
        count,
        largest,
    });
    (listed.collect(), others)
}

/// The first blocks in an order.
fn first<K: Ord>(
    most: usize,
    process: &Process,
    device: Option<DeviceId>,
    order: impl Fn(&Block) -> K,
) -> Vec<Block> {
    let mut blocks: Vec<&Block> = blocks(process, device).collect();
    if blocks.len() > most {
        blocks.select_nth_unstable_by_key(most, |block| order(block));
        blocks.truncate(most);
    }
    blocks.sort_unstable_by_key(|block| order(block));
    blocks.into_iter().cloned().collect()
}

fn free(process: &Process, device: Option<DeviceId>) -> Vec<(Pool, FreeSpace)> {
    let pools = Pool::ALL.into_iter().filter(|pool| !is_driver(*pool));
    pools.filter_map(|pool| Some((pool, process.free_space(pool, device)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::Online;
    use crate::model::testing::{MAIN, MIB, Script};
    use crate::model::{Alloc, DevicePtr, DriverAlloc, Module, Origin, PageType, StepRule, Whose};

    const WORKER: Tid = Tid(101);

    fn fed(script: &Script) -> Online {
        let mut online = Online::new(StepRule::default(), false);
        for event in &script.events {
            online.apply(event);
        }
        online
    }

    #[test]
    fn refusals_of_one_request_are_one_out_of_memory() {
        let mut script = Script::new();
        script.op("aclnnMatmul").step(|s| {
            s.alloc_in(Pool::Pta, 0, 0x1000, 7 * MIB, Some((7 * MIB, 40 * MIB)));
            // Huge pages, then normal ones; then again when the pool has given back what it had cached.
            s.hal(0x4000_0000, 20 * MIB, Module::APP);
            s.fail(MAIN, 66 * MIB, 64 * MIB).fail(MAIN, 64 * MIB + 4096, 64 * MIB);
            s.free_in(Pool::Hal, 0x4000_0000, None);
            s.fail(MAIN, 66 * MIB, 64 * MIB);
        });
        let online = fed(&script);
        let [oom] = online.oom.of(0) else { panic!("{:?}", online.oom) };
        assert_eq!((oom.request(), oom.size, oom.attempts, oom.recovered), (64 * MIB, 66 * MIB, 3, false));
        assert_eq!(
            (oom.function, oom.code, oom.api),
            ("halMemAlloc", 6, Some(("aclrtMallocAlign32", 64 * MIB)))
        );
        assert_eq!((oom.step, oom.op.as_deref(), oom.tid), (StepId(1), Some("aclnnMatmul"), MAIN));
        assert_eq!((oom.first, oom.last), (script.events[4].time, script.events[7].time));
        let pools: Vec<_> =
            oom.pools.iter().map(|(pool, facts)| (*pool, facts.live_bytes, facts.used())).collect();
        assert_eq!(pools, [(Pool::Hal, 0, 0), (Pool::Pta, 7 * MIB, 7 * MIB)], "as the last attempt found it");
    }

    #[test]
    fn the_ten_largest_blocks_without_segments() {
        let mut script = Script::new();
        script.alloc_in(Pool::Pta, 0, 0x10, MIB, Some((MIB, MIB)));
        script.hal(0x4000_0000, 64 * MIB, Module::APP);
        script.alloc_in(Pool::Pta, 0, 0x4000_0000, 5 * MIB, Some((6 * MIB, 65 * MIB)));
        script.hal(0x8000_0000, 3 * MIB, Module::APP);
        for block in 1..=12 {
            script.alloc(0x10_0000 * block, block * 1024);
        }
        script.alloc_on(1, 0x1, 100 * MIB).fail(MAIN, MIB, MIB);
        let online = fed(&script);
        let largest: Vec<_> =
            online.oom.of(0)[0].largest.iter().map(|block| (block.pool, block.size)).collect();
        let mut expected = vec![(Pool::Pta, 5 * MIB), (Pool::Hal, 3 * MIB), (Pool::Pta, MIB)];
        expected.extend((6..=12).rev().map(|block| (Pool::Pta, block * 1024)));
        assert_eq!(largest, expected);
    }

    #[test]
    fn who_holds_the_memory_is_a_line_of_the_program() {
        let frame = |line| Frame { function: "main".into(), file: "train.py".into(), line: Some(line) };
        let stack = |line| Stack::new(vec![(frame(line), Origin::User)], Whose::Own, false).map(Arc::new);
        let mut script = Script::new();
        script.op("aclnnMm").alloc_in(Pool::Pta, 0, 0x10, MIB, Some((MIB, 64 * MIB)));
        for (n, line) in [7, 9, 7, 7].into_iter().enumerate() {
            let mut alloc = script.events[1].clone();
            let EventKind::Alloc(block) = &mut alloc.kind else { panic!("{alloc:?}") };
            (block.ptr, block.size, block.stack) = (DevicePtr(0x1000 * (n as u64 + 1)), 2 * MIB, stack(line));
            script.push(MAIN, alloc.kind);
        }
        script.fail(MAIN, 64 * MIB, 64 * MIB);
        let online = fed(&script);
        let oom = &online.oom.of(0)[0];
        let held: Vec<_> = oom
            .holders
            .iter()
            .map(|of| (of.place.as_ref().and_then(|place| place.line), of.op.as_deref(), of.count))
            .collect();
        let count = |blocks, mib| Count { blocks, bytes: mib * MIB };
        assert_eq!(
            held,
            [
                (Some(7), None, count(3, 6)),
                (Some(9), None, count(1, 2)),
                (None, Some("aclnnMm"), count(1, 1))
            ]
        );
        assert_eq!(oom.other_holders, OtherHolders::default());
    }

    #[test]
    fn many_holders_are_counted() {
        let mut script = Script::new();
        for n in 1..=HOLDERS_LISTED as u64 + 3 {
            script.op(&format!("aclnn{n}")).alloc(0x10_0000 * n, 512 * n);
        }
        script.fail(MAIN, MIB, MIB);
        let online = fed(&script);
        let oom = &online.oom.of(0)[0];
        assert_eq!((oom.holders.len(), oom.holders[0].count.bytes), (HOLDERS_LISTED, 512 * 23));
        let count = Count { blocks: 3, bytes: 512 * (1 + 2 + 3) };
        assert_eq!(oom.other_holders, OtherHolders { holders: 3, count });
    }

    #[test]
    fn what_is_free_is_told_with_the_largest_piece() {
        let mut script = Script::new();
        script.alloc_in(Pool::Pta, 0, 0x10, MIB, Some((MIB, MIB)));
        script.hal(0x4000_0000, 64 * MIB, Module::APP);
        script.alloc_in(Pool::Pta, 0, 0x4000_0000, 20 * MIB, Some((21 * MIB, 65 * MIB)));
        script.alloc_in(Pool::Pta, 0, 0x4000_0000 + 40 * MIB, 4 * MIB, Some((25 * MIB, 65 * MIB)));
        script.fail(MAIN, 32 * MIB, 30 * MIB);
        let online = fed(&script);
        let [oom] = online.oom.of(0) else { panic!("{:?}", online.oom) };
        let space = FreeSpace {
            segments: 1,
            segment_bytes: 64 * MIB,
            free_bytes: 40 * MIB,
            largest_free: 20 * MIB,
            pieces: 2,
            ..FreeSpace::default()
        };
        assert_eq!(oom.free, [(Pool::Pta, space)]);
        let latest: Vec<u64> = oom.latest.iter().map(|block| block.size / MIB).collect();
        assert_eq!(latest, [4, 20, 1], "latest first, without segments");
    }

    /// Physical memory, mapped in pieces at addresses that follow on one another.
    #[test]
    fn mapped_pieces_are_one_segment() {
        let mut script = Script::new();
        script.alloc_in(Pool::Pta, 0, 0x10, 512, Some((512, MIB)));
        for piece in 0..2 {
            let (handle, size) = (DevicePtr(0x77 + piece), 2 * MIB);
            let (module, page) = (Some(Module::APP.0), Some(PageType::Huge));
            let driver = Some(DriverAlloc { module, page, create: true, api: None });
            let (pool, device) = (Pool::Hal, Some(DeviceId(0)));
            let created = Alloc { pool, device, ptr: handle, size, totals: None, driver, stack: None };
            script.push(MAIN, EventKind::Alloc(created));
            script.push(MAIN, EventKind::Map { ptr: DevicePtr(0x8000_0000 + piece * size), size, handle });
        }
        script.alloc_in(Pool::Pta, 0, 0x8000_0000, MIB, Some((MIB + 512, 5 * MIB)));
        script.fail(MAIN, 8 * MIB, 8 * MIB);
        let online = fed(&script);
        let [(Pool::Pta, space)] = online.oom.of(0)[0].free[..] else { panic!("{:?}", online.oom) };
        assert_eq!((space.segments, space.free_bytes, space.largest_free), (1, 3 * MIB, 3 * MIB));
    }

    #[test]
    fn a_request_that_succeeds_in_the_end_has_recovered() {
        let mut script = Script::new();
        script.fail(MAIN, 66 * MIB, 64 * MIB).fail(WORKER, 8 * MIB, 8 * MIB).hal(
            0x1000,
            64 * MIB,
            Module::APP,
        );
        // Another request of the other thread.
        script.hal_of(WORKER, 0x2000, MIB, Module::APP);
        let online = fed(&script);
        let found: Vec<_> =
            online.oom.of(0).iter().map(|oom| (oom.tid, oom.attempts, oom.recovered)).collect();
        assert_eq!(found, [(MAIN, 1, true), (WORKER, 1, false)]);
    }

    #[test]
    fn a_success_or_another_size_separates() {
        let mut script = Script::new();
        script.fail(MAIN, 8 * MIB, 8 * MIB).alloc(0x1000, 512).fail(MAIN, 8 * MIB, 8 * MIB);
        script.fail(MAIN, 4 * MIB, 4 * MIB).fail(MAIN, 4 * MIB, 4 * MIB);
        let online = fed(&script);
        let found: Vec<_> = online.oom.of(0).iter().map(|oom| (oom.request() / MIB, oom.attempts)).collect();
        assert_eq!(found, [(8, 1), (8, 1), (4, 2)]);
    }

    #[test]
    fn a_storm_is_counted() {
        let mut script = Script::new();
        for size in 1..=KEPT as u64 + 5 {
            script.fail(MAIN, size, size).fail(MAIN, size, size);
        }
        let online = fed(&script);
        assert_eq!(online.oom.of(0).len(), KEPT);
        assert!(online.oom.of(0).iter().all(|oom| oom.attempts == 2));
        let bytes = (101..=105).sum();
        assert_eq!(online.oom.not_kept(0), Count { blocks: 5, bytes });
    }
}
