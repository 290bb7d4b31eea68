//! `cargo xtask build-ebpf`: the BPF object for both machines.

use std::{fs, path::PathBuf};

use anyhow::{Context, bail};

use crate::{
    command::{cargo, root, run},
    setup::{self, EbpfCompiler},
};

const TARGET: &str = "bpfel-unknown-none";
/// The object differs by machine only in where the registers of the probed thread lie.
pub const MACHINES: [&str; 2] = ["x86_64", "aarch64"];

pub fn build() -> anyhow::Result<()> {
    let Some(compiler) = setup::ebpf_compiler() else {
        bail!("no compiler for the bpf target; run `cargo xtask setup`");
    };
    MACHINES.into_iter().try_for_each(|machine| build_for(machine, compiler))
}

/// Where the object of a machine is put.
pub fn object(machine: &str) -> PathBuf {
    root().join(format!("target/ebpf/memscope-{machine}.bpf.o"))
}

fn build_for(machine: &str, compiler: EbpfCompiler) -> anyhow::Result<()> {
    // The macros, which take longest, serve both machines.
    let target_dir = root().join("target/ebpf/build");
    let flags = [
        "-Cdebuginfo=2",
        "-Clink-arg=--btf",
        "-Clinker=bpf-linker",
        &format!("--cfg=bpf_target_arch=\"{machine}\""),
        "--check-cfg=cfg(bpf_target_arch,values(\"x86_64\",\"aarch64\"))",
    ]
    .join("\x1f");
    let mut build = cargo();
    match compiler {
        EbpfCompiler::Nightly => {
            build = std::process::Command::new("cargo");
            build.current_dir(root()).env_remove("RUSTUP_TOOLCHAIN").env_remove("RUSTC").arg("+nightly");
        }
        EbpfCompiler::Debian => {
            build.env("RUSTC", setup::DEBIAN_RUSTC).env("RUSTC_BOOTSTRAP", "1");
        }
    }
    build
        .args([
            "build",
            "--quiet",
            "--package",
            "memscope-ebpf",
            "--bin",
            "memscope",
            "--features",
            "programs",
        ])
        .args(["--profile", "bpf", "--target", TARGET])
        .arg("--target-dir")
        .arg(&target_dir)
        .env("CARGO_ENCODED_RUSTFLAGS", flags)
        .env_remove("RUSTFLAGS");
    if compiler == EbpfCompiler::Nightly {
        build.args(["-Z", "build-std=core"]);
    }
    run(&mut build)?;
    let built = target_dir.join(TARGET).join("bpf/memscope");
    let bytes = fs::read(&built).with_context(|| format!("the build left no {}", built.display()))?;
    let to = object(machine);
    // Unchanged, it must not make the crate that embeds it build again.
    if fs::read(&to).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    fs::write(&to, bytes).with_context(|| format!("can not write {}", to.display()))
}
