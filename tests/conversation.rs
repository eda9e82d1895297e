//! Promise: a conversation goes on where it was: over turns, tool calls, restarts and other models. With the chat templates and
//! tokenizers that models bring, on an engine that counts, a prompt computes nothing that the session held already; and what
//! a conversation reports as finished is on disk, in one piece.

use std::collections::VecDeque;

use llmctl_engine::turn::session_chat::{Finished, PromptedTurn, RecordedAnswer, SessionChat};
use llmctl_engine::{Started, Timings};
use llmctl_models::load::tokenizer::hf_settings;
use llmctl_models::load::{ChatTemplates, ModelTexts};
use llmctl_template::{ImageRef, text_part};
use serde_json::Value as Json;

use crate::common::prelude::*;
use crate::common::toy::{drain, one_hot};
use crate::session_transcript::{GEMMA3, GEMMA4, LLAMA31, QWEN3, bfcl_call, result, spoken, tools, user};

const SESSION: &str = "s";

fn chat_tokenizer(tokenizer: Tokenizer, template: &str) -> ChatTokenizer {
    let texts = ModelTexts {
        identity: String::new(),
        tokenizer: Arc::new(tokenizer),
        chat_templates: ChatTemplates::default(),
        defaults: GivenSampling::GREEDY,
        defaults_source: "nothing",
        listed_ends: Vec::new(),
        end_of_generation: Vec::new(),
        hints: None,
    };
    ChatTokenizer::new(texts, Some(template))
}

/// The tokenizer that goes with a template, or one of the same kind where the fixtures lack it.
fn tokenizer(template: &str) -> Option<Tokenizer> {
    let from_file = |name: &str| {
        let path = fixtures()?.join("tokenizers/assembled").join(name).join("tokenizer.json");
        let json = std::fs::read(&path)
            .inspect_err(|_| crate::common::skip(format!("no {}", path.display())))
            .ok()?;
        Some(Tokenizer::from_json(&json, &HfSettings::default()).expect("a tokenizer"))
    };
    match template {
        QWEN3 => from_file("qwen3"),
        LLAMA31 => from_file("llama3.2"),
        _ => Some(parity_tokenizer("gemma3")),
    }
}

fn parity_tokenizer(family: &str) -> Tokenizer {
    from_folder(&parity_folder().join(family)).expect("a tokenizer")
}

fn model(fingerprint: &str) -> ModelFingerprint {
    ModelFingerprint { name: "toy".to_owned(), fingerprint: fingerprint.to_owned(), reference: None }
}

/// A conversation on an engine whose model says what the test wants, letter by letter: other tokens than the tokenizer
/// would make of the same text.
struct Chat {
    chat_tokenizer: ChatTokenizer,
    engine: Engine,
    lines: Arc<Mutex<VecDeque<u32>>>,
    session_chat: SessionChat,
    /// The client's copy of the conversation, in the client's own spelling.
    client: Conversation,
}

/// The engine's report of a turn.
struct Counted {
    started: Started,
    usage: Usage,
    /// Tokens that the session held before it.
    resident: usize,
}

fn chat(template: &str) -> Option<Chat> {
    let path = fixtures()?.join("templates").join(template);
    let source = std::fs::read_to_string(&path)
        .inspect_err(|_| crate::common::skip(format!("no template at {}", path.display())))
        .ok()?;
    Some(Chat::new(chat_tokenizer(tokenizer(template)?, &source)))
}

impl Chat {
    fn new(chat_tokenizer: ChatTokenizer) -> Self {
        let vocab_size = chat_tokenizer.tokenizer().vocab_size() + 1;
        let end = vocab_size as u32 - 1; // of no text
        let lines = Arc::new(Mutex::new(VecDeque::new()));
        let said = lines.clone();
        let rule: Rule = Box::new(move |_| {
            let next = said.lock().expect("no test panics with it").pop_front();
            Ok(one_hot(vocab_size, next.unwrap_or(end)))
        });
        let config = EngineConfig { step_tokens: 512, ..EngineConfig::new(16_384, vec![end]) };
        let model_of_lines = Box::new(ToyModel::new(vocab_size, rule));
        let engine =
            Engine::new(model_of_lines, chat_tokenizer.tokenizer().clone(), config).expect("an engine");
        Self {
            chat_tokenizer,
            engine,
            lines,
            session_chat: SessionChat::new(model("1")),
            client: Conversation::default(),
        }
    }

    fn letters(&self, text: &str) -> Vec<u32> {
        let letter = |c: char| self.chat_tokenizer.encode_rest(c.encode_utf8(&mut [0; 4])).expect("bytes");
        text.chars().flat_map(letter).collect()
    }

    /// A whole turn. The client gets `answer`, and sends `returned` back from then on.
    fn turn(&mut self, added: Vec<Message>, text: &str, answer: Message, returned: Message) -> Counted {
        self.client.messages.extend(added);
        let turn = self
            .session_chat
            .prompt(&self.chat_tokenizer, self.client.clone(), &llmctl_image::ImageSet::default())
            .expect("a prompt");
        self.lines.lock().expect("free").extend(self.letters(text));
        let (events, resident) = self.ask(&turn);
        let (started, outcome, generated, heard) = sorted(events);
        assert_eq!(heard, text);
        let usage = outcome.usage.clone();
        let answer = RecordedAnswer { message: answer, generated, outcome, sampling: Sampling::default() };
        assert_eq!(self.session_chat.record(turn, answer).expect("kept"), Finished::Kept);
        self.client.messages.push(returned);
        Counted { started, usage, resident }
    }

    fn ask(&mut self, turn: &PromptedTurn) -> (Vec<Event>, usize) {
        let session = Some(named(SESSION));
        let resident =
            self.engine.inspect_session(&named(SESSION)).map_or(0, |detail| detail.info.num_resident);
        let request = Request { prompt: turn.tokens().to_vec(), session, ..Request::default() };
        let id = self.engine.submit(request).expect("accepted");
        let mut answers = HashMap::new();
        drain(&mut self.engine, &mut answers);
        (answers.remove(&id).expect("answered").events, resident)
    }

    /// A turn that must compute nothing of what the session holds.
    #[track_caller]
    fn warm(
        &mut self,
        what: &str,
        added: Vec<Message>,
        text: &str,
        answer: Message,
        returned: Message,
    ) -> Counted {
        let counted = self.turn(added, text, answer, returned);
        let Started { reuse, difference, .. } = &counted.started;
        let explained =
            difference.as_ref().map(|difference| difference.explain(&**self.chat_tokenizer.tokenizer()));
        assert_eq!(reuse.cached_tokens, counted.resident, "{what}: {explained:?}");
        let reason = if counted.resident == 0 { ReuseReason::New } else { ReuseReason::ExactPrefix };
        assert_eq!((reuse.reason, explained), (reason, None), "{what}");
        counted
    }

    fn say(&mut self, what: &str, question: &str, text: &str) -> Counted {
        self.warm(what, vec![user(question)], text, Message::assistant(text), Message::assistant(text))
    }
}

fn sorted(events: Vec<Event>) -> (Started, Outcome, Vec<u32>, String) {
    let (mut started, mut outcome, mut generated, mut text) = (None, None, Vec::new(), String::new());
    for event in events {
        match event {
            Event::Started(event) => started = Some(event),
            Event::Text { text: more, tokens } => {
                text.push_str(&more);
                generated.extend(tokens.iter().map(|token| token.id));
            }
            Event::Done(event) => outcome = Some(event),
            Event::Queued { .. } | Event::Encoding { .. } | Event::Prefill { .. } | Event::Prompt { .. } => {}
            Event::Failed(error) => panic!("{error}"),
        }
    }
    (started.expect("started"), outcome.expect("done"), generated, text)
}

/// A call as it was made, and as a client returns it: other id, other spelling.
fn call(name: &str, arguments: &Json) -> (Message, Message) {
    let message = |id: &str, arguments: Json| {
        let tool_calls = vec![ToolCall { id: Some(id.to_owned()), name: name.to_owned(), arguments }];
        Message { content: Some(Content::Text(String::new())), tool_calls, ..Message::assistant("") }
    };
    let spelt = serde_json::to_string_pretty(arguments).expect("JSON");
    (message("made", arguments.clone()), message("sent", serde_json::from_str(&spelt).expect("JSON")))
}

// ---- what is computed

#[test]
fn every_turn_of_a_plain_conversation_computes_only_what_is_new() {
    for template in [QWEN3, LLAMA31, GEMMA3, GEMMA4] {
        let Some(mut chat) = chat(template) else { continue };
        let (mut computed, mut held) = (0, 0);
        for (question, text) in
            [("hi", "hello \u{1F600}"), ("1+1?", "two"), ("sure?", "yes\n"), ("bye", "bye")]
        {
            let Counted { started, usage, .. } = chat.say(template, question, text);
            assert_eq!(usage.cached_tokens, started.reuse.cached_tokens);
            assert_eq!(usage.completion_tokens, chat.letters(text).len());
            computed += usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens;
            held = usage.prompt_tokens + usage.completion_tokens;
        }
        assert_eq!(computed, held, "{template}: every token is computed once");
        let next = chat.session_chat.prompt(
            &chat.chat_tokenizer,
            chat.session_chat.followed_by(vec![user("more")]),
            &llmctl_image::ImageSet::default(),
        );
        assert_eq!(next.expect("a prompt").num_spliced(), 4, "{template}");
    }
}

#[test]
fn multi_turn_tool_conversations_of_bfcl_keep_all_that_the_session_holds() {
    let Some(root) = fixtures() else { return };
    let read = |file: &str| std::fs::read_to_string(root.join("vectors/bfcl").join(file));
    let (Ok(questions), Ok(answers)) =
        (read("BFCL_v4_multi_turn_base.json"), read("possible_answer/BFCL_v4_multi_turn_base.json"))
    else {
        crate::common::skip("no BFCL conversations");
        return;
    };
    let parse = |line: &str| serde_json::from_str::<Json>(line).expect("a line of BFCL");
    for template in [QWEN3, LLAMA31, GEMMA4] {
        let (mut cached, mut prompted, mut prompts) = (0, 0, 0);
        for (question, answer) in questions.lines().zip(answers.lines()).step_by(25) {
            let (question, answer) = (parse(question), parse(answer));
            let Some(mut chat) = chat(template) else { return };
            chat.client.tools = tools();
            let turns = question["question"].as_array().expect("turns").iter();
            for (turn, steps) in turns.zip(answer["ground_truth"].as_array().expect("turns")) {
                let mut added = vec![user(turn[0]["content"].as_str().expect("a question"))];
                for step in steps.as_array().expect("steps") {
                    let (name, arguments) = bfcl_call(step.as_str().expect("a step"));
                    let (made, sent) = call(&name, &arguments);
                    let counted =
                        chat.warm(template, added, &spoken(template, &name, &arguments), made, sent);
                    cached += counted.usage.cached_tokens;
                    prompted += counted.usage.prompt_tokens;
                    prompts += 1;
                    added = vec![result("sent", &name, "done")];
                }
                let done = Message::assistant("Done.");
                let counted = chat.warm(template, added, "Done.", done.clone(), done);
                cached += counted.usage.cached_tokens;
                prompted += counted.usage.prompt_tokens;
                prompts += 1;
            }
        }
        eprintln!(
            "{template}: {cached} of {prompted} prompt tokens came from the session in {prompts} prompts"
        );
        assert!(prompts > 50 && cached * 2 > prompted, "{template}: {cached} of {prompted}");
    }
}

#[test]
fn an_edited_answer_is_explained_where_it_differs() {
    let Some(mut chat) = chat(QWEN3) else { return };
    chat.say("first", "Name a town.", "Oslo");
    chat.say("second", "Another?", "Bergen");
    chat.client.messages[3] = Message::assistant("Trondheim");
    let counted = chat.turn(vec![user("More?")], "No.", Message::assistant("No."), Message::assistant("No."));
    assert_eq!(counted.started.reuse.reason, ReuseReason::PartialPrefix);
    let difference = counted.started.difference.expect("they differ");
    assert_eq!(Some(difference.position), counted.started.reuse.first_difference);
    assert_eq!(difference.position, counted.started.reuse.cached_tokens);
    let explained = difference.explain(&**chat.chat_tokenizer.tokenizer());
    assert!(explained.session.starts_with("Bergen"), "{explained:?}");
    assert!(explained.prompt.starts_with("Trondheim"), "{explained:?}");
    assert!(explained.before.contains("<|im_start|>assistant\\n"), "{explained:?}");
    // The edit is what counts from then on.
    let texts = chat.session_chat.messages().filter_map(|message| match &message.content {
        Some(Content::Text(text)) => Some(text.as_str()),
        _ => None,
    });
    let expected = ["Name a town.", "Oslo", "Another?", "Trondheim", "More?", "No."];
    assert_eq!(texts.collect::<Vec<_>>(), expected);
}

// ---- what is kept

const PLAIN: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                     {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

fn plain() -> ChatTokenizer {
    chat_tokenizer(parity_tokenizer("llama"), PLAIN)
}

fn answer(text: &str, finish: Finish, chat_tokenizer: &ChatTokenizer) -> RecordedAnswer {
    let letter = |c: char| chat_tokenizer.encode_rest(c.encode_utf8(&mut [0; 4])).expect("bytes");
    let generated: Vec<u32> = text.chars().flat_map(letter).collect();
    let usage =
        Usage { prompt_tokens: 1, cached_tokens: 0, completion_tokens: generated.len(), ..Usage::default() };
    let outcome = Outcome { finish, usage, timings: Timings::default(), seed: 7, adapters: Vec::new() };
    let sampling = Sampling { temperature: 0.5, ..Sampling::default() };
    RecordedAnswer { message: Message::assistant(text), generated, outcome, sampling }
}

fn prompt(session_chat: &SessionChat, chat_tokenizer: &ChatTokenizer, question: &str) -> PromptedTurn {
    session_chat
        .prompt(
            chat_tokenizer,
            session_chat.followed_by(vec![user(question)]),
            &llmctl_image::ImageSet::default(),
        )
        .expect("a prompt")
}

fn take_turn(session_chat: &mut SessionChat, chat_tokenizer: &ChatTokenizer, question: &str, text: &str) {
    let turn = prompt(session_chat, chat_tokenizer, question);
    let finished = session_chat.record(turn, answer(text, Finish::Eos(1), chat_tokenizer)).expect("kept");
    assert_eq!(finished, Finished::Kept);
}

fn store() -> (TempDir, SessionStore, SessionName) {
    let folder = tempfile::tempdir().expect("a folder");
    let store = SessionStore::new(folder.path().join("sessions"));
    (folder, store, SessionName::new("a").expect("a name"))
}

fn dialogue_of(store: &SessionStore, name: &SessionName, model: ModelFingerprint) -> SessionChat {
    SessionChat::resume(store.open_or_create(name, &model).expect("opened"), model)
}

fn lines(folder: &Path) -> usize {
    let path: PathBuf = folder.join("sessions/a/transcript.jsonl");
    std::fs::read_to_string(path).expect("a transcript").lines().count()
}

#[test]
fn a_conversation_from_disk_prompts_as_the_one_that_was_never_closed() {
    let (folder, store, name) = store();
    let chat_tokenizer = plain();
    let mut session_chat = dialogue_of(&store, &name, model("1"));
    take_turn(&mut session_chat, &chat_tokenizer, "one?", "uno dos");
    assert_eq!(lines(folder.path()), 2, "on disk when finish returns");
    take_turn(&mut session_chat, &chat_tokenizer, "two?", "tres \u{20ac}");
    let expected = prompt(&session_chat, &chat_tokenizer, "three?").tokens().to_vec();
    drop(session_chat);
    let session_chat = dialogue_of(&store, &name, model("1"));
    let turn = prompt(&session_chat, &chat_tokenizer, "three?");
    assert_eq!((turn.tokens(), turn.num_spliced(), turn.num_kept_turns()), (&expected[..], 2, 2));
    let text = turn.text(&chat_tokenizer);
    assert!(text.contains("assistant\ntres \u{20ac}<|im_end|>"), "{text}");
    let known = session_chat.saved().tokens();
    assert_eq!(expected[..known.len()], known, "what was resident is the prompt's beginning");
    let sampling = &session_chat.saved().turns[0].turn.sampling;
    assert_eq!((sampling.seed, sampling.temperature), (Some(7), 0.5), "with the seed in force");
    assert!(session_chat.notices().is_empty());
}

#[test]
fn a_turn_that_fails_or_is_cancelled_at_once_leaves_the_conversation_as_before() {
    let (folder, store, name) = store();
    let chat_tokenizer = plain();
    let mut session_chat = dialogue_of(&store, &name, model("1"));
    take_turn(&mut session_chat, &chat_tokenizer, "one?", "uno");
    let before = session_chat.saved().clone();
    drop(prompt(&session_chat, &chat_tokenizer, "fails"));
    let turn = prompt(&session_chat, &chat_tokenizer, "cancelled");
    let finished =
        session_chat.record(turn, answer("", Finish::Cancelled, &chat_tokenizer)).expect("nothing to do");
    assert_eq!((finished, session_chat.saved(), lines(folder.path())), (Finished::Empty, &before, 2));
    assert_eq!(prompt(&session_chat, &chat_tokenizer, "two?").num_spliced(), 1);
}

#[test]
fn a_cancelled_turn_is_kept_as_such_and_goes_back_as_it_was() {
    let (_folder, store, name) = store();
    let chat_tokenizer = plain();
    let mut session_chat = dialogue_of(&store, &name, model("1"));
    let turn = prompt(&session_chat, &chat_tokenizer, "count");
    session_chat.record(turn, answer("one, tw", Finish::Cancelled, &chat_tokenizer)).expect("kept");
    let saved = store.read(&name).expect("readable");
    assert_eq!(saved.turns[0].turn.finish, Finish::Cancelled);
    assert_eq!(prompt(&session_chat, &chat_tokenizer, "go on").num_spliced(), 1);
}

#[test]
fn an_answer_that_a_stop_string_cut_goes_back_as_text() {
    let (_folder, store, name) = store();
    let chat_tokenizer = plain();
    let mut session_chat = dialogue_of(&store, &name, model("1"));
    let turn = prompt(&session_chat, &chat_tokenizer, "list");
    let mut cut = answer("a, b END", Finish::StopString("END".to_owned()), &chat_tokenizer);
    cut.message = Message::assistant("a, b ");
    session_chat.record(turn, cut).expect("kept");
    let check = |session_chat: &SessionChat| {
        let turn = prompt(session_chat, &chat_tokenizer, "more");
        assert_eq!(turn.num_spliced(), 0);
        assert!(
            turn.text(&chat_tokenizer).contains("assistant\na, b <|im_end|>"),
            "{}",
            turn.text(&chat_tokenizer)
        );
    };
    check(&session_chat);
    drop(session_chat);
    check(&dialogue_of(&store, &name, model("1")));
}

#[test]
fn another_model_gets_the_text_and_not_the_ids() {
    let (_folder, store, name) = store();
    let chat_tokenizer = plain();
    let mut session_chat = dialogue_of(&store, &name, model("1"));
    take_turn(&mut session_chat, &chat_tokenizer, "one?", "uno");
    drop(session_chat);
    let renamed = ModelFingerprint { name: "an alias of it".to_owned(), ..model("1") };
    let session_chat = dialogue_of(&store, &name, renamed);
    assert_eq!(
        (session_chat.notices().len(), prompt(&session_chat, &chat_tokenizer, "x").num_spliced()),
        (0, 1)
    );
    drop(session_chat);

    let mut session_chat = dialogue_of(&store, &name, model("2"));
    let [notice] = &session_chat.notices()[..] else { panic!("{:?}", session_chat.notices()) };
    let notice = notice.to_string();
    assert!(notice.contains("this session was started with toy when it had other weights"), "{notice}");
    let turn = prompt(&session_chat, &chat_tokenizer, "two?");
    assert_eq!(turn.num_spliced(), 0);
    assert!(turn.text(&chat_tokenizer).contains("uno"), "the messages stay");
    let tokens = turn.tokens().len();
    session_chat.record(turn, answer("dos", Finish::Eos(1), &chat_tokenizer)).expect("kept");
    let second = session_chat.saved().turns[1].clone();
    assert_eq!((second.turn.kept_tokens, second.turn.prompt_tail.len()), (0, tokens));
    assert_eq!(session_chat.saved().num_tokens(), tokens + 3, "of the second model alone");
    assert_eq!(prompt(&session_chat, &chat_tokenizer, "three?").num_spliced(), 1, "its own answer");
    drop(session_chat);
    let session_chat = dialogue_of(&store, &name, model("2"));
    assert_eq!(prompt(&session_chat, &chat_tokenizer, "three?").num_spliced(), 1, "also from disk");
}

#[test]
fn a_model_that_reads_text_alone_gets_words_for_the_images_of_earlier_turns() {
    let (chat_tokenizer, mut session_chat) = (plain(), SessionChat::new(model("1")));
    take_turn(&mut session_chat, &chat_tokenizer, "one?", "uno");
    let (mut saved, image) = (session_chat.saved().clone(), photo());
    let first = Arc::make_mut(&mut saved.turns[0]);
    first.turn.messages[0] =
        Message { content: Some(Content::Parts(vec![image.to_part(), text_part("What?")])), ..user("") };
    let session_chat = SessionChat::look_at(saved, model("2"));
    let text = prompt(&session_chat, &chat_tokenizer, "And?").text(&chat_tokenizer);
    assert!(text.contains("[image: cat.png 2x1] (left out: this model reads text alone)What?"), "{text}");
    let notice = chat_tokenizer.notice_of_images(session_chat.messages()).expect("one").to_string();
    assert_eq!(notice, "1 image left out: this model reads text alone");

    let new = Message { content: Some(Content::Parts(vec![image.to_part()])), ..user("") };
    let new = session_chat.followed_by(vec![new]);
    let error = session_chat.prompt(&chat_tokenizer, new, &llmctl_image::ImageSet::default());
    assert!(error.expect_err("refused").to_string().contains("this model reads text alone"));
}

fn photo() -> ImageRef {
    ImageRef {
        sha256: "0".repeat(64),
        width: 2,
        height: 1,
        media_type: "image/png".to_owned(),
        name: Some("cat.png".to_owned()),
    }
}

#[test]
fn turns_that_a_client_edits_are_replaced_when_the_new_one_is_finished() {
    let (folder, store, name) = store();
    let chat_tokenizer = plain();
    let mut session_chat = dialogue_of(&store, &name, model("1"));
    for (question, text) in [("one?", "uno"), ("two?", "dos"), ("three?", "tres")] {
        take_turn(&mut session_chat, &chat_tokenizer, question, text);
    }
    let kept = [user("one?"), Message::assistant("uno"), user("deux?")];
    let edited = Conversation { messages: kept.to_vec(), ..Conversation::default() };
    let turn =
        session_chat.prompt(&chat_tokenizer, edited, &llmctl_image::ImageSet::default()).expect("a prompt");
    assert_eq!(turn.num_kept_turns(), 1);
    assert_eq!(
        store.read(&name).expect("readable").turns.len(),
        3,
        "nothing is given up before there is a new one"
    );
    session_chat.record(turn, answer("deux", Finish::Eos(1), &chat_tokenizer)).expect("kept");
    let saved = store.read(&name).expect("readable");
    assert_eq!(&saved, session_chat.saved());
    // One line did it: a crash in the middle of it would have left the old turns.
    let path = folder.path().join("sessions/a/transcript.jsonl");
    let whole = std::fs::read(&path).expect("a transcript");
    let old_lines =
        whole.iter().enumerate().filter(|(_, byte)| **byte == b'\n').nth(3).expect("four lines").0 + 1;
    for cut in [old_lines, old_lines + 1, whole.len() - 2] {
        std::fs::write(&path, &whole[..cut]).expect("cut");
        assert_eq!(store.read(&name).expect("readable").turns.len(), 3);
    }
    std::fs::write(&path, &whole).expect("restored");
    let messages: Vec<Message> = saved.messages().cloned().collect();
    assert_eq!(messages, [&kept[..], &[Message::assistant("deux")]].concat());
    assert_eq!(prompt(&session_chat, &chat_tokenizer, "next").num_spliced(), 2);

    session_chat.rewind(1).expect("undone");
    assert_eq!(store.read(&name).expect("readable").turns.len(), 1);
    assert_eq!(prompt(&session_chat, &chat_tokenizer, "next").num_spliced(), 1);
    assert!(matches!(session_chat.rewind(2), Err(Error::InvalidParameter { name: "turns", .. })));
}

#[test]
fn an_unsaved_conversation_is_one_all_the_same() {
    let chat_tokenizer = plain();
    let mut session_chat = SessionChat::new(model("1"));
    take_turn(&mut session_chat, &chat_tokenizer, "one?", "uno");
    take_turn(&mut session_chat, &chat_tokenizer, "two?", "dos");
    let turn = prompt(&session_chat, &chat_tokenizer, "three?");
    assert_eq!((turn.num_spliced(), turn.num_kept_turns()), (2, 2));
    let known = session_chat.saved().tokens();
    assert_eq!(turn.tokens()[..known.len()], known);
    session_chat.rewind(0).expect("undone");
    assert_eq!(
        (session_chat.messages().count(), prompt(&session_chat, &chat_tokenizer, "x").num_spliced()),
        (0, 0)
    );
}

#[test]
fn a_template_that_prints_the_date_prints_that_of_the_first_turn() {
    let (_folder, store, name) = store();
    let chat_tokenizer =
        chat_tokenizer(parity_tokenizer("llama"), &format!("{{{{ strftime_now('%F %T') }}}}{PLAIN}"));
    let mut session_chat = dialogue_of(&store, &name, model("1"));
    take_turn(&mut session_chat, &chat_tokenizer, "one?", "uno");
    let text = prompt(&session_chat, &chat_tokenizer, "two?").text(&chat_tokenizer);
    drop(session_chat);
    std::thread::sleep(Duration::from_millis(1100)); // the clock moves on to another second
    let session_chat = dialogue_of(&store, &name, model("1"));
    assert_eq!(prompt(&session_chat, &chat_tokenizer, "two?").text(&chat_tokenizer), text);
    let known = session_chat.saved().tokens();
    assert_eq!(prompt(&session_chat, &chat_tokenizer, "two?").tokens()[..known.len()], known);
}

// ---- text behind ids

#[test]
fn text_behind_ids_is_encoded_as_in_the_middle_of_a_text() {
    let Some(root) = fixtures() else { return };
    let mut tokenizers = Vec::new();
    for name in ["llama2", "mistral-v1", "phi-3-mini"] {
        let folder = root.join("tokenizers").join(name);
        let json = std::fs::read(folder.join("tokenizer.json")).expect("tokenizer.json");
        let settings = hf_settings(&folder).expect("settings");
        tokenizers.push((name, Tokenizer::from_json(&json, &settings).expect("a tokenizer")));
    }
    for name in ["llama-spm", "phi-3"] {
        let path = root.join(format!("tokenizers/gguf-vocab/ggml-vocab-{name}.gguf"));
        let gguf = Gguf::open(&path).expect("a GGUF");
        let tokenizer = llmctl_models::load::tokenizer::from_gguf(gguf.metadata()).expect("a tokenizer");
        tokenizers.push((name, tokenizer));
    }
    tokenizers.push(("byte level", parity_tokenizer("llama")));
    for (name, tokenizer) in &tokenizers {
        let whole = |text: &str| tokenizer.encode_chat(text).expect("encodes");
        for rest in ["\n[INST] and? [/INST]", "\n\nuser: x", "</s><s>[INST] and? [/INST]", "\n"] {
            let before = "[INST] hi [/INST] hello";
            let joined = [whole(before), tokenizer.encode_chat_rest(rest).expect("encodes")].concat();
            assert_eq!(joined, whole(&format!("{before}{rest}")), "{name}: {rest:?}");
        }
        for rest in ["a", " a", "  a", "[/INST]", "\u{1}", "\u{20ac}uro", "", " ", "x</s>y"] {
            let ids = tokenizer.encode_chat_rest(rest).expect("encodes");
            let bytes: Vec<u8> =
                ids.iter().filter_map(|&id| tokenizer.token_bytes(id)).flat_map(|b| b.into_owned()).collect();
            let text = String::from_utf8(bytes).expect("whole characters");
            // Behind a special token in the middle of a text, these vocabularies put a space, as they were trained.
            let expected = [rest.to_owned(), rest.replace("</s>", "</s> ")];
            assert!(expected.contains(&text), "{name}: {rest:?} became {text:?}");
            assert!(rest.contains("</s>") || text == rest, "{name}: {rest:?} became {text:?}");
        }
    }
    let (_, llama2) = &tokenizers[0];
    assert_ne!(
        llama2.encode_chat("a").expect("encodes")[1..],
        llama2.encode_chat_rest("a").expect("encodes")
    );
}
