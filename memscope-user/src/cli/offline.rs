//! What the verbs that read dumps share.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    path::{Path, PathBuf},
};

use anyhow::ensure;

use crate::{
    analysis::{Online, infer_steps::StepInference},
    dump::{
        Fact, Row,
        read::{NumberedRow, Options, Rows, open},
    },
    model::{Event, EventKind, StepRule, StepsFrom, Tgid},
    report::{
        document::{Document, Dump, Events, Trace},
        units,
    },
};

/// Reads dumps as one, to the end; what could not be read is said on standard error, and the rest counts.
pub(super) fn each_row(paths: &[PathBuf], mut row: impl FnMut(&NumberedRow)) -> anyhow::Result<Read> {
    let mut rows: Rows = open(paths, Options::default())?;
    let mut count = 0u64;
    for numbered in rows.by_ref() {
        count += 1;
        row(&numbered);
    }
    let problems = rows.problems();
    for problem in &problems.first {
        tracing::warn!("{problem}");
    }
    let unread = problems.total;
    if unread > 0 {
        // Each verb would find nothing, and say so.
        ensure!(count > 0, "no row can be read: {problems}; name another dump");
        tracing::warn!("{problems}: what follows rests on the other {}", units::count_of(count, "row"));
    }
    let missing = (unread > 0).then(|| problems.to_string());
    // By their names: all else is CSV, or no dump.
    let is_text =
        rows.files().iter().all(|file| file.extension().is_none_or(|end| end != "db" && end != "arrows"));
    let notes: Vec<String> = rows.overlaps().iter().map(ToString::to_string).collect();
    notes.iter().for_each(|note| tracing::warn!("{note}"));
    Ok(Read { rows: count, unread, missing, notes, unheld: rows.unheld(), is_text })
}

/// The beginnings of steps that operators tell of in a dump, by process.
#[derive(Debug, Default)]
pub(super) struct InferredSteps(HashMap<Tgid, InferredOf>);

#[derive(Debug, Default)]
struct InferredOf {
    /// Events of the process so far.
    events: u64,
    /// With the number of events before it.
    steps: VecDeque<(u64, Event)>,
}

pub(super) fn inferred_steps(
    dump: &PathBuf,
    rule: &StepRule,
    from: StepsFrom,
) -> anyhow::Result<InferredSteps> {
    let mut inference = StepInference::new(rule.clone(), from);
    let (mut ready, mut found) = (Vec::new(), InferredSteps::default());
    let mut sort = |ready: &mut Vec<Event>| {
        for event in ready.drain(..) {
            let InferredOf { events, steps } = found.0.entry(event.tgid).or_default();
            match event.kind {
                EventKind::StepInferred(_) => steps.push_back((*events, event)),
                EventKind::StepsRetracted => steps.clear(),
                _ => *events += 1,
            }
        }
    };
    each_row(std::slice::from_ref(dump), |numbered| {
        if let Some(event) = numbered.row.event() {
            inference.push(event, &mut ready);
            sort(&mut ready);
        }
    })?;
    inference.flush(&mut ready);
    sort(&mut ready);
    found.0.values_mut().for_each(|of| of.events = 0);
    Ok(found)
}

/// Reads a dump with such beginnings of steps between its rows.
pub(super) fn each_row_and_step(
    dump: &PathBuf,
    mut steps: InferredSteps,
    mut row: impl FnMut(&NumberedRow),
) -> anyhow::Result<Read> {
    each_row(std::slice::from_ref(dump), |numbered| {
        if let Some(InferredOf { events, steps }) = steps.0.get_mut(&numbered.row.tgid) {
            while let Some((_, step)) = steps.pop_front_if(|(before, _)| *before <= *events) {
                row(&NumberedRow { row: Row::from(step), ..*numbered });
            }
            *events += u64::from(numbered.row.event().is_some());
        }
        row(numbered);
    })
}

/// The report of live tracing, of dumps.
pub(super) fn document(paths: &[PathBuf], online: &mut Online) -> anyhow::Result<Document> {
    let mut lost = 0u64;
    let read = each_row(paths, |numbered| {
        if let Fact::Lost { events } = numbered.row.fact {
            lost = lost.saturating_add(events);
        }
        if let Some(event) = numbered.row.event() {
            online.feed(event, |_, _, _| {});
        }
    })?;
    online.finish(|_, _, _| {});
    let shown: Vec<_> = paths.iter().map(|path| shown(path)).collect();
    let trace = Trace {
        offline: true,
        events: Events { received: read.rows, lost },
        dump: Some(Dump {
            path: shown.join(" "),
            complete: read.unread == 0,
            reason: read.missing,
            is_text: read.is_text,
        }),
        notes: read.notes,
        ..Trace::default()
    };
    Ok(Document::new(trace, online))
}

/// What was read of dumps.
#[derive(Debug, Clone, serde::Serialize)]
pub(super) struct Read {
    pub rows: u64,
    /// Rows, or ends of files, that could not be read.
    pub unread: u64,
    /// The same in words.
    pub missing: Option<String>,
    /// Files that are not independent of each other.
    pub notes: Vec<String>,
    /// What rows say that is not carried over when they are written again, with their number.
    #[serde(skip)]
    pub unheld: BTreeMap<String, u64>,
    /// Whether all files are CSV.
    #[serde(skip)]
    pub is_text: bool,
}

impl Read {
    /// What was read of both.
    pub fn and(mut self, other: Self) -> Self {
        self.rows += other.rows;
        self.unread += other.unread;
        let missing = [self.missing.take(), other.missing].into_iter().flatten().collect::<Vec<_>>();
        self.missing = (!missing.is_empty()).then(|| missing.join("; "));
        self.notes.extend(other.notes);
        self
    }
}

pub(super) fn shown(path: &Path) -> String {
    crate::text::sanitize(path.as_os_str().as_encoded_bytes()).into_owned()
}
