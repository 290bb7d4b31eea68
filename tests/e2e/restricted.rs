//! Kernels that were told to allow less. Only in the guests of `cargo xtask vm`: some settings last until the next boot. The
//! tests run one at a time, in the order of their names.

use std::fs;

use anyhow::{Context, Result};
use memscope_e2e::{
    Capability, Ground, Tracer, User, checked_by, held, is_to_be_thrown_away, leaks::are_exactly_the_truth,
    least_privileged,
};

const V9: Ground = Ground::Native("v9");

fn set(file: &str, value: &str) -> Result<()> {
    fs::write(file, value).with_context(|| format!("{file} does not take {value}"))
}

fn says(user: &User, subject: &str) -> Result<(String, String)> {
    let mut found = checked_by(user)?;
    found.remove(subject).with_context(|| format!("nothing about {subject}: {found:?}"))
}

/// What a trace says that can not be.
fn refusal(user: &User) -> Result<String> {
    let dir = tempfile::tempdir()?;
    let (target, _) = held(V9, dir.path(), &["leak", "--steps", "3", "--marks"])?;
    let traced = Tracer::as_user(user, &["-p", &target.pid().to_string(), "-d", "1"])?.finish()?;
    let said = traced.messages.concat();
    assert_eq!(traced.status.code(), Some(2), "{said}");
    Ok(said)
}

fn traces_as(user: &User) -> Result<()> {
    are_exactly_the_truth(V9, |pid| Tracer::as_user(user, &["-p", pid]))
}

/// Either it makes no difference, as to uprobe_multi, or both `check` and the trace say what to do.
#[test]
fn a_perf_event_paranoid_says_what_it_forbids() -> Result<()> {
    const FILE: &str = "/proc/sys/kernel/perf_event_paranoid";
    if !is_to_be_thrown_away() || !V9.is_ready() {
        return Ok(());
    }
    use Capability::{Bpf, DacReadSearch, Perfmon, SysAdmin, SysPtrace};
    let user = User::with(&[Bpf, Perfmon, SysPtrace, DacReadSearch]);
    let before = fs::read_to_string(FILE)?;
    for (level, setting) in
        [("3", "kernel.perf_event_paranoid is 3"), ("2", "keeps perf uprobes for CAP_SYS_ADMIN")]
    {
        set(FILE, level)?;
        let (state, said) = says(&user, "attaching")?;
        eprintln!("{level}: {state}: {said}");
        if state != "bad" {
            traces_as(&user)?;
            continue;
        }
        assert!(said.contains(setting) && said.contains("cap_sys_admin+ep"), "{said}");
        let refusal = refusal(&user)?;
        assert!(refusal.contains(setting), "{refusal}");
        let mut user = user.clone();
        user.capabilities.push(SysAdmin);
        traces_as(&user)?;
    }
    set(FILE, before.trim())
}

/// It is not meant for those who have CAP_BPF.
#[test]
fn b_unprivileged_bpf_disabled_does_not_matter() -> Result<()> {
    const FILE: &str = "/proc/sys/kernel/unprivileged_bpf_disabled";
    if !is_to_be_thrown_away() || !V9.is_ready() {
        return Ok(());
    }
    // 1 is for good, and so is last.
    for value in ["0", "2", "1"] {
        set(FILE, value)?;
        let user = least_privileged()?;
        let (state, said) = says(&user, "unprivileged_bpf")?;
        assert!(state == "good" && (value == "0" || said.starts_with(value)), "{state} {said}");
        traces_as(&user)?;
        let nobody = User::with(&[]);
        assert!(refusal(&nobody)?.contains("lacks CAP_BPF and CAP_PERFMON"));
    }
    Ok(())
}

/// Kernels before 5.11 count maps.
#[test]
fn c_locked_memory_is_raised_or_asked_for() -> Result<()> {
    if !is_to_be_thrown_away() || !V9.is_ready() {
        return Ok(());
    }
    let mut user = least_privileged()?;
    user.locked_memory = Some(64 << 10);
    match checked_by(&user)?.remove("locked memory") {
        None => return traces_as(&user),
        Some((state, said)) => {
            assert!(state == "limited" && said.contains("CAP_SYS_RESOURCE"), "{state} {said}");
        }
    }
    for said in [refusal(&user)?, says(&user, "BPF programs")?.1] {
        assert!(said.contains("65536 bytes") && said.contains("ulimit -l unlimited"), "{said}");
    }
    user.capabilities.push(Capability::SysResource);
    assert!(!checked_by(&user)?.contains_key("locked memory"));
    traces_as(&user)
}

#[test]
fn d_lockdown_is_lived_with() -> Result<()> {
    const FILE: &str = "/sys/kernel/security/lockdown";
    if !is_to_be_thrown_away() || !V9.is_ready() {
        return Ok(());
    }
    let root = ["attaching", "BPF programs", "lockdown"];
    for mode in ["integrity", "confidentiality"] {
        set(FILE, mode)?;
        let found = Tracer::check()?;
        let [attaching, programs, lockdown] =
            root.map(|subject| found.get(subject).cloned().unwrap_or_default());
        eprintln!("{mode}: {attaching}; {programs}; {lockdown}");
        assert!(lockdown.starts_with(mode), "{found:?}");
        assert_eq!(programs, "load, with ring buffer, Python and native stacks");
        traces_as(&least_privileged()?)?;
        are_exactly_the_truth(V9, |pid| Tracer::start(&["-p", pid]))?;
    }
    Ok(())
}
