//! Settings of the simulation, from the environment of the simulated process.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `SIM_CANN_DEVICES` | devices of the host, at most [`MAX_DEVICES`] | 8 |
//! | `ASCEND_RT_VISIBLE_DEVICES` | devices that the process sees, in its order (as in CANN) | all |
//! | `SIM_CANN_HBM_BYTES` | memory of a device, bytes | 64 GiB |
//! | `SIM_CANN_HUGE_FAIL` | 1: allocations on huge pages fail, so "huge page first" asks twice | 0 |
//! | `SIM_CANN_ALLOC_GATE` | allocations of the driver wait for as long as this file exists | none |
//! | `SIM_CANN_STREAM_LAG_US` | time from the submission of a task to its completion, microseconds | 200 |
//! | `SIM_CANN_WORKSPACE` | workspace that a matrix product asks for, bytes | 20 MiB |
//! | `SIM_CANN_FUNC_GUARD` | 1: function handles are `{magic, object}` pairs, as in CANN 9.2 | 0 |
//! | `SIM_CANN_SOC`, `SIM_CANN_VERSION` | chip and CANN version reported | Ascend910B1, by layout |
//! | `HCCL_BUFFSIZE` | size of each of a communicator's two buffers, MiB (as in CANN) | 200 |

use std::str::FromStr;

/// Devices that the simulated driver can hold.
pub const MAX_DEVICES: usize = 16;

/// The value of environment variable `name`, or `default` where it is absent or malformed.
pub fn get<T: FromStr>(name: &str, default: T) -> T {
    std::env::var(name).ok().and_then(|value| value.trim().parse().ok()).unwrap_or(default)
}

/// Whether environment variable `name` is set to 1.
pub fn flag(name: &str) -> bool {
    get(name, 0u8) == 1
}
