//! Limits of connections and of slow bodies; tells when a client has left.

pub mod connection;
pub mod half_open;
pub mod uploads;
