//! Rotary settings of config.json, before and since transformers 5, and of GGUF.

use serde_json::Value;

use super::config_reader::ConfigReader;
use crate::model::config::{RopeConfig, RopeScaling, RopeSections};
use crate::model::rope::ln;
use llmctl_base::error::{LoadError, LoadResult};

/// Reads the rotary table for layers of `kind` ("full_attention" if a family has one kind only).
pub fn rope(reader: &ConfigReader, kind: &str, dim: usize, default_theta: f32) -> LoadResult<RopeConfig> {
    let rope = match reader.is_gguf() {
        true => gguf(reader, dim, default_theta)?,
        false => hugging_face(reader, kind, dim, default_theta)?,
    };
    check(&rope)
        .map_err(|message| reader.error(reader.pick("rope_theta / rope_scaling", "rope"), message))?;
    Ok(rope)
}

/// Reads the rotary table of local layers, which only the form of transformers 5 can scale.
pub fn local_rope(reader: &ConfigReader, global: &RopeConfig, default_theta: f32) -> LoadResult<RopeConfig> {
    if !reader.is_gguf() && reader.value("rope_parameters").is_some() {
        return rope(reader, "sliding_attention", global.dim, default_theta);
    }
    let key = reader.pick("rope_local_base_freq", "rope.freq_base_swa");
    let theta = reader.number(key)?.unwrap_or(default_theta);
    Ok(RopeConfig::new(global.dim, theta, RopeScaling::None))
}

/// Reads the sections of M-RoPE into a rotary table; without them in the file, it has the family's, if its pairs suffice.
pub fn set_sections(
    rope: &mut RopeConfig,
    reader: &ConfigReader,
    default: [usize; 3],
    interleaved: bool,
) -> LoadResult<()> {
    let (key, listed) = match reader.is_gguf() {
        true => ("rope.dimension_sections", reader.value("rope.dimension_sections")),
        false => {
            let found = parameters(reader, "full_attention")?;
            ("mrope_section", found.and_then(|(_, map)| map.get("mrope_section").cloned()))
        }
    };
    let total = |counts: &[usize; 3]| counts.iter().fold(0, |sum: usize, count| sum.saturating_add(*count));
    let pairs = rope.dim / 2;
    let counts = match listed.filter(|listed| !listed.is_null()) {
        None => Some(default).filter(|counts| total(counts) <= pairs),
        Some(listed) => {
            let count = |at| listed.get(at)?.as_u64().and_then(|count| usize::try_from(count).ok());
            let counts =
                (|| Some([count(0)?, count(1)?, count(2)?]))().filter(|counts| total(counts) <= pairs);
            let message =
                || reader.error(key, format!("{listed} are not three sections of {pairs} rotary pairs"));
            Some(counts.ok_or_else(message)?)
        }
    };
    rope.sections = counts.map(|counts| RopeSections { counts, interleaved });
    Ok(())
}

/// Checks the numbers; invalid ones would only show as NaN logits.
fn check(rope: &RopeConfig) -> Result<(), String> {
    let positive = |name: &str, value: f32| match value > 0.0 && value.is_finite() {
        true => Ok(()),
        false => Err(format!("{name} is {value}, which must be above 0")),
    };
    positive("theta", rope.theta)?;
    match &rope.scaling {
        RopeScaling::None | RopeScaling::Divisors(_) => Ok(()),
        RopeScaling::Linear { factor } => positive("factor", *factor),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            positive("factor", *factor)?;
            positive("low_freq_factor", *low_freq_factor)?;
            positive("high_freq_factor - low_freq_factor", high_freq_factor - low_freq_factor)?;
            positive("original context", *original_context as f32)
        }
        RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context, .. } => {
            positive("factor", *factor)?;
            positive("beta_fast", *beta_fast)?;
            positive("beta_slow", *beta_slow)?;
            positive("original context", *original_context as f32)
        }
        RopeScaling::LongRope { short, long, original_context, attention_factor } => {
            positive("original context", *original_context as f32)?;
            positive("attention_factor", *attention_factor)?;
            let pairs = rope.dim / 2;
            // GGUF's lists are empty until the tensors are read, and checked then.
            match [short, long].iter().find(|list| !list.is_empty() && list.len() != pairs) {
                Some(list) => Err(format!("{} factors for {pairs} rotary pairs", list.len())),
                None => Ok(()),
            }
        }
    }
}

/// Returns the rotated fraction of a head, which transformers 5 keeps with the other rotary parameters.
pub fn partial_factor(reader: &ConfigReader, kind: &str) -> Option<Value> {
    let all = reader.value("rope_parameters")?;
    all.get(kind).unwrap_or(&all).get("partial_rotary_factor").cloned()
}

/// Reads config.json. transformers 5 keeps theta and scaling together in `rope_parameters`, per kind of layer if they
/// differ; before, they were `rope_theta` and `rope_scaling`.
fn hugging_face(reader: &ConfigReader, kind: &str, dim: usize, default_theta: f32) -> LoadResult<RopeConfig> {
    let (key, map) = parameters(reader, kind)?.unwrap_or(("rope_scaling", Value::Null));
    let parameters = Parameters { reader, key, map };
    let theta = match parameters.number("rope_theta")? {
        Some(theta) => theta,
        None => reader.number("rope_theta")?.unwrap_or(default_theta),
    };
    if let Some(alpha) = parameters.alpha()? {
        return Ok(RopeConfig::new(dim, ntk_theta(theta, alpha, dim), RopeScaling::None));
    }
    Ok(RopeConfig::new(dim, theta, parameters.scaling(dim)?))
}

/// Returns the object of rotary parameters for layers of `kind`, and its key; `None` if the file has none.
fn parameters(reader: &ConfigReader, kind: &str) -> LoadResult<Option<(&'static str, Value)>> {
    let parameters = reader.value("rope_parameters").map(|all| all.get(kind).cloned().unwrap_or(all));
    let found = match parameters {
        Some(parameters) => Some(("rope_parameters", parameters)),
        None => reader.value("rope_scaling").map(|scaling| ("rope_scaling", scaling)),
    };
    match &found {
        Some((key, other)) if !other.is_object() => {
            Err(reader.error(key, format!("{other} is not an object")))
        }
        _ => Ok(found),
    }
}

/// Returns a number among config.json's rotary parameters; `None` if the file lacks it.
pub fn parameter(reader: &ConfigReader, name: &str) -> LoadResult<Option<f32>> {
    let Some((key, map)) = parameters(reader, "full_attention")? else { return Ok(None) };
    Parameters { reader, key, map }.number(name)
}

/// One JSON object of rotary parameters.
struct Parameters<'a> {
    reader: &'a ConfigReader,
    key: &'static str,
    map: Value,
}

impl Parameters<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn error(&self, message: impl Into<String>) -> LoadError {
        self.reader.error(self.key, message)
    }

    fn number(&self, key: &str) -> LoadResult<Option<f32>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_f64().filter(|number| number.is_finite());
        number.map(|number| Some(number as f32)).ok_or_else(|| self.error(format!("{key} is not a number")))
    }

    fn required(&self, key: &str) -> LoadResult<f32> {
        self.number(key)?.ok_or_else(|| self.error(format!("{key} is missing")))
    }

    /// Returns the context of the first training: from this object, from the top level, or the whole context.
    fn original_context(&self) -> LoadResult<usize> {
        const KEY: &str = "original_max_position_embeddings";
        if let Some(here) = self.number(KEY)? {
            return Ok(here as usize);
        }
        match self.reader.count(KEY)? {
            Some(top) => Ok(top),
            None => self.reader.size("max_position_embeddings", usize::MAX),
        }
    }

    fn divisors(&self, key: &str) -> LoadResult<Vec<f32>> {
        let list = self.get(key).and_then(Value::as_array);
        let numbers = list.and_then(|list| list.iter().map(|x| x.as_f64().map(|x| x as f32)).collect());
        numbers.ok_or_else(|| self.error(format!("{key} is not a list of numbers")))
    }

    fn scaling(&self, dim: usize) -> LoadResult<RopeScaling> {
        match self.name().unwrap_or("default") {
            "default" | "mrope" => Ok(RopeScaling::None),
            "linear" => Ok(RopeScaling::Linear { factor: self.required("factor")? }),
            "llama3" => Ok(RopeScaling::Llama3 {
                factor: self.required("factor")?,
                low_freq_factor: self.required("low_freq_factor")?,
                high_freq_factor: self.required("high_freq_factor")?,
                original_context: self.original_context()?,
            }),
            "yarn" => self.yarn(),
            "proportional" => self.proportional(dim),
            "longrope" | "su" => self.long_rope(),
            other => Err(self.error(format!("rope type {other:?} is not supported"))),
        }
    }

    /// Returns the factor of the context that Hunyuan's form of "dynamic" fixes.
    fn alpha(&self) -> LoadResult<Option<f32>> {
        let is_dynamic = self.name() == Some("dynamic");
        Ok(self.number("alpha")?.filter(|alpha| is_dynamic && *alpha > 0.0))
    }

    fn name(&self) -> Option<&str> {
        self.get("rope_type").or_else(|| self.get("type")).and_then(Value::as_str)
    }

    fn yarn(&self) -> LoadResult<RopeScaling> {
        let factor = self.required("factor")?;
        let [mscale, all_dim] = [self.number("mscale")?, self.number("mscale_all_dim")?];
        // 0 counts as absent, as in transformers.
        let ratio = match (mscale.filter(|scale| *scale != 0.0), all_dim.filter(|scale| *scale != 0.0)) {
            (Some(mscale), Some(all_dim)) => {
                Some(yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim))
            }
            _ => None,
        };
        Ok(RopeScaling::Yarn {
            factor,
            beta_fast: self.number("beta_fast")?.unwrap_or(32.0),
            beta_slow: self.number("beta_slow")?.unwrap_or(1.0),
            original_context: self.original_context()?,
            attention_factor: self.number("attention_factor")?.or(ratio),
            truncate: self.get("truncate").and_then(Value::as_bool).unwrap_or(true),
        })
    }

    /// Returns divisors that rotate the first pairs only, with the frequencies of whole heads (Gemma 4; transformers
    /// `_compute_proportional_rope_parameters`).
    fn proportional(&self, dim: usize) -> LoadResult<RopeScaling> {
        let part = self.number("partial_rotary_factor")?.unwrap_or(1.0);
        let factor = self.number("factor")?.unwrap_or(1.0);
        let turning = (f64::from(part) * dim as f64 / 2.0) as usize;
        let divisor = |pair| if pair < turning { factor } else { f32::INFINITY };
        Ok(RopeScaling::Divisors((0..dim / 2).map(divisor).collect()))
    }

    fn long_rope(&self) -> LoadResult<RopeScaling> {
        let original_context = self.original_context()?;
        let context = self.reader.size("max_position_embeddings", usize::MAX)?;
        let factor = match self.number("factor")? {
            Some(factor) => factor,
            None => context as f32 / original_context as f32,
        };
        let attention_factor = match self.number("attention_factor")? {
            Some(given) => given,
            None => long_rope_magnitude(factor, original_context),
        };
        Ok(RopeScaling::LongRope {
            short: self.divisors("short_factor")?,
            long: self.divisors("long_factor")?,
            original_context,
            attention_factor,
        })
    }
}

/// Computes the base that stretches the slowest pair `alpha` times (NTK-aware interpolation, as in transformers'
/// `compute_ntk_alpha_rope_parameters`).
fn ntk_theta(theta: f32, alpha: f32, dim: usize) -> f32 {
    let exponent = dim as f64 / (dim as f64 - 2.0);
    (f64::from(theta) * libm::pow(alpha.into(), exponent)) as f32
}

/// Computes YaRN's magnitude for a factor of the context (Peng et al. 2023, section 3.4), weighted by `mscale` (DeepSeek V2).
pub fn yarn_magnitude(factor: f32, mscale: f32) -> f32 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * ln(factor) + 1.0 }
}

/// Returns the factor by which YaRN multiplies the scores of latent attention: the square of its magnitude for all
/// dimensions, or 1 if the file names none (transformers `yarn_apply_mscale`).
pub fn yarn_score_factor(reader: &ConfigReader) -> LoadResult<f32> {
    let (factor, mscale) = match reader.is_gguf() {
        // llama.cpp's converter writes a tenth.
        true => (
            reader.number("rope.scaling.factor")?,
            reader.number("rope.scaling.yarn_log_multiplier")?.map(|tenth| 10.0 * tenth),
        ),
        false => (parameter(reader, "factor")?, parameter(reader, "mscale_all_dim")?),
    };
    let magnitude = yarn_magnitude(factor.unwrap_or(1.0), mscale.unwrap_or(0.0));
    Ok(magnitude * magnitude)
}

/// Computes sqrt(1 + ln(s) / ln(original)) for s > 1 (LongRoPE, section 3.3, as transformers computes it).
fn long_rope_magnitude(factor: f32, original_context: usize) -> f32 {
    if factor <= 1.0 { 1.0 } else { (1.0 + ln(factor) / ln(original_context as f32)).sqrt() }
}

/// Reads GGUF's settings; divisors stored as tensors are added when those are read.
fn gguf(reader: &ConfigReader, dim: usize, default_theta: f32) -> LoadResult<RopeConfig> {
    let theta = reader.number("rope.freq_base")?.unwrap_or(default_theta);
    let factor = reader.number("rope.scaling.factor")?.or(reader.number("rope.scale_linear")?);
    let original = reader.count("rope.scaling.original_context_length")?;
    let kind = reader.string("rope.scaling.type")?;
    let scaling = match kind.as_deref() {
        None if factor.is_some() => RopeScaling::Linear { factor: factor.unwrap_or(1.0) },
        None | Some("none" | "longrope") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: factor.unwrap_or(1.0) },
        Some("yarn") => RopeScaling::Yarn {
            factor: factor.unwrap_or(1.0),
            beta_fast: reader.number("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            beta_slow: reader.number("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
            original_context: match original {
                Some(original) => original,
                None => reader.size("context_length", usize::MAX)?,
            },
            // The converter keeps the configuration's magnitude under one key (Laguna); llama.cpp multiplies YaRN's own by
            // that of another.
            attention_factor: match reader.number("rope.scaling.yarn_attn_factor")? {
                Some(given) => Some(given),
                None => reader
                    .number("rope.scaling.attn_factor")?
                    .map(|given| given * (0.1 * ln(factor.unwrap_or(1.0).max(1.0)) + 1.0)),
            },
            truncate: true,
        },
        Some(other) => {
            return Err(reader.error("rope.scaling.type", format!("{other:?} is not supported")));
        }
    };
    Ok(RopeConfig::new(dim, theta, scaling))
}

/// Reads GGUF's LongRoPE: numbers here; the divisors are tensors, filled in when those are read.
pub fn gguf_long_rope(reader: &ConfigReader) -> LoadResult<Option<RopeScaling>> {
    let Some(original_context) = reader.count("rope.scaling.original_context_length")? else {
        return Ok(None);
    };
    let factor = reader.size("context_length", usize::MAX)? as f32 / original_context as f32;
    let given = reader.number("rope.scaling.attn_factor")?;
    let attention_factor = given.unwrap_or_else(|| long_rope_magnitude(factor, original_context));
    Ok(Some(RopeScaling::LongRope {
        short: Vec::new(),
        long: Vec::new(),
        original_context,
        attention_factor,
    }))
}
