//! C types at the boundary of the simulated libraries.

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;

/// An out parameter: null or a place that the callee writes. Its previous content is never read.
pub type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// An address or opaque handle of the C API (`void *`), in host or device memory.
pub type Address = usize;

/// A C string argument or result: null, or NUL-terminated text that outlives the call.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub struct Text(*const c_char);

impl Text {
    pub const fn of(text: &'static CStr) -> Self {
        Self(text.as_ptr())
    }
}

/// Writes `value` to an out parameter; `false` when the caller passed null.
pub fn put<T>(out: Out<'_, T>, value: T) -> bool {
    out.map(|slot| slot.write(value)).is_some()
}

/// The text behind a C string argument; empty when null. Invalid UTF-8 is replaced.
pub fn text(argument: Text) -> String {
    if argument.0.is_null() {
        return String::new();
    }
    // SAFETY: what a `Text` that is not null promises.
    unsafe { CStr::from_ptr(argument.0) }.to_string_lossy().into_owned()
}

/// Copies `text` and a NUL into a C buffer of `capacity` bytes, cutting what does not fit.
pub fn put_text(buffer: Address, capacity: usize, text: &str) {
    let Some(room) = capacity.checked_sub(1) else { return };
    if buffer == 0 {
        return;
    }
    let length = text.len().min(room);
    let buffer = buffer as *mut u8;
    // SAFETY: the C API asks its caller for a buffer of `capacity` bytes, and `length` < `capacity`.
    unsafe {
        buffer.copy_from_nonoverlapping(text.as_ptr(), length);
        buffer.add(length).write(0);
    }
}
