//! Threads' robust lists, which glibc registers with the kernel for each: what lies beside them is the thread's own.

use crate::{
    attach::process::Process,
    model::Tid,
    stacks::memory::{Memory, Read, half_at, word_at},
};

/// From a mutex's place in a robust list to what the kernel is to look at: glibc's constant, on both machines.
const FUTEX: u64 = -32i64 as u64;
/// glibc keeps the thread's id so far before the list.
const ID_BEFORE: u64 = 16;
/// A thread's descriptor is no larger than this, up to its list.
const DESCRIPTOR: usize = 2048;
/// Words of a `PyThreadState` that may lead to the descriptor.
const STATE: usize = 512;

/// The lists of a process's threads, as the kernel knows them. None of one that our own PID namespace does not have:
/// the kernel takes only numbers of that.
pub fn robust_lists(process: &Process) -> Vec<(Tid, u64)> {
    if !process.proc().has_own_numbers() {
        return Vec::new();
    }
    process.threads().into_iter().filter_map(|tid| Some((tid, robust_list(tid)?))).collect()
}

fn robust_list(tid: Tid) -> Option<u64> {
    let (mut head, mut length) = (0u64, 0usize);
    // SAFETY: the kernel writes a pointer and a length to where these are.
    let result = unsafe { libc::syscall(libc::SYS_get_robust_list, tid.0, &raw mut head, &raw mut length) };
    (result == 0 && head != 0).then_some(head)
}

/// The robust list of the thread that a `PyThreadState` belongs to, found without the kernel: the state names its
/// thread as `pthread_self` does, by the descriptor's address, and an empty list in there leads to itself. `is_right` has
/// the last word: several addresses may look like that.
pub fn listed_by(memory: &Memory, state: u64, is_right: impl Fn(u64) -> bool) -> Option<u64> {
    let words: [u8; STATE] = memory.bytes(state)?;
    let mut descriptor = vec![0; DESCRIPTOR];
    let mut seen = std::collections::HashSet::new();
    for at in (0..STATE as u16).step_by(8) {
        let Some(address) = word_at(&words, at).filter(|word| word % 8 == 0 && seen.insert(*word)) else {
            continue;
        };
        let Some(read) = memory.read_some(address, &mut descriptor) else { continue };
        let lists = (0..read.saturating_sub(16) as u16).step_by(8).filter_map(|at| {
            let list = address + u64::from(at);
            let is_list =
                word_at(&descriptor, at) == Some(list) && word_at(&descriptor, at + 8) == Some(FUTEX);
            is_list.then_some(list)
        });
        if let Some(list) = lists.into_iter().find(|list| is_right(*list)) {
            return Some(list);
        }
    }
    None
}

/// The id of the thread that has this list, as its own PID namespace counts.
pub fn thread_id(memory: &Memory, list: u64) -> Option<u32> {
    half_at(&memory.bytes::<4>(list.checked_sub(ID_BEFORE)?)?, 0)
}
