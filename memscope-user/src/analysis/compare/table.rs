//! The comparison of msMemScope, row for row: operators or kernels aligned by name, and beside each the size of the pool
//! event that comes next. That is not what the operator allocated.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use serde::Serialize;

use crate::dump::Fact;
use crate::dump::read::NumberedRow;
use crate::model::{DeviceId, EventKind, Name, Pool};

use super::align::{MAX_EDITS, Method, Pair, align};

/// What is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    Op,
    Kernel,
}

impl Level {
    /// Column Event of the table.
    pub fn event(self) -> &'static str {
        match self {
            Level::Op => "OP_LAUNCH",
            Level::Kernel => "KERNEL_LAUNCH",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Table {
    /// The pool whose events are shown; `None` when neither side has any.
    pub pool: Option<Pool>,
    pub rows: Vec<TableRow>,
    pub alignment: Method,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TableRow {
    pub level: Level,
    pub name: Name,
    pub device: DeviceId,
    /// Bytes; `None` when this side has no such operator.
    pub base: Option<i64>,
    pub compare: Option<i64>,
    /// `compare` less `base`, where what is missing counts as 0.
    pub diff: i64,
}

/// The operators or kernels of one side. Takes rows in order of time.
#[derive(Debug)]
pub struct Sequences {
    level: Level,
    names: Vec<Name>,
    numbers: FxHashMap<Name, u32>,
    devices: BTreeMap<DeviceId, Sequence>,
    /// Whether the pools of [`POOLS`] occur.
    pools: [bool; POOLS.len()],
}

/// Pools of which msMemScope compares one. In a dump with both, the first is taken.
const POOLS: [Pool; 2] = [Pool::Pta, Pool::Mindspore];

/// What a launch without a name is called.
const NO_NAME: &str = "N/A";

#[derive(Debug, Default)]
struct Sequence {
    elements: Vec<Element>,
    /// Elements whose pool event has come, for each of [`POOLS`].
    settled: [usize; POOLS.len()],
}

#[derive(Debug)]
struct Element {
    name: u32,
    sizes: [i64; POOLS.len()],
}

impl Sequences {
    pub fn new(level: Level) -> Self {
        Sequences {
            level,
            names: Vec::new(),
            numbers: FxHashMap::default(),
            devices: BTreeMap::new(),
            pools: [false; POOLS.len()],
        }
    }

    pub fn observe(&mut self, numbered: &NumberedRow) {
        let row = &numbered.row;
        let name = match (&row.fact, self.level) {
            (Fact::OpEnd { name, .. } | Fact::Event(EventKind::Op { name }), Level::Op) => Some(name.clone()),
            (Fact::Event(EventKind::Launch { name, .. }), Level::Kernel) => {
                Some(name.clone().unwrap_or_else(|| NO_NAME.into()))
            }
            _ => None,
        };
        if let Some(name) = name {
            if let Some(device) = row.device {
                let name = self.number(name);
                let element = Element { name, sizes: [0; POOLS.len()] };
                self.devices.entry(device).or_default().elements.push(element);
            }
            return;
        }
        let (pool, device, size) = match &row.fact {
            Fact::Event(EventKind::Alloc(alloc)) => (alloc.pool, alloc.device, alloc.size),
            Fact::Event(EventKind::Free(free)) => (free.pool, free.device, free.size.unwrap_or(0)),
            Fact::NeverFreed { pool, .. } => (*pool, row.device, row.size.unwrap_or(0)),
            _ => return,
        };
        let (Some(which), Some(device)) = (POOLS.iter().position(|known| *known == pool), device) else {
            return;
        };
        self.pools[which] = true;
        let Some(Sequence { elements, settled }) = self.devices.get_mut(&device) else { return };
        let size = i64::try_from(size).unwrap_or(i64::MAX);
        let size = if numbered.negative_size { -size } else { size };
        elements.iter_mut().skip(settled[which]).for_each(|element| element.sizes[which] = size);
        settled[which] = elements.len();
    }

    fn number(&mut self, name: Name) -> u32 {
        if let Some(number) = self.numbers.get(&name) {
            return *number;
        }
        let number = self.names.len() as u32;
        self.names.push(name.clone());
        self.numbers.insert(name, number);
        number
    }
}

/// Compares two sides of one level.
pub fn table(base: Sequences, compare: Sequences) -> Table {
    let which = (0..POOLS.len()).find(|which| base.pools[*which] || compare.pools[*which]);
    let size = |element: &Element| which.map_or(0, |which| element.sizes[which]);
    let Sequences { level, mut names, mut numbers, devices: mut base, .. } = base;
    // Names of the other side by the numbers of this one.
    let renumbered: Vec<u32> = compare
        .names
        .iter()
        .map(|name| {
            *numbers.entry(name.clone()).or_insert_with(|| {
                names.push(name.clone());
                names.len() as u32 - 1
            })
        })
        .collect();
    let mut compare = compare.devices;
    for element in compare.values_mut().flat_map(|sequence| &mut sequence.elements) {
        element.name = renumbered[element.name as usize];
    }

    let mut devices: Vec<DeviceId> = base.keys().chain(compare.keys()).copied().collect();
    devices.sort_unstable();
    devices.dedup();
    let mut rows = Vec::new();
    let mut alignment = Method::Exact;
    for device in devices {
        let base = base.remove(&device).unwrap_or_default().elements;
        let compare = compare.remove(&device).unwrap_or_default().elements;
        let names_of = |elements: &[Element]| elements.iter().map(|element| element.name).collect::<Vec<_>>();
        let aligned = align(&names_of(&base), &names_of(&compare), MAX_EDITS);
        if aligned.method == Method::Heuristic {
            alignment = Method::Heuristic;
        }
        let (mut base, mut compare) = (base.into_iter(), compare.into_iter());
        for pair in aligned.pairs {
            let base = if pair == Pair::CompareOnly { None } else { base.next() };
            let compare = if pair == Pair::BaseOnly { None } else { compare.next() };
            let Some(name) = base.as_ref().or(compare.as_ref()).map(|element| element.name) else { continue };
            let (base, compare) = (base.as_ref().map(size), compare.as_ref().map(size));
            let diff = compare.unwrap_or(0).saturating_sub(base.unwrap_or(0));
            rows.push(TableRow { level, name: names[name as usize].clone(), device, base, compare, diff });
        }
    }
    Table { pool: which.map(|which| POOLS[which]), rows, alignment }
}
