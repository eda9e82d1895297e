//! Work that may take long or wait for a disk, where waiting is allowed.

use crate::error::ApiError;

/// Runs the work on a thread that may wait.
///
/// # Errors
/// Those of the work.
pub async fn blocking<S: Clone + Send + 'static, T: Send + 'static>(
    state: &S,
    work: impl FnOnce(&S) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let state = state.clone();
    let done = tokio::task::spawn_blocking(move || work(&state)).await;
    done.map_err(|_| ApiError::internal("the request failed within the server"))?
}
