//! What the tracer may do, by Linux capability: what it lacks, and what it lets go of once it is attached.

use std::{collections::HashSet, fmt};

use caps::{CapSet, Capability, errors::CapsError};

use super::kernel;

/// A capability and what cannot be done without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    capability: Capability,
    pub without: &'static str,
    /// Nothing can be traced without it.
    pub is_vital: bool,
}

/// All that tracing makes use of, on kernels whose way of attaching needs no more.
const NEEDS: [Need; 5] = [
    Need { capability: Capability::CAP_BPF, without: "no BPF map or program can be made", is_vital: true },
    Need {
        capability: Capability::CAP_PERFMON,
        without: "no program may run at a probe or read memory",
        is_vital: true,
    },
    Need {
        capability: Capability::CAP_SYS_PTRACE,
        without: "processes of other users can not be traced, nor Python functions named in those of your own",
        is_vital: false,
    },
    Need {
        capability: Capability::CAP_DAC_READ_SEARCH,
        without: "of other users' processes the devices that they were given (ASCEND_RT_VISIBLE_DEVICES) are not known, nor \
                  what is in libraries that not everyone may read",
        is_vital: false,
    },
    Need {
        capability: Capability::CAP_CHECKPOINT_RESTORE,
        without: "libraries that were replaced or deleted on disk while a process has them mapped can not be probed",
        is_vital: false,
    },
];

/// perf uprobes, on kernels that reserve them for it.
pub const PERF_UPROBES: Need = Need {
    capability: Capability::CAP_SYS_ADMIN,
    without: "this kernel lets no one attach perf uprobes",
    is_vital: true,
};

impl Need {
    fn is_met_by(self, held: &HashSet<Capability>) -> bool {
        let stronger = match self.capability {
            Capability::CAP_BPF | Capability::CAP_PERFMON | Capability::CAP_CHECKPOINT_RESTORE => {
                Some(Capability::CAP_SYS_ADMIN)
            }
            Capability::CAP_DAC_READ_SEARCH => Some(Capability::CAP_DAC_OVERRIDE),
            _ => None,
        };
        held.contains(&self.capability) || stronger.is_some_and(|stronger| held.contains(&stronger))
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.capability)
    }
}

/// What this thread lacks of all that is needed.
pub fn missing() -> Vec<Need> {
    let held = caps::read(None, CapSet::Effective).unwrap_or_default();
    NEEDS.into_iter().filter(|need| !need.is_met_by(&held)).collect()
}

/// What has to be given to the tracer, once, to run it without being root: all that is needed and `more`.
pub fn how_to_get(more: &[Need]) -> String {
    let names: Vec<_> = NEEDS.iter().chain(more).map(|need| need.to_string().to_lowercase()).collect();
    let program = std::env::current_exe().map(|path| path.display().to_string());
    format!(
        "run as root (sudo), or give it to the program once: sudo setcap {}+ep {}",
        names.join(","),
        program.as_deref().unwrap_or("memscope-trace")
    )
}

/// Why the kernel refuses BPF, and what to do: as far as it can be found out.
pub fn why_refused() -> String {
    let lacking: Vec<_> = missing().into_iter().filter(|need| need.is_vital).collect();
    if !lacking.is_empty() {
        let names: Vec<_> = lacking.iter().map(Need::to_string).collect();
        return format!("the tracer lacks {}: {}", names.join(" and "), how_to_get(&[]));
    }
    if let Some(limit) = kernel::locked_memory_limit() {
        return format!(
            "this kernel counts BPF maps as locked memory, of which a process may have {limit} bytes here, and raising that \
             takes CAP_SYS_RESOURCE: ulimit -l unlimited, LimitMEMLOCK=infinity in a unit of systemd, --ulimit memlock=-1 \
             of docker; or a smaller --ring-size"
        );
    }
    match kernel::lockdown() {
        Some(mode) if mode != "none" => {
            format!("kernel lockdown is on ({mode}), which forbids it: boot with lockdown=none")
        }
        _ => "all capabilities for it are there, so something else forbids it: a security module, or the seccomp profile of a \
              container (run that with --privileged)"
            .to_owned(),
    }
}

/// Why the kernel refuses perf uprobes, and what to do.
pub fn why_perf_refused() -> String {
    let how = how_to_get(&[PERF_UPROBES]);
    match kernel::sysctl("kernel/perf_event_paranoid") {
        Some(level) if level > 2 => format!(
            "kernel.perf_event_paranoid is {level}: above 2, kernels of some distributions keep perf events for \
             CAP_SYS_ADMIN, and those patched since July 2025 keep perf uprobes for it at any level; try sysctl \
             kernel.perf_event_paranoid=2, else {how}"
        ),
        _ => format!(
            "this kernel keeps perf uprobes for CAP_SYS_ADMIN, as those patched since July 2025 do: {how}"
        ),
    }
}

/// Lets go of everything that is of no use once the first sites are attached. What comes later needs the rest: libraries
/// that are loaded, processes that begin. `attaches` says whether sites can still be attached; where they can not, perf
/// uprobes need more.
pub fn drop_surplus(attaches: impl FnOnce() -> bool) {
    if let Err(e) = try_drop(attaches) {
        tracing::debug!("capabilities are kept: {e}");
    }
}

fn try_drop(attaches: impl FnOnce() -> bool) -> Result<(), CapsError> {
    let permitted = caps::read(None, CapSet::Permitted)?;
    let mut kept: HashSet<_> = NEEDS.iter().map(|need| need.capability).collect();
    kept.retain(|capability| permitted.contains(capability));
    // Whoever has a stronger one only in place of what is needed, keeps what there is.
    if NEEDS.iter().any(|need| need.is_met_by(&permitted) && !kept.contains(&need.capability)) {
        return Ok(());
    }
    caps::set(None, CapSet::Effective, &kept)?;
    if permitted.contains(&PERF_UPROBES.capability) && !attaches() {
        kept.insert(PERF_UPROBES.capability);
        caps::set(None, CapSet::Effective, &kept)?;
    }
    keep_only(&kept)
}

/// Of this thread.
fn keep_only(kept: &HashSet<Capability>) -> Result<(), CapsError> {
    caps::clear(None, CapSet::Ambient)?;
    caps::set(None, CapSet::Effective, kept)?;
    caps::set(None, CapSet::Permitted, kept)?;
    caps::set(None, CapSet::Inheritable, &HashSet::new())
}

/// For a thread that does nothing but write files, for root into the directories of whoever called sudo too.
pub fn keep_for_files() {
    let wanted = [Capability::CAP_CHOWN, Capability::CAP_DAC_OVERRIDE, Capability::CAP_FOWNER];
    let kept = caps::read(None, CapSet::Permitted).map(|mut held| {
        held.retain(|capability| wanted.contains(capability));
        held
    });
    if let Err(e) = kept.and_then(|kept| keep_only(&kept)) {
        tracing::debug!("capabilities are kept: {e}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lacking(held: &[Capability]) -> Vec<String> {
        let held = held.iter().copied().collect();
        NEEDS.iter().filter(|need| !need.is_met_by(&held)).map(Need::to_string).collect()
    }

    #[test]
    fn stronger_capabilities_stand_for_weaker_ones() {
        use Capability::{CAP_BPF, CAP_DAC_OVERRIDE, CAP_SYS_ADMIN, CAP_SYS_PTRACE};
        assert_eq!(lacking(&[]).len(), NEEDS.len());
        assert!(lacking(&[CAP_SYS_ADMIN, CAP_SYS_PTRACE, CAP_DAC_OVERRIDE]).is_empty());
        assert_eq!(lacking(&[CAP_SYS_ADMIN, CAP_DAC_OVERRIDE]), ["CAP_SYS_PTRACE"]);
        assert!(!lacking(&[CAP_BPF]).contains(&"CAP_BPF".to_owned()));
        assert!(how_to_get(&[PERF_UPROBES]).contains("cap_checkpoint_restore,cap_sys_admin+ep /"));
    }

    /// On a thread of its own: capabilities are a thread's.
    #[test]
    fn what_is_dropped_is_gone() {
        let held = || caps::read(None, CapSet::Permitted).unwrap_or_default();
        let (before, after) = std::thread::spawn(move || {
            let before = held();
            drop_surplus(|| true);
            (before, held())
        })
        .join()
        .expect("a thread");
        if before.contains(&Capability::CAP_SYS_ADMIN) && before.contains(&Capability::CAP_BPF) {
            assert!(!after.contains(&Capability::CAP_SYS_ADMIN), "{after:?}");
            assert!(after.contains(&Capability::CAP_BPF), "{after:?}");
        }
        assert!(after.is_subset(&before));
        assert_eq!(held(), before, "other threads keep theirs");
    }
}
