//! Codes, and the words behind the last one of each thread.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::AssertUnwindSafe;

use tidepool_client::{Error, ErrorKind};

thread_local! {
    static LAST: RefCell<(CString, CString)> = RefCell::default();
}

/// A negative code: what to do next.
pub(crate) fn code(kind: ErrorKind) -> i32 {
    match kind {
        ErrorKind::Invalid => -1,
        ErrorKind::NotFound => -2,
        ErrorKind::Conflict => -3,
        ErrorKind::Exhausted => -4,
        ErrorKind::Unavailable => -5,
        ErrorKind::Deadline => -6,
        ErrorKind::Denied => -7,
        ErrorKind::Corrupt => -8,
        ErrorKind::Unimplemented => -9,
        ErrorKind::Internal => -10,
    }
}

/// Keeps the error for `tidepool_error_message`, and gives its code.
pub(crate) fn failed(error: &Error) -> i32 {
    remember(error.reason(), &error.to_string());
    code(error.kind())
}

/// The same, for what is wrong with a call's arguments.
pub(crate) fn invalid(words: &str) -> i32 {
    remember("BAD_ARGUMENT", words);
    code(ErrorKind::Invalid)
}

/// Runs `call`; a panic is an internal error.
pub(crate) fn guarded<T>(otherwise: T, call: impl FnOnce() -> T) -> T {
    std::panic::catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        remember("INTERNAL", panic_words(&*panic));
        otherwise
    })
}

fn panic_words(panic: &(dyn Any + Send)) -> &str {
    panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied()).unwrap_or("panic")
}

fn remember(reason: &str, words: &str) {
    let text = |text: &str| CString::new(text.replace('\0', " ")).unwrap_or_default();
    LAST.set((text(reason), text(words)));
}

/// Words of the last error of this thread; good until its next call that fails. Never null.
#[unsafe(no_mangle)]
pub extern "C" fn tidepool_error_message() -> *const c_char {
    LAST.with_borrow(|(_, words)| words.as_ptr())
}

/// The machine-readable reason of the last error of this thread, such as `UNREACHABLE`; good as long as its words.
#[unsafe(no_mangle)]
pub extern "C" fn tidepool_error_reason() -> *const c_char {
    LAST.with_borrow(|(reason, _)| reason.as_ptr())
}
