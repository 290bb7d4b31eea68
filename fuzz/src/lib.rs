//! What the targets share: seeds, and files that hold what is read.

#[path = "../../memscope-user/tests/exercise.rs"]
pub mod exercise;
pub mod records;

use std::{cell::OnceCell, env, fs, fs::File, io::Write as _, path::Path};

use tempfile::TempDir;

/// Puts what a target begins with into the directory that `cargo xtask fuzz` names.
pub fn begin_with(seeds: impl IntoIterator<Item = Vec<u8>>) {
    let Some(dir) = env::var_os("MEMSCOPE_FUZZ_SEEDS") else { return };
    for (number, seed) in seeds.into_iter().enumerate() {
        fs::write(Path::new(&dir).join(format!("seed-{number}")), seed).expect("a directory to write into");
    }
}

/// Reads these bytes as a dump whose file has this name.
pub fn dump(name: &str, data: &[u8]) {
    thread_local! {
        static DIR: OnceCell<TempDir> = const { OnceCell::new() };
    }
    DIR.with(|dir| {
        let path = dir.get_or_init(|| TempDir::new().expect("a directory")).path().join(name);
        fs::write(&path, data).expect("room");
        exercise::dump(&path);
    });
}

pub fn file(data: &[u8]) -> File {
    let mut file = tempfile::tempfile().expect("a file");
    file.write_all(data).expect("room");
    file
}
