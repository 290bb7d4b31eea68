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
    pub fn of(memory: &DeviceMemory) -> Self {
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
        let in_segments = sum(segments.iter().map(|segments| segments.driver));
        let program = sum(modules
            .iter()
            .filter(|(module, _)| module.is_none_or(Module::belongs_to_program))
            .map(|(_, bytes)| *bytes));
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
        let before = sum(self.segments.iter().filter_map(|segments| segments.before_attach));
        self.driver.saturating_add(before)
    }
}

fn sum(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::{MAIN, MIB, PID, Script};
    use crate::model::{EventKind, Ledger};

    fn reconciled(script: &Script) -> Reconciliation {
        let mut ledger = Ledger::default();
        for event in &script.events {
            ledger.apply(event);
        }
        let memory = ledger.process(PID).and_then(|process| process.device(Some(DeviceId(0))));
        Reconciliation::of(memory.unwrap_or_else(|| panic!("no device")).while_used())
    }

    /// Attached late: 30 MiB of the pool's are from before; then the pool takes 20 MiB more.
    fn script() -> Script {
        let mut script = Script::new();
        script.hal(0x100_0000, 7 * MIB, Module::RUNTIME).hal(0x200_0000, 2 * MIB, Module::APP);
        script.alloc_in(Pool::Pta, 0, 0x10, MIB, Some((8 * MIB, 30 * MIB)));
        script.hal(0x4000_0000, 20 * MIB, Module::APP);
        script.alloc_in(Pool::Pta, 0, 0x4000_0000, 12 * MIB, Some((20 * MIB, 50 * MIB)));
        script
    }

    #[test]
    fn the_drivers_bytes_are_explained_by_pools_and_modules() {
        let found = reconciled(&script());
        assert_eq!(found.driver, 29 * MIB);
        assert_eq!(found.modules, [(Some(Module::APP), 22 * MIB), (Some(Module::RUNTIME), 7 * MIB)]);
        assert_eq!(
            found.segments,
            [Segments {
                pool: Pool::Pta,
                driver: 20 * MIB,
                reserved: Some(50 * MIB),
                allocated: Some(20 * MIB),
                before_attach: Some(30 * MIB),
            }]
        );
        assert_eq!(found.unexplained, 2 * MIB, "the program's own 2 MiB");
        assert_eq!(found.known(), 59 * MIB);
    }

    #[test]
    fn a_reset_device_is_told_as_it_was() {
        let mut script = script();
        let before = reconciled(&script);
        script.push(MAIN, EventKind::DeviceReset { device: DeviceId(0) });
        script.push(MAIN, EventKind::DeviceReset { device: DeviceId(0) });
        assert_eq!(reconciled(&script), before);
        script.hal(0x100, MIB, Module::APP);
        assert_eq!(reconciled(&script).driver, MIB, "until it is in use again");
    }
}
