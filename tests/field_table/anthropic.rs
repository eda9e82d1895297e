//! Fields of Anthropic's endpoints with an example of each. The order is that of the page.

use super::{Endpoint, Table};

const BODY: &str = r#"{"messages": [{"role": "user", "content": "hi"}]}"#;

/// Anthropic's Messages and the count of their tokens.
pub const ANTHROPIC: Table = Table {
    title: "Anthropic Messages",
    endpoints: &[
        Endpoint { column: "messages", path: "/v1/messages", body: BODY },
        Endpoint { column: "count_tokens", path: "/v1/messages/count_tokens", body: BODY },
    ],
    examples: &[&[
        (
            "messages",
            r#"[{"role": "user", "content": "hi"}]"#,
            "[http.md](http.md#anthropic-messages) lists the blocks",
        ),
        ("system", r#"[{"type": "text", "text": "Be brief."}]"#, "or a string"),
        ("model", r#""org/toy""#, ""),
        (
            "max_tokens",
            "32000",
            "at most what the prompt leaves of the context (`--strict-limits` refuses more)",
        ),
        ("stop_sequences", r#"["END"]"#, ""),
        ("stream", "false", ""),
        (
            "tools",
            r#"[{"name": "f", "description": "d", "input_schema": {"type": "object"}}]"#,
            "tools without `input_schema` are left out, and reported as `tools.TYPE`",
        ),
        (
            "tool_choice",
            r#"{"type": "auto", "disable_parallel_tool_use": true}"#,
            "also `any`, `tool` with `name`, `none`",
        ),
        ("mcp_servers", r#"[{"type": "url", "url": "http://localhost"}]"#, ""),
        (
            "thinking",
            r#"{"type": "enabled", "display": "summarized"}"#,
            "`disabled`, `adaptive`; `budget_tokens` ends the reasoning; a hint where the template has no switch and the markup no end",
        ),
        (
            "output_config",
            r#"{"effort": "high"}"#,
            "`effort` as `reasoning_effort`; `format` with a JSON Schema",
        ),
        (
            "output_format",
            r#"{"type": "json_schema", "schema": {"type": "boolean"}}"#,
            "the older name of `output_config.format`",
        ),
        ("temperature", "0.5", ""),
        ("top_p", "0.9", ""),
        ("top_k", "40", ""),
        ("min_p", "0.1", "this and the fields below up to `session_id`: of this server, not of Anthropic's"),
        ("typical_p", "0.9", ""),
        ("typ_p", "0.9", ""),
        ("top_n_sigma", "1.5", ""),
        ("repetition_penalty", "1.1", ""),
        ("repeat_penalty", "1.1", ""),
        ("presence_penalty", "0.5", ""),
        ("frequency_penalty", "0.5", ""),
        ("logit_bias", r#"{"5": -100}"#, ""),
        ("seed", "7", ""),
        ("random_seed", "7", "as `seed`; Mistral's name"),
        ("schema_open", "true", "schemas are read as their standard does, see below"),
        ("session_id", r#""s""#, ""),
        ("anthropic_beta", r#"["x"]"#, ""),
        ("anthropic_version", r#""2023-06-01""#, ""),
        ("betas", r#"["x"]"#, ""),
        (
            "cache_control",
            r#"{"type": "ephemeral"}"#,
            "here, on blocks and on tools: what a prompt begins with is kept anyway",
        ),
        ("container", r#""c""#, ""),
        ("context_management", r#"{"edits": [{"type": "clear_tool_uses_20250919"}]}"#, ""),
        ("diagnostics", "{}", ""),
        ("inference_geo", r#""eu""#, ""),
        ("speed", r#""fast""#, ""),
        ("user_profile_id", r#""u""#, ""),
        ("workspace_id", r#""w""#, ""),
        ("stop", r#"["END"]"#, "`stop_sequences` here"),
        ("n", "2", ""),
        ("response_format", r#"{"type": "json_object"}"#, "`output_config` here"),
    ]],
    notes: &[],
};
