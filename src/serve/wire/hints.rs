//! Fields of other servers that this one need not act on: hints, on which no answer depends, and settings
//! whose usual value asks for what is so anyway.
//!
//! Invariants: [`HINTS`] are taken whatever they say and reported as without effect; those of
//! [`inert_settings`] are taken with the values that are listed, which count as absent, and refused by name
//! with any other.

use serde_json::{Value, json};

/// Hints and labels at the top level of a request, by name.
pub const HINTS: [&str; 50] = [
    // OpenAI: labels, storage and price; nothing is stored here beyond sessions.
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    // llama.cpp and LM Studio: slots, timings (always there), context shifting (never done), drafts (no answer depends on them), the
    // order of samplers (fixed here).
    "cache_prompt",
    "draft_model",
    "id_slot",
    "n_cache_reuse",
    "n_discard",
    "n_keep",
    "return_progress",
    "samplers",
    "slot_id",
    "timings_per_token",
    "ttl",
    // Parameters of samplers that are off unless another field, which is refused, switches them on.
    "dry_allowed_length",
    "dry_base",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "dynatemp_exponent",
    "mirostat_eta",
    "mirostat_tau",
    "xtc_threshold",
    // vLLM and SGLang: scheduling and names.
    "cache_salt",
    "kv_transfer_params",
    "priority",
    "request_id",
    "rid",
    "spaces_between_special_tokens",
    "stream_reasoning",
    // Ollama, OpenRouter, LiteLLM, the AI SDK and others.
    "allowed_openai_params",
    "cache_control",
    "caching",
    "client_metadata",
    "keep_alive",
    "litellm_metadata",
    "num_ctx",
    "provider",
    "providerOptions",
    "provider_options",
    "route",
    "timeout",
    "trace",
    "usage",
    "vl_high_resolution_images",
];

/// Returns true if a field at the top level of a request is a hint.
pub fn is_hint(name: &str) -> bool {
    HINTS.contains(&name)
}

/// Settings of other servers, with the values that ask for nothing.
pub fn inert_settings() -> Vec<(&'static str, Vec<Value>)> {
    let off = || vec![json!(false)];
    let none = || vec![json!([]), json!({}), json!("")];
    vec![
        ("mirostat", vec![json!(0)]),
        ("dry_multiplier", vec![json!(0)]),
        ("xtc_probability", vec![json!(0)]),
        ("dynatemp_range", vec![json!(0)]),
        ("tfs_z", vec![json!(1)]),
        ("top_a", vec![json!(0)]),
        ("repeat_last_n", vec![json!(-1)]),
        ("min_keep", vec![json!(0), json!(1)]),
        ("n_probs", vec![json!(0)]),
        ("post_sampling_probs", off()),
        ("backend_sampling", off()),
        ("min_tokens", vec![json!(0)]),
        ("length_penalty", vec![json!(1)]),
        ("early_stopping", off()),
        ("use_beam_search", off()),
        ("include_stop_str_in_output", off()),
        ("skip_special_tokens", vec![json!(true)]),
        ("return_token_ids", off()),
        ("return_tokens", off()),
        ("return_tokens_as_token_ids", off()),
        ("response_fields", none()),
        ("lora", none()),
        ("bad_words", none()),
        ("logits_processors", none()),
        ("allowed_token_ids", none()),
        ("documents", none()),
        ("transforms", none()),
        ("models", none()),
        ("plugins", none()),
        ("separate_reasoning", vec![json!(true)]),
        ("enable_search", off()),
        ("parse_tool_calls", vec![json!(true)]),
        ("reasoning_format", vec![json!("auto"), json!("deepseek")]),
        ("truncate_prompt_tokens", vec![json!(-1)]),
        ("safe_prompt", off()),
    ]
}
