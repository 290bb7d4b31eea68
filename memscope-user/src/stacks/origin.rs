//! Whose code a file is.

use std::path::Path;

use crate::{model::Origin, probes::catalogue::is_ascend_library};

/// Tells the user's own files from those of frameworks, packages and the interpreter.
#[derive(Debug, Default, Clone)]
pub struct Origins {
    /// Directories of torch and torch_npu in this process, wherever they are installed.
    frameworks: Vec<String>,
}

/// Packages that are the framework, wherever they are.
const FRAMEWORKS: [&str; 4] = ["torch", "torch_npu", "functorch", "mindspore"];
/// Where CANN is installed, and its driver.
const CANN: [&str; 3] = ["/Ascend/", "/ascend-toolkit/", "/cann/"];
/// Its libraries between the program and those that are probed.
const OF_CANN: [&str; 6] = ["libacl", "libascend", "libge_", "libhccl", "libnnopbase.so", "libopapi"];
/// Where distributions have their libraries.
const SYSTEM: [&str; 5] = ["/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/", "/usr/libexec/"];

impl Origins {
    /// By the libraries that the process has mapped: `…/torch/lib/libtorch_cpu.so`.
    pub fn of<'a>(mapped: impl Iterator<Item = &'a str>) -> Self {
        let mut frameworks: Vec<String> = mapped
            .filter_map(|path| {
                let (package, _) = path.rsplit_once("/lib/lib")?;
                FRAMEWORKS
                    .iter()
                    .any(|name| package.ends_with(&format!("/{name}")))
                    .then(|| format!("{package}/"))
            })
            .collect();
        frameworks.sort_unstable();
        frameworks.dedup();
        Self { frameworks }
    }

    /// Of a file with native code.
    pub fn of_code(&self, file: &str) -> Origin {
        let name = file.rsplit('/').next().unwrap_or(file);
        if CANN.iter().any(|directory| file.contains(directory))
            || OF_CANN.iter().any(|prefix| name.starts_with(prefix))
            || is_ascend_library(Path::new(file))
        {
            return Origin::Framework;
        }
        let is_system = SYSTEM.iter().any(|directory| file.starts_with(directory));
        let is_python = ["libpython3.", "python3."].iter().any(|prefix| name.starts_with(prefix));
        let is_library = name.contains(".so");
        match self.of_file(file) {
            Origin::User if is_python || (is_system && is_library) => Origin::Standard,
            // The interpreter's own libraries are where its own modules are; programs may be anywhere.
            origin => origin,
        }
    }

    pub fn of_file(&self, file: &str) -> Origin {
        if self.frameworks.iter().any(|directory| file.starts_with(directory.as_str())) {
            return Origin::Framework;
        }
        for packages in ["/site-packages/", "/dist-packages/"] {
            if let Some((_, package)) = file.rsplit_once(packages) {
                let name = package.split('/').next().unwrap_or_default();
                return if FRAMEWORKS.contains(&name) { Origin::Framework } else { Origin::Package };
            }
        }
        // What the interpreter and frameworks make up as they go.
        if file.starts_with("<frozen ") || file.starts_with("<eval_with_key>") {
            return Origin::Standard;
        }
        // What is typed in is in no file either, but it is all that the user has.
        let typed = ["<stdin>", "<ipython-input"].iter().any(|prompt| file.starts_with(prompt));
        if file.starts_with('<') && file.ends_with('>') && !typed {
            return Origin::Text;
        }
        let standard = file.split_once("/lib/python3").is_some_and(|(_, rest)| {
            let minor = rest.strip_prefix('.').unwrap_or(rest);
            minor.trim_start_matches(|c: char| c.is_ascii_digit()).starts_with('/')
        });
        if standard { Origin::Standard } else { Origin::User }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_own_code_is_what_no_one_installed() {
        let origins = Origins::of(
            ["/src/pytorch/torch/lib/libtorch_cpu.so", "/home/me/torch/libextension.so"].into_iter(),
        );
        for (file, origin) in [
            ("/home/me/train.py", Origin::User),
            ("train.py", Origin::User),
            ("<stdin>", Origin::User),
            ("<ipython-input-3-0a1b>", Origin::User),
            ("<string>", Origin::Text),
            ("/home/me/torch/train.py", Origin::User),
            ("/src/pytorch/torch/nn/modules/module.py", Origin::Framework),
            ("/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", Origin::Framework),
            ("/opt/venv/lib/python3.11/site-packages/transformers/trainer.py", Origin::Package),
            ("/usr/lib/python3/dist-packages/numpy/core.py", Origin::Package),
            ("/opt/conda/lib/python3.10/contextlib.py", Origin::Standard),
            ("/usr/lib/python3.11/threading.py", Origin::Standard),
            ("<frozen importlib._bootstrap>", Origin::Standard),
            ("/data/lib/python3rocks/train.py", Origin::User),
        ] {
            assert_eq!(origins.of_file(file), origin, "{file}");
        }
    }

    #[test]
    fn native_code_is_the_users_own_too() {
        let origins = Origins::of(["/src/pytorch/torch/lib/libtorch_cpu.so"].into_iter());
        for (file, origin) in [
            ("/home/me/train", Origin::User),
            ("/usr/bin/infer", Origin::User),
            ("/home/me/build/libmodel.so", Origin::User),
            ("/home/me/lib/libascend_hal.so", Origin::Framework),
            ("/usr/local/Ascend/ascend-toolkit/latest/lib64/libge_runner.so", Origin::Framework),
            ("/src/pytorch/torch/lib/libtorch_cpu.so", Origin::Framework),
            ("/opt/venv/lib/python3.11/site-packages/torch_npu/lib/libtorch_npu.so", Origin::Framework),
            ("/opt/venv/lib/python3.11/site-packages/numpy/core/_multiarray.so", Origin::Package),
            ("/opt/conda/lib/libpython3.10.so.1.0", Origin::Standard),
            ("/usr/bin/python3.11", Origin::Standard),
            ("/usr/lib/x86_64-linux-gnu/libc.so.6", Origin::Standard),
        ] {
            assert_eq!(origins.of_code(file), origin, "{file}");
        }
    }
}
