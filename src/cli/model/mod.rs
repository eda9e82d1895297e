//! Models on this machine: named, downloaded, listed, loaded, quantised, and the servers that have them
//! loaded.

pub mod download;
pub mod hub_access;
pub mod load;
pub mod models;
pub mod pull;
pub mod quantize;
pub mod resume;
pub mod running;
pub mod sight;
pub mod starter;
