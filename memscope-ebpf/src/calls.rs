//! What is kept of a thread's calls, from one probe to the next.

use core::{cell::UnsafeCell, ffi::c_void, marker::PhantomData};

use aya_ebpf::{
    bindings::{BPF_F_NO_PREALLOC, BPF_LOCAL_STORAGE_GET_F_CREATE, bpf_map_def, bpf_map_type},
    helpers::generated::{bpf_get_current_task_btf, bpf_task_storage_get},
    macros::map,
    maps::{Array, HashMap},
};
use memscope_ebpf::{ApiCall, Calls, InFlight, MAX_NESTED, MAX_THREADS, NO_SITE};

/// The kernel keeps it with the task: found without a hash, and gone with the task.
#[map]
static CALLS: TaskStorage<Calls> = TaskStorage::new();
/// On kernels without, and where the kernel has no memory for a task's.
#[map]
static CALLS_BY_THREAD: HashMap<u64, Calls> = HashMap::with_max_entries(MAX_THREADS, 0);

/// A thread without any, so that they need not be made on a program's own stack.
#[map]
static NO_CALLS: Array<Calls> = Array::with_max_entries(1, 0);

#[repr(transparent)]
struct TaskStorage<T>(UnsafeCell<bpf_map_def>, PhantomData<T>);

// SAFETY: never touched but by the kernel.
unsafe impl<T> Sync for TaskStorage<T> {}

impl<T> TaskStorage<T> {
    const fn new() -> Self {
        Self(
            UnsafeCell::new(bpf_map_def {
                type_: bpf_map_type::BPF_MAP_TYPE_TASK_STORAGE,
                key_size: 4,
                value_size: size_of::<T>() as u32,
                max_entries: 0,
                map_flags: BPF_F_NO_PREALLOC,
                id: 0,
                pinning: 0,
            }),
            PhantomData,
        )
    }

    /// The running task's; null where it has none.
    #[inline(always)]
    fn of_current(&self, flags: u64) -> *mut T {
        // Where the kernel has no task storage, the loader replaces these calls by null pointers.
        // SAFETY: helper calls; the map's values are of type `T`.
        unsafe {
            let task = bpf_get_current_task_btf();
            bpf_task_storage_get(self.0.get().cast(), task, core::ptr::null_mut::<c_void>(), flags).cast()
        }
    }
}

/// The running thread's calls, made when there are none; `None`: no room.
#[inline(always)]
pub fn of_thread(pid_tgid: u64) -> Option<*mut Calls> {
    let kept = CALLS.of_current(BPF_LOCAL_STORAGE_GET_F_CREATE as u64);
    if !kept.is_null() {
        return Some(kept);
    }
    if let Some(kept) = CALLS_BY_THREAD.get_ptr_mut(pid_tgid) {
        return Some(kept);
    }
    CALLS_BY_THREAD.insert(pid_tgid, NO_CALLS.get(0)?, 0).ok()?;
    CALLS_BY_THREAD.get_ptr_mut(pid_tgid)
}

/// Keeps a call until it returns; `false`: there was no room for it, or the last one at this site was still there, of
/// which no return was seen.
#[inline(always)]
pub fn keep(pid_tgid: u64, call: &InFlight) -> bool {
    let Some(kept) = of_thread(pid_tgid) else { return false };
    let mut place = core::ptr::null_mut::<InFlight>();
    for n in 0..MAX_NESTED {
        // SAFETY: an element of the map that is this thread's own: no one else changes it while the program runs.
        unsafe {
            let here = &raw mut (*kept).in_flight[n];
            if (*here).site == call.site {
                let returned = (*here).active == 0;
                *here = *call;
                return returned;
            }
            if place.is_null() && (*here).active == 0 {
                place = here;
            }
        }
    }
    if place.is_null() {
        return false;
    }
    // SAFETY: as above.
    unsafe { *place = *call };
    true
}

/// A call that has returned.
pub struct Returned {
    pub call: InFlight,
    /// Of the runtime call above it; without one, 0 and [`NO_SITE`].
    pub asked: u64,
    pub api: u32,
}

/// Takes the thread's call of this site.
#[inline(always)]
pub fn take(pid_tgid: u64, site: u32) -> Option<Returned> {
    let kept = CALLS.of_current(0);
    if !kept.is_null()
        && let Some(returned) = take_from(kept, site)
    {
        return Some(returned);
    }
    take_from(CALLS_BY_THREAD.get_ptr_mut(pid_tgid)?, site)
}

#[inline(always)]
fn take_from(kept: *mut Calls, site: u32) -> Option<Returned> {
    for n in 0..MAX_NESTED {
        // SAFETY: as in `keep`.
        unsafe {
            let here = &raw mut (*kept).in_flight[n];
            if (*here).site == site && (*here).active == 1 {
                (*here).active = 0;
                let call = *here;
                let api = &raw mut (*kept).api;
                if (*api).out == 0 || (*api).out != call.args[0] {
                    return Some(Returned { call, asked: 0, api: NO_SITE });
                }
                (*api).out = 0;
                return Some(Returned { call, asked: (*api).asked, api: (*api).site as u32 });
            }
        }
    }
    None
}

/// Notes a runtime call above the driver's; whether there was room.
#[inline(always)]
pub fn note(pid_tgid: u64, call: ApiCall) -> bool {
    let Some(kept) = of_thread(pid_tgid) else { return false };
    // SAFETY: as in `keep`.
    unsafe {
        let last = &raw mut (*kept).api;
        // Calls nest with the same out-pointer: the outermost is the one the program made.
        if (*last).out != call.out || (*last).sp <= call.sp {
            *last = call;
        }
    }
    true
}

/// Tells the sites of the calls that the running thread, which ends, is within.
#[inline(always)]
pub fn end(pid_tgid: u64, mut tell: impl FnMut(u32)) {
    let kept = CALLS.of_current(0);
    if !kept.is_null() {
        each_open(kept, &mut tell);
    }
    if let Some(kept) = CALLS_BY_THREAD.get_ptr_mut(pid_tgid) {
        each_open(kept, &mut tell);
        let _ = CALLS_BY_THREAD.remove(pid_tgid);
    }
}

#[inline(always)]
fn each_open(kept: *mut Calls, tell: &mut impl FnMut(u32)) {
    for n in 0..MAX_NESTED {
        // SAFETY: as in `keep`.
        let here = unsafe { (*kept).in_flight[n] };
        if here.active == 1 {
            tell(here.site);
        }
    }
}
