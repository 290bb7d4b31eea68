//! The BPF programs of memscope-trace, a file for each kind of thing they observe.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod call;
mod calls;
mod native;
mod process;
mod queue;
mod regs;
mod report;
mod site;
mod stack;
mod tensor;
mod text;
mod user;

/// The programs call helpers that the kernel gives to GPL-compatible ones only.
#[unsafe(no_mangle)]
#[unsafe(link_section = "license")]
pub static LICENSE: [u8; 4] = *b"GPL\0";

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
