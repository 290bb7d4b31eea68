//! The wire: what the BPF programs and the collector agree on.
//!
//! Every type is `#[repr(C)]` without implicit padding and has the same layout on every target (asserted at
//! the bottom). The programs are of a few shapes and know no library: a [`Site`] tells them which argument
//! means what.
#![no_std]

/// Changes whenever a layout below changes. The object embedded in the tool always matches; the number is
/// there for recorded streams.
pub const WIRE_VERSION: u32 = 7;

/// Sites that can be attached at one time.
pub const MAX_SITES: u32 = 4096;
/// Processes that can be followed at one time.
pub const MAX_TARGETS: u32 = 16384;
/// Calls of one thread that can be between entry and return at one time, where the result is wanted.
pub const MAX_NESTED: usize = 4;
/// Slots of threads whose calls are kept.
pub const CALL_SLOTS: u32 = 8192;
/// Threads whose calls are kept beside those that have a slot.
pub const MAX_THREADS: u32 = 16384;
/// Sites of processes that have ended within a call of them, and have not been looked at yet.
pub const MAX_WITHIN: u32 = 1024;
/// Bytes of a name record's text; longer texts are cut and flagged.
pub const NAME_LEN: usize = 104;
/// Bytes of a mark record's text.
pub const MARK_LEN: usize = 256;
/// Bytes of a mark record's domain.
pub const DOMAIN_LEN: usize = 32;

/// Bytes of a kernel's argument block; longer ones are cut.
pub const ARGUMENTS_LEN: usize = 256;

/// Tensors of a [`Pack`]; of a longer one the first, inputs before outputs.
pub const PACK_LEN: usize = 64;

/// Integer and pointer arguments kept of a call.
pub const ARGS: usize = 4;

/// Frames of a stack at most, whatever depth is asked for.
pub const MAX_DEPTH: usize = 128;
/// Threads whose stacks can be walked at one time.
pub const MAX_WALKERS: u32 = 2048;
/// Stacks that are known to have been sent; the ones not seen for longest are sent again.
pub const MAX_SENT: u32 = 65536;

/// Code objects that are known to have been copied; the ones not seen for longest are copied again.
pub const MAX_COPIED: u32 = 65536;
/// Code objects that are copied for one new stack at most, innermost first. The others are for the next stack with them,
/// or for the collector to read.
pub const MAX_COPIES: usize = 16;
/// Bytes of a [`Piece`]: of a code object or one of its names, and of its table of lines. With its head and the ring
/// buffer's own, whole cache lines.
pub const TEXT_LEN: usize = 472;
pub const TABLE_LEN: usize = 2008;
/// Pieces of a table of lines that are copied at most. What is longer is left to the collector.
pub const TABLE_PIECES: u32 = 4;

/// Tasks of torch_npu's queues whose calls are known at one time, of all processes. One queue has 4096 at most.
pub const MAX_TASKS: u32 = 16384;
/// Bytes that a cell of such a queue may have.
pub const MIN_CELL: u32 = 48;
pub const MAX_CELL: u32 = 1536;

/// Bytes of a page of [`Slice`]: a read of one lies inside of one page, whatever the kernel's are.
pub const PAGE_LEN: usize = 4096;
/// Pages of a stack that are copied at most.
pub const SLICE_PAGES: usize = 4;
/// Calls of a thread that are known, at one time, to return through a return probe.
pub const MAX_CALLERS: usize = 8;

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
    /// The collector is woken by each 2 to this power bytes (8 to 31) that are written. Between, it looks by itself in
    /// short intervals.
    pub wake_shift: u8,
    /// Added to the address once all pointers are followed.
    pub after: u16,
    /// Of a reported structure: the byte of its first word (0 to 7) that says what it reports, and the value of
    /// that byte which is of no interest. [`NO_ARG`]: everything is.
    pub skip_at: u8,
    pub skip: u8,
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
    /// Times an observed process entered the function, for which a record was due: where the result is wanted, from the
    /// return on.
    pub hits: u64,
    /// Times it did so and none was: a call above the driver's, which goes into that one's record; a report that
    /// nothing has changed.
    pub unsent: u64,
    /// Records that found no room in the ring buffer.
    pub ring_full: u64,
    /// Calls of which there is no record because their entry could not be kept, or no return was seen before the next
    /// one.
    pub map_full: u64,
    /// Returns without a kept entry (the call began before attach), and return values that found no room.
    pub unmatched: u64,
    /// Records sent with [`flags::UNREADABLE`].
    pub unreadable: u64,
}

impl Counters {
    /// Times an observed process entered the function.
    pub fn entries(&self) -> u64 {
        self.hits + self.unsent
    }
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
    /// [`Header`](super::Header) only: `exec` of a process.
    pub const EXEC: u16 = 6;
    /// [`Header`](super::Header) only: the dynamic linker has mapped or unmapped libraries.
    pub const MAPPED: u16 = 7;
    /// [`StackHead`](super::StackHead) and its frames: a stack that events name from now on.
    pub const STACK: u16 = 8;
    /// [`Tensor`](super::Tensor).
    pub const TENSOR: u16 = 9;
    /// [`Arguments`](super::Arguments).
    pub const ARGUMENTS: u16 = 10;
    /// [`Slice`] or [`Chain`]: the native stack of the same thread's next record.
    pub const NATIVE: u16 = 11;
    /// [`PieceHead`] and its bytes: memory that the same thread's next STACK record refers to.
    pub const PIECE: u16 = 12;
    /// [`Pack`](super::Pack).
    pub const PACK: u16 = 13;
}

/// Completeness flags of a record.
pub mod flags {
    /// User memory that belongs to the record could not be read (not present, or a bad pointer).
    pub const UNREADABLE: u16 = 1 << 0;
    /// The text was longer than the record.
    pub const TRUNCATED: u16 = 1 << 1;
    /// The call failed by its return value; out-pointers were not read.
    pub const FAILED: u16 = 1 << 2;
    /// STACK: the frames are the main thread's, for the thread itself has none.
    pub const VIA: u16 = 1 << 3;
}

/// Whether an event has a native stack, and if not, why: in the flags of RETURN and REPORT.
pub mod native {
    /// Bits of the flags.
    pub const MASK: u16 = 7 << SHIFT;
    pub const SHIFT: u16 = 8;

    /// Not asked for, or not an allocation.
    pub const NOT_WANTED: u16 = 0;
    /// In the NATIVE record before.
    pub const SENT: u16 = 1 << SHIFT;
    /// A pool's block of fewer bytes than stacks are taken of.
    pub const SMALL: u16 = 2 << SHIFT;
    /// The thread has had its share of stacks for now.
    pub const LIMITED: u16 = 3 << SHIFT;
    /// The ring buffer is half full: the rest is for events.
    pub const RING_FULL: u16 = 4 << SHIFT;
    /// Too many threads.
    pub const NO_ROOM: u16 = 5 << SHIFT;
    /// The stack could not be read.
    pub const UNREADABLE: u16 = 6 << SHIFT;
}

/// The `stack` of an event is the id of a stack, or one of these: why it has none.
pub mod no_stack {
    /// Not asked for, or not an allocation.
    pub const NOT_WANTED: u64 = 0;
    /// No interpreter of the process is known (yet).
    pub const NO_INTERPRETER: u64 = 1;
    /// The kernel could not say where the thread keeps its Python state.
    pub const NO_SLOT: u64 = 2;
    /// The thread has no Python state.
    pub const NO_STATE: u64 = 3;
    /// It has one, but is in no Python function, and neither is the main thread.
    pub const NO_FRAMES: u64 = 4;
    /// Memory on the way could not be read.
    pub const UNREADABLE: u64 = 5;
    /// The thread has had its share of stacks for now.
    pub const LIMITED: u64 = 6;
    /// The stack is new, and the ring buffer had no room for it.
    pub const RING_FULL: u64 = 7;
    /// Too many threads.
    pub const NO_ROOM: u64 = 8;
    /// A task of torch_npu's queue, whose call was not seen.
    pub const NO_TASK: u64 = 9;
    /// Ids of stacks begin here.
    pub const FIRST_ID: u64 = 16;
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
    /// Id of the stack at the return, or a [`no_stack`] value.
    pub stack: u64,
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
    /// Id of the stack, or a [`no_stack`] value.
    pub stack: u64,
}

/// How to find the Python frames of a process: an element of the map `INTERPRETERS`, by process. Offsets are in
/// bytes; those into a frame are below [`FRAME_BYTES`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Interpreter {
    /// Makes ids of one process image differ from those of every other.
    pub salt: u64,
    /// The salt of the process that the collector has looked at: another one's, where it was forked from that.
    pub image: u64,
    /// `PyThreadState` of the main thread; 0: not known.
    pub main_thread: u64,
    /// From a thread's robust list to the pthread slot that holds its `PyThreadState`.
    pub slot: i64,
    /// From a `task_struct` to its robust list; 0: ask `ROBUST_LISTS`.
    pub robust_list: u32,
    /// Frames of a stack at most.
    pub depth: u32,
    /// A stack may be taken of a thread each so many ns on average.
    pub interval_ns: u32,
    /// Stacks that a thread may be ahead of that average, in ns.
    pub ahead_ns: u32,
    /// Kept of the instruction word: in versions up to 3.10 it has 32 bits.
    pub instruction_mask: u64,
    /// `PyThreadState` to its current frame, or to the C frame in which that is.
    pub frame: u16,
    /// C frame to the current frame; [`NO_OFFSET`]: there is none.
    pub frame_of_cframe: u16,
    /// Bytes to read of a frame.
    pub frame_bytes: u16,
    /// In a frame: its code object, the frame that called it, the instruction, who owns it.
    pub code: u16,
    pub previous: u16,
    pub instruction: u16,
    pub owner: u16,
    /// 0 where frames have no owner, else 7.
    pub owner_mask: u16,
    /// In a code object: the pointers that tell it from others at the same address; and their bytes (24 or 32).
    pub identity: u16,
    pub identity_bytes: u16,
    /// Bytes of a code object that are needed.
    pub code_bytes: u16,
    /// In a text: its characters, when all are ASCII, and when not.
    pub ascii: u8,
    pub other: u8,
}

pub const NO_OFFSET: u16 = u16::MAX;
/// The longest part of a frame that is read.
pub const FRAME_BYTES: usize = 128;

/// A Python frame as found in memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawFrame {
    /// Address of the code object; in the low 3 bits who owns the frame.
    pub code: u64,
    /// `f_lasti`, or the address of the instruction.
    pub instruction: u64,
    /// [`identity`] of the code object; 0: could not be read.
    pub identity: u64,
}

/// Begin of a STACK record; `frames` [`RawFrame`]s follow, innermost first.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StackHead {
    pub header: Header,
    pub id: u64,
    /// As in [`Interpreter`].
    pub image: u64,
    pub frames: u32,
    /// Not 0: the last of the frames was called by others, which are not there.
    pub more: u32,
}

/// A STACK record of the greatest length.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stack {
    pub head: StackHead,
    pub frames: [RawFrame; MAX_DEPTH],
}

/// Begin of a PIECE record; `len` bytes follow. A piece of the process's memory: of a code object that no stack has had yet,
/// of its names and its table of lines. By the time that the collector looks for them, they may be gone.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PieceHead {
    pub header: Header,
    pub address: u64,
    pub len: u64,
}

/// A PIECE record of up to `LEN` bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece<const LEN: usize> {
    pub head: PieceHead,
    pub bytes: [u8; LEN],
}

/// What is kept of a thread: room to work in, as a program's own stack has 512 bytes. An element of `THREADS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thread {
    /// Until when (CLOCK_MONOTONIC, ns) the stacks taken so far are its share.
    pub paid_until: u64,
    /// Where it enqueues an operator (see `queue.rs`): the id of the stack, or why there is none; and what tells that call
    /// from others.
    pub enqueuing: u64,
    pub place: [u64; 2],
    /// Not 0: it runs a task of torch_npu's queue. Which: 0, if that is not known.
    pub is_running: u64,
    pub task: u64,
    pub identity: [u64; 4],
    /// Frames of the stack whose code is to be copied.
    pub copies: [u32; MAX_COPIES],
    pub count: u32,
    pub reserved: u32,
    /// A frame; the last element is there for reads that begin near its end.
    pub frame: [u64; FRAME_BYTES / 8 + 1],
    pub stack: Stack,
}

/// Key of `TASKS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TaskKey {
    pub tgid: u64,
    /// As torch_npu counts the tasks of the process, over all of its queues.
    pub number: u64,
}

/// How much of native stacks is taken. The one element of the map `NATIVE`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NativeConfig {
    /// Bytes of a pool's block from which on its stack is taken.
    pub pool_bytes: u64,
    /// As in [`Interpreter`].
    pub interval_ns: u32,
    pub ahead_ns: u32,
    /// Frames at most, where they are followed by the program.
    pub depth: u32,
    /// Not 0: Python stacks are wanted as well.
    pub python: u32,
}

/// What is to be told of processes as such. The one element of the map `PROCESSES`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessConfig {
    /// From a `task_struct` to its exit code; 0: not known.
    pub exit_code: u32,
    /// To the id of its process.
    pub tgid: u32,
    /// Not 0: `exec` of every process is told, not of those alone that are observed.
    pub every_exec: u32,
    pub reserved: u32,
}

/// A call that returns through a return probe: the probe's trampoline has taken the place of its return address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// Stack pointer at its entry.
    pub sp: u64,
    /// Where it really returns to.
    pub address: u64,
}

/// Such calls of a thread, outermost first; some may have returned. An element of `CALLERS`, by `pid_tgid`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Callers {
    pub count: u64,
    pub calls: [Caller; MAX_CALLERS],
}

/// Begin of a NATIVE record: the thread as it will be when the probed function has returned.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NativeHead {
    pub header: Header,
    /// Where the probed function returns to.
    pub ip: u64,
    pub sp: u64,
    /// rbx, rbp, r12, r13, r14, r15; or x29.
    pub saved: [u64; 6],
    /// Pages, or frame records.
    pub count: u32,
    /// Not 0: the last of the frame records was followed by others.
    pub more: u32,
    pub callers: Callers,
}

/// NATIVE on x86_64, where functions keep no frame pointers: the stack itself, from the beginning of the page in which
/// `sp` is.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    pub head: NativeHead,
    pub pages: [[u8; PAGE_LEN]; SLICE_PAGES],
}

/// Of aarch64: what x29 points to.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameRecord {
    /// The caller's record.
    pub next: u64,
    /// Return address.
    pub address: u64,
}

/// NATIVE on aarch64: the frame records from the one at x29 on, innermost first.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain {
    pub head: NativeHead,
    pub records: [FrameRecord; MAX_DEPTH],
}

/// Mixes the pointers that tell a code object from others at the same address (see [`Interpreter::identity`]).
#[inline(always)]
pub fn identity(words: [u64; 4]) -> u64 {
    let [a, b, c, d] = words;
    mix(mix(mix(mix(0, a), b), c), d)
}

/// One word into a hash.
#[inline(always)]
pub fn mix(hash: u64, word: u64) -> u64 {
    let mixed = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 29)
}

/// A tensor that is described to an operator library.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tensor {
    pub header: Header,
    /// Address of its data.
    pub address: u64,
    /// Product of its sizes.
    pub elements: u64,
    /// As the library numbers element types.
    pub element_type: u32,
    pub rank: u32,
}

/// The argument block of a kernel launch, from its beginning.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arguments {
    pub header: Header,
    /// Bytes of `words` that were read.
    pub len: u32,
    pub reserved: u32,
    pub words: [u64; ARGUMENTS_LEN / 8],
}

/// The address of a tensor's data on the device, on the host, and its bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedTensor {
    pub device: u64,
    pub host: u64,
    pub bytes: u64,
}

/// The tensors that an operator is given all at once (`atb::VariantPack`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pack {
    pub header: Header,
    pub inputs: u32,
    pub outputs: u32,
    /// Elements of `tensors` that were read.
    pub count: u32,
    pub reserved: u32,
    pub tensors: [PackedTensor; PACK_LEN],
}

/// What is kept of a call between its entry and its return. Where it is kept stays the site's: writing into what is
/// there costs a third of making and deleting it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InFlight {
    pub args: [u64; ARGS],
    pub site: u32,
    pub flags: u16,
    /// 1 from entry to return.
    pub active: u16,
}

/// The last runtime call that may reach the driver.
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

/// Calls of one thread. In its slot of `CALLS`, or an element of `CALLS_BY_THREAD`, by `pid_tgid`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    pub api: ApiCall,
    /// Probed calls nest (`aclrtCreateContext` calls `halMemAlloc`), so each site has its own.
    pub in_flight: [InFlight; MAX_NESTED],
}

/// An element of `CALLS`, by a thread's id modulo their number. Whole cache lines, so that threads do not get in each other's
/// way.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallSlot {
    /// `pid_tgid` of the thread that has it; 0: none.
    pub owner: u64,
    pub calls: Calls,
    pub reserved: [u64; 7],
}

/// Key of `WITHIN`: a thread of the process has ended within a call.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Within {
    pub tgid: u32,
    pub site: u32,
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
    Site = 16, Counters = 48, Header = 24, Enter = 56, Return = 88, Name = 176, Mark = 368, Report = 88,
    InFlight = 40, ApiCall = 32, Calls = 32 + 40 * MAX_NESTED, CallSlot = 256, Within = 8, Interpreter = 80, RawFrame = 24, StackHead = 48,
    Stack = 48 + 24 * MAX_DEPTH, TaskKey = 16, Thread = 48 + 32 + 4 * MAX_COPIES + 8 + FRAME_BYTES + 8 + 48 + 24 * MAX_DEPTH, Tensor = 48,
    Arguments = 288, NativeConfig = 24, ProcessConfig = 16, Caller = 16, Callers = 8 + 16 * MAX_CALLERS, NativeHead = 232,
    PieceHead = 40, PackedTensor = 24, Pack = 40 + 24 * PACK_LEN, Slice = 232 + PAGE_LEN * SLICE_PAGES, FrameRecord = 16, Chain = 232 + 16 * MAX_DEPTH,
}
