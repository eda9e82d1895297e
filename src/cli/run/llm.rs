//! The loaded model as `run` sees it: text in, events out.
//!
//! [`Llm`] is the one seam between this command and the engine: the program has one implementation over the engine's
//! handle, tests script another. Rendering and encoding sit here so that one prompt and a batch row become tokens in
//! one way.

use std::time::Duration;

use crate::cli::error::CommandError;
use crate::runtime::grammar::{Grammar, GrammarSource};
use crate::runtime::load::GenerationDefaults;
use crate::runtime::text::Vocabulary;
use crate::runtime::{Error, Event, Request};
use crate::template::Conversation;

/// What is known of a model once it is loaded.
#[derive(Debug, Clone, Default)]
pub struct ModelInfo {
    /// What results call the model.
    pub name: String,
    /// Most tokens of prompt and answer together.
    pub context_tokens: usize,
    pub vocab_size: usize,
    pub defaults: GenerationDefaults,
    /// Where `defaults` were read, e.g. `generation_config.json`.
    pub defaults_source: String,
    pub has_chat_template: bool,
    pub load_time: Duration,
}

/// A model's text side: all that needs no weights.
pub trait Texts {
    fn info(&self) -> &ModelInfo;

    /// The conversation in the model's own chat template, ready for the answer.
    ///
    /// # Errors
    /// The template's refusal or breakage, or that there is none.
    fn render(&self, conversation: &Conversation) -> Result<String, CommandError>;

    /// Token ids, special tokens recognised, with the beginning-of-sequence token the model wants, once.
    fn encode(&self, text: &str) -> Result<Vec<u32>, CommandError>;

    /// The bytes a token stands for; they need not be whole characters.
    fn token_bytes(&self, id: u32) -> Vec<u8>;

    /// The tokens as the engine's explanations read them.
    fn vocabulary(&self) -> &dyn Vocabulary;

    /// Whether the chat template reads a variable of this name.
    fn template_reads(&self, _variable: &str) -> bool {
        false
    }

    /// Whether this word is written out in the chat template.
    fn template_says(&self, _word: &str) -> bool {
        false
    }
}

/// A model that answers.
pub trait Llm: Texts {
    /// Starts a request.
    ///
    /// # Errors
    /// What is wrong with the request itself; [`Error::EngineGone`].
    fn submit(&self, request: Request) -> Result<Box<dyn Events + '_>, Error>;

    /// What an answer is to keep to, for a request.
    ///
    /// # Errors
    /// [`Error::Grammar`].
    fn compile(&self, source: &GrammarSource) -> Result<Grammar, Error>;
}

/// The events of one request. Dropping it cancels the request.
pub trait Events {
    /// The next event, or `None` when there is none within `timeout`.
    ///
    /// # Errors
    /// [`Error::EngineGone`] when none can come any more.
    fn next(&mut self, timeout: Duration) -> Result<Option<Event>, Error>;

    /// Asks the engine to stop at the next token; the last event still comes.
    fn cancel(&mut self);
}

/// What a prompt is before the model's template and tokenizer have seen it.
#[derive(Debug, Clone, PartialEq)]
pub enum Ask {
    /// Text to go on with, as it is.
    Text(String),
    /// Messages to answer.
    Chat(Conversation),
}

/// A prompt as the model gets it.
#[derive(Debug, Clone, PartialEq)]
pub struct Rendered {
    pub text: String,
    pub tokens: Vec<u32>,
}

/// Text and tokens of what is asked, the beginning of the answer included.
///
/// # Errors
/// Those of [`Texts::render`] and [`Texts::encode`].
pub fn render(llm: &(impl Texts + ?Sized), ask: &Ask, prefill: &str) -> Result<Rendered, CommandError> {
    let prompt = match ask {
        Ask::Text(text) => text.clone(),
        Ask::Chat(conversation) => llm.render(conversation)?,
    };
    let text = prompt + prefill;
    let tokens = llm.encode(&text)?;
    Ok(Rendered { text, tokens })
}

#[cfg(test)]
pub mod script {
    //! A model of a script: letters are tokens, answers are given in advance, and what was asked is recorded.

    use std::borrow::Cow;
    use std::cell::RefCell;
    use std::collections::VecDeque;

    use super::*;
    use crate::runtime::{Finish, GrammarError, Logprob, Outcome, Started, Timings, Token, Usage};

    pub struct Script {
        pub info: ModelInfo,
        /// Events after `Started`, one list per request; an empty list answers by echoing the prompt's last word.
        pub answers: RefCell<VecDeque<Vec<Event>>>,
        pub asked: RefCell<Vec<Request>>,
        /// Called before each event is handed out.
        pub on_event: Box<dyn Fn(usize)>,
    }

    impl Default for Script {
        fn default() -> Self {
            let info = ModelInfo {
                name: "script".to_owned(),
                context_tokens: 100,
                vocab_size: 256,
                has_chat_template: true,
                defaults_source: "generation_config.json".to_owned(),
                ..ModelInfo::default()
            };
            let (answers, asked) = Default::default();
            Self { info, answers, asked, on_event: Box::new(|_| ()) }
        }
    }

    /// Events that say `text`, one token per character, and end with `finish`.
    pub fn saying(text: &str, prompt_tokens: usize, finish: Finish) -> Vec<Event> {
        let one = |c: char| {
            let id = u32::from(c as u8);
            let logprob = Some(Logprob { logprob: -0.5, top: vec![(id, -0.5), (b'?'.into(), -1.5)] });
            Event::Text { text: c.to_string(), tokens: vec![Token { id, logprob }] }
        };
        let completion_tokens = text.chars().count();
        let usage = Usage { prompt_tokens, cached_tokens: 0, completion_tokens };
        let timings = Timings {
            prefill: Duration::from_millis(10),
            decode: Duration::from_millis(20),
            time_to_first_token: Some(Duration::from_millis(11)),
            total: Duration::from_millis(31),
            ..Timings::default()
        };
        let mut events: Vec<_> = text.chars().map(one).collect();
        events.push(Event::Done(Outcome { finish, usage, timings, seed: 42 }));
        events
    }

    impl Texts for Script {
        fn info(&self) -> &ModelInfo {
            &self.info
        }

        fn render(&self, conversation: &Conversation) -> Result<String, CommandError> {
            let line = |message: &crate::template::Message| {
                let crate::template::Content::Text(text) =
                    message.content.clone().unwrap_or(crate::template::Content::Text(String::new()))
                else {
                    panic!("the script speaks text only")
                };
                format!("<{}>{text}\n", message.role.as_str())
            };
            Ok(conversation.messages.iter().map(line).collect::<String>() + "<assistant>")
        }

        fn encode(&self, text: &str) -> Result<Vec<u32>, CommandError> {
            Ok(text.bytes().map(u32::from).collect())
        }

        fn token_bytes(&self, id: u32) -> Vec<u8> {
            vec![id as u8]
        }

        fn vocabulary(&self) -> &dyn Vocabulary {
            &Letters
        }
    }

    struct Letters;

    impl Vocabulary for Letters {
        fn token_bytes(&self, id: u32) -> Option<Cow<'_, [u8]>> {
            Some(vec![id as u8].into())
        }

        fn is_special(&self, _id: u32) -> bool {
            false
        }
    }

    impl Llm for Script {
        fn submit(&self, request: Request) -> Result<Box<dyn Events + '_>, Error> {
            request.sampling.validate(self.info.vocab_size)?;
            let prompt_tokens = request.prompt.len();
            if prompt_tokens >= self.info.context_tokens {
                return Err(Error::PromptTooLong { prompt_tokens, context_tokens: self.info.context_tokens });
            }
            let max_tokens = request.limits.max_tokens.unwrap_or(self.info.context_tokens - prompt_tokens);
            let events = self.answers.borrow_mut().pop_front().unwrap_or_else(|| {
                let text: String = request.prompt.iter().map(|id| *id as u8 as char).collect();
                let last = text.trim_end_matches("<assistant>").split_whitespace().last().unwrap_or("");
                saying(last, prompt_tokens, Finish::Eos(0))
            });
            let (reuse, difference) = Default::default();
            let started = Event::Started(Started { prompt_tokens, max_tokens, seed: 42, reuse, difference });
            let events = std::iter::once(started).chain(events).collect();
            self.asked.borrow_mut().push(request);
            Ok(Box::new(Played { script: self, events, count: 0 }))
        }

        fn compile(&self, _source: &GrammarSource) -> Result<Grammar, Error> {
            Err(GrammarError::Invalid("a script keeps to nothing".to_owned()).into())
        }
    }

    struct Played<'a> {
        script: &'a Script,
        events: VecDeque<Event>,
        count: usize,
    }

    impl Events for Played<'_> {
        fn next(&mut self, _timeout: Duration) -> Result<Option<Event>, Error> {
            (self.script.on_event)(self.count);
            self.count += 1;
            self.events.pop_front().map(Some).ok_or(Error::EngineGone)
        }

        fn cancel(&mut self) {
            let usage = Usage { prompt_tokens: 1, cached_tokens: 0, completion_tokens: self.count };
            let finish = Finish::Cancelled;
            let outcome = Outcome { finish, usage, timings: Timings::default(), seed: 42 };
            self.events = VecDeque::from([Event::Done(outcome)]);
        }
    }
}
