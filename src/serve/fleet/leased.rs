//! Answers of a loaded model.
//!
//! Invariant: a model stays loaded until the response of the last request to it has ended.

use axum::body::Body;
use axum::extract::Request;
use axum::response::Response;
use http_body_util::BodyExt;
use tower::ServiceExt;

use super::LoadedMember;
use super::pool::Lease;

/// Gives a request to a loaded model.
pub async fn answered_by(lease: Lease<LoadedMember>, request: Request) -> Response {
    let router = lease.value().router.clone();
    let response = match router.oneshot(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    };
    // A body that maps its errors keeps its length, and what the function holds until it is dropped.
    response.map(|body| {
        Body::new(body.map_err(move |error| {
            let _ = &lease;
            error
        }))
    })
}
