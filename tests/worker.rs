//! Promise: a program that speaks the worker protocol gets from `llmctl worker` what it would get from the engine in its own
//! process. A client of the reference server's worker works unchanged; ids let any number of requests run together; whatever
//! is sent is answered, and whoever goes away leaves no worker behind. Every line of these tests, in both directions, is held
//! against docs/worker-protocol.schema.json.

mod client;
mod ends;
mod lines;
mod many;
mod reference;
mod same;
mod toy;
