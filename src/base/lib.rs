//! Errors, notices and sampling parameters in common, and facts about the machine. Knows no model, no engine
//! and no frontend.

pub mod columns;
pub mod error;
pub mod machine;
pub mod notice;
pub mod private_files;
pub mod read;
pub mod sampling;
pub mod units;
pub mod vault;

pub use error::{Error, GrammarError, LoadError, ModelCandidate, Result, StoreCause, StoreError, panic_text};
pub use notice::Notice;
pub use sampling::{
    DRY_SEQUENCE_BREAKERS, FREE_TEXT, GivenSampling, SAMPLING, SamplerStep, Sampling, SamplingNumber,
    SamplingNumbers, SamplingParameter, TopK,
};
pub use vault::Vault;
