use super::*;
use crate::analysis::Online;
use crate::model::testing::{MAIN, MIB, Script};
use crate::model::{Access, AccessKind, StepRule, Tid, Whose};

const AUTOGRAD: Tid = Tid(101);

fn fed(script: &Script) -> Online {
    let mut online = Online::new(StepRule::default(), false).with_decompose();
    for event in &script.events {
        online.apply(event);
    }
    online
}

fn op(script: &mut Script, tid: Tid, name: &str, used: &[(u64, AccessKind)]) {
    script.push(tid, EventKind::Op { name: name.into() });
    for (ptr, kind) in used {
        let op = Some(name.into());
        let access = Access { pool: None, ptr: DevicePtr(*ptr), size: 4, kind: *kind, op };
        script.push(tid, EventKind::Access(access));
    }
}

const WEIGHT: u64 = 0x10_0000;
const STATE: u64 = 0x20_0000;
const GRADIENT: u64 = 0x30_0000;
const OUTPUT: u64 = 0x40_0000;

/// A step of SGD with momentum on one weight.
fn step(script: &mut Script, first: bool) {
    use AccessKind::{Read, Write};
    let range = script.range(MAIN, "step start");
    let forward = script.range(MAIN, "forward");
    script.alloc(OUTPUT, 8 * MIB);
    op(script, MAIN, "aclnnMm", &[(0x1, Read), (WEIGHT + 64, Read), (OUTPUT, Write)]);
    script.range_end(MAIN, forward);
    let backward = script.range(MAIN, "backward");
    script.push(
        AUTOGRAD,
        EventKind::Alloc(crate::model::Alloc {
            pool: Pool::Pta,
            device: Some(DeviceId(0)),
            ptr: DevicePtr(GRADIENT),
            size: MIB,
            totals: None,
            driver: None,
            stack: None,
        }),
    );
    op(script, AUTOGRAD, "aclnnThresholdBackward", &[(OUTPUT, Read), (GRADIENT, Write)]);
    script.free(OUTPUT);
    script.range_end(MAIN, backward);
    if first {
        script.alloc(STATE, MIB);
        op(script, MAIN, "aclnnInplaceCopy", &[(STATE, Write), (GRADIENT, Read)]);
    } else {
        op(script, MAIN, "aclnnInplaceMuls", &[(STATE, Write)]);
        op(script, MAIN, "aclnnInplaceAdd", &[(STATE, Write), (GRADIENT, Read)]);
    }
    op(script, MAIN, "aclnnInplaceAdd", &[(WEIGHT, Write), (STATE, Read)]);
    script.range_end(MAIN, range);
}

#[test]
fn what_a_block_is_for_shows_in_the_phases_that_use_it() {
    let mut script = Script::new();
    script.alloc(WEIGHT, MIB);
    step(&mut script, true);
    script.free(GRADIENT);
    step(&mut script, false);
    let online = fed(&script);
    let decompose = online.decompose.as_ref().unwrap_or_else(|| panic!("asked for"));
    let [device] = &decompose.of(0, &online.ledger)[..] else { panic!("one device") };
    let classes: Vec<_> = device
        .classes
        .iter()
        .map(|of| (of.class.name(), of.share.live_bytes / MIB, of.share.peak_bytes / MIB, of.inferred))
        .collect();
    assert_eq!(
        classes,
        [
            ("weight", 1, 1, true),
            ("gradient", 1, 1, true),
            ("optimizer_state", 1, 1, true),
            ("activation", 0, 8, true)
        ]
    );
    assert_eq!((device.live_bytes, device.peak_bytes), (3 * MIB, 11 * MIB), "the peak is in the second step");

    // The step itself is no label, and the backward pass has that of the thread that waits for it.
    let labels: Vec<_> = device
        .labels
        .iter()
        .map(|of| (of.name.as_deref(), of.share.live_bytes / MIB, of.share.peak_bytes / MIB))
        .collect();
    assert_eq!(labels, [(Some("forward"), 0, 8), (None, 2, 2), (Some("backward"), 1, 1)]);
    let sums = [
        device.operators.iter().map(|of| of.share.peak_bytes).sum::<u64>(),
        device.labels.iter().map(|of| of.share.peak_bytes).sum(),
        device.classes.iter().map(|of| of.share.peak_bytes).sum(),
    ];
    assert_eq!(sums, [11 * MIB; 3]);
}

/// Of live blocks, by address.
fn classes(script: &Script) -> Vec<(u64, Class)> {
    let online = fed(script);
    let decompose = online.decompose.as_ref().unwrap_or_else(|| panic!("asked for"));
    let devices = decompose.of(0, &online.ledger);
    let mut of: Vec<_> = devices[0].blocks.iter().map(|block| (block.ptr.0, block.class)).collect();
    of.sort_unstable_by_key(|(ptr, _)| *ptr);
    of
}

#[test]
fn a_copy_that_is_kept_is_no_state_of_the_optimizer() {
    use AccessKind::{Read, Write};
    const BEST: u64 = 0x50_0000;
    const DISTANCE: u64 = 0x60_0000;
    let mut script = Script::new();
    script.alloc(WEIGHT, MIB);
    step(&mut script, true);
    script.free(GRADIENT);
    let of_first_step = [(WEIGHT, Class::Weight), (STATE, Class::OptimizerState)];
    assert_eq!(classes(&script), of_first_step, "the first momentum is a copy of the gradient");
    let range = script.range(MAIN, "step start");
    op(&mut script, MAIN, "aclnnMm", &[(WEIGHT, Read)]);
    op(&mut script, AUTOGRAD, "aclnnMmBackward", &[(WEIGHT, Read)]);
    op(&mut script, MAIN, "aclnnInplaceMuls", &[(STATE, Write)]);
    op(&mut script, MAIN, "aclnnInplaceAdd", &[(WEIGHT, Write), (STATE, Read)]);
    script.alloc(BEST, MIB).alloc(DISTANCE, MIB);
    op(&mut script, MAIN, "aclnnInplaceCopy", &[(BEST, Write), (WEIGHT, Read)]);
    op(&mut script, MAIN, "aclnnSub", &[(WEIGHT, Read), (BEST, Read), (DISTANCE, Write)]);
    script.free(DISTANCE);
    op(&mut script, MAIN, "aclnnInplaceCopy", &[(WEIGHT, Write), (BEST, Read)]);
    script.range_end(MAIN, range);
    assert_eq!(
        classes(&script),
        [of_first_step[0], of_first_step[1], (BEST, Class::Activation)],
        "copied and compared, but no update is made with it"
    );
}

/// Allocates on the thread of the backward pass, which has no call of its own.
fn alloc_backward(script: &mut Script, ptr: u64) {
    script.alloc_at(Some(7), Whose::Via, ptr, MIB);
    if let Some(event) = script.events.last_mut() {
        event.tid = AUTOGRAD;
    }
}

/// Of two layers that are nothing but matrices: no operator of the backward pass has a name that says so.
fn linear_step(script: &mut Script, after_backward: impl FnOnce(&mut Script)) {
    use AccessKind::{Read, Write};
    let range = script.range(MAIN, "step start");
    script.alloc(OUTPUT, 8 * MIB);
    op(script, MAIN, "aclnnMm", &[(WEIGHT, Read), (OUTPUT, Write)]);
    alloc_backward(script, GRADIENT);
    op(script, AUTOGRAD, "aclnnMm", &[(OUTPUT, Read), (GRADIENT, Write)]);
    script.free(OUTPUT);
    after_backward(script);
    op(script, MAIN, "aclnnInplaceMuls", &[(STATE, Write)]);
    op(script, MAIN, "aclnnInplaceLerps", &[(STATE, Write), (GRADIENT, Read)]);
    op(script, MAIN, "aclnnInplaceAddcdiv", &[(WEIGHT, Write), (STATE, Read)]);
    script.range_end(MAIN, range);
}

const TRAINED: [(u64, Class); 3] =
    [(WEIGHT, Class::Weight), (STATE, Class::OptimizerState), (GRADIENT, Class::Gradient)];

#[test]
fn a_backward_pass_is_known_by_its_thread() {
    let mut script = Script::new();
    script.alloc(WEIGHT, MIB).alloc(STATE, MIB);
    linear_step(&mut script, |_| {});
    assert_eq!(classes(&script), TRAINED);
}

#[test]
fn gradients_that_are_clipped_are_gradients() {
    use AccessKind::{Read, Unknown, Write};
    const NORM: u64 = 0x50_0000;
    let clip = |script: &mut Script| {
        script.alloc(NORM, 512);
        op(script, MAIN, "aclnnForeachNorm", &[(GRADIENT, Unknown), (NORM, Unknown)]);
        op(script, MAIN, "aclnnStack", &[(NORM, Read)]);
        op(script, MAIN, "aclnnAdds", &[(NORM, Read)]);
        op(script, MAIN, "aclnnClamp", &[(NORM, Read)]);
        op(script, MAIN, "aclnnInplaceMul", &[(GRADIENT, Write), (NORM, Read)]);
        script.free(NORM);
    };
    let norms = |script: &mut Script| {
        script.alloc(NORM, 512);
        op(script, MAIN, "aclnnLinalgVectorNorm", &[(GRADIENT, Read), (NORM, Write)]);
        script.free(NORM);
    };
    let mut script = Script::new();
    script.alloc(WEIGHT, MIB).alloc(STATE, MIB);
    linear_step(&mut script, clip);
    assert_eq!(classes(&script), TRAINED);
    script.free(GRADIENT);
    linear_step(&mut script, norms);
    assert_eq!(classes(&script), TRAINED);
}

/// Without marks, a forward pass begins as what comes before an optimizer does.
#[test]
fn what_comes_after_a_backward_pass_is_told_by_what_follows() {
    use AccessKind::{Read, Write};
    const KEPT: u64 = 0x50_0000;
    let mut script = Script::new();
    script.alloc(WEIGHT, MIB).alloc(STATE, MIB);
    linear_step(&mut script, |script| {
        // Another forward pass, for gradients that add up.
        script.alloc(KEPT, MIB).alloc(OUTPUT, MIB);
        op(script, MAIN, "aclnnMm", &[(WEIGHT, Read), (OUTPUT, Write)]);
        op(script, MAIN, "aclnnInplaceAdd", &[(OUTPUT, Write), (KEPT, Read)]);
        op(script, AUTOGRAD, "aclnnMm", &[(OUTPUT, Read), (KEPT, Read), (GRADIENT, Write)]);
    });
    let (with, activations) = classes(&script).into_iter().partition::<Vec<_>, _>(|(ptr, _)| *ptr < OUTPUT);
    assert_eq!(with, TRAINED);
    assert_eq!(activations, [(OUTPUT, Class::Activation), (KEPT, Class::Activation)]);
}

#[test]
fn an_average_of_weights_is_no_state_of_the_optimizer() {
    use AccessKind::{Read, Write};
    const AVERAGE: u64 = 0x50_0000;
    let mut script = Script::new();
    script.alloc(WEIGHT, MIB).alloc(STATE, MIB).alloc(AVERAGE, MIB);
    for step in 0..2 {
        if step > 0 {
            script.free(GRADIENT);
        }
        linear_step(&mut script, |_| {});
        op(&mut script, MAIN, "aclnnInplaceMuls", &[(AVERAGE, Write)]);
        op(&mut script, MAIN, "aclnnInplaceAdd", &[(AVERAGE, Write), (WEIGHT, Read)]);
    }
    assert_eq!(classes(&script), [&TRAINED[..], &[(AVERAGE, Class::Activation)]].concat());
}

#[test]
fn a_process_that_ends_is_decomposed_as_it_was() {
    let mut script = Script::new();
    script.alloc(WEIGHT, MIB);
    step(&mut script, true);
    let before = fed(&script);
    script.push(MAIN, EventKind::Exit);
    let after = fed(&script);
    let of = |online: &Online| online.decompose.as_ref().map(|decompose| decompose.of(0, &online.ledger));
    assert_eq!(of(&after), of(&before));
    assert_eq!(of(&after).map(|devices| devices[0].live_bytes), Some(3 * MIB));
}
