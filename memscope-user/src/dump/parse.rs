//! From the cells of the table to a [`Row`], whatever the file format: the inverse of `record`, for all the dialects
//! that msMemScope has written.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::model::{
    Access, AccessKind, Alloc, AllocFailed, AllocationId, DeviceId, DevicePtr, DriverAlloc, EventKind, Free,
    Module, Name, Nanos, PageType, Pool, Stack, Tgid, Tid, Totals,
};
use crate::text::sanitize;

use super::csv::{SplitError, decode_text};
use super::row::{Fact, Framework, Row};
use super::stack;

/// Distinct names kept to be shared. A dump can have as many as it has rows.
const NAMES_KEPT: usize = 1 << 16;

/// The same of stacks, which are larger.
const STACKS_KEPT: usize = 1 << 12;

/// Keys and kinds of rows of which it is counted how many say what we do not hold: a hostile dump has as many as rows.
const UNHELD_KEPT: usize = 64;

/// What is wrong with a row.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    #[error("{0}")]
    Split(String),
    #[error("column {column}: `{text}` is not {expected}")]
    Cell { column: &'static str, text: String, expected: &'static str },
    #[error("a {event} row without {attr} in column Attr")]
    Missing { event: &'static str, attr: &'static str },
    #[error("column Attr is not a JSON object: {0}")]
    Json(String),
    /// Of a later version of msMemScope, or a typing error: what it says of memory is missing.
    #[error("Event and Event Type: `{0}` is no kind of row that is known here")]
    Kind(String),
}

impl From<SplitError> for RowError {
    fn from(error: SplitError) -> Self {
        RowError::Split(error.to_string())
    }
}

/// How texts of the target were made cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    Csv,
    /// Values are as they are, but the texts of marks have quotation marks around them.
    Db,
    /// Values are as they are.
    Plain,
}

/// The cells of one row.
pub(super) struct Fields<'a> {
    pub id: &'a [u8],
    pub event: &'a [u8],
    pub event_type: &'a [u8],
    pub name: &'a [u8],
    pub time: &'a [u8],
    pub pid: &'a [u8],
    pub tid: &'a [u8],
    pub device: &'a [u8],
    pub ptr: &'a [u8],
    pub attrs: Attrs<'a>,
    /// Stack of the Python functions.
    pub python: &'a [u8],
    /// Of the native ones.
    pub native: &'a [u8],
}

/// What can be said of a row without those before it. [`Continuity`] adds the rest.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Parsed {
    pub id: u64,
    pub row: Row,
    /// The row names the range that it begins or ends. Without it, a beginning has no number yet, and an end has the
    /// one from its text.
    pub range_named: bool,
    /// The size is written with a minus sign, as the 2025 format does for frees.
    pub negative_size: bool,
    /// A driver row of the 2025 format, which does not tell where the memory is when it is freed.
    pub old_driver: bool,
}

/// The values of column Attr that mean something to us.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Attrs<'a> {
    allocation_id: Option<&'a [u8]>,
    addr: Option<&'a [u8]>,
    size: Option<&'a [u8]>,
    total: Option<&'a [u8]>,
    used: Option<&'a [u8]>,
    owner: Option<&'a [u8]>,
    module: Option<&'a [u8]>,
    page_type: Option<&'a [u8]>,
    alloc_type: Option<&'a [u8]>,
    shadow: Option<&'a [u8]>,
    pool: Option<&'a [u8]>,
    stream: Option<&'a [u8]>,
    func: Option<&'a [u8]>,
    req_size: Option<&'a [u8]>,
    ret: Option<&'a [u8]>,
    api: Option<&'a [u8]>,
    api_size: Option<&'a [u8]>,
    range: Option<&'a [u8]>,
    domain: Option<&'a [u8]>,
    handle: Option<&'a [u8]>,
}

impl<'a> Attrs<'a> {
    /// Whether the key means something to us.
    pub fn set(&mut self, key: &[u8], value: &'a [u8]) -> bool {
        let slot = match key {
            b"allocation_id" => &mut self.allocation_id,
            b"addr" => &mut self.addr,
            b"size" => &mut self.size,
            b"total" => &mut self.total,
            b"used" => &mut self.used,
            b"owner" => &mut self.owner,
            b"MID" => &mut self.module,
            b"page_type" => &mut self.page_type,
            b"alloc_type" => &mut self.alloc_type,
            b"shadow" => &mut self.shadow,
            b"type" | b"pool" => &mut self.pool,
            b"streamId" => &mut self.stream,
            b"func" => &mut self.func,
            b"req_size" => &mut self.req_size,
            b"ret" => &mut self.ret,
            b"api" => &mut self.api,
            b"api_size" => &mut self.api_size,
            b"range" => &mut self.range,
            b"domain" => &mut self.domain,
            b"handle" => &mut self.handle,
            _ => return false,
        };
        *slot = Some(value);
        true
    }

    /// Takes `{key:value,key:value}`. A value may hold commas itself (`shape:[1,2,]`, several inefficiencies): what
    /// does not begin with a key belongs to the value before. `unheld` is told keys that mean nothing to us.
    pub fn from_csv(cell: &'a [u8], mut unheld: impl FnMut(&'a [u8])) -> Self {
        let mut attrs = Attrs::default();
        let inner = cell.strip_prefix(b"{").unwrap_or(cell);
        let inner = inner.strip_suffix(b"}").unwrap_or(inner);
        let mut key: &[u8] = b"";
        let (mut value_start, mut at) = (0, 0);
        for piece in inner.split(|byte| *byte == b',') {
            let end = at + piece.len();
            let begins = memchr::memchr(b':', piece)
                .and_then(|colon| Some((piece.get(..colon)?.trim_ascii(), at + colon + 1)))
                .filter(|(found, _)| is_key(found));
            if let Some(begin) = begins {
                (key, value_start) = begin;
            }
            if !attrs.set(key, inner.get(value_start..end).unwrap_or_default()) && begins.is_some() {
                unheld(key);
            }
            at = end + 1;
        }
        attrs
    }
}

fn is_key(text: &[u8]) -> bool {
    !text.is_empty() && text.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
}

/// Reads rows and shares the names in them.
pub(super) struct Parser {
    dialect: Dialect,
    names: FxHashMap<Box<[u8]>, Name>,
    stacks: FxHashMap<Box<[u8]>, Option<Arc<Stack>>>,
    /// As [`Unheld`], of this parser.
    own_unheld: FxHashMap<Box<[u8]>, u64>,
    unheld: Unheld,
}

/// What rows say that has no place in a [`Row`], with the number of such rows: keys of column Attr, and Event and Event
/// Type of those that say nothing else. Parsers add to it when they are done.
#[derive(Debug, Clone, Default)]
pub(super) struct Unheld(Arc<Mutex<BTreeMap<String, u64>>>);

impl Unheld {
    pub fn counts(&self) -> BTreeMap<String, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Parser {
    fn drop(&mut self) {
        let mut all = self.unheld.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (what, rows) in self.own_unheld.drain() {
            *all.entry(sanitize(&what).into_owned()).or_default() += rows;
        }
    }
}

impl Parser {
    pub fn new(dialect: Dialect, unheld: Unheld) -> Self {
        Parser {
            dialect,
            names: FxHashMap::default(),
            stacks: FxHashMap::default(),
            own_unheld: FxHashMap::default(),
            unheld,
        }
    }

    /// Counts a row that says something we do not hold.
    pub fn unheld(&mut self, what: &[u8]) {
        let full = self.own_unheld.len() >= UNHELD_KEPT;
        match self.own_unheld.get_mut(what) {
            Some(rows) => *rows += 1,
            None if full => *self.own_unheld.entry(b"others".as_slice().into()).or_default() += 1,
            None => drop(self.own_unheld.insert(what.into(), 1)),
        }
    }

    /// `None`: a row that says nothing an analysis knows.
    pub fn parse(&mut self, fields: &Fields<'_>) -> Result<Option<Parsed>, RowError> {
        let Some(mut fact) = self.fact(fields)? else {
            self.unheld(&[fields.event, b",", fields.event_type].concat());
            return Ok(None);
        };
        let (id, time) = key(fields.id, fields.time)?;
        let tgid = Tgid(cell("Process Id", fields.pid, u32_of, "a number")?);
        let tid = Tid(cell("Thread Id", fields.tid, u32_of, "a number")?);
        let place = cell("Device Id", fields.device, device_of, "a device")?;
        let device = match place {
            Device::Npu(device) => Some(device),
            Device::Host | Device::None => None,
        };
        if place == Device::Host {
            match &mut fact {
                Fact::Event(EventKind::Alloc(Alloc { pool, .. }) | EventKind::Free(Free { pool, .. }))
                | Fact::NeverFreed { pool, .. } => *pool = Pool::Host,
                _ => {}
            }
        }

        let attrs = &fields.attrs;
        let mut row = Row::new(Nanos(time), tgid, tid, fact);
        row.device = device;
        row.allocation_id = attrs.allocation_id.and_then(u64_of).map(AllocationId);
        let mut range_named = false;
        match &mut row.fact {
            Fact::Event(EventKind::Alloc(alloc)) => {
                alloc.device = row.device.take();
                row.owner = attrs.owner.and_then(|owner| self.labels(owner, alloc.pool));
            }
            Fact::Event(EventKind::Free(free)) => free.device = row.device.take(),
            Fact::Event(EventKind::AllocFailed(failed)) => failed.device = row.device.take(),
            Fact::Event(EventKind::DeviceReset { device }) => match row.device.take() {
                Some(which) => *device = which,
                None => return Err(wrong("Device Id", fields.device, "a device")),
            },
            Fact::Event(EventKind::RangeBegin { range, .. }) => {
                if let Some(named) = attrs.range.and_then(u64_of) {
                    *range = named;
                    range_named = true;
                }
            }
            Fact::Event(EventKind::RangeEnd { range }) => {
                if let Some(named) = attrs.range.and_then(u64_of) {
                    *range = Some(named);
                    range_named = true;
                }
            }
            Fact::NeverFreed { .. } => row.size = attrs.size.and_then(size_of).map(|(size, _)| size),
            _ => {}
        }
        Ok(Some(Parsed {
            id,
            row,
            range_named,
            negative_size: attrs.size.and_then(size_of).is_some_and(|(_, negative)| negative),
            old_driver: fields.event_type == b"HAL" && attrs.allocation_id.is_none(),
        }))
    }

    fn fact(&mut self, fields: &Fields<'_>) -> Result<Option<Fact>, RowError> {
        let attrs = &fields.attrs;
        Ok(Some(match (fields.event, fields.event_type) {
            (b"MALLOC", event_type) => {
                let Some(pool) = pool_of(event_type) else { return Err(unknown_kind(fields)) };
                let ptr = address("MALLOC", fields)?;
                let size = bytes(attrs)?.ok_or(RowError::Missing { event: "MALLOC", attr: "size" })?;
                let driver = matches!(pool, Pool::Hal | Pool::Host).then(|| driver_of(attrs)).flatten();
                let totals = totals_of(attrs);
                Fact::Event(EventKind::Alloc(Alloc {
                    pool,
                    device: None,
                    ptr,
                    size,
                    totals,
                    driver,
                    stack: self.stack(fields),
                }))
            }
            (b"FREE", event_type) => {
                let Some(pool) = pool_of(event_type) else { return Err(unknown_kind(fields)) };
                let ptr = address("FREE", fields)?;
                let size = freed_bytes(attrs)?;
                if attrs.shadow.is_some_and(|shadow| shadow == b"true") {
                    return Ok(Some(Fact::NeverFreed { pool, ptr }));
                }
                // 0: the writer did not know the block.
                let size = size.filter(|size| *size > 0);
                let totals = totals_of(attrs);
                Fact::Event(EventKind::Free(Free { pool, device: None, ptr, size, totals }))
            }
            (b"ACCESS", event_type) => Fact::Event(EventKind::Access(Access {
                pool: attrs.pool.and_then(pool_of),
                ptr: address("ACCESS", fields)?,
                size: bytes(attrs)?.unwrap_or(0),
                kind: match event_type {
                    b"READ" => AccessKind::Read,
                    b"WRITE" => AccessKind::Write,
                    b"UNKNOWN" => AccessKind::Unknown,
                    _ => return Err(unknown_kind(fields)),
                },
                op: self.optional_name(fields.name),
            })),
            (b"OP_LAUNCH", b"ATEN_START") => {
                Fact::OpBegin { framework: Framework::Aten, name: self.name(fields.name) }
            }
            (b"OP_LAUNCH", b"ATEN_END") => {
                Fact::OpEnd { framework: Framework::Aten, name: self.name(fields.name) }
            }
            (b"OP_LAUNCH", b"ATB_START") => {
                Fact::OpBegin { framework: Framework::Atb, name: self.name(fields.name) }
            }
            (b"OP_LAUNCH", b"ATB_END") => {
                Fact::OpEnd { framework: Framework::Atb, name: self.name(fields.name) }
            }
            (b"KERNEL_LAUNCH", b"KERNEL_LAUNCH") => Fact::Event(EventKind::Launch {
                name: self.optional_name(fields.name),
                stream: attrs.stream.and_then(u64_of),
            }),
            (b"MSTX", b"Mark") => {
                Fact::Event(EventKind::Mark { text: self.mark(fields.name), domain: self.domain(attrs) })
            }
            (b"MSTX", b"Range_start") => Fact::Event(EventKind::RangeBegin {
                range: 0,
                text: self.mark(fields.name),
                domain: self.domain(attrs),
            }),
            (b"MSTX", b"Range_end") => {
                let text = self.mark(fields.name);
                let number = text.rsplit(' ').next().and_then(|number| number.parse().ok());
                Fact::Event(EventKind::RangeEnd { range: number.filter(|number| *number > 0) })
            }
            (b"SYSTEM", b"ACL_INIT" | b"acl init") => Fact::Event(EventKind::AclInit),
            (b"SYSTEM", b"ACL_FINI" | b"acl fini" | b"acl finalize") => Fact::Event(EventKind::AclFinalize),
            (b"SYSTEM", b"EXEC") => Fact::Event(EventKind::Exec),
            (b"SYSTEM", b"EXIT") => Fact::Event(EventKind::Exit),
            (b"SYSTEM", b"MAP") => {
                let missing = |attr| RowError::Missing { event: "MAP", attr };
                Fact::Event(EventKind::Map {
                    ptr: address("MAP", fields)?,
                    size: bytes(attrs)?.ok_or(missing("size"))?,
                    handle: attrs.handle.and_then(u64_of).map(DevicePtr).ok_or(missing("handle"))?,
                })
            }
            (b"SYSTEM", b"UNMAP") => Fact::Event(EventKind::Unmap { ptr: address("UNMAP", fields)? }),
            (b"SYSTEM", b"DEVICE_RESET") => Fact::Event(EventKind::DeviceReset { device: DeviceId(0) }),
            (b"SYSTEM", b"STEP") => {
                Fact::StepEnd { number: cell("Name", fields.name, u64_of, "the number of a step")? }
            }
            (b"SYSTEM", b"LOST") => {
                Fact::Lost { events: cell("Name", fields.name, u64_of, "a number of events")? }
            }
            (b"OOM_DETAIL", b"OOM_TRIGGER") => Fact::Event(EventKind::AllocFailed(AllocFailed {
                pool: attrs.pool.and_then(pool_of).unwrap_or(Pool::Hal),
                function: attrs.func.map_or("unknown", function_name),
                device: None,
                size: attrs.req_size.and_then(u64_of).unwrap_or(0),
                // What msMemScope writes such a row for.
                code: attrs.ret.and_then(i32_of).unwrap_or(6),
                api: api_of(attrs),
                stack: self.stack(fields),
            })),
            // Of msMemScope: when a kernel ran, and what PyTorch says of all its memory at a moment.
            (b"KERNEL_LAUNCH", b"KERNEL_EXECUTE_START" | b"KERNEL_EXECUTE_END") | (b"SNAPSHOT", _) => {
                return Ok(None);
            }
            _ => return Err(unknown_kind(fields)),
        }))
    }

    /// Of Python's functions, native ones, or both.
    fn stack(&mut self, fields: &Fields<'_>) -> Option<Arc<Stack>> {
        let Fields { python, native, .. } = fields;
        if python.is_empty() && native.is_empty() {
            return None;
        }
        let cells = [python, b"\0".as_slice(), native].concat();
        if let Some(stack) = self.stacks.get(cells.as_slice()) {
            return stack.clone();
        }
        let lines = |cell: &[u8]| {
            let text = String::from_utf8_lossy(cell);
            match self.dialect {
                Dialect::Csv => {
                    let lines: Vec<_> = text.lines().map(|line| decode_text(line).into_owned()).collect();
                    lines.join("\n")
                }
                Dialect::Db | Dialect::Plain => text.into_owned(),
            }
        };
        let stack = stack::parse(&lines(python), &lines(native)).map(Arc::new);
        if self.stacks.len() >= STACKS_KEPT {
            self.stacks.clear();
        }
        self.stacks.insert(cells.into(), stack.clone());
        stack
    }

    /// A name of the target.
    fn name(&mut self, cell: &[u8]) -> Name {
        if let Some(name) = self.names.get(cell) {
            return name.clone();
        }
        let text = String::from_utf8_lossy(cell);
        let name: Name = match self.dialect {
            Dialect::Csv => sanitize(decode_text(&text.replace("\"\"", "\"")).as_bytes()).into(),
            Dialect::Db | Dialect::Plain => sanitize(text.as_bytes()).into(),
        };
        if self.names.len() >= NAMES_KEPT {
            self.names.clear();
        }
        self.names.insert(cell.into(), name.clone());
        name
    }

    fn optional_name(&mut self, cell: &[u8]) -> Option<Name> {
        (!matches!(cell, b"N/A" | b"")).then(|| self.name(cell))
    }

    fn mark(&mut self, cell: &[u8]) -> Name {
        let quoted = |cell| -> Option<&[u8]> { <[u8]>::strip_prefix(cell, b"\"")?.strip_suffix(b"\"") };
        match self.dialect {
            Dialect::Csv | Dialect::Plain => self.name(cell),
            Dialect::Db => self.name(quoted(cell).unwrap_or(cell)),
        }
    }

    fn domain(&mut self, attrs: &Attrs<'_>) -> Option<Name> {
        let text = attrs.domain?;
        Some(match self.dialect {
            Dialect::Csv => sanitize(&decode_attr(text)).into(),
            Dialect::Db | Dialect::Plain => sanitize(text).into(),
        })
    }

    /// The labels of an owner behind those that the pool implies.
    fn labels(&mut self, owner: &[u8], pool: Pool) -> Option<Name> {
        let first = owner.split(|byte| *byte == b'@').next();
        let implied = match first {
            // The module follows.
            Some(b"CANN") => 2,
            Some(name) if name == pool.name().as_bytes() => 1,
            _ => 0,
        };
        let labels = owner.splitn(implied + 1, |byte| *byte == b'@').nth(implied)?;
        if labels.is_empty() {
            return None;
        }
        Some(match self.dialect {
            Dialect::Csv => sanitize(&decode_attr(labels)).into(),
            Dialect::Db | Dialect::Plain => sanitize(labels).into(),
        })
    }
}

/// The number of a row, and its time in ns: what rows are ordered by.
pub(super) fn key(id: &[u8], time: &[u8]) -> Result<(u64, u64), RowError> {
    let id = cell("ID", id, u64_of, "a number")?;
    let time = cell("Timestamp(ns)", time, u64_of, "a number")?;
    // The 2025 format counts µs. In ns, numbers of its size are days in 1970.
    let micros = (1_000_000_000_000_000..100_000_000_000_000_000).contains(&time);
    Ok((id, if micros { time.saturating_mul(1000) } else { time }))
}

fn cell<T>(
    column: &'static str,
    text: &[u8],
    read: impl Fn(&[u8]) -> Option<T>,
    expected: &'static str,
) -> Result<T, RowError> {
    read(text).ok_or_else(|| wrong(column, text, expected))
}

fn unknown_kind(fields: &Fields<'_>) -> RowError {
    let kind = [fields.event, b",", fields.event_type].concat();
    RowError::Kind(sanitize(kind.get(..kind.len().min(40)).unwrap_or_default()).into_owned())
}

fn wrong(column: &'static str, text: &[u8], expected: &'static str) -> RowError {
    let text = sanitize(text.get(..text.len().min(40)).unwrap_or_default()).into_owned();
    RowError::Cell { column, text, expected }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Device {
    Npu(DeviceId),
    Host,
    None,
}

fn device_of(cell: &[u8]) -> Option<Device> {
    match cell {
        b"N/A" | b"" | b"9999" => Some(Device::None),
        b"host" | b"cpu" | b"10000" => Some(Device::Host),
        number => {
            u64_of(number).and_then(|number| u16::try_from(number).ok()).map(|n| Device::Npu(DeviceId(n)))
        }
    }
}

fn pool_of(event_type: &[u8]) -> Option<Pool> {
    Some(match event_type {
        b"HAL" => Pool::Hal,
        b"PTA" => Pool::Pta,
        b"PTA_WORKSPACE" => Pool::PtaWorkspace,
        b"ATB" => Pool::Atb,
        b"MINDSPORE" | b"MindSpore" => Pool::Mindspore,
        b"HOST_PINNED" | b"HOST" => Pool::Host,
        _ => return None,
    })
}

fn address(event: &'static str, fields: &Fields<'_>) -> Result<DevicePtr, RowError> {
    let address = match fields.ptr {
        b"N/A" | b"" => fields.attrs.addr.ok_or(RowError::Missing { event, attr: "addr" })?,
        ptr => ptr,
    };
    cell("Ptr", address, u64_of, "an address").map(DevicePtr)
}

fn totals_of(attrs: &Attrs<'_>) -> Option<Totals> {
    Some(Totals { allocated: u64_of(attrs.used?)?, reserved: u64_of(attrs.total?)? })
}

/// What the driver was told, as far as it is in the row. An owner module that is unknown is another thing than one that
/// is none of the known ones.
fn driver_of(attrs: &Attrs<'_>) -> Option<DriverAlloc> {
    let of_owner = || {
        let module = attrs.owner?.strip_prefix(b"CANN@")?.split(|byte| *byte == b'@').next()?;
        if module == b"UNKNOWN" {
            return None;
        }
        Module::named(std::str::from_utf8(module).ok()?).map(|module| module.0)
    };
    let of_number = || attrs.module.and_then(u64_of).and_then(|number| u8::try_from(number).ok());
    let driver = DriverAlloc {
        module: of_owner().or_else(of_number),
        page: match attrs.page_type {
            Some(b"huge") => Some(PageType::Huge),
            Some(b"giant") => Some(PageType::Giant),
            Some(b"normal") => Some(PageType::Normal),
            _ => None,
        },
        create: attrs.alloc_type.is_some_and(|how| how == b"create"),
        api: api_of(attrs),
    };
    let says_something =
        driver.module.is_some() || driver.page.is_some() || driver.create || driver.api.is_some();
    says_something.then_some(driver)
}

fn api_of(attrs: &Attrs<'_>) -> Option<(&'static str, u64)> {
    Some((function_name(attrs.api?), attrs.api_size.and_then(u64_of).unwrap_or(0)))
}

/// Names of C functions live as long as the program; there are few, and a dump that claims otherwise gets `unknown`.
fn function_name(text: &[u8]) -> &'static str {
    const KEPT: usize = 256;
    static NAMES: Mutex<Option<FxHashSet<&'static str>>> = Mutex::new(None);
    let Ok(text) = std::str::from_utf8(text) else { return "unknown" };
    if !is_key(text.as_bytes()) || text.len() > 64 {
        return "unknown";
    }
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    let names = names.get_or_insert_default();
    if let Some(known) = names.get(text) {
        return known;
    }
    if names.len() >= KEPT {
        return "unknown";
    }
    let name: &'static str = Box::leak(text.into());
    names.insert(name);
    name
}

/// A decimal number, or a hexadecimal one after `0x`.
fn u64_of(text: &[u8]) -> Option<u64> {
    let (digits, base) = match text.strip_prefix(b"0x") {
        Some(digits) => (digits, 16),
        None => (text, 10),
    };
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |number, byte| {
        let digit = char::from(*byte).to_digit(base)?;
        number.checked_mul(base.into())?.checked_add(digit.into())
    })
}

fn u32_of(text: &[u8]) -> Option<u32> {
    u64_of(text).and_then(|number| number.try_into().ok())
}

fn i32_of(text: &[u8]) -> Option<i32> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// `None` where the row says no size.
fn said_size<'a>(attrs: &Attrs<'a>) -> Option<&'a [u8]> {
    attrs.size.filter(|size| !matches!(*size, b"" | b"N/A"))
}

fn bytes(attrs: &Attrs<'_>) -> Result<Option<u64>, RowError> {
    said_size(attrs).map(|size| cell("Attr, size", size, u64_of, "a number of bytes")).transpose()
}

/// The same of a free, which may have a minus sign.
fn freed_bytes(attrs: &Attrs<'_>) -> Result<Option<u64>, RowError> {
    let size = said_size(attrs).map(|size| cell("Attr, size", size, size_of, "a number of bytes"));
    Ok(size.transpose()?.map(|(size, _)| size))
}

/// A size, and whether it has a minus sign.
fn size_of(text: &[u8]) -> Option<(u64, bool)> {
    match text.strip_prefix(b"-") {
        Some(size) => Some((u64_of(size)?, true)),
        None => Some((u64_of(text)?, false)),
    }
}

/// Undoes the percent-encoding of a value.
fn decode_attr(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, tail)) = rest.split_first() {
        let decoded = match rest.get(..3) {
            Some(b"%25") => Some(b'%'),
            Some(b"%2C") => Some(b','),
            Some(b"%7B") => Some(b'{'),
            Some(b"%7D") => Some(b'}'),
            Some(b"%22") => Some(b'"'),
            _ => None,
        };
        out.push(decoded.unwrap_or(*first));
        rest = if decoded.is_some() { rest.get(3..).unwrap_or_default() } else { tail };
    }
    out
}

/// What a row means in view of those before it, in order.
#[derive(Default)]
pub(super) struct Continuity {
    processes: FxHashMap<Tgid, ProcessState>,
}

#[derive(Default)]
struct ProcessState {
    /// Ranges begun so far: msMemScope numbers them from 1 in a process, and says the number at the end only.
    ranges: u64,
    open: BTreeMap<u64, Tid>,
    /// Host memory from the driver, in the 2025 format.
    host: FxHashSet<DevicePtr>,
}

/// Ranges of a process that can be open at one time. In a dump of selected steps no range ever ends.
const OPEN_RANGES: usize = 1 << 12;

impl Continuity {
    pub fn apply(&mut self, parsed: &mut Parsed) {
        let Parsed { row, range_named, old_driver, .. } = parsed;
        match &mut row.fact {
            Fact::Event(EventKind::RangeBegin { range, .. }) if !*range_named => {
                let process = self.processes.entry(row.tgid).or_default();
                process.ranges += 1;
                *range = process.ranges;
                process.open.insert(*range, row.tid);
                if process.open.len() > OPEN_RANGES {
                    process.open.pop_first();
                }
            }
            Fact::Event(EventKind::RangeEnd { range }) if !*range_named => {
                let process = self.processes.entry(row.tgid).or_default();
                // The numbers differ when ranges began before the dump did: then it is the innermost of the thread.
                let known = range.filter(|range| process.open.contains_key(range));
                let innermost =
                    || process.open.iter().rev().find(|(_, tid)| **tid == row.tid).map(|(range, _)| *range);
                *range = known.or_else(innermost);
                if let Some(range) = range {
                    process.open.remove(range);
                }
            }
            Fact::Event(EventKind::Alloc(alloc)) if *old_driver && alloc.pool == Pool::Host => {
                self.processes.entry(row.tgid).or_default().host.insert(alloc.ptr);
            }
            Fact::Event(EventKind::Free(free))
                if *old_driver
                    && free.device.is_none()
                    && self
                        .processes
                        .get_mut(&row.tgid)
                        .is_some_and(|process| process.host.remove(&free.ptr)) =>
            {
                free.pool = Pool::Host;
            }
            _ => {}
        }
    }
}
