//! Out of memory: an error message and exit code 1.
//!
//! The standard library aborts with a signal where it can't return an error, and its hook isn't
//! stable. This command's allocator therefore reports every failed allocation and exits, fallible
//! ones included: [`longspan::Error::OutOfMemory`] does not occur here.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};

/// The system's allocator; a failed allocation exits the process.
pub(crate) struct Reporting;

// SAFETY: every method hands its arguments to the same method of `System`, which has the same
// contract, and returns what that returns, unless it is null, in which case it never returns.
unsafe impl GlobalAlloc for Reporting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `alloc`: `layout` isn't empty.
        there(unsafe { System.alloc(layout) }, layout.size())
    }

    // The default implementation would write zeros to pages that are zeroed already.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `alloc_zeroed`: `layout` isn't empty.
        there(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller keeps the contract of `realloc`; `ptr` came from `System` with
        // `layout`, as all memory of this allocator does.
        there(unsafe { System.realloc(ptr, layout, new_size) }, new_size)
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`; `ptr` came from `System` with `layout`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

fn there(ptr: *mut u8, bytes: usize) -> *mut u8 {
    if ptr.is_null() {
        end(bytes);
    }
    ptr
}

/// Whether a thread is reporting, and the process is about to exit.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Allocates nothing, and takes no lock that a thread which allocates may hold. Several
/// threads may fail at once; the first reports.
#[cold]
fn end(bytes: usize) -> ! {
    while ENDING.swap(true, Ordering::Relaxed) {
        std::thread::yield_now();
    }
    let mut text = [0_u8; 256];
    let mut rest = &mut text[..];
    // Formatting an integer into a slice allocates nothing; the text is shorter than the slice.
    let _ = writeln!(
        rest,
        "error: out of memory: an allocation of {bytes} bytes failed: lower --tokens, --heads or \
         --batch, choose a smaller --dtype, or raise the memory limit (ulimit -v, cgroup)"
    );
    let left = rest.len();
    let len = text.len() - left;
    // SAFETY: `text` holds `len` initialized bytes. `write` and `_exit` may be called at any time, by
    // any thread; `_exit` runs no destructors, which might allocate.
    unsafe {
        libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), len);
        libc::_exit(1)
    }
}
