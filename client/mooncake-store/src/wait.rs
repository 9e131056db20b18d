//! Calls that wait: run by a runtime of this crate's own, whatever thread they are made by.

use std::sync::{OnceLock, mpsc};

use tokio::runtime::{Builder, Handle, Runtime};

use crate::code::INTERNAL_ERROR;

/// Threads that drive calls.
const WORKERS: usize = 2;

/// The runtime of all stores of this process.
pub(crate) fn runtime() -> Result<&'static Handle, i32> {
    static RUNTIME: OnceLock<Option<Runtime>> = OnceLock::new();
    let make = || {
        let runtime =
            Builder::new_multi_thread().worker_threads(WORKERS).thread_name("mooncake-store").enable_all().build();
        runtime.map_err(|error| tracing::error!(%error, "start the store's runtime")).ok()
    };
    RUNTIME.get_or_init(make).as_ref().map(Runtime::handle).ok_or(INTERNAL_ERROR)
}

/// Runs `call` to its end, and gives its result. When this returns, nothing of the call is left, whether it ended or
/// panicked: what it borrowed may be used again.
pub(crate) fn wait<T: Send + 'static>(call: impl Future<Output = T> + Send + 'static) -> Result<T, i32> {
    let (sender, receiver) = mpsc::sync_channel(1);
    let call = async move {
        // It is gone when it is done, and before the sender is if it panics.
        let done = call.await;
        // Whoever waits is there as long as this runs.
        let _taken = sender.send(done);
    };
    runtime()?.spawn(call);
    // Without a result it panicked: then it is dropped, the sender with it.
    receiver.recv().map_err(|_panicked| INTERNAL_ERROR)
}
