//! Operators that torch_npu's task queue runs on a thread of its own, which has no Python functions: whose call each of
//! them is, by the number that the queue gives each task.

use core::ffi::c_void;

use aya_ebpf::{
    macros::map,
    maps::{HashMap, LruHashMap},
};
use memscope_ebpf::{MAX_CELL, MAX_TARGETS, MAX_TASKS, MIN_CELL, TaskKey, no_stack};

use crate::{regs::Regs, site::Hit, stack, user::read_u64};

/// Ids of the stacks that tasks were enqueued on.
#[map]
static TASKS: LruHashMap<TaskKey, u64> = LruHashMap::with_max_entries(MAX_TASKS, 0);
/// Bytes of a queue's cell, by process.
#[map]
static CELLS: HashMap<u32, u64> = HashMap::with_max_entries(MAX_TARGETS, 0);

/// In a cell: the address of what is behind the head, the task's number, and there what is behind the head.
const CONTENT: u64 = 0x18;
const NUMBER: u64 = 0x20;
const HEAD: u64 = 0x28;

/// `(category, name, task)`: 0 before an operator is enqueued, 1 when it has been. Another thread may be running it by then.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn enqueue(ctx: *mut c_void) -> u32 {
    const BEFORE: u32 = 0;
    const AFTER: u32 = 1;
    let Some(hit) = Hit::uncounted_entry(ctx) else { return 0 };
    hit.is_not_sent();
    let regs = Regs::new(ctx);
    let category = regs.arg::<0>() as u32;
    if category != BEFORE && category != AFTER {
        return 0;
    }
    let Some(thread) = stack::thread(hit.pid_tgid) else { return 0 };
    // The same call of the function that enqueues: it has not failed in between.
    let place = [regs.sp(), regs.arg::<1>()];
    if category == BEFORE {
        let stack = stack::capture_spare(&hit);
        // SAFETY: the entry is this thread's own.
        unsafe {
            (*thread).enqueuing = stack;
            (*thread).place = place;
        }
        return 0;
    }
    // SAFETY: as above.
    let (stack, begun) = unsafe { ((*thread).enqueuing, (*thread).place) };
    let number = regs.arg::<2>();
    // 0 is also what a task has that was not enqueued.
    if stack != no_stack::NOT_WANTED && begun[0] == place[0] && begun[1] == place[1] && number != 0 {
        let _ = TASKS.insert(&TaskKey { tgid: hit.pid_tgid >> 32, number }, &stack, 0);
    }
    // SAFETY: as above.
    unsafe { (*thread).enqueuing = no_stack::NOT_WANTED };
    0
}

/// `(category, cells, cell)`: 2 before a task is run, 3 after.
#[unsafe(no_mangle)]
#[unsafe(link_section = "uprobe")]
pub extern "C" fn run(ctx: *mut c_void) -> u32 {
    const BEFORE: u32 = 2;
    let Some(hit) = Hit::uncounted_entry(ctx) else { return 0 };
    hit.is_not_sent();
    let regs = Regs::new(ctx);
    let Some(thread) = stack::thread(hit.pid_tgid) else { return 0 };
    let is_before = regs.arg::<0>() as u32 == BEFORE;
    let number = if is_before { number_of(&hit, regs.arg::<1>(), regs.arg::<2>()).unwrap_or(0) } else { 0 };
    // SAFETY: the entry is this thread's own.
    unsafe {
        (*thread).is_running = is_before as u64;
        (*thread).task = number;
    }
    0
}

/// The number of the task in a cell.
#[inline(always)]
fn number_of(hit: &Hit, cells: u64, cell: u64) -> Option<u64> {
    let size = if cell == 0 { 0 } else { cell_size((hit.pid_tgid >> 32) as u32, cells)? };
    let at = cells.wrapping_add(cell.wrapping_mul(size));
    if read_u64(at.wrapping_add(CONTENT))? != at.wrapping_add(HEAD) {
        return None;
    }
    read_u64(at.wrapping_add(NUMBER))
}

/// Bytes of a cell. Each holds its task's parameters itself, and their address: where the second one's are is one size on
/// from where the first one's are.
#[inline(always)]
fn cell_size(tgid: u32, cells: u64) -> Option<u64> {
    // SAFETY: written as a whole.
    if let Some(size) = unsafe { CELLS.get(&tgid) } {
        return Some(*size);
    }
    if read_u64(cells.wrapping_add(CONTENT))? != cells.wrapping_add(HEAD) {
        return None;
    }
    for n in MIN_CELL / 8..MAX_CELL / 8 {
        let size = 8 * n as u64;
        let second = cells.wrapping_add(size);
        if read_u64(second.wrapping_add(CONTENT)) == Some(second.wrapping_add(HEAD)) {
            let _ = CELLS.insert(&tgid, &size, 0);
            return Some(size);
        }
    }
    None
}

/// The stack of the call that the current thread runs the operator of; `None`: it runs none.
#[inline(always)]
pub fn stack_of_task(hit: &Hit) -> Option<Result<u64, u64>> {
    let thread = stack::known_thread(hit.pid_tgid)?;
    // SAFETY: the entry is this thread's own.
    let (is_running, number) = unsafe { ((*thread).is_running, (*thread).task) };
    if is_running == 0 {
        return None;
    }
    // SAFETY: written as a whole.
    match unsafe { TASKS.get(&TaskKey { tgid: hit.pid_tgid >> 32, number }) } {
        Some(stack) if *stack >= no_stack::FIRST_ID => Some(Ok(*stack)),
        Some(why) => Some(Err(*why)),
        None => Some(Err(no_stack::NO_TASK)),
    }
}
