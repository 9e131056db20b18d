//! Calls of one batch side by side.

use tokio::task::JoinSet;

/// Runs `call` in a task of its own, which ends when this is dropped.
///
/// A call by a node's engine blocks its thread: of several that are polled by one task only one would be under way at a
/// time.
pub async fn apart<T: Send + 'static>(call: impl Future<Output = T> + Send + 'static) -> T {
    let mut task = JoinSet::new();
    task.spawn(call);
    match task.join_next().await.map(|ended| ended.map_err(tokio::task::JoinError::try_into_panic)) {
        Some(Ok(done)) => done,
        Some(Err(Ok(panic))) => std::panic::resume_unwind(panic),
        // The runtime ends: so does this.
        Some(Err(Err(_))) | None => std::future::pending().await,
    }
}
