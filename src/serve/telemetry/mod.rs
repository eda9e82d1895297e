//! Records of requests: log lines, metrics, spans.

pub mod access_log;
pub mod ledger;
pub mod metrics;
pub mod observe;
pub mod prefix;
pub mod spans;
#[cfg(any(test, feature = "otel"))]
pub mod traces;
