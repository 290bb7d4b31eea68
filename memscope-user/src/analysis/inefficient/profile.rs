//! The peak that would remain without some bytes for some time: exact, and in memory that depends on the blocks alive
//! and not on how long the stream is.
//!
//! That bytes were wasted is known when their time is over: at the first access, at the free. All changes to what might
//! have been are thus of one kind, "so much less from that moment until now", and only moments at which such a time may
//! have begun need to be told apart. Between two of them the maximum is all that matters.

/// Bytes of a pool on a device over time.
#[derive(Debug, Default)]
pub(super) struct Timeline {
    live: i64,
    peak: i64,
    moment: u64,
    /// Moments and their bytes, each more than everything later: the first one since a moment is the maximum since then.
    summits: Vec<(u64, i64)>,
}

/// A moment of a timeline.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stamp {
    moment: u64,
    /// The peak until then.
    peak: i64,
}

/// A time for which some bytes may have been wasted.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stretch {
    /// The peaks before and within.
    before: i64,
    within: i64,
    until: u64,
}

/// More than any block is: keeps sums of sizes that a target made up within their type.
const SIZE_MAX: u64 = 1 << 50;

impl Timeline {
    pub fn add(&mut self, size: u64) {
        self.set(self.live.saturating_add(signed(size)));
    }

    pub fn remove(&mut self, size: u64) {
        self.set(self.live.saturating_sub(signed(size)));
    }

    pub fn peak(&self) -> u64 {
        bytes(self.peak)
    }

    pub fn now(&self) -> Stamp {
        Stamp { moment: self.moment, peak: self.peak }
    }

    /// Of the change that comes next.
    pub fn next(&self) -> Stamp {
        Stamp { moment: self.moment + 1, ..self.now() }
    }

    /// The time from one moment until another, which is now.
    pub fn stretch(&self, from: Stamp, to: Stamp) -> Stretch {
        let within = self.peak_after(from.moment.saturating_sub(1)).unwrap_or(0);
        Stretch { before: from.peak, within, until: to.moment }
    }

    /// The peak without so many bytes for that time alone.
    pub fn peak_without(&self, stretch: Stretch, size: u64) -> u64 {
        let after = self.peak_after(stretch.until.saturating_sub(1)).unwrap_or(0);
        bytes(stretch.before.max(stretch.within.saturating_sub(signed(size))).max(after))
    }

    fn set(&mut self, live: i64) {
        self.live = live;
        self.peak = self.peak.max(live);
        self.moment += 1;
        while self.summits.last().is_some_and(|(_, summit)| *summit <= live) {
            self.summits.pop();
        }
        self.summits.push((self.moment, live));
    }

    /// The maximum after a moment, if anything has changed since then.
    fn peak_after(&self, moment: u64) -> Option<i64> {
        let at = self.summits.partition_point(|(summit, _)| *summit <= moment);
        self.summits.get(at).map(|(_, live)| *live)
    }
}

/// A moment of a [`Profile`] from which bytes may turn out to have been wasted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mark(u32);

/// What a timeline would have been without what was wasted.
#[derive(Debug)]
pub(super) struct Profile {
    /// Spans of time in a list; the one at 0 is the first and always there.
    spans: Vec<Span>,
    vacant: Vec<u32>,
    last: u32,
    /// All that is taken off the last span.
    offset: i64,
    /// The timeline's moment up to which the last span counts.
    seen: u64,
}

#[derive(Debug, Clone, Copy)]
struct Span {
    previous: u32,
    next: u32,
    /// Most bytes in the span, before offsets.
    peak: i64,
    /// Added to this span and all later ones.
    offset: i64,
}

const NONE: u32 = u32::MAX;

impl Default for Profile {
    fn default() -> Self {
        let first = Span { previous: NONE, next: NONE, peak: 0, offset: 0 };
        Profile { spans: vec![first], vacant: Vec::new(), last: 0, offset: 0, seen: 0 }
    }
}

impl Profile {
    /// Begins a span now.
    pub fn mark(&mut self, timeline: &Timeline) -> Mark {
        self.catch_up(timeline);
        let span = Span {
            previous: self.last,
            next: NONE,
            peak: timeline.live.saturating_sub(self.offset),
            offset: 0,
        };
        let at = match self.vacant.pop() {
            Some(at) => {
                self.spans[at as usize] = span;
                at
            }
            None => {
                self.spans.push(span);
                (self.spans.len() - 1) as u32
            }
        };
        self.spans[self.last as usize].next = at;
        self.last = at;
        Mark(at)
    }

    /// Takes bytes off everything from the mark until now.
    pub fn waste(&mut self, since: Mark, size: u64, timeline: &Timeline) {
        self.shift(since, -signed(size), timeline);
    }

    /// Puts them back from a later mark on.
    pub fn restore(&mut self, since: Mark, size: u64, timeline: &Timeline) {
        self.shift(since, signed(size), timeline);
    }

    fn shift(&mut self, since: Mark, change: i64, timeline: &Timeline) {
        self.catch_up(timeline);
        let span = &mut self.spans[since.0 as usize];
        span.offset = span.offset.saturating_add(change);
        self.offset = self.offset.saturating_add(change);
        // From here on it counts in full again.
        let last = &mut self.spans[self.last as usize];
        last.peak = last.peak.max(timeline.live.saturating_sub(self.offset));
    }

    /// Joins the mark's span and the one before.
    pub fn release(&mut self, mark: Mark) {
        let Span { previous, next, peak, offset } = self.spans[mark.0 as usize];
        self.vacant.push(mark.0);
        let before = &mut self.spans[previous as usize];
        before.peak = before.peak.max(peak.saturating_add(offset));
        before.next = next;
        if next == NONE {
            self.last = previous;
            self.offset = self.offset.saturating_sub(offset);
        } else {
            let after = &mut self.spans[next as usize];
            after.previous = previous;
            after.offset = after.offset.saturating_add(offset);
        }
    }

    /// The peak without what was wasted.
    pub fn peak(&self, timeline: &Timeline) -> u64 {
        let mut peak = timeline.peak_after(self.seen).unwrap_or(0);
        let (mut at, mut offset) = (0, 0i64);
        while at != NONE {
            let span = &self.spans[at as usize];
            offset = offset.saturating_add(span.offset);
            peak = peak.max(span.peak.saturating_add(offset));
            at = span.next;
        }
        bytes(peak)
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.spans.len() - self.vacant.len()
    }

    fn catch_up(&mut self, timeline: &Timeline) {
        if let Some(peak) = timeline.peak_after(self.seen) {
            let last = &mut self.spans[self.last as usize];
            last.peak = last.peak.max(peak.saturating_sub(self.offset));
        }
        self.seen = timeline.moment;
    }
}

fn signed(size: u64) -> i64 {
    size.min(SIZE_MAX) as i64
}

fn bytes(live: i64) -> u64 {
    live.max(0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Act {
        Add(u64),
        Remove(u64),
        Mark,
        /// Of the marks that there are, by index.
        Waste(prop::sample::Index, u64),
        Restore(prop::sample::Index, u64),
        Release(prop::sample::Index),
    }

    fn any_act() -> impl Strategy<Value = Act> {
        prop_oneof![
            3 => (1..100u64).prop_map(Act::Add),
            3 => (1..100u64).prop_map(Act::Remove),
            2 => Just(Act::Mark),
            2 => (any::<prop::sample::Index>(), 1..50u64).prop_map(|(at, size)| Act::Waste(at, size)),
            1 => (any::<prop::sample::Index>(), 1..50u64).prop_map(|(at, size)| Act::Restore(at, size)),
            2 => any::<prop::sample::Index>().prop_map(Act::Release),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Against the whole history, kept.
        #[test]
        fn the_peak_is_that_of_the_whole_history(acts in prop::collection::vec(any_act(), 0..120)) {
            let (mut timeline, mut profile) = (Timeline::default(), Profile::default());
            let mut history = vec![0i64];
            let mut marks: Vec<(Mark, usize)> = Vec::new();
            for act in acts {
                match act {
                    Act::Add(size) => {
                        timeline.add(size);
                        history.push(timeline.live);
                    }
                    Act::Remove(size) => {
                        timeline.remove(size);
                        history.push(timeline.live);
                    }
                    Act::Mark => {
                        // What holds at a mark holds on both of its sides.
                        history.push(timeline.live);
                        marks.push((profile.mark(&timeline), history.len() - 1));
                    }
                    Act::Waste(at, size) if !marks.is_empty() => {
                        let (mark, from) = marks[at.index(marks.len())];
                        profile.waste(mark, size, &timeline);
                        history[from..].iter_mut().for_each(|live| *live -= size as i64);
                        history.push(timeline.live);
                    }
                    Act::Restore(at, size) if !marks.is_empty() => {
                        let (mark, from) = marks[at.index(marks.len())];
                        profile.restore(mark, size, &timeline);
                        history[from..].iter_mut().for_each(|live| *live += size as i64);
                        history.push(timeline.live);
                    }
                    Act::Release(at) if !marks.is_empty() => {
                        profile.release(marks.swap_remove(at.index(marks.len())).0);
                    }
                    _ => {}
                }
                let expected = history.iter().copied().max().unwrap_or(0).max(0) as u64;
                prop_assert_eq!(profile.peak(&timeline), expected);
            }
            prop_assert_eq!(profile.len(), marks.len() + 1);
        }
    }
}
