//! CANN's Python module `mstx` (`mstx.so`), which exports nothing but `PyInit_mstx`: the C functions behind its
//! methods.

use serde::{Deserialize, Serialize};

use super::elf::{ElfError, Library, Missing};
use super::image::Image;
use super::python_methods::Methods;

/// File offsets of functions `(PyObject *self, PyObject *args, PyObject *keywords)`. The text of a mark is the
/// first item of the tuple `args`, or the keyword `message`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MstxPython {
    pub mark: Result<u64, Missing>,
    pub range_start: Result<u64, Missing>,
    pub range_end: Result<u64, Missing>,
}

/// Finds them. Errors are those of the file; what can not be found is in the result.
pub fn resolve(library: &Library) -> Result<MstxPython, ElfError> {
    let image = Image::load(library)?;
    let methods = Methods::find(&image, "range_start");
    let method = |name: &str| {
        let address = methods.get(name).ok_or_else(|| Missing::new("the module has no such method"))?;
        library.code_offset(address).ok_or_else(|| Missing::new("the method has no code in the file"))
    };
    Ok(MstxPython {
        mark: method("mark"),
        range_start: method("range_start"),
        range_end: method("range_end"),
    })
}
