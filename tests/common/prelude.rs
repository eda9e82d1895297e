//! What most tests name: one import instead of ten.

pub use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::File,
    io::{BufRead, BufReader, Read},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

pub use axum::http::{Method, StatusCode};
pub use llmctl_base::{Error, GivenSampling, LoadError, Sampling};
pub use llmctl_engine::session::store::{ModelFingerprint, SessionName, SessionStore};
pub use llmctl_engine::{
    ChatTokenizer, DraftModelUsage, Engine, EngineClient, EngineConfig, Event, Finish, Limits, Outcome,
    Request, Reuse, ReuseReason, Speculation, Token, Usage,
};
pub use llmctl_hub::{ModelSource, Resolved};
pub use llmctl_kernel::Dtype;
pub use llmctl_models::backend::KvType;
pub use llmctl_models::kv::disk::{DEFAULT_QUEUE_BYTES, DiskConfig, DiskStore};
pub use llmctl_models::kv::{KvKind, PAGE_TOKENS, PagePool, PageRef, PageTable};
pub use llmctl_models::load::gguf::Gguf;
pub use llmctl_models::load::safetensors::Safetensors;
pub use llmctl_models::load::tokenizer::from_folder;
pub use llmctl_models::load::{CpuOptions, Device, LoadOptions, LoadedModel, ModelFiles};
pub use llmctl_models::model::{Batch, Model, ModelSpec, Row};
pub use llmctl_models::tensor::{SharedBytes, TensorSource};
pub use llmctl_models::text::{HfSettings, Tokenizer};
pub use llmctl_serve::ServeSettings;
pub use llmctl_serve::engines::engine::EngineSlot;
pub use llmctl_template::{
    ChatTemplate, Content, Conversation, Message, OutputMarkup, ReasoningFormat, RenderOptions, Role,
    SpecialTokens, ToolCall, ToolCallFormat,
};
pub use safetensors::tensor::TensorView;
pub use serde_json::{Map, Value, json};
pub use tempfile::TempDir;

pub use super::{
    child_of_test, cpu, fixtures,
    gguf::GgufBuilder,
    golden::{
        Fed, exact, families, golden_prompts, largest_difference, load_model, next_folder, on_candle,
        page_pool, parity_folder, parity_gguf, relative_distance, same_bits, top_two, worst_difference,
    },
    kv_store, name, named,
    server::{Build, CHATML, FREE, QWENISH, Server, content, ignored, on_disk, reason, stores},
    stored_turn,
    tables::listed,
    telling::greedy,
    toy::{
        Answer, Log, Rule, Setup, ToyModel, ToyVocabulary, counting, fed_tokens, hashing, limited,
        num_forwards, recomputed, run_all, run_one, seeded, varied, within,
    },
    watched::Watched,
    words,
};
pub use crate::cli::{Place, Ran, finish};
