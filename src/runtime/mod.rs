//! The engine. No terminal, no HTTP server, no vendor's words, no environment variables.
//!
//! Everything outside imports from this facade only.

pub mod backend;
pub mod chat_tokenizer;
pub mod client;

pub mod embed;
pub mod engine;
pub mod error;
pub mod grammar;

pub mod hints;
pub mod http_engine;
pub mod infill;
pub mod kv;
pub mod load;
pub mod machine;
pub mod memory;
pub mod model;
pub mod notice;
pub mod panels;
pub mod private_files;
pub mod repetition;
pub mod request;
pub mod sample;
pub mod sequence;
pub mod session;
pub mod spec;
pub mod step;
pub mod template_check;
pub mod tensor;
pub mod text;
pub mod thread;
pub mod turn;
pub mod units;
pub mod worker;

pub use chat_tokenizer::ChatTokenizer;
pub use client::{EndGuard, EngineClient, EngineTransport, EventStream, NotYet, RemoteEngineFacts, Sink};
pub use engine::{
    DecodeOutcome, Engine, EngineLoad, RequestId, SessionDetail, SessionId, SessionInfo, SessionState,
    StopHandle,
};
pub(crate) use error::panic_text;
pub use error::{Error, GrammarError, LoadError, ModelCandidate, Result, StoreCause, StoreError};
pub use grammar::{Grammar, GrammarCompiler, GrammarSource};
pub use hints::Frontend;
pub use llmctl_kernel as kernel;
pub use notice::Notice;
pub use repetition::goes_round;
pub use request::{
    Difference, DraftModelUsage, DraftStop, EngineSessionName, Event, FREE_TEXT, Finish, GivenSampling,
    Limits, Logprob, MAX_LOGPROBS, ModelDrafter, Outcome, Overflow, RemoteUsage, Request, Reuse, ReuseReason,
    SAMPLING, Sampling, SamplingNumber, SamplingNumbers, SamplingParameter, Started, Timings, Token, TopK,
    Usage,
};
pub use sample::draw_seed;
pub use session::difference::Explanation;
pub use spec::{EngineConfig, EngineSpec, ServingCapacity, Speculation};
