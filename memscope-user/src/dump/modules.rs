//! Names of the modules that own driver allocations.

/// Indexed by the module number of a `halMemAlloc` flag word or a `drv_mem_prop`.
const NAMES: [&str; 75] = [
    "SLOG",
    "IDEDD",
    "IDEDH",
    "HCCL",
    "FMK",
    "HIAIENGINE",
    "DVPP",
    "RUNTIME",
    "CCE",
    "HDC",
    "DRV",
    "MDCFUSION",
    "MDCLOCATION",
    "MDCPERCEPTION",
    "MDCFSM",
    "MDCCOMMON",
    "MDCMONITOR",
    "MDCBSWP",
    "MDCDEFAULT",
    "MDCSC",
    "MDCPNC",
    "MLL",
    "DEVMM",
    "KERNEL",
    "LIBMEDIA",
    "CCECPU",
    "ASCENDDK",
    "ROS",
    "HCCP",
    "ROCE",
    "TEFUSION",
    "PROFILING",
    "DP",
    "APP",
    "TS",
    "TSDUMP",
    "AICPU",
    "LP",
    "TDT",
    "FE",
    "MD",
    "MB",
    "ME",
    "IMU",
    "IMP",
    "GE",
    "MDCFUSA",
    "CAMERA",
    "ASCENDCL",
    "TEEOS",
    "ISP",
    "SIS",
    "HSM",
    "DSS",
    "PROCMGR",
    "BBOX",
    "AIVECTOR",
    "TBE",
    "FV",
    "MDCMAP",
    "TUNE",
    "HSS",
    "FFTS",
    "OP",
    "UDF",
    "HICAID",
    "TSYNC",
    "AUDIO",
    "TPRT",
    "ASCENDCKERNEL",
    "ASYS",
    "ATRACE",
    "RTC",
    "SYSMONITOR",
    "AML",
];

/// The name of a driver module; `UNKNOWN` for a number without one.
pub fn module_name(module: u8) -> &'static str {
    NAMES.get(usize::from(module)).copied().unwrap_or("UNKNOWN")
}

/// The number of the module of that name.
pub fn module_id(name: &str) -> Option<u8> {
    NAMES.iter().position(|known| *known == name).and_then(|index| u8::try_from(index).ok())
}

#[cfg(test)]
mod tests {
    use super::{module_id, module_name};

    #[test]
    fn known_numbers_have_their_names() {
        for (number, name) in [
            (0, "SLOG"),
            (3, "HCCL"),
            (7, "RUNTIME"),
            (22, "DEVMM"),
            (33, "APP"),
            (45, "GE"),
            (48, "ASCENDCL"),
        ]
        .into_iter()
        .chain([
            (55, "BBOX"),
            (57, "TBE"),
            (62, "FFTS"),
            (63, "OP"),
            (69, "ASCENDCKERNEL"),
            (74, "AML"),
        ]) {
            assert_eq!(module_name(number), name);
            assert_eq!(module_id(name), Some(number));
        }
        assert_eq!(module_name(75), "UNKNOWN");
        assert_eq!(module_id("UNKNOWN"), None);
    }
}
