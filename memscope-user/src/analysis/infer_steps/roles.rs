//! What an operator's name says of the part it plays in training.
//!
//! Names come as `aclnnInplaceAddcdiv` (from outside), `aten.addcdiv_.default` (dumps of msMemScope) or `ApplyAdamW`
//! (graph engines).

/// Updates of one tensor in place, by which optimizers are written out. Last letters: scalar operands.
const ARITHMETIC: [&str; 14] = [
    "add", "adds", "addv3", "sub", "subs", "mul", "muls", "div", "divs", "addcmul", "addcdiv", "lerp",
    "lerps", "axpy",
];

/// What else comes between them, for one tensor at a time.
const ELEMENTWISE: [&str; 12] = [
    "sqrt",
    "rsqrt",
    "pow",
    "powtensorscalar",
    "sign",
    "neg",
    "reciprocal",
    "maximum",
    "copy",
    "zero",
    "square",
    "abs",
];

/// Parts of names of whole optimizers.
const OPTIMIZERS: [&str; 10] = [
    "adam",
    "momentum",
    "adagrad",
    "adadelta",
    "rmsprop",
    "ftrl",
    "applylamb",
    "sgd",
    "gradientdescent",
    "lion_",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::analysis) struct Roles {
    /// Computes gradients.
    pub backward: bool,
    /// Nothing but optimizers has it.
    pub update: bool,
    /// Changes a tensor by arithmetic.
    pub changes: bool,
    /// Sets a tensor to zero, as before gradients are added up in it.
    pub zeroes: bool,
    pub in_place: bool,
    /// Works on one tensor, or on pairs of elements.
    pub elementwise: bool,
    /// Gives a tensor other contents, whatever they were.
    pub fills: bool,
}

impl Roles {
    pub fn of(name: &str) -> Self {
        let (stem, in_place) = stem(name);
        let whole_optimizer = OPTIMIZERS.iter().any(|part| stem.contains(part));
        let foreach = stem.strip_prefix("foreach").map(|rest| rest.trim_start_matches('_'));
        let zeroes = (in_place && stem == "zero") || foreach.is_some_and(|rest| rest.starts_with("zero"));
        let arithmetic = ARITHMETIC.contains(&stem.as_str());
        let fine = ["addcmul", "addcdiv", "lerp"].iter().any(|part| stem.starts_with(part));
        Roles {
            backward: !whole_optimizer
                && ["backward", "backprop", "grad"].iter().any(|part| stem.contains(part))
                && !stem.contains("clip"),
            update: !zeroes && (whole_optimizer || foreach.is_some() || (in_place && fine)),
            changes: in_place && arithmetic,
            zeroes,
            in_place,
            fills: matches!(stem.as_str(), "copy" | "zero"),
            elementwise: arithmetic || ELEMENTWISE.contains(&stem.as_str()),
        }
    }
}

/// The operator's own name in small letters, and whether it works in place.
fn stem(name: &str) -> (String, bool) {
    let lower = name.to_ascii_lowercase();
    let bare = lower.strip_prefix("torch._ops.").unwrap_or(&lower);
    if let Some(call) = bare.strip_prefix("aclnn") {
        return match call.strip_prefix("inplace") {
            Some(call) => (call.to_owned(), true),
            None => (call.to_owned(), false),
        };
    }
    // Namespace, operator, overload.
    let mut parts = bare.split('.');
    let operator = match (parts.next(), parts.next()) {
        (_, Some(operator)) => operator,
        (Some(operator), None) => operator,
        (None, None) => "",
    };
    let in_place = operator.ends_with('_') && !operator.ends_with("__");
    (operator.trim_matches('_').to_owned(), in_place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forward_has_no_role() {
        for name in [
            "aclnnAddmm",
            "aclnnApplyRotaryPosEmb",
            "aclnnInplaceCopy",
            "aclnnInplaceAddmm",
            "aclnnInplaceFillScalar",
            "aclnnMul",
            "aclnnRmsNorm",
            "aten.mm.default",
            "aten.addcmul.default",
            "FlashAttentionScore",
            "",
            ".",
            "aclnn",
        ] {
            let Roles { backward, update, changes, zeroes, .. } = Roles::of(name);
            assert_eq!((backward, update, changes, zeroes), (false, false, false, false), "{name}");
        }
    }

    #[test]
    fn backward_says_so() {
        for name in [
            "aclnnThresholdBackward",
            "aclnnConv2DBackpropFilter",
            "aclnnFlashAttentionScoreGrad",
            "torch._ops.aten.native_layer_norm_backward.default",
            "LayerNormGrad",
        ] {
            assert!(Roles::of(name).backward, "{name}");
        }
        for name in ["ApplyAdagrad", "ApplyGradientDescent", "clip_grad_norm"] {
            assert!(!Roles::of(name).backward, "{name}");
        }
    }

    #[test]
    fn optimizers_are_known() {
        for name in [
            "aclnnInplaceAddcdiv",
            "aclnnInplaceLerps",
            "aclnnForeachAddcdivScalarListInplace",
            "aclnnApplyAdamWV2",
            "ApplyMomentum",
            "aten._foreach_mul_.Scalar",
            "aten.addcmul_.default",
            "aten._fused_adamw_.default",
        ] {
            assert!(Roles::of(name).update, "{name}");
        }
        assert!(!Roles::of("aclnnForeachZeroInplace").update && Roles::of("aclnnForeachZeroInplace").zeroes);
        assert!(Roles::of("aclnnInplaceZero").zeroes && Roles::of("aten.zero_.default").zeroes);
        for name in ["aclnnInplaceAdd", "aclnnInplaceMuls", "aten.add_.Tensor", "aten.mul_.Scalar"] {
            let roles = Roles::of(name);
            assert!(roles.changes && roles.in_place && roles.elementwise && !roles.update, "{name}");
        }
        assert!(Roles::of("aclnnSqrt").elementwise && !Roles::of("aclnnSqrt").in_place);
    }
}
