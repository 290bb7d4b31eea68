//! Whether this host is ready for tracing, and what to do where it is not.

use std::{fs, path::Path};

use serde::Serialize;

use crate::{
    attach::{Attacher, Config, NativeStackConfig, StackConfig, kernel::Features, process::Proc},
    model::Tgid,
    probes::catalogue::is_ascend_library,
    trace::wanted_libraries,
};

/// One thing that was looked at.
#[derive(Debug, Clone, Serialize)]
pub struct Line {
    pub subject: &'static str,
    pub state: State,
    pub finding: String,
    /// What to do about it.
    pub advice: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Good,
    /// Tracing works, with less comfort or at a higher cost.
    Limited,
    /// Tracing does not work.
    Bad,
}

impl Line {
    fn good(subject: &'static str, finding: impl Into<String>) -> Self {
        Self { subject, state: State::Good, finding: finding.into(), advice: None }
    }

    fn limited(subject: &'static str, finding: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { subject, state: State::Limited, finding: finding.into(), advice: Some(advice.into()) }
    }

    fn bad(subject: &'static str, finding: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { subject, state: State::Bad, finding: finding.into(), advice: Some(advice.into()) }
    }
}

/// Looks at everything that tracing depends on. Attaches nothing to any process.
pub fn run() -> Vec<Line> {
    let features = Features::probe();
    let mut lines = vec![kernel(), privileges()];
    lines.extend(sysctls());
    lines.extend(lockdown());
    lines.push(programs());
    lines.push(mechanism(features));
    lines.push(processes());
    lines
}

fn kernel() -> Line {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    Line::good("kernel", format!("{} {}", release.trim(), std::env::consts::ARCH))
}

/// Capabilities by number (linux/capability.h).
const CAPABILITIES: [(u32, &str); 6] = [
    (19, "CAP_SYS_PTRACE"),
    (21, "CAP_SYS_ADMIN"),
    (24, "CAP_SYS_RESOURCE"),
    (38, "CAP_PERFMON"),
    (39, "CAP_BPF"),
    (40, "CAP_CHECKPOINT_RESTORE"),
];

fn privileges() -> Line {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status
        .lines()
        .find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok())
        .unwrap_or(0);
    let has = |name: &str| CAPABILITIES.iter().any(|(bit, n)| *n == name && effective >> bit & 1 == 1);
    let held: Vec<_> = CAPABILITIES.iter().map(|(_, name)| *name).filter(|name| has(name)).collect();
    if has("CAP_SYS_ADMIN") && has("CAP_SYS_PTRACE") {
        return Line::good("privileges", "all that is needed");
    }
    let missing: Vec<_> =
        ["CAP_BPF", "CAP_PERFMON", "CAP_SYS_PTRACE"].into_iter().filter(|name| !has(name)).collect();
    let held = if held.is_empty() {
        "none of the capabilities that tracing needs".to_owned()
    } else {
        held.join(", ")
    };
    if missing.is_empty() {
        return Line::limited(
            "privileges",
            held,
            "enough where the kernel has uprobe_multi; else CAP_SYS_ADMIN is needed as well",
        );
    }
    Line::bad("privileges", held, format!("run with sudo, or give it {}", missing.join(", ")))
}

fn sysctls() -> Vec<Line> {
    let read = |name: &str| -> Option<i64> {
        fs::read_to_string(Path::new("/proc/sys").join(name)).ok()?.trim().parse().ok()
    };
    let root = nix::unistd::geteuid().is_root();
    let mut lines = Vec::new();
    if let Some(level) = read("kernel/perf_event_paranoid") {
        let finding = level.to_string();
        lines.push(if level > 2 && !root {
            Line::limited(
                "perf_event_paranoid",
                finding,
                "above 2, some distributions refuse CAP_PERFMON: run as root, or `sysctl kernel.perf_event_paranoid=2`",
            )
        } else {
            Line::good("perf_event_paranoid", finding)
        });
    }
    if let Some(level) = read("kernel/unprivileged_bpf_disabled") {
        lines.push(Line::good(
            "unprivileged_bpf",
            if level == 0 { "allowed" } else { "not allowed (fine: the tracer is privileged)" },
        ));
    }
    if let Some(scope) = read("kernel/yama/ptrace_scope") {
        lines.push(if scope >= 3 {
            Line::limited(
                "yama ptrace_scope",
                "3",
                "`-- COMMAND` can not hold its command at the start; -p and -a work",
            )
        } else {
            Line::good("yama ptrace_scope", scope.to_string())
        });
    }
    lines
}

fn lockdown() -> Option<Line> {
    let modes = fs::read_to_string("/sys/kernel/security/lockdown").ok()?;
    let mode = modes.split_once('[')?.1.split_once(']')?.0.to_owned();
    Some(match mode.as_str() {
        "confidentiality" => Line::bad(
            "lockdown",
            mode,
            "in this mode the kernel lets no BPF program read memory; boot with lockdown=integrity or none",
        ),
        _ => Line::good("lockdown", mode),
    })
}

fn programs() -> Line {
    let config = Config {
        ring_bytes: 64 * 1024,
        classes: Default::default(),
        mechanism: None,
        empty: false,
        stacks: Some(StackConfig::default()),
        native_stacks: Some(NativeStackConfig::default()),
        in_flight: None,
    };
    match Attacher::new(config) {
        Ok((attacher, _)) => match (attacher.stacks_refused(), attacher.native_stacks_refused()) {
            (None, None) => Line::good("BPF programs", "load, with ring buffer, Python and native stacks"),
            (None, Some(why)) => Line::limited(
                "BPF programs",
                "load, with ring buffer and Python stacks; those that take native stacks do not",
                format!("--call-stack c will bring none: {why}"),
            ),
            (Some(why), _) => Line::limited(
                "BPF programs",
                "load, with ring buffer; those that take Python stacks do not",
                format!("reports will name operators, but no lines of your code: {why}"),
            ),
        },
        Err(e) => {
            Line::bad("BPF programs", e.to_string(), "see the lines above; the ring buffer needs kernel 5.8")
        }
    }
}

fn mechanism(features: Features) -> Line {
    match features {
        Features { uprobe_multi: true, uprobe_multi_pid: true, .. } => {
            Line::good("attaching", "uprobe_multi")
        }
        Features { uprobe_multi: true, .. } => Line::limited(
            "attaching",
            "uprobe_multi, whose PID filter is wrong in this kernel",
            "other processes with the same libraries pay for a probe hit too (no wrong records); 6.6.35, 6.9.5 and \
             6.10 have the fix",
        ),
        Features { perf_uprobe: true, attach_cookie, .. } => Line::limited(
            "attaching",
            if attach_cookie { "perf events with cookies" } else { "perf events, one program a site" },
            "detaching takes about 0.1 s a site, after the report; kernels from 6.6 on do better",
        ),
        _ => Line::bad(
            "attaching",
            "neither uprobe_multi nor perf uprobes",
            "the kernel must be built with CONFIG_UPROBE_EVENTS",
        ),
    }
}

fn processes() -> Line {
    let proc = Proc::default();
    let mut found: Vec<Tgid> = proc
        .processes()
        .into_iter()
        .filter(|tgid| {
            crate::attach::process::Process::open(&proc, *tgid)
                .and_then(|process| process.mapped_files())
                .is_ok_and(|files| files.iter().any(|file| is_ascend_library(&file.path)))
        })
        .collect();
    found.sort_unstable();
    if found.is_empty() {
        return Line::limited(
            "Ascend processes",
            "none",
            format!("nothing to trace now: no process that may be read has one of {}", wanted_libraries()),
        );
    }
    let list: Vec<_> = found
        .iter()
        .take(20)
        .map(|tgid| format!("{tgid} ({})", crate::attach::process::command_line(&proc, *tgid)))
        .collect();
    Line::good("Ascend processes", list.join("; "))
}
