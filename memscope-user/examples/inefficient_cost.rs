//! What looking for inefficient memory costs: rows per second of one core, without reading them.
//!
//!     cargo run --release --example inefficient_cost

use std::sync::Arc;
use std::time::Instant;

use memscope::analysis::inefficient::{Config, Inefficient, Rules};
use memscope::dump::read::NumberedRow;
use memscope::dump::{Fact, Framework, Row};
use memscope::model::{
    Access, AccessKind, Alloc, AllocationId, DeviceId, DevicePtr, EventKind, Free, Name, Nanos, Pool, Tgid,
    Tid,
};

const ROWS: usize = 10_000_000;
/// Blocks alive: as many operators as that lie between allocation and free.
const LIVE: u64 = 20_000;

fn main() {
    let names: Vec<Name> = (0..200).map(|n| Arc::from(format!("aclnnOperator{n}"))).collect();
    for rules in [Rules::MEMSCOPE, Rules::DRGPUM] {
        let mut inefficient = Inefficient::new(Config::new(rules));
        let mut rows = 0;
        let mut spent = 0.0;
        let mut block = 0;
        let mut batch = Vec::new();
        while rows < ROWS {
            batch.clear();
            for _ in 0..1000 {
                block += 1;
                operator(block, &names[block as usize % names.len()], &mut batch);
            }
            let start = Instant::now();
            batch.iter().for_each(|row| inefficient.observe_row(row, &mut |_| {}));
            spent += start.elapsed().as_secs_f64();
            rows += batch.len();
        }
        let report = inefficient.report();
        let findings: u64 =
            report.pools.iter().flat_map(|pool| &pool.groups).map(|group| group.findings).sum();
        println!("{rules:?}: {:.1} million rows/s, {findings} findings", rows as f64 / spent / 1e6);
    }
}

fn operator(block: u64, name: &Name, rows: &mut Vec<NumberedRow>) {
    let mut push = |fact, id| {
        let mut row = Row::new(Nanos(block), Tgid(1), Tid(1), fact);
        row.device = Some(DeviceId(0));
        row.allocation_id = id;
        rows.push(NumberedRow { id: 0, file: 0, line: 0, negative_size: false, row });
    };
    let (framework, pool, device) = (Framework::Aten, Pool::Pta, None);
    let ptr = |block: u64| DevicePtr(block % (2 * LIVE) * 4096);
    push(Fact::OpBegin { framework, name: name.clone() }, None);
    let alloc = Alloc {
        pool,
        device,
        ptr: ptr(block),
        size: 512 * (1 + block % 300),
        totals: None,
        driver: None,
        stack: None,
    };
    push(Fact::Event(EventKind::Alloc(alloc)), Some(AllocationId(block)));
    // Its own block, one from shortly before, and one from the beginning of its time.
    for used in [block, block.saturating_sub(7), block.saturating_sub(LIVE - 1)] {
        if used > 0 {
            let (op, kind) = (Some(name.clone()), AccessKind::Read);
            let access = Access { pool: Some(pool), ptr: ptr(used), size: 512, kind, op };
            push(Fact::Event(EventKind::Access(access)), Some(AllocationId(used)));
        }
    }
    push(Fact::OpEnd { framework, name: name.clone() }, None);
    if block > LIVE {
        let free = Free { pool, device, ptr: ptr(block - LIVE), size: None, totals: None };
        push(Fact::Event(EventKind::Free(free)), Some(AllocationId(block - LIVE)));
    }
}
