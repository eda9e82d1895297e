//! Text in and out of token ids: tokenizer, incremental UTF-8, stop strings.

pub mod tokenizer;

pub use tokenizer::Tokenizer;
