//! A JSON object whose members are taken out one by one, and what was wrong with them.
//!
//! `null` counts as absent, as in OpenAI's API. Reading never fails: it takes note and gives what it has, so that one
//! answer names everything. The notes fall into the groups of the reference server, told in its order: what is not of
//! the right form, what is out of range, what is not honoured.

use axum::http::StatusCode;
use serde_json::{Map, Value};

use crate::serve::error::ApiError;

/// What is wrong with a request so far.
#[derive(Debug, Default)]
pub struct Problems {
    /// Fields that nobody took are passed over.
    lenient: bool,
    schema: Vec<Problem>,
    values: Vec<Problem>,
    unsupported: Vec<Problem>,
}

#[derive(Debug)]
struct Problem {
    param: String,
    message: String,
}

impl Problems {
    pub fn new(lenient: bool) -> Self {
        Self { lenient, ..Self::default() }
    }

    /// A field that is missing or of the wrong type.
    pub fn schema(&mut self, param: impl Into<String>, message: impl Into<String>) {
        self.schema.push(Problem { param: param.into(), message: message.into() });
    }

    /// A value out of its range.
    pub fn value(&mut self, param: impl Into<String>, message: impl Into<String>) {
        self.values.push(Problem { param: param.into(), message: message.into() });
    }

    /// A field, or a value of it, that is not honoured.
    pub fn unsupported(&mut self, param: impl Into<String>, message: impl Into<String>) {
        self.unsupported.push(Problem { param: param.into(), message: message.into() });
    }

    /// The first group with something in it: the form (422), the model, values (400), what is unsupported (400).
    ///
    /// # Errors
    /// All of that group in one message; `param` is the first.
    pub fn check(&self, model: Result<(), ApiError>) -> Result<(), ApiError> {
        let invalid = Some("invalid_value");
        told(StatusCode::UNPROCESSABLE_ENTITY, invalid, &self.schema)?;
        model?;
        told(StatusCode::BAD_REQUEST, invalid, &self.values)?;
        told(StatusCode::BAD_REQUEST, Some("unsupported_parameter"), &self.unsupported)
    }
}

fn told(status: StatusCode, code: Option<&'static str>, problems: &[Problem]) -> Result<(), ApiError> {
    let Some(first) = problems.first() else { return Ok(()) };
    let messages: Vec<&str> = problems.iter().map(|problem| problem.message.as_str()).collect();
    Err(ApiError::new(status, code, messages.join("; ")).param(first.param.clone()))
}

/// The members of one object that are still to be taken.
pub struct Fields<'p> {
    left: Map<String, Value>,
    /// The path of this object in the body; empty for the body itself.
    at: String,
    problems: &'p mut Problems,
}

impl<'p> Fields<'p> {
    pub fn new(object: Map<String, Value>, problems: &'p mut Problems) -> Self {
        Self { left: object, at: String::new(), problems }
    }

    /// The members of an object inside this one, at `at` of it.
    pub fn inside(&mut self, at: &str, object: Map<String, Value>) -> Fields<'_> {
        Fields { left: object, at: self.path(at), problems: self.problems }
    }

    /// The members of an object whose names mean something on their own.
    pub fn on_its_own(&mut self, object: Map<String, Value>) -> Fields<'_> {
        Fields { left: object, at: String::new(), problems: self.problems }
    }

    /// What a member is called in messages.
    pub fn path(&self, name: &str) -> String {
        if self.at.is_empty() { name.to_owned() } else { format!("{}.{name}", self.at) }
    }

    pub fn problems(&mut self) -> &mut Problems {
        self.problems
    }

    /// Notes that a member is missing or of the wrong type: `what` completes "NAME ...".
    pub fn wrong(&mut self, name: &str, what: &str) {
        let path = self.path(name);
        self.problems.schema(path.clone(), format!("{path} {what}"));
    }

    /// Notes that a member is out of its range.
    pub fn out_of_range(&mut self, name: &str, what: &str) {
        let path = self.path(name);
        self.problems.value(path.clone(), format!("{path} {what}"));
    }

    /// Notes that a member is not honoured.
    pub fn unsupported(&mut self, name: &str, what: &str) {
        let path = self.path(name);
        self.problems.unsupported(path.clone(), format!("{path} {what}"));
    }

    pub fn has(&self, name: &str) -> bool {
        self.left.get(name).is_some_and(|value| !value.is_null())
    }

    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.left.shift_remove(name).filter(|value| !value.is_null())
    }

    pub fn text(&mut self, name: &str) -> Option<String> {
        match self.take(name)? {
            Value::String(text) => Some(text),
            _ => self.none(name, "is not a string"),
        }
    }

    pub fn flag(&mut self, name: &str) -> Option<bool> {
        match self.take(name)? {
            Value::Bool(flag) => Some(flag),
            _ => self.none(name, "is neither true nor false"),
        }
    }

    pub fn list(&mut self, name: &str) -> Option<Vec<Value>> {
        match self.take(name)? {
            Value::Array(items) => Some(items),
            _ => self.none(name, "is not an array"),
        }
    }

    pub fn object(&mut self, name: &str) -> Option<Map<String, Value>> {
        match self.take(name)? {
            Value::Object(members) => Some(members),
            _ => self.none(name, "is not an object"),
        }
    }

    pub fn number(&mut self, name: &str) -> Option<f32> {
        match self.take(name)?.as_f64() {
            Some(number) => Some(number as f32),
            None => self.none(name, "is not a number"),
        }
    }

    /// A whole number from 0, also one that is written `16.0`.
    pub fn count(&mut self, name: &str) -> Option<u64> {
        let value = self.take(name)?;
        let Some(number) = value.as_f64().filter(|number| number.fract() == 0.0) else {
            return self.none(name, "is not a whole number");
        };
        let count =
            value.as_u64().or_else(|| (0.0..=i64::MAX as f64).contains(&number).then_some(number as u64));
        match count.filter(|&count| i64::try_from(count).is_ok()) {
            Some(count) => Some(count),
            None => {
                self.out_of_range(name, &format!("is not in [0, {}]", i64::MAX));
                None
            }
        }
    }

    /// As [`Self::count`], of things in memory.
    pub fn size(&mut self, name: &str) -> Option<usize> {
        self.count(name).map(|count| usize::try_from(count).unwrap_or(usize::MAX))
    }

    fn none<T>(&mut self, name: &str, what: &str) -> Option<T> {
        self.wrong(name, what);
        None
    }

    /// A field with one value that asks for nothing; any other is not honoured.
    pub fn only(&mut self, name: &str, inert: &[Value]) {
        let Some(value) = self.take(name) else { return };
        if !inert.contains(&value) {
            let accepted: Vec<String> = inert.iter().map(Value::to_string).collect();
            self.unsupported(
                name,
                &format!("= {} is not supported, only {}", brief(&value), accepted.join(" or ")),
            );
        }
    }

    /// Nothing may be left.
    pub fn end(self) {
        if self.problems.lenient {
            return;
        }
        let left: Vec<String> =
            self.left.iter().filter(|(_, value)| !value.is_null()).map(|(name, _)| self.path(name)).collect();
        for path in left {
            self.problems.unsupported(path.clone(), format!("{path} is not supported"));
        }
    }
}

/// A value as a message shows it.
fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read<T>(
        body: Value,
        lenient: bool,
        read: impl FnOnce(&mut Fields<'_>) -> T,
    ) -> (T, Result<(), ApiError>) {
        let Value::Object(object) = body else { panic!("an object") };
        let mut problems = Problems::new(lenient);
        let mut fields = Fields::new(object, &mut problems);
        let read = read(&mut fields);
        fields.end();
        (read, problems.check(Ok(())))
    }

    fn refusal(body: Value, take: impl FnOnce(&mut Fields<'_>)) -> (u16, String) {
        let (_, checked) = read(body, false, take);
        let error = checked.expect_err("refused");
        (error.status.as_u16(), error.param.expect("a parameter"))
    }

    #[test]
    fn counts_are_whole_numbers_in_any_spelling() {
        let count = |value: Value| read(json!({"x": value}), false, |fields| fields.count("x"));
        for (value, expected) in
            [(json!(0), 0), (json!(7), 7), (json!(16.0), 16), (json!(i64::MAX), i64::MAX as u64)]
        {
            let (count, checked) = count(value);
            assert_eq!((count, checked.is_ok()), (Some(expected), true));
        }
        for (value, status) in [
            (json!(-1), 400),
            (json!(u64::MAX), 400),
            (json!(1e300), 400),
            (json!(1.5), 422),
            (json!("1"), 422),
            (json!(true), 422),
        ] {
            assert_eq!(
                refusal(json!({"x": value}), |fields| _ = fields.count("x")),
                (status, "x".to_owned())
            );
        }
        assert_eq!(count(json!(null)).0, None);
    }

    #[test]
    fn the_first_group_that_is_not_empty_is_told_whole() {
        let body = json!({"a": "x", "b": -1, "c": 1, "d": 2});
        let all = |fields: &mut Fields<'_>| _ = (fields.number("a"), fields.count("b"));
        assert_eq!(refusal(body.clone(), all), (422, "a".to_owned()));
        let values = |fields: &mut Fields<'_>| drop((fields.take("a"), fields.count("b")));
        assert_eq!(refusal(body.clone(), values), (400, "b".to_owned()));
        let (_, checked) = read(body.clone(), false, |fields| drop((fields.take("a"), fields.take("b"))));
        let error = checked.expect_err("two are left");
        assert_eq!(
            (error.code, error.message.as_str()),
            (Some("unsupported_parameter"), "c is not supported; d is not supported")
        );
        assert!(read(body, true, |fields| drop((fields.take("a"), fields.take("b")))).1.is_ok(), "lenient");
    }

    #[test]
    fn a_wrong_model_comes_between_the_form_and_the_values() {
        let mut problems = Problems::default();
        problems.value("x", "x is too large");
        let model = ApiError::new(StatusCode::NOT_FOUND, Some("model_not_found"), "no");
        assert_eq!(problems.check(Err(model.clone())), Err(model.clone()));
        problems.schema("y", "y is not a string");
        assert_eq!(problems.check(Err(model)).expect_err("refused").status, 422);
    }

    #[test]
    fn members_of_members_are_named_by_their_path() {
        let refused = refusal(json!({"m": [{"a": {"b": 1}}]}), |fields| {
            let items = fields.list("m").expect("a list");
            let Value::Object(item) = items[0].clone() else { panic!("an object") };
            let mut inner = fields.inside("m[0]", item);
            let a = inner.object("a").expect("an object");
            inner.inside("a", a).end();
        });
        assert_eq!(refused, (400, "m[0].a.b".to_owned()));
    }
}
