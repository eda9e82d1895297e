//! Converts Hugging Face's config.json to the one that candle-transformers reads: every value is named,
//! checked and completed with defaults, and refused if candle-transformers would ignore it.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::Sizes;
use crate::model::arch::rope::{partial_factor, rope};
use crate::model::arch::{ConfigReader, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH};
use crate::model::config::RopeScaling;
use llmctl_base::error::LoadResult;
use llmctl_base::notice::Notice;

/// The config under construction, key by key.
pub struct CandleConfig<'a> {
    pub reader: &'a ConfigReader,
    pub map: Map<String, Value>,
    /// The embedding table's name, if it is also the output matrix.
    pub tied: Option<&'static str>,
}

/// Defaults of a family's class; without heads the model has no attention.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usual {
    pub num_kv_heads: Option<usize>,
    /// Head size, if it is not hidden size / heads.
    pub head_dim: Option<usize>,
}

impl<'a> CandleConfig<'a> {
    pub fn new(reader: &'a ConfigReader) -> Self {
        Self { reader, map: Map::new(), tied: None }
    }

    pub fn put(&mut self, key: &str, value: impl Into<Value>) {
        self.map.insert(key.to_owned(), value.into());
    }

    /// Reads a count of at least 1.
    pub fn size(&mut self, key: &'static str, usual: Option<usize>) -> LoadResult<usize> {
        let size = match usual {
            Some(usual) => self.reader.size_or(key, usual, MAX_WIDTH)?,
            None => self.reader.size(key, MAX_WIDTH)?,
        };
        self.put(key, size);
        Ok(size)
    }

    /// Reads a number above 0 under the first of `names` that the file has.
    pub fn positive(&mut self, names: &[&'static str], usual: f64) -> LoadResult<f64> {
        let key = names.iter().copied().find(|key| self.reader.value(key).is_some()).unwrap_or(names[0]);
        let value = self.reader.value(key).unwrap_or(json!(usual));
        let number = value.as_f64().filter(|number| *number > 0.0 && number.is_finite());
        let number =
            number.ok_or_else(|| self.reader.error(key, format!("{value} is not a number above 0")))?;
        self.put(names[0], number);
        Ok(number)
    }

    pub fn flag(&mut self, key: &'static str, usual: bool) -> LoadResult<bool> {
        let flag = self.reader.flag(key)?.unwrap_or(usual);
        self.put(key, flag);
        Ok(flag)
    }

    /// Reads an activation's name; candle-transformers decides which ones it knows.
    pub fn text(&mut self, key: &'static str, usual: &str) -> LoadResult<()> {
        let text = self.reader.string(key)?.unwrap_or_else(|| usual.to_owned());
        self.put(key, text);
        Ok(())
    }

    /// Reads whether the embedding table, `table`, is also the output matrix.
    pub fn ties(&mut self, usual: bool, table: &'static str) -> LoadResult<()> {
        self.tied = self.flag("tie_word_embeddings", usual)?.then_some(table);
        Ok(())
    }

    /// Refuses a file in which `key` differs from `value`, the default.
    pub fn only(&self, key: &'static str, value: impl Into<Value>) -> LoadResult<()> {
        let value = value.into();
        let found = self.reader.value(key).unwrap_or_else(|| value.clone());
        let is_same = found == value || found.as_f64().zip(value.as_f64()).is_some_and(|(a, b)| a == b);
        match is_same {
            true => Ok(()),
            false => Err(self.reader.unsupported(format!(
                "{key} is {found}, but candle-transformers supports only {value} for this family"
            ))),
        }
    }

    /// Reads vocabulary, hidden size and layers.
    pub fn body(&mut self) -> LoadResult<Sizes> {
        let vocab_size = self.reader.size("vocab_size", MAX_VOCAB)?;
        let num_layers = self.reader.size("num_hidden_layers", MAX_LAYERS)?;
        self.put("vocab_size", vocab_size);
        self.put("num_hidden_layers", num_layers);
        let hidden_size = self.size("hidden_size", None)?;
        Ok(Sizes {
            vocab_size,
            hidden_size,
            num_layers,
            num_heads: 0,
            num_kv_heads: 0,
            head_dim: 0,
            widest: hidden_size,
        })
    }

    /// Reads the same, with the attention heads and the feed-forward width.
    pub fn transformer(&mut self, usual: Usual) -> LoadResult<Sizes> {
        let body = self.body()?;
        let num_heads = self.size("num_attention_heads", None)?;
        let num_kv_heads = self.size("num_key_value_heads", Some(usual.num_kv_heads.unwrap_or(num_heads)))?;
        if !num_heads.is_multiple_of(num_kv_heads) {
            let message =
                format!("{num_heads} query heads cannot share {num_kv_heads} key-value heads evenly");
            return Err(self.reader.error("num_key_value_heads", message));
        }
        let head_dim = match usual.head_dim {
            Some(usual) => self.size("head_dim", Some(usual))?,
            None => self.share_of_a_head(body.hidden_size, num_heads)?,
        };
        let inner = self.size("intermediate_size", None)?;
        let widest = inner.max(num_heads.saturating_mul(head_dim));
        Ok(Sizes { num_heads, num_kv_heads, head_dim, widest, ..body })
    }

    fn share_of_a_head(&self, hidden_size: usize, num_heads: usize) -> LoadResult<usize> {
        let share = hidden_size / num_heads;
        if !hidden_size.is_multiple_of(num_heads)
            || self.reader.count("head_dim")?.is_some_and(|dim| dim != share)
        {
            let message = format!("does not divide the hidden size of {hidden_size} into heads");
            return Err(self.reader.error("num_attention_heads", message));
        }
        Ok(share)
    }

    /// Reads the context length of the model.
    pub fn context(&self, usual: usize) -> LoadResult<usize> {
        const KEY: &str = "max_position_embeddings";
        let context = self.reader.count(KEY)?.unwrap_or(usual);
        match context {
            2.. => Ok(context),
            _ => Err(self.reader.error(KEY, format!("{context} tokens have no room for an answer"))),
        }
    }

    /// Reads the base of plain rotary positions: candle-transformers supports no scaling in these families.
    pub fn rope(&mut self, usual_theta: f32, rotated: usize) -> LoadResult<f32> {
        let rope = rope(self.reader, "full_attention", rotated, usual_theta)?;
        if rope.scaling != RopeScaling::None {
            return Err(self.reader.unsupported(
                "candle-transformers does not support scaled rotary positions for this family".to_owned(),
            ));
        }
        if rotated == 0 || !rotated.is_multiple_of(2) {
            let message = format!("{rotated} values of a head cannot be rotated in pairs");
            return Err(self.reader.error("num_attention_heads", message));
        }
        self.put("rope_theta", f64::from(rope.theta));
        Ok(rope.theta)
    }

    /// Returns the number of rotated values of a head; stores the fraction under the first of the names, whichever
    /// the file uses.
    pub fn rotated(&mut self, names: &[&'static str], usual: f64, head_dim: usize) -> LoadResult<usize> {
        let part = match partial_factor(self.reader, "full_attention").and_then(|part| part.as_f64()) {
            Some(part) => part,
            None => self.positive(names, usual)?,
        };
        if !(part > 0.0 && part <= 1.0) {
            return Err(self.reader.error(names[0], format!("{part} is not a fraction of a head")));
        }
        self.put(names[0], part);
        Ok((part * head_dim as f64) as usize)
    }

    /// Limits the context to a window that candle-transformers does not apply to its cache: results are right only
    /// until a token leaves it.
    pub fn within_window(&mut self, context: usize, is_used: bool) -> LoadResult<(usize, Option<Notice>)> {
        let window = self.reader.count("sliding_window")?.filter(|window| is_used && *window < context);
        let Some(window) = window else { return Ok((context, None)) };
        if window < 2 {
            return Err(self
                .reader
                .error("sliding_window", format!("{window} tokens have no room for an answer")));
        }
        Ok((window, Some(Notice::NoSlidingWindow { window, context })))
    }
}

/// Parses a config of candle-transformers.
///
/// # Errors
/// candle-transformers' error about the first key that it cannot read.
pub fn read<C: DeserializeOwned>(map: Map<String, Value>) -> candle_core::Result<C> {
    serde_json::from_value(Value::Object(map)).map_err(candle_core::Error::wrap)
}
