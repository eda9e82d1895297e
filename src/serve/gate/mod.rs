//! Checks keys, hosts and origins, finds the owner of a request's sessions, and gives the request its id.

pub mod owner;
pub mod policy;
pub mod request_id;
