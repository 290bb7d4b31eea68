//! Records become events.

use std::sync::Arc;

use memscope_ebpf::{
    Arguments, Enter, Header, Mark, Name as NameRecord, Pack, Plain, Report, Return, Tensor, flags, kind,
    no_stack,
};
use rustc_hash::FxHashMap;

use super::{
    names::Names,
    operands::{Operands, collective_bytes, tensor_bytes},
    ranges::{Ranges, Through},
};
use crate::{
    model::{
        Access, AccessKind, Alloc, AllocFailed, DeviceId, DevicePtr, DriverAlloc, Event, EventKind, Free,
        Name, Nanos, PageType, Pool, Stack, Tgid, Tid, Totals,
    },
    probes::{
        catalogue::{At, Fact, Probe, Shape},
        torch_npu::ReportLayout,
    },
    stacks::Stacks,
};

/// Marks that tools put into the stream for themselves.
const TOOL_PREFIXES: [&str; 2] = ["sanitizer-op:", "memscope-aten"];
/// Texts of torch_npu's marks that may come a second time through libms_tools_ext.so.
const ECHOES: usize = 1024;
/// Handles, contexts, stubs and domains remembered for a process, of each kind.
const MOST: usize = 1 << 16;

/// What a record was, besides events.
#[derive(Debug, PartialEq)]
pub enum Notice {
    /// The process has new libraries, since this time (CLOCK_MONOTONIC, ns).
    Mapped(Tgid, u64),
    /// The process runs another program now.
    Exec(Tgid),
    /// torch_npu's task queue allocates, on a thread that has no Python functions.
    QueueAllocates(Tgid),
    /// The site's records make no sense: it must not be believed any more.
    Distrust { site: usize, why: String },
}

/// Reads a text of the target that the programs could not read (its page was not present then).
pub type ReadText = Box<dyn Fn(Tgid, u64, usize) -> Option<Vec<u8>>>;

pub struct Decoder {
    sites: Vec<Option<SiteFacts>>,
    processes: FxHashMap<Tgid, ProcessState>,
    names: Names,
    pub stacks: Stacks,
    /// Wall clock minus monotonic clock, ns.
    clock_offset: i64,
    read_text: ReadText,
    /// Records that say something by themselves: one for each call of a site. With those lost, they add up to the
    /// sites' hits.
    pub received: u64,
    /// Records that were too short or of unknown sites: never, unless the two sides disagree.
    pub malformed: u64,
}

#[derive(Clone, Copy)]
struct SiteFacts {
    probe: &'static Probe,
    layout: Option<ReportLayout>,
    checked: bool,
}

#[derive(Default)]
struct ProcessState {
    visible: Option<Vec<u16>>,
    threads: FxHashMap<Tid, ThreadState>,
    ranges: Ranges,
    contexts: FxHashMap<u64, DeviceId>,
    domains: FxHashMap<u64, Name>,
    /// References on physical handles beyond the first.
    retained: FxHashMap<u64, u32>,
    stubs: FxHashMap<u64, Name>,
    echoes: FxHashMap<Name, u32>,
    mstx: FirstCall,
    /// Found in the record that is being decoded.
    accesses: Vec<Access>,
    /// Its operators are given tensors: what kernels are launched with is the same.
    describes_tensors: bool,
    /// Its task queue has allocated.
    queue_allocates: bool,
}

/// The first use of libms_tools_ext.so makes it look for a tool, and then enter the called function a second time.
#[derive(Default, Clone, Copy)]
enum FirstCall {
    #[default]
    NotYet,
    Seen {
        tid: Tid,
        site: u32,
        address: u64,
        sp: u64,
    },
    Over,
}

impl FirstCall {
    /// Whether this call is the second entry of the first.
    fn is_reentered(&mut self, mark: &Mark) -> bool {
        let (tid, site) = (Tid(mark.header.tid), mark.header.site);
        match *self {
            Self::NotYet => {
                *self = Self::Seen { tid, site, address: mark.address, sp: mark.sp };
                false
            }
            Self::Seen { tid: t, site: s, address, sp } => {
                *self = Self::Over;
                (t, s, address) == (tid, site, mark.address) && mark.sp < sp
            }
            Self::Over => false,
        }
    }
}

#[derive(Default)]
struct ThreadState {
    device: Option<DeviceId>,
    /// The mark that torch_npu has just passed on: its address.
    passed_on: u64,
    /// The begin of the range that is being entered is a duplicate.
    duplicate: bool,
    /// The next return of a range's begin is that of a call within the call.
    reentered: bool,
    domain: Option<Name>,
    /// Of the operator that the thread names next.
    operands: Operands,
    /// The operator that it named last: it is one that names them.
    op: Option<Name>,
    /// The kernel that it launched last.
    kernel: Option<Name>,
}

/// The runtime call above the driver's: its name and bytes asked.
type Api = Option<(&'static str, u64)>;

impl Decoder {
    pub fn new(clock_offset: i64, read_text: ReadText) -> Self {
        Self {
            sites: Vec::new(),
            processes: FxHashMap::default(),
            names: Names::default(),
            stacks: Stacks::default(),
            clock_offset,
            read_text,
            received: 0,
            malformed: 0,
        }
    }

    /// What records with this number are of from now on.
    pub fn set_site(&mut self, site: usize, probe: &'static Probe, layout: Option<ReportLayout>) {
        if self.sites.len() <= site {
            self.sites.resize(site + 1, None);
        }
        self.sites[site] = Some(SiteFacts { probe, layout, checked: false });
    }

    /// Driver ids of the process's logical devices.
    pub fn set_visible_devices(&mut self, tgid: Tgid, devices: Option<Vec<u16>>) {
        self.processes.entry(tgid).or_default().visible = devices.filter(|d| !d.is_empty());
    }

    pub fn forget(&mut self, tgid: Tgid) {
        self.processes.remove(&tgid);
        self.stacks.forget(tgid);
    }

    /// Wall-clock time of a monotonic one.
    pub fn wall(&self, monotonic_ns: u64) -> Nanos {
        Nanos(monotonic_ns.saturating_add_signed(self.clock_offset))
    }

    /// Decodes one record; its events go to `emit` in order.
    pub fn decode(&mut self, bytes: &[u8], mut emit: impl FnMut(Event)) -> Option<Notice> {
        let Some(header) = Header::read(bytes) else {
            self.malformed += 1;
            return None;
        };
        let tgid = Tgid(header.tgid);
        match header.kind {
            kind::EXEC => {
                self.forget(tgid);
                emit(Event {
                    time: self.wall(header.time_ns),
                    tgid,
                    tid: Tid(header.tid),
                    kind: EventKind::Exec,
                });
                return Some(Notice::Exec(tgid));
            }
            kind::MAPPED => {
                self.received += 1;
                if let Some(native) = &mut self.stacks.native {
                    native.expect_changes(tgid);
                }
                return Some(Notice::Mapped(tgid, header.time_ns));
            }
            kind::NATIVE => {
                self.malformed += u64::from(self.stacks.learn_native(bytes).is_none());
                return None;
            }
            kind::PIECE => {
                self.malformed += u64::from(self.stacks.learn_piece(bytes).is_none());
                return None;
            }
            kind::STACK => {
                self.malformed += u64::from(self.stacks.learn(bytes).is_none());
                return None;
            }
            _ => {}
        }
        let Some(Some(site)) = self.sites.get_mut(header.site as usize) else {
            self.malformed += 1;
            return None;
        };
        let supplement = header.kind == kind::RETURN && matches!(site.probe.shape, Shape::Mark { .. });
        self.received += u64::from(!supplement);
        let event = Event {
            time: Nanos(header.time_ns.saturating_add_signed(self.clock_offset)),
            tgid,
            tid: Tid(header.tid),
            kind: EventKind::AclInit,
        };
        let process = self.processes.entry(tgid).or_default();
        let mut notice = None;
        let result = match header.kind {
            kind::ENTER => Enter::read(bytes).map(|call| process.enter(site.probe, &call, &mut self.names)),
            kind::RETURN => {
                let probe = site.probe;
                Return::read(bytes).map(|call| {
                    let api = self.sites.get(call.api as usize).copied().flatten();
                    let api = api.map(|site| (site.probe.site, call.asked));
                    let stack = self.stacks.of_event(&call.header, call.stack);
                    process.leave(probe, &call, api, stack)
                })
            }
            kind::NAME => NameRecord::read(bytes).map(|name| {
                let text = text(&name.text, name.len, name.header.flags, tgid, name.address, &self.read_text);
                process.name(site.probe, &name, &text, &mut self.names)
            }),
            kind::MARK => Mark::read(bytes).map(|mark| {
                let text = text(&mark.text, mark.len, mark.header.flags, tgid, mark.address, &self.read_text);
                process.mark(site.probe, &mark, &text, &mut self.names)
            }),
            kind::TENSOR => Tensor::read(bytes).map(|tensor| {
                let bytes = tensor_bytes(tensor.element_type, tensor.elements);
                let thread = process.threads.entry(event.tid).or_default();
                thread.operands.describe(tensor.address, bytes);
                process.describes_tensors = true;
                None
            }),
            kind::ARGUMENTS => Arguments::read(bytes).map(|arguments| {
                process.launched_with(site.probe, &arguments, &mut self.names);
                None
            }),
            kind::PACK => Pack::read(bytes).map(|pack| {
                process.packed(site.probe, &pack, &mut self.names);
                None
            }),
            kind::REPORT => match Report::read(bytes) {
                Some(report) => {
                    match process.report(site, &report, self.stacks.of_event(&report.header, report.stack)) {
                        Ok(kind) => {
                            if report.stack == no_stack::NO_STATE
                                && matches!(&kind, Some(EventKind::Alloc(block)) if block.pool == Pool::PtaWorkspace)
                                && !std::mem::replace(&mut process.queue_allocates, true)
                            {
                                notice = Some(Notice::QueueAllocates(tgid));
                            }
                            Some(kind)
                        }
                        Err(why) => return Some(Notice::Distrust { site: header.site as usize, why }),
                    }
                }
                None => None,
            },
            _ => None,
        };
        match result {
            Some(Some(kind)) => emit(Event { kind, ..event.clone() }),
            Some(None) => {}
            None => self.malformed += 1,
        }
        if let Some(process) = self.processes.get_mut(&tgid) {
            for access in process.accesses.drain(..) {
                emit(Event { kind: EventKind::Access(access), ..event.clone() });
            }
        }
        notice
    }
}

/// The text of a record; where the programs could not read it, it is read again now.
fn text<'a>(
    bytes: &'a [u8],
    len: u32,
    record_flags: u16,
    tgid: Tgid,
    address: u64,
    read: &ReadText,
) -> std::borrow::Cow<'a, [u8]> {
    if record_flags & flags::UNREADABLE != 0 && address != 0 {
        return read(tgid, address, bytes.len() - 1).unwrap_or_default().into();
    }
    let text = &bytes[..bytes.len().min(len as usize)];
    if record_flags & flags::TRUNCATED != 0 {
        // A character that was cut in two is left out.
        let whole = match std::str::from_utf8(text) {
            Err(e) if e.error_len().is_none() => &text[..e.valid_up_to()],
            _ => text,
        };
        return [whole, "…".as_bytes()].concat().into();
    }
    text.into()
}

impl ProcessState {
    /// The driver's id of a device that the process numbers so.
    fn device(&self, logical: u32) -> DeviceId {
        let mapped = self.visible.as_ref().and_then(|devices| devices.get(logical as usize)).copied();
        DeviceId(mapped.unwrap_or(logical.min(u16::MAX.into()) as u16))
    }

    fn set_device(&mut self, tid: Tid, device: DeviceId) -> EventKind {
        self.threads.entry(tid).or_default().device = Some(device);
        EventKind::DeviceSet { device }
    }

    fn context_is_of(&mut self, context: u64, device: DeviceId) {
        if context != 0 && self.contexts.len() < MOST {
            self.contexts.insert(context, device);
        }
    }

    fn enter(&mut self, probe: &'static Probe, call: &Enter, names: &mut Names) -> Option<EventKind> {
        let args = &call.args;
        let tid = Tid(call.header.tid);
        Some(match probe.observes {
            Fact::DriverFree | Fact::RuntimeFreeCounted => free(Pool::Hal, args[0])?,
            Fact::RuntimeHostFreeCounted => free(Pool::Host, args[0])?,
            Fact::DriverRelease => {
                if let Some(references) = self.retained.get_mut(&args[0]) {
                    *references -= 1;
                    if *references == 0 {
                        self.retained.remove(&args[0]);
                    }
                    return None;
                }
                free(Pool::Hal, args[0])?
            }
            Fact::DriverMap => {
                EventKind::Map { ptr: DevicePtr(args[0]), size: args[1], handle: DevicePtr(args[3]) }
            }
            Fact::DriverUnmap => EventKind::Unmap { ptr: DevicePtr(args[0]) },
            Fact::SetDevice => self.set_device(tid, self.device(args[0] as u32)),
            Fact::SetContext => self.set_device(tid, *self.contexts.get(&args[0])?),
            Fact::AclInit => EventKind::AclInit,
            Fact::AclFinalize => EventKind::AclFinalize,
            Fact::RangeEnd => self.end_range(probe, tid, args[if is_domain(probe) { 1 } else { 0 }], None)?,
            Fact::Launch => {
                let name = self.stubs.get(&args[0]).cloned();
                self.threads.entry(tid).or_default().kernel = name.clone();
                EventKind::Launch { name, stream: Some(0) }
            }
            _ => {
                self.used(probe, call, names);
                return None;
            }
        })
    }

    /// A call that says by its arguments what it reads and writes.
    fn used(&mut self, probe: &'static Probe, call: &Enter, names: &mut Names) {
        use AccessKind::{Read, Unknown, Write};
        let [a, b, c, d, ..] = call.args;
        let thread = self.threads.entry(Tid(call.header.tid)).or_default();
        let collective = |count, element_type: u64| collective_bytes(element_type as u32, count);
        let mut op = || names.get(probe.site.as_bytes());
        let used: &[(u64, u64, AccessKind)] = match probe.observes {
            Fact::TensorAddress => return thread.operands.tell(a),
            Fact::OperandBuffer => match &thread.op {
                Some(op) => {
                    let access = access(a, b, Unknown, op.clone());
                    self.accesses.extend(access);
                    return;
                }
                None => return,
            },
            Fact::Copy => &[(c, d, Read), (a, d, Write)],
            Fact::Fill => &[(a, d, Write)],
            Fact::Collective => &[(a, collective(c, d), Read), (b, collective(c, d), Write)],
            Fact::CollectiveSend => &[(a, collective(b, c), Read)],
            Fact::CollectiveReceive => &[(a, collective(b, c), Write)],
            Fact::CollectiveInPlace => &[(a, collective(b, c), Unknown)],
            _ => return,
        };
        self.accesses.extend(used.iter().filter_map(|(ptr, size, kind)| access(*ptr, *size, *kind, op())));
    }

    /// Inputs may be changed as well, as caches of keys and values are.
    fn packed(&mut self, probe: &'static Probe, pack: &Pack, names: &mut Names) {
        self.describes_tensors = true;
        let thread = self.threads.get(&Tid(pack.header.tid));
        let named = thread.and_then(|thread| thread.op.clone());
        let op = named.unwrap_or_else(|| names.get(probe.site.trim_end_matches(" (operands)").as_bytes()));
        let inputs = pack.inputs as usize;
        let used = pack.tensors.iter().take(pack.count as usize).enumerate().filter_map(|(index, tensor)| {
            let kind = if index < inputs { AccessKind::Unknown } else { AccessKind::Write };
            access(tensor.device, tensor.bytes, kind, op.clone())
        });
        self.accesses.extend(used);
    }

    /// Words that are no addresses of blocks will be found to be none.
    fn launched_with(&mut self, probe: &'static Probe, arguments: &Arguments, names: &mut Names) {
        /// No device hands out addresses below, and most numbers are.
        const LEAST: u64 = 1 << 20;
        if self.describes_tensors {
            return;
        }
        let thread = self.threads.get(&Tid(arguments.header.tid));
        let kernel = thread.and_then(|thread| thread.kernel.clone());
        let op = kernel.unwrap_or_else(|| names.get(probe.site.trim_end_matches(" (arguments)").as_bytes()));
        let words = arguments.words.iter().take(arguments.len as usize / 8).filter(|word| **word >= LEAST);
        let used = words.filter_map(|word| access(*word, 0, AccessKind::Unknown, op.clone()));
        self.accesses.extend(used);
    }

    fn leave(
        &mut self,
        probe: &'static Probe,
        call: &Return,
        api: Api,
        stack: Option<Arc<Stack>>,
    ) -> Option<EventKind> {
        let args = &call.args;
        let tid = Tid(call.header.tid);
        let failed = call.header.flags & flags::FAILED != 0;
        let unreadable = call.header.flags & flags::UNREADABLE != 0;
        match probe.observes {
            Fact::DriverAlloc => {
                let flag = args[2];
                // Bits 10 to 13: 2 is pinned host memory, whose device bits mean nothing.
                let host = (flag >> 10) & 0xf == 2;
                let page = match flag {
                    f if f & (1 << 31) != 0 => PageType::Giant,
                    f if f & (1 << 17) != 0 => PageType::Huge,
                    _ => PageType::Normal,
                };
                let pool = if host { Pool::Host } else { Pool::Hal };
                let device = (!host).then_some(DeviceId((flag & 0x3ff) as u16));
                let driver =
                    DriverAlloc { module: Some((flag >> 56) as u8), page: Some(page), create: false, api };
                driver_alloc(probe, call, stack, pool, device, driver)
            }
            Fact::DriverCreate => {
                // struct drv_mem_prop: side@0, devid@4, module_id@8, pg_type@12.
                let [_, _, first, second] = call.args;
                let known = !unreadable;
                let side = first as u32;
                let pool = if known && side != 1 { Pool::Host } else { Pool::Hal };
                let device = (known && side == 1).then_some(DeviceId((first >> 32) as u16));
                let page = match (second >> 32) as u32 {
                    1 => PageType::Huge,
                    2 => PageType::Giant,
                    _ => PageType::Normal,
                };
                let driver = DriverAlloc { module: Some(second as u8), page: Some(page), create: true, api };
                driver_alloc(probe, call, stack, pool, device, driver)
            }
            Fact::RuntimeAllocCounted | Fact::RuntimeHostAllocCounted => {
                let pool = if probe.observes == Fact::RuntimeAllocCounted { Pool::Hal } else { Pool::Host };
                let driver =
                    DriverAlloc { module: Some(33), page: Some(PageType::Normal), create: false, api };
                driver_alloc(probe, call, stack, pool, None, driver)
            }
            Fact::DriverRetain => {
                if !failed && call.result != 0 && self.retained.len() < MOST {
                    *self.retained.entry(call.result).or_default() += 1;
                }
                None
            }
            Fact::MindsporeAlloc => Some(if failed {
                EventKind::AllocFailed(AllocFailed {
                    pool: Pool::Mindspore,
                    function: probe.site,
                    device: None,
                    size: args[1],
                    code: 0,
                    api: None,
                    stack,
                })
            } else {
                EventKind::Alloc(Alloc {
                    pool: Pool::Mindspore,
                    device: None,
                    ptr: DevicePtr(call.result),
                    size: args[1],
                    totals: None,
                    driver: None,
                    stack,
                })
            }),
            Fact::DeviceClose if !failed => {
                Some(EventKind::DeviceReset { device: DeviceId((args[0] & 0xffff) as u16) })
            }
            Fact::CreateContext if !failed => {
                let device = self.device(args[1] as u32);
                self.context_is_of(call.result, device);
                Some(self.set_device(tid, device))
            }
            Fact::GetContext if !failed => {
                let device = self.threads.get(&tid)?.device?;
                self.context_is_of(call.result, device);
                None
            }
            Fact::RangeStart => {
                let thread = self.threads.entry(tid).or_default();
                if std::mem::take(&mut thread.reentered) {
                    return None;
                }
                if std::mem::take(&mut thread.duplicate) {
                    self.ranges.mark_duplicate(call.result);
                } else {
                    self.ranges.name(tid, through(probe), call.result);
                }
                None
            }
            Fact::DomainCreate => {
                let name = self.threads.entry(tid).or_default().domain.take()?;
                if call.result != 0 && self.domains.len() < MOST {
                    self.domains.insert(call.result, name);
                }
                None
            }
            _ => None,
        }
    }

    fn name(
        &mut self,
        probe: &'static Probe,
        record: &NameRecord,
        text: &[u8],
        names: &mut Names,
    ) -> Option<EventKind> {
        match probe.observes {
            Fact::Op => {
                let name = (!text.is_empty()).then(|| names.get(text))?;
                let thread = self.threads.entry(Tid(record.header.tid)).or_default();
                thread.operands.take(&name, &mut self.accesses);
                thread.op = Some(name.clone());
                Some(EventKind::Op { name })
            }
            Fact::OperandsOf => {
                let thread = self.threads.entry(Tid(record.header.tid)).or_default();
                if thread.op.is_none() && !text.is_empty() {
                    thread.operands.take(&names.get(text), &mut self.accesses);
                }
                None
            }
            // Of `rtFunctionRegister`: which name the stub in argument 1 has.
            Fact::Launch if probe.site == "rtFunctionRegister" => {
                if self.stubs.len() < MOST && !text.is_empty() {
                    self.stubs.insert(record.args[1], names.get(text));
                }
                None
            }
            Fact::Launch => {
                // Read from inside an object of the runtime, whose layout is not ours to know for sure.
                let plausible = !text.is_empty() && text.iter().all(|b| b.is_ascii_graphic());
                let name = plausible.then(|| names.get(text));
                self.threads.entry(Tid(record.header.tid)).or_default().kernel = name.clone();
                Some(EventKind::Launch { name, stream: Some(record.args[2]) })
            }
            _ => None,
        }
    }

    fn mark(
        &mut self,
        probe: &'static Probe,
        mark: &Mark,
        text: &[u8],
        names: &mut Names,
    ) -> Option<EventKind> {
        let tid = Tid(mark.header.tid);
        if through(probe) == Through::Mstx && self.mstx.is_reentered(mark) {
            self.threads.entry(tid).or_default().reentered = probe.observes == Fact::RangeStart;
            return None;
        }
        let domain = match mark.domain_len {
            0 => None,
            len => Some(names.get(&mark.domain[..mark.domain.len().min(len as usize)])),
        };
        let domain = domain.filter(|d| &**d != "default");
        match probe.observes {
            Fact::RangeEnd | Fact::RangePop => {
                return self.end_range(probe, tid, mark.args[1], domain.as_ref());
            }
            Fact::DomainCreate => {
                self.threads.entry(tid).or_default().domain = Some(names.get(text));
                return None;
            }
            _ => {}
        }
        let domain =
            domain.or_else(|| if is_domain(probe) { self.domains.get(&mark.args[0]).cloned() } else { None });
        let text: Name = crate::text::sanitize(text).into();
        if TOOL_PREFIXES.iter().any(|prefix| text.starts_with(prefix)) {
            return None;
        }
        let from = through(probe);
        if self.is_echo(from, tid, mark.address, &text) {
            self.threads.entry(tid).or_default().duplicate = probe.observes == Fact::RangeStart;
            return None;
        }
        match probe.observes {
            Fact::Mark => Some(EventKind::Mark { text, domain }),
            Fact::RangeStart => {
                let range = self.ranges.begin(tid, from, domain.clone());
                Some(EventKind::RangeBegin { range, text, domain })
            }
            _ => None,
        }
    }

    /// Whether torch_npu has passed on a mark that was seen at its own entry already: on the same thread with
    /// the same text address, or on the consumer of its task queue with a copy of the text.
    fn is_echo(&mut self, from: Through, tid: Tid, address: u64, text: &Name) -> bool {
        match from {
            Through::Torch | Through::TorchStack => {
                self.threads.entry(tid).or_default().passed_on = address;
                if self.echoes.len() >= ECHOES {
                    self.echoes.clear();
                }
                *self.echoes.entry(text.clone()).or_default() += 1;
                false
            }
            Through::Mstx => {
                let thread = self.threads.entry(tid).or_default();
                let same_call = address != 0 && std::mem::take(&mut thread.passed_on) == address;
                if !same_call {
                    return false;
                }
                self.echoes.remove(text);
                true
            }
            Through::Python => false,
        }
    }

    fn end_range(&mut self, probe: &Probe, tid: Tid, id: u64, domain: Option<&Name>) -> Option<EventKind> {
        let from = through(probe);
        if from == Through::Mstx && self.ranges.is_duplicate(id) {
            return None;
        }
        Some(EventKind::RangeEnd { range: self.ranges.end(tid, from, domain, id) })
    }

    fn report(
        &mut self,
        site: &mut SiteFacts,
        report: &Report,
        stack: Option<Arc<Stack>>,
    ) -> Result<Option<EventKind>, String> {
        if report.header.flags & flags::UNREADABLE != 0 {
            return Ok(None);
        }
        if site.probe.observes == Fact::MindsporeFree {
            return Ok(free(Pool::Mindspore, report.words[0]));
        }
        let layout = site.layout.ok_or("the layout of the report is not known for this build")?;
        let usage = Usage::read(&report.words, layout)?;
        site.checked = true;
        let pool = if usage.workspace { Pool::PtaWorkspace } else { Pool::Pta };
        let device = Some(self.device(u32::from(usage.device)));
        let totals = Some(Totals { allocated: usage.allocated, reserved: usage.reserved });
        let ptr = DevicePtr(usage.ptr);
        Ok(match usage.what {
            What::Alloc => Some(EventKind::Alloc(Alloc {
                pool,
                device,
                ptr,
                size: usage.size,
                totals,
                driver: None,
                stack,
            })),
            What::Free => Some(EventKind::Free(Free { pool, device, ptr, size: Some(usage.size), totals })),
            // The block has become reusable: no change of what is allocated.
            What::BlockFree => None,
        })
    }
}

fn driver_alloc(
    probe: &'static Probe,
    call: &Return,
    stack: Option<Arc<Stack>>,
    pool: Pool,
    device: Option<DeviceId>,
    driver: DriverAlloc,
) -> Option<EventKind> {
    let size = call.args[1];
    if call.header.flags & flags::FAILED != 0 {
        let (function, code, api) = (probe.site, call.result as i32, driver.api);
        return Some(EventKind::AllocFailed(AllocFailed { pool, function, device, size, code, api, stack }));
    }
    // Without the address there is no block to speak of; the site counts it as unreadable.
    (call.result != 0).then_some(EventKind::Alloc(Alloc {
        pool,
        device,
        ptr: DevicePtr(call.result),
        size,
        totals: None,
        driver: Some(driver),
        stack,
    }))
}

fn access(ptr: u64, size: u64, kind: AccessKind, op: Name) -> Option<Access> {
    (ptr != 0).then_some(Access { pool: None, ptr: DevicePtr(ptr), size, kind, op: Some(op) })
}

fn free(pool: Pool, ptr: u64) -> Option<EventKind> {
    // Freeing null is allowed, and nothing.
    (ptr != 0).then_some(EventKind::Free(Free {
        pool,
        device: None,
        ptr: DevicePtr(ptr),
        size: None,
        totals: None,
    }))
}

fn through(probe: &Probe) -> Through {
    match probe.at {
        At::TorchNpu(_) if probe.site.ends_with("rangePush") || probe.site.ends_with("rangePop") => {
            Through::TorchStack
        }
        At::TorchNpu(_) => Through::Torch,
        At::MstxPython(_) => Through::Python,
        At::Symbol(_) => Through::Mstx,
    }
}

/// Of the functions of libms_tools_ext.so, those that take a domain first.
fn is_domain(probe: &Probe) -> bool {
    probe.site.starts_with("mstxDomain")
}

enum What {
    Alloc,
    Free,
    BlockFree,
}

/// torch_npu's `MemoryUsage`, checked: nonsense must not become numbers.
struct Usage {
    device: u8,
    workspace: bool,
    what: What,
    ptr: u64,
    size: u64,
    allocated: u64,
    reserved: u64,
}

impl Usage {
    fn read(words: &[u64; 7], layout: ReportLayout) -> Result<Self, String> {
        /// `c10::DeviceType::PrivateUse1`.
        const PRIVATE_USE_1: u8 = 20;
        let head = words[0].to_le_bytes();
        let (size, allocated, reserved) = (words[2] as i64, words[3] as i64, words[4] as i64);
        let data_type = head[usize::from(layout.data_type_at())];
        let component = if layout == ReportLayout::WithComponent { head[2] } else { 0 };
        let wrong = |what: String| {
            Err(format!(
                "its records make no sense ({what}), so it was switched off: this build of torch_npu is not understood; \
                 driver figures remain exact. Please report the build-id"
            ))
        };
        if head[0] != PRIVATE_USE_1 {
            return wrong(format!("device type {}, not {PRIVATE_USE_1}", head[0]));
        }
        if head[1] >= 64 {
            return wrong(format!("device {}", head[1]));
        }
        if component > 1 || data_type > 2 {
            return wrong(format!("component {component}, kind {data_type}"));
        }
        if allocated < 0 || reserved < 0 || allocated > reserved {
            return wrong(format!("{allocated} bytes allocated of {reserved} reserved"));
        }
        let what = match (data_type, size) {
            (0, 0..) => What::Alloc,
            (1, ..=0) => What::Free,
            (ReportLayout::BLOCK_FREE, ..=0) => What::BlockFree,
            _ => return wrong(format!("kind {data_type} with a size of {size}")),
        };
        Ok(Self {
            device: head[1],
            workspace: component == 1,
            what,
            ptr: words[1],
            size: size.unsigned_abs(),
            allocated: allocated as u64,
            reserved: reserved as u64,
        })
    }
}
