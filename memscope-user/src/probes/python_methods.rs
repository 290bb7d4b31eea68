//! The C functions behind a Python module written in C: its `PyMethodDef` table, found by the name of a method.

use std::collections::BTreeMap;

use super::elf::u32_at;
use super::flow::{self, Value};
use super::image::Image;

/// sizeof(PyMethodDef): name, function, flags and padding, documentation.
const ENTRY: i64 = 32;
/// Entries looked at to each side of the one that was found. Tables of hundreds exist.
const MAX_ENTRIES: i64 = 512;
/// Tables looked at. A name is in one, or in a few of different modules.
const MAX_TABLES: usize = 64;
/// Writes to one stack slot that are looked at around the time that counts.
const MAX_REUSE: usize = 8;
/// Longest method name.
const MAX_NAME: usize = 128;
/// Every flag of `methodobject.h` to CPython 3.14: VARARGS to METHOD.
const FLAGS: std::ops::Range<u32> = 1..0x400;

/// Methods by name, with the address of their function.
#[derive(Debug, Default)]
pub struct Methods {
    /// `None`: tables disagree.
    functions: BTreeMap<String, Option<u64>>,
}

impl Methods {
    /// The methods of every table that has one called `anchor`.
    ///
    /// A table is either constant, in data with a relocation for each pointer; or code of a static constructor
    /// writes it, entry by entry, to the stack or the heap.
    pub fn find(image: &Image<'_>, anchor: &str) -> Methods {
        let mut methods = Methods::default();
        let names = image.find_text(anchor);
        for place in image.pointers_to(&names).take(MAX_TABLES) {
            methods.add_around(|n| constant_entry(image, place.checked_add_signed(n)?));
        }
        if methods.functions.is_empty() {
            for function in image.functions_that_name(&names, true) {
                if let Some(trace) = flow::trace(image, function) {
                    methods.add_written(image, &trace, anchor);
                }
            }
        }
        methods
    }

    pub fn get(&self, name: &str) -> Option<u64> {
        self.functions.get(name).copied().flatten()
    }

    /// Adds the entries of a table, from one of them to both sides as far as there are any without a gap.
    /// `entry` tells the one at a distance in bytes.
    fn add_around<'a>(&mut self, entry: impl Fn(i64) -> Option<(&'a str, u64)>) {
        let after = (0..MAX_ENTRIES).map_while(|i| entry(i * ENTRY));
        let before = (1..MAX_ENTRIES).map_while(|i| entry(-i * ENTRY));
        for (name, function) in after.chain(before) {
            let known = self.functions.entry(name.to_owned()).or_insert(Some(function));
            if *known != Some(function) {
                *known = None;
            }
        }
    }

    /// Adds the tables that code writes.
    fn add_written(&mut self, image: &Image<'_>, trace: &flow::Trace, anchor: &str) {
        let written = Written::new(trace);
        let as_flags = |c| u32::try_from(c).ok().filter(|flags| FLAGS.contains(flags));
        let entry = |place: Value, time| {
            let name = written.near(place, time, |c| image.text(c, MAX_NAME))?;
            let function = written.near(place.plus(8), time, |c| image.function_at(c))?;
            written.near(place.plus(16), time, as_flags)?;
            Some((name, function.start))
        };
        let is_anchor = |value| matches!(value, Value::Const(c) if image.text(c, MAX_NAME) == Some(anchor));
        let anchors = (0..).zip(&trace.stores).filter(|(_, store)| is_anchor(store.value));
        for (time, store) in anchors.take(MAX_TABLES) {
            self.add_around(|n| entry(store.to.plus(n), time));
        }
    }
}

/// The table entry at `place`, if it is one.
fn constant_entry<'a>(image: &'a Image<'_>, place: u64) -> Option<(&'a str, u64)> {
    let name = image.text(image.pointer(place)?, MAX_NAME)?;
    let function = image.function_at(image.pointer(place.checked_add(8)?)?)?;
    let flags = u32_at(image.bytes(place.checked_add(16)?)?, 0)?;
    FLAGS.contains(&flags).then_some((name, function.start))
}

/// What a function writes where, in order. A constructor makes one table after the other in the same stack
/// slots, so that what belongs together is what is written close together.
struct Written(BTreeMap<Value, Vec<(usize, Value)>>);

impl Written {
    fn new(trace: &flow::Trace) -> Written {
        let mut written = BTreeMap::<_, Vec<_>>::new();
        for (time, store) in trace.stores.iter().enumerate() {
            // Tables are zeroed before they are filled.
            if store.value != Value::Const(0) {
                written.entry(store.to).or_default().push((time, store.value));
            }
        }
        Written(written)
    }

    /// What is written to `place` as close to `time` as possible, of what makes sense there (`read`). `None` if
    /// something unknown is written closer.
    fn near<T>(&self, place: Value, time: usize, read: impl Fn(u64) -> Option<T>) -> Option<T> {
        let writes = self.0.get(&place)?;
        let (before, after) = writes.split_at(writes.partition_point(|&(t, _)| t < time));
        let (mut before, mut after) = (before.iter().rev().peekable(), after.iter().peekable());
        for _ in 0..MAX_REUSE {
            let distance =
                |write: Option<&&(usize, Value)>| write.map_or(usize::MAX, |(t, _)| t.abs_diff(time));
            let earlier = distance(before.peek()) < distance(after.peek());
            match if earlier { before.next() } else { after.next() }? {
                (_, Value::Const(c)) => match read(*c) {
                    None => {}
                    found => return found,
                },
                _ => return None,
            }
        }
        None
    }
}
