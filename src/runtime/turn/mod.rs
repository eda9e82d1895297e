//! One turn, for every frontend.

pub mod constraint;
pub mod session_chat;
