//! The functions of `libtorch_npu.so` that are worth a probe and have no symbol: the report that follows every
//! allocation and free of its pools, and the entry points of its mstx marks.
//!
//! They are found by what the stripped binary still has to say (undefined symbols, relocations, unwind tables)
//! and by what provably flows through its code ([`super::flow`]), never by patterns of one build. A function
//! that is not found without doubt is reported missing.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::catalogue::{RUN_OP_API_V2, RUN_OP_API_V2_OLD_ABI};
use super::elf::{ElfError, Library, Missing};
use super::flow::{self, ARGUMENTS, Call, Target, Trace, Value};
use super::image::{Function, Image};
use super::python_methods::Methods;

/// Vtable of the record that the report function makes for the profiler; it lies in `libnpu_profiler.so`, so
/// that its name could not be stripped.
const RECORD_VTABLE: &str = "_ZTVN9torch_npu7toolkit8profiler10MemoryDataE";

/// Functions that enqueue an operator.
const RUNNERS: [&str; 2] = [RUN_OP_API_V2, RUN_OP_API_V2_OLD_ABI];

/// Functions that call the report: malloc, free, free_block of the caching allocator, and the workspace
/// allocator's. 5 to 6 in every release.
const MIN_REPORT_CALLERS: usize = 3;

/// What `libtorch_npu.so` has, as file offsets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TorchNpu {
    pub pool_report: Result<PoolReport, Missing>,
    pub mark: Result<MarkSite, Missing>,
    pub range_start: Result<MarkSite, Missing>,
    pub range_end: Result<MarkSite, Missing>,
    /// torch_npu 26.0 and later.
    pub range_push: Result<MarkSite, Missing>,
    /// torch_npu 26.0 and later.
    pub range_pop: Result<MarkSite, Missing>,
}

/// `NpuUtils::ProfReportMarkDataToNpuProfiler`, in both of its forms: what torch_npu's task queue tells the profiler, which it
/// calls whether or not that listens. File offsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueSites {
    /// `(u32 category, const std::string &op, u64 task)`, by the thread that enqueues: 0 before, 1 after, when the task has
    /// its number.
    pub enqueue: u64,
    /// `(u32 category, void *cells, size_t cell)`, by the thread that runs tasks: 2 before, 3 after.
    pub run: u64,
}

/// `torch_npu::profiler::reportMemoryDataToNpuProfiler(const MemoryUsage &)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolReport {
    pub offset: u64,
    pub layout: ReportLayout,
}

/// The form of `MemoryUsage`, 56 bytes. Both forms have the device type at 0, the device at 1, and from 8 on in
/// steps of 8: address, size (negative when freed), allocated, reserved, active, stream.
///
/// Told apart by the bytes that the report function itself reads, so it holds for builds never seen. In all of
/// the releases 2.1.0.post8 to 2.14.0 that agrees with whether `OpCommand::RunOpApiV2` is exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReportLayout {
    /// torch_npu 7.1.0 and later: component (0 caching, 1 workspace) at 2, data type (0 malloc, 1 free, 2 block
    /// free) at 3, allocator (0 own, 1 external) at 4.
    WithComponent,
    /// Before: data type at 2, and from 6.0.rc2 on allocator at 3.
    WithoutComponent,
}

impl ReportLayout {
    /// Data type of a report that a block has become reusable, which changes nothing of what is allocated.
    pub const BLOCK_FREE: u8 = 2;

    /// Where the data type is.
    pub fn data_type_at(self) -> u8 {
        match self {
            Self::WithComponent => 3,
            Self::WithoutComponent => 2,
        }
    }
}

/// A function that takes a mark or range. Its entry is reached whether or not anything listens to marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MarkSite {
    pub offset: u64,
    pub args: MarkArgs,
}

/// Which argument holds what, counted from 0; a method's object is argument 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MarkArgs {
    /// `const char *`.
    pub text: Option<u8>,
    /// Runtime stream; null for a mark on the host only.
    pub stream: Option<u8>,
    /// `const char *`; torch_npu 7.1.0 and later.
    pub domain: Option<u8>,
    /// `int` that the start of the range returned; 0 while nothing listens.
    pub id: Option<u8>,
}

/// Finds all of them. Errors are those of the file; what can not be found is in the result.
pub fn resolve(library: &Library) -> Result<TorchNpu, ElfError> {
    let image = Image::load(library)?;
    let ranges = Methods::find(&image, "_range_start_on_host");
    // In the same table from 7.1.0 on; before, a method of another module.
    let marks = if ranges.get("_mark").is_some() { None } else { Some(Methods::find(&image, "_mark")) };
    let marks = marks.as_ref().unwrap_or(&ranges);
    let site = |methods: &Methods, carries, on_host, on_stream| {
        mark_site(&image, carries, methods.get(on_host), methods.get(on_stream))
    };
    let mut torch_npu = TorchNpu {
        pool_report: pool_report(&image),
        mark: site(marks, Carries::Text, "_mark_on_host", "_mark"),
        range_start: site(&ranges, Carries::Text, "_range_start_on_host", "_range_start"),
        range_end: site(&ranges, Carries::Id, "", "_range_end"),
        range_push: site(&ranges, Carries::Text, "_range_push_on_host", "_range_push"),
        range_pop: site(&ranges, Carries::Domain, "", "_range_pop"),
    };
    torch_npu.reject_doubles();
    Ok(torch_npu)
}

/// Finds what its task queue tells, which few want to know and which takes as long as all the others.
pub fn resolve_queue(library: &Library) -> Result<Result<QueueSites, Missing>, ElfError> {
    Ok(queue(&Image::load(library)?))
}

impl TorchNpu {
    /// Methods that end in one function were told apart wrongly.
    fn reject_doubles(&mut self) {
        let sites = [
            &mut self.mark,
            &mut self.range_start,
            &mut self.range_end,
            &mut self.range_push,
            &mut self.range_pop,
        ];
        let mut times: BTreeMap<u64, usize> = BTreeMap::new();
        for offset in sites.iter().filter_map(|site| Some(site.as_ref().ok()?.offset)) {
            *times.entry(offset).or_default() += 1;
        }
        for site in sites {
            if site.as_ref().is_ok_and(|s| times.get(&s.offset) != Some(&1)) {
                *site = Missing::because("several Python methods end in the same function");
            }
        }
    }
}

/// The function that makes the profiler's record of an allocation from its one argument.
fn pool_report(image: &Image<'_>) -> Result<PoolReport, Missing> {
    let places = image.imports_of(RECORD_VTABLE);
    if places.is_empty() {
        return Missing::because("the library does not use the profiler's MemoryData record");
    }
    let mut makers = record_makers(image, &places, false);
    if makers.is_empty() {
        makers = record_makers(image, &places, true);
    }
    let [(function, trace)] = &makers[..] else {
        let count = makers.len();
        return Missing::because(format!("{count} functions make the profiler's MemoryData record, not one"));
    };
    let Some(layout) = report_layout(trace) else {
        return Missing::because("the pool's report has a structure that this version does not know");
    };
    match image.library().code_offset(function.start) {
        Some(offset) => Ok(PoolReport { offset, layout }),
        None => Missing::because("the pool's report has no code in the file"),
    }
}

/// Functions with several callers that use the vtable whose address the dynamic linker puts at one of `places`.
fn record_makers(image: &Image<'_>, places: &[u64], exhaustive: bool) -> Vec<(Function, Trace)> {
    let functions = image.functions_that_name(places, exhaustive);
    let calls = image.calls_of(&functions.iter().map(|f| f.start).collect::<Vec<_>>());
    let is_called = |f: &Function| calls.iter().filter(|c| c.1 == f.start).count() >= MIN_REPORT_CALLERS;
    let uses_vtable = |trace: &Trace| {
        trace.loads.iter().any(|l| matches!(l.from, Value::Const(at) if places.contains(&at)))
    };
    functions
        .into_iter()
        .filter(is_called)
        .filter_map(|function| Some((function, flow::trace(image, function).filter(uses_vtable)?)))
        .collect()
}

/// The one function that an operator's name is given to before and after it is enqueued, and the one beside it that asks
/// the same whether the profiler listens, and is told of what is run.
fn queue(image: &Image<'_>) -> Result<QueueSites, Missing> {
    let symbol = |name: &&str| image.library().function(name).ok().flatten();
    let Some(runner) = RUNNERS.iter().find_map(symbol).and_then(|address| image.function_at(address)) else {
        return Missing::because("the library does not enqueue operators in the known way");
    };
    let Some(trace) = flow::trace(image, runner) else {
        return Missing::because("the function that enqueues operators can not be followed");
    };
    let is_name = |call: &Call| call.arguments[1] == Value::Arg(0, 0);
    let enqueue = told(&trace, [0, 1], is_name);
    let [enqueue] = enqueue[..] else {
        return Missing::because(format!(
            "{} functions are told of operators that are enqueued, not one",
            enqueue.len()
        ));
    };
    let callees = image.function_at(enqueue).and_then(|function| flow::trace(image, function));
    let callees: Vec<u64> =
        callees.iter().flat_map(|trace| &trace.calls).filter_map(own_code(image)).collect();
    let beside = image.calls_of(&callees).into_iter().map(|(caller, _)| caller.start);
    let mut beside: Vec<u64> = beside.filter(|start| *start != enqueue).collect();
    beside.dedup();
    let mut callers: Vec<Function> = image.calls_of(&beside).into_iter().map(|(caller, _)| caller).collect();
    callers.dedup();
    let told_of_runs = callers.into_iter().filter_map(|caller| flow::trace(image, caller));
    let mut run: Vec<u64> = told_of_runs.flat_map(|trace| told(&trace, [2, 3], |_| true)).collect();
    run.retain(|function| beside.contains(function));
    run.sort_unstable();
    run.dedup();
    let [run] = run[..] else {
        return Missing::because(format!(
            "{} functions are told of operators that are run, not one",
            run.len()
        ));
    };
    let offset = |address| image.library().code_offset(address);
    match (offset(enqueue), offset(run)) {
        (Some(enqueue), Some(run)) => Ok(QueueSites { enqueue, run }),
        _ => Missing::because("what the task queue tells has no code in the file"),
    }
}

/// Functions that are called with each of `categories` as their first argument.
fn told(trace: &Trace, categories: [u64; 2], wanted: impl Fn(&Call) -> bool) -> Vec<u64> {
    let [first, second] = categories.map(|category| {
        let calls =
            trace.calls.iter().filter(|call| call.arguments[0] == Value::Const(category) && wanted(call));
        let targets = calls.filter_map(|call| match call.target {
            Target::Code(address) => Some(address),
            _ => None,
        });
        targets.collect::<BTreeSet<u64>>()
    });
    first.intersection(&second).copied().collect()
}

/// The function of this library that a call leads to.
fn own_code<'a>(image: &'a Image<'_>) -> impl Fn(&Call) -> Option<u64> + 'a {
    |call| match call.target {
        Target::Code(to) if flow::target_symbol(image, call.target).is_none() => {
            image.function_at(to).map(|function| function.start)
        }
        _ => None,
    }
}

/// The form of `MemoryUsage`, from what is read of it.
fn report_layout(trace: &Trace) -> Option<ReportLayout> {
    let mut read = [false; 56];
    for load in &trace.loads {
        if let Value::Arg(0, offset) = load.from {
            let start = usize::try_from(offset).ok()?;
            read.get_mut(start..start.checked_add(load.width.into())?)?.fill(true);
        }
    }
    let (head, words) = read.split_at_checked(8)?;
    if words.contains(&false) {
        return None;
    }
    match head {
        [true, true, true, true, true, false, false, false] => Some(ReportLayout::WithComponent),
        [true, true, true, _, false, false, false, false] => Some(ReportLayout::WithoutComponent),
        _ => None,
    }
}

/// What a Python wrapper passes on of what it was given.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Carries {
    /// A text, and a domain.
    Text,
    /// The id of a range, and a domain.
    Id,
    /// A domain alone.
    Domain,
}

/// The function that the Python wrappers (for the host, for a stream) pass their arguments to. They must agree.
fn mark_site(
    image: &Image<'_>,
    carries: Carries,
    on_host: Option<u64>,
    on_stream: Option<u64>,
) -> Result<MarkSite, Missing> {
    let receiver = |wrapper: Option<u64>| wrapper.map(|address| receiver(image, carries, address));
    let (call, arguments) = match (receiver(on_host), receiver(on_stream)) {
        (None, None) => return Missing::because("the library has no Python method for it"),
        (Some(one), None) | (None, Some(one)) => one?,
        (Some(on_host), Some(on_stream)) => {
            let ((host_call, host), (call, mut arguments)) = (on_host?, on_stream?);
            if host_call.target != call.target || host != arguments {
                return Missing::because("its two Python methods end in different functions");
            }
            arguments.stream = stream_argument(&host_call, &call);
            (call, arguments)
        }
    };
    let offset = match call.target {
        Target::Code(address) => image.library().code_offset(address),
        _ => None,
    };
    offset
        .map(|offset| MarkSite { offset, args: arguments })
        .ok_or_else(|| Missing::new("it has no code in the file"))
}

/// The one function that the wrapper at `address` hands over all of the strings and ids that it parsed from its
/// Python arguments.
fn receiver(image: &Image<'_>, carries: Carries, address: u64) -> Result<(Call, MarkArgs), Missing> {
    let Some(trace) = image.function_at(address).and_then(|f| flow::trace(image, f)) else {
        return Missing::because("its Python method can not be followed");
    };
    let Some(parsed) = parsed_arguments(image, &trace) else {
        return Missing::because("its Python method does not parse its arguments in the known way");
    };
    let of_kind = |kinds: &str| -> Vec<Value> {
        parsed.iter().filter(|(kind, _)| kinds.contains(*kind)).map(|&(_, slot)| slot).collect()
    };
    let (strings, ids) = (of_kind("sz"), of_kind("iIlkLKn"));
    let (text, id, domain) = match (carries, &strings[..], &ids[..]) {
        (Carries::Text, &[text], _) => (Some(text), None, None),
        (Carries::Text, &[text, domain], _) => (Some(text), None, Some(domain)),
        (Carries::Id, [], &[id]) => (None, Some(id), None),
        (Carries::Id, &[domain], &[id]) => (None, Some(id), Some(domain)),
        (Carries::Domain, &[domain], _) => (None, None, Some(domain)),
        _ => return Missing::because("its Python method takes other arguments than known"),
    };
    let mut found: Option<(Call, MarkArgs)> = None;
    for call in trace.calls {
        let is_own = matches!(call.target, Target::Code(to) if image.function_at(to).is_some())
            && flow::target_symbol(image, call.target).is_none();
        let Some(arguments) = arguments(&call, text, id, domain).filter(|_| is_own) else { continue };
        match &found {
            Some((other, same)) if other.target != call.target || *same != arguments => {
                return Missing::because("its Python method hands its arguments to several functions");
            }
            _ => found = Some((call, arguments)),
        }
    }
    found.ok_or_else(|| Missing::new("its Python method hands its arguments to no function of the library"))
}

/// Where the call passes each of what is wanted; `None` unless it passes all, each once.
fn arguments(call: &Call, text: Option<Value>, id: Option<Value>, domain: Option<Value>) -> Option<MarkArgs> {
    let position = |wanted: Option<Value>| -> Option<Option<u8>> {
        let Some(wanted) = wanted else { return Some(None) };
        let mut at = (0u8..).zip(call.arguments).filter(|&(_, value)| value == wanted).map(|(n, _)| n);
        match (at.next(), at.next()) {
            (Some(n), None) => Some(Some(n)),
            _ => None,
        }
    };
    Some(MarkArgs { text: position(text)?, stream: None, domain: position(domain)?, id: position(id)? })
}

/// The argument that is null on the host, and something computed with a stream.
fn stream_argument(on_host: &Call, on_stream: &Call) -> Option<u8> {
    let mut at = (0u8..ARGUMENTS as u8)
        .zip(on_host.arguments.iter().zip(&on_stream.arguments))
        .filter_map(|(n, pair)| matches!(pair, (Value::Const(0), Value::Returned(..))).then_some(n));
    at.next().filter(|_| at.next().is_none())
}

/// (kind, variable) of each argument that `PyArg_ParseTuple` fills.
fn parsed_arguments(image: &Image<'_>, trace: &Trace) -> Option<Vec<(char, Value)>> {
    let is_parse = |call: &&Call| {
        let symbol = flow::target_symbol(image, call.target);
        matches!(symbol, Some(b"PyArg_ParseTuple" | b"_PyArg_ParseTuple_SizeT"))
    };
    let parse = trace.calls.iter().find(is_parse)?;
    let [Value::Arg(1, 0), Value::Const(format), ref variables @ ..] = parse.arguments else { return None };
    let format = image.text(format, 64)?;
    let kinds: Vec<char> =
        format.split([':', ';']).next()?.chars().filter(|c| !matches!(c, '|' | '$')).collect();
    let parsed = kinds.iter().zip(variables.get(..kinds.len())?).map(|(&kind, &variable)| match variable {
        // What it holds from then on.
        Value::Stack(offset) if kind.is_ascii_alphabetic() => Some((kind, Value::Slot(offset))),
        _ => None,
    });
    let parsed: Vec<_> = parsed.collect::<Option<_>>()?;
    let variables: BTreeSet<Value> = parsed.iter().map(|&(_, variable)| variable).collect();
    (variables.len() == parsed.len()).then_some(parsed)
}
