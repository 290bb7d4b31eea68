//! Whose code a file is.

use crate::model::Origin;

/// Tells the user's own files from those of frameworks, packages and the interpreter.
#[derive(Debug, Default, Clone)]
pub struct Origins {
    /// Directories of torch and torch_npu in this process, wherever they are installed.
    frameworks: Vec<String>,
}

/// Packages that are the framework, wherever they are.
const FRAMEWORKS: [&str; 4] = ["torch", "torch_npu", "functorch", "mindspore"];

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
}
