//! From a [`Row`] to the cells of the table, before any file format: the vocabulary of msMemScope.

use std::borrow::Cow;

use crate::model::{AccessKind, Alloc, DevicePtr, EventKind, Module, PageType, Pool, Stack, Totals};

use super::row::{Fact, Framework, Place, Row};

/// One line of the table.
pub(super) struct Record<'a> {
    pub event: &'static str,
    pub event_type: &'static str,
    pub name: Label<'a>,
    pub place: Option<Place>,
    pub ptr: Option<DevicePtr>,
    pub attrs: Vec<(&'static str, Value<'a>)>,
    pub stack: Option<&'a Stack>,
}

pub(super) enum Label<'a> {
    None,
    Number(u64),
    /// A name chosen by the target.
    Text(&'a str),
    /// The text of a mark, which msMemScope puts in quotes.
    Mark(Cow<'a, str>),
}

pub(super) enum Value<'a> {
    Number(u64),
    Signed(i64),
    Address(DevicePtr),
    Word(&'static str),
    /// Who a block belongs to, from the framework down; written joined with `@`.
    Owner(Owner<'a>),
    /// Text chosen by the target.
    Text(&'a str),
}

pub(super) struct Owner<'a> {
    pub framework: &'static str,
    /// Module of the driver.
    pub module: Option<&'static str>,
    /// Further labels, chosen by the target.
    pub labels: Option<&'a str>,
}

impl<'a> Record<'a> {
    fn new(row: &Row, event: &'static str, event_type: &'static str) -> Self {
        Record {
            event,
            event_type,
            name: Label::None,
            place: row.place(),
            ptr: None,
            attrs: Vec::new(),
            stack: None,
        }
    }

    fn named(mut self, name: Label<'a>) -> Self {
        self.name = name;
        self
    }

    fn on(mut self, stack: Option<&'a Stack>) -> Self {
        self.stack = stack;
        self
    }

    fn with(mut self, attrs: impl IntoIterator<Item = (&'static str, Value<'a>)>) -> Self {
        self.attrs.extend(attrs);
        self
    }
}

/// Calls `put` with each line of `row`, in order: none for what dumps do not hold, two for an operator.
pub(super) fn records<'a>(row: &'a Row, mut put: impl FnMut(Record<'a>)) {
    let new = |event, event_type| Record::new(row, event, event_type);
    match &row.fact {
        Fact::Event(EventKind::Alloc(alloc)) => {
            let mut record = block(row, "MALLOC", alloc.pool, alloc.ptr, Some(alloc.size));
            record.stack = alloc.stack.as_deref();
            record.attrs.extend(totals(alloc.pool, alloc.totals));
            record.attrs.extend(owner(row, alloc).map(|owner| ("owner", Value::Owner(owner))));
            if let Some(driver) = &alloc.driver {
                record.attrs.extend(driver.page.map(|page| ("page_type", Value::Word(page_type(page)))));
                if driver.page.is_some() || driver.create {
                    let how = if driver.create { "create" } else { "alloc" };
                    record.attrs.push(("alloc_type", Value::Word(how)));
                }
                record.attrs.extend(api(driver.api));
            }
            put(record);
        }
        Fact::Event(EventKind::Free(free)) => {
            let mut record = block(row, "FREE", free.pool, free.ptr, free.size);
            record.attrs.extend(totals(free.pool, free.totals));
            put(record);
        }
        Fact::NeverFreed { pool, ptr } => {
            put(block(row, "FREE", *pool, *ptr, None).with([("shadow", Value::Word("true"))]));
        }
        Fact::Event(EventKind::AllocFailed(failed)) => put(new("OOM_DETAIL", "OOM_TRIGGER")
            .named(Label::Text("OOM_Trigger"))
            .on(failed.stack.as_deref())
            .with([
                ("func", Value::Word(failed.function)),
                ("req_size", Value::Number(failed.size)),
                ("ret", Value::Signed(failed.code.into())),
                ("pool", Value::Word(failed.pool.name())),
            ])
            .with(api(failed.api))),
        Fact::Event(EventKind::Op { name }) => {
            put(new("OP_LAUNCH", "ATEN_START").named(Label::Text(name)));
            put(new("OP_LAUNCH", "ATEN_END").named(Label::Text(name)));
        }
        Fact::OpBegin { framework, name } => {
            let event_type = match framework {
                Framework::Aten => "ATEN_START",
                Framework::Atb => "ATB_START",
            };
            put(new("OP_LAUNCH", event_type).named(Label::Text(name)));
        }
        Fact::OpEnd { framework, name } => {
            let event_type = match framework {
                Framework::Aten => "ATEN_END",
                Framework::Atb => "ATB_END",
            };
            put(new("OP_LAUNCH", event_type).named(Label::Text(name)));
        }
        Fact::Event(EventKind::Launch { name, stream }) => put(new("KERNEL_LAUNCH", "KERNEL_LAUNCH")
            .named(name.as_deref().map_or(Label::None, Label::Text))
            .with(stream.map(|stream| ("streamId", Value::Number(stream))))),
        Fact::Event(EventKind::Access(access)) => {
            let event_type = match access.kind {
                AccessKind::Read => "READ",
                AccessKind::Write => "WRITE",
                AccessKind::Unknown => "UNKNOWN",
            };
            let mut record =
                new("ACCESS", event_type).named(access.op.as_deref().map_or(Label::None, Label::Text));
            record.ptr = Some(access.ptr);
            record.attrs.extend(row.allocation_id.map(|id| ("allocation_id", Value::Number(id.0))));
            record.attrs.extend([("addr", Value::Address(access.ptr)), ("size", Value::Number(access.size))]);
            record.attrs.extend(access.pool.map(|pool| ("type", Value::Word(event_type_of(pool)))));
            put(record);
        }
        Fact::Event(EventKind::Mark { text, domain }) => {
            put(new("MSTX", "Mark")
                .named(Label::Mark(text.as_ref().into()))
                .with(domain_of(domain.as_deref())));
        }
        Fact::Event(EventKind::RangeBegin { range, text, domain }) => put(new("MSTX", "Range_start")
            .named(Label::Mark(text.as_ref().into()))
            .with([("range", Value::Number(*range))])
            .with(domain_of(domain.as_deref()))),
        Fact::Event(EventKind::RangeEnd { range }) => {
            let text = format!("Range end from id {}", range.unwrap_or(0));
            put(new("MSTX", "Range_end")
                .named(Label::Mark(text.into()))
                .with(range.map(|range| ("range", Value::Number(range)))));
        }
        Fact::Event(EventKind::Map { ptr, size, handle }) => {
            let mut record = new("SYSTEM", "MAP").with([
                ("addr", Value::Address(*ptr)),
                ("size", Value::Number(*size)),
                ("handle", Value::Address(*handle)),
            ]);
            record.ptr = Some(*ptr);
            put(record);
        }
        Fact::Event(EventKind::Unmap { ptr }) => {
            let mut record = new("SYSTEM", "UNMAP").with([("addr", Value::Address(*ptr))]);
            record.ptr = Some(*ptr);
            put(record);
        }
        // Each row carries its device already; steps can be inferred again.
        Fact::Event(EventKind::DeviceSet { .. } | EventKind::StepInferred(_) | EventKind::StepsRetracted) => {
        }
        Fact::Event(EventKind::DeviceReset { .. }) => put(new("SYSTEM", "DEVICE_RESET")),
        Fact::Event(EventKind::AclInit) => put(new("SYSTEM", "ACL_INIT")),
        Fact::Event(EventKind::AclFinalize) => put(new("SYSTEM", "ACL_FINI")),
        Fact::Event(EventKind::Exec) => put(new("SYSTEM", "EXEC")),
        Fact::Event(EventKind::Exit) => put(new("SYSTEM", "EXIT")),
        Fact::StepEnd { number } => put(new("SYSTEM", "STEP").named(Label::Number(*number))),
        Fact::Lost { events } => put(new("SYSTEM", "LOST").named(Label::Number(*events))),
    }
}

fn block<'a>(row: &'a Row, event: &'static str, pool: Pool, ptr: DevicePtr, size: Option<u64>) -> Record<'a> {
    let mut record = Record::new(row, event, event_type_of(pool));
    record.ptr = Some(ptr);
    record.attrs.reserve(8);
    record.attrs.extend(row.allocation_id.map(|id| ("allocation_id", Value::Number(id.0))));
    // msMemScope writes 0 for a free of a block it does not know.
    let size = size.or(row.size).unwrap_or(0);
    record.attrs.extend([("addr", Value::Address(ptr)), ("size", Value::Number(size))]);
    record
}

fn owner<'a>(row: &'a Row, alloc: &Alloc) -> Option<Owner<'a>> {
    let labels = row.owner.as_deref();
    match alloc.pool {
        // msMemScope has none for pinned host memory.
        Pool::Host if alloc.driver.is_none() => None,
        Pool::Hal | Pool::Host => {
            let module = alloc.driver.as_ref().and_then(|driver| driver.module);
            // Of a dump that does not say it, nothing is known to be unknown.
            if module.is_none() && labels.is_none() {
                return None;
            }
            let module = module.and_then(|module| Module(module).name());
            Some(Owner { framework: "CANN", module: Some(module.unwrap_or("UNKNOWN")), labels })
        }
        pool => Some(Owner { framework: pool.name(), module: None, labels }),
    }
}

fn totals<'a>(pool: Pool, totals: Option<Totals>) -> impl Iterator<Item = (&'static str, Value<'a>)> {
    let pinned = (pool == Pool::Host).then_some(("pinned", Value::Word("true")));
    let pair = totals
        .map(|totals| [("total", Value::Number(totals.reserved)), ("used", Value::Number(totals.allocated))]);
    pinned.into_iter().chain(pair.into_iter().flatten())
}

fn api<'a>(api: Option<(&'static str, u64)>) -> impl Iterator<Item = (&'static str, Value<'a>)> {
    api.into_iter().flat_map(|(api, size)| [("api", Value::Word(api)), ("api_size", Value::Number(size))])
}

fn domain_of(domain: Option<&str>) -> Option<(&'static str, Value<'_>)> {
    domain.map(|domain| ("domain", Value::Text(domain)))
}

pub(super) fn event_type_of(pool: Pool) -> &'static str {
    match pool {
        Pool::Host => "HOST_PINNED",
        other => other.name(),
    }
}

pub(super) fn page_type(page: PageType) -> &'static str {
    match page {
        PageType::Normal => "normal",
        PageType::Huge => "huge",
        PageType::Giant => "giant",
    }
}
