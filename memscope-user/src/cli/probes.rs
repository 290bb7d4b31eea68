//! `memscope-trace probes`.

use std::{
    collections::HashSet,
    fmt::Write,
    fs::File,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::Context;
use clap::Args;
use serde::Serialize;

use super::{
    ProcArgs, Verdict,
    output::{print, print_document},
};
use crate::{
    attach::{
        proc::Proc,
        process::{FileId, Process},
    },
    model::Tgid,
    probes::{
        catalogue::{CATALOGUE, Class, Probe},
        elf::FirstInstruction,
        resolve::{ResolvedFile, Resolver},
    },
    report::units,
    text::sanitize,
    trace::wanted_libraries,
};

#[derive(Debug, Args)]
pub struct ProbesArgs {
    /// Resolve against what this process has mapped
    #[arg(short, long, value_name = "PID", conflicts_with = "file")]
    pid: Option<u32>,
    /// Resolve against this library, of x86_64 or aarch64
    #[arg(long, value_name = "LIB")]
    file: Option<PathBuf>,
    #[command(flatten)]
    proc: ProcArgs,
    /// As one JSON document
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Sites<'a, T> {
    sites: &'a [T],
}

/// A site in a library, or missing from it.
#[derive(Debug, Serialize)]
struct Row {
    site: &'static str,
    class: Class,
    file: String,
    build_id: Option<Arc<str>>,
    arch: Option<crate::probes::elf::Arch>,
    offset: Option<u64>,
    /// How the kernel will run the probed instruction, which sets the price of a hit.
    first_instruction: Option<FirstInstruction>,
    /// Why it would not be attached.
    reason: Option<String>,
}

pub(super) fn run(args: ProbesArgs) -> anyhow::Result<Verdict> {
    let files = match (args.pid, &args.file) {
        (Some(pid), _) => of_process(&args.proc.open()?, Tgid(pid))?,
        (None, Some(path)) => of_file(path)?,
        (None, None) => {
            list_catalogue(args.json)?;
            return Ok(Verdict::Fine);
        }
    };
    let found: HashSet<_> = files.iter().flat_map(|(_, _, r)| r.found.iter().map(|f| f.probe.site)).collect();
    let rows: Vec<_> =
        files.iter().flat_map(|(path, file, resolved)| rows(path, file, resolved, &found)).collect();
    if args.json {
        print_document(&Sites { sites: &rows })?;
        return Ok(Verdict::Fine);
    }
    let mut out = String::new();
    for (path, _, resolved) in &files {
        let of_file: Vec<_> = rows.iter().filter(|row| row.file == *path).collect();
        if of_file.is_empty() && args.file.is_none() {
            continue;
        }
        let id = resolved.build_id.as_deref().map_or("no build-id".into(), |id| format!("build-id {id}"));
        writeln!(out, "{path}  ({id})")?;
        if let Some(error) = &resolved.error {
            writeln!(out, "  {error}")?;
        }
        for row in of_file {
            match (row.offset, &row.reason) {
                (Some(offset), None) => writeln!(out, "  {:#010x}  {}", offset, row.site)?,
                (Some(offset), Some(reason)) => {
                    writeln!(out, "  {:#010x}  {}  (not attached: {reason})", offset, row.site)?
                }
                (None, reason) => {
                    writeln!(
                        out,
                        "  not found   {}  ({})",
                        row.site,
                        reason.as_deref().unwrap_or("not there")
                    )?;
                }
            }
        }
    }
    let attachable = rows.iter().filter(|row| row.offset.is_some() && row.reason.is_none()).count();
    let missing = rows.iter().filter(|row| row.offset.is_none()).count();
    writeln!(
        out,
        "{} would be attached, {missing} not found; nothing was attached",
        units::count_of(attachable as u64, "site")
    )?;
    if let Some(file) = args.file.as_deref().filter(|file| !has_known_name(file)) {
        writeln!(
            out,
            "What is looked for goes by a library's name, and {} is none that is known: {}",
            sanitize(file.file_name().unwrap_or_default().as_encoded_bytes()),
            wanted_libraries()
        )?;
    }
    print(out)?;
    Ok(Verdict::Fine)
}

fn has_known_name(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    CATALOGUE.iter().flat_map(|probe| probe.libraries).any(|library| name.starts_with(library))
}

type Resolved = (String, File, ResolvedFile);

fn of_process(proc: &Proc, tgid: Tgid) -> anyhow::Result<Vec<Resolved>> {
    let process = Process::open(proc, tgid)?;
    let resolver = Resolver::default();
    let mut seen = HashSet::new();
    let mapped = process.mapped_files()?;
    let mut files = Vec::new();
    for file in &mapped {
        let Ok(open) = process.open_mapped(file) else { continue };
        if !FileId::of(&open).is_ok_and(|id| seen.insert(id)) {
            continue;
        }
        let path = sanitize(file.path.as_os_str().as_encoded_bytes()).into_owned();
        let resolved = resolver.resolve(&open, &path);
        files.push((path, open, resolved));
    }
    let any = files.iter().any(|(_, _, r)| r.found.iter().any(|f| f.probe.class != Class::Context));
    anyhow::ensure!(
        any,
        "process {tgid} ({}) has no Ascend library mapped: looked for {} in {} mapped files",
        process.command,
        wanted_libraries(),
        mapped.len()
    );
    Ok(files)
}

fn of_file(path: &PathBuf) -> anyhow::Result<Vec<Resolved>> {
    let file = File::open(path).with_context(|| format!("can not open {}", path.display()))?;
    let name = sanitize(path.as_os_str().as_encoded_bytes()).into_owned();
    let resolved = Resolver::default().resolve(&file, &name);
    if let Some(error) = &resolved.error {
        anyhow::bail!("{error}");
    }
    Ok(vec![(name, file, resolved)])
}

fn rows(path: &str, file: &File, resolved: &ResolvedFile, found: &HashSet<&str>) -> Vec<Row> {
    let library = file.try_clone().ok().and_then(|f| crate::probes::elf::Library::open(f, path).ok());
    let row = |probe: &'static Probe, offset: Option<u64>, reason: Option<String>| Row {
        site: probe.site,
        class: probe.class,
        file: path.to_owned(),
        build_id: resolved.build_id.clone(),
        arch: resolved.arch,
        offset,
        first_instruction: offset.and_then(|o| library.as_ref()?.first_instruction(o).ok()),
        reason,
    };
    let superseded = |probe: &Probe| {
        probe.unless.iter().find(|other| found.contains(*other)).map(|other| format!("{other} says the same"))
    };
    let there = resolved.found.iter().map(|hit| row(hit.probe, Some(hit.offset), superseded(hit.probe)));
    let missing = resolved
        .missing
        .iter()
        .filter(|(probe, _)| !found.contains(probe.site))
        .map(|(probe, why)| row(probe, None, Some(why.clone())));
    there.chain(missing).collect()
}

fn list_catalogue(json: bool) -> anyhow::Result<()> {
    if json {
        print_document(&Sites { sites: CATALOGUE })?;
        return Ok(());
    }
    let mut out = String::new();
    let mut class = None;
    for probe in CATALOGUE {
        if class.replace(probe.class) != Some(probe.class) {
            writeln!(out, "{}", heading(probe.class))?;
        }
        let place =
            if probe.libraries.is_empty() { "any library".into() } else { probe.libraries.join(", ") };
        let since = if probe.since.is_empty() { String::new() } else { format!(", {}", probe.since) };
        writeln!(out, "  {:<46} {place}{since}", probe.site)?;
    }
    writeln!(out, "{} sites; -p PID or --file LIB show where they are", CATALOGUE.len())?;
    print(out)
}

fn heading(class: Class) -> &'static str {
    match class {
        Class::Memory => "Memory: allocations and frees",
        Class::Mark => "Marks and ranges",
        Class::Op => "Operators",
        Class::Launch => "Kernel launches (--level kernel)",
        Class::Access => "Which operator uses which block (--analysis inefficient, decompose)",
        Class::LaunchAccess => "Which kernel uses which block (the same with --level kernel)",
        Class::Queue => "Which call the task queue runs an operator for (where TASK_QUEUE_ENABLE=2)",
        Class::Context => "Devices and libraries",
    }
}
