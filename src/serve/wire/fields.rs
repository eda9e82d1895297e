//! A JSON object whose members are taken out one by one, and what was wrong with them.
//!
//! `null` counts as absent, as in OpenAI's API. Reading never fails: it takes note and gives what it has, so
//! that one answer names everything. The notes fall into the groups of the reference server, told in its
//! order: what is not of the right form, what is out of range, what is not honoured.

use std::collections::BTreeSet;

use axum::http::StatusCode;
use serde_json::{Map, Value};

use super::hints::hints;
use super::image_files::{ImageReading, Images};
use super::record::{self, FieldType};
use crate::error::ApiError;

/// Problems of one kind that an answer names; a body can have a million.
const MAX_TOLD: usize = 8;

/// Bytes of a name or value that an answer repeats.
const MAX_SHOWN: usize = 120;

/// Names of fields that an answer names as passed over, and those that are counted.
const MAX_IGNORED: usize = 32;
const MAX_HELD: usize = 1024;

/// Errors of a request so far, and fields without effect.
#[derive(Debug, Default)]
pub struct Problems {
    /// `--lenient`: unread fields are passed over. `None` where there is no such switch.
    lenient: Option<bool>,
    schema: ProblemGroup,
    values: ProblemGroup,
    unsupported: ProblemGroup,
    /// Refusal of the model that the body names.
    model: Option<ApiError>,
    /// Some of those would be passed over by a lenient reader.
    is_optional: bool,
    ignored: BTreeSet<String>,
    notices: Vec<String>,
    images: Images,
}

/// Problems of one kind: the first few whole, the others counted.
#[derive(Debug, Default)]
struct ProblemGroup {
    first: Vec<Problem>,
    num_more: usize,
}

#[derive(Debug)]
struct Problem {
    param: String,
    message: String,
}

impl ProblemGroup {
    fn add(&mut self, param: impl Into<String>, message: impl Into<String>) {
        match self.first.len() < MAX_TOLD {
            true => self.first.push(Problem { param: param.into(), message: message.into() }),
            false => self.num_more += 1,
        }
    }

    fn told(&self, status: StatusCode, code: &'static str, advice: &str) -> Result<(), ApiError> {
        let Some(first) = self.first.first() else { return Ok(()) };
        let messages: Vec<&str> = self.first.iter().map(|problem| problem.message.as_str()).collect();
        let mut message = messages.join("; ");
        if self.num_more > 0 {
            message.push_str(&format!("; and {} more", self.num_more));
        }
        message.push_str(advice);
        Err(ApiError::new(status, Some(code), message).param(first.param.clone()))
    }
}

impl Problems {
    pub fn new(lenient: bool) -> Self {
        Self { lenient: Some(lenient), ..Self::default() }
    }

    /// Reads images as `usage` says.
    #[must_use]
    pub fn with_images(mut self, usage: ImageReading) -> Self {
        self.images.usage = usage;
        self
    }

    /// Reads a body whole.
    ///
    /// # Errors
    /// Those of [`Self::check`].
    pub fn read<T>(
        mut self,
        body: Map<String, Value>,
        read: impl FnOnce(&mut Fields<'_>) -> T,
    ) -> Result<(T, Self), ApiError> {
        let mut fields = Fields::new(body, &mut self);
        let read = read(&mut fields);
        fields.end();
        self.check()?;
        Ok((read, self))
    }

    /// Returns the images so far.
    pub fn images(&mut self) -> &mut Images {
        &mut self.images
    }

    /// A field that is missing or of the wrong type.
    pub fn schema(&mut self, param: impl Into<String>, message: impl Into<String>) {
        self.schema.add(param, message);
    }

    /// A value out of its range.
    pub fn value(&mut self, param: impl Into<String>, message: impl Into<String>) {
        self.values.add(param, message);
    }

    /// A field, or a value of it, that is not honoured.
    pub fn unsupported(&mut self, param: impl Into<String>, message: impl Into<String>) {
        self.unsupported.add(param, message);
    }

    /// The body names a model that is not here.
    pub fn no_model(&mut self, refusal: ApiError) {
        self.model = Some(refusal);
    }

    /// A field that is taken and has no effect. Places in lists do not count: a field of all messages is noted once.
    pub fn ignored(&mut self, path: &str) {
        if self.ignored.len() < MAX_HELD {
            self.ignored.insert(shown(&without_indices(path)));
        }
    }

    /// Fields that are taken and have no effect, in alphabetical order, and at the end how many more there are.
    pub fn take_ignored(&mut self) -> Vec<String> {
        let mut names: Vec<String> = std::mem::take(&mut self.ignored).into_iter().collect();
        let num_more = names.len().saturating_sub(MAX_IGNORED);
        names.truncate(MAX_IGNORED);
        names.extend((num_more > 0).then(|| format!("and {num_more} more")));
        names
    }

    /// Notes a change that was made to what the body says, in one sentence.
    pub fn notice(&mut self, notice: impl Into<String>) {
        if self.notices.len() < MAX_IGNORED {
            self.notices.push(notice.into());
        }
    }

    /// Returns the changes that were made to what the body says.
    pub fn take_notices(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notices)
    }

    fn is_lenient(&self) -> bool {
        self.lenient == Some(true)
    }

    /// The first group with something in it: the form (422), the model, values (400), what is unsupported (400), images (400).
    ///
    /// # Errors
    /// The first of that group in one message, and how many more there are; `param` is the first.
    pub fn check(&self) -> Result<(), ApiError> {
        self.schema.told(StatusCode::UNPROCESSABLE_ENTITY, "invalid_value", "")?;
        self.model.clone().map_or(Ok(()), Err)?;
        self.values.told(StatusCode::BAD_REQUEST, "invalid_value", "")?;
        let advice = match self.lenient {
            Some(false) if self.is_optional => " (serve --lenient passes over what it does not know)",
            _ => "",
        };
        self.unsupported.told(StatusCode::BAD_REQUEST, "unsupported_parameter", advice)?;
        self.images.check()
    }
}

/// `messages[3].audio` and `messages.3.audio` as `messages[].audio`.
fn without_indices(path: &str) -> String {
    let is_index = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let mut parts = path.split('.');
    let mut path = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match is_index(part) {
            true => path.push_str("[]"),
            false => path.extend([".", part]),
        }
    }
    let mut is_inside = false;
    let kept = path.chars().filter(|c| {
        is_inside = *c == '[' || (is_inside && *c != ']');
        !is_inside || *c == '['
    });
    kept.collect()
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

    /// As [`Self::inside`], of a value that must be an object.
    pub fn within(&mut self, at: &str, value: Value) -> Option<Fields<'_>> {
        match value {
            Value::Object(members) => Some(self.inside(at, members)),
            _ => self.none(at, "is not an object"),
        }
    }

    /// The object that a member holds.
    pub fn nested(&mut self, name: &str) -> Option<Fields<'_>> {
        let members = self.object(name)?;
        Some(self.inside(name, members))
    }

    /// The members of an object whose names mean something on their own.
    pub fn on_its_own(&mut self, object: Map<String, Value>) -> Fields<'_> {
        Fields { left: object, at: String::new(), problems: self.problems }
    }

    /// Returns a member's name for messages.
    pub fn path(&self, name: &str) -> String {
        let name = shown(name);
        if self.at.is_empty() { name } else { format!("{}.{name}", self.at) }
    }

    /// Returns the path of a member in every body, wherever in a list it stands.
    fn recorded_path(&self, name: &str) -> String {
        without_indices(&self.path(name))
    }

    pub fn problems(&mut self) -> &mut Problems {
        self.problems
    }

    /// Notes that a member is of the wrong type: `what` completes "NAME ...".
    pub fn wrong(&mut self, name: &str, what: &str) {
        let path = self.path(name);
        self.problems.schema(path.clone(), format!("{path} {what}"));
    }

    /// Notes that a required member is missing.
    pub fn missing(&mut self, name: &str) {
        record::note_missing(|| self.recorded_path(name));
        self.wrong(name, "is missing");
    }

    /// Notes that a member is missing, if it is.
    pub fn require(&mut self, name: &str) {
        if !self.has(name) {
            self.missing(name);
        }
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

    /// Notes that a member is taken and has no effect.
    pub fn ignored(&mut self, name: &str) {
        let path = self.path(name);
        self.problems.ignored(&path);
    }

    /// A member on which no answer depends, whatever it is.
    pub fn hint(&mut self, name: &str) {
        if self.take_as(name, FieldType::Hint).is_some() {
            self.ignored(name);
        }
    }

    pub fn has(&self, name: &str) -> bool {
        self.left.get(name).is_some_and(|value| !value.is_null())
    }

    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.take_as(name, FieldType::Any)
    }

    fn take_as(&mut self, name: &str, kind: FieldType) -> Option<Value> {
        record::note(|| (self.recorded_path(name), kind));
        self.left.shift_remove(name).filter(|value| !value.is_null())
    }

    /// Puts a member in, for a reader of another form of the same field.
    pub fn put(&mut self, name: &str, value: Value) {
        self.left.insert(name.to_owned(), value);
    }

    /// The name under which one of several spellings of the same field is given, the first of them counts. Another one that says
    /// something else is a contradiction.
    pub fn spelled(&mut self, names: &[&'static str]) -> &'static str {
        for other in &names[1..] {
            record::note(|| (self.recorded_path(other), FieldType::SameAs(names[0])));
        }
        let mut given = names.iter().filter(|name| self.has(name));
        let Some(first) = given.next() else { return names[0] };
        let others: Vec<&str> = given.copied().collect();
        for other in others {
            let value = self.take(other);
            if value.as_ref() != self.left.get(*first) {
                self.out_of_range(other, &format!("and {first} are two names of one field, with two values"));
            }
        }
        first
    }

    pub fn text(&mut self, name: &str) -> Option<String> {
        match self.take_as(name, FieldType::Text)? {
            Value::String(text) => Some(text),
            _ => self.none(name, "is not a string"),
        }
    }

    pub fn flag(&mut self, name: &str) -> Option<bool> {
        match self.take_as(name, FieldType::Flag)? {
            Value::Bool(flag) => Some(flag),
            _ => self.none(name, "is neither true nor false"),
        }
    }

    pub fn list(&mut self, name: &str) -> Option<Vec<Value>> {
        match self.take_as(name, FieldType::List)? {
            Value::Array(items) => Some(items),
            _ => self.none(name, "is not an array"),
        }
    }

    pub fn object(&mut self, name: &str) -> Option<Map<String, Value>> {
        match self.take_as(name, FieldType::Object)? {
            Value::Object(members) => Some(members),
            _ => self.none(name, "is not an object"),
        }
    }

    pub fn number(&mut self, name: &str) -> Option<f32> {
        match self.take_as(name, FieldType::Number)?.as_f64() {
            Some(number) => Some(number as f32),
            None => self.none(name, "is not a number"),
        }
    }

    /// Returns true if a member is a list.
    pub fn is_list(&self, name: &str) -> bool {
        self.left.get(name).is_some_and(Value::is_array)
    }

    pub fn is_text(&self, name: &str) -> bool {
        self.left.get(name).is_some_and(Value::is_string)
    }

    pub fn is_number(&self, name: &str, number: f64) -> bool {
        self.left.get(name).and_then(Value::as_f64) == Some(number)
    }

    /// As [`Self::count`], where other servers write -1 for what is left out.
    pub fn count_or_off(&mut self, name: &str) -> Option<u64> {
        record::note(|| (self.recorded_path(name), FieldType::CountOrOff));
        if self.is_number(name, -1.0) {
            self.take(name);
        }
        self.count(name)
    }

    /// A seed: a whole number, of a negative one the lower 63 bits. -1 is none.
    pub fn seed(&mut self, name: &str) -> Option<u64> {
        record::note(|| (self.recorded_path(name), FieldType::Whole));
        if let Some(negative @ ..-1) = self.left.get(name).and_then(Value::as_i64) {
            self.put(name, Value::from(negative & i64::MAX));
        }
        self.count_or_off(name)
    }

    /// As [`Self::count_or_off`], of things in memory.
    pub fn size_or_off(&mut self, name: &str) -> Option<usize> {
        self.count_or_off(name).map(|count| usize::try_from(count).unwrap_or(usize::MAX))
    }

    /// A whole number from 0, also one that is written `16.0`.
    pub fn count(&mut self, name: &str) -> Option<u64> {
        let value = self.take_as(name, FieldType::Count)?;
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

    /// As [`Self::wrong`]; a reader that has no value returns this.
    pub fn none<T>(&mut self, name: &str, what: &str) -> Option<T> {
        self.wrong(name, what);
        None
    }

    /// A field with values that ask for nothing; any other is not honoured.
    pub fn only(&mut self, name: &str, inert: &[Value]) {
        record::note(|| (self.recorded_path(name), FieldType::Only(inert.to_vec())));
        let Some(value) = self.take(name) else { return };
        let same = |other: &Value| *other == value || (other.is_number() && other.as_f64() == value.as_f64());
        if inert.iter().any(same) {
            return;
        }
        if self.problems.is_lenient() {
            return self.ignored(name);
        }
        self.problems.is_optional = true;
        let accepted: Vec<String> = inert.iter().map(Value::to_string).collect();
        let what = format!("= {} is not supported, only {}", brief(&value), accepted.join(" or "));
        self.unsupported(name, &what);
    }

    /// Reports what is left as without effect, in objects whose members differ between versions of an API.
    pub fn ignore_rest(mut self) {
        for (name, value) in std::mem::take(&mut self.left) {
            if !value.is_null() {
                self.ignored(&name);
            }
        }
    }

    /// Ends the object: members that are left must be hints, unless the reader is lenient.
    pub fn end(self) {
        let Self { left, at, problems } = self;
        if at.is_empty() {
            record::note_hints(hints());
        }
        let path = |name: &str| if at.is_empty() { shown(name) } else { format!("{at}.{}", shown(name)) };
        for (name, _) in left.iter().filter(|(_, value)| !value.is_null()) {
            let path = path(name);
            match problems.is_lenient() || (at.is_empty() && hints().any(|hint| hint == name)) {
                true => problems.ignored(&path),
                false => {
                    problems.is_optional = true;
                    problems.unsupported(path.clone(), format!("{path} is not supported"));
                }
            }
        }
    }
}

/// A value as a message shows it.
pub fn brief(value: &Value) -> String {
    shown(&value.to_string())
}

/// Text of a client as a message repeats it: the beginning.
pub fn shown(text: &str) -> String {
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
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
        (read, problems.check())
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
        let advice = "(serve --lenient passes over what it does not know)";
        assert_eq!(
            (error.code, error.message),
            (Some("unsupported_parameter"), format!("c is not supported; d is not supported {advice}"))
        );
        assert!(read(body, true, |fields| drop((fields.take("a"), fields.take("b")))).1.is_ok(), "lenient");
    }

    #[test]
    fn a_wrong_model_comes_between_the_form_and_the_values() {
        let mut problems = Problems::default();
        problems.value("x", "x is too large");
        let model = ApiError::new(StatusCode::NOT_FOUND, Some("model_not_found"), "no");
        problems.no_model(model.clone());
        assert_eq!(problems.check(), Err(model));
        problems.schema("y", "y is not a string");
        assert_eq!(problems.check().expect_err("refused").status, 422);
    }

    #[test]
    fn names_beyond_the_limit_are_counted() {
        let mut problems = Problems::default();
        (0..40).for_each(|n| problems.ignored(&format!("f{n}")));
        let names = problems.take_ignored();
        assert_eq!((names.len(), names.last().map(String::as_str)), (33, Some("and 8 more")));
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
