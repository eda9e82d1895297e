//! Fields of other servers that this one need not act on: hints, on which no answer depends, and settings
//! whose usual value asks for what is so anyway. `other_servers.json` lists them.
//!
//! Invariants: hints are taken whatever they say and reported as without effect; inert settings are taken
//! with the values that are listed, which count as absent, and refused by name with any other.

use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::Value;

/// The lists of `other_servers.json`.
#[derive(Deserialize)]
pub struct OtherServers {
    hints: Vec<HintGroup>,
    inert: Vec<(String, Vec<Value>)>,
    /// Ollama's settings of the context's length, devices and memory, which requests do not change here.
    pub machine: Vec<String>,
    /// Members that clients keep of an answer and send back, on which nothing depends.
    pub echoed: Vec<String>,
    /// The same in a tool call and its function.
    pub echoed_in_calls: Vec<String>,
    /// Hints of Anthropic's API: labels, prices, places, and caches that are kept anyway.
    pub anthropic: Vec<String>,
}

#[derive(Deserialize)]
struct HintGroup {
    names: Vec<String>,
}

pub static OTHER_SERVERS: LazyLock<OtherServers> = LazyLock::new(|| {
    serde_json::from_str(include_str!("other_servers.json")).expect("a file of the source, which tests read")
});

/// Returns the names of hints and labels at the top level of a request.
pub fn hints() -> impl Iterator<Item = &'static str> {
    OTHER_SERVERS.hints.iter().flat_map(|group| &group.names).map(String::as_str)
}

/// Returns settings of other servers, with the values that ask for nothing.
pub fn inert_settings() -> impl Iterator<Item = (&'static str, &'static [Value])> {
    OTHER_SERVERS.inert.iter().map(|(name, values)| (name.as_str(), &values[..]))
}
