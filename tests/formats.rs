//! Formats of answers that want more than a call between markers: calls inside reasoning, messages with headers, templates
//! that are not among the fixtures, and what every published template is taken for.

use std::fmt::Write as _;

use llmctl_template::{OutputParser, Piece, Shown, SystemMessages, ToolChoice, parse_answer};

use crate::common::prelude::*;
use crate::dialects::{Specials, joined, output_markup, taken, templates, texts, tools, values};

/// Reasoning, content and calls of an answer, the same as a whole and character by character.
#[track_caller]
fn parts(output_markup: &OutputMarkup, tail: &str, text: &str) -> (String, String, Vec<(String, Value)>) {
    let answer = parse_answer(output_markup, &tools(), tail, text, false);
    let stream = |chunks: Vec<String>| {
        let mut parser = OutputParser::new(output_markup, &tools(), tail);
        let mut pieces: Vec<Piece> = chunks.iter().flat_map(|chunk| parser.push(chunk)).collect();
        pieces.extend(parser.finish(false));
        joined(pieces)
    };
    let single = text.chars().map(String::from).collect();
    assert_eq!(stream(vec![text.to_owned()]), stream(single), "{text}");
    (answer.reasoning.clone(), answer.content.clone(), values(&answer))
}

fn now() -> Vec<(String, Value)> {
    vec![("now".to_owned(), json!({}))]
}

/// A call of `now` in formats whose models were seen to call before they close their reasoning.
fn early() -> Vec<(ToolCallFormat, &'static str)> {
    texts("early")
}

#[test]
fn a_call_that_ends_the_reasoning_is_a_call() {
    for (format, call) in early() {
        let think = output_markup(format);
        let check =
            |tail: &str, text: String, reasoning: &str, content: &str, calls: Vec<(String, Value)>| {
                let expected = (reasoning.to_owned(), content.to_owned(), calls);
                assert_eq!(parts(&think, tail, &text), expected, "{format}: {text}");
            };
        check("", format!("<think>\nLook.\n\n{call}"), "Look.", "", now());
        check("<think>\n", format!("Look.\n{call}\n"), "Look.", "", now());
        check("<think>\n", format!("{call}\n{call}"), "", "", [now(), now()].concat());
        check("<think>\n", format!("Look.\n{call}\n</think>\n\n"), "Look.", "", now());
        // Anything that follows makes it a thought.
        check(
            "<think>\n",
            format!("Is {call} it?\n</think>\n\nYes."),
            &format!("Is {call} it?"),
            "Yes.",
            vec![],
        );
        check("<think>\n", format!("{call}\n</think>\n\nYes."), call, "Yes.", vec![]);
        check("<think>\n", format!("{call}\n</think>\n\n{call}"), call, "", now());
        check("<think>\n", format!("{call} {call} or so"), &format!("{call} {call} or so"), "", vec![]);
        // What is broken off, or calls nobody, is a thought too.
        let half = &call[..call.len() - 4];
        check("<think>\n", format!("{half}</think>Yes."), half, "Yes.", vec![]);
        let unknown = call.replace("now", "soon");
        check("<think>\n", format!("Hm {unknown}"), &format!("Hm {unknown}"), "", vec![]);
        let cut = parse_answer(&think, &tools(), "<think>\n", call, true);
        assert_eq!((cut.reasoning.as_str(), cut.calls.len()), (call, 0), "{format}: cut by a limit");
    }
}

/// Where markers are special tokens, no text holds them: a grammar has to name those that models write.
#[test]
fn grammars_let_models_write_their_own_special_tokens() {
    let markup = |format: &str, reasoning: &str| OutputMarkup {
        reasoning: Some(reasoning.parse().expect("a format")),
        tool_calls: Some(format.parse().expect("a format")),
    };
    let takes = |(format, reasoning): (&str, &str), tail: &str, choice, is_parallel, text: &str| {
        let markup = markup(format, reasoning);
        let specials = Specials { markup: markup.markers() };
        let lark = markup.tool_grammar(&tools(), &choice, is_parallel, tail, &|mark| specials.id(mark));
        specials.are_taken(&lark.expect("a grammar"), text)
    };
    for (format, reasoning, tail, text) in
        listed::<(&str, &str, &str, &str)>("dialects", "own_special_tokens")
    {
        assert!(takes((format, reasoning), tail, ToolChoice::Auto, true, text), "{format}: {text}");
    }
    // Markers of calls that no grammar writes can neither be counted nor left to text alone.
    let deepseek = "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    let generic = ("generic", "think");
    assert!(takes(generic, "", ToolChoice::Auto, true, deepseek));
    for (choice, is_parallel) in
        [(ToolChoice::Auto, false), (ToolChoice::None, true), (ToolChoice::Required, true)]
    {
        assert!(!takes(generic, "", choice.clone(), is_parallel, deepseek), "{choice:?}");
    }
    // Reasoning may be left out, but not its end behind some.
    let call = "<|open|>tools<|sep|><|open|>call tool=\"now\" index=\"1\"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>";
    let kimi =
        |text: &str| takes(("kimi-k3", "kimi-k3"), "<|open|>think<|sep|>", ToolChoice::Required, true, text);
    assert!(kimi(call) && kimi(&format!("Hm.<|close|>think<|sep|>{call}")) && !kimi(&format!("Hm.{call}")));
}

/// Other ways of writing the same calls, with words and parts that models are trained on.
#[test]
fn grammars_take_calls_as_their_models_write_them() {
    let options = json!({"anyOf": [{"type": "integer"}, {"type": "object", "properties": {"max": {"type": "integer"}},
        "required": ["max"], "additionalProperties": false}]});
    let properties = json!({"limit": options, "more": {"type": "object"}});
    let parameters = json!({"type": "object", "properties": properties});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
    for (format, text, is_taken) in listed::<(&str, &str, bool)>("dialects", "own_spelling") {
        let format: ToolCallFormat = format.parse().expect("a format");
        let tail = if format == ToolCallFormat::Harmony { "<|start|>assistant" } else { "" };
        let markup = output_markup(format);
        let lark =
            markup.tool_grammar(std::slice::from_ref(&tool), &ToolChoice::Required, true, tail, &|_| None);
        let lark = lark.expect("a grammar");
        assert_eq!(taken(&lark, text).1, is_taken, "{format}: {text}\n{lark}");
        let answer = parse_answer(&markup, std::slice::from_ref(&tool), tail, text, false);
        assert!(!is_taken || answer.calls.len() == 1, "{format}: {answer:?}");
    }
}

#[test]
fn grammars_let_a_call_end_the_reasoning_where_calls_are_optional() {
    for (format, call) in early() {
        let lark = |choice| {
            let grammar = output_markup(format).tool_grammar(&tools(), &choice, true, "<think>\n", &|_| None);
            grammar.expect("a grammar")
        };
        let text = format!("Look.\n{call}");
        assert_eq!(taken(&lark(ToolChoice::Auto), &text), (text.len(), true), "{format}");
        assert!(taken(&lark(ToolChoice::Auto), &format!("{text}\n")).1, "{format}: a line break behind it");
        assert!(!taken(&lark(ToolChoice::Auto), "Look.\n").1, "{format}: the reasoning has to end");
        assert!(!taken(&lark(ToolChoice::Required), &text).1, "{format}: a call that is not enforced");
    }
}

#[test]
fn no_header_of_a_message_is_shown() {
    let harmony = output_markup(ToolCallFormat::Harmony);
    let check = |text: &str, reasoning: &str, content: &str, calls: &[(&str, Value)]| {
        let calls = calls.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        let expected = (reasoning.to_owned(), content.to_owned(), calls);
        assert_eq!(parts(&harmony, "<|start|>assistant", text), expected, "{text}");
    };
    // A tool that was not given is called all the same, as clients can say that there is none.
    let unknown = "<|channel|>commentary to=functions.soon <|constrain|>json<|message|>{\"a\": 1}<|call|>";
    check(unknown, "", "", &[("soon", json!({"a": 1}))]);
    // Whoever else is spoken to, it is not the user.
    for to in ["assistant", "browser.search", "python"] {
        let text = format!(
            "<|channel|>commentary to={to}<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi."
        );
        check(&text, "Hm.", "Hi.", &[]);
    }
    let answer = parse_answer(&harmony, &[], "<|start|>assistant", unknown, false);
    assert_eq!(
        (answer.reasoning.as_str(), answer.content.as_str(), answer.calls.len()),
        ("{\"a\": 1}", "", 0)
    );
}

#[test]
fn messages_of_muse_glimmer() {
    let atem = output_markup(ToolCallFormat::MuseGlimmer);
    let text = " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Wait.<|eom|><|start|>assistant to=now<|message|>\
        <atem:function_calls>\n<atem:invoke name=\"now\">\n</atem:invoke>\n</atem:function_calls><|eot|>";
    assert_eq!(parts(&atem, "<|start|>assistant", text), ("Hm.".to_owned(), "Wait.".to_owned(), now()));
    let other = " to=soon<|message|><atem:function_calls>x<|eot|>";
    assert_eq!(parts(&atem, "<|start|>assistant", other).1, "");
}

#[test]
fn text_in_markers_of_its_own() {
    let check = |format: ToolCallFormat, tail: &str, text: &str, reasoning: &str, content: &str| {
        let (thought, said, calls) = parts(&output_markup(format), tail, text);
        assert_eq!((thought.as_str(), said.as_str(), calls), (reasoning, content, now()), "{format}");
        // Without tools too.
        let plain = parse_answer(&output_markup(format), &[], tail, text, false);
        assert_eq!(plain.reasoning, reasoning, "{format}");
        assert!(plain.content.starts_with(content), "{format}: {}", plain.content);
    };
    let kimi = "Hm.<|close|>think<|sep|><|open|>response<|sep|>Wait.<|close|>response<|sep|><|open|>tools<|sep|>\
        <|open|>call tool=\"now\" index=\"1\"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>";
    check(ToolCallFormat::KimiK3, "<|open|>think<|sep|>", kimi, "Hm.", "Wait.");
    let solar = "<|think|>Hm.<|end|><|begin|>assistant<|content|>Wait.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>a1\
        <|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|><|calls|>";
    check(ToolCallFormat::SolarOpen, "<|begin|>assistant", solar, "Hm.", "Wait.");
    check(ToolCallFormat::Functionary32, ">>>", "all\nWait.>>>now\n{}", "", "Wait.");
    let called = parts(&output_markup(ToolCallFormat::Functionary32), ">>>", "now\n{}>>>all\nWait.");
    assert_eq!(called, (String::new(), "Wait.".to_owned(), now()));
}

#[test]
fn apriel_thinks_until_it_says_so() {
    let apriel = OutputMarkup {
        reasoning: Some(ReasoningFormat::FinalResponse),
        tool_calls: Some(ToolCallFormat::ToolCallsTag),
    };
    let tail = "<|begin_assistant|>\nHere are my reasoning steps:\n";
    let text = "One.\nTwo.\n[BEGIN FINAL RESPONSE]\nYes.";
    assert_eq!(parts(&apriel, tail, text), ("One.\nTwo.".to_owned(), "Yes.".to_owned(), vec![]));
    let calls = "One.\n<tool_calls>[{\"name\": \"now\", \"arguments\": {}}]</tool_calls>";
    assert_eq!(parts(&apriel, tail, calls), ("One.".to_owned(), String::new(), now()));
}

#[test]
fn values_of_the_new_notations() {
    let write = |value: Value| vec![("write_file".to_owned(), value)];
    // MiniMax M3 writes lists and objects as tags.
    let m3 = "]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"write_file\">]<]minimax[>[<path>a>b]<]minimax[>[</path>\
        ]<]minimax[>[<tags>]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[<item>b]<]minimax[>[</item>]<]minimax[>[</tags>\
        ]<]minimax[>[<options>]<]minimax[>[<depth>2]<]minimax[>[</depth>]<]minimax[>[</options>\
        ]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>";
    let expected = write(json!({"path": "a>b", "tags": ["1", "b"], "options": {"depth": 2}}));
    assert_eq!(parts(&output_markup(ToolCallFormat::MiniMaxM3), "", m3).2, expected);
    // MiniCPM5 hides markup in CDATA and prints other values as Python does.
    let cpm = "<function name=\"write_file\"><param name=\"content\"><![CDATA[a</param></function>]]></param>\
        <param name=\"tags\">['a', 'b']</param><param name=\"mode\">0.5</param></function>";
    let expected = write(json!({"content": "a</param></function>", "tags": ["a", "b"], "mode": 0.5}));
    assert_eq!(parts(&output_markup(ToolCallFormat::MiniCpm5), "", cpm).2, expected);
    // DeepSeek says which values are text; several calls share a section.
    let dsml = "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"write_file\">\n<｜DSML｜parameter name=\"path\" string=\"true\">12\
        </｜DSML｜parameter>\n<｜DSML｜parameter name=\"tags\" string=\"false\">[\"a\"]</｜DSML｜parameter>\n</｜DSML｜invoke>\n\
        <｜DSML｜invoke name=\"now\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";
    let expected = [write(json!({"path": "12", "tags": ["a"]})), now()].concat();
    assert_eq!(parts(&output_markup(ToolCallFormat::DeepSeekV4), "", dsml).2, expected);
    // Command R has arguments on lines of their own.
    let command = "Action:\n```json\n[\n    {\n        \"tool_name\": \"now\",\n        \"parameters\": {}\n    }\n]```\n";
    assert_eq!(parts(&output_markup(ToolCallFormat::CommandR), "", command).2, now());
}

/// The table has templates in the notation of published ones that are not among the fixtures: how a call is printed, and what
/// stands in front of the answer.
#[test]
fn templates_in_notations_without_a_fixture_are_known_by_their_calls() {
    for (format, call, tail) in listed::<(&str, &str, &str)>("dialects", "printed") {
        let format: ToolCallFormat = format.parse().expect("a format");
        let source = format!(
            "{{% for t in tools or [] %}}{{{{ t | tojson }}}}\n{{% endfor %}}{{% for m in messages %}}[{{{{ m.role }}}}]\n{{{{ m.content or '' }}}}\
             {{% if m.tool_calls %}}{call}{{% endif %}}[end]\n{{% endfor %}}{{% if add_generation_prompt %}}[assistant]\n{tail}{{% endif %}}"
        );
        let template = ChatTemplate::new(&source, SpecialTokens::default()).expect("a template");
        let shown = Shown::of(&template);
        assert_eq!(shown.output_markup.tool_calls, Some(format), "{source}");
        assert!(shown.calls.is_some_and(|calls| calls.is_printed) && shown.tools, "{format}: {shown:?}");
    }
}

/// The tool-call format detected for each published template, with its evidence.
#[test]
fn what_published_templates_show() {
    let Some(templates) = templates() else { return };
    let mut table = String::new();
    for (name, source) in &templates {
        let template = ChatTemplate::new(source, SpecialTokens::default()).expect("a published template");
        let shown = Shown::of(&template);
        let format = shown.output_markup.tool_calls.map_or("-", |format| format.name());
        let evidence = match shown.calls.map(|calls| calls.is_printed) {
            Some(true) => "reads back",
            Some(false) => "prints none",
            None => "-",
        };
        let generic = if shown.accommodation().spells_tools { "generic" } else { "own" };
        let system = match shown.system {
            SystemMessages::Printed => "printed",
            SystemMessages::Dropped => "dropped",
            SystemMessages::Refused => "refused",
        };
        writeln!(table, "{format:15} {evidence:11} {generic:8} {system:8} {name}")
            .expect("a string takes everything");
    }
    insta::assert_snapshot!(table);
}

/// Templates that refuse two calls of one answer or results without a name, as Hugging Face refuses them, or that use what its
/// sandbox forbids.
const REFUSES_RESULTS: [&str; 4] =
    ["single tool-calls", "must have a name", "is unsafe", "not JSON serializable"];

#[test]
fn ids_orders_and_arguments_of_any_client_fit_every_published_template() {
    let Some(templates) = templates() else { return };
    let tool = |more: Value| {
        let mut function = json!({"name": "f"});
        function.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        json!({"type": "function", "function": function})
    };
    let a = json!({"type": "string", "description": "x"});
    let whole = tool(json!({"description": "d", "parameters": {"type": "object", "properties": {"a": a}}}));
    let (mut num_checked, mut wrong) = (0, String::new());
    for (name, source) in &templates {
        let [bos, eos] = ["<s>", "</s>"].map(|token| Some(token.to_owned()));
        let specials = SpecialTokens { bos, eos };
        let template = ChatTemplate::new(source, specials).expect("a published template");
        let accommodation = Shown::of(&template).accommodation();
        let rendered = |messages: Vec<Message>, tools: &[Value]| {
            let conversation = Conversation { messages, tools: tools.to_vec(), ..Conversation::default() };
            let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
            template
                .render(&accommodation.apply(&conversation, None), &options)
                .map_err(|error| error.to_string())
        };
        let round = |ids: [&str; 2], order: [usize; 2], arguments: Value| {
            let call = |(id, arguments): (&str, Value)| ToolCall {
                id: Some(id.to_owned()),
                name: "f".to_owned(),
                arguments,
            };
            let calls = [(ids[0], arguments), (ids[1], json!({"a": "two"}))].map(call).to_vec();
            let result = |at: usize| Message {
                tool_call_id: Some(ids[at].to_owned()),
                ..Message::new(Role::Tool, format!("value {at}"))
            };
            let answer = Message { content: None, tool_calls: calls, ..Message::assistant("") };
            rendered(
                [Message::user("q"), answer].into_iter().chain(order.map(result)).collect(),
                std::slice::from_ref(&whole),
            )
        };
        let ids = ["call_0123456789abcdef", "toolu_01"];
        let empty = round(ids, [0, 1], json!({}));
        match &empty {
            Err(error) if REFUSES_RESULTS.iter().any(|text| error.contains(text)) => continue,
            _ if ["MiroThinker", "llava_next"].iter().any(|odd| name.contains(odd)) => continue,
            _ => num_checked += 1,
        }
        let mut check = |what: &str, is_right: bool| {
            if !is_right {
                writeln!(wrong, "{name}: {what}").expect("a string takes everything");
            }
        };
        check("ids", empty.is_ok());
        check("order", round(ids, [1, 0], json!({})) == empty);
        for nothing in [json!(""), json!(" "), json!(null), json!("null"), json!("\"{}\"")] {
            check("no arguments", round(ids, [0, 1], nothing) == empty);
        }
        for odd in [json!("{\"a\": \"cut"), json!("[]"), json!([]), json!(3)] {
            check("odd arguments", round(ids, [0, 1], odd).is_ok());
        }
        for given in [json!({"description": "d"}), json!({})] {
            check("bare tools", rendered(vec![Message::user("q")], &[tool(given)]).is_ok());
        }
        check("no tools", rendered(vec![Message::user("q")], &[]).is_ok());
        let developer = Message::new(Role::Developer, "DEVELOPER");
        let opened = rendered(vec![Message::system("SYSTEM"), developer, Message::user("q")], &[]);
        let is_shown = |text: &String| text.contains("DEVELOPER") && text.contains("SYSTEM");
        // Its parts are pictures and texts in a form of its own.
        check("a developer", opened.is_ok_and(|text| is_shown(&text)) || name.contains("idefics3"));
    }
    assert!(wrong.is_empty() && num_checked > 60, "{num_checked} templates\n{wrong}");
}

#[test]
fn markers_that_are_missing_or_doubled_lose_nothing() {
    use ReasoningFormat::{GemmaChannel, KimiK3, MiniMaxThink, Think};
    let native = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    let k3 = "<|open|>tools<|sep|><|open|>call tool=\"now\" index=\"1\"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>";
    let answer = "<|open|>response<|sep|>Hi<|close|>response<|sep|>";
    for (reasoning, calls, tail, text, expected) in [
        (
            KimiK3,
            ToolCallFormat::KimiK3,
            "<|open|>think<|sep|>",
            format!("hm{answer}{k3}"),
            ("hm", "Hi", now()),
        ),
        (MiniMaxThink, ToolCallFormat::MiniMaxM3, "", "</mm:think>\nHi".to_owned(), ("", "Hi", vec![])),
        (
            Think,
            ToolCallFormat::Hermes,
            "<think>\n",
            "<think>\nhm</think>Hi".to_owned(),
            ("hm", "Hi", vec![]),
        ),
        (Think, ToolCallFormat::Hermes, "", "Say </think>".to_owned(), ("", "Say </think>", vec![])),
        (
            GemmaChannel,
            ToolCallFormat::Gemma,
            "",
            "<|channel><|channel>thought\nhm<channel|>Hi".to_owned(),
            ("hm", "Hi", vec![]),
        ),
        // DeepSeek's models write their own calls, whatever they are asked for.
        (Think, ToolCallFormat::Generic, "", format!("Hi{native}"), ("", "Hi", now())),
        (Think, ToolCallFormat::Generic, "<think>\n", format!("hm\n</think>\n\n{native}"), ("hm", "", now())),
    ] {
        let markup = OutputMarkup { reasoning: Some(reasoning), tool_calls: Some(calls) };
        let (thought, content, called) = expected;
        assert_eq!(parts(&markup, tail, &text), (thought.to_owned(), content.to_owned(), called), "{text}");
    }
    let text = "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}";
    let own = parse_answer(&output_markup(ToolCallFormat::MistralArgs), &tools(), "", text, false);
    assert_eq!(own.calls[0].id.as_deref(), Some("abcdefghi"), "the next prompt repeats the model's own id");
}

#[test]
fn a_system_prompt_that_the_template_drops_goes_in_front_of_the_question() {
    let place = Place::new();
    let model = parity_folder().join("llama").to_string_lossy().into_owned();
    let template = "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    place.write("drop.jinja", template);
    let ask =
        ["run", "--model", &model, "--chat-template", "drop.jinja", "--dry-run", "-s", "Be brief.", "Hi"];
    let asked = place.run(&ask);
    asked.check(0, "the chat template drops system prompts: they go in front of the first question");
    assert!(asked.stdout.contains("Be brief."), "{}", asked.stdout);
    let without = place.run(&["run", "--model", &model, "--chat-template", "drop.jinja", "--dry-run", "Hi"]);
    without.check(0, "");
    assert!(!without.stderr.contains("drops system prompts"), "{}", without.stderr);
}
