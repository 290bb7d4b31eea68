//! Whether this host is ready for tracing, and what to do where it is not.

use std::fs;

use serde::Serialize;

use crate::{
    attach::{
        self, Attacher, Config, NativeStackConfig, StackConfig,
        cost::{self, Effort, Price, Prices},
        kernel::{self, Features},
        privilege,
        proc::Proc,
    },
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
pub fn run(proc: &Proc) -> Vec<Line> {
    // As a trace does first.
    attach::raise_limits();
    let features = Features::probe();
    let mut lines = vec![release(), privileges()];
    lines.extend(sysctls());
    lines.extend(lockdown());
    lines.push(programs());
    lines.push(mechanism(features));
    lines.push(numbers(proc));
    lines.push(processes(proc));
    lines
}

/// What a hit of a probe costs.
pub fn bench(proc: &Proc) -> (Line, Option<Prices>) {
    let subject = "cost of a hit";
    match cost::measure(proc, None, Effort::THOROUGH) {
        Ok((mechanism, prices)) => {
            let price = |price: Price| {
                format!("{:.0} ns ({:.0} to {:.0})", price.median_ns, price.lowest_ns, price.highest_ns)
            };
            let Prices { entry, with_return } = prices;
            let text = format!(
                "{} at entry, {} at entry and return; with its record, without a stack; {}",
                price(entry),
                price(with_return),
                mechanism.name()
            );
            (Line::good(subject, text), Some(prices))
        }
        Err(e) => (Line::bad(subject, e.to_string(), "see the lines above"), None),
    }
}

fn release() -> Line {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    Line::good("kernel", format!("{} {}", release.trim(), std::env::consts::ARCH))
}

fn privileges() -> Line {
    let subject = "privileges";
    let missing = privilege::missing();
    if missing.is_empty() {
        return Line::good(subject, "all that is needed");
    }
    let each: Vec<_> = missing.iter().map(|need| format!("lacks {need}: {}", need.without)).collect();
    let (finding, advice) = (each.join("; "), privilege::how_to_get(&[]));
    match missing.iter().any(|need| need.is_vital) {
        true => Line::bad(subject, finding, advice),
        false => Line::limited(subject, finding, advice),
    }
}

/// Whether nothing can be tried for want of privileges.
fn lacks_vital() -> bool {
    privilege::missing().iter().any(|need| need.is_vital)
}

fn sysctls() -> Vec<Line> {
    let mut lines = Vec::new();
    // What it means for perf events is found by trying (see `mechanism`).
    if let Some(level) = kernel::sysctl("kernel/perf_event_paranoid") {
        lines.push(Line::good("perf_event_paranoid", level.to_string()));
    }
    if let Some(level) = kernel::sysctl("kernel/unprivileged_bpf_disabled") {
        let finding = match level {
            0 => "0: allowed",
            1 => "1: not allowed, until the next boot (fine: CAP_BPF is not subject to it)",
            _ => "2: not allowed (fine: CAP_BPF is not subject to it)",
        };
        lines.push(Line::good("unprivileged_bpf", finding));
    }
    if let Some(scope) = kernel::sysctl("kernel/yama/ptrace_scope") {
        lines.push(if scope >= 3 {
            Line::limited(
                "yama ptrace_scope",
                "3: no process may be read or held by another, whoever asks",
                "there are no names of Python functions, and `-- COMMAND` can not hold its command at the start; -p and \
                 -a work. Only a boot resets it",
            )
        } else {
            Line::good("yama ptrace_scope", scope.to_string())
        });
    }
    // Without the privileges maps are refused whatever the limit.
    if !lacks_vital()
        && let Some(limit) = kernel::locked_memory_limit()
    {
        lines.push(Line::limited(
            "locked memory",
            format!("{limit} bytes, and this kernel counts BPF maps among it"),
            "give it CAP_SYS_RESOURCE too, with which it raises the limit itself, or ulimit -l unlimited",
        ));
    }
    lines
}

fn lockdown() -> Option<Line> {
    let mode = kernel::lockdown()?;
    Some(match mode.as_str() {
        "confidentiality" => Line::limited(
            "lockdown",
            "confidentiality: no BPF program may read the kernel's memory",
            "memory of processes is not affected; what it costs is said of BPF programs below. lockdown=integrity lifts it",
        ),
        _ => Line::good("lockdown", mode),
    })
}

fn programs() -> Line {
    let subject = "BPF programs";
    if lacks_vital() {
        return Line::bad(
            subject,
            "not known: whether they load can only be tried with the privileges that are missing",
            "see what is said of privileges, and check again",
        );
    }
    let config = Config {
        ring_bytes: 64 * 1024,
        classes: Default::default(),
        mechanism: None,
        empty: false,
        stacks: Some(StackConfig::default()),
        native_stacks: Some(NativeStackConfig::default()),
        call_threads: None,
        own_numbers: true,
    };
    match Attacher::new(config) {
        Ok((attacher, _)) => match (attacher.stacks_refused(), attacher.native_stacks_refused()) {
            (None, None) if attacher.has_late_stacks() => Line::limited(
                subject,
                "load, with ring buffer, Python and native stacks",
                "Python stacks of a thread are there from a second after its beginning on: the kernel does not describe its \
                 structures (BTF), or lets no program read them (lockdown)",
            ),
            (None, None) => Line::good(subject, "load, with ring buffer, Python and native stacks"),
            (None, Some(why)) => Line::limited(
                subject,
                "load, with ring buffer and Python stacks; those that take native stacks do not",
                format!("--call-stack c will bring none: {why}"),
            ),
            (Some(why), _) => Line::limited(
                subject,
                "load, with ring buffer; those that take Python stacks do not",
                format!("reports will name operators, but no lines of your code: {why}"),
            ),
        },
        Err(e) => Line::bad(
            subject,
            e.to_string(),
            "all that is needed is there from Linux 5.10 on; the other lines may say what stands in the way",
        ),
    }
}

fn mechanism(features: Features) -> Line {
    if lacks_vital() {
        return Line::limited(
            "attaching",
            "not known: it takes BPF programs to find out",
            "see what is said of privileges, and check again",
        );
    }
    if !features.uprobe_multi
        && features.perf_uprobe
        && let Err(e) = kernel::try_perf_uprobe()
    {
        return Line::bad(
            "attaching",
            format!("perf events are refused: {e}"),
            privilege::why_perf_refused(),
        );
    }
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

/// Whether the ids in /proc are those that BPF programs see.
fn numbers(proc: &Proc) -> Line {
    let subject = "process ids";
    match kernel::own_tgid() {
        None if lacks_vital() => Line::limited(
            subject,
            "not known: it takes BPF programs to find out",
            "see what is said of privileges, and check again",
        ),
        None => Line::limited(
            subject,
            "not known",
            "if this is a container, it must share the host's process ids (--pid=host) or --proc say where the host's \
             /proc is mounted",
        ),
        ours => match proc.check_numbers(ours) {
            Ok(()) if proc.has_own_numbers() => Line::good(subject, "the host's"),
            Ok(()) => Line::good(subject, format!("the host's, by {}", proc.root().display())),
            Err(e) => Line::bad(subject, "a container's", e.to_string()),
        },
    }
}

fn processes(proc: &Proc) -> Line {
    let mut found: Vec<Tgid> = proc
        .processes()
        .into_iter()
        .filter(|tgid| {
            attach::process::Process::open(proc, *tgid)
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
        .map(|tgid| format!("{tgid} ({})", attach::process::command_line(proc, *tgid)))
        .collect();
    Line::good("Ascend processes", list.join("; "))
}
