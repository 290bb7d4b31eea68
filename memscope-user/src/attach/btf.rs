//! Where the kernel keeps what: offsets of structure members, from the type information that it offers.

use std::{fs, path::Path};

/// Offsets in bytes of members of `task_struct`; `None`: the kernel does not say.
#[derive(Debug, Clone, Copy, Default)]
pub struct Task {
    /// The robust list that glibc registers for each thread.
    pub robust_list: Option<u32>,
    pub exit_code: Option<u32>,
    /// The id of its process.
    pub tgid: Option<u32>,
}

impl Task {
    /// Of the running kernel.
    pub fn of_kernel() -> Self {
        let Ok(bytes) = fs::read(Path::new("/sys/kernel/btf/vmlinux")) else { return Self::default() };
        let offset = |member| member_offset(&bytes, b"task_struct", member);
        Self { robust_list: offset(b"robust_list"), exit_code: offset(b"exit_code"), tgid: offset(b"tgid") }
    }
}

/// Offset in bytes of a member of a structure, by BTF (Documentation/bpf/btf.rst of the kernel).
fn member_offset(btf: &[u8], structure: &[u8], member: &[u8]) -> Option<u32> {
    const MAGIC: u16 = 0xeb9f;
    const STRUCT: u32 = 4;
    let word = |at: usize| Some(u32::from_le_bytes(*btf.get(at..at + 4)?.first_chunk()?));
    if btf.first_chunk().map(|magic| u16::from_le_bytes(*magic)) != Some(MAGIC) {
        return None;
    }
    let header = word(4)? as usize;
    let types = header.checked_add(word(8)? as usize)?;
    let types_end = types.checked_add(word(12)? as usize)?;
    let strings = header.checked_add(word(16)? as usize)?;
    let is_called = |offset: u32, name: &[u8]| {
        let text = strings.checked_add(offset as usize).and_then(|at| btf.get(at..));
        text.and_then(|text| text.strip_prefix(name)).is_some_and(|rest| rest.first() == Some(&0))
    };
    let mut at = types;
    while at < types_end {
        let (name, info) = (word(at)?, word(at + 4)?);
        let (kind, entries) = ((info >> 24) & 0x1f, (info & 0xffff) as usize);
        // With this bit the upper 8 bits of a member's offset are the width of a bit field.
        let mask = if info >> 31 == 1 { 0xff_ffff } else { u32::MAX };
        let body = at + 12;
        if kind == STRUCT && is_called(name, structure) {
            let mut members = (0..entries).map(|n| body + 12 * n);
            let found = members.find(|at| word(*at).is_some_and(|name| is_called(name, member)))?;
            return Some((word(found + 8)? & mask) / 8);
        }
        at = body + body_size(kind, entries)?;
    }
    None
}

/// Bytes that follow the head of a type.
fn body_size(kind: u32, entries: usize) -> Option<usize> {
    Some(match kind {
        // Integers, variables, declaration tags: one word.
        1 | 14 | 17 => 4,
        // Arrays.
        3 => 12,
        // Structures, unions, the variables of a section, 64-bit enumerations.
        4 | 5 | 15 | 19 => 12 * entries,
        // Enumerations, parameters of functions.
        6 | 13 => 8 * entries,
        // Pointers, forwards, typedefs, qualifiers, functions, floats, type tags.
        0 | 2 | 7..=12 | 16 | 18 => 0,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `int`, `struct other { int a; }`, `struct task { int a; int list; }`
    fn sample() -> Vec<u8> {
        let strings = b"\0int\0other\0a\0task\0list\0";
        let types: [u32; 24] = [
            1,
            1 << 24,
            4,
            32, // int
            5,
            4 << 24 | 1,
            4,
            11,
            1,
            0, // other
            13,
            1 << 31 | 4 << 24 | 2,
            8,
            11,
            1,
            0,
            18,
            1,
            32 << 24 | 32, // task, its members with bit-field widths
            1,
            1 << 24,
            4,
            32,
            0,
        ];
        let types = &types[..23];
        let mut bytes = vec![0x9f, 0xeb, 1, 0];
        for word in [24, 0, 4 * types.len() as u32, 4 * types.len() as u32, strings.len() as u32] {
            bytes.extend(word.to_le_bytes());
        }
        types.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes.extend(strings);
        bytes
    }

    #[test]
    fn members_are_found_by_name() {
        let btf = sample();
        assert_eq!(member_offset(&btf, b"task", b"list"), Some(4));
        assert_eq!(member_offset(&btf, b"other", b"a"), Some(0));
        assert_eq!(member_offset(&btf, b"task", b"lis"), None);
        assert_eq!(member_offset(&btf, b"tas", b"list"), None);
        for end in 0..btf.len() {
            // Whatever is cut off: no panic.
            let _ = member_offset(&btf[..end], b"task", b"list");
        }
    }

    #[test]
    fn this_kernel_tells() {
        if Path::new("/sys/kernel/btf/vmlinux").exists() {
            let task = Task::of_kernel();
            let known = |offset: Option<u32>| offset.is_some_and(|offset| offset > 0 && offset < 16384);
            assert!(known(task.robust_list) && known(task.exit_code) && known(task.tgid), "{task:?}");
        }
    }
}
