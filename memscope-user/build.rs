//! Puts the BPF object of `cargo xtask build-ebpf` into the binary. Without it the crate still builds (so that
//! everything but tracing can be worked on), and tracing says what to do.

use std::{env, fs, path::PathBuf};

fn main() {
    let arch = env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    let object = PathBuf::from(env::var("CARGO_MANIFEST_DIR").unwrap_or_default())
        .join(format!("../target/ebpf/memscope-{arch}.bpf.o"));
    println!("cargo::rerun-if-changed={}", object.display());
    let bytes = fs::read(&object).unwrap_or_else(|_| {
        println!("cargo::warning=no BPF programs for {arch}: run `cargo xtask build-ebpf` before tracing");
        Vec::new()
    });
    let out = PathBuf::from(env::var("OUT_DIR").unwrap_or_default()).join("memscope.bpf.o");
    fs::write(&out, bytes).unwrap_or_else(|e| panic!("can not write {}: {e}", out.display()));
}
