//! Promise: with nothing downloaded and nothing configured, llmctl does its main job, and says which model does it. guide answers
//! what it was made for, on every processor alike, and is served as OpenAI's clients expect.

use crate::common::prelude::*;
use crate::serve_ops::binary::{Serving, start_as_told};
use crate::serve_ops::client::{Reply, ask, get};

const NOTE: &str = "using guide, the built-in demo model";

/// The lines of a test file of the model's.
fn held_out(name: &str) -> Vec<Value> {
    let path = format!("{}/assets/guide/tests/{name}.jsonl", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    text.lines()
        .filter(|line| !line.is_empty())
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

/// The answers to questions, each in a conversation of its own.
fn answers(questions: &[&str], extra: &[&str]) -> Vec<String> {
    let place = Place::new();
    let row = |(index, question): (usize, &&str)| {
        format!("{}\n", json!({"custom_id": index.to_string(), "prompt": question}))
    };
    place.write("in.jsonl", questions.iter().enumerate().map(row).collect::<String>());
    let args = ["run", "--model", "guide", "--batch", "in.jsonl", "--out", "out.jsonl"];
    place.run(&[&args, extra].concat()).check(0, "");
    let mut found = vec![String::new(); questions.len()];
    for line in place.read("out.jsonl").lines() {
        let row: Value = serde_json::from_str(line).expect("JSON");
        let index: usize = row["custom_id"].as_str().and_then(|id| id.parse().ok()).expect("an id");
        let message = &row["response"]["body"]["choices"][0]["message"]["content"];
        found[index] = message.as_str().unwrap_or_else(|| panic!("{row}")).to_owned();
    }
    found
}

/// Whether an answer has one of the words of every group.
fn has(answer: &str, keys: &Value) -> bool {
    let answer = answer.to_lowercase();
    let is_there = |word: &Value| answer.contains(&word.as_str().expect("a word").to_lowercase());
    keys.as_array().expect("groups").iter().all(|group| group.as_array().expect("words").iter().any(is_there))
}

#[test]
fn without_a_model_guide_answers_and_one_line_says_so() {
    let place = Place::new();
    let ran = place.run(&["run", "hello"]);
    ran.check(0, NOTE).check(0, "--model FILE.gguf");
    assert_eq!(ran.stderr.matches(NOTE).count(), 1, "{ran:?}");
    assert!(!ran.stdout.trim().is_empty(), "{ran:?}");
    let named = place.run(&["run", "--model", "guide", "hello"]);
    assert_eq!(named.check(0, "").stdout, ran.stdout);
    assert!(!named.stderr.contains(NOTE), "{named:?}");
    place.run(&["bench", "-p", "8", "-n", "4", "-r", "1", "--no-probe", "--output", "csv"]).check(0, NOTE);
    let listed = place.run(&["models"]);
    assert!(listed.check(0, "").stdout.contains("(inside llmctl)"), "{listed:?}");
    let shown = place.run(&["models", "show", "guide"]);
    assert!(shown.check(0, "").stdout.contains("qwen3"), "{shown:?}");
    place.run(&["template", "check", "guide"]).check(0, "");
}

#[test]
fn a_model_or_an_alias_of_that_name_is_meant_first() {
    let place = Place::new();
    std::fs::create_dir(place.path("guide")).expect("a folder");
    place.run(&["run", "--model", "guide", "hello"]).check(0, "");
    for entry in std::fs::read_dir(parity_folder().join("llama")).expect("a folder") {
        let entry = entry.expect("an entry");
        std::fs::copy(entry.path(), place.path("guide").join(entry.file_name())).expect("a copy");
    }
    let shown = place.run(&["models", "show", "guide"]);
    assert!(shown.check(0, "").stdout.contains("llama"), "{shown:?}");
    let place = Place::new();
    place.write("llmctl.toml", "[aliases]\nguide = \"./other.gguf\"\n");
    place.run(&["run", "--model", "guide", "hello"]).check(66, "other.gguf");
}

#[test]
fn it_answers_most_of_what_it_never_saw() {
    for (name, least) in [("free", 82), ("inscope_short", 85)] {
        let rows = held_out(name);
        let asks: Vec<&str> = rows.iter().map(|row| row["ask"].as_str().expect("a question")).collect();
        let found = answers(&asks, &[]);
        let right = found.iter().zip(&rows).filter(|(answer, row)| has(answer, &row["keys"])).count();
        assert!(100 * right >= least * rows.len(), "{name}: {right} of {}: {found:#?}", rows.len());
    }
}

/// Facts that came after its training, in the words of a newcomer and others.
#[test]
fn it_knows_what_came_after_its_training() {
    let asked = listed::<(&str, &str)>("guide", "newcomers");
    let rows: Vec<(&str, &str)> =
        asked.iter().flat_map(|(key, asks)| asks.split('|').map(move |ask| (*key, ask))).collect();
    let found = answers(&rows.iter().map(|row| row.1).collect::<Vec<_>>(), &[]);
    for ((key, ask), answer) in rows.iter().zip(&found) {
        assert!(answer.contains(key), "{ask}: {answer}");
    }
    let place = Place::new();
    for (ask, key) in [
        ("How do I compute embeddings?", "llmctl embed"),
        ("and reranking?", "/v1/rerank"),
        ("and MCP?", "--mcp-config"),
    ] {
        let ran = place.run(&["run", "--model", "guide", "--session", "s", ask]);
        assert!(ran.check(0, "").stdout.contains(key), "{ran:?}");
    }
}

#[test]
fn it_says_that_it_knows_nothing_else() {
    let rows = held_out("oos");
    let asks: Vec<&str> = rows.iter().map(|row| row["ask"].as_str().expect("a question")).collect();
    let refused = |answer: &&String| {
        let answer = answer.to_lowercase();
        [
            "only know llmctl",
            "only answer questions about llmctl",
            "not sure",
            "as far as i know",
            "i know of no such",
        ]
        .iter()
        .any(|words| answer.contains(words))
    };
    let found = answers(&asks, &[]);
    let right = found.iter().filter(refused).count();
    assert!(100 * right >= 76 * rows.len(), "{right} of {}: {found:#?}", rows.len());
}

#[test]
fn it_says_the_same_on_every_processor_and_in_any_company() {
    let questions =
        ["hello", "how do I save a session?", "what is exit code 66?", "stream json", "who won the cup?"];
    let together = answers(&questions, &[]);
    assert_eq!(together, answers(&questions, &["--cpu", "scalar", "--threads", "1"]));
    for (question, answer) in questions.iter().zip(together) {
        let alone = Place::new().run(&["run", "--model", "guide", question]);
        assert_eq!(alone.check(0, "").stdout.trim_end(), answer, "{question}");
    }
}

/// Seven requirements of a black-box test of servers, met with the built-in model.
mod served {
    use super::*;

    struct Server {
        serving: Serving,
    }

    impl Server {
        fn start() -> Self {
            let (serving, said) = start_as_told(Place::new(), &[]);
            assert!(said.iter().any(|line| line.contains(NOTE)), "{said:?}");
            Self { serving }
        }

        fn post(&self, body: &Value) -> Reply {
            let address = self.serving.address;
            let head = format!(
                "POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nConnection: close"
            );
            ask(address, &head, &body.to_string())
        }

        fn chat(&self, extra: Value) -> Value {
            let mut body = json!({"model": "guide"});
            body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
            let reply = self.post(&body);
            assert_eq!(reply.status, 200, "{reply:?}");
            reply.json()
        }

        /// The chunks of a stream, which ends as it must.
        fn stream(&self, content: &str, extra: Value) -> Vec<Value> {
            let mut body = json!({
                "model": "guide", "stream": true, "max_tokens": 32, "messages": [{"role": "user", "content": content}],
            });
            body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
            let reply = self.post(&body);
            assert_eq!(reply.status, 200, "{reply:?}");
            let lines: Vec<&str> =
                reply.body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
            let (last, chunks) = lines.split_last().expect("data");
            assert_eq!(*last, "[DONE]");
            chunks.iter().map(|chunk| serde_json::from_str(chunk).expect("JSON")).collect()
        }
    }

    impl Drop for Server {
        fn drop(&mut self) {
            self.serving.child.kill().expect("it runs");
            self.serving.child.wait().expect("it ends");
        }
    }

    fn text(chunks: &[Value]) -> String {
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect()
    }

    #[test]
    fn the_seven_demands_are_met() {
        let server = Server::start();
        let models = get(server.serving.address, "/v1/models").json();
        assert_eq!((&models["object"], &models["data"][0]["id"]), (&json!("list"), &json!("guide")));

        let hello = json!([{"role": "user", "content": "Say hello."}]);
        let whole = server.chat(json!({"messages": hello, "temperature": 0, "max_tokens": 16}));
        let choice = &whole["choices"][0];
        assert_eq!(choice["message"]["role"], "assistant");
        assert!(choice["message"]["content"].is_string() && choice["finish_reason"].is_string(), "{whole}");

        let chunks = server.stream("Say hello.", json!({}));
        assert!(chunks.iter().all(|chunk| chunk["choices"][0]["delta"].is_object()), "{chunks:?}");
        assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
        assert!(!text(&chunks).is_empty());

        let chunks = server.stream("Repeat exactly: 日本語 🎉 café", json!({}));
        assert!(!text(&chunks).is_empty() && chunks.iter().all(|chunk| chunk.get("error").is_none()));

        let chunks = server.stream("Say hello.", json!({"stream_options": {"include_usage": true}}));
        let usage = &chunks.last().expect("a chunk")["usage"];
        let count = |name: &str| usage[name].as_u64().expect("a count");
        assert!(count("prompt_tokens") > 0 && count("completion_tokens") > 0, "{usage}");
        assert_eq!(count("total_tokens"), count("prompt_tokens") + count("completion_tokens"));

        let words = json!([{"role": "user", "content": "word ".repeat(40_000)}]);
        let reply = server.post(&json!({"model": "guide", "messages": words, "max_tokens": 8}));
        assert!((400..500).contains(&reply.status), "{}", reply.status);
        let error = &reply.json()["error"];
        assert!(error["message"].is_string() && error["type"].is_string(), "{error}");
    }

    fn weather() -> Value {
        json!([{"type": "function", "function": {
            "name": "get_weather", "description": "Get the current weather for a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        }}])
    }

    #[test]
    fn a_tool_is_called_and_its_result_used() {
        let server = Server::start();
        let ask = json!({"role": "user", "content": "What is the weather in Paris? Use the tool."});
        let answer =
            server.chat(json!({"messages": [ask], "tools": weather(), "temperature": 0, "max_tokens": 128}));
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
        let call = &choice["message"]["tool_calls"][0];
        assert_eq!((&call["type"], &call["function"]["name"]), (&json!("function"), &json!("get_weather")));
        assert!(call["id"].as_str().is_some_and(|id| !id.is_empty()), "{call}");
        let arguments: Value =
            serde_json::from_str(call["function"]["arguments"].as_str().expect("a string")).expect("JSON");
        assert_eq!(arguments, json!({"city": "Paris"}));

        let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "{\"temperature\": 17, \"sky\": \"cloudy\"}"});
        let told = server.chat(json!({
            "messages": [ask, choice["message"], result], "tools": weather(), "temperature": 0, "max_tokens": 64,
        }));
        let said = told["choices"][0]["message"]["content"].as_str().expect("a text");
        assert!(said.contains("17") && said.contains("cloudy"), "{said}");
    }

    #[test]
    fn a_call_that_is_required_is_made_and_keeps_to_the_schema() {
        let server = Server::start();
        let rows = held_out("tools");
        let mut names = BTreeSet::new();
        for row in rows.iter().step_by(5) {
            let ask = json!([{"role": "user", "content": row["ask"]}]);
            let answer = server.chat(json!({
                "messages": ask, "tools": row["tools"], "tool_choice": "required", "temperature": 0, "max_tokens": 200,
            }));
            let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
            let arguments: Result<Value, _> =
                serde_json::from_str(call["arguments"].as_str().unwrap_or_default());
            let name = call["name"].as_str().unwrap_or_else(|| panic!("{row}: {answer}"));
            assert!(arguments.is_ok_and(|arguments| arguments.is_object()), "{row}: {answer}");
            let is_given = |tool: &Value| tool["function"]["name"] == name;
            assert!(row["tools"].as_array().expect("tools").iter().any(is_given), "{row}: {answer}");
            names.insert(name.to_owned());
        }
        assert!(names.len() > 5, "{names:?}");
    }
}
