//! Exported functions that are one jump to another, as many of CANN's are.

/// Exports each left name as a jump to the right one, which is defined here or in a library below: the
/// callee runs in the caller's frame, with its return address.
#[macro_export]
macro_rules! forwards {
    ($($name:ident => $target:ident),* $(,)?) => {$(
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        extern "C" fn $name() {
            #[cfg(target_arch = "x86_64")]
            ::core::arch::naked_asm!(concat!("jmp ", stringify!($target), "@PLT"));
            #[cfg(target_arch = "aarch64")]
            ::core::arch::naked_asm!(concat!("b ", stringify!($target)));
        }
    )*};
}
