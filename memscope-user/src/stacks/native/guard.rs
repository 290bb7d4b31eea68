//! Files of others are mapped here, and their owners may cut them short: reading what is gone would end the tracer with
//! SIGBUS. With this guard it reads as zeros.

use std::{
    mem::MaybeUninit,
    ptr,
    sync::{
        Once,
        atomic::{AtomicUsize, Ordering},
    },
};

static PAGE: AtomicUsize = AtomicUsize::new(4096);

/// From now on pages beyond the end of a mapped file are zeros.
pub fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: sysconf takes an integer.
        if let Ok(page) = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }) {
            PAGE.store(page, Ordering::Relaxed);
        }
        let handler: extern "C" fn(_, _, _) = on_bus_error;
        // SAFETY: the structure is filled before it is given to the kernel, and the handler calls nothing but system
        // calls.
        let failed = unsafe {
            let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) != 0
        };
        if failed {
            tracing::warn!("SIGBUS is not handled: a library that is cut short will end the trace");
        }
    });
}

extern "C" fn on_bus_error(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    let page = PAGE.load(Ordering::Relaxed);
    // SAFETY: the kernel passes the structure of this signal. Where there is no memory behind an address of a mapping, the
    // mapping is of a file (or of shared memory) that has become shorter: nothing is lost with the page. Without it the
    // access fails once more, and ends the process as it would have without us.
    unsafe {
        let address = (*info).si_addr() as usize & !(page - 1);
        let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let is_beyond_end = (*info).si_code == libc::BUS_ADRERR;
        if !is_beyond_end
            || libc::mmap(address as *mut _, page, libc::PROT_READ, flags, -1, 0) == libc::MAP_FAILED
        {
            libc::signal(signal, libc::SIG_DFL);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use memmap2::Mmap;

    #[test]
    fn what_a_file_has_lost_reads_as_zeros() {
        super::install();
        let file = tempfile::tempfile().unwrap();
        let page = super::PAGE.load(super::Ordering::Relaxed);
        file.set_len(4 * page as u64).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![7; 4 * page], 0).unwrap();
        // SAFETY: that it changes is what is tested.
        let bytes = unsafe { Mmap::map(&file) }.unwrap();
        assert_eq!(bytes[3 * page], 7);
        File::set_len(&file, page as u64).unwrap();
        assert_eq!((bytes[0], bytes[2 * page], bytes[3 * page + 5]), (7, 0, 0));
    }
}
