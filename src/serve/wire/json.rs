//! JSON text to an object, as every door reads it: what two readers could understand differently is
//! refused by name.
//!
//! A name that an object gives twice means its first value to one reader and its last to another, so
//! neither counts here. A value takes many times the two bytes of its text (`0,`), so there may be only so
//! many. A byte-order mark, which some editors and shells put before a text, says nothing and is passed
//! over. Half of a character that UTF-16 writes as two, which JavaScript cuts off and escapes (`\ud83d`),
//! becomes U+FFFD.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use llmctl_models::text::without_lone_surrogates;

/// Values in one text: more token ids than any context holds.
const MAX_VALUES: usize = 1 << 21;

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// # Errors
/// A sentence about what `what` is instead, with its line and column.
pub fn object(text: &[u8], what: &str) -> Result<Map<String, Value>, String> {
    let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text);
    let text = without_lone_surrogates(text);
    let mut reader = serde_json::Deserializer::from_slice(&text);
    let num_left = Cell::new(MAX_VALUES);
    let read = Strict { num_left: &num_left }
        .deserialize(&mut reader)
        .and_then(|value| reader.end().map(|()| value));
    match read {
        Ok(Value::Object(members)) => Ok(members),
        Ok(_) => Err(format!("{what} is not a JSON object")),
        Err(error) if error.is_data() => Err(format!("{what}: {error}")),
        Err(error) if error.to_string().starts_with("recursion limit") => {
            Err(format!("{what} is nested too deeply: {error}"))
        }
        Err(error) => Err(format!("{what} is not JSON: {error}")),
    }
}

/// Returns the members of an object that is written out.
pub fn members(object: Value) -> Map<String, Value> {
    match object {
        Value::Object(members) => members,
        _ => unreachable!("callers write an object"),
    }
}

/// Any value, in which no object gives a name twice.
#[derive(Clone, Copy)]
struct Strict<'a> {
    /// Remaining number of values.
    num_left: &'a Cell<usize>,
}

impl<'de> DeserializeSeed<'de> for Strict<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        let num_left = self.num_left.get().checked_sub(1);
        let too_many = || D::Error::custom(format_args!("there are more than {MAX_VALUES} values"));
        self.num_left.set(num_left.ok_or_else(too_many)?);
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(name) = members.next_key::<String>()? {
            if map.contains_key(&name) {
                return Err(A::Error::custom(format_args!("{name:?} is given twice in one object")));
            }
            let value = members.next_value_seed(self)?;
            map.insert(name, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn read(text: &str) -> Result<Value, String> {
        object(text.as_bytes(), "the body").map(Value::Object)
    }

    #[test]
    fn a_name_given_twice_is_named() {
        for text in [r#"{"model": 1, "model": 1}"#, r#"{"a": [{"b": {"model": 1, "c": 0, "model": 2}}]}"#] {
            let message = read(text).expect_err(text);
            assert!(
                message.starts_with("the body: \"model\" is given twice in one object at line 1"),
                "{message}"
            );
        }
        assert_eq!(read(r#"{"a": {"b": 1}, "b": 2}"#), Ok(json!({"a": {"b": 1}, "b": 2})));
    }

    #[test]
    fn a_byte_order_mark_is_passed_over() {
        assert_eq!(read("\u{feff}{\"a\": 1}"), Ok(json!({"a": 1})));
        assert!(read("\u{feff}\u{feff}{}").is_err(), "one is enough");
    }

    #[test]
    fn what_is_no_object_or_no_json_is_told_apart() {
        assert_eq!(read("[1]"), Err("the body is not a JSON object".to_owned()));
        for text in ["", "{", "{} x", "{\"a\": 1e999}", "{\"a\": \"\u{1}\"}"] {
            assert!(read(text).is_err_and(|message| message.contains("is not JSON: ")), "{text:?}");
        }
        let deep = format!("{{\"a\":{}1{}}}", "[".repeat(200), "]".repeat(200));
        assert!(read(&deep).is_err_and(|message| message.starts_with("the body is nested too deeply: ")));
    }

    #[test]
    fn half_a_character_becomes_the_replacement_character() {
        for (text, expected) in [
            (r"\ud83d", "\u{fffd}"),
            (r"\uDE00x\uD83D", "\u{fffd}x\u{fffd}"),
            (r"\ud83d\ud83d\ude00", "\u{fffd}\u{1f600}"),
            (r"\ud83d\n", "\u{fffd}\n"),
            (r"\\ud83d", "\\ud83d"),
            (r"\\\ud83d", "\\\u{fffd}"),
        ] {
            assert_eq!(read(&format!("{{\"a\": \"{text}\"}}")), Ok(json!({"a": expected})), "{text}");
        }
        for text in [r"\ud83", r"\ud8+d", "\\"] {
            assert!(read(&format!("{{\"a\": \"{text}\"}}")).is_err(), "{text}");
        }
    }

    #[test]
    fn there_may_be_only_so_many_values() {
        let list = |count: usize| format!("{{\"a\":[{}0]}}", "0,".repeat(count - 1));
        assert!(read(&list(MAX_VALUES - 2)).is_ok());
        let message = read(&list(MAX_VALUES + 1)).expect_err("too many");
        assert!(message.contains("more than 2097152 values"), "{message}");
    }

    proptest! {
        #[test]
        fn everything_else_reads_as_serde_json_reads_it(text in r#"\{("[abc]":([0-9.e-]{1,6}|true|null|"[a-z\\u0-9]{0,6}"|\[[0-9,]{0,5}\]),?){0,3}\}"#) {
            let plain = serde_json::from_str::<Value>(&text).ok();
            match read(&text) {
                Ok(value) => prop_assert_eq!(Some(value), plain),
                Err(message) => prop_assert!(plain.is_none() || message.contains("twice"), "{}: {}", text, message),
            }
        }
    }
}
