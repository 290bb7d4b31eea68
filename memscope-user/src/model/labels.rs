//! Labels that the program gives what it allocates: the texts of the ranges that it is in.

use super::{Name, Tid};

/// Open ranges of a process that are remembered. Of a program that ends none, the first ones.
const MOST: usize = 1024;

/// Ranges within each other that make a label.
const DEPTH: usize = 8;

#[derive(Debug, Default)]
pub(super) struct Labels(Vec<Open>);

#[derive(Debug)]
struct Open {
    range: u64,
    tid: Tid,
    /// The texts of the thread's ranges from the outermost to this one, joined with `@`.
    path: Name,
    depth: usize,
}

impl Labels {
    pub fn begin(&mut self, tid: Tid, range: u64, text: &Name) {
        if self.0.len() >= MOST {
            return;
        }
        // What separates labels must not be in one.
        let text = text.replace('@', "_");
        let (path, depth) = match self.innermost(tid) {
            Some(outer) if outer.depth >= DEPTH => (outer.path.clone(), outer.depth),
            Some(outer) => (format!("{}@{text}", outer.path).into(), outer.depth + 1),
            None => (text.into(), 1),
        };
        self.0.push(Open { range, tid, path, depth });
    }

    pub fn end(&mut self, range: u64) {
        self.0.retain(|open| open.range != range);
    }

    /// Of what a thread allocates now. A thread that is in no range itself works for the one that began a range last:
    /// so backward passes on threads of their own get the labels of the thread that waits for them.
    pub fn of(&self, tid: Tid) -> Option<&Name> {
        self.innermost(tid).or(self.0.last()).map(|open| &open.path)
    }

    fn innermost(&self, tid: Tid) -> Option<&Open> {
        self.0.iter().rev().find(|open| open.tid == tid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_nest_by_thread_and_helpers_get_the_waiting_threads() {
        const MAIN: Tid = Tid(1);
        const AUTOGRAD: Tid = Tid(2);
        let mut labels = Labels::default();
        let of = |labels: &Labels, tid| labels.of(tid).map(|label| label.to_string());
        assert_eq!(of(&labels, MAIN), None);
        labels.begin(MAIN, 1, &"epoch".into());
        labels.begin(MAIN, 2, &"back@ward".into());
        assert_eq!(of(&labels, MAIN).as_deref(), Some("epoch@back_ward"));
        assert_eq!(of(&labels, AUTOGRAD).as_deref(), Some("epoch@back_ward"));
        labels.begin(AUTOGRAD, 3, &"hook".into());
        assert_eq!(of(&labels, AUTOGRAD).as_deref(), Some("hook"));
        labels.end(2);
        assert_eq!(of(&labels, MAIN).as_deref(), Some("epoch"));
        labels.end(3);
        labels.end(1);
        assert_eq!(of(&labels, MAIN), None);
    }

    #[test]
    fn depth_and_number_are_bounded() {
        let mut labels = Labels::default();
        (0..3 * MOST as u64).for_each(|range| labels.begin(Tid(1), range, &"x".into()));
        assert_eq!(labels.0.len(), MOST);
        assert_eq!(labels.of(Tid(1)).map(|label| label.split('@').count()), Some(DEPTH));
    }
}
