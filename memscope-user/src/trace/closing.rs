//! The end of a trace: the last rows, the last figures, the report.

use std::{
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
};

use super::{
    Session, now,
    rows::write_rows,
    tally::lost,
    targets::{Python, Target, signal_name},
};
use crate::{
    attach::{Attacher, Status},
    dump::Format,
    model::{DeviceId, StepRule, StepsFrom, Tgid},
    report::{
        document::{
            Document, Dump, Ended, Events, NativeStackFacts, ProbeCost, Site, StackFacts,
            Target as TargetFacts, Timing, Trace,
        },
        units,
    },
};

impl Session<'_> {
    pub(super) fn finish(mut self) -> (Document, Attacher) {
        let dump = self.finish_dump();
        // Hits until the end by CPU time until some time before would be too much.
        let look = if self.is_end_missed { self.last_look } else { self.look() };
        let share = self.share(look);
        let (sites, events) = self.sites_and_events();
        self.notes.extend(self.missed.note());
        if self.notes_left_out > 0 {
            let more = units::count_of(self.notes_left_out, "more note");
            self.notes.push(format!("{more}, said while tracing"));
        }
        self.note_late_targets();
        let trace = Trace {
            offline: false,
            targets: self.order.iter().filter_map(|tgid| self.target_facts(*tgid)).collect(),
            sites,
            events,
            dump,
            timing: Timing { ended_ns: now(), ..self.timing },
            probe_cost: share.map(ProbeCost::from),
            notes: self.notes,
        };
        let mut document = Document::new(trace, &self.online);
        document.select(&self.config.only_devices);
        if let StepRule::Matching(pattern) = &self.config.steps
            && document.processes.iter().all(|of| of.steps_seen == 0 || of.steps_inferred.is_some())
            && self.config.steps_from != StepsFrom::Ops
        {
            let seen = document.marks_seen(5);
            let seen = if seen.is_empty() { "there were none".to_owned() } else { format!("seen: {seen}") };
            document.notes.push(format!("no mark or range matched --step-mark {pattern}; {seen}"));
        }
        (document, self.attacher)
    }

    /// Has what is known by now written, and the files closed.
    fn finish_dump(&mut self) -> Option<Dump> {
        let (dump, config) = (self.dump.as_ref(), &self.config);
        self.online.finish(|event, change, ledger| write_rows(dump, config, event, change, ledger));
        let mut summary = self.dump.take()?.finish();
        // Rows without a device, of a process image that had none: no file was due.
        summary.files.retain(|file| file.rows > 0 || file.failure.is_some());
        let missing: u64 = summary.files.iter().map(|file| file.missing_rows).sum();
        let removed: u64 = summary.files.iter().map(|file| file.removed_rows).sum();
        let failure = summary.files.iter().find_map(|file| file.failure.as_ref());
        let reason = if let Some(why) = failure {
            Some(format!(
                "{why}; free some space or choose another directory with --output; missing: {}",
                units::count_of(missing, "row")
            ))
        } else if summary.dropped_rows > 0 {
            let dropped = units::were(summary.dropped_rows, "row");
            Some(format!("{dropped} dropped: the disk could not keep up"))
        } else if summary.crashed {
            Some("the writer failed".to_owned())
        } else if removed > 0 {
            Some(format!(
                "the oldest {removed} rows had to go for --max-size; the blocks alive then are all there"
            ))
        } else {
            None
        };
        let path = common_parent(summary.files.iter().map(|file| file.path.as_path()))?;
        let is_text = summary.files.iter().any(|file| file.format == Format::Csv);
        Some(Dump { path: path.display().to_string(), complete: summary.is_complete(), reason, is_text })
    }

    /// All sites with what happened there, and what it comes to. What was lost is told.
    fn sites_and_events(&mut self) -> (Vec<Site>, Events) {
        let mut events = Events { received: self.decoder.received, lost: 0 };
        let (mut no_room, mut unmatched) = (0, 0);
        let mut sites = Vec::new();
        for (state, counters) in self.attacher.tallies() {
            no_room += counters.ring_full;
            unmatched += counters.map_full;
            // Seen as well, though not sent.
            events.received += counters.unsent;
            // A stand-in that was not needed is of no interest.
            if matches!(state.status, Status::Superseded(_)) && counters.entries() == 0 {
                continue;
            }
            sites.push(Site {
                site: state.probe.site.to_owned(),
                file: Some(state.file.to_string()).filter(|f| !f.is_empty()),
                build_id: state.build_id.as_deref().map(str::to_owned),
                offset: state.found.map(|f| f.offset),
                attached: matches!(state.status, Status::Attached | Status::Ended),
                hits: counters.entries(),
                lost: lost(&counters),
                reason: match &state.status {
                    Status::Superseded(why) => Some(why.clone()),
                    _ => state.failure().map(str::to_owned),
                },
            });
        }
        if no_room > 0 {
            self.notes.push(format!(
                "{} lost: figures are a lower bound, and a block whose free was lost looks \
                 leaked; a larger --ring-size (now {} bytes) helps, or fewer events: --level op, --events none",
                units::were(no_room, "event"),
                self.config.ring_bytes
            ));
        }
        unmatched += self.unaccounted();
        events.lost = no_room + unmatched;
        if unmatched > 0 {
            self.notes.push(format!(
                "of {} no return was seen (more threads within calls at a time than can be followed, or calls left by \
                 other ways): what they did is lost",
                units::count_of(unmatched, "call")
            ));
        }
        if self.decoder.malformed > 0 {
            self.notes.push(format!(
                "{} could not be decoded: a fault of the tracer",
                units::count_of(self.decoder.malformed, "record")
            ));
        }
        (sites, events)
    }

    fn note_late_targets(&mut self) {
        for tgid in &self.order {
            if let Some(Target { late: Some(late), process, .. }) = self.targets.get(tgid) {
                self.notes.push(format!(
                    "process {tgid} ({}) ran for up to {} ms with Ascend libraries that were not probed yet: what it \
                     did then is not traced",
                    process.command,
                    late.as_millis() + 1
                ));
            }
        }
    }

    fn target_facts(&self, tgid: Tgid) -> Option<TargetFacts> {
        let target = self.targets.get(&tgid)?;
        let process = self.online.ledger.process(tgid);
        let mut devices: Vec<DeviceId> =
            process.map(|p| p.devices().iter().filter_map(|d| d.device).collect()).unwrap_or_default();
        devices.sort_unstable();
        let (version, refused) = match &target.python {
            Python::Ready { version } => (Some(version.clone()), None),
            Python::Refused { why } => (None, Some(why.clone())),
            Python::Looking { .. } => (None, None),
        };
        let stacks = &self.decoder.stacks;
        Some(TargetFacts {
            pid: tgid,
            command: target.process.command.clone(),
            container: target.process.container.clone(),
            own_pid: target.process.own_pid,
            ended: target.ended.as_ref().map(|ending| Ended {
                exit_code: ending.status.and_then(|status| status.code()),
                signal: ending.status.and_then(|status| status.signal()).map(signal_name),
                within: ending.within.clone(),
            }),
            devices,
            torch_npu: target.torch_npu.clone(),
            python: version,
            stacks: self.attacher.takes_stacks().then(|| StackFacts::new(stacks.tally(tgid), refused)),
            native_stacks: self.attacher.native_stacks().map(|wanted| {
                let tally = stacks.native.as_ref().and_then(|natives| natives.tally(tgid));
                NativeStackFacts::new(tally, wanted.pool_bytes)
            }),
        })
    }
}

/// The directory that holds all files; the file itself where there is one.
fn common_parent<'a>(mut paths: impl Iterator<Item = &'a Path>) -> Option<PathBuf> {
    let mut common = paths.next()?.to_path_buf();
    for path in paths {
        while !path.starts_with(&common) {
            common.pop();
        }
    }
    Some(common)
}
