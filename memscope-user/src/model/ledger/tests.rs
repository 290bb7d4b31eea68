use super::*;
use crate::model::testing::{MAIN, MIB, PID, Script};
use crate::model::{DriverAlloc, PageType};

const WORKER: Tid = Tid(101);
const DEVICE: Option<DeviceId> = Some(DeviceId(0));

fn fed(script: &Script) -> (Ledger, Vec<Change>) {
    let mut ledger = Ledger::default();
    let changes = script.events.iter().map(|event| ledger.apply(event)).collect();
    (ledger, changes)
}

fn process(ledger: &Ledger) -> &Process {
    ledger.process(PID).unwrap_or_else(|| panic!("no process"))
}

fn block(process: &Process, pool: Pool, ptr: u64) -> &Block {
    process.find(pool, DevicePtr(ptr)).unwrap_or_else(|| panic!("no block at {ptr:x}"))
}

fn pool(ledger: &Ledger, device: Option<DeviceId>, pool: Pool) -> PoolUse {
    *process(ledger).device(device).unwrap_or_else(|| panic!("no device")).pool(pool)
}

#[test]
fn a_block_says_where_it_comes_from() {
    let mut script = Script::new();
    script.launch().op("aclnnAdd").step(|s| {
        s.launch().op("aclnnMul").alloc_in(Pool::Pta, 3, 0x1000, 512, Some((512, 2 * MIB)));
    });
    script.push(
        WORKER,
        EventKind::Alloc(Alloc {
            pool: Pool::Pta,
            device: None,
            ptr: DevicePtr(0x2000),
            size: 1024,
            totals: None,
            driver: None,
            stack: None,
        }),
    );
    let (ledger, _) = fed(&script);
    let first = block(process(&ledger), Pool::Pta, 0x1000);
    assert_eq!(
        *first,
        Block {
            id: AllocationId(1),
            pool: Pool::Pta,
            device: Some(DeviceId(3)),
            ptr: DevicePtr(0x1000),
            size: 512,
            time: script.events[5].time,
            tid: MAIN,
            step: StepId(1),
            op: Some("aclnnMul".into()),
            kernel_index: 2,
            driver: None,
            segment_of: None,
            stack: None,
        }
    );
    // After the end of step 1 and before the next beginning; on a thread without an operator; the process
    // has one device.
    let second = block(process(&ledger), Pool::Pta, 0x2000);
    assert_eq!((second.id, second.step, &second.op), (AllocationId(2), StepId(1), &None));
    assert_eq!(second.device, Some(DeviceId(3)));
}

#[test]
fn sums_and_peaks_follow_the_blocks() {
    let mut script = Script::new();
    script.alloc_in(Pool::Pta, 0, 0x1000, 100, Some((1100, 4096))).alloc(0x2000, 50).free(0x1000);
    script.free_in(Pool::Pta, 0x2000, Some((1000, 4096))).alloc(0x3000, 10);
    let (ledger, changes) = fed(&script);
    let pta = pool(&ledger, DEVICE, Pool::Pta);
    assert_eq!((pta.live_bytes, pta.peak_bytes, pta.blocks), (10, 150, 1));
    assert_eq!(pta.totals, Some(Totals { allocated: 1000, reserved: 4096 }));
    assert_eq!((pta.peak_allocated, pta.used()), (1100, 1000));
    assert!(matches!(&changes[2], Change::Freed(block) if block.ptr == DevicePtr(0x1000)));
}

#[test]
fn frees_of_what_was_there_before_attach_are_counted() {
    let mut script = Script::new();
    script.free(0x9000).push(
        MAIN,
        EventKind::Free(Free {
            pool: Pool::Pta,
            device: DEVICE,
            ptr: DevicePtr(0xa000),
            size: Some(4096),
            totals: Some(Totals { allocated: 5, reserved: 10 }),
        }),
    );
    let (ledger, changes) = fed(&script);
    assert_eq!(process(&ledger).unknown_frees(Pool::Pta), Count { blocks: 2, bytes: 4096 });
    assert_eq!(changes[1], Change::UnknownFree { pool: Pool::Pta, device: DEVICE, size: Some(4096) });
    let pta = pool(&ledger, DEVICE, Pool::Pta);
    assert_eq!((pta.live_bytes, pta.used()), (0, 5), "the allocator's totals are known all the same");
}

#[test]
fn an_address_handed_out_again_closes_the_block_that_was_there() {
    let mut script = Script::new();
    script.alloc(0x1000, 100).alloc(0x1000, 60);
    let (ledger, changes) = fed(&script);
    assert!(
        matches!(&changes[1], Change::Allocated { replaced: Some(old), .. } if old.id == AllocationId(1))
    );
    let pta = pool(&ledger, DEVICE, Pool::Pta);
    assert_eq!((pta.live_bytes, pta.peak_bytes, pta.blocks), (60, 100, 1));
    assert_eq!(process(&ledger).lost_frees(Pool::Pta), Count { blocks: 1, bytes: 100 });
    assert_eq!(block(process(&ledger), Pool::Pta, 0x1000).id, AllocationId(2));
}

#[test]
fn pools_do_not_share_addresses_but_nest() {
    let mut script = Script::new();
    script.hal(0x20_0000, 20 * MIB, Module::APP).alloc(0x20_0000, MIB).free(0x20_0000);
    let (ledger, _) = fed(&script);
    assert_eq!(pool(&ledger, DEVICE, Pool::Hal).live_bytes, 20 * MIB);
    assert_eq!(pool(&ledger, DEVICE, Pool::Pta).live_bytes, 0);
}

#[test]
fn a_workspace_reported_twice_is_one_block() {
    let mut script = Script::new();
    let workspace = Pool::PtaWorkspace;
    script.alloc_in(workspace, 0, 0x1000, 4096, Some((0, 4096)));
    script.alloc_in(workspace, 0, 0x1000, 1000, Some((1000, 4096)));
    script.alloc_in(workspace, 0, 0x1000, 5000, Some((5000, 5000)));
    let (ledger, changes) = fed(&script);
    assert!(matches!(changes[1], Change::Reported(_)));
    let facts = pool(&ledger, DEVICE, workspace);
    assert_eq!((facts.live_bytes, facts.peak_bytes, facts.blocks), (5000, 5000, 1));
    assert_eq!(facts.totals, Some(Totals { allocated: 5000, reserved: 5000 }));
    assert_eq!(process(&ledger).lost_frees(workspace), Count::default());

    script.free_in(workspace, 0x1000, Some((0, 5000)));
    let (ledger, _) = fed(&script);
    assert_eq!(pool(&ledger, DEVICE, workspace).blocks, 0);
}

#[test]
fn the_device_is_the_events_or_the_threads_or_the_only_one() {
    let mut script = Script::new();
    let bare = |pool, ptr| {
        let (ptr, size) = (DevicePtr(ptr), 1);
        EventKind::Alloc(Alloc { pool, device: None, ptr, size, totals: None, driver: None, stack: None })
    };
    script.push(MAIN, bare(Pool::Hal, 0x1));
    script.push(MAIN, EventKind::DeviceSet { device: DeviceId(1) });
    script.push(WORKER, bare(Pool::Hal, 0x2));
    script.push(WORKER, EventKind::DeviceSet { device: DeviceId(2) });
    script.push(MAIN, bare(Pool::Hal, 0x3)).push(WORKER, bare(Pool::Hal, 0x4));
    script.push(Tid(103), bare(Pool::Hal, 0x5)).push(MAIN, bare(Pool::Host, 0x6));
    script.alloc_on(7, 0x7, 1);
    let (ledger, _) = fed(&script);
    let device = |pool, ptr| block(process(&ledger), pool, ptr).device.map(|device| device.0);
    let hal: Vec<_> = (1..=5).map(|ptr| device(Pool::Hal, ptr)).collect();
    assert_eq!(hal, [None, Some(1), Some(1), Some(2), None]);
    assert_eq!(device(Pool::Host, 0x6), None, "host memory is on no device");
    assert_eq!(device(Pool::Pta, 0x7), Some(7));
}

#[test]
fn the_driver_frees_host_memory_by_its_address_too() {
    let mut script = Script::new();
    let alloc = Alloc {
        pool: Pool::Host,
        device: None,
        ptr: DevicePtr(0x1000),
        size: 64,
        totals: None,
        driver: None,
        stack: None,
    };
    script.push(MAIN, EventKind::Alloc(alloc)).free_in(Pool::Hal, 0x1000, None);
    let (ledger, changes) = fed(&script);
    assert!(matches!(&changes[1], Change::Freed(block) if block.pool == Pool::Host));
    assert_eq!(pool(&ledger, None, Pool::Host).live_bytes, 0);
}

#[test]
fn a_reset_takes_the_drivers_blocks_of_that_device() {
    let mut script = Script::new();
    script.hal(0x1000, 100, Module::APP).hal(0x2000, 200, Module::RUNTIME).alloc(0x1000, 10);
    script.alloc_in(Pool::Hal, 1, 0x3000, 300, None);
    script.push(MAIN, EventKind::DeviceReset { device: DeviceId(0) });
    let (ledger, changes) = fed(&script);
    let Some(Change::Reset { device: DeviceId(0), blocks }) = changes.last() else { panic!("{changes:?}") };
    assert_eq!(blocks.iter().map(|block| block.ptr.0).collect::<Vec<_>>(), [0x1000, 0x2000]);
    assert_eq!(pool(&ledger, DEVICE, Pool::Hal).live_bytes, 0);
    assert_eq!(pool(&ledger, DEVICE, Pool::Pta).live_bytes, 10);
    assert_eq!(pool(&ledger, Some(DeviceId(1)), Pool::Hal).live_bytes, 300);
    let memory = process(&ledger).device(DEVICE).map(DeviceMemory::while_used);
    assert_eq!(memory.map(|memory| memory.pool(Pool::Hal).live_bytes), Some(300));
}

/// torch_npu's `empty_cache` at exit, before the device is reset; blocks are freed after that.
#[test]
fn a_pools_total_is_less_what_it_has_given_back() {
    let mut script = Script::new();
    script.alloc_in(Pool::Pta, 0, 0x10, 1, Some((MIB, 30 * MIB)));
    for segment in [0x4000_0000, 0x5000_0000] {
        script.hal(segment, 20 * MIB, Module::APP);
        let reserved = if segment == 0x4000_0000 { 50 * MIB } else { 70 * MIB };
        script.alloc_in(Pool::Pta, 0, segment, 12 * MIB, Some((20 * MIB, reserved)));
    }
    script.free_in(Pool::Hal, 0x5000_0000, None);
    let reserved = |memory: &DeviceMemory| memory.pool(Pool::Pta).totals.map(|totals| totals.reserved);
    let memory = |ledger: &Ledger| process(ledger).device(DEVICE).cloned().unwrap_or_default();
    let (ledger, _) = fed(&script);
    assert_eq!(reserved(&memory(&ledger)), Some(50 * MIB));

    script.push(MAIN, EventKind::DeviceReset { device: DeviceId(0) });
    script.free_in(Pool::Pta, 0x4000_0000, Some((8 * MIB, 50 * MIB)));
    let (ledger, _) = fed(&script);
    let memory = memory(&ledger);
    let used = memory.while_used();
    assert_eq!((used.pool(Pool::Pta).blocks, reserved(used)), (3, Some(50 * MIB)));
    assert_eq!(used.driver.segments_of(Pool::Pta), 20 * MIB);
}

#[test]
fn a_process_ends_once_and_another_may_take_its_id() {
    for (kind, how) in [(EventKind::Exit, Ending::Exit), (EventKind::Exec, Ending::Exec)] {
        let mut script = Script::new();
        script.range(MAIN, "step start");
        script.alloc(0x1000, 100).alloc(0x2000, 50).push(MAIN, kind).alloc(0x1000, 7);
        let (ledger, changes) = fed(&script);
        let Change::Ended { how: told, blocks } = &changes[3] else { panic!("{changes:?}") };
        assert_eq!((*told, blocks.len()), (how, 2));
        let [first, second] = ledger.processes() else { panic!("{:?}", ledger.processes()) };
        assert_eq!((first.ended(), first.blocks().count()), (Some(how), 0));
        let pta = first.device(DEVICE).map(|memory| *memory.pool(Pool::Pta)).unwrap_or_default();
        assert_eq!((pta.live_bytes, pta.blocks), (150, 2), "what was alive at the end");
        assert_eq!(
            (second.ended(), second.last_id(), second.steps().current()),
            (None, AllocationId(1), StepId(0))
        );
        assert_eq!(ledger.position(PID), Some(1));
    }
}

fn segment_of(ledger: &Ledger, ptr: u64) -> Option<Pool> {
    block(process(ledger), Pool::Hal, ptr).segment_of
}

#[test]
fn a_segment_is_what_a_pool_grew_by_on_the_same_thread() {
    let mut script = Script::new();
    script.alloc_in(Pool::Pta, 0, 0x10_0000, MIB, Some((MIB, 20 * MIB)));
    script.hal(0x7000_0000, 64 * MIB, Module::APP).hal(0x6000_0000, MIB, Module::RUNTIME);
    script.hal_of(WORKER, 0x5000_0000, 20 * MIB, Module::APP);
    script.hal(0x4000_0000, 20 * MIB, Module::APP);
    script.alloc_in(Pool::Pta, 0, 0x11_0000, MIB, Some((2 * MIB, 40 * MIB)));
    let (ledger, _) = fed(&script);
    assert_eq!(segment_of(&ledger, 0x4000_0000), Some(Pool::Pta));
    assert_eq!(segment_of(&ledger, 0x5000_0000), None, "another thread's");
    assert_eq!(segment_of(&ledger, 0x6000_0000), None, "the runtime's own");
    assert_eq!(segment_of(&ledger, 0x7000_0000), None, "taken before, larger than the growth");
    let driver = process(&ledger).device(DEVICE).map(|memory| memory.driver.clone()).unwrap_or_default();
    assert_eq!(driver.segments_of(Pool::Pta), 20 * MIB);
    assert_eq!(driver.modules, [(Some(Module::APP), 104 * MIB), (Some(Module::RUNTIME), MIB)]);

    // A pool event that grew nothing: what came before it on the thread is the program's own.
    script.hal(0x3000_0000, MIB, Module::APP);
    script.alloc_in(Pool::Pta, 0, 0x12_0000, MIB, Some((3 * MIB, 40 * MIB)));
    script.alloc_in(Pool::Pta, 0, 0x13_0000, MIB, Some((4 * MIB, 60 * MIB)));
    script.free_in(Pool::Hal, 0x4000_0000, None);
    let (ledger, _) = fed(&script);
    assert_eq!(segment_of(&ledger, 0x3000_0000), None);
    let driver = process(&ledger).device(DEVICE).map(|memory| memory.driver.clone()).unwrap_or_default();
    assert_eq!(driver.segments_of(Pool::Pta), 0);
}

#[test]
fn a_segment_is_where_a_pools_block_lies() {
    let mut script = Script::new();
    script.hal_of(WORKER, 0x4000_0000, 20 * MIB, Module::APP).hal(0x5000_0000, 20 * MIB, Module::APP);
    script.alloc_in(Pool::Atb, 0, 0x4000_0000 + 20 * MIB - 512, 512, None);
    script.alloc_in(Pool::Atb, 0, 0x5000_0000 + 20 * MIB, 512, None);
    let (ledger, _) = fed(&script);
    assert_eq!(segment_of(&ledger, 0x4000_0000), Some(Pool::Atb));
    assert_eq!(segment_of(&ledger, 0x5000_0000), None, "one byte past its end");
}

#[test]
fn pieces_of_an_expandable_segment_are_claimed_by_growth() {
    let mut script = Script::new();
    for handle in 1..=3 {
        let driver =
            DriverAlloc { module: Some(Module::APP.0), page: Some(PageType::Huge), create: true, api: None };
        script.push(
            MAIN,
            EventKind::Alloc(Alloc {
                pool: Pool::Hal,
                device: DEVICE,
                ptr: DevicePtr(handle),
                size: 2 * MIB,
                totals: None,
                driver: Some(driver),
                stack: None,
            }),
        );
    }
    script.alloc_in(Pool::Pta, 0, 0x10_0000, 512, Some((512, 4 * MIB)));
    let (ledger, _) = fed(&script);
    let claimed: Vec<_> = (1..=3).map(|handle| segment_of(&ledger, handle)).collect();
    assert_eq!(claimed, [None, Some(Pool::Pta), Some(Pool::Pta)], "4 MiB are two of them");
}
