//! Answers go back into later prompts as the ids that were generated, with the chat templates that models really bring:
//! whatever a template does to history, the next prompt begins with all that is resident, answers included.

use llmctl_engine::session::transcript::{SplicedPrompt, Transcript};
use serde_json::Value as Json;

use crate::common::prelude::*;

/// Ids of generated text, unlike those of the same text encoded: only a splice brings them back.
const GENERATED: u32 = 10_000;

/// A conversation with a model of a script, as a client and a session see it.
struct Chat {
    template: ChatTemplate,
    conversation: Conversation,
    transcript: Transcript,
    resident: Vec<u32>,
    reused: usize,
    prompted: usize,
}

/// A template of the fixtures, or `None` (with a note) when it is not there.
fn chat(file: &str) -> Option<Chat> {
    let path = fixtures()?.join("templates").join(file);
    let Ok(source) = std::fs::read_to_string(&path) else {
        crate::common::skip(format!("no template at {}", path.display()));
        return None;
    };
    let bos = Some("<bos>".to_owned());
    let template = ChatTemplate::new(&source, SpecialTokens { bos, ..SpecialTokens::default() });
    Some(Chat {
        template: template.unwrap_or_else(|error| panic!("{file}: {error}")),
        conversation: Conversation::default(),
        transcript: Transcript::default(),
        resident: Vec::new(),
        reused: 0,
        prompted: 0,
    })
}

impl Chat {
    fn prompt(&self) -> SplicedPrompt {
        let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
        let prompt = self.transcript.splice(&self.conversation, |c| self.template.render(c, &options));
        prompt.unwrap_or_else(|error| panic!("{error}\n{:#?}", self.conversation.messages))
    }

    /// Asks; the model generates `text`, which the client gets and sends back as `answer`. Returns how many of the
    /// resident tokens the prompt begins with, and of how many.
    fn ask(&mut self, added: Vec<Message>, text: &str, answer: Message) -> (usize, usize) {
        self.conversation.messages.extend(added);
        let prompt = self.prompt();
        let encode = |text: &str, _: usize| Ok::<Vec<u32>, ()>(text.bytes().map(u32::from).collect());
        let ids = prompt.ids(encode).expect("bytes are ids");
        let kept = ids.iter().zip(&self.resident).take_while(|(a, b)| a == b).count();
        let was_resident = self.resident.len();
        self.reused += kept;
        self.prompted += ids.len();
        let generated: Vec<u32> = text.bytes().map(|byte| u32::from(byte) + GENERATED).collect();
        let after = prompt.splice_after().to_owned();
        self.transcript.record(&self.conversation.messages, &answer, &after, Some(&generated));
        self.resident = [ids, generated].concat();
        self.conversation.messages.push(answer);
        (kept, was_resident)
    }

    fn warm(&mut self, what: &str, added: Vec<Message>, text: &str, answer: Message) {
        let (kept, resident) = self.ask(added, text, answer);
        assert_eq!(kept, resident, "{what}: the prompt leaves the resident tokens\n{:#?}", self.prompt());
    }

    fn with(mut self, name: &str, value: Json) -> Self {
        self.conversation.kwargs.insert(name.to_owned(), value);
        self
    }
}

pub fn user(text: &str) -> Message {
    Message::user(text)
}

/// A call as a client returns it: arguments spelt otherwise, another id.
fn call(id: &str, name: &str, arguments: &Json) -> Message {
    let spelt = serde_json::to_string_pretty(arguments).expect("JSON");
    let arguments = serde_json::from_str(&spelt).expect("JSON");
    let tool_calls = vec![ToolCall { id: Some(id.to_owned()), name: name.to_owned(), arguments }];
    Message { content: Some(Content::Text(String::new())), tool_calls, ..Message::assistant("") }
}

pub fn result(id: &str, name: &str, text: &str) -> Message {
    let (tool_call_id, name) = (Some(id.to_owned()), Some(name.to_owned()));
    Message { tool_call_id, name, ..Message::new(Role::Tool, text) }
}

pub fn tools() -> Vec<Json> {
    let parameters =
        json!({"type": "object", "properties": {"city": {"type": "string", "description": "where"}}});
    vec![json!({"type": "function", "function": {
        "name": "get_weather", "description": "Weather now", "parameters": parameters}})]
}

pub const QWEN3: &str = "llama.cpp/Qwen-Qwen3-0.6B.jinja";
const QWEN35: &str = "llama.cpp/Qwen3.5-4B.jinja";
pub const LLAMA31: &str = "llama.cpp/meta-llama-Llama-3.1-8B-Instruct.jinja";
const LLAMA32: &str = "llama.cpp/meta-llama-Llama-3.2-3B-Instruct.jinja";
const GEMMA2: &str = "llama.cpp/google-gemma-2-2b-it.jinja";
pub const GEMMA3: &str = "trl/gemma3.jinja";
pub const GEMMA4: &str = "llama.cpp/google-gemma-4-31B-it.jinja";

#[test]
fn plain_conversations_resume_with_every_template() {
    for file in [QWEN3, QWEN35, LLAMA31, LLAMA32, GEMMA2, GEMMA3, GEMMA4] {
        for thinking in [None, Some(false), Some(true)] {
            let Some(mut chat) = chat(file) else { continue };
            if let Some(thinking) = thinking {
                chat = chat.with("enable_thinking", thinking.into());
            }
            let what = format!("{file}, thinking {thinking:?}");
            chat.warm(&what, vec![user("hi")], "hello \u{1F600}", Message::assistant("hello \u{1F600}"));
            let thought = Message { reasoning: Some("hm".to_owned()), ..Message::assistant("two") };
            chat.warm(&what, vec![user("1+1?")], "<think>\nhm\n</think>\n\ntwo", thought);
            chat.warm(&what, vec![user("sure?")], "yes\n", Message::assistant("yes\n"));
            chat.warm(&what, vec![user("bye")], "bye", Message::assistant("bye"));
            assert_eq!(chat.prompt().num_spliced(), 4, "{what}");
        }
    }
}

/// Returns a call as the model of this family writes it.
pub fn spoken(file: &str, name: &str, arguments: &Json) -> String {
    match file {
        LLAMA31 | LLAMA32 => format!(r#"{{"name":"{name}","parameters":{arguments}}}"#),
        GEMMA4 => format!("<|tool_call>call:{name}{arguments}<tool_call|>"),
        _ => format!("<tool_call>\n{{\"name\":\"{name}\",\"arguments\":{arguments}}}\n</tool_call>"),
    }
}

#[test]
fn tool_turns_resume_although_arguments_are_spelt_anew() {
    for file in [QWEN3, QWEN35, LLAMA31, LLAMA32, GEMMA4] {
        for thinking in [None, Some(false), Some(true)] {
            let Some(mut chat) = chat(file) else { continue };
            if let Some(thinking) = thinking {
                chat = chat.with("enable_thinking", thinking.into());
            }
            chat.conversation.tools = tools();
            let what = format!("{file}, thinking {thinking:?}");
            let mut ask = |added: Vec<Message>, id: &str, city: &str| {
                let arguments = json!({"city": city, "unit": "\u{b0}C"});
                let text = spoken(file, "get_weather", &arguments);
                chat.warm(&what, added, &text, call(id, "get_weather", &arguments));
            };
            ask(vec![user("Weather in Paris and in Oslo?")], "a", "Paris <tool_call|> }\"");
            ask(vec![result("a", "get_weather", "18 <|tool_call> and rain")], "b", "Oslo");
            chat.warm(
                &what,
                vec![result("b", "get_weather", "3")],
                "Warmer in Paris.",
                Message::assistant("Warmer in Paris."),
            );
            let arguments = json!({"city": "Rome"});
            let text = spoken(file, "get_weather", &arguments);
            chat.warm(&what, vec![user("And Rome?")], &text, call("c", "get_weather", &arguments));
            chat.warm(&what, vec![result("c", "get_weather", "25")], "25", Message::assistant("25"));
            chat.warm(&what, vec![user("thanks")], "welcome", Message::assistant("welcome"));
        }
    }
}

#[test]
fn a_mode_switched_between_turns_keeps_each_turn_as_it_was() {
    for file in [QWEN3, QWEN35, GEMMA4] {
        let Some(mut chat) = chat(file) else { continue };
        // Gemma 4 says the mode in the system turn: there a switch costs one cold prefill, and no more than that.
        let says_it_in_front = file == GEMMA4;
        let mut mode = true;
        for (turn, thinking) in [true, false, false, true, true, false, false].into_iter().enumerate() {
            chat.conversation.kwargs.insert("enable_thinking".to_owned(), thinking.into());
            let (kept, resident) = chat.ask(vec![user("go on")], "fine", Message::assistant("fine"));
            let is_cold = says_it_in_front && thinking != mode;
            assert_eq!(kept < resident, is_cold, "{file}, turn {turn}: {kept} of {resident}");
            mode = thinking;
        }
    }
}

#[test]
fn a_conversation_first_seen_with_history_resumes_from_its_second_turn() {
    for file in [QWEN3, LLAMA31, GEMMA3, GEMMA4] {
        let Some(mut chat) = chat(file) else { continue };
        chat.conversation.messages =
            vec![user("2+2"), Message::assistant("4"), user("3+3"), Message::assistant("6")];
        chat.warm(file, vec![user("4+4")], "8", Message::assistant("8"));
        chat.warm(file, vec![user("5+5")], "10", Message::assistant("10"));
        chat.warm(file, vec![user("6+6")], "12", Message::assistant("12"));
        assert_eq!(chat.prompt().num_spliced(), 3, "{file}");
    }
}

#[test]
fn an_edited_answer_is_text_and_what_stands_before_it_resumes() {
    for file in [QWEN3, LLAMA31, GEMMA3, GEMMA4] {
        let Some(mut chat) = chat(file) else { continue };
        chat.warm(file, vec![user("a")], "A", Message::assistant("A"));
        chat.warm(file, vec![user("b")], "B", Message::assistant("B"));
        let before_edit = chat.resident.len() - 1;
        chat.conversation.messages[3] = Message::assistant("edited");
        let (kept, resident) = chat.ask(vec![user("c")], "C", Message::assistant("C"));
        assert!(kept >= before_edit - 60 && kept < resident, "{file}: {kept} of {resident}");
        assert_eq!(chat.prompt().num_spliced(), 2, "{file}: the first and the new one");
        // Regenerated: the client takes the last answer back, and the new one counts.
        chat.conversation.messages.truncate(4);
        chat.ask(vec![user("c")], "D", Message::assistant("D"));
        assert_eq!(chat.prompt().num_spliced(), 2, "{file}");
        chat.conversation.messages[5] = Message::assistant("C");
        assert_eq!(chat.prompt().num_spliced(), 1, "{file}: the replaced answer is text");
    }
}

/// One step of a ground truth, `cd(folder='document')`, as a call.
pub fn bfcl_call(step: &str) -> (String, Json) {
    let (name, arguments) = step.split_once('(').unwrap_or((step, ""));
    (name.to_owned(), json!({"input": arguments.trim_end_matches(')')}))
}

#[test]
fn multi_turn_tool_conversations_of_bfcl_keep_all_that_is_resident() {
    let Some(root) = fixtures() else { return };
    let read = |file: &str| std::fs::read_to_string(root.join("vectors/bfcl").join(file));
    let (Ok(questions), Ok(answers)) =
        (read("BFCL_v4_multi_turn_base.json"), read("possible_answer/BFCL_v4_multi_turn_base.json"))
    else {
        crate::common::skip("no BFCL conversations");
        return;
    };
    for file in [QWEN3, LLAMA31, GEMMA4] {
        let (mut reused, mut prompted, mut prompts) = (0, 0, 0);
        for (question, answer) in questions.lines().zip(answers.lines()).step_by(10) {
            let question: Json = serde_json::from_str(question).expect("a line of BFCL");
            let answer: Json = serde_json::from_str(answer).expect("a line of BFCL");
            assert_eq!(question["id"], answer["id"]);
            let Some(mut chat) = chat(file) else { return };
            chat.conversation.tools = tools();
            let turns = question["question"].as_array().expect("turns").iter();
            for (turn, steps) in turns.zip(answer["ground_truth"].as_array().expect("turns")) {
                let mut added = vec![user(turn[0]["content"].as_str().expect("a question"))];
                for step in steps.as_array().expect("steps") {
                    let (name, arguments) = bfcl_call(step.as_str().expect("a step"));
                    let id = format!("call_{prompts}");
                    chat.warm(file, added, &spoken(file, &name, &arguments), call(&id, &name, &arguments));
                    added = vec![result(&id, &name, "done")];
                    prompts += 1;
                }
                chat.warm(file, added, "Done.", Message::assistant("Done."));
                prompts += 1;
            }
            reused += chat.reused;
            prompted += chat.prompted;
        }
        eprintln!("{file}: {reused} of {prompted} prompt tokens reused in {prompts} prompts");
        assert!(prompts > 50 && reused * 2 > prompted, "{file}: {reused} of {prompted}");
    }
}
