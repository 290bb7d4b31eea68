//! Shared libraries made of nothing but entry points: each exported name is a function of its own, so that
//! it can be probed, with a frame like a compiled one.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Arch, Error, execute};

/// What a generated function does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Body {
    /// Returns the number.
    Return(u32),
    /// Returns the address of zeroed memory, aligned so that its low bits read as 0, too: right as a
    /// reference, a null handle in memory, false, or a small zero.
    ReturnZeros,
    /// Jumps to another function, defined in a library below.
    Jump(String),
}

/// A data object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Data {
    Zeros(u64),
    /// The `std::type_info` of a class without bases; its name follows from the symbol.
    TypeInfo,
}

#[derive(Debug, Default)]
pub struct Stub {
    pub functions: BTreeMap<String, Body>,
    pub data: BTreeMap<String, Data>,
    /// Version node -> names that carry it.
    pub versions: BTreeMap<String, BTreeSet<String>>,
    /// Libraries (paths) for DT_NEEDED.
    pub needed: Vec<PathBuf>,
}

/// Size of the zeroed memory, and its alignment.
const ZEROS: u32 = 1 << 16;

impl Stub {
    /// Functions that return `value`.
    pub fn returning(names: impl IntoIterator<Item = String>, value: u32) -> Self {
        let functions = names.into_iter().map(|name| (name, Body::Return(value))).collect();
        Self { functions, ..Self::default() }
    }

    fn assembly(&self, arch: Arch) -> String {
        let mut text = String::from("\t.text\n");
        for (name, body) in &self.functions {
            let code = match (arch, body) {
                (Arch::X86_64, Body::Return(value)) => {
                    format!("push %rbp\n\tmov %rsp,%rbp\n\tmov ${value},%eax\n\tpop %rbp\n\tret")
                }
                (Arch::X86_64, Body::ReturnZeros) => {
                    String::from("push %rbp\n\tmov %rsp,%rbp\n\tlea zeros(%rip),%rax\n\tpop %rbp\n\tret")
                }
                (Arch::X86_64, Body::Jump(target)) => format!("jmp {target}@PLT"),
                (Arch::Aarch64, Body::Return(value)) => {
                    format!(
                        "stp x29,x30,[sp,#-16]!\n\tmov x29,sp\n\tmov w0,#{value}\n\tldp x29,x30,[sp],#16\n\tret"
                    )
                }
                (Arch::Aarch64, Body::ReturnZeros) => String::from(
                    "stp x29,x30,[sp,#-16]!\n\tmov x29,sp\n\tadrp x0,zeros\n\tldp x29,x30,[sp],#16\n\tret",
                ),
                (Arch::Aarch64, Body::Jump(target)) => format!("b {target}"),
            };
            let _ =
                writeln!(text, "\t.globl {name}\n\t.type {name},%function\n\t.balign 16\n{name}:\n\t{code}");
            let _ = writeln!(text, "\t.size {name},.-{name}");
        }
        text.push_str("\t.data\n");
        for (name, data) in &self.data {
            let _ = writeln!(text, "\t.globl {name}\n\t.type {name},%object\n\t.balign 32\n{name}:");
            match data {
                Data::Zeros(size) => {
                    let _ = writeln!(text, "\t.zero {size}");
                }
                Data::TypeInfo => {
                    let class = name.strip_prefix("_ZTI").unwrap_or(name);
                    let _ = writeln!(
                        text,
                        "\t.quad _ZTVN10__cxxabiv117__class_type_infoE+16\n\t.quad name{name}"
                    );
                    let _ = writeln!(text, "\t.section .rodata\nname{name}:\n\t.asciz \"{class}\"\n\t.data");
                }
            }
            let _ = writeln!(text, "\t.size {name},.-{name}");
        }
        let _ = writeln!(text, "\t.bss\n\t.balign {ZEROS}\nzeros:\n\t.zero {ZEROS}");
        text.push_str("\t.section .note.GNU-stack,\"\",%progbits\n");
        text
    }

    /// Links the library into `directory` under the name `soname`, replacing an older one at once.
    pub fn link(&self, compiler: &str, arch: Arch, directory: &Path, soname: &str) -> Result<PathBuf, Error> {
        let scratch = tempfile::tempdir_in(directory).map_err(|error| Error::file(directory, error))?;
        let source = scratch.path().join("stub.s");
        std::fs::write(&source, self.assembly(arch)).map_err(|error| Error::file(&source, error))?;
        let built = scratch.path().join(soname);
        let mut command = Command::new(compiler);
        command.args(["-shared", "-nostdlib", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"]);
        command.arg(format!("-Wl,-soname,{soname}")).arg("-o").arg(&built).arg(&source).args(&self.needed);
        if self.data.values().any(|data| *data == Data::TypeInfo) {
            command.arg("-l:libstdc++.so.6");
        }
        if !self.versions.is_empty() {
            let map = scratch.path().join("versions");
            let node = |(node, names): (&String, &BTreeSet<String>)| {
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                format!("{node} {{ global: {}; }};\n", names.join("; "))
            };
            let text: String = self.versions.iter().map(node).collect();
            std::fs::write(&map, text).map_err(|error| Error::file(&map, error))?;
            command.arg(format!("-Wl,--version-script={}", map.display()));
        }
        execute(&mut command)?;
        let target = directory.join(soname);
        std::fs::rename(&built, &target).map_err(|error| Error::file(&target, error))?;
        Ok(target)
    }
}
