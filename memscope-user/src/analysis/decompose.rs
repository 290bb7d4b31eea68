//! Whose memory it is: by what the program calls it, by the operator that allocated it, and by what it is for.
//!
//! What a block is for is inferred from the phases of training in which operators use it (see `phases`), and so known
//! only once it has been used.
//!
//! How things stood at the peak is exact: of the blocks that were alive then, those that are gone are added up as they go.

mod phases;

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use serde::Serialize;

use crate::model::{
    self, Access, AllocationId, Block, Change, DeviceId, DevicePtr, Event, EventKind, Frame, Ledger, Name,
    Pool, Tgid, Tid, Totals, Whose,
};

use super::Analysis;
use phases::{Between, Phase, Phases, Uses};

/// Blocks listed of each device: the largest.
const BLOCKS_LISTED: usize = 1000;

/// Operators, labels and lines told apart, of each device; the rest is one.
const NAMES_MAX: usize = 4096;

/// Uses of which it may be open at one time what they were.
const OPEN_MAX: usize = 1 << 20;

/// What a block is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    Weight,
    Gradient,
    OptimizerState,
    Activation,
    /// Of operators, while they run.
    Workspace,
    /// Not seen to be used.
    Unknown,
}

impl Class {
    pub fn name(self) -> &'static str {
        match self {
            Class::Weight => "weight",
            Class::Gradient => "gradient",
            Class::OptimizerState => "optimizer_state",
            Class::Activation => "activation",
            Class::Workspace => "workspace",
            Class::Unknown => "unknown",
        }
    }

    /// Whether it is concluded from how the block is used, not told.
    pub fn inferred(self) -> bool {
        !matches!(self, Class::Workspace | Class::Unknown)
    }
}

/// Bytes and blocks, now and at the peak.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Share {
    pub live_bytes: u64,
    pub live_blocks: u64,
    pub peak_bytes: u64,
}

/// The pools of a process on one device.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Decomposition {
    pub pid: Tgid,
    /// Counts the processes under this number that used memory, from 1.
    pub program: u32,
    pub device: Option<DeviceId>,
    pub live_bytes: u64,
    /// The most bytes of blocks at once, since attach.
    pub peak_bytes: u64,
    /// What the pools' allocators said at that time.
    #[serde(skip)]
    pub totals: Vec<(Pool, Totals)>,
    pub classes: Vec<ClassShare>,
    /// By the operator in progress at allocation, else the last one before.
    pub operators: Vec<NamedShare>,
    /// By the ranges, and the functions of frameworks, that the program was in at allocation: from the outermost, joined
    /// with `@`.
    pub labels: Vec<NamedShare>,
    /// By the line of the program.
    pub lines: Vec<LineShare>,
    /// The largest live blocks.
    pub blocks: Vec<ClassifiedBlock>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ClassShare {
    pub pool: Pool,
    pub class: Class,
    pub inferred: bool,
    #[serde(flatten)]
    pub share: Share,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NamedShare {
    pub pool: Pool,
    /// `None`: without.
    pub name: Option<Name>,
    #[serde(flatten)]
    pub share: Share,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LineShare {
    pub pool: Pool,
    /// `None`: not known.
    pub place: Option<Frame>,
    #[serde(flatten)]
    pub share: Share,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClassifiedBlock {
    pub allocation_id: AllocationId,
    pub pool: Pool,
    pub ptr: DevicePtr,
    pub size: u64,
    pub class: Class,
    pub op: Option<Name>,
    pub label: Option<Name>,
    pub place: Option<Frame>,
}

#[derive(Debug, Default)]
pub struct Decompose {
    /// By position in [`Ledger::processes`].
    processes: Vec<Process>,
}

#[derive(Debug, Default)]
struct Process {
    phases: Phases,
    /// Blocks used in the phase between, until it is known what it was.
    open: Vec<AllocationId>,
    /// Allocations so far.
    allocations: u64,
    blocks: FxHashMap<AllocationId, Held>,
    devices: Vec<Device>,
    /// As it was when it finished: what is freed after that is tidied up.
    finished: Option<Vec<Decomposition>>,
}

/// What is known of a live block of a pool.
#[derive(Debug)]
struct Held {
    device: usize,
    /// The number of its allocation.
    number: u64,
    uses: Uses,
    label: Option<Name>,
}

#[derive(Debug, Default)]
struct Device {
    device: Option<DeviceId>,
    live: u64,
    peak: u64,
    /// The last allocation before the peak.
    peak_at: u64,
    /// Bytes that were alive at the peak and are gone.
    gone: Shares,
}

/// Bytes by class, operator, label and line.
#[derive(Debug, Default, Clone)]
struct Shares {
    classes: FxHashMap<(Pool, Class), Share>,
    operators: FxHashMap<(Pool, Option<Name>), Share>,
    labels: FxHashMap<(Pool, Option<Name>), Share>,
    lines: FxHashMap<(Pool, Option<Frame>), Share>,
}

/// The line of the program that allocated a block.
fn place(block: &Block) -> Option<&Frame> {
    block.stack.as_ref()?.place()
}

impl Shares {
    fn add(&mut self, block: &Block, held: &Held, add: impl Fn(&mut Share)) {
        let pool = block.pool;
        add(self.classes.entry((pool, held.class(pool))).or_default());
        for (shares, name) in [(&mut self.operators, &block.op), (&mut self.labels, &held.label)] {
            let name = if shares.len() < NAMES_MAX { name.clone() } else { None };
            add(shares.entry((pool, name)).or_default());
        }
        let place = if self.lines.len() < NAMES_MAX { place(block).cloned() } else { None };
        add(self.lines.entry((pool, place)).or_default());
    }

    fn clear(&mut self) {
        self.classes.clear();
        self.operators.clear();
        self.labels.clear();
        self.lines.clear();
    }
}

impl Held {
    fn class(&self, pool: Pool) -> Class {
        match pool {
            Pool::PtaWorkspace => Class::Workspace,
            _ => self.uses.class(),
        }
    }
}

/// Blocks that pools hand out. The driver's own are told apart by their modules.
fn is_pools(block: &Block) -> bool {
    !matches!(block.pool, Pool::Hal | Pool::Host)
}

impl Analysis for Decompose {
    fn observe(&mut self, event: &Event, change: &Change, ledger: &Ledger) {
        let Some(position) = ledger.position(event.tgid) else { return };
        let Some(known) = ledger.processes().get(position) else { return };
        if self.processes.len() <= position {
            self.processes.resize_with(position + 1, Process::default);
        }
        let process = &mut self.processes[position];
        match (&event.kind, change) {
            (EventKind::Op { name }, _) => {
                let between = process.phases.operator(event.tid, name);
                process.settle(between);
            }
            (EventKind::Access(access), Change::Used(Some(block))) => {
                if let Some(block) = known.block(*block) {
                    process.used(block.id, event.tid, access);
                }
            }
            (_, Change::Allocated { block, replaced }) => {
                if let Some(old) = replaced {
                    process.gone(old);
                }
                if let Some(block) = known.block(*block) {
                    if block.stack.as_ref().is_some_and(|stack| stack.whose() == Whose::Via) {
                        process.phases.waited_for(event.tid);
                    }
                    process.allocated(block, known.label(event.tid, block.stack.as_deref()));
                }
            }
            (_, Change::Freed(block)) => process.gone(block),
            (_, Change::Step { began: Some(_), .. }) => {
                let between = process.phases.step();
                process.settle(between);
            }
            (_, Change::Finalized) => {
                process.finished = Some(process.decompose(event.tgid, known.blocks(), known));
            }
            (_, Change::Ended { blocks, .. }) if process.finished.is_none() => {
                process.finished = Some(process.decompose(event.tgid, blocks.iter(), known));
            }
            _ => {}
        }
    }
}

impl Decompose {
    /// Of a process by its position in [`Ledger::processes`]: as it is now, or was when it finished.
    pub fn of(&self, position: usize, ledger: &Ledger) -> Vec<Decomposition> {
        let (Some(process), Some(known)) = (self.processes.get(position), ledger.processes().get(position))
        else {
            return Vec::new();
        };
        let mut devices = match &process.finished {
            Some(finished) => finished.clone(),
            None => process.decompose(known.tgid, known.blocks(), known),
        };
        devices.iter_mut().for_each(|of| of.program = ledger.program(position));
        devices
    }
}

impl Process {
    fn used(&mut self, id: AllocationId, tid: Tid, access: &Access) {
        let Some(held) = self.blocks.get(&id) else { return };
        let (uses, kind) = (held.uses, access.kind);
        let between = self.phases.decide(self.phases.of(tid, access), uses, kind);
        self.settle(between);
        let told = self.phases.of(tid, access);
        let average = self.phases.averaged(id, told, uses, kind);
        if let Some(held) = self.blocks.get_mut(&id) {
            held.uses.add(told, kind);
        }
        if let Some(held) = average.and_then(|id| self.blocks.get_mut(&id)) {
            held.uses.add_average();
        }
        if let Some((Phase::Between, _)) = told {
            self.open.push(id);
            if self.open.len() >= OPEN_MAX {
                self.phases.is_forward();
                self.settle(Some(Between::WasForward));
            }
        }
    }

    fn settle(&mut self, between: Option<Between>) {
        let Some(between) = between else { return };
        for id in self.open.drain(..).filter(|_| between == Between::WasForward) {
            if let Some(held) = self.blocks.get_mut(&id) {
                held.uses.add_forward();
            }
        }
    }

    fn allocated(&mut self, block: &Block, label: Option<Name>) {
        if !is_pools(block) {
            return;
        }
        self.allocations += 1;
        let device =
            self.devices.iter().position(|known| known.device == block.device).unwrap_or_else(|| {
                self.devices.push(Device { device: block.device, ..Device::default() });
                self.devices.len() - 1
            });
        let held = Held { device, number: self.allocations, uses: Uses::default(), label };
        self.blocks.insert(block.id, held);
        let of = &mut self.devices[device];
        of.live = of.live.saturating_add(block.size);
        if of.live > of.peak {
            of.peak = of.live;
            of.peak_at = self.allocations;
            of.gone.clear();
        }
    }

    fn gone(&mut self, block: &Block) {
        let Some(held) = self.blocks.remove(&block.id) else { return };
        let device = &mut self.devices[held.device];
        device.live = device.live.saturating_sub(block.size);
        if held.number <= device.peak_at {
            device.gone.add(block, &held, |share| {
                share.peak_bytes = share.peak_bytes.saturating_add(block.size);
            });
        }
    }

    fn decompose<'a>(
        &self,
        pid: Tgid,
        live: impl Iterator<Item = &'a Block>,
        known: &model::Process,
    ) -> Vec<Decomposition> {
        let mut shares: Vec<Shares> = self.devices.iter().map(|device| device.gone.clone()).collect();
        let mut blocks: Vec<Vec<ClassifiedBlock>> = self.devices.iter().map(|_| Vec::new()).collect();
        for block in live {
            let Some(held) = self.blocks.get(&block.id) else { continue };
            let at_peak = held.number <= self.devices[held.device].peak_at;
            shares[held.device].add(block, held, |share| {
                share.live_bytes = share.live_bytes.saturating_add(block.size);
                share.live_blocks += 1;
                if at_peak {
                    share.peak_bytes = share.peak_bytes.saturating_add(block.size);
                }
            });
            blocks[held.device].push(ClassifiedBlock {
                allocation_id: block.id,
                pool: block.pool,
                ptr: block.ptr,
                size: block.size,
                class: held.class(block.pool),
                op: block.op.clone(),
                label: held.label.clone(),
                place: place(block).cloned(),
            });
        }
        self.devices
            .iter()
            .zip(shares)
            .zip(blocks)
            .map(|((device, shares), mut blocks)| {
                blocks.sort_by_key(|block| (std::cmp::Reverse(block.size), block.allocation_id));
                blocks.truncate(BLOCKS_LISTED);
                let classes: BTreeMap<_, _> = shares.classes.into_iter().collect();
                let class_share = |((pool, class), share): ((Pool, Class), Share)| ClassShare {
                    pool,
                    class,
                    inferred: class.inferred(),
                    share,
                };
                let memory = known.device(device.device);
                let totals = |pool| Some((pool, memory?.while_used().pool(pool).totals?));
                Decomposition {
                    totals: Pool::ALL.into_iter().filter_map(totals).collect(),
                    pid,
                    program: 1,
                    device: device.device,
                    live_bytes: device.live,
                    peak_bytes: device.peak,
                    classes: classes.into_iter().map(class_share).collect(),
                    operators: named(shares.operators),
                    labels: named(shares.labels),
                    lines: lines(shares.lines),
                    blocks,
                }
            })
            .collect()
    }
}

fn named(shares: FxHashMap<(Pool, Option<Name>), Share>) -> Vec<NamedShare> {
    sorted(shares).map(|((pool, name), share)| NamedShare { pool, name, share }).collect()
}

fn lines(shares: FxHashMap<(Pool, Option<Frame>), Share>) -> Vec<LineShare> {
    sorted(shares).map(|((pool, place), share)| LineShare { pool, place, share }).collect()
}

/// Most bytes first.
fn sorted<K: Ord>(shares: FxHashMap<K, Share>) -> impl Iterator<Item = (K, Share)> {
    let mut shares: Vec<(K, Share)> = shares.into_iter().collect();
    shares.sort_by(|(a, of_a), (b, of_b)| {
        let bytes = |of: &Share| of.live_bytes.max(of.peak_bytes);
        bytes(of_b).cmp(&bytes(of_a)).then_with(|| a.cmp(b))
    });
    shares.into_iter()
}

#[cfg(test)]
mod tests;
