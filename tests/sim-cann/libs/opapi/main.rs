//! libopapi.so: the aclnn operators that compute. Every other aclnn name that a framework looks up answers
//! 0 and does nothing; those are generated into libopapi_nn.so.

#![allow(non_snake_case)]

mod compute;

use std::ffi::CStr;

use compute::{fill, gather, map, narrow, product, random, reduce, select, softmax};
use sim_cann::acl::{INVALID_PARAM, OK};
use sim_cann::ffi::{Address, Out, Text, put};
use sim_cann::op::{self, DfxGuard, DfxId, Executor, Launch};
use sim_cann::settings;
use sim_cann::tensor::{IntArray, Scalar, Tensor, TensorList};
use sim_cann::trace;

type T<'a> = Option<&'a Tensor>;
type S<'a> = Option<&'a Scalar>;
type Ints<'a> = Option<&'a IntArray>;
type Tensors<'a> = Option<&'a TensorList>;

/// What phase 1 found out about an operator.
struct Plan {
    tensors: Vec<Address>,
    workspace: u64,
    compute: Box<dyn FnOnce()>,
}

impl Plan {
    /// An operator that reads `inputs` and writes `out`.
    fn new<const N: usize>(
        out: &Tensor,
        inputs: [&Tensor; N],
        compute: impl FnOnce(Tensor, [Tensor; N]) + 'static,
    ) -> Option<Self> {
        let (target, sources) = (*out, inputs.map(|input| *input));
        let tensors = sources.iter().chain([&target]).map(|tensor| tensor.data).collect();
        Some(Self { tensors, workspace: 0, compute: Box::new(move || compute(target, sources)) })
    }

    /// An operator on elements, inputs broadcast to `out`.
    fn map<const N: usize>(out: T, inputs: [T; N], f: impl Fn([f64; N]) -> f64 + 'static) -> Option<Self> {
        let out = out?;
        if inputs.iter().any(Option::is_none) {
            return None;
        }
        Self::new(out, inputs.map(|input| input.unwrap_or(out)), move |out, inputs| map(&out, &inputs, f))
    }

    /// Matrix products need a workspace, like the real ones.
    fn with_workspace(mut self) -> Self {
        self.workspace = settings::get("SIM_CANN_WORKSPACE", 20u64 << 20);
        self
    }
}

/// Two operator libraries' ways from phase 2 to the kernel.
#[derive(Clone, Copy, PartialEq)]
enum Family {
    /// Through `InitL2Phase2Context` and `CommonOpExecutorRun`.
    Composite,
    /// Through `NnopbaseRunWithWorkspace`, the name last.
    Individual,
}

fn phase1(
    family: Family,
    launch: Launch,
    name: &'static CStr,
    plan: Option<Plan>,
    size: Out<u64>,
    executor: Out<Option<Box<Executor>>>,
) -> i32 {
    match family {
        Family::Composite => op::init_phase1(Text::of(name), 0),
        Family::Individual => report(op::NnopbaseMsprofSysTime(), name),
    }
    let workspace = plan.as_ref().map_or(0, |plan| plan.workspace);
    let ready = plan.map(|Plan { tensors, compute, .. }| {
        Box::new(Executor { name: name.to_str().unwrap_or_default(), launch, tensors, compute })
    });
    if put(size, workspace) && put(executor, ready) { OK } else { INVALID_PARAM }
}

fn report(begin: u64, name: &'static CStr) {
    op::NnopbaseReportApiInfo(begin, Some(&DfxId { id: 0, name: Text::of(name), has_kernel: true }));
}

fn phase2(
    family: Family,
    name: &'static CStr,
    workspace: Address,
    size: u64,
    executor: Option<Box<Executor>>,
    stream: Address,
) -> i32 {
    let call = trace::enter(name.to_str().unwrap_or_default());
    let call = call.num("workspace", workspace).num("size", size).num("stream", stream);
    // No executor: phase 1 could not make sense of the arguments.
    let Some(executor) = executor else { return call.done(OK) };
    let executor = Box::into_raw(executor) as Address;
    let result = match family {
        Family::Composite => {
            let mut guard = DfxGuard::default();
            op::init_phase2(Text::of(name), executor);
            op::dfx_guard_begin(Some(&mut guard), Text::of(c"op_api"), 0, 2, Text::of(name));
            let result = op::run_composite(workspace, size, executor, stream);
            op::dfx_guard_end(Some(&mut guard));
            result
        }
        Family::Individual => {
            let begin = op::NnopbaseMsprofSysTime();
            let result = op::NnopbaseRunWithWorkspace(executor, stream, workspace, size);
            report(begin, name);
            result
        }
    };
    call.done(result)
}

/// Exports the two phases of each operator. The body is phase 1: from the arguments to a [`Plan`].
macro_rules! operators {
    ($family:ident, $launch:ident;
     $($name:ident($($arg:ident: $type:ty),*) $body:block)*) => {$(
        const _: () = {
            const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => c"",
            };

            fn plan($($arg: $type),*) -> Option<Plan> $body

            #[unsafe(export_name = concat!(stringify!($name), "GetWorkspaceSize"))]
            extern "C" fn prepare(
                $($arg: $type,)*
                size: Out<u64>,
                executor: Out<Option<Box<Executor>>>,
            ) -> i32 {
                phase1(Family::$family, Launch::$launch, NAME, plan($($arg),*), size, executor)
            }

            #[unsafe(export_name = stringify!($name))]
            extern "C" fn execute(
                workspace: Address,
                size: u64,
                executor: Option<Box<Executor>>,
                stream: Address,
            ) -> i32 {
                phase2(Family::$family, NAME, workspace, size, executor, stream)
            }
        };
    )*};
}

// Arithmetic.
operators! { Composite, HostArgs;
    aclnnAdd(a: T, b: T, alpha: S, out: T) { let k = alpha?.0; Plan::map(out, [a, b], move |[a, b]| a + k * b) }
    aclnnAdds(a: T, b: S, alpha: S, out: T) { let b = b?.0 * alpha?.0; Plan::map(out, [a], move |[a]| a + b) }
    aclnnInplaceAdd(a: T, b: T, alpha: S) { let k = alpha?.0; Plan::map(a, [a, b], move |[a, b]| a + k * b) }
    aclnnInplaceAdds(a: T, b: S, alpha: S) { let b = b?.0 * alpha?.0; Plan::map(a, [a], move |[a]| a + b) }
    aclnnSub(a: T, b: T, alpha: S, out: T) { let k = alpha?.0; Plan::map(out, [a, b], move |[a, b]| a - k * b) }
    aclnnSubs(a: T, b: S, alpha: S, out: T) { let b = b?.0 * alpha?.0; Plan::map(out, [a], move |[a]| a - b) }
    aclnnInplaceSub(a: T, b: T, alpha: S) { let k = alpha?.0; Plan::map(a, [a, b], move |[a, b]| a - k * b) }
    aclnnInplaceSubs(a: T, b: S, alpha: S) { let b = b?.0 * alpha?.0; Plan::map(a, [a], move |[a]| a - b) }
    aclnnMul(a: T, b: T, out: T) { Plan::map(out, [a, b], |[a, b]| a * b) }
    aclnnMuls(a: T, b: S, out: T) { let b = b?.0; Plan::map(out, [a], move |[a]| a * b) }
    aclnnInplaceMul(a: T, b: T) { Plan::map(a, [a, b], |[a, b]| a * b) }
    aclnnInplaceMuls(a: T, b: S) { let b = b?.0; Plan::map(a, [a], move |[a]| a * b) }
    aclnnDiv(a: T, b: T, out: T) { Plan::map(out, [a, b], |[a, b]| a / b) }
    aclnnDivs(a: T, b: S, out: T) { let b = b?.0; Plan::map(out, [a], move |[a]| a / b) }
    aclnnInplaceDiv(a: T, b: T) { Plan::map(a, [a, b], |[a, b]| a / b) }
    aclnnInplaceDivs(a: T, b: S) { let b = b?.0; Plan::map(a, [a], move |[a]| a / b) }
    aclnnAddcmul(a: T, b: T, c: T, value: S, out: T) {
        let k = value?.0;
        Plan::map(out, [a, b, c], move |[a, b, c]| a + k * b * c)
    }
    aclnnInplaceAddcmul(a: T, b: T, c: T, value: S) {
        let k = value?.0;
        Plan::map(a, [a, b, c], move |[a, b, c]| a + k * b * c)
    }
    aclnnAddcdiv(a: T, b: T, c: T, value: S, out: T) {
        let k = value?.0;
        Plan::map(out, [a, b, c], move |[a, b, c]| a + k * b / c)
    }
    aclnnInplaceAddcdiv(a: T, b: T, c: T, value: S) {
        let k = value?.0;
        Plan::map(a, [a, b, c], move |[a, b, c]| a + k * b / c)
    }
    aclnnLerps(a: T, end: T, weight: S, out: T) {
        let w = weight?.0;
        Plan::map(out, [a, end], move |[a, end]| a + w * (end - a))
    }
    aclnnInplaceLerps(a: T, end: T, weight: S) {
        let w = weight?.0;
        Plan::map(a, [a, end], move |[a, end]| a + w * (end - a))
    }
    aclnnPowTensorScalar(a: T, exponent: S, out: T) {
        let e = exponent?.0;
        Plan::map(out, [a], move |[a]| a.powf(e))
    }
    aclnnMaximum(a: T, b: T, out: T) { Plan::map(out, [a, b], |[a, b]| a.max(b)) }
    aclnnMinimum(a: T, b: T, out: T) { Plan::map(out, [a, b], |[a, b]| a.min(b)) }
    aclnnClamp(a: T, low: S, high: S, out: T) {
        let (low, high) = (low.map_or(f64::NEG_INFINITY, |s| s.0), high.map_or(f64::INFINITY, |s| s.0));
        Plan::map(out, [a], move |[a]| a.max(low).min(high))
    }
    aclnnNeg(a: T, out: T) { Plan::map(out, [a], |[a]| -a) }
    aclnnAbs(a: T, out: T) { Plan::map(out, [a], |[a]| a.abs()) }
    aclnnExp(a: T, out: T) { Plan::map(out, [a], |[a]| a.exp()) }
    aclnnLog(a: T, out: T) { Plan::map(out, [a], |[a]| a.ln()) }
    aclnnSqrt(a: T, out: T) { Plan::map(out, [a], |[a]| a.sqrt()) }
    aclnnRsqrt(a: T, out: T) { Plan::map(out, [a], |[a]| 1.0 / a.sqrt()) }
    aclnnReciprocal(a: T, out: T) { Plan::map(out, [a], |[a]| 1.0 / a) }
}

// Comparisons and choice.
operators! { Composite, HostArgs;
    aclnnGtScalar(a: T, b: S, out: T) { let b = b?.0; Plan::map(out, [a], move |[a]| f64::from(a > b)) }
    aclnnGeScalar(a: T, b: S, out: T) { let b = b?.0; Plan::map(out, [a], move |[a]| f64::from(a >= b)) }
    aclnnLtScalar(a: T, b: S, out: T) { let b = b?.0; Plan::map(out, [a], move |[a]| f64::from(a < b)) }
    aclnnLeScalar(a: T, b: S, out: T) { let b = b?.0; Plan::map(out, [a], move |[a]| f64::from(a <= b)) }
    aclnnEqScalar(a: T, b: S, out: T) { let b = b?.0; Plan::map(out, [a], move |[a]| f64::from(a == b)) }
    aclnnNeScalar(a: T, b: S, out: T) { let b = b?.0; Plan::map(out, [a], move |[a]| f64::from(a != b)) }
    aclnnGtTensor(a: T, b: T, out: T) { Plan::map(out, [a, b], |[a, b]| f64::from(a > b)) }
    aclnnEqTensor(a: T, b: T, out: T) { Plan::map(out, [a, b], |[a, b]| f64::from(a == b)) }
    aclnnSWhere(condition: T, a: T, b: T, out: T) {
        Plan::map(out, [condition, a, b], |[condition, a, b]| if condition != 0.0 { a } else { b })
    }
}

// Activations, losses and their gradients.
operators! { Composite, HostArgs;
    aclnnRelu(a: T, out: T) { Plan::map(out, [a], |[a]| a.max(0.0)) }
    aclnnInplaceRelu(a: T) { Plan::map(a, [a], |[a]| a.max(0.0)) }
    aclnnThresholdBackward(gradient: T, a: T, threshold: S, out: T) {
        let threshold = threshold?.0;
        Plan::map(out, [gradient, a], move |[gradient, a]| if a > threshold { gradient } else { 0.0 })
    }
    aclnnSigmoid(a: T, out: T) { Plan::map(out, [a], |[a]| 1.0 / (1.0 + (-a).exp())) }
    aclnnTanh(a: T, out: T) { Plan::map(out, [a], |[a]| a.tanh()) }
    aclnnSilu(a: T, out: T) { Plan::map(out, [a], |[a]| a / (1.0 + (-a).exp())) }
    aclnnGelu(a: T, out: T) {
        // The approximation by tanh.
        Plan::map(out, [a], |[a]| 0.5 * a * (1.0 + (0.797_884_560_8 * (a + 0.044_715 * a * a * a)).tanh()))
    }
    aclnnSoftmax(a: T, axis: i64, out: T) {
        Plan::new(out?, [a?], move |out, [a]| softmax(&out, &a, axis, false))
    }
    aclnnLogSoftmax(a: T, axis: i64, out: T) {
        Plan::new(out?, [a?], move |out, [a]| softmax(&out, &a, axis, true))
    }
    aclnnMseLoss(a: T, target: T, reduction: i64, out: T) {
        Plan::new(out?, [a?, target?], move |out, [a, target]| mse_loss(&out, &a, &target, reduction))
    }
    aclnnMseLossBackward(gradient: T, a: T, target: T, reduction: i64, out: T) {
        let scale = if reduction == MEAN { 2.0 / a?.count().max(1) as f64 } else { 2.0 };
        Plan::map(out, [gradient, a, target], move |[g, a, target]| scale * g * (a - target))
    }
}

const MEAN: i64 = 1;

fn mse_loss(out: &Tensor, a: &Tensor, target: &Tensor, reduction: i64) {
    let square = |[a, target]: [f64; 2]| (a - target) * (a - target);
    if out.rank > 0 || reduction == 0 {
        return map(out, &[*a, *target], square);
    }
    let mut squares = vec![0.0f64; a.count()];
    let mut each =
        Tensor { data: squares.as_mut_ptr() as Address, element: sim_cann::tensor::Element::F64, ..*a };
    let mut stride = 1;
    for axis in (0..a.rank).rev() {
        each.strides[axis] = stride;
        stride *= a.dims[axis] as isize;
    }
    map(&each, &[*a, *target], square);
    let mean = reduction == MEAN;
    reduce(out, &each, &[], 0.0, |sum, x| sum + x, |sum, n| if mean { sum / n } else { sum });
}

// Reductions.
operators! { Composite, HostArgs;
    aclnnReduceSum(a: T, axes: Ints, _keep: bool, _data_type: i32, out: T) {
        let axes = axes.map(|axes| axes.0.clone()).unwrap_or_default();
        Plan::new(out?, [a?], move |out, [a]| reduce(&out, &a, &axes, 0.0, |sum, x| sum + x, |sum, _| sum))
    }
    aclnnMean(a: T, axes: Ints, _keep: bool, _data_type: i32, out: T) {
        let axes = axes.map(|axes| axes.0.clone()).unwrap_or_default();
        Plan::new(out?, [a?], move |out, [a]| reduce(&out, &a, &axes, 0.0, |sum, x| sum + x, |sum, n| sum / n))
    }
    aclnnMax(a: T, out: T) {
        Plan::new(out?, [a?], |out, [a]| reduce(&out, &a, &[], f64::NEG_INFINITY, f64::max, |max, _| max))
    }
    aclnnMin(a: T, out: T) {
        Plan::new(out?, [a?], |out, [a]| reduce(&out, &a, &[], f64::INFINITY, f64::min, |min, _| min))
    }
    aclnnLinalgVectorNorm(a: T, order: S, axes: Ints, _keep: bool, _data_type: i32, out: T) {
        let order = order?.0;
        let axes = axes.map(|axes| axes.0.clone()).unwrap_or_default();
        Plan::new(out?, [a?], move |out, [a]| {
            reduce(&out, &a, &axes, 0.0, |sum, x| sum + x.abs().powf(order), |sum, _| sum.powf(order.recip()));
        })
    }
}

// Matrix products, launched by program and tiling key.
operators! { Composite, Handle;
    aclnnMm(a: T, b: T, out: T, _math: i8) {
        Some(Plan::new(out?, [a?, b?], |out, [a, b]| product(&out, &a, &b, 1.0, None))?.with_workspace())
    }
    aclnnMatmul(a: T, b: T, out: T, _math: i8) {
        Some(Plan::new(out?, [a?, b?], |out, [a, b]| product(&out, &a, &b, 1.0, None))?.with_workspace())
    }
    aclnnBatchMatMul(a: T, b: T, out: T, _math: i8) {
        let plan = Plan::new(out?, [a?, b?], |out, [a, b]| {
            for index in 0..out.dims[0] {
                let parts = (select(&out, 0, index), select(&a, 0, index), select(&b, 0, index));
                if let (Some(out), Some(a), Some(b)) = parts {
                    product(&out, &a, &b, 1.0, None);
                }
            }
        });
        Some(plan?.with_workspace())
    }
    aclnnAddmm(add: T, a: T, b: T, beta: S, alpha: S, out: T, _math: i8) {
        let (beta, alpha) = (beta?.0, alpha?.0);
        let plan = Plan::new(out?, [add?, a?, b?], move |out, [add, a, b]| {
            product(&out, &a, &b, alpha, Some((&add, beta)));
        });
        Some(plan?.with_workspace())
    }
}

// Copies: operators of a library of their own.
operators! { Individual, HostArgs;
    aclnnInplaceCopy(out: T, a: T) { Plan::map(out, [a], |[a]| a) }
    aclnnCast(a: T, _data_type: i32, out: T) { Plan::map(out, [a], |[a]| a) }
    aclnnCat(tensors: Tensors, axis: i64, out: T) {
        let (out, parts) = (out?, tensors?.0.iter().flatten().map(|part| **part).collect::<Vec<_>>());
        let axis = axis.rem_euclid(out.rank.max(1) as i64) as usize;
        Plan::new(out, [], move |out, []| {
            let mut start = 0;
            for part in &parts {
                let length = part.dims[axis];
                if let Some(target) = narrow(&out, axis, start, length) {
                    map(&target, &[*part], |[value]| value);
                }
                start += length;
            }
        })
    }
    aclnnStack(tensors: Tensors, axis: i64, out: T) {
        let (out, parts) = (out?, tensors?.0.iter().flatten().map(|part| **part).collect::<Vec<_>>());
        let axis = axis.rem_euclid(out.rank.max(1) as i64) as usize;
        Plan::new(out, [], move |out, []| {
            for (index, part) in parts.iter().enumerate() {
                if let Some(target) = select(&out, axis, index) {
                    map(&target, &[*part], |[value]| value);
                }
            }
        })
    }
    aclnnEmbedding(table: T, indices: T, out: T) {
        Plan::new(out?, [table?, indices?], |out, [table, indices]| gather(&out, &table, &indices))
    }
}

// Fills, launched through a host stub.
operators! { Individual, Stub;
    aclnnInplaceFillScalar(out: T, value: S) {
        let value = value?.0;
        Plan::new(out?, [], move |out, []| fill(&out, |_| value))
    }
    aclnnInplaceZero(out: T) { Plan::new(out?, [], |out, []| fill(&out, |_| 0.0)) }
    aclnnInplaceOne(out: T) { Plan::new(out?, [], |out, []| fill(&out, |_| 1.0)) }
    aclnnArange(start: S, _end: S, step: S, out: T) {
        let (start, step) = (start?.0, step?.0);
        Plan::new(out?, [], move |out, []| fill(&out, |index| start + index as f64 * step))
    }
    aclnnInplaceUniform(out: T, from: f64, to: f64, seed: i64, offset: i64) {
        Plan::new(out?, [], move |out, []| {
            let mut next = random((seed ^ offset) as u64);
            fill(&out, |_| from + (to - from) * next());
        })
    }
    aclnnInplaceNormal(out: T, mean: f32, deviation: f32, seed: i64, offset: i64) {
        Plan::new(out?, [], move |out, []| {
            let mut next = random((seed ^ offset) as u64);
            // Box-Muller.
            fill(&out, |_| {
                let (radius, angle) = ((-2.0 * (1.0 - next()).ln()).sqrt(), next() * std::f64::consts::TAU);
                f64::from(mean) + f64::from(deviation) * radius * angle.cos()
            });
        })
    }
}
