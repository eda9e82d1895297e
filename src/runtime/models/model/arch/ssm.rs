//! Parses Mamba-2 mixers, which all families with them describe alike.

use serde_json::Value;

use super::config_reader::ConfigReader;
use super::dense::MAX_WIDTH;
use crate::model::config::{SsmConfig, SsmFactors, SsmNorm, SsmShape};
use llmctl_base::error::LoadResult;

/// Hugging Face's keys, which differ between families; GGUF's do not.
pub struct SsmKeys {
    pub heads: &'static str,
    pub groups: &'static str,
    pub state_dim: &'static str,
    pub kernel: &'static str,
}

/// Granite's and Falcon's keys.
pub const MAMBA_KEYS: SsmKeys = SsmKeys {
    heads: "mamba_n_heads",
    groups: "mamba_n_groups",
    state_dim: "mamba_d_state",
    kernel: "mamba_d_conv",
};

/// Parses a mixer with `inner` values in all heads together, by which GGUF's key is replaced; a norm follows the gate.
pub fn ssm(reader: &ConfigReader, keys: &SsmKeys, inner: usize) -> LoadResult<SsmConfig> {
    let heads_key = reader.pick(keys.heads, "ssm.time_step_rank");
    let groups_key = reader.pick(keys.groups, "ssm.group_count");
    let heads = reader.size(heads_key, MAX_WIDTH)?;
    let groups = reader.size_or(groups_key, 1, MAX_WIDTH)?;
    if !inner.is_multiple_of(heads) {
        let message = format!("{inner} values cannot be divided into {heads} heads");
        return Err(reader.error(heads_key, message));
    }
    if !heads.is_multiple_of(groups) {
        return Err(reader.error(groups_key, format!("{groups} groups cannot share {heads} heads evenly")));
    }
    let kernel = reader.kernel(reader.pick(keys.kernel, "ssm.conv_kernel"), 4)?;
    let state_dim = reader.size(reader.pick(keys.state_dim, "ssm.state_size"), MAX_WIDTH)?;
    Ok(SsmConfig {
        shape: SsmShape { heads, head_dim: inner / heads, groups, state_dim },
        kernel,
        norm: SsmNorm::AfterGate,
        step_limits: step_limits(reader)?,
        factors: SsmFactors::ONES,
    })
}

/// Returns the number of values in all heads: GGUF's, the family's key if it has one, or `expand` times the hidden
/// size.
pub fn inner_size(
    reader: &ConfigReader,
    key: Option<&'static str>,
    expand: &'static str,
    hidden: usize,
) -> LoadResult<usize> {
    let stored = if reader.is_gguf() { Some("ssm.inner_size") } else { key };
    if let Some(key) = stored.filter(|key| reader.is_gguf() || reader.value(key).is_some()) {
        return reader.size(key, MAX_WIDTH);
    }
    let factor = reader.number(expand)?.unwrap_or(2.0);
    match (factor * hidden as f32) as usize {
        inner if (1..=MAX_WIDTH).contains(&inner) => Ok(inner),
        inner => Err(reader.error(expand, format!("{inner} is not a possible width"))),
    }
}

/// Parses the limits of time steps; a limit that is not a number, such as infinity, is none. GGUF has no limits.
fn step_limits(reader: &ConfigReader) -> LoadResult<[f32; 2]> {
    const KEY: &str = "time_step_limit";
    let wrong = || reader.error(KEY, "is not a list of a least and a greatest time step");
    let Some(value) = reader.value(KEY).filter(|_| !reader.is_gguf()) else {
        return Ok([0.0, f32::INFINITY]);
    };
    let [least, most] = value.as_array().map(Vec::as_slice).ok_or_else(wrong)? else { return Err(wrong()) };
    let limit = |value: &Value, none: f32| value.as_f64().map_or(none, |limit| limit as f32);
    match [limit(least, 0.0), limit(most, f32::INFINITY)] {
        [least, most] if least <= most => Ok([least, most]),
        _ => Err(wrong()),
    }
}
