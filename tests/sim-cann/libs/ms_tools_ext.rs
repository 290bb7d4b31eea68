//! libms_tools_ext.so: marks and ranges with no tool loaded. Every function then answers 0, but its entry
//! runs, and the very first call of all enters twice: CANN's loader calls the public function once more.

#![allow(non_snake_case)]

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use sim_cann::ffi::{Address, Out, Text, put, text};
use sim_cann::trace;

/// Whether the caller is the process's first, which enters a second time.
fn is_first_call() -> bool {
    static LOADED: AtomicBool = AtomicBool::new(false);
    !LOADED.load(Relaxed) && !LOADED.swap(true, Relaxed)
}

/// Exports functions that log the arguments their bodies name and answer 0. Those that return nothing in C
/// answer it, too: nobody reads that register.
macro_rules! functions {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty { $($log:tt)* })*) => {$(
        #[unsafe(no_mangle)]
        extern "C" fn $name($($arg: $type),*) -> $result {
            if is_first_call() {
                let again: extern "C" fn($($type),*) -> $result = std::hint::black_box($name);
                return std::hint::black_box(again($($arg),*));
            }
            trace::enter(stringify!($name)) $($log)* .done(0)
        }
    )*};
}

functions! {
    mstxMarkA(message: Text, stream: Address) -> i32 {
        .text("msg", &text(message)).num("stream", stream)
    }
    mstxRangeStartA(message: Text, stream: Address) -> u64 {
        .text("msg", &text(message)).num("stream", stream)
    }
    mstxRangeEnd(id: u64) -> i32 {
        .num("id", id)
    }
    mstxDomainCreateA(name: Text) -> Address {
        .text("name", &text(name))
    }
    mstxDomainDestroy(domain: Address) -> i32 {
        .num("domain", domain)
    }
    mstxDomainMarkA(domain: Address, message: Text, stream: Address) -> i32 {
        .num("domain", domain).text("msg", &text(message)).num("stream", stream)
    }
    mstxDomainRangeStartA(domain: Address, message: Text, stream: Address) -> u64 {
        .num("domain", domain).text("msg", &text(message)).num("stream", stream)
    }
    mstxDomainRangeEnd(domain: Address, id: u64) -> i32 {
        .num("domain", domain).num("id", id)
    }
    mstxMemHeapRegister(domain: Address, heap: Address) -> Address {
        .num("domain", domain).num("heap", heap)
    }
    mstxMemHeapUnregister(domain: Address, heap: Address) -> i32 {
        .num("domain", domain).num("heap", heap)
    }
    mstxMemRegionsRegister(domain: Address, batch: Address) -> i32 {
        .num("domain", domain).num("batch", batch)
    }
    mstxMemRegionsUnregister(domain: Address, batch: Address) -> i32 {
        .num("domain", domain).num("batch", batch)
    }
    mstxMemPermissionsAssign(domain: Address, batch: Address) -> i32 {
        .num("domain", domain).num("batch", batch)
    }
}

#[unsafe(no_mangle)]
extern "C" fn mstxGetToolId(id: Out<u64>) -> i32 {
    put(id, 0);
    0
}
