//! One template in a bounded minijinja environment: compiled once, run many times. For chat templates and prompt files.
//!
//! [`super::python`] gives minijinja Python's values, [`super::link`] puts them in place. Source size, steps, memory, nesting
//! and output are bounded, and a panic inside minijinja becomes an error.

use std::panic::{AssertUnwindSafe, catch_unwind};

use minijinja::machinery::{eval, get_compiled_template, make_string_output};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, ErrorKind, UndefinedBehavior, Value};
use serde_json::Value as Json;

use super::clock::DateTime;
use super::python::budget::{Exhausted, INPUTS, Inputs, Raised};
use super::python::{self, Dict, from_json};
use super::variables::Variables;
use super::{TemplateError, link, source};

/// Instructions that one rendering may take: a thousand times what a long conversation needs.
const FUEL: u64 = 20_000_000;
/// Bytes that one rendering may produce or scan, plus a multiple of what it is given.
const BASE_BYTES: u64 = 32 << 20;
const BYTES_PER_INPUT_BYTE: u64 = 256;
/// Nested scopes; a macro call counts four, so that macros may call each other 75 deep.
const MAX_SCOPES: usize = 300;
pub const NAME: &str = "chat template";

/// Builds an environment that holds one template.
pub fn compile(
    source: &str,
    syntax: SyntaxConfig,
    undefined: UndefinedBehavior,
) -> Result<Environment<'static>, TemplateError> {
    let prepared = source::prepare(source, &syntax)?;
    let mut env = Environment::empty(); // no filter of minijinja: they pay for nothing
    env.set_debug(false);
    env.set_syntax(syntax);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_undefined_behavior(undefined);
    env.set_recursion_limit(MAX_SCOPES);
    env.set_fuel(Some(FUEL));
    python::install(&mut env);
    let added =
        guarded(|| env.add_template_owned(NAME, prepared).map_err(|error| source::syntax_error(&error)));
    added?;
    link_check(&env)?;
    Ok(env)
}

/// Links once, so that what linking refuses is known when the template is loaded.
fn link_check(env: &Environment<'static>) -> Result<(), TemplateError> {
    let template = env.get_template(NAME).map_err(|error| source::syntax_error(&error))?;
    let compiled = get_compiled_template(&template);
    compiled.blocks.values().chain([&compiled.instructions]).try_for_each(|code| link::relink(code).map(drop))
}

/// Runs the template of an environment made by [`compile`].
pub fn run(
    env: &Environment<'static>,
    variables: &Variables,
    now: DateTime,
) -> Result<String, TemplateError> {
    let root = root(variables, now)?;
    guarded(|| {
        let template = env.get_template(NAME).map_err(|error| source::syntax_error(&error))?;
        let compiled = get_compiled_template(&template);
        let instructions = link::relink(&compiled.instructions)?;
        let blocks = compiled.blocks.iter().map(|(name, code)| Ok((*name, link::relink(code)?)));
        let blocks = blocks.collect::<Result<_, TemplateError>>()?;
        let mut text = String::new();
        let mut output = make_string_output(&mut text);
        let done = eval(env, &instructions, root, &blocks, &mut output, AutoEscape::None).map(drop);
        drop(output);
        done.map(|()| text).map_err(|error| match failure(&error) {
            TemplateError::Render { line, message } if error.kind() == ErrorKind::UndefinedError => {
                let missing = missing_variables(env, variables);
                TemplateError::Render { line, message: message + &missing }
            }
            other => other,
        })
    })
}

/// Names what a template reads and was not given, for the message of an error that an undefined value caused.
fn missing_variables(env: &Environment<'static>, given: &Variables) -> String {
    let Ok(template) = env.get_template(NAME) else { return String::new() };
    let mut missing: Vec<String> = template.undeclared_variables(false).into_iter().collect();
    missing.retain(|name| !given.contains_key(name) && !env.globals().any(|(known, _)| known == name));
    missing.sort();
    if missing.is_empty() { String::new() } else { format!(" (not given: {})", missing.join(", ")) }
}

/// The variables of a rendering with its bounds among them.
fn root(variables: &Variables, now: DateTime) -> Result<Value, TemplateError> {
    let given: u64 = variables.iter().map(|(name, value)| name.len() as u64 + json_bytes(value)).sum();
    let bytes = BASE_BYTES.saturating_add(given.saturating_mul(BYTES_PER_INPUT_BYTE));
    let mut pairs = Vec::with_capacity(variables.len() + 1);
    for (name, value) in variables {
        pairs.push((Value::from(name.as_str()), from_json(value).map_err(|error| failure(&error))?));
    }
    pairs.push((Value::from(INPUTS), Value::from_object(Inputs { bytes, now })));
    Dict::value(pairs).map_err(|error| failure(&error))
}

fn json_bytes(value: &Json) -> u64 {
    match value {
        Json::String(text) => text.len() as u64,
        Json::Array(items) => items.iter().map(json_bytes).sum::<u64>() + 8,
        Json::Object(members) => {
            members.iter().map(|(name, value)| name.len() as u64 + json_bytes(value)).sum()
        }
        _ => 8,
    }
}

/// minijinja is not written for hostile templates (`break` inside `with` ends in an unwrap of nothing), so a panic in
/// it becomes an error. Nothing that it could leave half-changed outlives the call.
fn guarded<T>(work: impl FnOnce() -> Result<T, TemplateError>) -> Result<T, TemplateError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(TemplateError::Render {
            line: 1,
            message: "the template engine failed on this template".to_owned(),
        })
    })
}

/// Sorts an error of minijinja into what a caller can do about it.
fn failure(error: &minijinja::Error) -> TemplateError {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    let mut innermost = error;
    while let Some(current) = cause {
        if let Some(Raised(message)) = current.downcast_ref() {
            let line = innermost.line().or(error.line()).unwrap_or(1);
            return TemplateError::Raised { line, message: message.clone() };
        }
        if let Some(Exhausted(reason)) = current.downcast_ref() {
            return TemplateError::TooExpensive(reason.clone());
        }
        if let Some(inner) = current.downcast_ref::<minijinja::Error>() {
            innermost = inner;
        }
        cause = current.source();
    }
    let detail = innermost.detail().unwrap_or_default();
    if innermost.kind() == ErrorKind::OutOfFuel {
        return TemplateError::TooExpensive(format!("it takes more than {FUEL} steps"));
    }
    if detail.contains("recursion limit exceeded") {
        return TemplateError::TooExpensive("its macros or loops call each other too deeply".to_owned());
    }
    let message = if detail.is_empty() { innermost.kind().to_string() } else { detail.to_owned() };
    TemplateError::Render { line: innermost.line().or(error.line()).unwrap_or(1), message }
}
