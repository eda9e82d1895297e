//! The engine: requests, sessions, grammars and sampling over a model. No terminal, no HTTP server, no
//! vendor's words, no environment variables.

pub mod chat_tokenizer;
pub mod client;
pub mod embed;
pub mod engine;
pub mod grammar;
pub mod http_engine;
pub mod images;
pub mod infill;
pub mod receipt;
pub mod repetition;
pub mod request;
pub mod sample;
pub mod sequence;
pub mod session;
pub mod spec;
pub mod step;
pub mod template_check;
pub mod thread;
pub mod turn;
pub mod worker;

pub use chat_tokenizer::ChatTokenizer;
pub use client::{EndGuard, EngineClient, EngineTransport, EventStream, NotYet, RemoteEngineFacts, Sink};
pub use engine::{
    DecodeOutcome, Engine, EngineLoad, RequestId, SessionDetail, SessionId, SessionInfo, SessionState,
    StopHandle,
};
pub use grammar::{Grammar, GrammarCompiler, GrammarSource};
pub use request::{
    Difference, DraftModelUsage, DraftStop, EngineSessionName, Event, Finish, ImageDifference, ImageUsage,
    Limits, Logprob, LoopGuard, MAX_LOGPROBS, ModelDrafter, Outcome, Overflow, PromptImage, ReasoningLimit,
    RemoteUsage, Request, Reuse, ReuseReason, Started, Timings, Token, Usage,
};
pub use sample::draw_seed;
pub use session::difference::Explanation;
pub use spec::{EngineConfig, EngineSpec, ServingCapacity, Speculation};
