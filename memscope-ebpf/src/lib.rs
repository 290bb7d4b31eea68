//! The wire: what the BPF programs and the collector agree on.
//!
//! Every type is `#[repr(C)]` without implicit padding and has the same layout on every target (asserted at
//! the bottom). The programs are of a few shapes and know no library: a [`Site`] tells them which argument
//! means what.
#![no_std]

/// Changes whenever a layout below changes. The object embedded in the tool always matches; the number is
/// there for recorded streams.
pub const WIRE_VERSION: u32 = 2;

/// Sites that can be attached at one time.
pub const MAX_SITES: u32 = 4096;
/// Processes that can be followed at one time.
pub const MAX_TARGETS: u32 = 16384;
/// Calls that can be between entry and return at one time, over all threads. Beyond, the oldest are forgotten.
pub const MAX_IN_FLIGHT: u32 = 16384;
/// Threads of which the runtime call above the driver's is remembered. Beyond, the oldest are forgotten.
pub const MAX_THREADS: u32 = 16384;
/// Bytes of a name record's text; longer texts are cut and flagged.
pub const NAME_LEN: usize = 104;
/// Bytes of a mark record's text.
pub const MARK_LEN: usize = 256;
/// Bytes of a mark record's domain.
pub const DOMAIN_LEN: usize = 32;

/// Integer and pointer arguments kept of a call.
pub const ARGS: usize = 4;

/// What a site's programs read. An element of the map `SITES`, indexed by the attach cookie.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Site {
    /// The one process to observe, or [`SITE_ANY`]: every process that `TARGETS` does not rule out.
    pub tgid: u32,
    /// Argument that holds (the way to) the main datum: a text, a structure.
    pub arg: u8,
    /// Pointers to follow from `args[arg] + offset` to the datum.
    pub derefs: u8,
    /// Added to `args[arg]` before anything is followed.
    pub offset: u16,
    /// Out-pointer read on return when the call succeeded; [`NO_ARG`]: none.
    pub out: u8,
    /// Argument that holds the domain of a mark; [`NO_ARG`]: none.
    pub domain: u8,
    /// A [`ret`] value: when the call counts as a success.
    pub ret: u8,
    /// The collector is woken whenever the unread bytes cross a multiple of 2 to this power (8 to 31).
    pub wake_shift: u8,
    /// Added to the address once all pointers are followed.
    pub after: u16,
    pub reserved: u16,
}

pub const SITE_ANY: u32 = u32::MAX;
/// No site.
pub const NO_SITE: u32 = u32::MAX;
pub const NO_ARG: u8 = u8::MAX;

/// Values of `TARGETS`, the verdict on a process. A process without an entry is observed at [`SITE_ANY`]
/// sites, so that none is missed before the collector has judged it.
pub mod verdict {
    pub const IGNORE: u32 = 0;
    pub const OBSERVE: u32 = 1;
}

/// What a return value says.
pub mod ret {
    /// 0 (as an i32) is success: CANN's convention.
    pub const ZERO_IS_OK: u8 = 0;
    /// The value itself is the result, null is failure: allocators that return the address.
    pub const IS_RESULT: u8 = 1;
}

/// Why records of a site are missing or incomplete. A per-CPU element of the map `COUNTERS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Times an observed process entered the function.
    pub hits: u64,
    /// Records that found no room in the ring buffer.
    pub ring_full: u64,
    /// Calls whose entry could not be kept: their return is not reported.
    pub map_full: u64,
    /// Returns without a kept entry (the call began before attach, or its entry was forgotten), and return values
    /// that found no room.
    pub unmatched: u64,
    /// Records sent with [`flags::UNREADABLE`].
    pub unreadable: u64,
}

/// Kinds of records.
pub mod kind {
    /// [`Enter`](super::Enter): a function was entered.
    pub const ENTER: u16 = 1;
    /// [`Return`](super::Return): a function returned; carries what was kept at entry.
    pub const RETURN: u16 = 2;
    /// [`Name`](super::Name).
    pub const NAME: u16 = 3;
    /// [`Mark`](super::Mark).
    pub const MARK: u16 = 4;
    /// [`Report`](super::Report): a structure that an argument points to.
    pub const REPORT: u16 = 5;
    /// [`Header`](super::Header) only: `exec` of an observed process.
    pub const EXEC: u16 = 6;
    /// [`Header`](super::Header) only: the dynamic linker has mapped or unmapped libraries.
    pub const MAPPED: u16 = 7;
}

/// Completeness flags of a record.
pub mod flags {
    /// User memory that belongs to the record could not be read (not present, or a bad pointer).
    pub const UNREADABLE: u16 = 1 << 0;
    /// The text was longer than the record.
    pub const TRUNCATED: u16 = 1 << 1;
    /// The call failed by its return value; out-pointers were not read.
    pub const FAILED: u16 = 1 << 2;
}

/// Head of every record.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// `bpf_ktime_get_ns` (CLOCK_MONOTONIC) when the record was made; of the return, for RETURN.
    pub time_ns: u64,
    pub tgid: u32,
    pub tid: u32,
    /// Index into `SITES`.
    pub site: u32,
    pub kind: u16,
    pub flags: u16,
}

/// With the ring buffer's own 8 bytes, one cache line: what a record costs is above all the lines it touches.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Enter {
    pub header: Header,
    /// Integer arguments at entry. Upper halves of 32-bit arguments are undefined.
    pub args: [u64; ARGS],
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Return {
    pub header: Header,
    /// Integer arguments at entry. Where the program reads a structure, the last two are its first 16 bytes.
    pub args: [u64; ARGS],
    /// What the out-pointer held; without one, or with [`flags::FAILED`], the value returned.
    pub result: u64,
    /// Bytes that the runtime call above was asked for.
    pub asked: u64,
    /// Site of the runtime call above, which was given the same out-pointer; [`NO_SITE`]: none.
    pub api: u32,
    pub reserved: u32,
}

/// A text by its address in an argument: an operator's or a kernel's name.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Name {
    pub header: Header,
    pub args: [u64; 4],
    /// Address of the text in the process.
    pub address: u64,
    pub len: u32,
    pub reserved: u32,
    pub text: [u8; NAME_LEN],
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    pub header: Header,
    pub args: [u64; 4],
    /// Address of the text in the process.
    pub address: u64,
    /// Stack pointer at entry: a call inside another has a lower one.
    pub sp: u64,
    pub len: u32,
    pub domain_len: u32,
    pub domain: [u8; DOMAIN_LEN],
    pub text: [u8; MARK_LEN],
}

/// 56 bytes of a structure: torch_npu's `MemoryUsage`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub header: Header,
    pub words: [u64; 7],
}

/// What is kept of a call between its entry and its return. Elements stay when the call is over: writing into one
/// that is there costs a third of making and deleting it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InFlight {
    pub args: [u64; ARGS],
    pub flags: u32,
    /// 1 from entry to return.
    pub active: u32,
}

/// Key of `IN_FLIGHT`: probed calls nest (`aclrtCreateContext` calls `halMemAlloc`), so each has its own.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InFlightKey {
    pub pid_tgid: u64,
    pub site: u64,
}

/// The last runtime call of a thread that may reach the driver. An element of `API_CALLS`, by `pid_tgid`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ApiCall {
    /// Its out-pointer, which it hands down to the driver; 0 once a driver's call was ascribed to it.
    pub out: u64,
    /// Bytes it was asked for.
    pub asked: u64,
    /// Stack pointer at its entry: a call inside it has a lower one.
    pub sp: u64,
    pub site: u64,
}

macro_rules! wire {
    ($($name:ident = $size:expr),* $(,)?) => {
        $(
            const _: () = assert!(core::mem::size_of::<$name>() == $size);
            #[cfg(feature = "user")]
            // SAFETY: repr(C), made of integers only, without padding (the size is the sum of the fields).
            unsafe impl Plain for $name {}
            #[cfg(feature = "user")]
            // SAFETY: as above.
            unsafe impl aya::Pod for $name {}
        )*
    };
}

/// Types that may be read from bytes: any bit pattern is a value.
///
/// # Safety
/// `repr(C)`, no padding, no invalid bit patterns, no pointers.
#[cfg(feature = "user")]
pub unsafe trait Plain: Copy + 'static {
    /// Reads the value from the head of `bytes`; `None` when they are too few.
    fn read(bytes: &[u8]) -> Option<Self> {
        (bytes.len() >= core::mem::size_of::<Self>())
            // SAFETY: the length was checked, the read is unaligned, and the trait promises that any bytes do.
            .then(|| unsafe { bytes.as_ptr().cast::<Self>().read_unaligned() })
    }
}

wire! {
    Site = 16, Counters = 40, Header = 24, Enter = 56, Return = 80, Name = 176, Mark = 368, Report = 80,
    InFlight = 40, InFlightKey = 16, ApiCall = 32,
}
