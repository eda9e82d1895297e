//! From a connection to a handler: sockets, routes, the layers around them and the stage of the server.

pub mod access;
pub mod guard;
pub mod lifecycle;
pub mod listen;
pub mod router;
