//! Answers of a loaded model.
//!
//! Invariant: a model stays loaded until the response of the last request to it has ended.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::response::Response;
use hyper::body::{Frame, SizeHint};
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
    response.map(|inner| Body::new(LeasedBody { inner, _lease: lease }))
}

/// A response body whose model stays loaded until its end.
struct LeasedBody {
    inner: Body,
    _lease: Lease<LoadedMember>,
}

impl HttpBody for LeasedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
