//! Native stacks: from the registers and the piece of stack that the BPF programs send to the names of functions.

mod guard;
#[cfg(fuzzing)]
pub(super) mod module;
#[cfg(not(fuzzing))]
mod module;
mod unwind;

use std::{
    collections::HashMap,
    fmt,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use blazesym::symbolize::Symbolizer;
use memscope_ebpf::{FrameRecord, Header, NativeHead, Plain, native};
use rustc_hash::FxHashMap;

pub use self::module::demangled;
use self::{
    module::Module,
    unwind::{Registers, Step},
};
use super::{MOST_STACKS, Origins, Reason, in_order};
use crate::{
    attach::{
        proc::Proc,
        process::{FileId, MappedFile, Process},
    },
    model::{Frame, NativeFrame, NativeStack, Stack, Tgid, Tid},
};

/// Files whose code is known, at most.
const MOST_MODULES: usize = 1 << 14;
/// A process's mappings are read again for an address that is in none of them, but not more often than this.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// How many allocations of a process have a native stack.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NativeTally {
    pub whole: u64,
    /// Those of which the outermost frames are missing.
    pub cut: u64,
    without: FxHashMap<Reason, u64>,
}

impl NativeTally {
    /// In order of the reasons.
    pub fn without(&self) -> Vec<(Reason, u64)> {
        in_order(&self.without)
    }
}

/// The native stacks of all processes.
pub struct Natives {
    proc: Proc,
    /// Frames of a stack at most.
    depth: usize,
    modules: Vec<Module>,
    by_file: HashMap<FileId, usize>,
    symbolizer: Symbolizer,
    processes: FxHashMap<Tgid, Code>,
    tallies: FxHashMap<Tgid, NativeTally>,
}

impl fmt::Debug for Natives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Natives").field("modules", &self.modules.len()).finish_non_exhaustive()
    }
}

/// What is known of a process.
#[derive(Debug)]
struct Code {
    /// In order of address.
    mappings: Vec<Mapping>,
    looked: Instant,
    /// Libraries have come or gone since.
    stale: bool,
    origins: Origins,
    /// By the frames, and whether they are all.
    stacks: FxHashMap<(Box<[Spot]>, bool), Told>,
    /// With the Python stacks that they came with.
    joined: FxHashMap<(u64, usize), Arc<Stack>>,
    /// Of a thread's next event.
    pending: FxHashMap<Tid, (u32, Told)>,
}

/// Code of a file in a process.
#[derive(Debug)]
struct Mapping {
    start: u64,
    end: u64,
    offset: u64,
    file: String,
    module: usize,
}

/// A frame: where it goes on, and an address within the instruction that it is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Spot {
    ip: u64,
    within: u64,
}

impl Spot {
    /// A return address is that of the next instruction, which may be another function's.
    fn returned_to(ip: u64) -> Self {
        Self { ip, within: ip.wrapping_sub(1) }
    }

    fn interrupted(ip: u64) -> Self {
        Self { ip, within: ip }
    }
}

/// The names of a stack, or why there are none.
type Told = Result<Arc<NativeStack>, Reason>;

/// Frames, innermost first, and whether there are no others.
type Chain = (Vec<Spot>, bool);

impl Natives {
    pub fn new(proc: Proc, depth: u32) -> Self {
        Self {
            proc,
            depth: depth as usize,
            modules: Vec::new(),
            by_file: HashMap::new(),
            symbolizer: Symbolizer::builder().enable_demangling(false).build(),
            processes: FxHashMap::default(),
            tallies: FxHashMap::default(),
        }
    }

    pub fn tally(&self, tgid: Tgid) -> Option<&NativeTally> {
        self.tallies.get(&tgid)
    }

    /// The process ended or runs another program.
    pub fn forget(&mut self, tgid: Tgid) {
        self.processes.remove(&tgid);
    }

    /// Looks at the code that a process has mapped now. Its files stay open: what it did can be told when it is gone.
    pub fn look(&mut self, process: &Process) {
        let Ok(mapped) = process.mapped_code() else { return };
        let origins = Origins::of(mapped.iter().filter_map(|file| file.path.to_str()));
        let code = self.processes.entry(process.tgid).or_insert_with(|| Code {
            mappings: Vec::new(),
            looked: Instant::now(),
            stale: false,
            origins: Origins::default(),
            stacks: FxHashMap::default(),
            joined: FxHashMap::default(),
            pending: FxHashMap::default(),
        });
        let known = std::mem::take(&mut code.mappings);
        let mut mappings = Vec::with_capacity(mapped.len());
        for file in mapped {
            let (Some(start), Some(end)) = (file.start(), file.end()) else { continue };
            let is_same = |known: &&Mapping| {
                (known.start, known.end, known.offset) == (start, end, file.offset) && known.file == file.id()
            };
            let module = match known.iter().find(is_same) {
                Some(known) => Some(known.module),
                None => open(&mut self.modules, &mut self.by_file, process, &file),
            };
            if let Some(module) = module {
                mappings.push(Mapping {
                    start,
                    end,
                    offset: file.offset,
                    file: file.id().to_owned(),
                    module,
                });
            }
        }
        let is_known =
            |new: &Mapping| known.iter().any(|old| (old.start, old.module) == (new.start, new.module));
        // Addresses may name other functions than before.
        if !mappings.iter().all(is_known) || known.len() > mappings.len() {
            code.stacks.clear();
            code.joined.clear();
        }
        (code.mappings, code.origins) = (mappings, origins);
        (code.looked, code.stale) = (Instant::now(), false);
    }

    /// The process has mapped or unmapped libraries.
    pub fn expect_changes(&mut self, tgid: Tgid) {
        if let Some(code) = self.processes.get_mut(&tgid) {
            code.stale = true;
        }
    }

    /// Takes a NATIVE record; `None` when it is malformed.
    pub fn learn(&mut self, bytes: &[u8]) -> Option<()> {
        let head = NativeHead::read(bytes)?;
        let rest = bytes.get(size_of::<NativeHead>()..)?;
        let tgid = Tgid(head.header.tgid);
        if self.processes.get(&tgid).is_none_or(|code| code.stale) {
            self.look_at(tgid);
        }
        let chain = match machine(&head, rest)? {
            Machine::Slice(stack) => self.unwind(&head, &stack),
            Machine::Records(records) => self.follow(&head, &records),
        };
        let stack = self.name(tgid, chain);
        if let Some(code) = self.processes.get_mut(&tgid) {
            code.pending.insert(Tid(head.header.tid), (head.header.site, stack));
        }
        Some(())
    }

    fn look_at(&mut self, tgid: Tgid) {
        if let Ok(process) = Process::open(&self.proc, tgid) {
            self.look(&process);
        }
    }

    /// The native stack of an event by the flags of its record; `None` where none was wanted. Counts it.
    pub fn take(&mut self, header: &Header) -> Option<Arc<NativeStack>> {
        let stack = match header.flags & native::MASK {
            native::NOT_WANTED => return None,
            native::SENT => {
                let code = self.processes.get_mut(&Tgid(header.tgid));
                match code.and_then(|code| code.pending.remove(&Tid(header.tid))) {
                    Some((site, stack)) if site == header.site => stack,
                    _ => Err(Reason::NoCode),
                }
            }
            native::SMALL => Err(Reason::Small),
            native::LIMITED => Err(Reason::Limited),
            native::RING_FULL | native::NO_ROOM => Err(Reason::NoRoom),
            _ => Err(Reason::Unreadable),
        };
        let tally = self.tallies.entry(Tgid(header.tgid)).or_default();
        match stack {
            Ok(stack) if stack.is_cut() => {
                tally.cut += 1;
                Some(stack)
            }
            Ok(stack) => {
                tally.whole += 1;
                Some(stack)
            }
            Err(reason) => {
                *tally.without.entry(reason).or_default() += 1;
                None
            }
        }
    }

    /// A Python stack (with its id) and a native one as one. Neither of them is copied.
    pub fn join(
        &mut self,
        tgid: Tgid,
        id: u64,
        python: Option<&Arc<Stack>>,
        native: Arc<NativeStack>,
    ) -> Arc<Stack> {
        let id = if python.is_some() { id } else { 0 };
        let joined = |native| Arc::new(Stack::with_native(python.map(|stack| &**stack), native));
        match self.processes.get_mut(&tgid) {
            // Both are kept, so that an address names one of them.
            Some(code) if code.joined.len() < MOST_STACKS => {
                let key = (id, Arc::as_ptr(&native) as usize);
                code.joined.entry(key).or_insert_with(|| joined(native)).clone()
            }
            _ => joined(native),
        }
    }

    /// The code at an address: its file, and the address in that before it was loaded.
    fn place(&mut self, tgid: Tgid, address: u64) -> Option<(usize, u64)> {
        let code = self.processes.get(&tgid)?;
        if code.find(address).is_none() && code.looked.elapsed() >= LOOK_AGAIN {
            self.look_at(tgid);
        }
        let (module, start, offset) = self.processes.get(&tgid)?.find(address)?;
        let bias = self.modules.get_mut(module)?.bias(start, offset)?;
        Some((module, address.wrapping_sub(bias)))
    }

    /// The return address itself where `found` is that of a return probe's trampoline, which stands in for it on the
    /// stack: the page that the kernel has put into the process begins with it.
    fn repaired(&self, head: &NativeHead, found: u64, is_its_call: impl Fn(u64) -> bool) -> u64 {
        const PAGE: u64 = 4096;
        let is_code =
            self.processes.get(&Tgid(head.header.tgid)).is_some_and(|code| code.find(found).is_some());
        if is_code || !found.is_multiple_of(PAGE) {
            return found;
        }
        let calls = head.callers.calls.iter().take(head.callers.count as usize).rev();
        calls.filter(|call| is_its_call(call.sp)).map(|call| call.address).next().unwrap_or(found)
    }

    fn unwind(&mut self, head: &NativeHead, stack: &Piece<'_>) -> Chain {
        let tgid = Tgid(head.header.tgid);
        let word = |address: u64| stack.word(address);
        let mut at = Registers { ip: head.ip, sp: head.sp, saved: head.saved.map(Some) };
        let mut spot = Spot::returned_to(at.ip);
        let mut frames = Vec::new();
        while frames.len() < self.depth
            && let Some((module, address)) = self.place(tgid, spot.within)
            && let Some(module) = self.modules.get_mut(module)
        {
            frames.push(spot);
            let Some(rule) = module.rule(address) else { break };
            let Some((tables, file)) = module.tables() else { break };
            match tables.step(file, &rule, &at, &word) {
                Step::Outermost => return (frames, true),
                Step::Unknown => break,
                Step::Caller(caller, _) if rule.is_signal => {
                    at = caller;
                    spot = Spot::interrupted(at.ip);
                }
                Step::Caller(caller, slot) => {
                    at = caller;
                    // At the entry of a call its return address is what the stack pointer points to.
                    at.ip = self.repaired(head, at.ip, |sp| Some(sp) == slot);
                    spot = Spot::returned_to(at.ip);
                }
            }
        }
        (frames, false)
    }

    /// Return addresses as the frame records have them.
    fn follow(&mut self, head: &NativeHead, records: &[FrameRecord]) -> Chain {
        let tgid = Tgid(head.header.tgid);
        let mut frames = Vec::new();
        let mut spot = Spot::returned_to(head.ip);
        let mut record = head.saved[0];
        let mut records = records.iter();
        while frames.len() < self.depth && self.place(tgid, spot.within).is_some() {
            frames.push(spot);
            let Some(&FrameRecord { next, address }) = records.next() else {
                return (frames, head.more == 0);
            };
            // The stack pointer at the entry of a call lies between its own frame record and its caller's.
            let end = if next == 0 { u64::MAX } else { next };
            let ip = self.repaired(head, address, |sp| record < sp && sp <= end);
            // The outermost frame returns nowhere.
            if ip == 0 {
                return (frames, true);
            }
            spot = Spot::returned_to(ip);
            record = next;
        }
        (frames, false)
    }

    fn name(&mut self, tgid: Tgid, (frames, whole): Chain) -> Told {
        let Self { modules, symbolizer, processes, .. } = self;
        let code = processes.get_mut(&tgid).ok_or(Reason::NoCode)?;
        let key = (frames.into_boxed_slice(), whole);
        if let Some(stack) = code.stacks.get(&key) {
            return stack.clone();
        }
        if code.stacks.len() >= MOST_STACKS {
            return Err(Reason::NoRoom);
        }
        let mut named = Vec::with_capacity(key.0.len());
        for spot in &key.0 {
            let Some((module, start, offset)) = code.find(spot.within) else { break };
            let Some(module) = modules.get_mut(module) else { break };
            let Some(bias) = module.bias(start, offset) else { break };
            let origin = code.origins.of_code(&module.path);
            let names = module.names(spot.within.wrapping_sub(bias), symbolizer);
            let last = names.len().saturating_sub(1);
            named.extend(names.iter().enumerate().map(|(n, name)| {
                let (file, line) = match &name.source {
                    Some((file, line)) => (file.clone(), *line),
                    None => (module.path.clone(), None),
                };
                let frame = NativeFrame {
                    frame: Frame { function: name.function.clone(), file, line },
                    module: module.path.clone(),
                    symbol: name.symbol.clone(),
                    offset: name.offset + (spot.ip - spot.within),
                    address: spot.ip,
                    inlined: n < last,
                };
                (frame, origin)
            }));
        }
        let stack = NativeStack::new(named, !whole).map(Arc::new).ok_or(Reason::NoCode);
        code.stacks.insert(key, stack.clone());
        stack
    }
}

impl Code {
    /// The module at an address, and from where on which part of its file is mapped there.
    fn find(&self, address: u64) -> Option<(usize, u64, u64)> {
        let after = self.mappings.partition_point(|mapping| mapping.start <= address);
        let mapping = self.mappings.get(after.checked_sub(1)?)?;
        (address < mapping.end).then_some((mapping.module, mapping.start, mapping.offset))
    }
}

/// The module of a mapped file, whichever process maps it.
fn open(
    modules: &mut Vec<Module>,
    by_file: &mut HashMap<FileId, usize>,
    process: &Process,
    mapped: &MappedFile,
) -> Option<usize> {
    let file = process.open_mapped(mapped).ok()?;
    let id = FileId::of(&file).ok()?;
    if let Some(module) = by_file.get(&id) {
        return Some(*module);
    }
    if modules.len() >= MOST_MODULES {
        return None;
    }
    let path: &Path = &mapped.path;
    modules.push(Module::new(file, path));
    by_file.insert(id, modules.len() - 1);
    Some(modules.len() - 1)
}

/// A piece of a thread's stack.
struct Piece<'a> {
    start: u64,
    bytes: &'a [u8],
}

impl Piece<'_> {
    fn word(&self, address: u64) -> Option<u64> {
        let at = usize::try_from(address.checked_sub(self.start)?).ok()?;
        Some(u64::from_le_bytes(*self.bytes.get(at..)?.first_chunk()?))
    }
}

/// What a NATIVE record holds, by the machine.
enum Machine<'a> {
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "of the other machine"))]
    Slice(Piece<'a>),
    #[cfg_attr(not(target_arch = "aarch64"), allow(dead_code, reason = "of the other machine"))]
    Records(Vec<FrameRecord>),
}

#[cfg(target_arch = "x86_64")]
fn machine<'a>(head: &NativeHead, rest: &'a [u8]) -> Option<Machine<'a>> {
    let page = memscope_ebpf::PAGE_LEN;
    let bytes = rest.get(..page.checked_mul(head.count as usize)?)?;
    Some(Machine::Slice(Piece { start: head.sp & !(page as u64 - 1), bytes }))
}

#[cfg(target_arch = "aarch64")]
fn machine<'a>(head: &NativeHead, rest: &'a [u8]) -> Option<Machine<'a>> {
    let records = rest.chunks_exact(size_of::<FrameRecord>()).filter_map(FrameRecord::read);
    let records: Vec<_> = records.take(head.count as usize).collect();
    (records.len() == head.count as usize).then_some(Machine::Records(records))
}

#[cfg(test)]
mod tests {
    use memscope_ebpf::{Caller, Callers, kind};

    use super::*;

    /// What a return probe puts on the stack: the beginning of a page that belongs to no file.
    const TRAMPOLINE: u64 = 0x10_0000;

    fn of_this_process(depth: u32) -> (Natives, NativeHead) {
        let mut natives = Natives::new(Proc::default(), depth);
        let tgid = std::process::id();
        natives.look_at(Tgid(tgid));
        let header = Header { tgid, tid: tgid, kind: kind::NATIVE, ..Header::default() };
        (natives, NativeHead { header, ..NativeHead::default() })
    }

    fn addresses(chain: &Chain) -> Vec<u64> {
        chain.0.iter().map(|spot| spot.ip).collect()
    }

    #[test]
    fn frame_records_lead_to_the_outermost_function() {
        let (mut natives, mut head) = of_this_process(16);
        let code = this_code();
        (head.ip, head.saved[0]) = (code, 0x100);
        let record = |next, address| FrameRecord { next, address };
        let records = [record(0x200, code + 8), record(0x300, code + 16), record(0, 0)];
        let (frames, whole) = natives.follow(&head, &records);
        assert_eq!((addresses(&(frames, whole)), whole), (vec![code, code + 8, code + 16], true));

        // The last frame record is missing, or leads out of all code.
        head.more = 1;
        assert!(!natives.follow(&head, &records[..2]).1);
        let (frames, whole) = natives.follow(&head, &[record(0x200, 0x1234), record(0, 0)]);
        assert_eq!((addresses(&(frames, whole)), whole), (vec![code], false));
    }

    #[test]
    fn return_probes_do_not_cut_stacks() {
        let (mut natives, mut head) = of_this_process(16);
        let code = this_code();
        (head.ip, head.saved[0]) = (code, 0x100);
        let call = |sp, address| Caller { sp, address };
        head.callers = Callers { count: 2, ..Callers::default() };
        head.callers.calls[..3].copy_from_slice(&[
            call(0x2f0, code + 16),
            call(0x1f0, code + 8),
            call(0x1f8, code + 99),
        ]);
        let record = |next, address| FrameRecord { next, address };
        let records = [record(0x200, TRAMPOLINE), record(0x300, TRAMPOLINE), record(0, 0)];
        let chain = natives.follow(&head, &records);
        assert_eq!((addresses(&chain), chain.1), (vec![code, code + 8, code + 16], true));

        // One whose call is not known, and a word that no probe has put there.
        head.callers.count = 1;
        assert_eq!(addresses(&natives.follow(&head, &records)), [code]);
        let records = [record(0x300, TRAMPOLINE + 8), record(0, 0)];
        assert_eq!(addresses(&natives.follow(&head, &records)), [code]);
    }

    #[test]
    fn no_more_frames_than_wanted() {
        let (mut natives, mut head) = of_this_process(2);
        let code = this_code();
        (head.ip, head.saved[0]) = (code, 0x100);
        let records: Vec<_> = (2..20).map(|n| FrameRecord { next: n << 8, address: code + n }).collect();
        let chain = natives.follow(&head, &records);
        assert_eq!((addresses(&chain), chain.1), (vec![code, code + 2], false));
    }

    #[test]
    fn records_that_end_early_are_malformed() {
        let (mut natives, _) = of_this_process(16);
        assert!(natives.learn(&[0; 40]).is_none());
        let mut record = vec![0; size_of::<NativeHead>()];
        assert!(natives.learn(&record).is_some());
        // `count`, and nothing of what is counted.
        let count = std::mem::offset_of!(NativeHead, count);
        record[count..count + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(natives.learn(&record).is_none());
    }

    fn this_code() -> u64 {
        this_code as *const () as u64 + 1
    }
}
