//! Do the driver's bytes and the pools' add up? What a device's memory is for, as far as it was seen.

use crate::model::{DeviceId, DeviceMemory, Module, Pool};

/// Bytes of one process on one device.
#[derive(Debug, Clone, PartialEq)]
pub struct Reconciliation {
    pub device: Option<DeviceId>,
    /// Taken from the driver since attach and not given back.
    pub driver: u64,
    /// The same by owner module; `None`: not known. Most bytes first.
    pub modules: Vec<(Option<Module>, u64)>,
    /// Pools that take segments from the driver.
    pub segments: Vec<Segments>,
    /// Taken by the program itself or by a library that is not known: part of `driver` that is neither in a
    /// segment nor CANN's.
    pub unexplained: u64,
}

/// One pool's segments. Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segments {
    pub pool: Pool,
    /// Driver bytes since attach.
    pub driver: u64,
    /// The pool's own totals; `None` when it did not say.
    pub reserved: Option<u64>,
    pub allocated: Option<u64>,
    /// What the pool must have reserved before attach. Driver sizes are rounded up, so this may fall short.
    pub before_attach: Option<u64>,
}

impl Reconciliation {
    /// Of the device's memory as it stands, or, when a reset has emptied it, as it stood before.
    pub fn of(memory: &DeviceMemory) -> Self {
        let memory = match &memory.before_reset {
            Some(before) if memory.pool(Pool::Hal).blocks == 0 => before,
            _ => memory,
        };
        let mut modules: Vec<_> =
            memory.driver.modules.iter().copied().filter(|(_, bytes)| *bytes > 0).collect();
        modules.sort_by_key(|(module, bytes)| (std::cmp::Reverse(*bytes), *module));
        let segments: Vec<Segments> = Pool::ALL
            .into_iter()
            .filter(|pool| !matches!(pool, Pool::Hal | Pool::Host) && memory.pool(*pool).was_used())
            .map(|pool| {
                let driver = memory.driver.segments_of(pool);
                let totals = memory.pool(pool).totals;
                Segments {
                    pool,
                    driver,
                    reserved: totals.map(|totals| totals.reserved),
                    allocated: totals.map(|totals| totals.allocated),
                    before_attach: totals.map(|totals| totals.reserved.saturating_sub(driver)),
                }
            })
            .collect();
        let in_segments: u64 = segments.iter().map(|segments| segments.driver).sum();
        let program: u64 = modules
            .iter()
            .filter(|(module, _)| module.is_none_or(Module::belongs_to_program))
            .map(|(_, bytes)| *bytes)
            .sum();
        Reconciliation {
            device: memory.device,
            driver: memory.pool(Pool::Hal).live_bytes,
            modules,
            segments,
            unexplained: program.saturating_sub(in_segments),
        }
    }

    /// All that is known to be taken on the device: since attach, and before.
    pub fn known(&self) -> u64 {
        let before: u64 = self.segments.iter().filter_map(|segments| segments.before_attach).sum();
        self.driver.saturating_add(before)
    }
}
