//! Dialects: every published template is recognised by its own text, answers come apart the same however they are split,
//! grammars let through only calls that parse, and calls rendered into history parse back.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use llmctl::template::{
    Dialect, OutputParser, ParsedAnswer, Piece, ReasoningFormat, ToolCallFormat, parse_answer,
};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::common::fixtures;

/// The source of a template file: as it is, or the `chat_template` member of a JSON file.
fn template_source(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).expect("a template is text");
    match path.extension()?.to_str()? {
        "json" => {
            let json: serde_json::Value = serde_json::from_str(&text).ok()?;
            Some(json.get("chat_template")?.as_str()?.to_owned())
        }
        _ => Some(text),
    }
}

/// Every Jinja template of the fixtures, by `folder/file`.
fn templates() -> Option<BTreeMap<String, String>> {
    let root = fixtures()?.join("templates");
    let mut all = BTreeMap::new();
    for folder in std::fs::read_dir(&root).expect("the folder of templates").flatten() {
        for file in std::fs::read_dir(folder.path()).expect("a folder of templates").flatten() {
            let path = file.path();
            let name = path.strip_prefix(&root).expect("below the root").display().to_string();
            if !name.ends_with(".gotmpl")
                && let Some(source) = template_source(&path)
            {
                all.insert(name, source);
            }
        }
    }
    Some(all)
}

#[test]
fn templates_are_recognised_by_their_own_text() {
    let Some(templates) = templates() else { return };
    let mut table = String::new();
    for (name, source) in &templates {
        let dialect = Dialect::detect(source);
        let reasoning = dialect.reasoning.map_or("-", |format| format.name());
        let tool_calls = dialect.tool_calls.map_or("-", |format| format.name());
        writeln!(table, "{tool_calls:15} {reasoning:17} {name}").expect("a string takes everything");
    }
    insta::assert_snapshot!(table);
}

/// Tools whose schemas have every kind of argument.
fn tools() -> Vec<Value> {
    vec![
        json!({"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "exact": {"type": "boolean"},
                "note": {"type": ["string", "null"]},
            },
            "required": ["city"],
        }}}),
        json!({"type": "function", "function": {"name": "write_file", "description": "Write", "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "content": {"type": "string"},
                "mode": {"type": "number"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "options": {"type": "object", "properties": {"code": {"type": "string"}, "depth": {"type": "integer"}}},
            },
            "required": ["path", "content"],
        }}}),
        json!({"type": "function", "function": {"name": "now", "description": "Time",
            "parameters": {"type": "object", "properties": {}}}}),
    ]
}

/// One answer and what it comes apart into.
struct Case<'a> {
    format: ToolCallFormat,
    text: &'a str,
    content: &'a str,
    calls: &'a [(&'a str, Value)],
}

fn dialect(format: ToolCallFormat) -> Dialect {
    let reasoning = match format {
        ToolCallFormat::Harmony => ReasoningFormat::Harmony,
        ToolCallFormat::Gemma => ReasoningFormat::GemmaChannel,
        _ => ReasoningFormat::Think,
    };
    Dialect { reasoning: Some(reasoning), tool_calls: Some(format) }
}

fn values(answer: &ParsedAnswer) -> Vec<(String, Value)> {
    let value = |text: &str| serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    answer.calls.iter().map(|call| (call.name.clone(), value(&call.arguments))).collect()
}

#[track_caller]
fn check(case: &Case<'_>) {
    let Case { format, text, content, calls } = case;
    let answer = parse_answer(&dialect(*format), &tools(), "", text, false);
    let calls: Vec<_> = calls.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    assert_eq!(values(&answer), calls, "{format}: {text}");
    assert_eq!(answer.content, *content, "{format}: {text}");
}

/// Checks that a text gives these calls and this content.
#[track_caller]
fn gives(format: ToolCallFormat, text: &str, content: &str, calls: &[(&str, Value)]) {
    check(&Case { format, text, content, calls });
}

/// A text of each format with the call `get_weather(city="Köln </tool_call>", days=3)`, with a word before it.
fn well_formed() -> Vec<(ToolCallFormat, String)> {
    use ToolCallFormat as F;
    let json = r#"{"city": "Köln </tool_call>", "days": 3}"#;
    let named = format!(r#"{{"name": "get_weather", "arguments": {json}}}"#);
    let xml = "<function=get_weather>\n<parameter=city>\nKöln </tool_call>\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>";
    let seed = "<function=get_weather>\n<parameter=city>Köln </tool_call></parameter>\n<parameter=days>3</parameter>\n</function>";
    let python = r"get_weather(city='Köln </tool_call>', days=3)";
    let glm = "get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln </tool_call></arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n";
    vec![
        (F::Hermes, format!("Hm.\n<tool_call>\n{named}\n</tool_call>")),
        (F::QwenXml, format!("Hm.\n\n<tool_call>\n{xml}\n</tool_call>")),
        (F::SeedXml, format!("Hm.\n<seed:tool_call>\n{seed}\n</seed:tool_call>")),
        (
            F::Gemma,
            "Hm.<|tool_call>call:get_weather{city:<|\"|>Köln </tool_call><|\"|>,days:3}<tool_call|>"
                .to_owned(),
        ),
        (F::Llama3, format!(r#"Hm.<|python_tag|>{{"name": "get_weather", "parameters": {json}}}"#)),
        (F::Mistral, format!("Hm.[TOOL_CALLS] [{named}]")),
        (F::MistralArgs, format!("Hm.[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{json}")),
        (F::Pythonic, format!("Hm.<|python_start|>[{python}]<|python_end|>")),
        (F::Lfm2, format!("Hm.<|tool_call_start|>[{python}]<|tool_call_end|>")),
        (F::Glm, format!("Hm.\n<tool_call>{glm}</tool_call>")),
        (F::Granite, format!("Hm. <|tool_call|>[{named}]")),
        (
            F::DeepSeekV3,
            format!(
                "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{json}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
        ),
        (
            F::DeepSeekV31,
            format!(
                "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{json}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
        ),
        (
            F::Kimi,
            format!(
                "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{json}<|tool_call_end|><|tool_calls_section_end|>"
            ),
        ),
        (F::FunctionTag, format!("Hm.<function=get_weather>{json}</function>")),
        (F::ToolCallsTag, format!("Hm.\n<tool_calls>[{named}]</tool_calls>")),
        (
            F::CommandAction,
            format!(
                "Hm.<|START_ACTION|>[\n    {{\"tool_call_id\": \"0\", \"tool_name\": \"get_weather\", \"parameters\": {json}}}\n]<|END_ACTION|>"
            ),
        ),
        (F::Functools, format!("Hm. functools[{named}]")),
        (
            F::Harmony,
            format!(
                "<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{json}<|call|>"
            ),
        ),
    ]
}

#[test]
fn every_format_reads_its_call() {
    let texts = well_formed();
    assert_eq!(texts.len(), ToolCallFormat::ALL.len(), "a format without a test");
    for (format, text) in texts {
        gives(format, &text, "Hm.", &[("get_weather", json!({"city": "Köln </tool_call>", "days": 3}))]);
        assert_eq!(format.name().parse(), Ok(format));
    }
    let error = "qwen".parse::<ToolCallFormat>().expect_err("no such format");
    assert!(
        error.to_string().starts_with("unknown tool-call format `qwen` (known: hermes, qwen-xml"),
        "{error}"
    );
}

#[test]
fn a_call_of_an_undefined_tool_is_text() {
    for (format, text) in well_formed() {
        let text = text.replace("get_weather", "get_whether");
        let answer = parse_answer(&dialect(format), &tools(), "", &text, false);
        let shown = if format == ToolCallFormat::Harmony {
            "Hm.<|start|>assistant<|channel|>commentary to=functions.get_whether <|constrain|>json<|message|>{\"city\": \"Köln </tool_call>\", \"days\": 3}<|call|>"
        } else {
            &text
        };
        assert_eq!(answer, ParsedAnswer { content: shown.to_owned(), ..Default::default() }, "{format}");
    }
}

#[test]
fn without_tools_nothing_is_a_call() {
    for (format, text) in well_formed().into_iter().filter(|(format, _)| *format != ToolCallFormat::Harmony) {
        let text = text.replace("<|python_start|>", "").replace("<|python_end|>", "");
        let answer = parse_answer(&dialect(format), &[], "", &text, false);
        assert_eq!(answer, ParsedAnswer { content: text, ..Default::default() }, "{format}");
    }
}

/// Cut anywhere, an answer gives its leading text and either nothing more or the whole call.
#[test]
fn a_cut_call_leaves_the_leading_text() {
    let whole = json!({"city": "Köln </tool_call>", "days": 3});
    for (format, text) in well_formed() {
        for (at, _) in text.char_indices() {
            let answer = parse_answer(&dialect(format), &tools(), "", &text[..at], true);
            let calls = values(&answer);
            assert!(
                calls.is_empty() || calls == [("get_weather".to_owned(), whole.clone())],
                "{format} {at}: {calls:?}"
            );
            let content = answer.content.trim_end();
            let is_lead =
                "Hm.".starts_with(content) || matches!(content, "Hm.<" | "Hm.[" | "Hm.\n<" | "Hm.\n\n<");
            assert!(
                is_lead || content.strip_prefix("Hm.").is_some_and(|rest| rest.trim().len() <= 1),
                "{format} {at}: {content:?}"
            );
        }
    }
}

#[test]
fn malformed_calls_leave_the_leading_text() {
    use ToolCallFormat as F;
    for (format, text) in [
        (F::Hermes, "Hm.<tool_call>\n{\"name\": \"now\", \"arguments\": {]}\n</tool_call> rest"),
        (F::Hermes, "Hm.<tool_call>no JSON</tool_call>"),
        (F::Hermes, "Hm.<tool_call>{\"name\": \"now\", \"arguments\": {}} garbage</tool_call>"),
        (F::Hermes, "Hm.<tool_call>{\"arguments\": {}}</tool_call>"),
        (F::Hermes, "Hm.<tool_call>{\"name\": \"now\", \"arguments\": [1]}</tool_call>"),
        (F::QwenXml, "Hm.<tool_call>\n<function=now>\nvalue\n</function>\n</tool_call>"),
        (F::Gemma, "Hm.<|tool_call>now{}<tool_call|>"),
        (F::Gemma, "Hm.<|tool_call>call:now{a}<tool_call|>"),
        (F::Mistral, "Hm.[TOOL_CALLS][]"),
        (F::MistralArgs, "Hm.[TOOL_CALLS]now[ARGS][]"),
        (F::Lfm2, "Hm.<|tool_call_start|>[now(1)]<|tool_call_end|>"),
        (F::Lfm2, "Hm.<|tool_call_start|>[now(a=b)]<|tool_call_end|>"),
        (F::Glm, "Hm.<tool_call>now\n<arg_value>1</arg_value></tool_call>"),
        (F::DeepSeekV31, "Hm.<｜tool▁calls▁begin｜>now"),
        (
            F::Kimi,
            "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>x<|tool_call_end|>",
        ),
        (
            F::Harmony,
            "<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>print()<|call|>",
        ),
    ] {
        gives(format, text, "Hm.", &[]);
    }
}

#[test]
fn hermes() {
    use ToolCallFormat::Hermes;
    let call = |body: &str| format!("<tool_call>\n{body}\n</tool_call>");
    // A number that JSON cannot hold stays readable and the arguments stay JSON.
    gives(
        Hermes,
        &call(r#"{"name": "write_file", "arguments": {"mode": NaN}}"#),
        "",
        &[("write_file", json!({"mode": "NaN"}))],
    );
    // Arguments as JSON text in a string are an object all the same.
    gives(
        Hermes,
        &call(r#"{"name": "get_weather", "arguments": "{\"city\": \"K\\u00f6ln \\\"x\\\"\", \"days\": 3}"}"#),
        "",
        &[("get_weather", json!({"city": "Köln \"x\"", "days": 3}))],
    );
    gives(Hermes, &call(r#"{"name": "now", "arguments": ""}"#), "", &[("now", json!({}))]);
    gives(
        Hermes,
        &call(r#"{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "a"}}}"#),
        "",
        &[("get_weather", json!({"city": "a"}))],
    );
    // `parameters` counts when `arguments` is absent or null; neither is no arguments.
    gives(
        Hermes,
        &call(r#"{"name": "get_weather", "parameters": {"city": "a"}}"#),
        "",
        &[("get_weather", json!({"city": "a"}))],
    );
    gives(
        Hermes,
        &call(r#"{"name": "get_weather", "arguments": null, "parameters": {"city": "a"}}"#),
        "",
        &[("get_weather", json!({"city": "a"}))],
    );
    gives(Hermes, &call(r#"{"name": "now"}"#), "", &[("now", json!({}))]);
    gives(
        Hermes,
        &call(r#"{"arguments": {"city": "a"}, "name": "get_weather", "id": 7}"#),
        "",
        &[("get_weather", json!({"city": "a"}))],
    );
    // Several calls, in one pair of markers or in several; the text between and behind stays.
    let two: &[(&str, Value)] = &[("now", json!({})), ("get_weather", json!({"city": "a"}))];
    let (a, b) =
        (r#"{"name": "now", "arguments": {}}"#, r#"{"name": "get_weather", "arguments": {"city": "a"}}"#);
    gives(Hermes, &format!("One.\n{}\nTwo.\n{}\nThree.", call(a), call(b)), "One.\nTwo.\nThree.", two);
    gives(Hermes, &call(&format!("[{a}, {b}]")), "", two);
    gives(Hermes, &call(&format!("{a}\n{b}")), "", two);
    // The model ended its turn behind a whole call; cut there, it is not sure that it was whole.
    let open = format!("<tool_call>\n{a}");
    gives(Hermes, &open, "", &[("now", json!({}))]);
    assert_eq!(parse_answer(&dialect(Hermes), &tools(), "", &open, true), ParsedAnswer::default());
    // One undefined tool among defined ones: no partial set.
    let mixed = format!("{}\n{}", call(a), call(&b.replace("get_weather", "rm")));
    gives(Hermes, &mixed, &mixed, &[]);
}

#[test]
fn qwen_xml() {
    use ToolCallFormat::QwenXml;
    let call = |body: &str| format!("<tool_call>\n<function=write_file>\n{body}</function>\n</tool_call>");
    let parameter = |key: &str, value: &str| format!("<parameter={key}>\n{value}\n</parameter>\n");
    // The space of a string is the string's.
    let code = "    if x:\n\t\treturn 1\n  \n";
    gives(QwenXml, &call(&parameter("content", code)), "", &[("write_file", json!({"content": code}))]);
    // Values may hold the markup itself.
    let markup = "<function=now>\n<parameter=x>\n1\n</parameter> and </parameter>\n</function> </tool_call>";
    gives(
        QwenXml,
        &call(&(parameter("content", markup) + &parameter("path", "p"))),
        "",
        &[("write_file", json!({"content": markup, "path": "p"}))],
    );
    // A complete call followed by a truncated one is no partial set.
    let truncated = format!(
        "Hm.\n{}\n<tool_call>\n<function=write_file>\n<parameter=path>\n/tmp",
        call(&parameter("path", "p"))
    );
    gives(QwenXml, &truncated, "Hm.", &[]);
    // Without the wrapper, the prose behind a call stays.
    gives(
        QwenXml,
        "<function=write_file>\n<parameter=path>\np\n</parameter>\n</function>\nDone it.",
        "Done it.",
        &[("write_file", json!({"path": "p"}))],
    );
    gives(QwenXml, "<function=now>\n</function>\n</tool_call>", "", &[("now", json!({}))]);
    // A parameter that is not closed is never lost silently.
    gives(
        QwenXml,
        "Hm.<tool_call>\n<function=write_file>\n<parameter=path>\np\n</function>\n</tool_call>",
        "Hm.",
        &[],
    );
    gives(
        QwenXml,
        "Hm.<tool_call>\n<function=write_file>\n<parameter=path>\np\n<parameter=content>\nc\n</parameter>\n</function>\n</tool_call>",
        "Hm.",
        &[],
    );
    // Types by the schema; what does not fit stays text.
    let weather = |key: &str, value: &str| {
        format!(
            "<tool_call>\n<function=get_weather>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
        )
    };
    for (key, value, expected) in [
        ("note", "12", json!("12")),
        ("note", "null", json!(null)),
        ("city", "true", json!("true")),
        ("days", "12", json!(12)),
        ("days", "10.0", json!("10.0")),
        ("days", "1_000", json!("1_000")),
        ("exact", "TRUE", json!(true)),
        ("exact", "1", json!("1")),
        ("other", "{\"a\": [1]}", json!({"a": [1]})),
        ("other", "NaN", json!("NaN")),
    ] {
        gives(QwenXml, &weather(key, value), "", &[("get_weather", json!({key: expected}))]);
    }
    for value in ["NaN", "Infinity", "-inf", "1e999"] {
        gives(QwenXml, &call(&parameter("mode", value)), "", &[("write_file", json!({"mode": value}))]);
    }
}

#[test]
fn gemma() {
    use ToolCallFormat::Gemma;
    // A close marker inside quotes is text, and so is everything else there.
    gives(
        Gemma,
        "<|tool_call>call:write_file{content:<|\"|>a<tool_call|>b,{c:1}]<|\"|>,path:<|\"|>p<|\"|>}<tool_call|>",
        "",
        &[("write_file", json!({"content": "a<tool_call|>b,{c:1}]", "path": "p"}))],
    );
    gives(Gemma, "<|tool_call>call: now {}<tool_call|>", "", &[("now", json!({}))]);
    // Bare words are typed by the schema, at every depth.
    gives(
        Gemma,
        "<|tool_call>call:write_file{mode:1.5,options:{code:007,depth:007,x:1},tags:[a,<|\"|>b<|\"|>,3]}<tool_call|>",
        "",
        &[(
            "write_file",
            json!({"mode": 1.5, "options": {"code": "007", "depth": 7, "x": 1}, "tags": ["a", "b", "3"]}),
        )],
    );
    gives(
        Gemma,
        "<|tool_call>call:get_weather{days:<|\"|>3<|\"|>,exact:true,note:null,x:false,y:null,z:2.5,w:word}<tool_call|>",
        "",
        &[(
            "get_weather",
            json!({"days": "3", "exact": true, "note": null, "x": false, "y": null, "z": 2.5, "w": "word"}),
        )],
    );
    // Thoughts go to the reasoning, stray markers nowhere.
    let text = "<|channel>thought\nLet me <|tool_call>call:now{}<tool_call|> see.\n<channel|>Hi<channel|>.<|tool_call>call:now{}<tool_call|>";
    let answer = parse_answer(&dialect(Gemma), &tools(), "", text, false);
    assert_eq!(answer.reasoning, "Let me <|tool_call>call:now{}<tool_call|> see.");
    assert_eq!((answer.content.as_str(), answer.calls.len()), ("Hi.", 1));
}

#[test]
fn llama3() {
    use ToolCallFormat::Llama3;
    let call = r#"{"name": "get_weather", "parameters": {"city": "a"}}"#;
    let calls: &[(&str, Value)] = &[("get_weather", json!({"city": "a"}))];
    gives(Llama3, call, "", calls);
    gives(Llama3, &format!("\n{call} Done."), "Done.", calls);
    gives(Llama3, &format!("{call}; {call}"), "", &[calls[0].clone(), calls[0].clone()]);
    gives(Llama3, r#"<|python_tag|>get_weather.call(city="a")"#, "", calls);
    // JSON that is no call is the answer.
    for text in [
        r#"{"result": [1, 2], "name": 3}"#,
        r#"{"name": "get_weather"}"#,
        r#"{"name": "get_weather", "age": 3}"#,
        r#"{"name": "nobody", "parameters": {}}"#,
        "{ not JSON",
        "{",
        r#"Text {"name": "now", "parameters": {}}"#,
    ] {
        gives(Llama3, text, text, &[]);
    }
}

#[test]
fn mistral_and_pythonic() {
    use ToolCallFormat::{Lfm2, Mistral, MistralArgs, Pythonic};
    let two: &[(&str, Value)] = &[("now", json!({})), ("get_weather", json!({"city": "[ARGS]"}))];
    gives(
        Mistral,
        r#"[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "123456789"}, {"name": "get_weather", "arguments": {"city": "[ARGS]"}}]"#,
        "",
        two,
    );
    gives(MistralArgs, r#"[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]get_weather[ARGS]{"city": "[ARGS]"}"#, "", two);
    gives(Pythonic, "[now(), get_weather(city=\"[ARGS]\")]", "", two);
    gives(Lfm2, "[now(), get_weather(city=\"[ARGS]\")]", "", two);
    gives(
        Lfm2,
        "<|tool_call_start|>[write_file(path='it's', mode=-1.5, tags=['a, b)', \"]\"], options={'code': None})]<|tool_call_end|>Done.",
        "Done.",
        &[(
            "write_file",
            json!({"path": "it's", "mode": -1.5, "tags": ["a, b)", "]"], "options": {"code": null}}),
        )],
    );
    for text in ["[1, 2]", "[note] A list.", "[see now(x)]", "[now", "["] {
        gives(Pythonic, text, text, &[]);
    }
}

#[test]
fn reasoning_is_no_call_and_no_content() {
    let think = dialect(ToolCallFormat::Hermes);
    let call = "<tool_call>{\"name\": \"now\", \"arguments\": {}}</tool_call>";
    for (tail, text, reasoning, content, num_calls) in [
        ("", format!("<think>\nIs {call} it?\n</think>\n\nYes."), format!("Is {call} it?"), "Yes.", 0),
        (
            "<|im_start|>assistant\n<think>\n",
            format!("Hm {call}.\n</think>\n\n{call}"),
            format!("Hm {call}."),
            "",
            1,
        ),
        ("<think>\n\n</think>\n\n", " Hi".to_owned(), String::new(), " Hi", 0),
        ("", "<think>\n\n</think>\n\nHi".to_owned(), String::new(), "Hi", 0),
        ("", "The tag <think> opens.".to_owned(), String::new(), "The tag <think> opens.", 0),
        ("", format!("<think>never ends {call}"), format!("never ends {call}"), "", 0),
        ("<|im_start|>user\n<think>", "x".to_owned(), "x".to_owned(), "", 0),
        ("<think>?<|im_end|>\n<|im_start|>assistant\n", "x".to_owned(), String::new(), "x", 0),
        ("<|im_start|>assistant\n<think>\nOkay, ", "so.</think>x".to_owned(), "so.".to_owned(), "x", 0),
    ] {
        let answer = parse_answer(&think, &tools(), tail, &text, false);
        assert_eq!(
            (answer.reasoning.as_str(), answer.content.as_str(), answer.calls.len()),
            (reasoning.as_str(), content, num_calls),
            "{tail:?} {text:?}"
        );
    }
}

#[test]
fn harmony_messages() {
    let harmony = dialect(ToolCallFormat::Harmony);
    let text = "<|channel|>analysis<|message|>First <tool_call>.<|end|><|start|>assistant<|channel|>analysis<|message|>Second.<|end|>\
        <|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>\
        <|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>\
        <|start|>assistant<|channel|>final<|message|>Noon.<|return|>";
    let answer = parse_answer(&harmony, &tools(), "<|end|><|start|>assistant", text, false);
    assert_eq!(answer.reasoning, "First <tool_call>.\n\nSecond.");
    assert_eq!(answer.content, "Let me see.\n\nNoon.");
    assert_eq!(values(&answer), [("now".to_owned(), json!({}))]);
    let prefilled =
        parse_answer(&harmony, &tools(), "<|start|>assistant<|channel|>final<|message|>", "Hi <b", false);
    assert_eq!(prefilled.content, "Hi <b");
}

/// What can be said before the end is said before the end.
#[test]
fn pieces_come_early() {
    let mut parser = OutputParser::new(&dialect(ToolCallFormat::Hermes), &tools(), "");
    let mut streamed = |text: &str| parser.push(text);
    assert_eq!(streamed("<think>Hm"), [Piece::Reasoning("Hm".to_owned())]);
    assert_eq!(streamed(" and"), [Piece::Reasoning(" and".to_owned())]);
    assert_eq!(streamed("</think>\n\nA < b"), [Piece::Content("A < b".to_owned())]);
    assert_eq!(streamed("\n<tool_"), []);
    assert_eq!(streamed("call>\n{\"name\": \"get_wea"), []);
    assert_eq!(streamed("ther\""), [Piece::CallName { index: 0, name: "get_weather".to_owned() }]);
    assert_eq!(
        streamed(", \"arguments\": {\"ci"),
        [Piece::CallArguments { index: 0, fragment: "{\"ci".to_owned() }]
    );
    assert_eq!(streamed("ty\": \"K"), [Piece::CallArguments { index: 0, fragment: "ty\": \"K".to_owned() }]);
    assert_eq!(streamed("\"}"), [Piece::CallArguments { index: 0, fragment: "\"}".to_owned() }]);
    assert_eq!(streamed("}\n</tool_call>"), [Piece::CallEnd { index: 0 }]);
    assert_eq!(parser.finish(false), []);

    // A finished argument of a tagged call goes out while the next one is being written.
    let mut parser = OutputParser::new(&dialect(ToolCallFormat::QwenXml), &tools(), "");
    let pieces = parser.push(
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n1",
    );
    let expected = [
        Piece::CallName { index: 0, name: "get_weather".to_owned() },
        Piece::CallArguments { index: 0, fragment: "{\"city\": \"Bonn\"".to_owned() },
    ];
    assert_eq!(pieces, expected);
    assert_eq!(parser.finish(true), [], "a cut call is not ended");
}

/// Pieces with adjacent ones of a kind joined.
fn joined(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut all: Vec<Piece> = Vec::new();
    for piece in pieces {
        match (all.last_mut(), piece) {
            (Some(Piece::Content(last)), Piece::Content(text))
            | (Some(Piece::Reasoning(last)), Piece::Reasoning(text)) => last.push_str(&text),
            (
                Some(Piece::CallArguments { index: at, fragment: last }),
                Piece::CallArguments { index, fragment },
            ) if *at == index => last.push_str(&fragment),
            (_, piece) => all.push(piece),
        }
    }
    all
}

fn streamed(format: ToolCallFormat, chunks: &[&str], is_cut: bool) -> Vec<Piece> {
    let mut parser = OutputParser::new(&dialect(format), &tools(), "");
    let mut pieces: Vec<Piece> = chunks.iter().flat_map(|chunk| parser.push(chunk)).collect();
    pieces.extend(parser.finish(is_cut));
    joined(pieces)
}

/// Texts made of what is dangerous: markers, parts of them, names, JSON, quotes.
fn dangerous() -> impl Strategy<Value = String> {
    let mut parts: Vec<String> = well_formed().into_iter().map(|(_, text)| text).collect();
    for format in ToolCallFormat::ALL {
        parts.extend(dialect(*format).markup().into_iter().map(str::to_owned));
    }
    parts.extend(
        [
            "<",
            "{",
            "}",
            "[",
            "]",
            "\"",
            "'",
            "\\",
            ",",
            ":",
            "(",
            ")",
            "=",
            "\n",
            " ",
            "name",
            "now",
            "arguments",
            "é😀",
            "{\"name\": \"now\", \"arguments\": {}}",
            "[now()]",
            "call:now{",
            "<parameter=a>",
            "</parameter>",
            "</function>",
            "<function=now>",
            "null",
            "\\u",
            "d83d",
            "NaN",
            "<think>",
            "</think>",
            "text",
        ]
        .map(str::to_owned),
    );
    proptest::collection::vec(proptest::sample::select(parts), 0..12).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    /// However a text is split, the same pieces come out; nothing panics; a call that ended has arguments that parse.
    #[test]
    fn a_split_stream_equals_the_whole(
        text in dangerous(),
        format in proptest::sample::select(ToolCallFormat::ALL),
        seed in any::<u64>(),
        is_cut in any::<bool>(),
    ) {
        let whole = streamed(format, &[&text], is_cut);
        let ends: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        let single: Vec<&str> = ends.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        prop_assert_eq!(&whole, &streamed(format, &single, is_cut));
        let mut random = seed;
        let mut cuts: Vec<usize> = ends.iter().copied().filter(|_| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            random >> 62 == 0
        }).collect();
        cuts.insert(0, 0);
        cuts.push(text.len());
        let chunks: Vec<&str> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        prop_assert_eq!(&whole, &streamed(format, &chunks, is_cut));

        let answer = parse_answer(&dialect(format), &tools(), "", &text, is_cut);
        for call in &answer.calls {
            let value: Result<Value, _> = serde_json::from_str(&call.arguments);
            prop_assert!(value.is_ok_and(|value| value.is_object()), "{}: {}", format, call.arguments);
            prop_assert!(["get_weather", "write_file", "now"].contains(&call.name.as_str()));
        }
        let ended = whole.iter().filter(|piece| matches!(piece, Piece::CallEnd { .. })).count();
        prop_assert!(answer.calls.is_empty() || answer.calls.len() == ended);
    }

    /// Text without any marker comes out as it is.
    #[test]
    fn plain_text_is_unchanged(text in "[a-zA-Z0-9 .,;!?äß\n\t]{0,200}", format in proptest::sample::select(ToolCallFormat::ALL)) {
        prop_assume!(format != ToolCallFormat::Harmony);
        let answer = parse_answer(&dialect(format), &tools(), "", &text, false);
        prop_assert_eq!(answer, ParsedAnswer { content: text, ..Default::default() });
    }
}
