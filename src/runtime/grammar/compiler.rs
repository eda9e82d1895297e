//! Compiles sources to [`Grammar`]s: once per source, on a thread with its own stack, and bounded in fuel and
//! time. Recently used grammars are cached.
//!
//! Invariants: the token trie is built once, at the first compilation. A source that is being compiled is
//! awaited, not compiled twice. A compilation that times out cannot be stopped, but at most [`MAX_COMPILING`]
//! run at a time.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use llguidance::ParserFactory;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use parking_lot::{Condvar, Mutex};
use serde_json::Value;

use super::compiled::Grammar;
use super::state::{GrammarState, TokenMask, unsatisfiable};
use super::vocabulary::token_environment;
use super::{GrammarSource, gbnf, schema};
use llmctl_base::error::{Error, GrammarError, Result, panic_text};
use llmctl_models::text::Tokenizer;

/// Most bytes of a source. OpenAI accepts schemas of about 120,000 characters.
const MAX_SOURCE_BYTES: usize = 1 << 20;

/// Most nested brackets in a regular expression or a Lark grammar; schemas have a limit of their own.
const MAX_NESTING: usize = 128;

/// Time limit of one compilation. Large published schemas take tenths of a second.
const MAX_COMPILE_TIME: Duration = Duration::from_secs(10);

/// Most compilations at a time, counting those that timed out.
const MAX_COMPILING: usize = 4;

/// Most definitions in a Lark grammar: the library follows rules by recursion, as it does references in
/// schemas.
const MAX_RULES: usize = 2048;

/// Stack for the library's recursion at its limits, in a build without optimisation. Reserves address space
/// only; untouched pages take no memory.
const STACK_BYTES: usize = 256 << 20;

/// Most cached grammars.
const MAX_CACHED: usize = 64;

/// Compiler for one model's vocabulary. Cheap until first used; clones share everything.
#[derive(Clone)]
pub struct GrammarCompiler {
    shared: Arc<CompilerState>,
}

struct CompilerState {
    tokenizer: Arc<Tokenizer>,
    vocab_size: usize,
    ends: Vec<u32>,
    factory: OnceLock<Result<ParserFactory, GrammarError>>,
    cache: Mutex<Cache>,
    num_compiling: Mutex<usize>,
    compiled: Condvar,
}

type Slot = Arc<OnceLock<Result<Grammar, GrammarError>>>;

/// Slots by source, each with the number of its last use.
#[derive(Default)]
struct Cache {
    slots: HashMap<String, (Slot, u64)>,
    num_uses: u64,
}

impl GrammarCompiler {
    /// Creates a compiler. `vocab_size` is the number of logits ([`crate::runtime::EngineSpec`]'s), `ends`
    /// are the ids that end a generation.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize, ends: &[u32]) -> Self {
        let shared = CompilerState {
            tokenizer,
            vocab_size,
            ends: ends.to_vec(),
            factory: OnceLock::new(),
            cache: Mutex::default(),
            num_compiling: Mutex::default(),
            compiled: Condvar::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Returns the grammar of `source`. Takes microseconds for a cached one and up to [`MAX_COMPILE_TIME`]
    /// otherwise, so call it neither on the engine's thread nor on an asynchronous one.
    ///
    /// # Errors
    /// [`Error::Grammar`]: an unsupported keyword, an invalid source, or one beyond the limits.
    pub fn compile(&self, source: &GrammarSource) -> Result<Grammar> {
        let key = key(source)?;
        let slot = self.shared.cache.lock().slot(&key);
        let result = slot.get_or_init(|| self.compile_anew(source)).clone();
        if matches!(result, Err(GrammarError::TooComplex(_) | GrammarError::Failed(_))) {
            self.shared.cache.lock().forget(&key, &slot); // the machine may have been busy, so allow another attempt
        }
        result.map_err(Error::Grammar)
    }

    fn compile_anew(&self, source: &GrammarSource) -> Result<Grammar, GrammarError> {
        let source = &*self.shared.translated(source)?;
        let (grammar, kept) = (top_level(source)?, source.clone());
        let deadline = Instant::now() + MAX_COMPILE_TIME;
        let permit = Permit::wait(&self.shared, deadline)?;
        let shared = Arc::clone(&self.shared);
        let (sender, receiver) = mpsc::channel();
        let body = move || {
            let compiled = catch_unwind(AssertUnwindSafe(|| shared.compile(grammar, kept)));
            drop(permit);
            let _ = sender.send(
                compiled.unwrap_or_else(|panic| Err(GrammarError::Failed(panic_text(&*panic).to_owned()))),
            );
        };
        let spawned = thread::Builder::new().name("grammar".to_owned()).stack_size(STACK_BYTES).spawn(body);
        spawned.map_err(|error| GrammarError::Failed(format!("no thread to compile in: {error}")))?;
        match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(compiled) => compiled.map_err(|error| schema::in_words_of(source, error)),
            Err(RecvTimeoutError::Timeout) => Err(out_of_time()),
            Err(RecvTimeoutError::Disconnected) => {
                Err(GrammarError::Failed("the compiling thread died".to_owned()))
            }
        }
    }
}

impl fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrammarCompiler").field("vocab_size", &self.shared.vocab_size).finish_non_exhaustive()
    }
}

impl CompilerState {
    /// Returns GBNF as Lark, which every engine takes, and any other source as it is.
    fn translated<'a>(&self, source: &'a GrammarSource) -> Result<Cow<'a, GrammarSource>, GrammarError> {
        let GrammarSource::Gbnf(gbnf) = source else { return Ok(Cow::Borrowed(source)) };
        let find_token = |name: &str| match name.strip_prefix("<[").and_then(|rest| rest.strip_suffix("]>")) {
            Some(id) => id.parse().ok().filter(|id| (*id as usize) < self.vocab_size),
            None => self.tokenizer.token_to_id(name),
        };
        let lark = gbnf::to_lark(gbnf, &find_token)?;
        Ok(Cow::Owned(GrammarSource::Lark(lark)))
    }

    fn compile(&self, grammar: TopLevelGrammar, source: GrammarSource) -> Result<Grammar, GrammarError> {
        let factory = self.factory.get_or_init(|| self.build_factory()).as_ref().map_err(Clone::clone)?;
        let mut parser = factory.create_parser(grammar).map_err(|error| schema::explain(&error))?;
        if let Some(warning) = parser.grammar_warnings().into_iter().next() {
            return Err(GrammarError::Invalid(warning));
        }
        parser.start_without_prompt();
        let grammar = Grammar::new(source, self.vocab_size, parser);
        check_beginning(&grammar)?;
        Ok(grammar)
    }

    fn build_factory(&self) -> Result<ParserFactory, GrammarError> {
        let environment = token_environment(Arc::clone(&self.tokenizer), self.vocab_size, &self.ends);
        let capabilities = InferenceCapabilities { ff_tokens: true, ..InferenceCapabilities::default() };
        // Slices of the vocabulary that are inside a JSON string are allowed or forbidden as a whole.
        let slices = SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&environment, capabilities, &slices)
            .map_err(|error| GrammarError::Failed(error.to_string()))?;
        factory.quiet();
        *factory.limits_mut() = ParserLimits { verbose_errors: false, ..ParserLimits::default() };
        Ok(factory)
    }
}

impl Cache {
    fn slot(&mut self, key: &str) -> Slot {
        self.num_uses += 1;
        if let Some((slot, used)) = self.slots.get_mut(key) {
            *used = self.num_uses;
            return Arc::clone(slot);
        }
        if self.slots.len() >= MAX_CACHED
            && let Some(oldest) = self.slots.iter().min_by_key(|(_, (_, used))| *used)
        {
            let oldest = oldest.0.clone();
            self.slots.remove(&oldest);
        }
        let slot = Slot::default();
        self.slots.insert(key.to_owned(), (Arc::clone(&slot), self.num_uses));
        slot
    }

    fn forget(&mut self, key: &str, slot: &Slot) {
        if self.slots.get(key).is_some_and(|(current, _)| Arc::ptr_eq(current, slot)) {
            self.slots.remove(key);
        }
    }
}

/// Permission for one of [`MAX_COMPILING`] compilations.
struct Permit(Arc<CompilerState>);

impl Permit {
    fn wait(shared: &Arc<CompilerState>, deadline: Instant) -> Result<Self, GrammarError> {
        let mut count = shared.num_compiling.lock();
        while *count >= MAX_COMPILING {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(out_of_time());
            }
            shared.compiled.wait_for(&mut count, left);
        }
        *count += 1;
        Ok(Self(Arc::clone(shared)))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        *self.0.num_compiling.lock() -= 1;
        self.0.compiled.notify_one();
    }
}

/// Checks that a first token exists. The library accepts unsatisfiable grammars and fails at the first token.
fn check_beginning(grammar: &Grammar) -> Result<(), GrammarError> {
    match GrammarState::new(grammar, false).mask() {
        Ok(Some(TokenMask::Allowed(allowed))) if allowed.is_empty() => Err(unsatisfiable()),
        Ok(_) => Ok(()),
        Err(error) => Err(error),
    }
}

fn out_of_time() -> GrammarError {
    GrammarError::TooComplex(format!("not compiled within {MAX_COMPILE_TIME:?}"))
}

/// Returns the cache key of a source. Different orders of members give different keys.
fn key(source: &GrammarSource) -> Result<String, GrammarError> {
    let key = match source {
        GrammarSource::JsonObject => "object".to_owned(),
        GrammarSource::JsonSchema(schema) => format!("schema {schema}"),
        GrammarSource::Regex(regex) => format!("regex {regex}"),
        GrammarSource::Lark(grammar) => format!("lark {grammar}"),
        GrammarSource::Gbnf(grammar) => format!("gbnf {grammar}"),
    };
    if key.len() > MAX_SOURCE_BYTES {
        return Err(GrammarError::TooComplex(format!("more than {MAX_SOURCE_BYTES} bytes")));
    }
    Ok(key)
}

fn top_level(source: &GrammarSource) -> Result<TopLevelGrammar, GrammarError> {
    match source {
        GrammarSource::JsonObject => {
            Ok(TopLevelGrammar::from_json_schema(schema::prepare(&serde_json::json!({"type": "object"}))?))
        }
        GrammarSource::JsonSchema(value) => Ok(TopLevelGrammar::from_json_schema(schema::prepare(value)?)),
        GrammarSource::Regex(regex) => {
            check_nesting(regex)?;
            Ok(TopLevelGrammar::from_regex(regex))
        }
        GrammarSource::Lark(grammar) | GrammarSource::Gbnf(grammar) => {
            check_nesting(grammar)?;
            check_rules(grammar)?;
            Ok(TopLevelGrammar::from_lark(grammar.clone()))
        }
    }
}

/// Refuses too many definitions, rules that do more than constrain, and embedded schemas that nest too deep.
fn check_rules(grammar: &str) -> Result<(), GrammarError> {
    if grammar.lines().filter(|line| line.contains(':')).count() > MAX_RULES {
        return Err(GrammarError::TooComplex(format!("more than {MAX_RULES} rules")));
    }
    check_attributes(grammar)?;
    let schemas = grammar.split("%json").skip(1);
    let mut parsed =
        schemas.filter_map(|rest| serde_json::Deserializer::from_str(rest).into_iter::<Value>().next()?.ok());
    parsed.try_for_each(|schema| schema::check_chain(&schema))
}

/// Refuses rule attributes that need more than a mask: a temperature, or text that is generated and then
/// removed. They stand in brackets before the colon of a line (llguidance, docs/syntax.md).
fn check_attributes(grammar: &str) -> Result<(), GrammarError> {
    const DOING_MORE: [&str; 3] = ["stop", "stop_capture", "temperature"];
    let name_in = |line: &str| {
        let bare = without_strings(line);
        let (head, _) = bare.split_once(':')?;
        let (_, list) = head.split_once('[')?;
        let names = list.split(',').filter_map(|attribute| attribute.split('=').next());
        let name = names.map(str::trim).find(|name| DOING_MORE.contains(name));
        name.map(str::to_owned)
    };
    match grammar.lines().find_map(name_in) {
        None => Ok(()),
        Some(keyword) => {
            let message = "a rule can constrain what comes next, and nothing else".to_owned();
            Err(GrammarError::Unsupported { keyword, message })
        }
    }
}

/// Removes text between double quotes, where a colon or a comma has no meaning.
fn without_strings(line: &str) -> String {
    let (mut bare, mut is_inside, mut is_escaped) = (String::with_capacity(line.len()), false, false);
    for c in line.chars() {
        if c == '"' && !is_escaped {
            is_inside = !is_inside;
        } else if !is_inside {
            bare.push(c);
        }
        is_escaped = is_inside && c == '\\' && !is_escaped;
    }
    bare
}

/// Counts brackets, also within literals; the limit is generous enough for that.
fn check_nesting(text: &str) -> Result<(), GrammarError> {
    let mut depth = 0usize;
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_NESTING {
            return Err(GrammarError::TooComplex(format!(
                "more than {MAX_NESTING} brackets within each other"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::vocabulary::tests::letters;
    use super::*;

    fn compiler() -> GrammarCompiler {
        let tokenizer = letters();
        let vocab_size = tokenizer.vocab_size();
        GrammarCompiler::new(tokenizer, vocab_size, &[2])
    }

    fn compile(compiler: &GrammarCompiler, regex: &str) -> Grammar {
        compiler.compile(&GrammarSource::Regex(regex.to_owned())).expect("compiles")
    }

    #[test]
    fn a_source_is_compiled_once_until_others_push_it_out() {
        let compiler = compiler();
        let first = compile(&compiler, "a");
        assert!(first.is_same(&compile(&compiler.clone(), "a")));
        for number in 0..MAX_CACHED - 1 {
            compile(&compiler, &format!("b{number}"));
        }
        assert!(first.is_same(&compile(&compiler, "a")), "used last");
        let second = compile(&compiler, "b0");
        for number in 0..MAX_CACHED {
            compile(&compiler, &format!("c{number}"));
        }
        assert!(!first.is_same(&compile(&compiler, "a")));
        assert!(!second.is_same(&compile(&compiler, "b0")));
        assert_eq!(compiler.shared.cache.lock().slots.len(), MAX_CACHED);
    }

    #[test]
    fn the_order_of_members_makes_another_grammar_and_a_kind_too() {
        let schema = |text: &str| GrammarSource::JsonSchema(serde_json::from_str(text).expect("JSON"));
        let keys = [
            schema(r#"{"properties": {"a": true, "b": true}}"#),
            schema(r#"{"properties": {"b": true, "a": true}}"#),
            GrammarSource::Regex("start: A".to_owned()),
            GrammarSource::Lark("start: A".to_owned()),
            GrammarSource::JsonObject,
        ]
        .map(|source| key(&source).expect("short"));
        let distinct: std::collections::BTreeSet<_> = keys.iter().collect();
        assert_eq!(distinct.len(), keys.len());
    }

    #[test]
    fn many_ask_at_once_and_get_the_same() {
        let compiler = compiler();
        let grammars: Vec<Grammar> = thread::scope(|scope| {
            let asking: Vec<_> = (0..8).map(|_| scope.spawn(|| compile(&compiler, "[a-c]{3}"))).collect();
            asking.into_iter().map(|asking| asking.join().expect("no panic")).collect()
        });
        assert!(grammars.iter().all(|grammar| grammar.is_same(&grammars[0])));
        assert_eq!(*compiler.shared.num_compiling.lock(), 0);
    }

    #[test]
    fn a_refusal_is_remembered_and_a_failure_is_not() {
        let compiler = compiler();
        let refused = GrammarSource::JsonSchema(json!({"not": true}));
        assert!(matches!(compiler.compile(&refused), Err(Error::Grammar(GrammarError::Unsupported { .. }))));
        assert_eq!(compiler.shared.cache.lock().slots.len(), 1);
        let complex = GrammarSource::Regex("(".repeat(MAX_NESTING + 1));
        assert!(matches!(compiler.compile(&complex), Err(Error::Grammar(GrammarError::TooComplex(_)))));
        assert_eq!(compiler.shared.cache.lock().slots.len(), 1);
    }

    /// On the real stack: just below the limits nothing overflows, whatever the library returns; above them,
    /// it is not called.
    #[test]
    fn long_chains_are_compiled_or_refused() {
        let compiler = compiler();
        let deep = schema::tests::chain(schema::MAX_CHAIN - 3);
        let in_lark = |schema: &Value| GrammarSource::Lark(format!("start: %json {schema}\n"));
        let rules = |count: usize| {
            let rule = |n: usize| format!("r{n}: r{}\n", n + 1);
            let rules: String = (0..count).map(rule).collect();
            GrammarSource::Lark(format!("start: r0\n{rules}r{count}: \"a\"\n"))
        };
        for source in [GrammarSource::JsonSchema(deep.clone()), in_lark(&deep), rules(MAX_RULES - 2)] {
            drop(compiler.compile(&source)); // the thread, and so the process, has survived it
        }
        let deeper = schema::tests::chain(schema::MAX_CHAIN);
        for source in [GrammarSource::JsonSchema(deeper.clone()), in_lark(&deeper), rules(MAX_RULES)] {
            let refused = compiler.compile(&source);
            assert!(matches!(refused, Err(Error::Grammar(GrammarError::TooComplex(_)))), "{refused:?}");
        }
    }

    #[test]
    fn what_nothing_satisfies_is_refused_before_the_first_token() {
        let compiler = compiler();
        let invalid = |source: GrammarSource| match compiler.compile(&source) {
            Err(Error::Grammar(GrammarError::Invalid(message))) => message,
            other => panic!("{source:?}: {other:?}"),
        };
        for source in [
            GrammarSource::JsonSchema(json!({"$ref": "#"})),
            GrammarSource::JsonSchema(json!({"anyOf": [{"$ref": "#"}]})),
            GrammarSource::Lark("start: start".to_owned()),
            GrammarSource::Lark("start: a\na: b\nb: a".to_owned()),
        ] {
            let message = invalid(source);
            assert!(message.contains("nothing"), "{message}");
        }
        compile(&compiler, ""); // the empty answer satisfies it
    }

    #[test]
    fn attributes_that_do_more_than_constrain_are_named() {
        let named = |grammar: &str| match check_attributes(grammar) {
            Err(GrammarError::Unsupported { keyword, .. }) => Some(keyword),
            other => {
                other.expect("fine");
                None
            }
        };
        assert_eq!(named("start: a\na[max_tokens=3, temperature=0.2]: /b/").as_deref(), Some("temperature"));
        assert_eq!(named("a[stop=\"x\"]: /b/").as_deref(), Some("stop"));
        assert_eq!(named(r#"a[capture="x:\"y", temperature=0.2]: /b/"#).as_deref(), Some("temperature"));
        assert_eq!(named("start: \"a[temperature=1]: \" /[stop=]/\na[lazy, max_tokens=4]: /b/"), None);
    }
}
