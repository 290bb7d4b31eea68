//! The memory of a process, as far as it can be read.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, IoSliceMut},
    os::unix::fs::FileExt,
};

use nix::{
    sys::uio::{RemoteIoVec, process_vm_readv},
    unistd::Pid,
};

use crate::{attach::proc::Proc, model::Tgid};

/// Objects without an address nearby: no one maps the first pages.
const LOWEST: u64 = 4096;

/// What can be read as a process's memory.
pub trait Read {
    /// Fills `bytes` from `address` on; `None` unless all of it could be read.
    fn read(&self, address: u64, bytes: &mut [u8]) -> Option<()>;

    fn bytes<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.read(address, &mut bytes)?;
        Some(bytes)
    }

    fn word(&self, address: u64) -> Option<u64> {
        self.bytes(address).map(u64::from_le_bytes)
    }
}

/// A process's memory as it is now.
#[derive(Debug)]
pub enum Memory {
    /// Of a process that our own PID namespace has: `process_vm_readv` asks for no rights to its files.
    Numbered(Tgid),
    /// `/proc/PID/mem`, of the program that it runs now.
    Opened(File),
}

impl Memory {
    pub fn of(proc: &Proc, tgid: Tgid) -> io::Result<Self> {
        match proc.has_own_numbers() {
            true => Ok(Self::Numbered(tgid)),
            false => File::open(proc.path(tgid, "mem")).map(Self::Opened),
        }
    }

    /// Reads what there is from `address` on, and says how much; `None`: nothing.
    pub fn read_some(&self, address: u64, bytes: &mut [u8]) -> Option<usize> {
        if address < LOWEST {
            return None;
        }
        match self {
            Self::Numbered(tgid) => {
                let remote = RemoteIoVec { base: usize::try_from(address).ok()?, len: bytes.len() };
                process_vm_readv(Pid::from_raw(tgid.0 as i32), &mut [IoSliceMut::new(bytes)], &[remote]).ok()
            }
            Self::Opened(memory) => memory.read_at(bytes, address).ok(),
        }
    }
}

impl Read for Memory {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Option<()> {
        let wanted = bytes.len();
        (self.read_some(address, bytes)? == wanted).then_some(())
    }
}

/// Memory as it was when a stack was taken: the pieces that the BPF programs have copied, by their addresses.
#[derive(Debug, Default)]
pub struct Copied(BTreeMap<u64, Vec<u8>>);

impl Copied {
    pub fn add(&mut self, address: u64, bytes: &[u8]) {
        self.0.insert(address, bytes.to_vec());
    }
}

impl Read for Copied {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Option<()> {
        let mut done = 0;
        while done < bytes.len() {
            let at = address.checked_add(done as u64)?;
            let (from, piece) = self.0.range(..=at).next_back()?;
            let rest = piece.get(usize::try_from(at - from).ok()?..).filter(|rest| !rest.is_empty())?;
            let taken = rest.len().min(bytes.len() - done);
            bytes[done..done + taken].copy_from_slice(&rest[..taken]);
            done += taken;
        }
        Some(())
    }
}

/// The word at an offset of something that was read.
pub fn word_at(bytes: &[u8], at: u16) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(usize::from(at)..)?.first_chunk()?))
}

pub fn half_at(bytes: &[u8], at: u16) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(usize::from(at)..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_copied_is_read_across_pieces_and_nothing_else() {
        let mut copied = Copied::default();
        copied.add(1000, b"abcd");
        copied.add(1004, b"efgh");
        assert_eq!(copied.bytes(1000), Some(*b"abcdefgh"));
        assert_eq!(copied.bytes(1003), Some(*b"de"));
        assert_eq!(copied.bytes::<2>(1007), None, "it ends in the middle");
        assert_eq!(copied.bytes::<1>(999), None);
        assert_eq!(copied.bytes::<2>(u64::MAX), None);
    }
}
