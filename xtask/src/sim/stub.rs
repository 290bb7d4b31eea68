//! Shared libraries made of nothing but entry points: each exported name is a function of its own, so that
//! it can be probed, with a frame like a compiled one.

use std::collections::{BTreeMap, BTreeSet};
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
    /// Gives the object at its first argument a class that can be asked for, whose virtual functions do
    /// nothing: for constructors.
    Construct,
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

/// Virtual functions of the class that constructors give: more than any has.
const VIRTUALS: u32 = 64;

impl Stub {
    /// Functions that return `value`.
    pub fn returning(names: impl IntoIterator<Item = String>, value: u32) -> Self {
        let functions = names.into_iter().map(|name| (name, Body::Return(value))).collect();
        Self { functions, ..Self::default() }
    }

    fn assembly(&self, arch: Arch) -> String {
        let mut text = String::from("\t.text\n");
        for (name, body) in &self.functions {
            text += &format!("\t.globl {name}\n{}", function(arch, name, body));
        }
        text += "\t.data\n\t.balign 32\n";
        for (name, data) in &self.data {
            let content = match data {
                Data::Zeros(size) => format!("\t.zero {size}\n"),
                Data::TypeInfo => type_info(name.strip_prefix("_ZTI").unwrap_or(name)),
            };
            text += &format!("\t.globl {name}\n\t.type {name},%object\n\t.balign 32\n{name}:\n{content}");
            text += &format!("\t.size {name},.-{name}\n");
        }
        if self.functions.values().any(|body| *body == Body::Construct) {
            text += &format!("class_type:\n{}", type_info("8stand_in"));
            // Offset of the object in its whole, type, virtual functions.
            text += &format!("class:\n\t.quad 0,class_type\n\t.rept {VIRTUALS}\n\t.quad nothing\n\t.endr\n");
            text += &format!("\t.text\n{}", function(arch, "nothing", &Body::Return(0)));
        }
        text += &format!("\t.bss\n\t.balign {ZEROS}\nzeros:\n\t.zero {ZEROS}\n");
        text + "\t.section .note.GNU-stack,\"\",%progbits\n"
    }

    fn needs_cxx(&self) -> bool {
        self.data.values().any(|data| *data == Data::TypeInfo)
            || self.functions.values().any(|body| *body == Body::Construct)
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
        if self.needs_cxx() {
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

fn function(arch: Arch, name: &str, body: &Body) -> String {
    let work = match (arch, body) {
        (Arch::X86_64, Body::Return(value)) => format!("mov ${value},%eax"),
        (Arch::X86_64, Body::ReturnZeros) => String::from("lea zeros(%rip),%rax"),
        (Arch::X86_64, Body::Construct) => String::from("lea class+16(%rip),%rax\n\tmov %rax,(%rdi)"),
        (Arch::X86_64, Body::Jump(target)) => format!("jmp {target}@PLT"),
        (Arch::Aarch64, Body::Return(value)) => format!("mov w0,#{value}"),
        (Arch::Aarch64, Body::ReturnZeros) => String::from("adrp x0,zeros"),
        (Arch::Aarch64, Body::Construct) => {
            String::from("adrp x9,class+16\n\tadd x9,x9,:lo12:class+16\n\tstr x9,[x0]")
        }
        (Arch::Aarch64, Body::Jump(target)) => format!("b {target}"),
    };
    let code = match (arch, body) {
        (_, Body::Jump(_)) => work,
        (Arch::X86_64, _) => format!("push %rbp\n\tmov %rsp,%rbp\n\t{work}\n\tpop %rbp\n\tret"),
        (Arch::Aarch64, _) => {
            format!("stp x29,x30,[sp,#-16]!\n\tmov x29,sp\n\t{work}\n\tldp x29,x30,[sp],#16\n\tret")
        }
    };
    format!("\t.type {name},%function\n\t.balign 16\n{name}:\n\t{code}\n\t.size {name},.-{name}\n")
}

/// A `std::type_info` of a class without bases, given its name as the compiler writes it.
fn type_info(class: &str) -> String {
    format!(
        "\t.quad _ZTVN10__cxxabiv117__class_type_infoE+16\n\t.quad name{class}\n\
         \t.section .rodata\nname{class}:\n\t.asciz \"{class}\"\n\t.data\n"
    )
}

/// Whether a mangled name is that of a constructor (of a class that is no template).
pub fn is_constructor(name: &str) -> bool {
    let Some(mut rest) = name.strip_prefix("_ZN") else { return false };
    loop {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let Ok(length) = rest[..digits].parse::<usize>() else {
            return rest.starts_with("C1E") || rest.starts_with("C2E");
        };
        match rest.get(digits + length..) {
            Some(after) => rest = after,
            None => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::is_constructor;

    #[test]
    fn constructors_are_told_from_other_members() {
        assert!(is_constructor("_ZN2at4cuda9CUDAGraphC1Ev"));
        assert!(is_constructor("_ZN4c10d16ProcessGroupNCCL7OptionsC1Eb"));
        assert!(!is_constructor("_ZN2at4cuda9CUDAGraph5resetEv"));
        assert!(!is_constructor("_ZN2at4cuda9CUDAGraphD1Ev"));
        assert!(!is_constructor("_ZN99999too_short"));
        assert!(!is_constructor("cudaMalloc"));
    }
}
