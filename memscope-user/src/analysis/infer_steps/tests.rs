use std::sync::Arc;

use super::*;
use proptest::prelude::*;

use crate::analysis::Online;
use crate::model::testing::{MAIN, MIB, PID as SCRIPT, Script};
use crate::model::{Alloc, Change, DevicePtr, Free, Pool, StepId};

/// A loop's operators with their true steps: see the head of each file in `tests/fixtures/ops`.
struct Recorded {
    events: Vec<Event>,
    /// Operators before each true step.
    truth: Vec<usize>,
}

const PID: Tgid = Tgid(1);

fn recorded(text: &str) -> Recorded {
    let mut lines = text.lines().filter(|line| !line.starts_with('#'));
    let names: Vec<Name> = lines
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .map(|name| Arc::from(format!("aclnn{name}")))
        .collect();
    let (mut events, mut truth) = (Vec::new(), Vec::new());
    let mut time = 1_000_000;
    events.push(Event { time: Nanos(time), tgid: PID, tid: Tid(1), kind: EventKind::AclInit });
    for line in lines {
        match line.strip_prefix("before ") {
            Some(_) => {}
            None => truth.push(events.len() - 1),
        }
        for word in line.strip_prefix("before ").unwrap_or(line).split_whitespace() {
            let (thread, rest) = word.split_at(1);
            let (op, pause) = rest.split_once(':').unwrap_or((rest, "10"));
            let number = |text: &str| text.parse::<u64>().unwrap_or_else(|e| panic!("{word}: {e}"));
            time += 1000 * number(pause);
            let tid = Tid(u32::from(thread.as_bytes()[0]));
            let kind = EventKind::Op { name: names[number(op) as usize].clone() };
            events.push(Event { time: Nanos(time), tgid: PID, tid, kind });
        }
    }
    Recorded { events, truth }
}

/// Operators before each inferred step, and what is said of the steps.
fn inferred(events: &[Event]) -> (Vec<usize>, Option<Inferred>) {
    let mut inference = StepInference::new(StepRule::default(), StepsFrom::Ops);
    let mut out = Vec::new();
    events.iter().for_each(|event| inference.push(event.clone(), &mut out));
    inference.flush(&mut out);
    let (mut operators, mut steps, mut last) = (0, Vec::new(), None);
    for event in &out {
        match event.kind {
            EventKind::Op { .. } => operators += 1,
            EventKind::StepInferred(inferred) => {
                steps.push(operators);
                last = Some(inferred);
            }
            EventKind::StepsRetracted => steps.clear(),
            _ => {}
        }
    }
    let passed: Vec<&Event> = out
        .iter()
        .filter(|event| !matches!(event.kind, EventKind::StepInferred(_) | EventKind::StepsRetracted))
        .collect();
    assert!(passed.into_iter().eq(events), "all events go on, in order");
    (steps, last)
}

macro_rules! recordings {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_str!(concat!("../../../../tests/fixtures/ops/", $name, ".txt")))),*]
    };
}

const TRAINING: [(&str, &str); 19] = recordings![
    "mlp_sgd",
    "mlp_plain_sgd",
    "mlp_adamw",
    "mlp_adamw_foreach",
    "mlp_npu_fused_adamw",
    "mlp_accumulation",
    "mlp_evaluation",
    "mlp_evaluation_log",
    "mlp_augmentation",
    "mlp_async",
    "mlp_zero_grad_first",
    "mlp_zero_grad_last",
    "cnn_adam_log",
    "transformer_adamw",
    "transformer_evaluation",
    "transformer_amp",
    "gpt_everything",
    "rnn_evaluation",
    "gan",
];

fn recording(name: &str) -> Recorded {
    let (_, text) = TRAINING.iter().find(|(known, _)| *known == name).expect("a recording");
    recorded(text)
}

#[test]
fn training_loops_seen_from_their_start() {
    for (name, text) in TRAINING {
        let Recorded { events, truth } = recorded(text);
        let (steps, told) = inferred(&events);
        let told = told.expect("steps");
        assert_eq!((told.basis, told.periods as usize), (Basis::Optimizer, steps.len() - 1), "{name}");
        let missed = match name {
            // That both optimizers belong to one step is known after two turns, and the first ones are different.
            "gan" => 4,
            // The first step has no gradients to set to zero, and does not begin like the others.
            "mlp_zero_grad_first" => 1,
            _ => 0,
        };
        assert_eq!(steps, truth[missed..], "{name}");
    }
}

#[test]
fn training_loops_joined_at_any_moment() {
    let (mut found, mut there, mut wrong) = (0, 0, 0);
    for (name, text) in TRAINING.into_iter().filter(|(name, _)| *name != "gan") {
        let Recorded { events, truth } = recorded(text);
        let last = truth[truth.len() / 2];
        for skipped in (1..last).step_by(23) {
            let (steps, _) = inferred(&events[1 + skipped..]);
            // The first whole step may be over before it is known that there are steps.
            let whole: Vec<usize> = truth.iter().filter_map(|at| at.checked_sub(skipped)).skip(1).collect();
            let hits = whole.iter().filter(|at| steps.contains(at)).count();
            assert!(hits + 2 >= whole.len(), "{name} without {skipped}: {steps:?} for {whole:?}");
            found += hits;
            there += whole.len();
            wrong += steps.iter().filter(|step| **step >= whole[0] && !whole.contains(step)).count();
        }
    }
    assert!(found * 100 >= there * 98 && wrong * 100 <= there * 2, "{found} of {there}, {wrong} wrong");
}

#[test]
fn on_one_thread_backward_is_known_by_name() {
    for name in ["mlp_adamw", "transformer_adamw", "transformer_amp", "gpt_everything"] {
        let Recorded { mut events, truth } = recording(name);
        events.iter_mut().for_each(|event| event.tid = Tid(1));
        let (steps, told) = inferred(&events);
        assert_eq!(told.map(|told| told.basis), Some(Basis::Optimizer), "{name}");
        assert_eq!(steps, truth, "{name}");
    }
}

#[test]
fn names_of_dumps_do_as_well() {
    let Recorded { mut events, truth } = recording("mlp_sgd");
    for event in &mut events {
        if let EventKind::Op { name } = &mut event.kind {
            let aten = match &**name {
                "aclnnInplaceMuls" => "torch._ops.aten.mul_.Tensor",
                "aclnnInplaceAdd" => "torch._ops.aten.add_.Tensor",
                "aclnnInplaceCopy" => "torch._ops.aten.copy_.default",
                "aclnnMseLossBackward" => "torch._ops.aten.mse_loss_backward.default",
                other => other,
            };
            *name = Arc::from(aten);
        }
    }
    assert_eq!(inferred(&events).0, truth);
}

/// Steps of eight equal passes.
#[test]
fn loops_without_backward_are_known_by_repetition() {
    let Recorded { events, truth } = recorded(recordings!["inference"][0].1);
    let (steps, told) = inferred(&events);
    let told = told.expect("steps");
    assert_eq!(told.basis, Basis::Repetition);
    let hits = truth.iter().filter(|at| steps.contains(at)).count();
    assert!(hits + 1 >= truth.len() && steps.len() <= hits + 3, "{steps:?} for {truth:?}");
    assert!(told.equal * 4 >= told.periods * 3, "{told:?}");
}

/// A loop whose operators have no roles, `unit` over and over, with `pause` microseconds before each.
fn repeated(unit: &str, times: usize, pause: u64) -> Vec<Event> {
    let mut time = 0;
    let mut events = Vec::new();
    for _ in 0..times {
        for (at, name) in unit.split_whitespace().enumerate() {
            time += 1000 * if at == 0 { pause } else { 10 };
            let kind = EventKind::Op { name: Arc::from(name) };
            events.push(Event { time: Nanos(time), tgid: PID, tid: Tid(1), kind });
        }
    }
    events
}

#[test]
fn a_step_of_one_operator_is_a_step() {
    let (steps, told) = inferred(&repeated("GraphReplay", 300, 500));
    assert!(steps.len() > 30 && steps.windows(2).all(|pair| pair[1] == pair[0] + 1), "{steps:?}");
    assert_eq!(told.map(|told| (told.basis, told.equal)), told.map(|told| (Basis::Repetition, told.periods)));
}

/// Seen from its start: `unit` over and over, each operator with its pause in microseconds before it, and a `+` for each
/// block that it allocates, a `-` for each that it frees.
fn started(unit: &str, times: usize) -> Vec<Event> {
    let mut time = 1_000_000;
    let mut events = vec![Event { time: Nanos(time), tgid: PID, tid: Tid(1), kind: EventKind::AclInit }];
    for word in std::iter::repeat_n(unit, times).flat_map(str::split_whitespace) {
        let (name, rest) = word.split_once(':').unwrap_or_else(|| panic!("{word}"));
        let pause: u64 = rest.trim_end_matches(['+', '-']).parse().unwrap_or_else(|e| panic!("{word}: {e}"));
        time += 1000 * pause;
        let (ptr, size) = (DevicePtr(time), 512);
        let block =
            Alloc { pool: Pool::Pta, device: None, ptr, size, totals: None, driver: None, stack: None };
        let free = Free { pool: Pool::Pta, device: None, ptr, size: Some(size), totals: None };
        let kinds = rest.chars().filter_map(|sign| match sign {
            '+' => Some(EventKind::Alloc(block.clone())),
            '-' => Some(EventKind::Free(free.clone())),
            _ => None,
        });
        let operator = EventKind::Op { name: Arc::from(format!("aclnn{name}")) };
        events.extend(std::iter::once(operator).chain(kinds).map(|kind| Event {
            time: Nanos(time),
            tgid: PID,
            tid: Tid(1),
            kind,
        }));
    }
    events
}

#[test]
fn a_short_loop_is_known_when_it_explains_itself() {
    for (loop_, unit, times) in [
        ("waits", "Addmm:5000+ Relu:60+ Softmax:50--", 8),
        ("waits, and does not release what it makes at once", "Addmm:5000++ Relu:60-", 8),
        ("has one operator", "Addmm:100++--", 29),
        ("replays graphs", "GraphReplay:100", 18),
    ] {
        let (steps, told) = inferred(&started(unit, times));
        let told = told.unwrap_or_else(|| panic!("{loop_}: no steps"));
        assert_eq!((told.basis, told.equal), (Basis::Repetition, told.periods), "{loop_}");
        let period = unit.split_whitespace().count();
        let expected: Vec<usize> = (0..times).map(|step| step * period).collect();
        let first = expected.len() - steps.len();
        assert!(steps == expected[first..] && first <= 1, "{loop_}: {steps:?} for {expected:?}");
    }
}

#[test]
fn what_comes_before_any_loop_has_no_steps() {
    for (what, unit, times) in [
        (
            "layers of a forward",
            "LayerNorm:90+ Addmm:30+ Softmax:20+- Addmm:25+ Add:20- Gelu:20+ Add:15--",
            15,
        ),
        ("layers of a forward, for training", "LayerNorm:90+ Addmm:30+ Softmax:20+ Addmm:25+ Gelu:20+", 24),
        ("weights that are filled with numbers", "InplaceUniform:20+ InplaceUniform:20+", 100),
        ("weights from files", "InplaceCopy:9000+- InplaceMuls:60", 100),
        ("weights that are read and built", "Cast:9000+ TransData:60+", 100),
        ("cells of a recurrent network", "Mm:60+ Addmm:60+ Tanh:50--", 60),
        ("parameters of an optimizer", "InplaceMuls:20 InplaceAdd:20 Sqrt:20+ InplaceAdd:20-", 60),
    ] {
        assert_eq!(inferred(&started(unit, times)), (Vec::new(), None), "{what}");
    }
    // The loop that comes then does.
    let mut events = started("InplaceUniform:20+ InplaceUniform:20+", 12);
    let end = events[events.len() - 1].time.0;
    events.extend(
        started("Addmm:5000+ Relu:60+ Softmax:50--", 12)
            .into_iter()
            .skip(1)
            .map(|event| Event { time: Nanos(event.time.0 + end), ..event }),
    );
    let (steps, _) = inferred(&events);
    assert_eq!(steps, (1..12).map(|step| 24 + 3 * step).collect::<Vec<_>>());
}

/// Words of two letters of which no part comes three times in a row (Thue and Morse), or many do, but never for long
/// (Fibonacci).
#[test]
fn words_without_a_period_have_no_steps() {
    let thue_morse: Vec<u32> = (0..6000u32).map(|at| at.count_ones() % 2).collect();
    let (mut last, mut fibonacci) = (vec![1], vec![1, 0]);
    while fibonacci.len() < 6000 {
        let longer = [&fibonacci[..], &last[..]].concat();
        last = std::mem::replace(&mut fibonacci, longer);
    }
    for (what, word) in [("thue_morse", thue_morse), ("fibonacci", fibonacci)] {
        for to in (100..word.len()).step_by(250) {
            let (steps, told) = inferred(&operators(&word[..to], |_| 100));
            assert!(steps.is_empty(), "{what} until {to}: {told:?} {steps:?}");
        }
    }
}

fn operators(letters: &[u32], pause: impl Fn(usize) -> u64) -> Vec<Event> {
    let mut time = 1_000_000;
    let of = |(at, letter): (usize, &u32)| {
        time += 1000 * pause(at);
        let kind = EventKind::Op { name: Arc::from(format!("operator{letter}")) };
        Event { time: Nanos(time), tgid: PID, tid: Tid(1), kind }
    };
    letters.iter().enumerate().map(of).collect()
}

#[test]
fn optimizers_that_no_longer_take_turns_are_steps_of_their_own() {
    let of = |parameters: usize| {
        let update = "aclnnInplaceMuls aclnnInplaceAddcdiv ".repeat(parameters);
        format!("aclnnMm aclnnMmBackward {update}")
    };
    let both = repeated(&format!("{} {}", of(2), of(3)), 10, 100);
    let (steps, _) = inferred(&both);
    assert_eq!(steps.windows(2).map(|pair| pair[1] - pair[0]).max(), Some(14));
    let one = repeated(&of(2), 20, 100).into_iter().map(|mut event| {
        event.time.0 += 1_000_000_000;
        event
    });
    let all: Vec<Event> = both.into_iter().chain(one).collect();
    let (steps, _) = inferred(&all);
    assert_eq!(steps.windows(2).map(|pair| pair[1] - pair[0]).next_back(), Some(6), "{steps:?}");
}

#[test]
fn an_evaluation_of_any_length_belongs_to_the_step_before() {
    let Recorded { events, truth } = recording("mlp_sgd");
    let at = truth[8] + 1;
    let mut long = events[..at].to_vec();
    // As the forward, without its loss.
    let pass = &events[truth[7] + 1..][..3];
    for time in 0..30_000u64 {
        long.extend(pass.iter().enumerate().map(|(index, event)| {
            let time = Nanos(events[at - 1].time.0 + (3 * time + index as u64) * 1000);
            Event { time, ..event.clone() }
        }));
    }
    let added = long.len() - at;
    let later = |event: &Event| Event { time: Nanos(event.time.0 + 1_000_000_000), ..event.clone() };
    long.extend(events[at..].iter().map(later));
    let expected: Vec<usize> =
        truth.iter().map(|at| if *at >= truth[8] { at + added } else { *at }).collect();
    assert_eq!(inferred(&long).0, expected);
}

/// Three kinds of blocks: input, leaked after the optimizer, gone within the step.
fn training_script(steps: u64) -> Script {
    let mut script = Script::new();
    script.push(MAIN, EventKind::AclInit);
    let mut live = Vec::new();
    for step in 0..steps {
        script.events.iter_mut().for_each(|event| event.time.0 -= 100_000_000u64.min(event.time.0));
        script.alloc(0x1000_0000 + step * 0x1000, 2048);
        if let Some(old) = live.pop() {
            script.free(old);
        }
        live.push(0x1000_0000 + step * 0x1000);
        for name in ["aclnnMm", "aclnnRelu", "aclnnMmBackward", "aclnnInplaceLerps", "aclnnInplaceAddcdiv"] {
            script.alloc(0x5000, 512).op(name).free(0x5000);
        }
        script.alloc(0x9000_0000 + step * MIB, MIB);
    }
    script
}

fn fed(script: &Script, from: StepsFrom) -> (Online, Vec<Change>) {
    let rule = StepRule::default();
    let mut online = Online::new(rule.clone(), true).with_steps_from(&rule, from);
    let mut changes = Vec::new();
    for event in &script.events {
        online.feed(event.clone(), |_, change, _| changes.push(change.clone()));
    }
    online.finish(|_, change, _| changes.push(change.clone()));
    (online, changes)
}

#[test]
fn blocks_get_their_steps_and_leaks_are_found() {
    let (online, _) = fed(&training_script(10), StepsFrom::MarksOrOps);
    let process = &online.ledger.processes()[0];
    assert_eq!(process.steps().list().len(), 10);
    assert_eq!(
        process.steps().inferred().map(|told| (told.basis, told.periods)),
        Some((Basis::Optimizer, 9))
    );
    let leaks = online.leaks.as_ref().map(|leaks| leaks.verdicts(0, process)).unwrap_or_default().leaks;
    let found: Vec<(u32, u64)> = leaks.iter().map(|(block, _)| (block.step.0, block.size)).collect();
    // What comes between the optimizer and the next operator: all pauses are the same, and the first one counts.
    let expected: Vec<(u32, u64)> = (2..10).map(|step| (step, MIB)).collect();
    assert_eq!(found[found.len() - 7..], expected[..7], "{found:?}");
}

#[test]
fn marks_take_over_and_what_was_inferred_is_taken_back() {
    let mut script = training_script(6);
    script.step(|s| {
        s.op("aclnnMm").alloc(0x77, MIB);
    });
    let (online, changes) = fed(&script, StepsFrom::MarksOrOps);
    let process = &online.ledger.processes()[0];
    assert_eq!((process.steps().list().len(), process.steps().inferred()), (1, None));
    assert_eq!(changes.iter().filter(|change| **change == Change::StepsRetracted).count(), 1);
    let steps: Vec<(u64, u32)> = process.blocks().map(|block| (block.ptr.0, block.step.0)).collect();
    assert!(steps.iter().all(|(ptr, step)| *step == u32::from(*ptr == 0x77)), "{steps:?}");

    let (online, _) = fed(&script, StepsFrom::Ops);
    let steps = online.ledger.processes()[0].steps();
    assert!(steps.inferred().is_some() && steps.list().len() >= 6, "marks count for nothing");
    for from in [StepsFrom::Marks, StepsFrom::None] {
        let (online, changes) = fed(&script, from);
        let steps = online.ledger.processes()[0].steps();
        assert_eq!(steps.current(), StepId(u32::from(from == StepsFrom::Marks)));
        assert_eq!(changes.len(), script.events.len());
    }
}

#[test]
fn a_step_begins_in_the_usually_longest_pause_between_its_operators() {
    let mut events: Vec<Event> = Vec::new();
    let mut script = training_script(8);
    let mut time = 0;
    for (index, mut event) in script.events.drain(..).enumerate() {
        // The pause is before the input is allocated, which is after the leak.
        let pause = matches!(&event.kind, EventKind::Alloc(alloc) if alloc.size == 2048) && index > 1;
        // But for one time, when the program is interrupted before.
        let interrupted = matches!(&event.kind, EventKind::Alloc(alloc) if alloc.size == MIB) && index > 70;
        time += match (pause, interrupted) {
            (true, _) => 300_000,
            (_, true) => 700_000 * u64::from(index < 100),
            _ => 10_000,
        };
        // And what is built once, after a longer interruption.
        if let EventKind::Alloc(alloc) = &mut event.kind
            && alloc.ptr.0 == 0x9000_0000 + 4 * MIB
        {
            alloc.size = 8 * MIB;
            time += 50_000_000;
        }
        events.push(Event { time: Nanos(time), ..event });
    }
    let mut inference = StepInference::new(StepRule::default(), StepsFrom::Ops);
    let mut out = Vec::new();
    events.into_iter().for_each(|event| inference.push(event, &mut out));
    inference.flush(&mut out);
    let after: Vec<&EventKind> = out
        .windows(2)
        .filter(|pair| matches!(pair[0].kind, EventKind::StepInferred(_)))
        .map(|pair| &pair[1].kind)
        .collect();
    assert_eq!(after.len(), 8);
    for kind in &after[1..] {
        assert!(matches!(kind, EventKind::Alloc(alloc) if alloc.size == 2048), "{kind:?}");
    }
}

#[test]
fn nothing_is_held_for_long() {
    let Recorded { events, truth } = recording("mlp_sgd");
    let mut inference = StepInference::new(StepRule::default(), StepsFrom::Ops);
    let mut out = Vec::new();
    // Half an optimizer has been.
    let at = truth[5] - 3;
    events[..at].iter().for_each(|event| inference.push(event.clone(), &mut out));
    let held = at - out.iter().filter(|event| !matches!(event.kind, EventKind::StepInferred(_))).count();
    assert!(held > 3, "{held}");
    inference.release(Nanos(events[at - 2].time.0), &mut out);
    let still = at - out.iter().filter(|event| !matches!(event.kind, EventKind::StepInferred(_))).count();
    assert_eq!(still, 2);
    events[at..].iter().for_each(|event| inference.push(event.clone(), &mut out));
    inference.flush(&mut out);
    let steps = out.iter().filter(|event| matches!(event.kind, EventKind::StepInferred(_))).count();
    assert_eq!(steps, truth.len());
}

#[test]
fn a_process_that_ends_or_is_replaced_leaves_nothing_behind() {
    for end in [EventKind::Exit, EventKind::Exec] {
        let mut script = training_script(4);
        script.push(MAIN, end.clone()).op("aclnnMm").alloc(0x99, 5);
        let (online, _) = fed(&script, StepsFrom::MarksOrOps);
        let processes = online.ledger.processes();
        let steps: Vec<usize> = processes.iter().map(|process| process.steps().list().len()).collect();
        assert_eq!(steps, [4, 0], "{end:?}");
        assert_eq!(processes[1].tgid, SCRIPT);
    }
}

fn any_event() -> impl Strategy<Value = (u64, u32, EventKind)> {
    let names = [
        "aclnnMm",
        "aclnnRelu",
        "aclnnMmBackward",
        "aclnnInplaceAdd",
        "aclnnInplaceAddcdiv",
        "aclnnInplaceZero",
        "aclnnForeachAddScalar",
    ];
    let kind = prop_oneof![
        12 => prop::sample::select(names.to_vec()).prop_map(|name| EventKind::Op { name: Arc::from(name) }),
        4 => Just(EventKind::RangeEnd { range: None }),
        1 => Just(EventKind::AclInit),
        1 => prop::sample::select(vec![EventKind::Exec, EventKind::Exit]),
        1 => Just(EventKind::Mark { text: Arc::from("x"), domain: None }),
    ];
    (0..100_000u64, 1..4u32, kind)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, max_shrink_iters: 0, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn operators_at_random_have_no_steps(
        (letters, pauses) in (2..9u32, 1..3000usize).prop_flat_map(|(names, count)| (
            prop::collection::vec(0..names, count),
            prop::collection::vec(10..1000u64, count),
        )),
    ) {
        let (steps, told) = inferred(&operators(&letters, |at| pauses[at]));
        prop_assert!(steps.is_empty(), "{:?}: {} {:?}", told, letters.len(), &letters[..20.min(letters.len())]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn events_go_on_in_order_whatever_they_are(
        stream in prop::collection::vec(any_event(), 0..400),
        repeat in 1..5usize,
    ) {
        let mut time = 0;
        let mut events = Vec::new();
        for (pause, tid, kind) in std::iter::repeat_n(&stream, repeat).flatten() {
            time += pause;
            events.push(Event { time: Nanos(time), tgid: PID, tid: Tid(*tid), kind: kind.clone() });
        }
        // Checks that they do.
        let _ = inferred(&events);
        let rule = StepRule::default();
        let mut online = Online::new(rule.clone(), true).with_steps_from(&rule, StepsFrom::Ops);
        for event in events {
            online.feed(event, |_, _, _| {});
        }
        online.finish(|_, _, _| {});
        for process in online.ledger.processes() {
            let steps = process.steps().list();
            prop_assert!(steps.windows(2).all(|pair| pair[0].begin <= pair[1].begin));
            if let Some(told) = process.steps().inferred() {
                prop_assert_eq!(told.periods as usize, steps.len() - 1);
                prop_assert!(told.equal <= told.periods);
            }
        }
    }
}
