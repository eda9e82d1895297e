//! Dialects: every published template is recognised by its own text, answers come apart the same however they are split,
//! grammars let through only calls that parse, and calls rendered into history parse back.

use std::fmt::Write as _;

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use llmctl_engine::grammar::{closed, simplified};
use llmctl_template::{OutputParser, ParsedAnswer, Piece, TemplateError, ToolChoice, parse_answer};
use proptest::prelude::*;

use crate::common::prelude::*;

/// The source of a template file: as it is, or the `chat_template` member of a JSON file.
fn template_source(path: &Path) -> Option<String> {
    let text = std::fs::read_to_string(path).expect("a template is text");
    match path.extension()?.to_str()? {
        "json" => {
            let json: Value = serde_json::from_str(&text).ok()?;
            Some(json.get("chat_template")?.as_str()?.to_owned())
        }
        _ => Some(text),
    }
}

/// Every Jinja template of the fixtures, by `folder/file`.
pub fn templates() -> Option<BTreeMap<String, String>> {
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
        let output_markup = OutputMarkup::detect(source);
        let reasoning = output_markup.reasoning.map_or("-", |format| format.name());
        let tool_calls = output_markup.tool_calls.map_or("-", |format| format.name());
        writeln!(table, "{tool_calls:15} {reasoning:17} {name}").expect("a string takes everything");
    }
    insta::assert_snapshot!(table);
}

/// Tools whose schemas have every kind of argument.
pub fn tools() -> Vec<Value> {
    listed("dialects", "tools")
}

pub fn output_markup(format: ToolCallFormat) -> OutputMarkup {
    let reasoning = match format {
        ToolCallFormat::Harmony => ReasoningFormat::Harmony,
        ToolCallFormat::MuseGlimmer => ReasoningFormat::Atem,
        ToolCallFormat::Gemma => ReasoningFormat::GemmaChannel,
        ToolCallFormat::KimiK3 => ReasoningFormat::KimiK3,
        ToolCallFormat::SolarOpen => ReasoningFormat::SolarThink,
        ToolCallFormat::Functionary32 => ReasoningFormat::AllLine,
        ToolCallFormat::MiniMaxM3 => ReasoningFormat::MiniMaxThink,
        ToolCallFormat::Hy3 => ReasoningFormat::Hy3Think,
        _ => ReasoningFormat::Think,
    };
    OutputMarkup { reasoning: Some(reasoning), tool_calls: Some(format) }
}

/// Formats whose text has markers too, so that plain text is no answer.
const FRAMED: [ToolCallFormat; 5] = [
    ToolCallFormat::Harmony,
    ToolCallFormat::MuseGlimmer,
    ToolCallFormat::KimiK3,
    ToolCallFormat::SolarOpen,
    ToolCallFormat::Functionary32,
];

/// Formats that answer in messages with headers.
const HEADED: [ToolCallFormat; 2] = [ToolCallFormat::Harmony, ToolCallFormat::MuseGlimmer];

/// Returns the end of a prompt from which the parser learns how the answer begins; empty for formats without one.
fn tail(format: ToolCallFormat) -> &'static str {
    match format {
        ToolCallFormat::Harmony | ToolCallFormat::MuseGlimmer => "<|start|>assistant",
        ToolCallFormat::Functionary32 => ">>>",
        _ => "",
    }
}

pub fn values(answer: &ParsedAnswer) -> Vec<(String, Value)> {
    let value = |text: &str| serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    answer.calls.iter().map(|call| (call.name.clone(), value(&call.arguments))).collect()
}

/// Checks that a text gives these calls and this content.
#[track_caller]
fn gives(format: ToolCallFormat, text: &str, content: &str, calls: &[(&str, Value)]) {
    let answer = parse_answer(&output_markup(format), &tools(), tail(format), text, false);
    let calls: Vec<_> = calls.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    assert_eq!(values(&answer), calls, "{format}: {text}");
    assert_eq!(answer.content, content, "{format}: {text}");
}

/// Returns a table of formats and texts.
pub fn texts(table: &str) -> Vec<(ToolCallFormat, &'static str)> {
    let rows = listed::<(&str, &str)>("dialects", table).into_iter();
    rows.map(|(format, text)| (format.parse().expect("a format"), text)).collect()
}

/// A text of each format with the call `get_weather(city="Köln </tool_call>", days=3)`, with a word before it.
fn well_formed() -> Vec<(ToolCallFormat, String)> {
    texts("well_formed").into_iter().map(|(format, text)| (format, text.to_owned())).collect()
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
        error.to_string().starts_with("unknown tool-call format `qwen` (known: hy3, glm, seed-xml"),
        "{error}"
    );
}

#[test]
fn a_call_of_an_undefined_tool_is_text() {
    use ToolCallFormat as F;
    for (format, text) in well_formed() {
        let text = text.replace("get_weather", "get_whether");
        let answer = parse_answer(&output_markup(format), &tools(), tail(format), &text, false);
        // What stands around text is not shown either way.
        let shown = match format {
            F::KimiK3 | F::SolarOpen => {
                let text =
                    text.replace("<|open|>response<|sep|>", "").replace("<|close|>response<|sep|>", "");
                text.replace("<|content|>", "").replace("<|end|><|begin|>assistant", "")
            }
            F::Functionary32 => text.trim_start_matches("all\n").to_owned(),
            format if HEADED.contains(&format) => continue,
            _ => text,
        };
        assert_eq!(answer, ParsedAnswer { content: shown, ..Default::default() }, "{format}");
    }
}

#[test]
fn without_tools_nothing_is_a_call() {
    for (format, text) in well_formed().into_iter().filter(|(format, _)| !FRAMED.contains(format)) {
        let text = text.replace("<|python_start|>", "").replace("<|python_end|>", "");
        let answer = parse_answer(&output_markup(format), &[], "", &text, false);
        assert_eq!(answer, ParsedAnswer { content: text, ..Default::default() }, "{format}");
    }
}

/// Cut anywhere, an answer gives its leading text and either nothing more or the whole call.
#[test]
fn a_cut_call_leaves_the_leading_text() {
    let whole = json!({"city": "Köln </tool_call>", "days": 3});
    for (format, text) in well_formed() {
        for (at, _) in text.char_indices() {
            let answer = parse_answer(&output_markup(format), &tools(), tail(format), &text[..at], true);
            let calls = values(&answer);
            assert!(
                calls.is_empty() || calls == [("get_weather".to_owned(), whole.clone())],
                "{format} {at}: {calls:?}"
            );
            let content = answer.content.trim_end();
            let is_lead = "Hm.".starts_with(content)
                || matches!(content, "<" | "Hm.<" | "Hm.[" | "Hm.\n<" | "Hm.\n\n<");
            assert!(
                is_lead || content.strip_prefix("Hm.").is_some_and(|rest| rest.trim().len() <= 1),
                "{format} {at}: {content:?}"
            );
        }
    }
}

#[test]
fn malformed_calls_leave_the_leading_text() {
    for (format, text) in texts("malformed") {
        gives(format, text, "Hm.", &[]);
    }
}

/// Each row has a text, its content and its calls, and says what is told by it.
#[test]
fn answers_of_each_format_come_apart() {
    for (format, text, content, calls, why) in
        listed::<(&str, &str, &str, Vec<(&str, Value)>, &str)>("dialects", "answers")
    {
        eprintln!("{format}: {why}");
        gives(format.parse().expect("a format"), text, content, &calls);
    }
    // Ended by the model, a whole call counts; cut there, it is not sure that it was whole.
    let open = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}";
    let cut = parse_answer(&output_markup(ToolCallFormat::Hermes), &tools(), "", open, true);
    assert_eq!(cut, ParsedAnswer::default());
    // Markup that is cut behind a whole call is no text.
    for rest in [
        "",
        "\n<",
        "\n<tool",
        "\n<tool_call>\n{\"name\": \"now\"",
        "\n<tool_call>\n{\"name\": \"now\", \"arguments\": {\"a",
    ] {
        let text = format!("{open}\n</tool_call>{rest}");
        let cut = parse_answer(&output_markup(ToolCallFormat::Hermes), &tools(), "", &text, true);
        assert_eq!(
            (cut.content.as_str(), values(&cut)),
            ("", vec![("now".to_owned(), json!({}))]),
            "{rest:?}"
        );
    }
    // Gemma's thoughts go to the reasoning, stray markers nowhere.
    let text = "<|channel>thought\nLet me <|tool_call>call:now{}<tool_call|> see.\n<channel|>Hi<channel|>.<|tool_call>call:now{}<tool_call|>";
    let answer = parse_answer(&output_markup(ToolCallFormat::Gemma), &tools(), "", text, false);
    assert_eq!(answer.reasoning, "Let me <|tool_call>call:now{}<tool_call|> see.");
    assert_eq!((answer.content.as_str(), answer.calls.len()), ("Hi.", 1));
}

#[test]
fn reasoning_is_no_call_and_no_content() {
    let think = output_markup(ToolCallFormat::Hermes);
    for (tail, text, reasoning, content, num_calls) in
        listed::<(&str, &str, &str, &str, usize)>("dialects", "reasoning")
    {
        let answer = parse_answer(&think, &tools(), tail, text, false);
        assert_eq!(
            (answer.reasoning.as_str(), answer.content.as_str(), answer.calls.len()),
            (reasoning, content, num_calls),
            "{tail:?} {text:?}"
        );
    }
}

#[test]
fn harmony_messages() {
    let harmony = output_markup(ToolCallFormat::Harmony);
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
    let closing = harmony.reasoning.and_then(ReasoningFormat::closing).expect("a text that ends reasoning");
    let ended = format!("<|channel|>analysis<|message|>Hm, hm, hm,{closing}Noon.");
    let answer = parse_answer(&harmony, &[], "<|start|>assistant", &ended, false);
    assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("Hm, hm, hm,", "Noon."));
    let watched = ("<|channel|>analysis<|message|>", "<|end|>");
    assert_eq!(harmony.first_reasoning("<|end|><|start|>assistant"), Some(watched));
    assert_eq!(harmony.may_reason("<|start|>assistant"), None);
}

/// The parser returns pieces as soon as they are certain.
#[test]
fn pieces_come_early() {
    let mut parser = OutputParser::new(&output_markup(ToolCallFormat::Hermes), &tools(), "");
    let mut streamed = |text: &str| parser.push(text);
    assert_eq!(streamed("<think>Hm"), [Piece::Reasoning("Hm".to_owned())]);
    assert_eq!(streamed(" and"), [Piece::Reasoning(" and".to_owned())]);
    assert_eq!(streamed("</think>\n\nA < b"), [Piece::Content("A < b".to_owned())]);
    assert_eq!(streamed("\n<tool_"), []);
    assert_eq!(streamed("call>\n{\"name\": \"get_wea"), []);
    assert_eq!(streamed("ther\""), [Piece::CallName { index: 0, name: "get_weather".to_owned(), id: None }]);
    assert_eq!(
        streamed(", \"arguments\": {\"ci"),
        [Piece::CallArguments { index: 0, fragment: "{\"ci".to_owned() }]
    );
    assert_eq!(streamed("ty\": \"K"), [Piece::CallArguments { index: 0, fragment: "ty\": \"K".to_owned() }]);
    assert_eq!(streamed("\"}"), [Piece::CallArguments { index: 0, fragment: "\"}".to_owned() }]);
    assert_eq!(streamed("}\n</tool_call>"), [Piece::CallEnd { index: 0 }]);
    assert_eq!(parser.finish(false), []);

    // A finished argument of a tagged call goes out while the next one is being written.
    let mut parser = OutputParser::new(&output_markup(ToolCallFormat::QwenXml), &tools(), "");
    let pieces = parser.push(
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n1",
    );
    let expected = [
        Piece::CallName { index: 0, name: "get_weather".to_owned(), id: None },
        Piece::CallArguments { index: 0, fragment: "{\"city\": \"Bonn\"".to_owned() },
    ];
    assert_eq!(pieces, expected);
    assert_eq!(parser.finish(true), [], "a cut call is not ended");
}

/// Pieces with adjacent ones of a kind joined.
pub fn joined(pieces: Vec<Piece>) -> Vec<Piece> {
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

fn streamed(format: ToolCallFormat, chunks: &[&str], is_cut: bool, tail: &str) -> Vec<Piece> {
    let mut parser = OutputParser::new(&output_markup(format), &tools(), tail);
    let mut pieces: Vec<Piece> = chunks.iter().flat_map(|chunk| parser.push(chunk)).collect();
    pieces.extend(parser.finish(is_cut));
    joined(pieces)
}

/// Texts made of what is dangerous: markers, parts of them, names, JSON, quotes.
fn dangerous() -> impl Strategy<Value = String> {
    let mut parts: Vec<String> = well_formed().into_iter().map(|(_, text)| text).collect();
    for format in ToolCallFormat::ALL {
        parts.extend(output_markup(*format).markers().into_iter().map(str::to_owned));
    }
    parts.extend(listed::<String>("dialects", "dangerous"));
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
        // Reasoning may have been opened, or the answer's first marker written, by the prompt.
        let (open, _) = output_markup(format).may_reason("").unwrap_or_default();
        let tail = [tail(format), "", open][(seed % 3) as usize];
        let whole = streamed(format, &[&text], is_cut, tail);
        let ends: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        let single: Vec<&str> = ends.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        prop_assert_eq!(&whole, &streamed(format, &single, is_cut, tail));
        let mut random = seed;
        let mut cuts: Vec<usize> = ends.iter().copied().filter(|_| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            random >> 62 == 0
        }).collect();
        cuts.insert(0, 0);
        cuts.push(text.len());
        let chunks: Vec<&str> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
        prop_assert_eq!(&whole, &streamed(format, &chunks, is_cut, tail));

        let answer = parse_answer(&output_markup(format), &tools(), tail, &text, is_cut);
        for call in &answer.calls {
            let value: Result<Value, _> = serde_json::from_str(&call.arguments);
            prop_assert!(value.is_ok_and(|value| value.is_object()), "{}: {}", format, call.arguments);
            let is_given = ["get_weather", "write_file", "now"].contains(&call.name.as_str());
            prop_assert!(is_given || format == ToolCallFormat::Harmony, "{}: {}", format, call.name);
        }
        let ended = whole.iter().filter(|piece| matches!(piece, Piece::CallEnd { .. })).count();
        prop_assert!(answer.calls.is_empty() || answer.calls.len() == ended);
    }

    /// Text without any marker comes out as it is.
    #[test]
    fn plain_text_is_unchanged(text in "[a-zA-Z0-9 .,;!?äß\n\t]{0,200}", format in proptest::sample::select(ToolCallFormat::ALL)) {
        prop_assume!(!HEADED.contains(&format));
        let answer = parse_answer(&output_markup(format), &tools(), "", &text, false);
        prop_assert_eq!(answer, ParsedAnswer { content: text, ..Default::default() });
    }
}

/// A grammar over single bytes: no marker is a special token.
fn byte_matcher(lark: &str) -> Matcher {
    let mut factory =
        ParserFactory::new_simple(&ApproximateTokEnv::single_byte_env()).expect("a byte tokenizer");
    factory.quiet();
    let parser = factory.create_parser(TopLevelGrammar::from_lark(lark.to_owned()));
    Matcher::new(Ok(parser.unwrap_or_else(|error| panic!("{error}\n{lark}"))))
}

fn grammar(format: ToolCallFormat, choice: &ToolChoice, is_parallel: bool, tail: &str) -> String {
    let tail = if tail.is_empty() { self::tail(format) } else { tail };
    let grammar = output_markup(format).tool_grammar(&tools(), choice, is_parallel, tail, &|_| None);
    grammar.expect("a format with tools has a grammar")
}

fn tokens(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// Returns how many bytes a grammar accepts, and whether it may end there.
pub fn taken(lark: &str, text: &str) -> (usize, bool) {
    let mut matcher = byte_matcher(lark);
    let count = matcher.try_consume_tokens(&tokens(text)).expect("the parser works");
    let ends = count == text.len() && matcher.is_accepting().expect("the parser works");
    (count, ends)
}

/// The well-formed answers as the grammars spell them, with what stands before the call.
fn constrained() -> Vec<(ToolCallFormat, String, String)> {
    let split = |(format, text): (ToolCallFormat, String)| {
        let text = match format {
            ToolCallFormat::Mistral => text.replace("] [", "]["),
            ToolCallFormat::Llama3 => text.replace("Hm.<|python_tag|>", ""),
            ToolCallFormat::Pythonic => text.replace("Hm.<|python_start|>", "").replace("<|python_end|>", ""),
            ToolCallFormat::MistralArgs => text.replace("[CALL_ID]abcdefghi", ""),
            _ => text,
        };
        let lead = text.find("Hm.").map_or(0, |at| at + 3);
        let lead = match format {
            ToolCallFormat::Harmony => text.rfind("<|channel|>").unwrap_or(0),
            ToolCallFormat::MuseGlimmer => text.rfind(" to=").unwrap_or(0),
            ToolCallFormat::KimiK3 => text.find("<|open|>tools").unwrap_or(0),
            ToolCallFormat::SolarOpen => text.find("<|tool_calls|>").unwrap_or(0),
            ToolCallFormat::Functionary32 => text.find("get_weather").unwrap_or(0),
            _ => lead,
        };
        // The space in front of a recipient is the header's.
        let is_header = format == ToolCallFormat::MuseGlimmer;
        let space = if is_header { 0 } else { text[lead..].len() - text[lead..].trim_start().len() };
        (format, text[..lead + space].to_owned(), text[lead + space..].to_owned())
    };
    well_formed().into_iter().map(split).collect()
}

#[test]
fn grammars_take_calls_of_the_given_tools() {
    for (format, lead, call) in constrained() {
        let whole = (lead.len() + call.len(), true);
        let auto = grammar(format, &ToolChoice::Auto, true, "");
        assert_eq!(taken(&auto, &format!("{lead}{call}")), whole, "{format}\n{auto}");
        let required = grammar(format, &ToolChoice::Required, true, "");
        assert_eq!(taken(&required, &call), (call.len(), true), "{format}\n{required}");
        assert!(!taken(&required, "Hm.").1, "{format}: text where a call is required");
        let named = grammar(format, &ToolChoice::Named("now".to_owned()), true, "");
        assert!(!taken(&named, &call).1, "{format}: another tool than the named one");
        for (from, to) in [("get_weather", "get_whether"), ("days", "daze"), (" 3", " \"x\""), ("=3", "='x'")]
        {
            let broken = call.replace(from, to);
            assert!(broken == call || !taken(&required, &broken).1, "{format}: {broken}");
        }
    }
}

#[test]
fn grammars_take_text_when_calls_are_optional() {
    for format in ToolCallFormat::ALL.iter().copied().filter(|format| !FRAMED.contains(format)) {
        let auto = grammar(format, &ToolChoice::Auto, true, "");
        let (open, close) = output_markup(format).may_reason("").expect("reasoning with markers");
        let thoughtful = format!("{open}\nHm <tool_call> [now(\n{close}\n\nText.");
        for text in ["Just text, 1 < 2.\n", &thoughtful] {
            assert_eq!(taken(&auto, text), (text.len(), true), "{format}: {text}\n{auto}");
        }
        let opened =
            grammar(format, &ToolChoice::Required, true, &format!("<|im_start|>assistant\n{open}\n"));
        let (_, _, call) =
            constrained().into_iter().find(|case| case.0 == format).expect("every format has a case");
        let text = format!("Hm.\n{close}\n\n{call}");
        if format != ToolCallFormat::Gemma {
            assert_eq!(taken(&opened, &text), (text.len(), true), "{format}\n{opened}");
            assert!(!taken(&opened, &call).1, "{format}: reasoning that the prompt opened must end");
        }
    }
}

#[test]
fn one_call_where_only_one_may_be() {
    for (format, _, call) in constrained() {
        let twice = match format {
            ToolCallFormat::MuseGlimmer => format!("{call}<|eom|><|start|>assistant{call}"),
            ToolCallFormat::Functionary32 => format!("{call}>>>{call}"),
            ToolCallFormat::MiniCpm5
            | ToolCallFormat::Generic
            | ToolCallFormat::Hermes
            | ToolCallFormat::QwenXml
            | ToolCallFormat::SeedXml
            | ToolCallFormat::Glm => {
                format!("{call}\n{call}")
            }
            ToolCallFormat::Gemma | ToolCallFormat::MistralArgs | ToolCallFormat::FunctionTag => {
                call.repeat(2)
            }
            ToolCallFormat::Llama3 => format!("{call}; {call}"),
            _ => continue,
        };
        assert!(taken(&grammar(format, &ToolChoice::Required, true, ""), &twice).1, "{format}: {twice}");
        assert!(!taken(&grammar(format, &ToolChoice::Required, false, ""), &twice).1, "{format}: {twice}");
    }
}

/// A tokenizer of bytes in which every marker is a special token, and a text in its ids.
pub struct Specials {
    pub markup: Vec<&'static str>,
}

impl Specials {
    const FIRST: usize = 256;

    pub fn id(&self, text: &str) -> Option<u32> {
        self.markup.iter().position(|mark| *mark == text).map(|at| (Self::FIRST + at) as u32)
    }

    fn env(&self) -> TokEnv {
        let mut words: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
        let special = |mark: &str| [&[TokTrie::SPECIAL_TOKEN_MARKER], mark.as_bytes()].concat();
        words.extend(self.markup.iter().map(|mark| special(mark)));
        words.push(special("<|eos|>"));
        let num_words = words.len() as u32;
        let info = TokRxInfo::new(num_words, num_words - 1);
        Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &words)))
    }

    fn tokens(&self, text: &str) -> Vec<u32> {
        let (mut ids, mut rest) = (Vec::new(), text);
        while !rest.is_empty() {
            let mark =
                self.markup.iter().filter(|mark| rest.starts_with(**mark)).max_by_key(|mark| mark.len());
            let len = mark.map_or(1, |mark| mark.len());
            ids.push(mark.and_then(|mark| self.id(mark)).unwrap_or_else(|| u32::from(rest.as_bytes()[0])));
            rest = match mark {
                Some(_) => &rest[len..],
                None => {
                    let c = rest.chars().next().expect("not empty");
                    ids.extend(rest.bytes().take(c.len_utf8()).skip(1).map(u32::from));
                    &rest[c.len_utf8()..]
                }
            };
        }
        ids
    }

    /// Returns whether a grammar over these tokens takes the whole text and may end behind it.
    pub fn are_taken(&self, lark: &str, text: &str) -> bool {
        let mut factory = ParserFactory::new_simple(&self.env()).expect("a tokenizer");
        factory.quiet();
        let parser = factory.create_parser(TopLevelGrammar::from_lark(lark.to_owned()));
        let mut matcher = Matcher::new(Ok(parser.unwrap_or_else(|error| panic!("{error}\n{lark}"))));
        let ids = self.tokens(text);
        let count = matcher.try_consume_tokens(&ids).expect("the parser works");
        count == ids.len() && matcher.is_accepting().expect("the parser works")
    }
}

#[test]
fn special_tokens_stand_as_tokens() {
    for (format, lead, call) in constrained() {
        let specials = Specials { markup: output_markup(format).markers() };
        let grammar = |choice: ToolChoice| {
            let tail = tail(format);
            let lark =
                output_markup(format).tool_grammar(&tools(), &choice, true, tail, &|mark| specials.id(mark));
            lark.expect("a format with tools has a grammar")
        };
        // No marker is text inside a value, where it cannot be a token.
        let call = call.replace("Köln </tool_call>", "Köln");
        let (auto, required) = (grammar(ToolChoice::Auto), grammar(ToolChoice::Required));
        for (lark, text) in [(&auto, format!("{lead}{call}")), (&required, call)] {
            assert!(specials.are_taken(lark, &text), "{format}: {text}\n{lark}");
        }
    }
}

#[test]
fn nothing_to_constrain_is_no_grammar() {
    let hermes = output_markup(ToolCallFormat::Hermes);
    let none = hermes.tool_grammar(&[], &ToolChoice::None, true, "", &|_| None).expect("text without calls");
    assert!(!none.contains("get_weather") && none.contains("~/(?s:.*)<tool_call>(?s:.*)/"), "{none}");
    assert_eq!(hermes.tool_grammar(&[], &ToolChoice::Auto, true, "", &|_| None), None);
    assert_eq!(hermes.tool_grammar(&tools(), &ToolChoice::Named("rm".to_owned()), true, "", &|_| None), None);
    assert_eq!(OutputMarkup::default().tool_grammar(&tools(), &ToolChoice::Auto, true, "", &|_| None), None);
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n
    }
}

/// Walks a grammar by bytes that it allows, ending open text now and then; `None` when the walk does not come to an end.
fn walk(lark: &str, random: &mut Random) -> Option<String> {
    let closers = listed::<&str>("dialects", "closers");
    let mut matcher = byte_matcher(lark);
    let mut bytes = Vec::new();
    for _ in 0..1200 {
        if matcher.is_accepting().ok()? && random.below(3) == 0 {
            return String::from_utf8(bytes).ok();
        }
        if random.below(6) == 0 {
            let closers = closers.iter().map(|closer| tokens(closer));
            let mut fits =
                |closer: &Vec<u32>| matcher.validate_tokens(closer).is_ok_and(|n| n == closer.len());
            let mut closers: Vec<Vec<u32>> = closers.filter(|closer| fits(closer)).collect();
            if !closers.is_empty() {
                let closer = closers.swap_remove(random.below(closers.len()));
                bytes.extend(closer.iter().map(|token| *token as u8));
                matcher.consume_tokens(&closer).ok()?;
                continue;
            }
        }
        let mask = matcher.compute_mask().ok()?;
        let allowed: Vec<u8> = (0..=255u8).filter(|byte| mask.is_allowed(u32::from(*byte))).collect();
        if allowed.is_empty() {
            return matcher.is_accepting().ok()?.then(|| String::from_utf8(bytes).ok())?;
        }
        let byte = allowed[random.below(allowed.len())];
        matcher.consume_token(u32::from(byte)).ok()?;
        bytes.push(byte);
    }
    None
}

/// Whether the text has neither an exponent of three digits or more, which goes out as text because no double holds it, nor a
/// marker of messages inside a call, which is a token there.
fn is_ordinary(text: &str) -> bool {
    let has_huge_number = text.match_indices(['e', 'E']).any(|(at, _)| {
        let exponent = text[at + 1..].trim_start_matches(['+', '-']);
        exponent.bytes().take_while(u8::is_ascii_digit).count() >= 3
    });
    let has_marker = ["<atem:invoke", "to=functions."]
        .iter()
        .flat_map(|head| text.split(head).skip(1))
        .any(|rest| rest.split("</atem:function_calls>").next().is_some_and(|call| call.contains("<|eom|>")));
    !has_huge_number && !has_marker
}

#[test]
fn what_a_grammar_lets_through_parses_back() {
    let schemas: BTreeMap<String, jsonschema::Validator> = tools()
        .iter()
        .map(|tool| {
            let schema = jsonschema::validator_for(&tool["function"]["parameters"]).expect("a schema");
            (tool["function"]["name"].as_str().expect("a name").to_owned(), schema)
        })
        .collect();
    for format in ToolCallFormat::ALL.iter().copied() {
        let mut num_walks = 0;
        for (choice, seed) in [ToolChoice::Required, ToolChoice::Auto]
            .into_iter()
            .flat_map(|choice| (0..8).map(move |seed| (choice.clone(), seed)))
        {
            let lark = grammar(format, &choice, seed % 2 == 0, "");
            let Some(text) = walk(&lark, &mut Random(seed)) else { continue };
            if !is_ordinary(&text) {
                continue;
            }
            num_walks += 1;
            let tail = tail(format);
            let mut parser = OutputParser::new(&output_markup(format), &tools(), tail);
            let mut pieces = parser.push(&text);
            pieces.extend(parser.finish(false));
            let count = |test: fn(&Piece) -> bool| pieces.iter().filter(|piece| test(piece)).count();
            let num_named = count(|piece| matches!(piece, Piece::CallName { .. }));
            assert_eq!(num_named, count(|piece| matches!(piece, Piece::CallEnd { .. })), "{format}: {text}");
            let answer = parse_answer(&output_markup(format), &tools(), tail, &text, false);
            assert_eq!(answer.calls.len(), num_named, "{format}: {text}");
            assert!(choice == ToolChoice::Auto || num_named > 0, "{format}: {text}");
            for (name, value) in values(&answer) {
                if let Err(error) = schemas[&name].validate(&value) {
                    panic!("{format}: {error}\n{value}\n{text}");
                }
            }
        }
        assert!(num_walks >= 4, "{format}: only {num_walks} walks came to an end");
    }
}

#[test]
fn calls_follow_schemas_that_are_no_list_of_properties() {
    for format in ToolCallFormat::ALL.iter().copied() {
        for parameters in listed::<Value>("dialects", "schemas") {
            let plain = closed(&simplified(&parameters)); // as requests are planned
            let tool = json!({"type": "function", "function": {"name": "f", "parameters": plain}});
            let tools = std::slice::from_ref(&tool);
            if !output_markup(format).unwritable_tools(tools).is_empty() {
                continue; // the caller leaves the keyword out, and says so
            }
            let (schema, tail) = (jsonschema::validator_for(&parameters).expect("a schema"), tail(format));
            let lark =
                output_markup(format).tool_grammar(tools, &ToolChoice::Required, false, tail, &|_| None);
            let lark = lark.expect("a grammar");
            let walks = (0..24).filter_map(|seed| walk(&lark, &mut Random(seed)));
            let walks: Vec<String> = walks.filter(|text| is_ordinary(text)).take(1).collect();
            for text in &walks {
                let answer = parse_answer(&output_markup(format), tools, tail, text, false);
                let [call] = &answer.calls[..] else { panic!("{format}: {text}\n{lark}") };
                let value = serde_json::from_str(&call.arguments).expect("JSON");
                assert!(schema.is_valid(&value), "{format}: {parameters}\n{value}\n{text}\n{lark}");
            }
            assert!(!walks.is_empty(), "{format}: {parameters}: no walk came to an end\n{lark}");
        }
    }
    // MiniMax M3 repeats the name of a member in its end tag, so that no member can have any name.
    let open = json!({"name": "f", "parameters": {"additionalProperties": {"type": "boolean"}}});
    let refused: Vec<ToolCallFormat> = (ToolCallFormat::ALL.iter().copied())
        .filter(|format| !output_markup(*format).unwritable_tools(std::slice::from_ref(&open)).is_empty())
        .collect();
    assert_eq!(refused, [ToolCallFormat::MiniMaxM3]);
}

#[test]
fn literals_follow_their_schema_or_name_what_they_do_not() {
    let follows = [
        json!({"enum": [1, "a", true, null]}),
        json!({"const": 7}),
        json!({"type": ["integer", "null"], "minimum": 3, "maximum": 5}),
        json!({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}),
        json!({"type": "string", "pattern": "^[ab]{2}$"}),
        json!({"type": "number"}),
    ];
    let refuses = [
        (json!({"type": "array", "items": {"type": "integer"}, "uniqueItems": true}), "uniqueItems"),
        (json!({"type": "array", "prefixItems": [{"type": "integer"}]}), "prefixItems"),
        (json!({"type": "string", "not": {"const": "a"}}), "not"),
        (json!({"enum": [[1]]}), "enum"),
        (json!({"minimum": 3}), "minimum"),
    ];
    let tool = |schema: &Value| {
        let parameters = json!({"type": "object", "properties": {"x": schema}, "required": ["x"]});
        json!({"type": "function", "function": {"name": "f", "parameters": parameters}})
    };
    for format in [ToolCallFormat::Lfm2, ToolCallFormat::Pythonic, ToolCallFormat::Gemma] {
        let markup = output_markup(format);
        for (schema, keyword) in &refuses {
            let found = markup.unwritable_tools(&[tool(schema)]);
            assert_eq!(found, [("f".to_owned(), (*keyword).to_owned())], "{format}: {schema}");
        }
        for schema in &follows {
            let tools = [tool(schema)];
            assert_eq!(markup.unwritable_tools(&tools), [], "{format}: {schema}");
            let lark = markup.tool_grammar(&tools, &ToolChoice::Required, false, tail(format), &|_| None);
            let lark = lark.expect("a grammar");
            let valid = jsonschema::validator_for(schema).expect("a schema");
            let walks: Vec<String> =
                (0..24).filter_map(|seed| walk(&lark, &mut Random(seed))).take(4).collect();
            assert!(!walks.is_empty(), "{format}: {schema}: no walk came to an end\n{lark}");
            for text in &walks {
                let answer = parse_answer(&markup, &tools, tail(format), text, false);
                let [call] = &answer.calls[..] else { panic!("{format}: {text}\n{lark}") };
                let value: Value = serde_json::from_str(&call.arguments).expect("JSON");
                assert!(valid.is_valid(&value["x"]), "{format}: {schema}\n{value}\n{text}\n{lark}");
            }
        }
    }
}

/// Checks that a grammar takes calls that a model may write in another form than its template, and that they mean the same.
#[track_caller]
fn takes(format: ToolCallFormat, text: &str, calls: &[(&str, Value)]) {
    let lark = grammar(format, &ToolChoice::Required, true, "");
    assert_eq!(taken(&lark, text), (text.len(), true), "{format}: {text}\n{lark}");
    gives(format, text, "", calls);
}

#[test]
fn arguments_come_in_any_order() {
    let weather = |value: Value| [("get_weather", value)];
    let turned = weather(json!({"exact": true, "city": "a", "days": 3}));
    for (format, text) in texts("any_order") {
        takes(format, text, &turned);
        let lark = grammar(format, &ToolChoice::Required, true, "");
        // Neither twice nor without a required one.
        for broken in [
            text.replace("exact", "days").replace("true", "3").replace("True", "3"),
            text.replace("city", "note"),
        ] {
            assert!(!taken(&lark, &broken).1, "{format}: {broken}");
        }
    }
}

#[test]
fn a_value_holds_its_closing_tag_unless_the_call_goes_on_behind_it() {
    for (format, close) in texts("closing_tags") {
        let (_, _, call) =
            constrained().into_iter().find(|case| case.0 == format).expect("every format has a case");
        let city = format!("A block ends with {close} here,\n{close}\nand {close}");
        let text = call.replace("Köln </tool_call>", &city);
        takes(format, &text, &[("get_weather", json!({"city": city, "days": 3}))]);
    }
}

#[test]
fn white_space_between_markup_is_free() {
    let calls = [("get_weather", json!({"city": "a b", "days": 3}))];
    for (format, text) in texts("white_space") {
        takes(format, text, &calls);
    }
}

/// A history in which the assistant calls tools, and its answer alone as the template prints it.
fn rendered_turn(
    template: &ChatTemplate,
    output_markup: &OutputMarkup,
    message: Message,
) -> Result<String, TemplateError> {
    let mut tools = tools();
    // Some templates print types with macros that know no unions. Calls are printed without a look at the tools.
    // Nor objects that do not say what is in them.
    for (tool, name) in [(0, "note"), (1, "options")] {
        let properties = &mut tools[tool]["function"]["parameters"]["properties"];
        properties.as_object_mut().expect("an object").remove(name);
    }
    let mut conversation = Conversation { messages: vec![Message::user("Go.")], tools, ..Default::default() };
    let render = |conversation: &Conversation, add_generation_prompt: bool| {
        template.render(conversation, &RenderOptions { add_generation_prompt, ..Default::default() })
    };
    let (base, prompt) = (render(&conversation, false)?, render(&conversation, true)?);
    conversation.messages.push(message);
    let full = render(&conversation, false)?;
    if let Some(turn) = full.strip_prefix(prompt.as_str()) {
        return Ok(turn.to_owned());
    }
    // The prompt opens reasoning that history does not print, or history closes turns in another way.
    let common = base.bytes().zip(full.bytes()).take_while(|(a, b)| a == b).count();
    let turn = full.get(common..).unwrap_or_default();
    let header = prompt.get(common..).unwrap_or_default();
    let open = output_markup.markers().iter().filter_map(|mark| header.find(mark)).min();
    let header = header[..open.unwrap_or(header.len())].trim_end();
    Ok(turn.strip_prefix(header).unwrap_or(turn).to_owned())
}

/// The turn as each way of giving the calls prints it: arguments as an object or as text (templates differ in what they
/// take, and some print objects as HTML), without content or with empty content.
fn printed_turns(
    template: &ChatTemplate,
    output_markup: &OutputMarkup,
    calls: &[ToolCall],
) -> Vec<Result<String, TemplateError>> {
    let spelled: Vec<ToolCall> = calls
        .iter()
        .map(|call| ToolCall { arguments: Value::String(call.arguments.to_string()), ..call.clone() })
        .collect();
    let ways = [calls, &spelled].into_iter().flat_map(|calls| [(calls, None), (calls, Some(String::new()))]);
    ways.map(|(calls, content)| {
        let content = content.map(Content::Text);
        let message = Message { content, tool_calls: calls.to_vec(), ..Message::assistant("") };
        rendered_turn(template, output_markup, message)
    })
    .collect()
}

#[test]
fn calls_in_history_parse_back() {
    let Some(templates) = templates() else { return };
    // Of some templates, which cannot print the calls of an earlier answer, the table says why.
    let prints_none: BTreeMap<&str, &str> = listed("dialects", "prints_no_calls").into_iter().collect();
    let call = |name: &str, arguments: Value| ToolCall {
        id: Some("abcdefghi".to_owned()),
        name: name.to_owned(),
        arguments,
    };
    let code = "def f(x):\n\treturn \"<\" if x else 'y'\n";
    let histories = [
        vec![call("get_weather", json!({"city": "Köln", "days": 3, "exact": true}))],
        vec![call(
            "write_file",
            json!({"content": code, "mode": 0.5, "path": "/tmp/ä b.py", "tags": ["a", "b c"]}),
        )],
        vec![call("now", json!({})), call("get_weather", json!({"city": "12"}))],
    ];
    let specials = SpecialTokens { bos: Some("<s>".to_owned()), eos: Some("</s>".to_owned()) };
    let (mut num_equal, mut failures) = (0, BTreeMap::new());
    for (name, source) in &templates {
        let output_markup = OutputMarkup::detect(source);
        if output_markup.tool_calls.is_none() || prints_none.contains_key(name.as_str()) {
            continue;
        }
        let template = ChatTemplate::new(source, specials.clone()).expect("a published template compiles");
        let format = output_markup.tool_calls.expect("a format");
        let prints_one = [ToolCallFormat::Harmony, ToolCallFormat::GigaChat3, ToolCallFormat::GigaChat31]
            .contains(&format);
        for (at, history) in histories.iter().enumerate() {
            if prints_one && history.len() > 1 {
                continue; // prints the first call of a message
            }
            let turns = printed_turns(&template, &output_markup, history);
            if history.len() > 1 && turns.iter().all(|turn| matches!(turn, Err(TemplateError::Raised { .. })))
            {
                continue; // some allow one call only
            }
            let tail = tail(format);
            let expected: Vec<_> =
                history.iter().map(|call| (call.name.clone(), call.arguments.clone())).collect();
            let is_equal =
                |turn: &str| values(&parse_answer(&output_markup, &tools(), tail, turn, false)) == expected;
            if turns.iter().flatten().any(|turn| is_equal(turn)) {
                num_equal += 1;
            } else {
                failures.insert(format!("{name} {at}"), format!("{:?}", turns[0]));
            }
        }
    }
    eprintln!("round trip: {num_equal} equal");
    let shown: Vec<String> = failures.iter().map(|(key, why)| format!("{key}: {why}")).collect();
    assert!(failures.is_empty(), "{} differ\n{}", failures.len(), shown.join("\n"));
}

/// A BFCL function as a tool: its types are Python's.
fn bfcl_tool(function: &Value) -> Value {
    fn with_json_types(value: &mut Value) {
        match value {
            Value::Object(object) => {
                let name = match object.get("type").and_then(Value::as_str) {
                    Some("dict") => Some("object"),
                    Some("float") => Some("number"),
                    Some("tuple") => Some("array"),
                    _ => None,
                };
                if let Some(name) = name {
                    object.insert("type".to_owned(), json!(name));
                }
                if object.get("type") == Some(&json!("any")) {
                    object.remove("type");
                }
                object.values_mut().for_each(with_json_types);
            }
            Value::Array(items) => items.iter_mut().for_each(with_json_types),
            _ => {}
        }
    }
    let mut function = function.clone();
    with_json_types(&mut function["parameters"]);
    json!({"type": "function", "function": function})
}

/// The calls of a BFCL answer: of every argument the first allowed value that is one.
fn bfcl_calls(answer: &Value) -> Vec<ToolCall> {
    fn first(allowed: &Value) -> Option<Value> {
        let value = allowed.as_array()?.iter().find(|value| **value != json!(""))?;
        Some(match value {
            Value::Object(members) => {
                members.iter().filter_map(|(key, allowed)| Some((key.clone(), first(allowed)?))).collect()
            }
            value => value.clone(),
        })
    }
    let calls =
        answer["ground_truth"].as_array().into_iter().flatten().filter_map(Value::as_object).flatten();
    calls
        .map(|(name, arguments)| {
            let members = arguments.as_object().into_iter().flatten();
            let arguments =
                members.filter_map(|(key, allowed)| Some((key.clone(), first(allowed)?))).collect();
            ToolCall { id: Some("abcdefghi".to_owned()), name: name.clone(), arguments }
        })
        .collect()
}

fn json_lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

/// Real calls of real functions, through templates of each kind of notation.
#[test]
fn bfcl_calls_parse_back() {
    const TEMPLATES: [&str; 6] = [
        "trl/qwen3.jinja",
        "llama.cpp/Qwen3.5-4B.jinja",
        "llama.cpp/google-gemma-4-31B-it.jinja",
        "llama.cpp/GLM-4.6.jinja",
        "mistral-common/v13.jinja",
        "trl/lfm2_2_5.jinja",
    ];
    let Some(root) = fixtures() else { return };
    let specials = SpecialTokens { bos: Some("<s>".to_owned()), eos: Some("</s>".to_owned()) };
    let (mut total, mut failures) = (0, Vec::new());
    for template_name in TEMPLATES {
        let source = std::fs::read_to_string(root.join("templates").join(template_name)).expect("a template");
        let output_markup = OutputMarkup::detect(&source);
        let template = ChatTemplate::new(&source, specials.clone()).expect("a published template compiles");
        for file in ["simple_python", "multiple", "parallel", "parallel_multiple"] {
            let file = format!("BFCL_v4_{file}.json");
            let questions = json_lines(&root.join("vectors/bfcl").join(&file));
            let answers = json_lines(&root.join("vectors/bfcl/possible_answer").join(&file));
            // Every third: rendering takes most of the time.
            for (question, answer) in questions.iter().zip(&answers).step_by(3) {
                let functions = question["function"].as_array().expect("functions");
                let tools: Vec<Value> = functions.iter().map(bfcl_tool).collect();
                let calls = bfcl_calls(answer);
                let fits = |call: &ToolCall| {
                    let tool = tools.iter().find(|tool| tool["function"]["name"] == call.name.as_str());
                    tool.is_some_and(|tool| {
                        jsonschema::is_valid(&tool["function"]["parameters"], &call.arguments)
                    })
                };
                if !calls.iter().all(fits) {
                    continue; // an answer that its own function does not allow
                }
                let is_text = template_name.starts_with("mistral-common");
                let told = calls.iter().map(|call| match is_text {
                    true => ToolCall { arguments: Value::String(call.arguments.to_string()), ..call.clone() },
                    false => call.clone(),
                });
                let message = Message { content: None, tool_calls: told.collect(), ..Message::assistant("") };
                let turn = rendered_turn(&template, &output_markup, message).expect("a call renders");
                let parsed = values(&parse_answer(&output_markup, &tools, "", &turn, false));
                let expected: Vec<_> =
                    calls.iter().map(|call| (call.name.clone(), call.arguments.clone())).collect();
                total += 1;
                if parsed != expected {
                    failures.push(format!(
                        "{template_name} {}: {turn:?}\n   {parsed:?}\n   {expected:?}",
                        answer["id"]
                    ));
                }
            }
        }
    }
    eprintln!("BFCL: {} of {total} equal", total - failures.len());
    assert!(total > 1500, "only {total} answers");
    assert!(
        failures.is_empty(),
        "{} differ\n{}",
        failures.len(),
        failures[..failures.len().min(20)].join("\n")
    );
}

/// The channels of OpenAI's own Harmony renderings.
#[test]
fn harmony_vectors_come_apart() {
    let Some(root) = fixtures() else { return };
    let harmony = output_markup(ToolCallFormat::Harmony);
    let lookup =
        json!({"type": "function", "function": {"name": "lookup_weather", "parameters": {"type": "object"}}});
    let read = |name: &str| {
        std::fs::read_to_string(root.join("vectors/harmony").join(name)).expect("a Harmony vector")
    };
    // The assistant's turn behind the first question, up to the next message of somebody else.
    let text = read("test_does_not_drop_if_ongoing_analysis.txt");
    let (_, turn) = text.split_once("<|end|><|start|>assistant").expect("an assistant's turn");
    let (turn, _) = turn.split_once("<|start|>functions").expect("a tool's answer");
    let answer = parse_answer(&harmony, std::slice::from_ref(&lookup), "<|start|>assistant", turn, false);
    assert_eq!(
        answer.reasoning,
        "User asks: “What is the weather in SF?” We need to use lookup_weather tool."
    );
    assert_eq!(values(&answer), [("lookup_weather".to_owned(), json!({"location": "San Francisco"}))]);
    assert_eq!(answer.content, "");

    let text = read("test_keep_analysis_between_finals.txt");
    let turn = text.rsplit_once("What is 3 + 5?<|end|><|start|>assistant").map(|(_, turn)| turn);
    let (turn, _) =
        turn.and_then(|turn| turn.split_once("<|start|>user")).unwrap_or((turn.expect("a turn"), ""));
    let answer = parse_answer(&harmony, &[], "<|start|>assistant", turn, false);
    assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("thinking 3+5", "8"));
}
