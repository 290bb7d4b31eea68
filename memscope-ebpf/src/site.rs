//! What every program does first and last: who was hit, is it to be observed, and sending the record.

use core::{arch::asm, ffi::c_void};

use aya_ebpf::{
    bindings::{BPF_RB_AVAIL_DATA, BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP, BPF_RB_RING_SIZE},
    helpers::{
        bpf_get_current_pid_tgid,
        generated::{bpf_get_attach_cookie, bpf_ktime_get_ns},
    },
    macros::map,
    maps::{Array, HashMap, PerCpuArray, RingBuf, ring_buf::RingBufEntry},
};
use memscope_ebpf::{Counters, Header, MAX_SITES, MAX_TARGETS, SITE_ANY, Site, verdict};

/// The size is set by the loader.
#[map]
pub static RECORDS: RingBuf = RingBuf::with_byte_size(64 * 1024, 0);
#[map]
static SITES: Array<Site> = Array::with_max_entries(MAX_SITES, 0);
#[map]
static COUNTERS: PerCpuArray<Counters> = PerCpuArray::with_max_entries(MAX_SITES, 0);
#[map]
pub static TARGETS: HashMap<u32, u32> = HashMap::with_max_entries(MAX_TARGETS, 0);

/// One hit of a site by an observed process.
pub struct Hit {
    pub site: &'static Site,
    pub index: u32,
    pub pid_tgid: u64,
    counters: *mut Counters,
}

impl Hit {
    /// The entry of a function, which is what counts as a hit.
    #[inline(always)]
    pub fn entry(ctx: *mut c_void) -> Option<Self> {
        let hit = Self::new(ctx)?;
        hit.is_sent();
        Some(hit)
    }

    /// The entry of a function, which may turn out to be worth no record: [`Self::is_sent`] or [`Self::is_not_sent`].
    #[inline(always)]
    pub fn uncounted_entry(ctx: *mut c_void) -> Option<Self> {
        Self::new(ctx)
    }

    #[inline(always)]
    pub fn is_sent(&self) {
        // SAFETY: `counters` is an element of the map for the life of the program.
        count(unsafe { &raw mut (*self.counters).hits });
    }

    #[inline(always)]
    pub fn is_not_sent(&self) {
        // SAFETY: as in `is_sent`.
        count(unsafe { &raw mut (*self.counters).unsent });
    }

    /// The return of a function.
    #[inline(always)]
    pub fn on_return(ctx: *mut c_void) -> Option<Self> {
        Self::new(ctx)
    }

    #[inline(always)]
    fn new(ctx: *mut c_void) -> Option<Self> {
        // On kernels without attach cookies the loader replaces this call by the site's number.
        // SAFETY: a helper call with the program's own context.
        let index = unsafe { bpf_get_attach_cookie(ctx) } as u32;
        let site = SITES.get(index)?;
        let pid_tgid = bpf_get_current_pid_tgid();
        let tgid = (pid_tgid >> 32) as u32;
        if site.tgid == SITE_ANY {
            // SAFETY: a plain u32, which the collector writes as a whole.
            if unsafe { TARGETS.get(&tgid) }.is_some_and(|v| *v == verdict::IGNORE) {
                return None;
            }
        } else if site.tgid != tgid {
            return None;
        }
        let counters = COUNTERS.get_ptr_mut(index)?;
        Some(Self { site, index, pid_tgid, counters })
    }

    #[inline(always)]
    pub fn header(&self, kind: u16, flags: u16) -> Header {
        Header {
            // SAFETY: a helper call without arguments.
            time_ns: unsafe { bpf_ktime_get_ns() },
            tgid: (self.pid_tgid >> 32) as u32,
            tid: self.pid_tgid as u32,
            site: self.index,
            kind,
            flags,
        }
    }

    #[inline(always)]
    pub fn reserve<T: 'static>(&self) -> Option<RingBufEntry<T>> {
        let entry = reserve::<T>();
        if entry.is_none() {
            self.ring_full();
        }
        entry
    }

    /// Room for what goes before an event's own record: that it found none is told by that record.
    #[inline(always)]
    pub fn reserve_extra<T: 'static>(&self) -> Option<RingBufEntry<T>> {
        reserve::<T>()
    }

    #[inline(always)]
    pub fn submit<T: 'static>(&self, mut entry: RingBufEntry<T>) {
        let wake = self.crosses::<T>(entry.as_mut_ptr());
        entry.submit(if wake { BPF_RB_FORCE_WAKEUP } else { BPF_RB_NO_WAKEUP } as u64);
    }

    /// Whether a record crosses a multiple of 2^[`Site::wake_shift`] bytes, counted from where the site lies in memory:
    /// what the verifier lets be known of a place in the ring buffer is its distance from another pointer.
    #[inline(always)]
    fn crosses<T>(&self, record: *mut T) -> bool {
        let begin = (record as u64).wrapping_sub(self.site as *const Site as u64);
        let end = begin.wrapping_add(size_of::<T>() as u64 + 8);
        let shift = self.site.wake_shift as u64 & 31;
        begin >> shift != end >> shift
    }

    /// Whether more than half of the ring buffer is unread.
    #[inline(always)]
    pub fn is_ring_half_full(&self) -> bool {
        RECORDS.query(BPF_RB_AVAIL_DATA as u64) > RECORDS.query(BPF_RB_RING_SIZE as u64) / 2
    }

    #[inline(always)]
    pub fn ring_full(&self) {
        // SAFETY: as in `is_sent`.
        count(unsafe { &raw mut (*self.counters).ring_full });
    }

    #[inline(always)]
    pub fn map_full(&self) {
        // SAFETY: as in `is_sent`.
        count(unsafe { &raw mut (*self.counters).map_full });
    }

    #[inline(always)]
    pub fn unmatched(&self) {
        // SAFETY: as in `is_sent`.
        count(unsafe { &raw mut (*self.counters).unmatched });
    }

    #[inline(always)]
    pub fn unreadable(&self) {
        // SAFETY: as in `is_sent`.
        count(unsafe { &raw mut (*self.counters).unreadable });
    }
}

#[inline(always)]
pub fn reserve<T: 'static>() -> Option<RingBufEntry<T>> {
    RECORDS.reserve::<T>(0)
}

/// Per-CPU elements still need an atomic add: programs of two threads can interleave on one CPU.
#[inline(always)]
fn count(counter: *mut u64) {
    // Atomics of core need compare-and-swap on this target, which kernels before 5.12 lack; XADD they all have.
    // SAFETY: `counter` points into a map element, 8-byte aligned.
    unsafe { asm!("lock *(u64 *)({counter} + 0) += {one}", counter = in(reg) counter, one = in(reg) 1u64) };
}

/// Sends a record that is nothing but a header, and wakes the collector at once.
#[inline(always)]
pub fn notify(header: Header) -> bool {
    let Some(mut entry) = reserve::<Header>() else { return false };
    entry.write(header);
    entry.submit(BPF_RB_FORCE_WAKEUP as u64);
    true
}
