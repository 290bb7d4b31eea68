//! Who asked the driver for memory.

use std::fmt;

/// The owner module of a driver allocation: the top byte of `halMemAlloc`'s flag word, `module_id` of
/// `halMemCreate`'s properties. Numbers and names are those of the driver's `common_pkg.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Module(pub u8);

impl Module {
    pub const HCCL: Module = Module(3);
    pub const DVPP: Module = Module(6);
    pub const RUNTIME: Module = Module(7);
    /// What `aclrtMalloc*` always passes: memory of the program and of the frameworks' pools.
    pub const APP: Module = Module(33);
    pub const GE: Module = Module(45);
    pub const ASCENDCL: Module = Module(48);

    /// Whether the memory is the program's to free. The rest (runtime, profiling, AI CPU, ...) is taken and
    /// given back by CANN itself, and left to the driver when the process ends.
    pub fn belongs_to_program(self) -> bool {
        matches!(self, Module::APP | Module::HCCL | Module::DVPP | Module::GE | Module::ASCENDCL)
    }

    pub fn name(self) -> Option<&'static str> {
        NAMES.get(usize::from(self.0)).copied()
    }

    pub fn named(name: &str) -> Option<Module> {
        let at = NAMES.iter().position(|known| *known == name)?;
        u8::try_from(at).ok().map(Module)
    }
}

impl fmt::Display for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "module {}", self.0),
        }
    }
}

#[rustfmt::skip]
const NAMES: [&str; 75] = [
    "SLOG", "IDEDD", "IDEDH", "HCCL", "FMK", "HIAIENGINE", "DVPP", "RUNTIME", "CCE", "HDC", "DRV", "MDCFUSION",
    "MDCLOCATION", "MDCPERCEPTION", "MDCFSM", "MDCCOMMON", "MDCMONITOR", "MDCBSWP", "MDCDEFAULT", "MDCSC", "MDCPNC",
    "MLL", "DEVMM", "KERNEL", "LIBMEDIA", "CCECPU", "ASCENDDK", "ROS", "HCCP", "ROCE", "TEFUSION", "PROFILING", "DP",
    "APP", "TS", "TSDUMP", "AICPU", "LP", "TDT", "FE", "MD", "MB", "ME", "IMU", "IMP", "GE", "MDCFUSA", "CAMERA",
    "ASCENDCL", "TEEOS", "ISP", "SIS", "HSM", "DSS", "PROCMGR", "BBOX", "AIVECTOR", "TBE", "FV", "MDCMAP", "TUNE",
    "HSS", "FFTS", "OP", "UDF", "HICAID", "TSYNC", "AUDIO", "TPRT", "ASCENDCKERNEL", "ASYS", "ATRACE", "RTC",
    "SYSMONITOR", "AML",
];

#[cfg(test)]
mod tests {
    use super::Module;

    #[test]
    fn names_stand_at_their_numbers() {
        for (module, name) in [
            (Module::HCCL, "HCCL"),
            (Module::DVPP, "DVPP"),
            (Module::RUNTIME, "RUNTIME"),
            (Module(8), "CCE"),
            (Module(31), "PROFILING"),
            (Module::APP, "APP"),
            (Module(36), "AICPU"),
            (Module::GE, "GE"),
            (Module::ASCENDCL, "ASCENDCL"),
            (Module(57), "TBE"),
            (Module(62), "FFTS"),
            (Module(63), "OP"),
            (Module(200), "module 200"),
        ] {
            assert_eq!(module.to_string(), name);
            assert_eq!(Module::named(name), module.name().map(|_| module));
        }
    }
}
