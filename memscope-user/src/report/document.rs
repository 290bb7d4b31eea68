//! The whole report as one document: what `--json` prints, and what the terminal's text is made from.
//!
//! Schema 1. Fields may be added; those that are there keep their names and meanings. Sizes are in bytes,
//! times in ns of the wall clock, texts from targets safe to print.

use std::sync::Arc;

use serde::{Serialize, ser::SerializeStruct};

use crate::analysis::Online;
use crate::analysis::decompose::Decomposition;
use crate::analysis::fluctuation::Extremes;
use crate::analysis::growth::{Source, Trend};
use crate::analysis::inefficient;
use crate::analysis::leaks::{Late, LateGroup, Like, Pattern, Reason, Verdicts};
use crate::analysis::oom::{Holder, Oom, OtherHolders};
use crate::analysis::reconcile::Reconciliation;
use crate::analysis::reserve::{Point, Series};
use crate::attach::cost::Share;
use crate::model::{
    AllocationId, Basis, Block, Container, Count, DeviceId, DeviceMemory, DevicePtr, Ending, Frame,
    FreeSpace, Name, Nanos, Pool, PoolUse, Process, Stack, StepId, StepSet, StepsFrom, Tgid, Tid, Whose,
};
use crate::stacks::{self, NativeTally, Tally};

/// Blocks listed as not judged, per device: the largest. The totals count all.
const NOT_JUDGED_LISTED: usize = 10_000;

/// Texts of marks listed, per process.
const MARKS_LISTED: usize = 10;

#[derive(Debug, Clone, Serialize)]
pub struct Document {
    pub schema: u32,
    pub tool: Tool,
    /// Whether leaks were looked for: without, there are none in the document.
    pub leaks_analysed: bool,
    /// Whether there were to be steps: without, nothing is judged (`--steps-from none`).
    pub steps_wanted: bool,
    /// Whether it is of dumps, and not of a live trace.
    pub offline: bool,
    pub selection: Selection,
    pub targets: Vec<Target>,
    pub sites: Vec<Site>,
    pub events: Events,
    pub steps: Vec<Step>,
    pub devices: Vec<Device>,
    pub processes: Vec<ProcessFacts>,
    /// `None` when it was not asked for.
    pub inefficient: Option<inefficient::Report>,
    /// Empty when it was not asked for.
    pub decomposition: Vec<Decomposition>,
    pub dump: Option<Dump>,
    pub timing: Timing,
    /// `None`: it could not be measured, or there was nothing to trace.
    pub probe_cost: Option<ProbeCost>,
    /// What else the reader must know to judge the figures.
    pub notes: Vec<String>,
}

/// What the report was asked to keep to. It was all analysed: what is kept is judged by all that was seen.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Selection {
    /// Steps in which leaked, late and not judged blocks were allocated. Everything else is of the whole trace.
    pub steps: StepSet,
    /// Empty: all.
    pub devices: Vec<DeviceId>,
    /// Devices that had memory and are not among those.
    pub devices_left_out: Vec<DeviceId>,
}

/// When the trace was what, in ns of the wall clock.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Timing {
    pub started_ns: Nanos,
    /// Sites of the first process were attached.
    pub attached_ns: Option<Nanos>,
    pub first_event_ns: Option<Nanos>,
    pub ended_ns: Nanos,
}

/// What the document says of the trace itself: all that is not in the ledger or the analyses.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    /// It was read from dumps.
    pub offline: bool,
    pub targets: Vec<Target>,
    pub sites: Vec<Site>,
    pub events: Events,
    pub dump: Option<Dump>,
    pub timing: Timing,
    pub probe_cost: Option<ProbeCost>,
    pub notes: Vec<String>,
}

/// What the probes cost the traced processes.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ProbeCost {
    #[serde(flatten)]
    pub share: Share,
    /// `probes_ns` of `target_ns`, from 0 to 1.
    pub of_target: Option<f64>,
}

impl From<Share> for ProbeCost {
    fn from(share: Share) -> Self {
        Self { of_target: share.of_target(), share }
    }
}

/// Version of the documents: of this one, and of those of verbs that report something else.
pub const SCHEMA: u32 = 1;

#[derive(Debug, Clone, Serialize)]
pub struct Tool {
    pub name: &'static str,
    pub version: &'static str,
}

impl Tool {
    pub fn this() -> Self {
        Tool { name: "memscope-trace", version: env!("CARGO_PKG_VERSION") }
    }
}

#[derive(Debug, Clone, Serialize)]
pub struct Target {
    pub pid: Tgid,
    pub command: String,
    /// By its cgroup.
    pub container: Option<Container>,
    /// Its id in its own PID namespace, where that is another one.
    pub own_pid: Option<u32>,
    /// `None`: it was still there when the trace ended.
    pub ended: Option<Ended>,
    pub devices: Vec<DeviceId>,
    /// Version of the wheel, when it is one that is known.
    pub torch_npu: Option<String>,
    /// Version of the Python interpreter, when its stacks are understood.
    pub python: Option<String>,
    /// `None` when Python stacks were not asked for.
    pub stacks: Option<StackFacts>,
    /// `None` when native stacks were not asked for.
    pub native_stacks: Option<NativeStackFacts>,
}

/// How a process ended. Neither code nor signal: this kernel does not tell (it describes its structures to no one).
#[derive(Debug, Clone, Default, Serialize)]
pub struct Ended {
    pub exit_code: Option<i32>,
    /// By name, such as SIGKILL.
    pub signal: Option<String>,
    /// Probed functions that some thread was in, by name.
    pub within: Vec<&'static str>,
}

/// How many of a process's allocations have a Python stack.
#[derive(Debug, Clone, Default, Serialize)]
pub struct StackFacts {
    /// Of the thread that allocated.
    pub own: u64,
    /// Of the main thread, which waited for it.
    pub via: u64,
    pub without: Vec<WithoutStack>,
    /// Frames of distinct stacks whose code was gone before its name was read.
    pub gone_frames: u64,
    /// Why the process's interpreter was not understood.
    pub refused: Option<String>,
}

#[derive(Debug, Clone, Serialize)]
pub struct WithoutStack {
    pub reason: &'static str,
    pub allocations: u64,
}

impl StackFacts {
    pub fn new(tally: Option<&Tally>, refused: Option<String>) -> Self {
        let Some(tally) = tally else { return StackFacts { refused, ..StackFacts::default() } };
        StackFacts {
            own: tally.own,
            via: tally.via,
            without: WithoutStack::list(tally.without()),
            gone_frames: tally.gone_frames,
            refused,
        }
    }
}

impl WithoutStack {
    fn list(without: Vec<(stacks::Reason, u64)>) -> Vec<Self> {
        without
            .into_iter()
            .map(|(reason, allocations)| WithoutStack { reason: reason.text(), allocations })
            .collect()
    }
}

/// How many of a process's allocations have a native stack.
#[derive(Debug, Clone, Default, Serialize)]
pub struct NativeStackFacts {
    /// Down to the function that the thread began with.
    pub whole: u64,
    /// Of which the outermost frames are missing.
    pub cut: u64,
    pub without: Vec<WithoutStack>,
    /// Bytes of a pool's block from which on its stack was taken.
    pub pool_bytes: u64,
}

impl NativeStackFacts {
    pub fn new(tally: Option<&NativeTally>, pool_bytes: u64) -> Self {
        let Some(tally) = tally else { return NativeStackFacts { pool_bytes, ..Default::default() } };
        let without = WithoutStack::list(tally.without());
        NativeStackFacts { whole: tally.whole, cut: tally.cut, without, pool_bytes }
    }
}

/// A place where a probe was, or should have been.
#[derive(Debug, Clone, Serialize)]
pub struct Site {
    pub site: String,
    /// `None` when no mapped file has it.
    pub file: Option<String>,
    pub build_id: Option<String>,
    /// In the file, in bytes.
    pub offset: Option<u64>,
    pub attached: bool,
    pub hits: u64,
    pub lost: u64,
    /// Why it is not attached, or no longer believed.
    pub reason: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Events {
    /// Of dumps: rows.
    pub received: u64,
    pub lost: u64,
}

#[derive(Debug, Clone, Serialize)]
pub struct Dump {
    pub path: String,
    /// Whether every event is in it.
    pub complete: bool,
    /// Why not.
    pub reason: Option<String>,
    /// Whether its files are text, in which lines can be searched for.
    #[serde(skip)]
    pub is_text: bool,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub struct Step {
    pub pid: Tgid,
    pub program: u32,
    pub step: StepId,
    pub begin_ns: Nanos,
    /// `None`: had not ended.
    pub end_ns: Option<Nanos>,
    /// From operators: no mark says so (see [`ProcessFacts::steps_inferred`]).
    pub inferred: bool,
}

/// One process on one device. Process ids may repeat: a process that replaced its program is another one.
#[derive(Debug, Clone, Serialize)]
pub struct Device {
    pub pid: Tgid,
    /// Counts the processes under this number that used memory, from 1.
    pub program: u32,
    /// `None`: host memory, and what could not be placed.
    pub device: Option<DeviceId>,
    pub pools: Vec<PoolFacts>,
    pub leaks: Vec<BlockFacts>,
    /// The largest of those that outlived steps and then were freed.
    pub late: Vec<BlockFacts>,
    /// Largest first.
    pub not_judged: Vec<BlockFacts>,
    pub fluctuation: Vec<FluctuationFacts>,
    /// What pools handed out and had reserved, over steps.
    pub reserve: Vec<ReserveFacts>,
    /// Free memory within the segments of pools, now; none for a process that has ended.
    pub free: Vec<FreeFacts>,
    pub late_total: Count,
    pub late_groups: Vec<LateFacts>,
    pub not_judged_total: Count,
    /// Lines whose live bytes grow without blocks that leak; steepest first.
    pub growth: Vec<GrowthFacts>,
    pub oom: Vec<OomFacts>,
    pub reconciliation: Option<ReconciliationFacts>,
    /// The process's step that ended last; 0: none. Steps from 2 to the one before it were judged.
    pub last_step_ended: StepId,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub struct PoolFacts {
    pub pool: Pool,
    pub live_bytes: u64,
    pub peak_bytes: u64,
    pub blocks: u64,
    /// The allocator's own totals; `None` when it never said.
    pub allocated: Option<u64>,
    pub reserved: Option<u64>,
    /// The largest `allocated`.
    pub peak_allocated: Option<u64>,
}

#[derive(Debug, Clone, Serialize)]
pub struct BlockFacts {
    pub pool: Pool,
    pub ptr: DevicePtr,
    pub size: u64,
    pub step: StepId,
    /// `recurring`: its like leaked (was freed late) in two or more steps; else `once`.
    pub pattern: &'static str,
    pub op: Option<Name>,
    #[serde(flatten)]
    pub stack: StackOf,
    pub kernel_index: u64,
    pub pid: Tgid,
    pub tid: Tid,
    pub timestamp_ns: Nanos,
    pub allocation_id: AllocationId,
    /// Driver blocks: owner module, and the runtime function that was called.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub module: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub api: Option<&'static str>,
    /// Not judged: why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Late: when it was freed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub freed_step: Option<StepId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub freed_ns: Option<Nanos>,
}

/// Where in the program a block was allocated. Serialized as lists of frames, innermost first: `python`, `via` for the
/// frames of the main thread where that waited for the thread that allocated, and `native`. They are empty where nothing
/// is known. `native_cut`: further native frames are missing behind the last.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StackOf(pub Option<Arc<Stack>>);

impl StackOf {
    /// The frame to name where there is room for one.
    pub fn place(&self) -> Option<&Frame> {
        self.0.as_ref()?.place()
    }

    /// `at` the place, or `via` it when it is the main thread's.
    pub fn preposition(&self) -> &'static str {
        match self.0.as_ref().map(|stack| stack.whose()) {
            Some(Whose::Via) => "via",
            _ => "at",
        }
    }

    /// The frames, if they are of this thread.
    fn frames(&self, whose: Whose) -> &[Frame] {
        self.0.as_ref().filter(|stack| stack.whose() == whose).map_or(&[], |stack| stack.frames())
    }
}

impl Serialize for StackOf {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let native = self.0.as_ref().and_then(|stack| stack.native());
        let frames: Vec<&Frame> =
            native.into_iter().flat_map(|native| native.frames()).map(|native| &native.frame).collect();
        let mut fields = serializer.serialize_struct("StackOf", 4)?;
        fields.serialize_field("python", self.frames(Whose::Own))?;
        fields.serialize_field("via", self.frames(Whose::Via))?;
        fields.serialize_field("native", &frames)?;
        fields.serialize_field("native_cut", &native.is_some_and(|native| native.is_cut()))?;
        fields.end()
    }
}

#[derive(Debug, Clone, Serialize)]
pub struct GrowthFacts {
    pub pool: Pool,
    /// `None` where the place tells.
    pub op: Option<Name>,
    pub place: Option<Frame>,
    pub bytes_per_step: u64,
    /// Live bytes at the end of these steps.
    pub first_bytes: u64,
    pub last_bytes: u64,
    pub first_step: StepId,
    pub last_step: StepId,
    /// Share of the variance that steady growth explains, 0 to 1.
    pub fit: f64,
}

impl GrowthFacts {
    fn new(trend: Trend) -> Self {
        GrowthFacts {
            pool: trend.source.pool,
            op: trend.source.op,
            place: trend.source.place,
            bytes_per_step: trend.per_step.max(0.0).round() as u64,
            first_bytes: trend.first_bytes,
            last_bytes: trend.last_bytes,
            first_step: trend.first_step,
            last_step: trend.last_step,
            fit: trend.fit,
        }
    }
}

#[derive(Debug, Clone, Serialize)]
pub struct LateFacts {
    pub pool: Pool,
    pub op: Option<Name>,
    /// The line of the program that wanted them.
    pub place: Option<Frame>,
    pub blocks: u64,
    pub bytes: u64,
    /// Bytes of the largest.
    pub largest: u64,
    /// Steps from allocation to free: the fewest and the most.
    pub held_min: u32,
    pub held_max: u32,
    pub first_step: StepId,
    pub last_step: StepId,
}

/// The steps in which a pool's use swung most (smallest ratio of smallest to largest use) and least.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct FluctuationFacts {
    pub pool: Pool,
    pub min_ratio: f64,
    pub min_step: StepId,
    /// Bytes of the smallest use in that step.
    pub min_bytes: u64,
    pub max_ratio: f64,
    pub max_step: StepId,
    /// The same in the other step.
    pub max_min_bytes: u64,
}

#[derive(Debug, Clone, Serialize)]
pub struct ReserveFacts {
    pub pool: Pool,
    /// Of steps from 2 on, in order; of long traces several steps each.
    pub points: Vec<Point>,
}

impl From<&Series> for ReserveFacts {
    fn from(series: &Series) -> Self {
        ReserveFacts { pool: series.pool, points: series.points().to_vec() }
    }
}

#[derive(Debug, Clone, Serialize)]
pub struct OomFacts {
    pub pool: Pool,
    pub function: &'static str,
    pub code: i32,
    pub size: u64,
    /// The runtime function above, and the bytes it was asked for.
    pub api: Option<&'static str>,
    pub requested: u64,
    pub pid: Tgid,
    pub tid: Tid,
    pub first_ns: Nanos,
    pub last_ns: Nanos,
    pub step: StepId,
    pub op: Option<Name>,
    #[serde(flatten)]
    pub stack: StackOf,
    pub attempts: u32,
    pub recovered: bool,
    pub pools: Vec<PoolFacts>,
    /// Most bytes first.
    pub holders: Vec<Holder>,
    pub other_holders: OtherHolders,
    pub largest: Vec<BlockFacts>,
    /// Latest first.
    pub latest: Vec<BlockFacts>,
    pub free: Vec<FreeFacts>,
}

/// What was free in the segments of a pool that were seen.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct FreeFacts {
    pub pool: Pool,
    #[serde(flatten)]
    pub space: FreeSpace,
}

#[derive(Debug, Clone, Serialize)]
pub struct ReconciliationFacts {
    /// Taken from the driver since attach and not given back.
    pub driver_bytes: u64,
    pub modules: Vec<ModuleFacts>,
    pub segments: Vec<SegmentFacts>,
    pub unexplained_bytes: u64,
}

#[derive(Debug, Clone, Serialize)]
pub struct ModuleFacts {
    /// `None`: not known.
    pub module: Option<String>,
    pub bytes: u64,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub struct SegmentFacts {
    pub pool: Pool,
    /// Driver bytes of its segments since attach.
    pub driver_bytes: u64,
    pub reserved: Option<u64>,
    pub allocated: Option<u64>,
    pub before_attach: Option<u64>,
}

#[derive(Debug, Clone, Serialize)]
pub struct ProcessFacts {
    pub pid: Tgid,
    /// Counts the processes under this number that used memory, from 1.
    pub program: u32,
    /// `exit`, `exec`, or `None` while it runs.
    pub ended: Option<&'static str>,
    /// It told CANN that it has finished: its blocks were judged at that moment.
    pub finalized: bool,
    pub kernels: u64,
    pub pools: Vec<PoolGaps>,
    /// Out-of-memories past those that are listed.
    pub oom_not_listed: u64,
    /// The texts of marks and ranges that came most often.
    pub marks: Vec<MarkFacts>,
    /// Its steps, reported or not; one that is open counts.
    pub steps_seen: u32,
    /// Why its steps are believed to be steps, when they were inferred from operators.
    pub steps_inferred: Option<InferredFacts>,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub struct InferredFacts {
    /// `optimizer`: each ends with one; `repetition`: the same operators come again and again.
    pub basis: &'static str,
    /// Steps that have ended.
    pub periods: u32,
    /// Those of them with the same optimizer, or the same operators, as most.
    pub equal: u32,
    /// How likely the next one is to be like them too, from 0 to 1 (by the rule of succession).
    pub confidence: f64,
}

/// What was not seen of a pool's blocks.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct PoolGaps {
    pub pool: Pool,
    /// Freed, but never seen allocated: from before attach, or lost.
    pub unknown_frees: Count,
    /// Address handed out again, but never seen freed.
    pub lost_frees: Count,
}

#[derive(Debug, Clone, Serialize)]
pub struct MarkFacts {
    pub text: Name,
    pub count: u64,
}

impl Document {
    pub fn new(trace: Trace, online: &Online) -> Self {
        let mut steps = Vec::new();
        let mut devices = Vec::new();
        let mut processes = Vec::new();
        let mut decomposition = Vec::new();
        for (position, process) in online.ledger.processes().iter().enumerate() {
            let shown = process.steps().list().iter().filter(|step| online.shown_steps.contains(step.id));
            steps.extend(shown.map(|step| Step {
                pid: process.tgid,
                program: online.ledger.program(position),
                step: step.id,
                begin_ns: step.begin,
                end_ns: step.end,
                inferred: process.steps().inferred().is_some(),
            }));
            devices.extend(process_devices(position, process, online));
            processes.push(process_facts(position, process, online));
            let of = online.decompose.as_ref().map(|decompose| decompose.of(position, &online.ledger));
            decomposition.extend(of.unwrap_or_default());
        }
        devices.sort_by_key(|device| (device.pid, device.program, device.device.is_none(), device.device));
        Document {
            schema: SCHEMA,
            tool: Tool::this(),
            leaks_analysed: online.leaks.is_some(),
            steps_wanted: online.ledger.steps_from() != StepsFrom::None,
            offline: trace.offline,
            selection: Selection { steps: online.shown_steps.clone(), ..Selection::default() },
            targets: trace.targets,
            sites: trace.sites,
            events: trace.events,
            steps,
            devices,
            processes,
            decomposition,
            inefficient: online.inefficient.as_ref().map(inefficient::Inefficient::report),
            dump: trace.dump,
            timing: trace.timing,
            probe_cost: trace.probe_cost,
            notes: trace.notes,
        }
    }
}

fn process_devices(position: usize, process: &Process, online: &Online) -> Vec<Device> {
    let mut verdicts =
        online.leaks.as_ref().map(|leaks| leaks.verdicts(position, process)).unwrap_or_default();
    let mut growth =
        online.growth.as_ref().map(|growth| growth.trends(position, process)).unwrap_or_default();
    growth.retain(|trend| !is_leaking(trend, &verdicts));
    verdicts.select(&online.shown_steps);
    let ooms = online.oom.of(position);
    let program = online.ledger.program(position);
    let mut devices: Vec<Device> = process
        .devices()
        .iter()
        .filter(|memory| memory.was_used())
        .map(|memory| device(memory, process, program, &mut verdicts))
        .collect();
    for device in &mut devices {
        let growth = growth.extract_if(.., |trend| trend.source.device == device.device);
        device.growth = growth.map(GrowthFacts::new).collect();
    }
    for oom in ooms {
        let at = devices.iter().position(|device| device.device == oom.device).unwrap_or_else(|| {
            devices.push(empty_device(process, program, oom.device));
            devices.len() - 1
        });
        devices[at].oom.push(OomFacts::new(oom, process.tgid));
    }
    for series in online.reserve.series(position) {
        if let Some(device) = devices.iter_mut().find(|device| device.device == series.device) {
            device.reserve.push(series.into());
        }
    }
    for extremes in online.fluctuation.extremes(position) {
        if let Some(device) = devices.iter_mut().find(|device| device.device == extremes.device) {
            device.fluctuation.push(extremes.into());
        }
    }
    devices
}

fn empty_device(process: &Process, program: u32, device: Option<DeviceId>) -> Device {
    Device {
        pid: process.tgid,
        program,
        device,
        pools: Vec::new(),
        leaks: Vec::new(),
        late: Vec::new(),
        not_judged: Vec::new(),
        fluctuation: Vec::new(),
        reserve: Vec::new(),
        free: Vec::new(),
        late_total: Count::default(),
        late_groups: Vec::new(),
        not_judged_total: Count::default(),
        growth: Vec::new(),
        oom: Vec::new(),
        reconciliation: None,
        last_step_ended: process.steps().last_ended(),
    }
}

/// Whether it was told of as a leak: some blocks of it recur and stay, or what stays of it is half of the growth.
fn is_leaking(trend: &Trend, verdicts: &Verdicts) -> bool {
    let mut leaked = 0_u64;
    for (block, pattern) in verdicts.leaks.iter().filter(|(block, _)| Source::of(block) == trend.source) {
        if *pattern == Pattern::Recurring {
            return true;
        }
        leaked = leaked.saturating_add(block.size);
    }
    leaked >= trend.last_bytes.saturating_sub(trend.first_bytes) / 2
}

/// Takes what concerns this device out of the verdicts.
fn device(memory: &DeviceMemory, process: &Process, program: u32, verdicts: &mut Verdicts) -> Device {
    let pid = process.tgid;
    let mut device = empty_device(process, program, memory.device);
    let memory = memory.while_used();
    device.pools = Pool::ALL
        .into_iter()
        .filter(|pool| memory.pool(*pool).was_used())
        .map(|pool| PoolFacts::new(pool, memory.pool(pool)))
        .collect();
    device.leaks = verdicts
        .leaks
        .extract_if(.., |(block, _)| block.device == memory.device)
        .map(|(block, pattern)| BlockFacts::new(&block, pattern, pid))
        .collect();
    let not_judged: Vec<_> =
        verdicts.not_judged.extract_if(.., |(block, ..)| block.device == memory.device).collect();
    for (block, ..) in &not_judged {
        device.not_judged_total.add(block.size);
    }
    device.not_judged = not_judged
        .into_iter()
        .take(NOT_JUDGED_LISTED)
        .map(|(block, pattern, reason)| BlockFacts {
            reason: Some(reason.to_string()),
            ..BlockFacts::new(&block, pattern, pid)
        })
        .collect();
    device.late = verdicts
        .late
        .extract_if(.., |(late, _)| late.block.device == memory.device)
        .map(|(Late { block, freed, freed_step, .. }, pattern)| BlockFacts {
            freed_step: Some(freed_step),
            freed_ns: Some(freed),
            ..BlockFacts::new(&block, pattern, pid)
        })
        .collect();
    device.late_groups = verdicts
        .late_groups
        .extract_if(.., |(like, _)| like.device == memory.device)
        .map(|(like, group)| LateFacts::new(like, group))
        .collect();
    for group in &device.late_groups {
        device.late_total.blocks += group.blocks;
        device.late_total.bytes = device.late_total.bytes.saturating_add(group.bytes);
    }
    let frameworks = Pool::ALL.into_iter().filter(|pool| !matches!(pool, Pool::Hal | Pool::Host));
    device.free = frameworks
        .filter_map(|pool| Some(FreeFacts { pool, space: process.free_space(pool, memory.device)? }))
        .collect();
    device.reconciliation = memory.device.map(|_| ReconciliationFacts::new(Reconciliation::of(memory)));
    device
}

fn process_facts(position: usize, process: &Process, online: &Online) -> ProcessFacts {
    ProcessFacts {
        pid: process.tgid,
        program: online.ledger.program(position),
        ended: process.ended().map(|ending| match ending {
            Ending::Exit => "exit",
            Ending::Exec => "exec",
        }),
        finalized: process.finalized(),
        kernels: process.kernels(),
        pools: Pool::ALL
            .into_iter()
            .map(|pool| PoolGaps {
                pool,
                unknown_frees: process.unknown_frees(pool),
                lost_frees: process.lost_frees(pool),
            })
            .filter(|gaps| gaps.unknown_frees.blocks + gaps.lost_frees.blocks > 0)
            .collect(),
        oom_not_listed: online.oom.not_kept(position).blocks,
        marks: online
            .marks
            .most_frequent(position, MARKS_LISTED)
            .into_iter()
            .map(|(text, count)| MarkFacts { text, count })
            .collect(),
        steps_seen: process.steps().current().0,
        steps_inferred: process.steps().inferred().map(|inferred| InferredFacts {
            basis: match inferred.basis {
                Basis::Optimizer => "optimizer",
                Basis::Repetition => "repetition",
            },
            periods: inferred.periods,
            equal: inferred.equal,
            confidence: f64::from(inferred.equal + 1) / f64::from(inferred.periods + 2),
        }),
    }
}

impl PoolFacts {
    fn new(pool: Pool, facts: &PoolUse) -> Self {
        PoolFacts {
            pool,
            live_bytes: facts.live_bytes,
            peak_bytes: facts.peak_bytes,
            blocks: facts.blocks,
            allocated: facts.totals.map(|totals| totals.allocated),
            reserved: facts.totals.map(|totals| totals.reserved),
            peak_allocated: facts.totals.map(|_| facts.peak_allocated),
        }
    }
}

impl BlockFacts {
    fn new(block: &Block, pattern: Pattern, pid: Tgid) -> Self {
        BlockFacts {
            pool: block.pool,
            ptr: block.ptr,
            size: block.size,
            step: block.step,
            pattern: match pattern {
                Pattern::Recurring => "recurring",
                Pattern::Settled => "settled",
                Pattern::Once => "once",
            },
            op: block.op.clone(),
            stack: StackOf(block.stack.clone()),
            kernel_index: block.kernel_index,
            pid,
            tid: block.tid,
            timestamp_ns: block.time,
            allocation_id: block.id,
            module: block.module().map(|module| module.to_string()),
            api: block.driver.and_then(|driver| driver.api),
            reason: None,
            freed_step: None,
            freed_ns: None,
        }
    }
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Reason::LastStep => f.write_str("last step"),
            Reason::Young { freed_after: 1 } => f.write_str("young: its like is freed after 1 step"),
            Reason::Young { freed_after } => write!(f, "young: its like is freed after {freed_after} steps"),
            Reason::Outlier { mean, longest } => {
                write!(f, "its like is held over {mean} steps on average, but over up to {longest}")
            }
        }
    }
}

impl LateFacts {
    fn new(like: Like, group: LateGroup) -> Self {
        LateFacts {
            pool: like.pool,
            op: like.op,
            place: like.place,
            blocks: group.count.blocks,
            bytes: group.count.bytes,
            largest: group.largest,
            held_min: group.held_min,
            held_max: group.held_max,
            first_step: group.first_step,
            last_step: group.last_step,
        }
    }
}

impl From<Extremes> for FluctuationFacts {
    fn from(Extremes { pool, most, least, .. }: Extremes) -> Self {
        FluctuationFacts {
            pool,
            min_ratio: most.ratio,
            min_step: most.step,
            min_bytes: most.min_bytes,
            max_ratio: least.ratio,
            max_step: least.step,
            max_min_bytes: least.min_bytes,
        }
    }
}

impl OomFacts {
    fn new(oom: &Oom, pid: Tgid) -> Self {
        OomFacts {
            pool: oom.pool,
            function: oom.function,
            code: oom.code,
            size: oom.size,
            api: oom.api.map(|(name, _)| name),
            requested: oom.request(),
            pid,
            tid: oom.tid,
            first_ns: oom.first,
            last_ns: oom.last,
            step: oom.step,
            op: oom.op.clone(),
            stack: StackOf(oom.stack.clone()),
            attempts: oom.attempts,
            recovered: oom.recovered,
            pools: oom.pools.iter().map(|(pool, facts)| PoolFacts::new(*pool, facts)).collect(),
            holders: oom.holders.clone(),
            other_holders: oom.other_holders,
            largest: oom.largest.iter().map(|block| BlockFacts::new(block, Pattern::Once, pid)).collect(),
            latest: oom.latest.iter().map(|block| BlockFacts::new(block, Pattern::Once, pid)).collect(),
            free: oom.free.iter().map(|(pool, space)| FreeFacts { pool: *pool, space: *space }).collect(),
        }
    }
}

impl ReconciliationFacts {
    fn new(reconciliation: Reconciliation) -> Self {
        ReconciliationFacts {
            driver_bytes: reconciliation.driver,
            modules: reconciliation
                .modules
                .into_iter()
                .map(|(module, bytes)| ModuleFacts { module: module.map(|module| module.to_string()), bytes })
                .collect(),
            segments: reconciliation
                .segments
                .into_iter()
                .map(|segments| SegmentFacts {
                    pool: segments.pool,
                    driver_bytes: segments.driver,
                    reserved: segments.reserved,
                    allocated: segments.allocated,
                    before_attach: segments.before_attach,
                })
                .collect(),
            unexplained_bytes: reconciliation.unexplained,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::StepRule;
    use crate::model::testing::leak6;

    fn document(events: &[crate::model::Event]) -> Document {
        let mut online = Online::new(StepRule::default(), true);
        for event in events {
            online.apply(event);
        }
        Document::new(Trace::default(), &online)
    }

    /// The reference tool's report of this trace: leaks of steps 2 to 5, 3.000488 MiB each; its ratios.
    #[test]
    fn the_peers_figures_come_out() {
        let whole = leak6();
        let finalize = whole.iter().position(|event| event.kind == crate::model::EventKind::AclFinalize);
        // Whether the trace ends with the program or is cut before anything is torn down.
        for events in [&whole[..], &whole[..finalize.unwrap_or_default()]] {
            let document = document(events);
            assert_eq!(document.steps.len(), 6);
            let [device] = &document.devices[..] else { panic!("{:?}", document.devices) };

            let leaks: Vec<_> =
                device.leaks.iter().map(|leak| (leak.step.0, leak.ptr.0, leak.size, leak.pattern)).collect();
            assert_eq!(
                leaks,
                [
                    (2, 0x7f04_e030_0200, 3_146_240, "recurring"),
                    (3, 0x7f04_e060_0400, 3_146_240, "recurring"),
                    (4, 0x7f04_e090_0600, 3_146_240, "recurring"),
                    (5, 0x7f04_e0c0_0800, 3_146_240, "recurring"),
                ]
            );
            let [last] = &device.not_judged[..] else { panic!("{:?}", device.not_judged) };
            assert_eq!((last.step.0, last.ptr.0, last.pattern), (6, 0x7f04_e0f0_0a00, "recurring"));
            assert_eq!(last.reason.as_deref(), Some("last step"));
            assert!(device.late.is_empty(), "what is freed after aclFinalize is not late");

            let pta = device.fluctuation.iter().find(|facts| facts.pool == Pool::Pta);
            let pta = pta.unwrap_or_else(|| panic!("{:?}", device.fluctuation));
            assert_eq!(format!("{:.4} {}", pta.min_ratio * 100.0, pta.min_step), "29.1716 2");
            assert_eq!(format!("{:.4}", pta.min_bytes as f64 / 1048576.0), "7.0015");
            assert_eq!(format!("{:.4} {}", pta.max_ratio * 100.0, pta.max_step), "52.7830 6");
            assert_eq!(format!("{:.4}", pta.max_min_bytes as f64 / 1048576.0), "19.0034");
        }
    }
}
