//! The memory of a process, as far as it can be read.

use std::io::IoSliceMut;

use nix::{
    sys::uio::{RemoteIoVec, process_vm_readv},
    unistd::Pid,
};

use crate::model::Tgid;

/// Objects without an address nearby: no one maps the first pages.
const LOWEST: u64 = 4096;

#[derive(Debug, Clone, Copy)]
pub struct Memory(pub Tgid);

impl Memory {
    /// Fills `bytes` from `address` on; `None` unless all of it could be read.
    pub fn read(self, address: u64, bytes: &mut [u8]) -> Option<()> {
        if address < LOWEST {
            return None;
        }
        let remote = RemoteIoVec { base: usize::try_from(address).ok()?, len: bytes.len() };
        let wanted = bytes.len();
        let local = IoSliceMut::new(bytes);
        let read = process_vm_readv(Pid::from_raw(self.0.0 as i32), &mut [local], &[remote]).ok()?;
        (read == wanted).then_some(())
    }

    pub fn bytes<const N: usize>(self, address: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.read(address, &mut bytes)?;
        Some(bytes)
    }

    pub fn word(self, address: u64) -> Option<u64> {
        self.bytes(address).map(u64::from_le_bytes)
    }
}

/// The word at an offset of something that was read.
pub fn word_at(bytes: &[u8], at: u16) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(usize::from(at)..)?.first_chunk()?))
}

pub fn half_at(bytes: &[u8], at: u16) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(usize::from(at)..)?.first_chunk()?))
}
