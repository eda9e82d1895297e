//! Who may ask, whose sessions a request uses, and its id.

pub mod owner;
pub mod policy;
pub mod request_id;
