use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::dump::{Framework, Row};
use crate::model::{Access, AccessKind, Alloc, Free};

/// What a program does. Blocks are known by their number.
#[derive(Debug, Clone)]
enum Act {
    Begin { tid: u32, op: &'static str },
    End { tid: u32 },
    Alloc { tid: u32, pool: Pool, block: u64, size: u64 },
    Access { tid: u32, pool: Pool, block: u64, kind: AccessKind },
    Free { tid: u32, pool: Pool, block: u64 },
}

const PID: Tgid = Tgid(7);

fn rows(acts: &[Act]) -> Vec<NumberedRow> {
    let ptr = |block: u64| DevicePtr(0x1000 * block);
    let mut ops: BTreeMap<u32, &str> = BTreeMap::new();
    let mut rows = Vec::new();
    for (index, act) in acts.iter().enumerate() {
        let (tid, fact, id) = match act.clone() {
            Act::Begin { tid, op } => {
                ops.insert(tid, op);
                (tid, Fact::OpBegin { framework: Framework::Aten, name: Arc::from(op) }, None)
            }
            Act::End { tid } => {
                let name = Arc::from(ops.get(&tid).copied().unwrap_or("?"));
                (tid, Fact::OpEnd { framework: Framework::Aten, name }, None)
            }
            Act::Alloc { tid, pool, block, size } => {
                let (ptr, device) = (ptr(block), Some(DeviceId(0)));
                let alloc = Alloc { pool, device, ptr, size, totals: None, driver: None, stack: None };
                (tid, Fact::Event(EventKind::Alloc(alloc)), Some(block))
            }
            Act::Access { tid, pool, block, kind } => {
                let access = Access { pool: Some(pool), ptr: ptr(block), size: 1, kind, op: None };
                (tid, Fact::Event(EventKind::Access(access)), Some(block))
            }
            Act::Free { tid, pool, block } => {
                let (ptr, device) = (ptr(block), Some(DeviceId(0)));
                let free = Free { pool, device, ptr, size: None, totals: None };
                (tid, Fact::Event(EventKind::Free(free)), Some(block))
            }
        };
        let mut row = Row::new(Nanos(1000 * index as u64), PID, Tid(tid), fact);
        row.allocation_id = id.map(AllocationId);
        rows.push(NumberedRow { id: index as u64, file: 0, line: 0, negative_size: false, row });
    }
    rows
}

fn analyse(acts: &[Act], config: &Config) -> (Vec<Finding>, Report) {
    let mut inefficient = Inefficient::new(config.clone());
    let mut findings = Vec::new();
    for row in rows(acts) {
        inefficient.observe_row(&row, &mut |finding| findings.push(finding.clone()));
    }
    inefficient.finish(&mut |finding| findings.push(finding.clone()));
    (findings, inefficient.report())
}

/// A finding without what follows from it.
type Plain = (Pattern, Option<&'static str>, u64, std::ops::Range<usize>, u64);

/// The rules once more, over all that happened: each block with the acts that were about it.
struct Oracle<'a> {
    acts: &'a [Act],
    pool: Pool,
    /// Of each act: its call, the operators begun before it, and those with its own.
    call: Vec<u64>,
    before: Vec<u64>,
    with: Vec<u64>,
    in_operator: Vec<bool>,
    /// Calls that allocated, and that freed, with the act that ended them.
    allocating: Vec<(u64, usize)>,
    freeing: Vec<(u64, usize)>,
    /// Bytes after each act.
    live: Vec<i64>,
}

impl<'a> Oracle<'a> {
    fn new(acts: &'a [Act], pool: Pool) -> Self {
        let mut oracle = Oracle {
            acts,
            pool,
            call: Vec::new(),
            before: Vec::new(),
            with: Vec::new(),
            in_operator: Vec::new(),
            allocating: Vec::new(),
            freeing: Vec::new(),
            live: Vec::new(),
        };
        let (mut calls, mut operators, mut live) = (0, 0, 0);
        // By thread: call and number of its operator, and what it did.
        let mut open: BTreeMap<u32, (u64, u64, bool, bool)> = BTreeMap::new();
        let mut sizes = BTreeMap::new();
        for (index, act) in acts.iter().enumerate() {
            let (mut call, mut before, mut with) = (0, operators, operators);
            let own = match act {
                Act::Begin { tid, .. } | Act::End { tid } => {
                    if let Some((call, _, allocated, freed)) = open.remove(tid) {
                        oracle.allocating.extend(allocated.then_some((call, index)));
                        oracle.freeing.extend(freed.then_some((call, index)));
                    }
                    if let Act::Begin { tid, .. } = act {
                        calls += 1;
                        operators += 1;
                        open.insert(*tid, (calls, operators, false, false));
                    }
                    None
                }
                Act::Alloc { tid, pool: of, .. }
                | Act::Access { tid, pool: of, .. }
                | Act::Free { tid, pool: of, .. } => (*of == pool).then_some(*tid),
            };
            if let Some(tid) = own {
                let (allocates, frees) = (matches!(act, Act::Alloc { .. }), matches!(act, Act::Free { .. }));
                match open.get_mut(&tid) {
                    Some((its_call, number, allocated, freed)) => {
                        (call, before, with) = (*its_call, *number - 1, *number);
                        *allocated |= allocates;
                        *freed |= frees;
                    }
                    None => {
                        calls += 1;
                        call = calls;
                        oracle.allocating.extend(allocates.then_some((call, index)));
                        oracle.freeing.extend(frees.then_some((call, index)));
                    }
                }
                match act {
                    Act::Alloc { block, size, .. } => {
                        sizes.insert(*block, *size);
                        live += *size as i64;
                    }
                    Act::Free { block, .. } => live -= sizes[block] as i64,
                    _ => {}
                }
            }
            oracle.in_operator.push(own.is_some_and(|tid| open.contains_key(&tid)));
            oracle.call.push(call);
            oracle.before.push(before);
            oracle.with.push(with);
            oracle.live.push(live);
        }
        oracle.call.push(calls);
        oracle.before.push(operators);
        oracle.with.push(operators);
        oracle
    }

    fn between(&self, from: usize, to: usize) -> u64 {
        self.before[to].saturating_sub(self.with[from])
    }

    /// The last such call that was over before an act.
    fn last(calls: &[(u64, usize)], before: usize) -> Option<u64> {
        calls.iter().filter(|(_, ended)| *ended < before).map(|(call, _)| *call).max()
    }

    fn findings(&self, config: &Config) -> Vec<Plain> {
        let end = self.acts.len();
        let mut found = Vec::new();
        let mut blocks: Vec<(u64, u64, Vec<usize>)> = Vec::new();
        for (index, act) in self.acts.iter().enumerate() {
            match act {
                Act::Alloc { pool, block, size, .. } if *pool == self.pool => {
                    blocks.push((*block, *size, vec![index]));
                }
                Act::Access { pool, block, .. } | Act::Free { pool, block, .. } if *pool == self.pool => {
                    let (.., events) = blocks.iter_mut().find(|(number, ..)| number == block).expect("alive");
                    events.push(index);
                }
                _ => {}
            }
        }
        let is_access = |at: usize| matches!(self.acts.get(at), Some(Act::Access { .. }));
        let is_free = |at: usize| matches!(self.acts.get(at), Some(Act::Free { .. }));
        let op = |alloc: usize| {
            let Act::Alloc { tid: own, .. } = &self.acts[alloc] else { unreachable!() };
            self.acts[..alloc].iter().rev().find_map(|act| match act {
                Act::Begin { tid, op } if tid == own => Some(*op),
                _ => None,
            })
        };
        let first_access = (0..end)
            .find(|at| matches!(&self.acts[*at], Act::Access { pool, .. } if *pool == self.pool))
            .unwrap_or(usize::MAX);
        for (block, size, events) in &blocks {
            if *size < config.min_bytes {
                continue;
            }
            let alloc = events[0];
            let mut find = |pattern, from: usize, to: usize| {
                if config.patterns.contains(&pattern) {
                    found.push((pattern, op(alloc), *block, from..to, *size));
                }
            };
            let mut accesses: Vec<usize> = events.iter().copied().filter(|at| is_access(*at)).collect();
            if matches!(config.rules, Rules::Memscope { .. }) && !self.in_operator[alloc] {
                accesses.insert(0, alloc);
            }
            let accesses = accesses;
            let free = events.iter().copied().find(|at| is_free(*at));
            match config.rules {
                Rules::Memscope { idle } => {
                    let first =
                        accesses.iter().find(|at| **at != alloc && self.call[**at] != self.call[alloc]);
                    if let Some(first) = first
                        && let Some(freed) = Self::last(&self.freeing, *first)
                        && self.call[alloc] < freed
                        && freed < self.call[*first]
                    {
                        find(Pattern::EarlyAllocation, alloc, *first);
                    }
                    for pair in accesses.windows(2) {
                        if self.call[pair[1]] - self.call[pair[0]].min(self.call[pair[1]]) > idle {
                            find(Pattern::TemporaryIdleness, pair[0], pair[1]);
                        }
                    }
                    if let (Some(free), Some(last)) = (free, accesses.last())
                        && first_access < free
                        && let Some(allocated) = Self::last(&self.allocating, free)
                        && self.call[*last] < allocated
                        && allocated < self.call[free]
                    {
                        find(Pattern::LateDeallocation, *last, free);
                    }
                }
                Rules::Drgpum { early, late, idle } => {
                    if let Some(first) = accesses.first()
                        && self.between(alloc, *first) >= early
                    {
                        find(Pattern::EarlyAllocation, alloc, *first);
                    }
                    for pair in accesses.windows(2) {
                        if self.between(pair[0], pair[1]) >= idle {
                            find(Pattern::TemporaryIdleness, pair[0], pair[1]);
                        }
                    }
                    match (accesses.last(), free) {
                        (Some(last), Some(free)) if self.between(*last, free) >= late => {
                            find(Pattern::LateDeallocation, *last, free);
                        }
                        (Some(last), None) if self.between(*last, end) > 0 => find(Pattern::Leak, *last, end),
                        (None, free) if first_access < free.unwrap_or(end) => {
                            find(Pattern::UnusedAllocation, alloc, free.unwrap_or(end));
                        }
                        _ => {}
                    }
                }
            }
        }
        if config.patterns.contains(&Pattern::RedundantAllocation) {
            found.extend(self.redundant(config, &blocks, op));
        }
        found
    }

    fn redundant(
        &self,
        config: &Config,
        blocks: &[(u64, u64, Vec<usize>)],
        op: impl Fn(usize) -> Option<&'static str>,
    ) -> Vec<Plain> {
        let mut taken = Vec::new();
        let mut found = Vec::new();
        for (free, act) in self.acts.iter().enumerate() {
            let Act::Free { pool, block, .. } = act else { continue };
            let Some((_, size, events)) = blocks.iter().find(|(number, ..)| number == block) else {
                continue;
            };
            let [_, .., used, _] = events[..] else { continue };
            if *pool != self.pool || *size < config.min_bytes {
                continue;
            }
            let other = blocks.iter().find(|(number, other_size, events)| {
                other_size == size
                    && events[0] < free
                    && self.call[events[0]] > self.call[used]
                    && !taken.contains(number)
            });
            let Some((number, _, events)) = other else { continue };
            taken.push(*number);
            let freed = events.iter().copied().find(|at| matches!(self.acts[*at], Act::Free { .. }));
            let until = freed.unwrap_or(free).min(free);
            found.push((Pattern::RedundantAllocation, op(events[0]), *number, events[0]..until, *size));
        }
        found
    }

    fn peak(&self, found: &[&Plain]) -> u64 {
        let without = |(at, live): (usize, &i64)| {
            let wasted: u64 =
                found.iter().filter(|(.., range, _)| range.contains(&at)).map(|(.., size)| size).sum();
            live - wasted as i64
        };
        self.live.iter().enumerate().map(without).max().unwrap_or(0).max(0) as u64
    }
}

/// Programs that free only what they allocated.
fn any_program() -> impl Strategy<Value = Vec<Act>> {
    let choice = (0..10u8, 0..2u32, any::<prop::sample::Index>(), 1..7u64);
    prop::collection::vec(choice, 0..70).prop_map(|choices| {
        let mut alive: Vec<(u64, Pool)> = Vec::new();
        let mut last = 0;
        let mut acts = Vec::new();
        for (what, tid, which, size) in choices {
            let some = (!alive.is_empty()).then(|| which.index(alive.len()));
            acts.push(match (what, some) {
                (0..2, _) => Act::Begin { tid, op: ["aclnnAdd", "aclnnMm", "aclnnCat"][which.index(3)] },
                (2, _) => Act::End { tid },
                (3..8, Some(some)) if what < 6 => {
                    let (block, pool) = alive[some];
                    let kind = if size < 5 { AccessKind::Read } else { AccessKind::Write };
                    Act::Access { tid, pool, block, kind }
                }
                (6..8, Some(some)) => {
                    let (block, pool) = alive.swap_remove(some);
                    Act::Free { tid, pool, block }
                }
                _ => {
                    last += 1;
                    let pool = if which.index(4) == 0 { Pool::Atb } else { Pool::Pta };
                    alive.push((last, pool));
                    Act::Alloc { tid, pool, block: last, size }
                }
            });
        }
        acts
    })
}

fn any_config() -> impl Strategy<Value = Config> {
    let rules = prop_oneof![
        (0..5u64).prop_map(|idle| Rules::Memscope { idle }),
        (1..4u64, 1..4u64, 1..4u64).prop_map(|(early, late, idle)| Rules::Drgpum { early, late, idle }),
    ];
    (rules, prop_oneof![Just(0), 0..7u64]).prop_map(|(rules, min_bytes)| {
        let mut config = Config { min_bytes, ..Config::new(rules) };
        // Has a test of its own.
        config.patterns.retain(|pattern| *pattern != Pattern::DeadWrite);
        config
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_rules_hold_for_any_program(acts in any_program(), config in any_config()) {
        let (findings, report) = analyse(&acts, &config);
        for pool in [Pool::Pta, Pool::Atb] {
            let oracle = Oracle::new(&acts, pool);
            let mut expected = oracle.findings(&config);
            let time = |at: usize| acts.len().saturating_sub(1).min(at) as u64 * 1000;
            let mut found: Vec<_> = findings
                .iter()
                .filter(|finding| finding.pool == pool)
                .map(|f| {
                    let id = f.allocation_id.map_or(0, |id| id.0);
                    let times = (f.from.timestamp_ns.0, f.to.timestamp_ns.0);
                    (f.pattern, f.op.as_deref().map(str::to_owned), id, times, f.size, f.operators)
                })
                .collect();
            let mut wanted: Vec<_> = expected
                .iter()
                .map(|(pattern, op, id, range, size)| {
                    let operators = oracle.between(range.start, range.end);
                    let times = (time(range.start), time(range.end));
                    (*pattern, op.map(str::to_owned), *id, times, *size, operators)
                })
                .collect();
            found.sort();
            wanted.sort();
            prop_assert_eq!(found, wanted);

            let Some(report) = report.pools.iter().find(|report| report.pool == pool) else { continue };
            prop_assert_eq!(report.peak_bytes, oracle.peak(&[]));
            for group in &report.groups {
                let members: Vec<&Plain> = expected
                    .iter()
                    .filter(|(pattern, op, ..)| *pattern == group.pattern && *op == group.op.as_deref())
                    .collect();
                prop_assert_eq!(group.findings, members.len() as u64);
                prop_assert_eq!(group.peak_without, oracle.peak(&members), "{:?}", group);
                for example in &group.examples {
                    let id = example.allocation_id.map_or(0, |id| id.0);
                    let times = (example.from.timestamp_ns.0, example.to.timestamp_ns.0);
                    let one = members.iter().find(|(_, _, member, range, _)| {
                        *member == id && (time(range.start), time(range.end)) == times
                    });
                    let expected = one.map(|one| oracle.peak(&[one]));
                    prop_assert_eq!(example.peak_without, expected, "{:?}", example);
                }
            }
            expected.retain(|(pattern, ..)| *pattern != Pattern::RedundantAllocation);
            prop_assert_eq!(report.peak_without, oracle.peak(&expected.iter().collect::<Vec<_>>()));
        }
    }
}

/// Begins and ends an operator, with accesses by it: kind, block, first byte, bytes.
fn op(rows: &mut Vec<NumberedRow>, name: &str, accesses: &[(AccessKind, u64, u64, u64)]) {
    let name: Name = Arc::from(name);
    let begin = Fact::OpBegin { framework: Framework::Aten, name: name.clone() };
    let accesses = accesses.iter().map(|(kind, block, offset, size)| {
        let ptr = DevicePtr(0x1000 * block + offset);
        let op = Some(name.clone());
        Fact::Event(EventKind::Access(Access { pool: Some(Pool::Pta), ptr, size: *size, kind: *kind, op }))
    });
    let end = Fact::OpEnd { framework: Framework::Aten, name: name.clone() };
    for fact in std::iter::once(begin).chain(accesses).chain([end]) {
        let row = Row::new(Nanos(1000 * rows.len() as u64), PID, Tid(1), fact);
        rows.push(NumberedRow { id: 0, file: 0, line: 0, negative_size: false, row });
    }
}

fn alloc_and_free(rows: &mut Vec<NumberedRow>, acts: &[Act]) {
    for mut numbered in self::rows(acts) {
        numbered.row.time = Nanos(1000 * rows.len() as u64);
        rows.push(numbered);
    }
}

fn names_of(rows: &[NumberedRow], config: Config) -> Vec<(&'static str, u64)> {
    let mut inefficient = Inefficient::new(config);
    let mut found = Vec::new();
    for row in rows {
        inefficient.observe_row(row, &mut |finding| {
            found.push((finding.pattern.name(), finding.allocation_id.map_or(0, |id| id.0)));
        });
    }
    found
}

#[test]
fn what_is_initialised_twice_is_written_in_vain() {
    const WRITE: AccessKind = AccessKind::Write;
    let alloc = |block| Act::Alloc { tid: 1, pool: Pool::Pta, block, size: 0x800 };
    let dead = |between: &[(&str, AccessKind, u64, u64)]| {
        let mut rows = Vec::new();
        alloc_and_free(&mut rows, &[alloc(1)]);
        op(&mut rows, "aclnnInplaceZero", &[(WRITE, 1, 0, 0x700), (WRITE, 1, 0, 0x700)]);
        for (name, kind, offset, size) in between {
            op(&mut rows, name, &[(*kind, 1, *offset, *size)]);
        }
        op(&mut rows, "aclnnInplaceCopy", &[(WRITE, 1, 0, 0x700)]);
        let config = Config { patterns: vec![Pattern::DeadWrite], ..Config::new(Rules::DRGPUM) };
        names_of(&rows, config) == [("dead_write", 1)]
    };
    assert!(dead(&[]));
    assert!(!dead(&[("aclnnMm", AccessKind::Read, 0, 0x700)]));
    assert!(!dead(&[("aclnnInplaceAdd", WRITE, 0, 0x700)]), "reads what it adds to");
    assert!(!dead(&[("aclnnCast", AccessKind::Unknown, 0, 0x700)]));
    assert!(!dead(&[("aclnnInplaceFillScalar", WRITE, 0x100, 0x100)]), "another part");
}

#[test]
fn a_redundant_block_names_the_one_it_could_have_been() {
    let (pool, tid) = (Pool::Pta, 1);
    let alloc = |block, size| Act::Alloc { tid, pool, block, size };
    let access = |block| Act::Access { tid, pool, block, kind: AccessKind::Read };
    let free = |block| Act::Free { tid, pool, block };
    let acts = [
        alloc(1, 10),
        access(1),
        // One that could be 1, one that came too early, one of another size.
        alloc(2, 11),
        alloc(3, 10),
        alloc(4, 100),
        access(3),
        free(4),
        free(1),
        free(3),
    ];
    let config = Config { patterns: vec![Pattern::RedundantAllocation], ..Config::new(Rules::DRGPUM) };
    let (found, report) = analyse(&acts, &config);
    let [finding] = &found[..] else { panic!("{found:?}") };
    assert_eq!((finding.allocation_id, finding.instead_of), (Some(AllocationId(3)), Some(AllocationId(1))));
    assert_eq!((finding.from.call, finding.to.call), (4, 8));
    let [pool] = &report.pools[..] else { panic!("{report:?}") };
    assert_eq!((pool.peak_bytes, pool.groups[0].peak_without, pool.groups[0].saved_at_peak), (131, 121, 10));
}

#[test]
fn an_access_reported_after_its_operator_is_still_its_own() {
    let write = |block| (AccessKind::Write, block, 0, 8);
    let late = |rows: &mut Vec<NumberedRow>, name: &str| {
        op(rows, name, &[]);
        let mut inner = Vec::new();
        op(&mut inner, name, &[write(1), write(1)]);
        inner.pop();
        rows.extend(inner.into_iter().skip(1));
    };
    let mut rows = Vec::new();
    alloc_and_free(&mut rows, &[Act::Alloc { tid: 1, pool: Pool::Pta, block: 1, size: 8 }]);
    late(&mut rows, "aclnnAdd");
    op(&mut rows, "aclnnMul", &[]);
    late(&mut rows, "aclnnSub");
    let mut inefficient = Inefficient::new(Config::new(Rules::Memscope { idle: 1 }));
    let mut found = Vec::new();
    rows.iter().for_each(|row| inefficient.observe_row(row, &mut |finding| found.push(finding.clone())));
    let [idle] = &found[..] else { panic!("{found:?}") };
    // The allocation is call 1.
    assert_eq!((idle.from.call, idle.to.call, idle.operators), (2, 4, 1));
    assert_eq!(inefficient.report().pools[0].accesses, 4);
}

#[test]
fn an_access_finds_its_block_by_an_address_in_it() {
    let (pool, tid) = (Pool::Pta, 1);
    let mut rows = rows(&[
        Act::Alloc { tid, pool, block: 1, size: 0x100 },
        Act::Access { tid, pool, block: 1, kind: AccessKind::Read },
        Act::Access { tid, pool, block: 1, kind: AccessKind::Read },
        Act::Access { tid, pool, block: 1, kind: AccessKind::Read },
    ]);
    for (row, offset) in rows[1..].iter_mut().zip([0xff, 0, 0x100]) {
        row.row.allocation_id = None;
        if let Fact::Event(EventKind::Access(access)) = &mut row.row.fact {
            access.ptr.0 += offset;
            access.pool = None;
        }
    }
    let mut inefficient = Inefficient::new(Config::new(Rules::MEMSCOPE));
    rows.iter().for_each(|row| inefficient.observe_row(row, &mut |_| {}));
    assert_eq!(inefficient.report().pools[0].accesses, 2);
}

#[test]
fn where_no_access_is_seen_nothing_is_said() {
    let (pool, tid) = (Pool::Pta, 1);
    let acts = [Act::Alloc { tid, pool, block: 1, size: 9 }, Act::Free { tid, pool, block: 1 }];
    let (found, report) = analyse(&acts, &Config::new(Rules::DRGPUM));
    assert!(found.is_empty() && report.pools.is_empty(), "{found:?} {report:?}");
}

/// The rules of msMemScope take it to be used where it is allocated; that nothing else used it is told.
#[test]
fn what_was_never_used_is_told_from_what_was() {
    let (pool, tid) = (Pool::Pta, 1);
    let alloc = |block| Act::Alloc { tid, pool, block, size: 9 };
    let used = |block| Act::Access { tid, pool, block, kind: AccessKind::Read };
    let free = |block| Act::Free { tid, pool, block };
    let acts = [alloc(1), alloc(2), used(2), alloc(3), free(1), free(2), free(3)];
    let config = Config { patterns: vec![Pattern::LateDeallocation], ..Config::new(Rules::MEMSCOPE) };
    let late: Vec<_> = analyse(&acts, &config)
        .0
        .iter()
        .filter_map(|found| Some((found.allocation_id?.0, found.from_allocation)))
        .collect();
    assert_eq!(late, [(1, true), (2, false)]);
}

/// What operators use of it are the pool's blocks.
#[test]
fn a_segment_of_a_pool_is_not_unused() {
    let tid = 1;
    let alloc = |pool, block, size| Act::Alloc { tid, pool, block, size };
    let free = |pool, block| Act::Free { tid, pool, block };
    let (hal, pta) = (Pool::Hal, Pool::Pta);
    let used = Act::Access { tid, pool: hal, block: 5, kind: AccessKind::Read };
    let acts = [
        alloc(hal, 1, 0x3000),
        alloc(hal, 5, 10),
        used,
        alloc(hal, 7, 10),
        alloc(pta, 2, 10),
        free(pta, 2),
        free(hal, 1),
        free(hal, 7),
        free(hal, 5),
    ];
    let config = Config { patterns: vec![Pattern::UnusedAllocation], ..Config::new(Rules::DRGPUM) };
    let unused: Vec<_> = analyse(&acts, &config).0.iter().map(|found| found.allocation_id).collect();
    assert_eq!(unused, [Some(AllocationId(7))]);
}

#[test]
fn what_is_kept_does_not_grow_with_the_stream() {
    let kept = |rounds: u64| {
        let mut inefficient = Inefficient::new(Config::new(Rules::DRGPUM));
        for block in 1..rounds {
            let (pool, tid) = (Pool::Pta, 1);
            let mut acts = vec![
                Act::Begin { tid, op: "aclnnAdd" },
                Act::Alloc { tid, pool, block, size: 1 + block % 5 },
                Act::End { tid },
                Act::Begin { tid, op: "aclnnMm" },
                Act::Access { tid, pool, block, kind: AccessKind::Read },
                Act::End { tid },
            ];
            if block > 3 {
                acts.push(Act::Free { tid, pool, block: block - 3 });
            }
            rows(&acts).iter().for_each(|row| inefficient.observe_row(row, &mut |_| {}));
        }
        inefficient.processes[0].spans()
    };
    assert!(kept(1000) > 0 && kept(1000) == kept(3000));
}
