use super::leaks::{GROUPS_SHOWN, step_list};
use super::memory::{HOLDERS_SHOWN, free_space, reserve};
use super::*;
use crate::analysis::Online;
use crate::analysis::inefficient::{Config, Rules};
use crate::analysis::reserve::Point;
use crate::model::testing::{MAIN, MIB, Script, leak6};
use crate::model::{Alloc, DevicePtr, Event, EventKind, FreeSpace, Module, StepRule, StepsFrom, Whose};
use crate::model::{Pool, StepId, StepSet};
use crate::report::document::{Dump, Events, FreeFacts, ReserveFacts, Site, Trace};

fn document(events: &[Event], trace: Trace) -> Document {
    let mut online = Online::new(StepRule::default(), true);
    for event in events {
        online.apply(event);
    }
    online.finish(|_, _, _| {});
    Document::new(trace, &online)
}

fn rendered(events: &[Event]) -> String {
    let received = Events { received: events.len() as u64, lost: 0 };
    render(&document(events, Trace { events: received, ..Trace::default() }), View::default())
}

/// Line by line, so that a difference shows where it is.
fn assert_text(text: &str, expected: &[&str]) {
    let lines: Vec<&str> = text.lines().collect();
    for (at, (line, expected)) in lines.iter().zip(expected).enumerate() {
        assert_eq!(line, expected, "line {at} of\n{text}");
    }
    assert_eq!(lines.len(), expected.len(), "{text}");
}

fn site(name: &str, attached: bool, reason: Option<&str>) -> Site {
    Site {
        site: name.to_owned(),
        file: attached.then(|| "/usr/lib/libascend_hal.so".to_owned()),
        build_id: None,
        offset: attached.then_some(64),
        attached,
        hits: 0,
        lost: 0,
        reason: reason.map(str::to_owned),
    }
}

/// What is leaked on a line is one leak, whatever the sizes; a backward pass is named by the line that called it.
#[test]
fn leaks_are_named_by_their_lines() {
    let mut script = Script::new();
    script.op("aclnnAdd").step(|_| {});
    for step in 2..=5u64 {
        script.step(|s| {
            s.alloc_at(Some(12), Whose::Own, 0x1000 * step, 4 * MIB);
            s.alloc_at(Some(12), Whose::Own, 0x800 + 0x1000 * step, MIB);
            s.alloc_at(Some(30), Whose::Via, 0x10_0000 * step, MIB);
        });
    }
    let document = document(&script.events, Trace::default());
    let text = render(&document, View::default());
    assert_eq!(
        text.lines().skip(1).take(6).collect::<Vec<_>>(),
        [
            "LEAK device 0 PTA: +5.00 MiB/step at project/train.py:12 in main",
            "     15.0 MiB in 6 blocks of up to 4.00 MiB, steps 2-4, around aclnnAdd, thread 100, first at 0x2000",
            "     called by project/train.py:99 in <module>",
            "LEAK device 0 PTA: +1.00 MiB/step via project/train.py:30 in main",
            "     3.00 MiB in 3 blocks of 1.00 MiB, steps 2-4, around aclnnAdd, thread 100, first at 0x200000",
            "     called by project/train.py:99 in <module>",
        ]
    );
    assert!(!text.contains("module.py"), "{text}");

    let text = render(&document, View { all_frames: true, ..View::default() });
    let own = text.lines().skip_while(|line| !line.contains("train.py:12")).skip(3);
    let own: Vec<&str> = own.take(3).collect();
    assert_eq!(
        own,
        [
            "    /usr/lib/python3/dist-packages/torch/nn/modules/module.py:7 in Module.forward",
            "    /home/me/project/train.py:12 in main",
            "    /home/me/project/train.py:99 in <module>",
        ]
    );
    assert!(text.contains("    via main: /home/me/project/train.py:30 in main\n"), "{text}");

    let json = serde_json::to_value(&document).expect("a document");
    let leak = &json["devices"][0]["leaks"][0];
    assert_eq!(leak["python"][1]["file"], "/home/me/project/train.py");
    assert_eq!(leak["python"][1]["line"], 12);
    assert_eq!(leak["via"], serde_json::json!([]));
    assert_eq!(json["devices"][0]["leaks"][2]["via"][1]["line"], 30);
}

/// One helper allocates for all: who called it tells them apart.
#[test]
fn callers_of_a_line_are_told_apart() {
    let mut script = Script::new();
    script.step(|_| {});
    for step in 2..=6u64 {
        script.step(|s| {
            s.alloc_by(&[5, 10, 99], 0x1000 * step, MIB);
            if step % 2 == 0 {
                s.alloc_by(&[5, 12, 99], 0x100_0000 * step, 3 * MIB);
            }
        });
    }
    let document = document(&script.events, Trace::default());
    let after_leak = |all_frames| {
        let text = render(&document, View { all_frames, ..View::default() });
        text.lines().skip(3).take(8).map(str::to_owned).collect::<Vec<_>>()
    };
    let callers = after_leak(false);
    assert_eq!(callers[0], "     6.00 MiB in 2 blocks by project/train.py:12 in main");
    assert_eq!(callers[1], "     4.00 MiB in 4 blocks by project/train.py:10 in main");
    assert!(callers[2].starts_with("Not judged"), "{callers:?}");
    let frames = after_leak(true);
    assert_eq!(frames[3], "    /home/me/project/train.py:12 in main", "{frames:?}");
    assert_eq!(frames[5], "     4.00 MiB in 4 blocks by project/train.py:10 in main", "{frames:?}");
}

#[test]
fn a_device_on_which_nothing_happened_is_told_from_a_trace_without_memory() {
    let mut document = document(&leak6(), Trace::default());
    document.select(&[99]);
    let text = render(&document, View::default());
    assert!(
        text.contains("Note: nothing happened on device 99 (--device); there was memory on device 0"),
        "{text}"
    );
    assert!(document.devices.is_empty());
    assert!(
        text.starts_with("Leaks not judged: there was no memory on the selected devices (--device).\n"),
        "{text}"
    );
    assert!(text.ends_with("Next: trace a device that is used: --device npu:0\n"), "{text}");
}

/// Leaks in steps 5, 15, 25, ... 85.
fn every_tenth() -> Script {
    let mut script = Script::new();
    for step in 1..=95u64 {
        script.step(|s| {
            if step % 10 == 5 {
                s.alloc_at(Some(43), Whose::Own, 0x1000 * step, 64 << 10);
            }
            // Held for three steps.
            s.alloc_at(Some(50), Whose::Own, 0x100_0000 + 0x1000 * step, 64 << 10);
            if step > 3 {
                s.free(0x100_0000 + 0x1000 * (step - 3));
            }
        });
    }
    script
}

fn showing(events: &[Event], steps: StepSet) -> Document {
    let mut online = Online::new(StepRule::default(), true).showing_steps(steps);
    for event in events {
        online.apply(event);
    }
    online.finish(|_, _, _| {});
    Document::new(Trace::default(), &online)
}

/// What is selected is judged by all steps, and nothing is said of the others.
#[test]
fn selected_steps_are_told_of_alone_and_judged_by_all() {
    let events = every_tenth().events;
    let document = showing(&events, StepSet::of([5..=5, 15..=15]));
    let text = render(&document, View::default());
    let lines: Vec<&str> = text.lines().take(6).collect();
    assert_eq!(
        lines,
        [
            "1 leak: 128 KiB in 2 blocks",
            "Selected steps (--steps): 5, 15. Leaked, late and not judged blocks are those allocated in them, as judged by all steps; all else is of the whole trace.",
            "LEAK device 0 PTA: +64.0 KiB/step at project/train.py:43 in main",
            "     128 KiB in 2 blocks of 64.0 KiB, steps 5, 15, thread 100, first at 0x5000",
            "     called by project/train.py:99 in <module>",
            "Late: device 0 PTA: 2 blocks, 128 KiB in all, freed 3 steps after allocation in steps 5-15, at project/train.py:50 in main",
        ]
    );
    assert!(!text.contains("Not judged"), "{text}");
    let steps: Vec<u32> = document.steps.iter().map(|step| step.step.0).collect();
    assert_eq!((steps, document.devices[0].not_judged_total.blocks), (vec![5, 15], 0));

    // Of one step alone it is known that its like recurs.
    let one = render(&showing(&events, StepSet::of([25..=25])), View::default());
    assert!(one.starts_with("1 leak: 64.0 KiB in 1 block\n") && one.contains(", step 25, "), "{one}");
    let whole = render(&showing(&events, StepSet::of([1..=95])), View::default());
    assert!(whole.contains(", 9 of the 81 selected steps from 5 to 85, "), "{whole}");
    let young = render(&showing(&events, StepSet::of([94..=95])), View::default());
    assert!(young.contains("Not judged: 3 blocks, 192 KiB\n"), "{young}");
}

#[test]
fn of_steps_that_are_not_judged_nothing_is_said() {
    let events = every_tenth().events;
    let document = showing(&events, StepSet::of([1..=1, 400..=500]));
    assert!(!document.leaks_judged());
    let text = render(&document, View::default());
    assert!(
        text.starts_with("Leaks not judged: of the selected steps none is among those that were, 2-94.\n"),
        "{text}"
    );
}

/// A cache that has been filled.
#[test]
fn what_has_stopped_growing_is_no_headline() {
    let mut script = Script::new();
    for step in 1..=20u64 {
        script.step(|s| {
            if step < 6 {
                s.alloc_at(Some(7), Whose::Own, 0x1000 * step, MIB);
            }
        });
    }
    let text = rendered(&script.events);
    assert_eq!(
        text.lines().take(2).collect::<Vec<_>>(),
        [
            "No recurring leak among what was allocated in steps 2-19.",
            "Grew and then stopped, no leak unless it goes on: 4.00 MiB in 4 blocks, device 0 PTA in steps 2-5 (none in \
             steps 6-19), at project/train.py:7 in main, first at 0x2000",
        ]
    );
}

#[test]
fn a_leak_is_the_headline() {
    let mut events = leak6();
    events.retain(|event| event.kind != EventKind::AclFinalize);
    let cut = events.iter().rposition(|event| matches!(event.kind, EventKind::RangeEnd { .. })).unwrap_or(0);
    let trace = Trace {
        sites: vec![
            site("halMemAlloc", true, None),
            site("aclrtMallocCached", false, Some("in no mapped library")),
        ],
        events: Events { received: 40_120, lost: 0 },
        dump: Some(Dump { path: "./dump".to_owned(), complete: true, reason: None, is_text: true }),
        notes: vec!["trained on a Tuesday".to_owned()],
        ..Trace::default()
    };
    assert_text(
        &render(&document(&events[..=cut], trace), View::default()),
        &[
            "1 leak: 12.0 MiB in 4 blocks",
            "LEAK device 0 PTA: +3.00 MiB/step around aten.empty.memory_format",
            "     12.0 MiB in 4 blocks of 3.00 MiB, steps 2-5, thread 23999, first at 0x7f04e0300200",
            "Not judged: 1 block, 3.00 MiB, of what leaks above",
            "Fluctuation within a step: smallest use, in % of the largest",
            "                 widest swing               narrowest swing",
            "  device 0  PTA  29.2 % (7.00 MiB, step 2)  52.8 % (19.0 MiB, step 6)",
            "Memory",
            "  device 0: 40.0 MiB from the driver since attach: 40.0 MiB in segments of PTA, 0 B in no pool",
            "    PTA  19.0 MiB allocated of 40.0 MiB reserved  seen since attach: 19.0 MiB live in 7 blocks, peak 36.0 MiB",
            "    PTA: over steps 2-6 at most 36.0 MiB allocated, 40.0 MiB reserved throughout",
            "    PTA: 21.0 MiB free in 2 segments of 40.0 MiB, in 2 pieces, the largest 17.0 MiB; 1 segment of 20.0 MiB less \
             than a quarter full, for 3.00 MiB",
            "Events: 40,120 received, none lost; 1 of 2 sites attached",
            "  aclrtMallocCached: in no mapped library",
            "Note: trained on a Tuesday",
            "Dump: ./dump",
            "Next: see what your code keeps of each step's results, around aten.empty.memory_format; the dump's rows \
             before the block: grep -rn -B 20 7f04e0300200 ./dump",
        ],
    );
}

#[test]
fn no_leak_but_a_ring_and_state_that_was_built_late() {
    let mut script = Script::new();
    for step in 1..=8u64 {
        script.step(|s| {
            if step > 3 {
                s.free(0x1000 * (step - 3));
            }
            s.op("aclnnCat").alloc(0x1000 * step, 16 * MIB);
            if step == 5 {
                s.op("aclnnOnes").alloc(0x100_0000, MIB).alloc(0x200_0000, 2 * MIB);
            }
        });
    }
    assert_text(
        &rendered(&script.events),
        &[
            "No recurring leak among what was allocated in steps 2-7.",
            "Built once and kept, no leak unless it comes again: 3.00 MiB in 2 blocks; most device 0 PTA 2.00 MiB in \
             1 block in step 5, around aclnnOnes, first at 0x2000000",
            "Late: device 0 PTA: 4 blocks, 64.0 MiB in all, freed 3 steps after allocation in steps 2-5, around aclnnCat",
            "Not judged: 3 blocks, 48.0 MiB",
            "  device 0 PTA 16.0 MiB at 0x6000, step 6, around aclnnCat, thread 100 (young: its like is freed after 3 steps)",
            "  device 0 PTA 16.0 MiB at 0x7000, step 7, around aclnnCat, thread 100 (young: its like is freed after 3 steps)",
            "  device 0 PTA 16.0 MiB at 0x8000, step 8, around aclnnCat, thread 100 (last step)",
            "Fluctuation within a step: smallest use, in % of the largest",
            "                 widest swing               narrowest swing",
            "  device 0  PTA  62.7 % (32.0 MiB, step 5)  100.0 % (32.0 MiB, step 2)",
            "Memory",
            "  device 0: 0 B from the driver since attach",
            "    PTA    seen since attach: 51.0 MiB live in 5 blocks, peak 51.0 MiB",
            "Events: 40 received, none lost",
            "Next: a leak that does not show in this many steps needs a longer trace: -d SECONDS",
        ],
    );
}

#[test]
fn without_steps_it_says_what_could_be_one() {
    let mut script = Script::new();
    for _ in 0..3 {
        script.mark("forward").alloc(0x1000, 512).mark("backward").free(0x1000).mark("forward");
    }
    let text = rendered(&script.events);
    assert!(text.starts_with("Leaks not judged: no step was seen.\n"), "{text}");
    assert!(
        text.ends_with(
            "Next: trace longer than a step, or name the mark or range that comes once a step: --step-mark REGEX. Seen: \
             \"forward\" (6x), \"backward\" (3x)\n"
        ),
        "{text}"
    );
    let rule = StepRule::default();
    let mut unstepped = Online::new(rule.clone(), true).with_steps_from(&rule, StepsFrom::None);
    script.events.iter().for_each(|event| drop(unstepped.apply(event)));
    let text = render(&Document::new(Trace::default(), &unstepped), View::default());
    assert!(text.starts_with("Leaks not judged: there are no steps (--steps-from none).\n"), "{text}");
    assert!(text.ends_with("Next: leaks are judged by steps: leave --steps-from none out\n"), "{text}");
    script.events.retain(|event| !matches!(event.kind, EventKind::Mark { .. }));
    assert!(rendered(&script.events).contains("Next: mark each step of the loop"));
}

#[test]
fn too_few_steps_are_said_to_be_too_few() {
    let mut script = Script::new();
    script.alloc(0x1000, 512).step(|_| {}).step(|_| {});
    let text = rendered(&script.events);
    assert!(text.starts_with("Leaks not judged: too few steps."), "{text}");
    assert!(text.ends_with("Next: trace longer: at least 3 steps\n"), "{text}");
    script.step(|_| {});
    let text = rendered(&script.events);
    assert!(text.starts_with("No recurring leak among what was allocated in step 2;"), "{text}");
    assert!(rendered(&[]).starts_with("Leaks not judged: no device memory was allocated or freed.\n"));
}

#[test]
fn loss_makes_figures_a_lower_bound() {
    let mut script = Script::new();
    for step in 1..=4u64 {
        script.step(|s| {
            s.alloc_in(Pool::Pta, 0, 0x1000 * step, MIB, Some((MIB, 20 * MIB)));
        });
    }
    let trace = Trace { events: Events { received: 12, lost: 1234 }, ..Trace::default() };
    let text = render(&document(&script.events, trace), View::default());
    let head: Vec<&str> = text.lines().take(3).collect();
    assert_eq!(
        head,
        [
            "At least 1 leak: 2.00 MiB in 2 blocks",
            "1,234 events were lost: figures are a lower bound, and a block whose free was lost looks leaked.",
            "  device 0 PTA: at least 3.00 MiB of what looks alive has been freed",
        ]
    );
    assert!(text.contains("Events: 12 received, 1,234 lost\n"));
}

#[test]
fn out_of_memory_comes_with_what_was_there() {
    let mut script = Script::new();
    script.op("aclnnMatmul").step(|s| {
        s.hal(0x9000_0000, 2 * MIB, Module::APP);
        s.alloc_in(Pool::Pta, 0, 0x1000, 30 * MIB, Some((30 * MIB, 40 * MIB)));
        s.fail(MAIN, 66 * MIB, 64 * MIB).fail(MAIN, 64 * MIB, 64 * MIB);
    });
    script.fail(MAIN, 8 * MIB, 8 * MIB).hal(0xa000_0000, 8 * MIB, Module::APP);
    let text = rendered(&script.events);
    let expected = [
        "OUT OF MEMORY device 0: aclrtMallocAlign32 of 64.0 MiB refused (halMemAlloc returned 6) 2 times, step 1, around \
         aclnnMatmul, thread 100",
        "  at that moment: driver 2.00 MiB since attach; PTA 30.0 MiB allocated of 40.0 MiB reserved",
        "  held by operator:",
        "     30.0 MiB  PTA in 1 block, around aclnnMatmul",
        "     2.00 MiB  HAL in 1 block, around aclnnMatmul",
        "  largest live blocks:",
        "     30.0 MiB  PTA at 0x1000, step 1, around aclnnMatmul, thread 100",
        "     2.00 MiB  HAL at 0x90000000, step 1, around aclnnMatmul, thread 100",
        "1 refused request of at most 8.00 MiB succeeded after the pool had given memory back or on another try",
    ];
    let lines: Vec<&str> = text.lines().take(expected.len()).collect();
    assert_eq!(lines, expected, "{text}");
    assert!(text.contains("Next: free or shrink what holds most above"), "{text}");
}

/// What holds the memory is said by line; single blocks are few.
#[test]
fn out_of_memory_names_the_lines_that_hold_it() {
    let mut script = Script::new();
    script.step(|s| {
        for block in 1..=9u64 {
            s.alloc_at(Some(7), Whose::Own, 0x10_0000 * block, 6 * MIB);
        }
        for line in 10..20u32 {
            s.alloc_at(Some(line), Whose::Own, 0x1000 * u64::from(line), MIB);
        }
        s.fail(MAIN, 64 * MIB, 64 * MIB);
    });
    let document = document(&script.events, Trace { offline: true, ..Trace::default() });
    let text = render_oom(&document, View::default());
    let lines: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("  held")).collect();
    assert_eq!(lines[0], "  held by line of the program:");
    assert_eq!(lines[1], "     54.0 MiB  PTA in 9 blocks of up to 6.00 MiB, at project/train.py:7 in main");
    assert_eq!(lines[2], "     1.00 MiB  PTA in 1 block, at project/train.py:10 in main");
    assert_eq!(lines[HOLDERS_SHOWN + 1], "     3.00 MiB  held by 3 other lines");
    let blocks = |text: &str| text.lines().filter(|line| line.contains("  PTA at 0x")).count();
    assert_eq!(blocks(&text), 2 * OOM_BLOCKS_SHOWN, "the largest and the latest");
    assert_eq!(blocks(&render_oom(&document, View::with_oom_blocks(Some(8)))), 16);
}

/// A loop that is refused in each step has one thing to mend.
#[test]
fn refusals_at_one_place_are_told_once() {
    let mut script = Script::new();
    script.op("aclnnMatmul");
    for step in 1..=4u64 {
        script.step(|s| {
            s.fail(MAIN, (60 + step) * MIB, (60 + step) * MIB);
        });
    }
    script.op("aclnnAdd").fail(MAIN, 9 * MIB, 9 * MIB);
    let text =
        render_oom(&document(&script.events, Trace { offline: true, ..Trace::default() }), View::default());
    let told: Vec<&str> =
        text.lines().filter(|line| line.starts_with("OUT OF MEMORY") || line.starts_with("  and ")).collect();
    assert_eq!(told.len(), 3, "{text}");
    assert!(told[0].contains("61.0 MiB refused"), "{text}");
    assert_eq!(told[1], "  and 3 more requests were refused there, of at most 64.0 MiB, the last in step 4");
    assert!(told[2].contains("9.00 MiB refused"), "{text}");
}

/// A prefetching loader of varying length: one line of the program, blocks of many sizes.
#[test]
fn late_blocks_of_a_line_are_one_line() {
    let mut script = Script::new();
    for step in 1..=12u64 {
        script.step(|s| {
            s.alloc_at(Some(12), Whose::Own, 0x1000 * step, MIB << (step % 5));
            // Those of odd steps are held for one step longer.
            for freed in [step.wrapping_sub(2), step.wrapping_sub(3)] {
                if freed < step && step - freed == 2 + freed % 2 {
                    s.free(0x1000 * freed);
                }
            }
        });
    }
    let text = rendered(&script.events);
    let late: Vec<&str> = text.lines().filter(|line| line.starts_with("Late: ")).collect();
    let [late] = late[..] else { panic!("{text}") };
    assert!(
        late.contains(": 9 blocks, ") && late.contains("freed 2 to 3 steps after allocation in steps 2-10"),
        "{late}"
    );
    assert!(late.ends_with(", at project/train.py:12 in main"), "{late}");
}

/// Of a dump there is nothing to attach to, and no option of live tracing to give.
#[test]
fn the_next_step_with_a_dump_is_about_dumps() {
    let of = |events: &[Event]| {
        let trace = Trace { offline: true, events: Events { received: 1, lost: 0 }, ..Trace::default() };
        render(&document(events, trace), View::default())
    };
    let nothing = of(&[]);
    assert!(
        nothing.starts_with("Leaks not judged: the dump has no row of an allocation or a free.\n"),
        "{nothing}"
    );
    assert!(nothing.contains("\nDump: 1 row read; no event lost when it was traced\n"), "{nothing}");
    assert!(nothing.contains("\nNext: write a dump with allocations and frees in it: --events"), "{nothing}");
    let mut script = Script::new();
    for _ in 1..=5 {
        script.step(|s| {
            s.alloc(0x1000, MIB).free(0x1000);
        });
    }
    let clean = of(&script.events);
    assert!(clean.contains("seen since the dump's beginning: ") && !clean.contains("attach"), "{clean}");
    assert!(
        clean.ends_with("Next: a leak that does not show in this many steps needs a longer trace\n"),
        "{clean}"
    );
}

/// A process that replaces its program keeps its number.
#[test]
fn programs_of_one_process_are_told_apart() {
    let mut script = Script::new();
    // A wrapper before both uses no memory: it does not count, for dumps do not have it.
    script.op("none").push(MAIN, EventKind::Exec);
    script.alloc(0x1000, MIB).push(MAIN, EventKind::Exec);
    script.alloc(0x2000, 2 * MIB);
    let document = document(&script.events, Trace::default());
    let programs: Vec<u32> = document.devices.iter().map(|device| device.program).collect();
    assert_eq!(programs, [1, 2]);
    let text = render(&document, View::default());
    for program in [1, 2] {
        assert!(text.contains(&format!("\n  process 100 (program {program}) device 0")), "{text}");
    }
}

#[test]
fn processes_are_told_apart_and_host_memory_is_named() {
    let mut script = Script::new();
    script.hal(0x1000, 3 * MIB, Module::APP).hal(0x2000, 7 * MIB, Module::RUNTIME);
    let (ptr, size) = (DevicePtr(0x3000), MIB);
    script.push(
        MAIN,
        EventKind::Alloc(Alloc {
            pool: Pool::Host,
            device: None,
            ptr,
            size,
            totals: None,
            driver: None,
            stack: None,
        }),
    );
    script.free(0x77);
    let mut events = script.events.clone();
    events.extend(script.events.into_iter().take(1).map(|event| Event { tgid: Tgid(200), ..event }));
    let text = rendered(&events);
    let memory: Vec<&str> = text.lines().skip_while(|line| *line != "Memory").take(7).collect();
    assert_eq!(
        memory,
        [
            "Memory",
            "  process 100 device 0: 10.0 MiB from the driver since attach (RUNTIME 7.00 MiB, APP 3.00 MiB): 3.00 MiB in no pool",
            "  process 100 host",
            "    HOST    seen since attach: 1.00 MiB live in 1 block, peak 1.00 MiB",
            "  process 200 device 0: 3.00 MiB from the driver since attach (APP 3.00 MiB): 3.00 MiB in no pool",
            "  process 100 PTA: 1 block freed that came from before attach",
            "Events: 5 received, none lost",
        ],
        "{text}"
    );
}

#[test]
fn colour_only_where_it_is_wanted() {
    let document = document(&leak6(), Trace::default());
    let note = "Note: leaks are as of aclFinalize; what was freed after it does not count as freed\n";
    let (plain, coloured) =
        (render(&document, View::default()), render(&document, View { colour: true, ..View::default() }));
    assert!(!plain.contains('\x1b') && plain.contains(note));
    assert!(
        coloured
            .starts_with("\x1b[1;31m1 leak: 12.0 MiB in 4 blocks\x1b[0m\n\x1b[1;31mLEAK\x1b[0m device 0 PTA")
    );
    let mut stripped = coloured;
    for code in ["\x1b[1;31m", "\x1b[1m", "\x1b[0m"] {
        stripped = stripped.replace(code, "");
    }
    assert_eq!(stripped, plain);
}

#[test]
fn lists_of_steps_are_short() {
    let list = |steps: &[u32], last_judged| {
        step_list(&steps.iter().copied().map(StepId).collect(), last_judged, &StepSet::default())
    };
    assert_eq!(list(&[5], 6), "step 5");
    assert_eq!(list(&[2, 3, 4, 5, 6], 6), "steps 2-6");
    assert_eq!(list(&[2, 3, 5, 8, 9], 10), "steps 2-3, 5, 8-9");
    assert_eq!(list(&[2, 4, 6, 8, 10], 12), "5 of the steps 2-10");
    assert_eq!(list(&[2, 3, 4], 99), "steps 2-4 (none in steps 5-99)");
    assert_eq!(list(&[2, 12], 30), "steps 2, 12");
}

#[test]
fn that_a_leak_slows_down_is_said() {
    let loop_of = |leaks: fn(u64) -> bool| {
        let mut script = Script::new();
        for step in 1..=64u64 {
            script.step(|s| {
                s.op("fill");
                if leaks(step) {
                    s.alloc(0x1000 * step, 1024);
                }
            });
        }
        rendered(&script.events)
    };
    let hint = "fewer of them lately: a cache that fills up looks like this";
    let text = loop_of(|step| step <= 32 || step % 3 == 0);
    assert!(text.contains("LEAK ") && text.contains(hint), "{text}");
    let text = loop_of(|_| true);
    assert!(text.contains("LEAK ") && !text.contains(hint), "{text}");
}

#[test]
fn long_lists_are_cut_and_the_rest_counted() {
    let mut script = Script::new();
    for step in 1..=5u64 {
        script.step(|s| {
            for kind in 0..25u64 {
                s.op(&format!("op{kind}")).alloc(0x10_0000 * step + 0x1000 * kind, 1024 * (kind + 1));
                if step == 5 {
                    s.op(&format!("late{kind}")).alloc(0x1000_0000 + 0x1000 * kind, 1024);
                }
            }
        });
    }
    let text = rendered(&script.events);
    assert_eq!(text.lines().filter(|line| line.starts_with("LEAK ")).count(), GROUPS_SHOWN);
    assert!(text.starts_with("25 leaks: 975 KiB in 75 blocks\nLEAK device 0 PTA: +25.0 KiB/step"));
    assert!(text.contains("\n  and 5 smaller ones of 45.0 KiB in all (--json lists them)\n"), "{text}");
    assert!(
        text.contains("\nNot judged: 50 blocks, 350 KiB\n")
            && text.contains("\n  25 of what leaks above\n  and 20 smaller\n"),
        "{text}"
    );
}

/// A loop that leaks, and marks nothing.
fn unmarked_loop(steps: u64) -> Script {
    let mut script = Script::new();
    for step in 1..=steps {
        for name in ["aclnnMm", "aclnnMmBackward", "aclnnInplaceLerps", "aclnnInplaceAddcdiv"] {
            script.op(name);
        }
        script.alloc(MIB * step, MIB);
    }
    script
}

fn inferred(script: &Script) -> Document {
    let rule = StepRule::default();
    let mut online = Online::new(rule.clone(), true).with_steps_from(&rule, StepsFrom::MarksOrOps);
    script.events.iter().for_each(|event| online.feed(event.clone(), |_, _, _| {}));
    online.finish(|_, _, _| {});
    Document::new(Trace::default(), &online)
}

#[test]
fn inferred_steps_are_said_to_be_inferred() {
    let document = inferred(&unmarked_loop(10));
    assert!(!document.steps.is_empty() && document.steps.iter().all(|step| step.inferred));
    let text = render(&document, View::default());
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "1 leak: 6.00 MiB in 6 blocks");
    assert_eq!(lines[1], "Steps inferred from operators: 8 of 8 end with the same optimizer");

    let few = render(&inferred(&unmarked_loop(3)), View::default());
    let unsure =
        "Steps inferred from operators: 1 of 1 end with the same optimizer; they may be something else";
    assert!(few.lines().any(|line| line.starts_with(unsure)), "{few}");
    assert!(!rendered(&leak6()).contains("inferred"));
}

#[test]
fn inefficient_memory_is_reported_when_asked_for() {
    let mut online = Online::new(StepRule::default(), false).with_inefficient(Config::new(Rules::MEMSCOPE));
    unmarked_loop(3).events.into_iter().for_each(|event| online.feed(event, |_, _, _| {}));
    online.finish(|_, _, _| {});
    let text = render(&Document::new(Trace::default(), &online), View::default());
    assert!(text.contains("\nInefficient memory, by the rules of msMemScope"), "{text}");
    assert!(text.contains("\n  no operator was seen to use any block: nothing can be said\n"), "{text}");
}

#[test]
fn a_reserve_that_grows_for_nothing_is_said_to() {
    let said_of = |figures: &[(u64, u64, u64)]| {
        let points = figures.iter().zip(2..).map(|((peak, least, reserved), step)| Point {
            step: StepId(step),
            steps: 1,
            allocated: 0,
            peak_allocated: peak << 20,
            reserved: reserved << 20,
            least_reserved: least << 20,
        });
        reserve(&ReserveFacts { pool: Pool::Pta, points: points.collect() })
    };
    let said = |figures: &[(u64, u64)]| {
        let before = [20].into_iter().chain(figures.iter().map(|(_, reserved)| *reserved));
        let points = figures
            .iter()
            .zip(before)
            .map(|((peak, reserved), before)| (*peak, before.min(*reserved), *reserved));
        said_of(&points.collect::<Vec<_>>())
    };
    assert_eq!(said(&[(10, 20)]), None, "a step alone is no series");
    assert_eq!(
        said(&[(10, 20), (30, 40), (30, 40)]).as_deref(),
        Some(
            "over steps 2-4 at most 30.0 MiB allocated, 40.0 MiB reserved in step 4, which last grew by 20.0 MiB in step 3"
        )
    );
    let fragmented = said(&[(30, 40), (29, 44), (10, 42)]).expect("a series");
    assert!(fragmented.contains("shrank by 2.00 MiB in step 4; it grew in steps that"), "{fragmented}");
    for emptied in [[(30, 20, 40), (29, 0, 0), (29, 0, 40)], [(30, 20, 40), (29, 0, 44), (29, 44, 44)]] {
        let text = said_of(&emptied).expect("a series");
        assert!(!text.contains("in pieces"), "the cache was emptied: {text}");
    }
}

#[test]
fn segments_with_little_in_them_are_named() {
    let space = FreeSpace {
        segments: 3,
        segment_bytes: 60 << 20,
        free_bytes: 39 << 20,
        largest_free: 20 << 20,
        pieces: 2,
        empty_segments: 1,
        empty_bytes: 20 << 20,
        sparse_segments: 1,
        sparse_bytes: 20 << 20,
        sparse_used: 1 << 20,
    };
    assert_eq!(
        free_space(&FreeFacts { pool: Pool::Pta, space }, None),
        "39.0 MiB free in 3 segments of 60.0 MiB, in 2 pieces, the largest 20.0 MiB; 1 empty segment of 20.0 MiB; \
         1 segment of 20.0 MiB less than a quarter full, for 1.00 MiB"
    );
}

#[test]
fn a_process_without_steps_is_not_passed_over() {
    let mut s = Script::new();
    for step in 1..=4 {
        s.step(|s| {
            s.alloc(0x1000 * step, MIB).free(0x1000 * step);
        });
    }
    let mut worker = Script::new();
    worker.alloc(0x9000, MIB);
    let of_worker =
        worker.events.into_iter().map(|event| Event { tgid: Tgid(4556), tid: Tid(4556), ..event });
    let events: Vec<Event> = of_worker.chain(s.events).collect();
    let text = render(&document(&events, Trace::default()), View::default());
    let head: Vec<&str> = text.lines().take(2).collect();
    assert_eq!(
        head,
        [
            "No recurring leak among what was allocated in steps 2-3.",
            "Process 4556: leaks not judged: no step was seen."
        ]
    );
}

#[test]
fn of_many_processes_those_that_used_most_are_shown() {
    let events: Vec<Event> = (1..=30)
        .flat_map(|pid| {
            let mut s = Script::new();
            s.alloc(0x1000, u64::from(pid) * MIB).free(0x9000);
            s.events.into_iter().map(move |event| Event { tgid: Tgid(pid), tid: Tid(pid), ..event })
        })
        .collect();
    let text = render(&document(&events, Trace::default()), View::default());
    let memory = text.split_once("Memory\n").expect("a section").1;
    let shown =
        memory.lines().filter(|line| line.starts_with("  process ") && line.contains(" device ")).count();
    assert_eq!(shown, 20, "{memory}");
    assert!(memory.starts_with("  process 30 device 0"), "{memory}");
    let freed =
        memory.lines().filter(|line| line.ends_with("1 block freed that came from before attach")).count();
    assert_eq!(freed, 20, "{memory}");
    assert_eq!(memory.matches("  and 10 more (--json lists them)").count(), 2, "{memory}");
}
