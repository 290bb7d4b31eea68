//! `cargo xtask setup`: what building and testing need, installed on Debian and Ubuntu as root, named elsewhere.

use std::{path::Path, process::Command};

use anyhow::bail;

use crate::command::{cargo, on_path, output, run};

/// Debian's own rustc with a prebuilt `core` for the bpf target.
pub const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
const DEBIAN_CORE: &str = "/usr/lib/rustlib/bpfel-unknown-none/lib";

/// The version that links the bitcode of the compilers used here.
const BPF_LINKER: &str = "0.13.0";
const LLVM: &str = "llvm-22";
const LINKER_NEEDS: &str = "LLVM for bpf-linker";

/// How the bpf target can be compiled for on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EbpfCompiler {
    /// A nightly toolchain with the sources of `core`.
    Nightly,
    /// Debian's packages rustc-web and libstd-rust-web-dev-bpf.
    Debian,
}

/// Something that has to be there.
pub struct Need {
    pub what: &'static str,
    /// Debian packages that bring it.
    pub packages: &'static [&'static str],
    pub there: bool,
}

pub fn ebpf_compiler() -> Option<EbpfCompiler> {
    let sources = output("rustc", &["+nightly", "--print", "sysroot"])
        .is_some_and(|root| Path::new(root.trim()).join("lib/rustlib/src/rust/library/core").is_dir());
    if sources {
        Some(EbpfCompiler::Nightly)
    } else if Path::new(DEBIAN_RUSTC).is_file() && Path::new(DEBIAN_CORE).is_dir() {
        Some(EbpfCompiler::Debian)
    } else {
        None
    }
}

fn needs() -> Vec<Need> {
    let python = output("python3", &["-c", "import ensurepip, venv"]).is_some();
    vec![
        Need { what: "a C linker", packages: &["gcc", "libc6-dev"], there: on_path("cc") },
        Need { what: "Python with venv", packages: &["python3", "python3-venv"], there: python },
        Need {
            what: "a compiler for the bpf target",
            packages: &["rustc-web", "libstd-rust-web-dev-bpf"],
            there: ebpf_compiler().is_some(),
        },
        Need {
            what: LINKER_NEEDS,
            packages: &["llvm-22-dev", "libpolly-22-dev", "zlib1g-dev", "libzstd-dev", "libxml2-dev", "g++"],
            there: on_path("bpf-linker"),
        },
    ]
}

/// Installs what is missing, or says how.
pub fn ensure() -> anyhow::Result<()> {
    install(&needs())?;
    if on_path("bpf-linker") {
        return Ok(());
    }
    run(cargo()
        .env("LLVM_PREFIX", format!("/usr/lib/{LLVM}"))
        .args(["install", "--quiet", "bpf-linker", "--version", BPF_LINKER])
        .args(["--no-default-features", "--features", LLVM]))
}

/// Installs the packages of what is missing, or says how.
pub fn install(needs: &[Need]) -> anyhow::Result<()> {
    let missing: Vec<_> = needs.iter().filter(|need| !need.there).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let packages: Vec<_> = missing.iter().flat_map(|need| need.packages.iter().copied()).collect();
    let root = output("id", &["-u"]).is_some_and(|id| id.trim() == "0");
    if !(root && on_path("apt-get")) {
        let whats: Vec<_> = missing.iter().map(|need| need.what).collect();
        let mut advice = format!(
            "missing: {}. As root on Debian 12 or Ubuntu it is installed when needed; by hand:\n\
             \x20 sudo apt-get install {}",
            whats.join(", "),
            packages.join(" "),
        );
        if missing.iter().any(|need| need.what == LINKER_NEEDS) {
            advice += &format!(
                "\n\x20 LLVM_PREFIX=/usr/lib/{LLVM} cargo install bpf-linker --version {BPF_LINKER} \
                 --no-default-features --features {LLVM}\n\
                 or, with rustup, for the bpf target:\n\
                 \x20 rustup toolchain install nightly --component rust-src && cargo install bpf-linker"
            );
        }
        bail!(advice);
    }
    // Lists may be old or absent on a fresh machine.
    run(Command::new("apt-get").args(["update", "-qq"]))?;
    run(Command::new("apt-get")
        .env("DEBIAN_FRONTEND", "noninteractive")
        .args(["install", "-y", "-qq", "--no-install-recommends"])
        .args(&packages))
}
