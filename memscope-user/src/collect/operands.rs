//! Which operator a tensor is given to, and what the operator does with it.
//!
//! An operator's tensors are described one by one, its last argument first (as GCC evaluates the arguments of a call), by
//! the thread that then names the operator. Where the operator is known from before, only their addresses are told, in the
//! order of the arguments; where it turns out not to be, their
//! addresses come first and then all of them are described.

use crate::model::{Access, AccessKind, DevicePtr, Name};

/// Tensors that may wait for their operator's name.
const MOST: usize = 4096;

/// The tensors of one thread's next operator.
#[derive(Debug, Default)]
pub struct Operands {
    waiting: Vec<(DevicePtr, u64)>,
    /// Of those, the first ones: addresses only.
    told: usize,
}

impl Operands {
    /// A tensor is described: `bytes` at `address`.
    pub fn describe(&mut self, address: u64, bytes: u64) {
        if self.told > 0 {
            self.waiting.clear();
            self.told = 0;
        }
        self.push(address, bytes);
    }

    /// The address of a tensor is told.
    pub fn tell(&mut self, address: u64) {
        if self.waiting.len() != self.told {
            return;
        }
        self.push(address, 0);
        self.told = self.waiting.len();
    }

    fn push(&mut self, address: u64, bytes: u64) {
        if address != 0 && self.waiting.len() < MOST {
            self.waiting.push((DevicePtr(address), bytes));
        }
    }

    /// The operator is named, and takes them all.
    pub fn take(&mut self, op: &Name, accesses: &mut Vec<Access>) {
        if self.told == 0 {
            self.waiting.reverse();
        }
        let count = self.waiting.len();
        let roles = Roles::of(op);
        accesses.extend(self.waiting.drain(..).enumerate().map(|(index, (ptr, size))| Access {
            pool: None,
            ptr,
            size,
            kind: roles.of_operand(index, count),
            op: Some(op.clone()),
        }));
        self.told = 0;
    }
}

/// What an operator's name says of its arguments, by the conventions of aclnn: inputs come first, outputs last, and what
/// works in place changes its first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Roles {
    InPlace,
    /// One output or more.
    OutputLast,
    Unknown,
}

impl Roles {
    fn of(op: &str) -> Self {
        match op.strip_prefix("aclnn") {
            Some(rest) if rest.starts_with("Inplace") => Roles::InPlace,
            // Lists of tensors, and states that are changed in the middle.
            Some(rest) if rest.starts_with("Foreach") || rest.starts_with("Apply") => Roles::Unknown,
            Some(_) => Roles::OutputLast,
            None => Roles::Unknown,
        }
    }

    fn of_operand(self, index: usize, count: usize) -> AccessKind {
        match self {
            Roles::InPlace if index == 0 => AccessKind::Write,
            Roles::InPlace => AccessKind::Read,
            Roles::OutputLast if index + 1 == count => AccessKind::Write,
            // An output of several, perhaps.
            Roles::OutputLast if index > 0 && index + 2 >= count && count > 3 => AccessKind::Unknown,
            Roles::OutputLast => AccessKind::Read,
            Roles::Unknown => AccessKind::Unknown,
        }
    }
}

/// Bytes of `elements` of an `aclDataType`. What is not known counts as bytes.
pub fn tensor_bytes(element_type: u32, elements: u64) -> u64 {
    let each = match element_type {
        0 | 3 | 8 | 33 => 4,
        1 | 6 | 7 | 27 => 2,
        9..=11 | 16 => 8,
        17 => 16,
        // Four bits each.
        29 => return elements.div_ceil(2),
        30 => return elements.div_ceil(8),
        _ => 1,
    };
    elements.saturating_mul(each)
}

/// Bytes of `elements` of an `HcclDataType`.
pub fn collective_bytes(element_type: u32, elements: u64) -> u64 {
    let each = match element_type {
        1 | 3 | 8 | 11 => 2,
        2 | 4 | 9 => 4,
        5 | 6 | 10 => 8,
        12 => 16,
        _ => 1,
    };
    elements.saturating_mul(each)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(operands: &mut Operands, op: &str) -> Vec<(u64, u64, AccessKind)> {
        let mut accesses = Vec::new();
        operands.take(&Name::from(op), &mut accesses);
        accesses.into_iter().map(|access| (access.ptr.0, access.size, access.kind)).collect()
    }

    use AccessKind::{Read, Unknown, Write};

    #[test]
    fn an_operator_takes_what_was_described_since_the_last() {
        let mut operands = Operands::default();
        operands.describe(0x20, 16);
        operands.describe(0, 8);
        operands.describe(0x10, 8);
        assert_eq!(taken(&mut operands, "aclnnAbs"), [(0x10, 8, Read), (0x20, 16, Write)]);
        operands.describe(0x10, 16);
        operands.describe(0x20, 16);
        assert_eq!(taken(&mut operands, "aclnnInplaceAdd"), [(0x20, 16, Write), (0x10, 16, Read)]);
        assert_eq!(taken(&mut operands, "aclnnInplaceAdd"), []);
        operands.describe(0x20, 16);
        assert_eq!(taken(&mut operands, "HcclAllReduce"), [(0x20, 16, Unknown)]);
    }

    #[test]
    fn addresses_stand_in_for_descriptions_and_are_not_counted_beside_them() {
        let mut operands = Operands::default();
        operands.tell(0x10);
        operands.tell(0x20);
        assert_eq!(taken(&mut operands, "aclnnAbs"), [(0x10, 0, Read), (0x20, 0, Write)]);
        operands.tell(0x10);
        operands.tell(0x20);
        operands.describe(0x20, 4);
        operands.describe(0x10, 4);
        assert_eq!(taken(&mut operands, "aclnnAbs"), [(0x10, 4, Read), (0x20, 4, Write)]);
    }

    #[test]
    fn what_is_never_taken_does_not_fill_memory() {
        let mut operands = Operands::default();
        (1..=3 * MOST as u64).for_each(|address| operands.describe(address, 1));
        assert_eq!(operands.waiting.len(), MOST);
    }

    #[test]
    fn sizes_are_in_bytes() {
        assert_eq!([0, 1, 2, 9, 12, 27, 29].map(|t| tensor_bytes(t, 3)), [12, 6, 3, 24, 3, 6, 2]);
        assert_eq!(tensor_bytes(9, u64::MAX), u64::MAX);
        assert_eq!([0, 3, 4, 5, 7, 11].map(|t| collective_bytes(t, 3)), [3, 6, 12, 24, 3, 6]);
    }
}
