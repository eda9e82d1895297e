//! The quantised forms of safetensors folders, recognised by config.json.
//!
//! Sources: transformers' quantisation configurations, compressed-tensors, AutoAWQ, GPTQModel, mlx-lm.

use std::path::Path;

use serde_json::Value;

use crate::model::arch::mimo::DEFAULT_PARTS;
use llmctl_base::error::{LoadError, LoadResult};

/// A form that is read.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Scheme {
    /// Floats of 8 bits with `weight_scale_inv` or `weight_scale`; matrices of queries, keys and values in so many parts.
    Fp8 { block: Option<[usize; 2]>, qkv_parts: usize },
    /// compressed-tensors in its several formats, which the tensors' names tell apart.
    Compressed { bits: u32 },
    /// Columns of several rows in a word, in AutoAWQ's order.
    Awq { group: usize },
    /// Rows of several columns in a word. Zero points of the first format are stored less one.
    Gptq { bits: u32, zero_offset: i16 },
    /// Groups with scale and minimum; some layers may have their own bits.
    Mlx { group: usize, bits: u32 },
}

/// Forms that work instead, for every refusal.
const INSTEAD: &str = "these forms work: FP8 (e4m3), compressed-tensors (int4, int8, FP8, NVFP4), AWQ (gemm), GPTQ, MLX \
                       (affine), MXFP4 of gpt-oss; so does a GGUF file or the unquantised folder";

impl Scheme {
    /// Returns the name of the form for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Scheme::Fp8 { .. } => "FP8",
            Scheme::Compressed { .. } => "compressed-tensors",
            Scheme::Awq { .. } => "AWQ",
            Scheme::Gptq { .. } => "GPTQ",
            Scheme::Mlx { .. } => "MLX",
        }
    }

    /// Reads the form from config.json; `None` for a folder that is not quantised, or in MXFP4, whose tensors tell.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] naming the form and those that work.
    pub fn of(path: &Path, config: &Value) -> LoadResult<Option<Self>> {
        let refuse = |what: String| LoadError::Unsupported {
            path: path.into(),
            message: format!("the weights are {what}, which llmctl does not read; {INSTEAD}"),
        };
        let nested = config.get("text_config").and_then(|text| text.get("quantization_config"));
        let Some(quantized) = config.get("quantization_config").or(nested).filter(|value| value.is_object())
        else {
            return match config.get("quantization").filter(|value| value.is_object()) {
                Some(mlx) => mlx_scheme(mlx).map_err(refuse).map(Some),
                None => Ok(None),
            };
        };
        let scheme = match quantized["quant_method"].as_str() {
            Some("fp8" | "fbgemm_fp8") => fp8(quantized, qkv_parts(config)),
            Some("compressed-tensors" | "compressed_tensors") => compressed(quantized),
            Some("awq") => awq(quantized),
            Some("gptq") => gptq(quantized),
            Some("mxfp4") => return Ok(None),
            // mlx-lm writes its settings under both keys.
            None if quantized.get("group_size").is_some() => mlx_scheme(quantized),
            Some(other) => Err(format!("quantised with {other:?}")),
            None => Err("quantised in a form that config.json does not name".to_owned()),
        };
        scheme.map(Some).map_err(refuse)
    }
}

fn number(value: &Value, key: &str) -> Option<u64> {
    value[key].as_u64()
}

fn bits(value: &Value, key: &str, allowed: &[u64], form: &str) -> Result<u32, String> {
    match number(value, key) {
        Some(bits) if allowed.contains(&bits) => Ok(bits as u32),
        other => Err(format!("{form} with {} bits", other.map_or("unknown".to_owned(), |n| n.to_string()))),
    }
}

/// Returns the number of parts into which MiMo V2.5 cuts the rows of queries, keys and values, each with its own rows of scales.
fn qkv_parts(config: &Value) -> usize {
    let parts = number(config, "num_key_value_heads").map_or(DEFAULT_PARTS, |parts| parts.max(1) as usize);
    if config["attention_projection_layout"] == "fused_qkv" { parts } else { 1 }
}

fn fp8(value: &Value, qkv_parts: usize) -> Result<Scheme, String> {
    if let Some(format) = value["fmt"].as_str().filter(|format| *format != "e4m3") {
        return Err(format!("FP8 of the kind {format:?}"));
    }
    let block = match value["weight_block_size"].as_array().map(Vec::as_slice) {
        None => None,
        Some([rows, cols]) => match (rows.as_u64(), cols.as_u64()) {
            (Some(rows @ 1..), Some(cols @ 1..)) => Some([rows as usize, cols as usize]),
            _ => return Err("FP8 with impossible blocks".to_owned()),
        },
        Some(_) => return Err("FP8 with blocks of other than two dimensions".to_owned()),
    };
    Ok(Scheme::Fp8 { block, qkv_parts })
}

/// Checks that every group of layers has a form that is read.
fn compressed(value: &Value) -> Result<Scheme, String> {
    let groups = value["config_groups"].as_object().ok_or("compressed-tensors without \"config_groups\"")?;
    let mut bits_of_all = 4;
    for group in groups.values() {
        let weights = &group["weights"];
        let form =
            format!("compressed-tensors of the kind {}", weights["type"].as_str().unwrap_or("unknown"));
        bits_of_all = bits(weights, "num_bits", &[4, 8], &form)?;
    }
    match value["format"].as_str() {
        Some(
            "pack-quantized"
            | "int-quantized"
            | "float-quantized"
            | "naive-quantized"
            | "nvfp4-pack-quantized",
        ) => Ok(Scheme::Compressed { bits: bits_of_all }),
        other => Err(format!("compressed-tensors in the format {:?}", other.unwrap_or("none"))),
    }
}

fn awq(value: &Value) -> Result<Scheme, String> {
    bits(value, "bits", &[4], "AWQ")?;
    match value["version"].as_str().unwrap_or("gemm").to_ascii_lowercase().as_str() {
        "gemm" => Ok(Scheme::Awq { group: number(value, "group_size").unwrap_or(128) as usize }),
        other => Err(format!("AWQ in the version {other:?} (gemm is read)")),
    }
}

fn gptq(value: &Value) -> Result<Scheme, String> {
    let bits = bits(value, "bits", &[2, 3, 4, 8], "GPTQ")?;
    let zero_offset = match value["checkpoint_format"].as_str().unwrap_or("gptq") {
        "gptq" => 1,
        "gptq_v2" => 0,
        other => return Err(format!("GPTQ in the checkpoint format {other:?}")),
    };
    Ok(Scheme::Gptq { bits, zero_offset })
}

fn mlx_scheme(value: &Value) -> Result<Scheme, String> {
    if let Some(mode) = value["mode"].as_str().filter(|mode| *mode != "affine") {
        return Err(format!("MLX of the mode {mode:?}"));
    }
    let bits = bits(value, "bits", &[2, 3, 4, 5, 6, 8], "MLX")?;
    Ok(Scheme::Mlx { bits, group: number(value, "group_size").unwrap_or(64) as usize })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(config: Value) -> Result<Option<Scheme>, String> {
        Scheme::of(Path::new("config.json"), &config).map_err(|error| error.to_string())
    }

    #[test]
    fn forms_are_recognised() {
        let check = |config: Value, expected: Scheme| assert_eq!(of(config), Ok(Some(expected)));
        check(
            json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}),
            Scheme::Fp8 { block: Some([128, 128]), qkv_parts: 1 },
        );
        check(
            json!({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM"}}),
            Scheme::Awq { group: 64 },
        );
        check(
            json!({"quantization_config": {"quant_method": "gptq", "bits": 3}}),
            Scheme::Gptq { bits: 3, zero_offset: 1 },
        );
        check(json!({"quantization": {"group_size": 32, "bits": 6}}), Scheme::Mlx { group: 32, bits: 6 });
        assert_eq!(of(json!({"quantization_config": {"quant_method": "mxfp4"}})), Ok(None));
        assert_eq!(of(json!({"quantization_config": null})), Ok(None));
    }

    #[test]
    fn others_are_refused_by_name_with_what_works() {
        for (config, word) in [
            (json!({"quant_method": "bitsandbytes", "load_in_4bit": true}), "bitsandbytes"),
            (json!({"quant_method": "hqq"}), "hqq"),
            (json!({"quant_method": "awq", "bits": 4, "version": "gemv"}), "gemv"),
            (json!({"quant_method": "gptq", "bits": 5}), "5 bits"),
            (json!({"quant_method": "fp8", "fmt": "e5m2"}), "e5m2"),
            (
                json!({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}}),
                "marlin-24",
            ),
        ] {
            let message = of(json!({ "quantization_config": config })).unwrap_err();
            assert!(message.contains(word) && message.contains("GGUF"), "{message}");
        }
        let mode = of(json!({"quantization": {"bits": 4, "mode": "mxfp4"}})).unwrap_err();
        assert!(mode.contains("mxfp4"), "{mode}");
    }
}
