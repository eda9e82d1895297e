//! Typed, checked getters over config.json or GGUF metadata.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Map, Value};

use llmctl_base::error::{LoadError, LoadResult};

/// Source format of a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelFormat {
    HuggingFace,
    Gguf,
}

/// Limit on the tokens of a convolution's kernel.
const MAX_KERNEL: usize = 1 << 10;

type Lookup = Arc<dyn Fn(&str) -> Option<Value> + Send + Sync>;

/// Reader of one model's configuration. Keys differ between the formats; the getters and their errors do not.
pub struct ConfigReader {
    path: PathBuf,
    format: ModelFormat,
    lookup: Lookup,
}

impl ConfigReader {
    /// Creates a reader of a config.json. A multimodal one is read from its `text_config`, and from the top level for
    /// keys missing there.
    pub fn hugging_face(path: PathBuf, config: Value) -> Self {
        let lookup = move |key: &str| {
            let nested = config.get("text_config").and_then(|text| text.get(key));
            nested.or_else(|| config.get(key)).cloned()
        };
        Self { path, format: ModelFormat::HuggingFace, lookup: Arc::new(lookup) }
    }

    /// Creates a reader of a GGUF file. `lookup` receives whole keys; the getters take keys without the
    /// architecture's prefix.
    pub fn gguf(path: PathBuf, lookup: impl Fn(&str) -> Option<Value> + Send + Sync + 'static) -> Self {
        let prefix = lookup("general.architecture").and_then(|name| name.as_str().map(str::to_owned));
        let prefix = prefix.unwrap_or_default();
        let lookup = move |key: &str| lookup(&format!("{prefix}.{key}")).or_else(|| lookup(key));
        Self { path, format: ModelFormat::Gguf, lookup: Arc::new(lookup) }
    }

    /// Returns a reader that finds these keys before those of the file.
    #[must_use]
    pub fn with(&self, keys: Map<String, Value>) -> Self {
        let of_file = Arc::clone(&self.lookup);
        let lookup = move |key: &str| keys.get(key).cloned().or_else(|| of_file(key));
        Self { path: self.path.clone(), format: self.format, lookup: Arc::new(lookup) }
    }

    /// Returns the first `num_layers` values of the lists under `keys`, for [`Self::with`].
    pub fn cut_lists(&self, keys: &[&str], num_layers: usize) -> Map<String, Value> {
        let cut = |key: &&str| match self.value(key)? {
            Value::Array(mut list) => {
                list.truncate(num_layers);
                Some(((*key).to_owned(), Value::Array(list)))
            }
            _ => None,
        };
        keys.iter().filter_map(cut).collect()
    }

    pub fn format(&self) -> ModelFormat {
        self.format
    }

    pub fn is_gguf(&self) -> bool {
        self.format == ModelFormat::Gguf
    }

    /// Returns the family's name in the file.
    pub fn architecture(&self) -> LoadResult<String> {
        self.string(self.pick("model_type", "general.architecture"))?
            .ok_or_else(|| self.error(self.pick("model_type", "general.architecture"), "is missing"))
    }

    /// Returns the key's name in this format.
    pub fn pick(&self, hugging_face: &'static str, gguf: &'static str) -> &'static str {
        if self.is_gguf() { gguf } else { hugging_face }
    }

    pub fn value(&self, key: &str) -> Option<Value> {
        (self.lookup)(key).filter(|value| !value.is_null())
    }

    /// Returns whether the file lacks the key; `null` counts as present.
    pub fn is_absent(&self, key: &str) -> bool {
        (self.lookup)(key).is_none()
    }

    /// Creates an error that names the file and the key.
    pub fn error(&self, key: &str, message: impl Into<String>) -> LoadError {
        LoadError::Malformed { path: self.path.clone(), what: key.to_owned(), message: message.into() }
    }

    /// Creates an error for a valid file that llmctl does not run.
    pub fn unsupported(&self, message: impl Into<String>) -> LoadError {
        LoadError::Unsupported { path: self.path.clone(), message: message.into() }
    }

    /// Returns a count; `None` if the file lacks the key.
    pub fn count(&self, key: &str) -> LoadResult<Option<usize>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        // Larger counts are invalid in any model.
        match value.as_u64().or_else(|| value.as_f64().filter(|x| x.fract() == 0.0).map(|x| x as u64)) {
            Some(count) if count < 1 << 32 && value.as_f64().is_some_and(|x| x >= 0.0) => {
                Ok(Some(count as usize))
            }
            _ => Err(self.error(key, format!("{value} is not a count"))),
        }
    }

    /// Returns a count, of a list the first; `None` if the file lacks the key.
    pub fn first_count(&self, key: &str) -> LoadResult<Option<usize>> {
        match self.value(key) {
            Some(Value::Array(list)) => Ok(list.first().and_then(Value::as_u64).map(|count| count as usize)),
            _ => self.count(key),
        }
    }

    /// Returns a count for each of `num_layers` layers, from a list or one number for all; `None` if the file lacks
    /// the key.
    pub fn counts(&self, key: &str, num_layers: usize) -> LoadResult<Option<Vec<usize>>> {
        if !self.value(key).is_some_and(|value| value.is_array()) {
            return Ok(self.count(key)?.map(|count| vec![count; num_layers]));
        }
        let count = |value: &Value| value.as_u64().filter(|&n| n < 1 << 32).map(|n| n as usize);
        self.list(key, num_layers, &format!("counts for {num_layers} layers"), count)
    }

    /// Returns a list of `len` values that `read` takes, `what` in errors; `None` if the file lacks the key.
    pub fn list<T>(
        &self,
        key: &str,
        len: usize,
        what: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> LoadResult<Option<Vec<T>>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let list = value.as_array().filter(|list| list.len() == len);
        let list: Option<Vec<T>> = list.and_then(|list| list.iter().map(read).collect());
        list.map(Some).ok_or_else(|| self.error(key, format!("is not a list of {what}")))
    }

    /// Returns a count that one layer has instead of all layers' count, in the form that transformers writes from 5.24 on; `None`
    /// if the layer has none.
    pub fn count_of_layer(&self, layer: usize, key: &str) -> Option<usize> {
        let of_layer = self.value("per_layer_config")?;
        of_layer.get(layer.to_string())?.get(key)?.as_u64().filter(|&n| n < 1 << 32).map(|n| n as usize)
    }

    /// Returns a required count within `1..=max`.
    pub fn size(&self, key: &str, max: usize) -> LoadResult<usize> {
        let count = self.count(key)?.ok_or_else(|| self.error(key, "is missing"))?;
        if (1..=max).contains(&count) {
            Ok(count)
        } else {
            Err(self.error(key, format!("{count} is not between 1 and {max}")))
        }
    }

    /// Returns a count within `1..=max`, or `default` if the file lacks the key.
    pub fn size_or(&self, key: &str, default: usize, max: usize) -> LoadResult<usize> {
        self.count(key)?.map_or(Ok(default), |_| self.size(key, max))
    }

    /// Returns the width of sliding windows.
    pub fn window(&self) -> LoadResult<Option<usize>> {
        self.count(self.pick("sliding_window", "attention.sliding_window"))
    }

    /// Returns an interval of layers.
    pub fn interval(&self, key: &str, default: usize) -> LoadResult<usize> {
        match self.count(key)? {
            Some(0) => Err(self.error(key, "0 is not a valid interval of layers")),
            given => Ok(given.unwrap_or(default)),
        }
    }

    /// Returns the number of tokens of a convolution's kernel.
    pub fn kernel(&self, key: &str, default: usize) -> LoadResult<usize> {
        match self.count(key)?.unwrap_or(default) {
            kernel if (2..=MAX_KERNEL).contains(&kernel) => Ok(kernel),
            kernel => Err(self.error(key, format!("{kernel} is not a valid kernel length"))),
        }
    }

    /// Returns the layers that are listed under `key`.
    pub fn listed_layers(&self, key: &str) -> LoadResult<Option<Vec<usize>>> {
        let listed = self.value(key).map(serde_json::from_value).transpose();
        listed.map_err(|error| self.error(key, format!("is not a list of layers: {error}")))
    }

    /// Returns which layers of a GGUF have no heads for keys and values: those without attention.
    pub fn layers_without_heads(&self, num_layers: usize) -> LoadResult<Vec<bool>> {
        let heads = self.counts("attention.head_count_kv", num_layers)?.unwrap_or_default();
        Ok(heads.iter().map(|heads| *heads == 0).collect())
    }

    pub fn number(&self, key: &str) -> LoadResult<Option<f32>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number.is_finite() => Ok(Some(number as f32)),
            _ => Err(self.error(key, format!("{value} is not a number"))),
        }
    }

    pub fn flag(&self, key: &str) -> LoadResult<Option<bool>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.error(key, format!("{value} is not true or false")))
    }

    pub fn string(&self, key: &str) -> LoadResult<Option<String>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match value {
            Value::String(text) => Ok(Some(text)),
            other => Err(self.error(key, format!("{other} is not a string"))),
        }
    }

    /// Returns for each layer whether it has a sliding window, if the file has `layer_types`.
    pub fn sliding_layers(&self, num_layers: usize) -> LoadResult<Option<Vec<bool>>> {
        self.layers_of_kind(num_layers, "sliding_attention")
    }

    /// Returns for each layer whether it has a sliding window: as listed, or all but every `period`th. GGUF has a list or
    /// a period of its own.
    pub fn sliding_pattern(&self, num_layers: usize, period: usize) -> LoadResult<Vec<bool>> {
        const KEY: &str = "attention.sliding_window_pattern";
        let by_period =
            |period: usize| (1..=num_layers).map(|number| !number.is_multiple_of(period)).collect();
        if !self.is_gguf() {
            return Ok(self.sliding_layers(num_layers)?.unwrap_or_else(|| by_period(period)));
        }
        match self.value(KEY) {
            None => Ok(by_period(period)),
            Some(Value::Array(_)) => {
                let slides = |value: &Value| value.as_bool().or_else(|| value.as_u64().map(|flag| flag != 0));
                let listed = self.list(KEY, num_layers, &format!("{num_layers} layers"), slides)?;
                Ok(listed.unwrap_or_default())
            }
            Some(_) => self.size(KEY, num_layers).map(by_period),
        }
    }

    /// Returns for each layer whether it is of `kind` instead of `full_attention`, if the file has `layer_types`.
    pub fn layers_of_kind(&self, num_layers: usize, kind: &str) -> LoadResult<Option<Vec<bool>>> {
        self.layers_named("layer_types", num_layers, [&[kind], &["full_attention"]])
    }

    /// Returns for each layer whether the list under `key` gives it one of the names `of_kind`, not one of `others`; `None`
    /// if the file lacks the list.
    pub fn layers_named(
        &self,
        key: &str,
        num_layers: usize,
        [of_kind, others]: [&[&str]; 2],
    ) -> LoadResult<Option<Vec<bool>>> {
        let what = format!("{num_layers} kinds of layers");
        let kinds = self.list(key, num_layers, &what, |kind| kind.as_str().map(str::to_owned))?;
        let Some(kinds) = kinds else { return Ok(None) };
        let is_of_kind = kinds.iter().map(|kind| match kind.as_str() {
            name if of_kind.contains(&name) => Ok(true),
            name if others.contains(&name) => Ok(false),
            other => Err(self.error(key, format!("{other:?} is not a known kind of layer"))),
        });
        is_of_kind.collect::<Result<_, _>>().map(Some)
    }

    /// Returns for each layer whether it has a sliding window, if the file has `layer_types`, and otherwise what `default` says.
    pub fn sliding_or(&self, num_layers: usize, default: impl Fn(usize) -> bool) -> LoadResult<Vec<bool>> {
        Ok(self.sliding_layers(num_layers)?.unwrap_or_else(|| (0..num_layers).map(default).collect()))
    }
}
