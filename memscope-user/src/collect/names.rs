//! Names that come again and again, made safe and kept once.

use rustc_hash::FxHashMap;

use crate::{model::Name, text::sanitize};

/// Distinct names kept. A target that makes up more pays with memory of its own turn: the table starts anew.
const MOST: usize = 1 << 16;

#[derive(Debug, Default)]
pub struct Names {
    known: FxHashMap<Box<[u8]>, Name>,
}

impl Names {
    pub fn get(&mut self, bytes: &[u8]) -> Name {
        if let Some(name) = self.known.get(bytes) {
            return name.clone();
        }
        if self.known.len() >= MOST {
            self.known.clear();
        }
        let name: Name = sanitize(bytes).into();
        self.known.insert(bytes.into(), name.clone());
        name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_shared_and_bounded() {
        let mut names = Names::default();
        let first = names.get(b"aclnnAdd");
        assert!(std::sync::Arc::ptr_eq(&first, &names.get(b"aclnnAdd")));
        for i in 0..2 * MOST {
            names.get(i.to_string().as_bytes());
        }
        assert!(names.known.len() <= MOST);
    }
}
