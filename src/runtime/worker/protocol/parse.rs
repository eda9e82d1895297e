//! Parses a line to the worker. A refusal carries the call's id, if it can be read, and names the wrong
//! field.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::{ErrorCode, Id, MAX_ID_BYTES, OPS, Op, Refusal, WorkerCall};

impl WorkerCall {
    /// Parses a line without its line feed.
    ///
    /// # Errors
    /// A [`Refusal`], with the call's id if it can be read.
    pub fn parse(line: &[u8]) -> Result<WorkerCall, Refusal> {
        let refuse = |id, code, message| Refusal { id, code, message };
        let text = String::from_utf8_lossy(line);
        let mut fields: Map<String, Value> = serde_json::from_str(&text).map_err(|error| {
            refuse(None, ErrorCode::InvalidRequest, format!("not a JSON object: {error}"))
        })?;
        let id = match fields.shift_remove("id") {
            None => None,
            Some(id) => {
                Some(read_id(id).map_err(|message| refuse(None, ErrorCode::InvalidRequest, message))?)
            }
        };
        let name = match fields.shift_remove("op") {
            None => "generate".to_owned(),
            Some(Value::String(name)) => name,
            Some(other) => {
                return Err(refuse(id, ErrorCode::InvalidRequest, format!("op: {other} is not a string")));
            }
        };
        match read_op(&name, fields) {
            Ok(Some(op)) => Ok(WorkerCall { id, op }),
            Ok(None) => {
                let known = OPS.join(", ");
                Err(refuse(id, ErrorCode::UnknownOp, format!("unknown op {name:?} (known: {known})")))
            }
            Err(message) => Err(refuse(id, ErrorCode::InvalidRequest, message)),
        }
    }
}

fn read_id(id: Value) -> Result<Id, String> {
    match serde_json::from_value(id) {
        Ok(Id::Text(text)) if text.len() > MAX_ID_BYTES => Err(format!("id: more than {MAX_ID_BYTES} bytes")),
        Ok(id) => Ok(id),
        Err(_) => Err("id: neither a string nor a whole number".to_owned()),
    }
}

/// Parses the arguments of operation `name`; `None` if it is unknown.
fn read_op(name: &str, fields: Map<String, Value>) -> Result<Option<Op>, String> {
    let op = match name {
        "generate" => Op::Generate(Box::new(read(fields)?)),
        "image" => Op::Image(read(fields)?),
        "open" => Op::Open(read(fields)?),
        "close" => Op::Close(read(fields)?),
        "reset" => Op::Reset(read(fields)?),
        "fork" => Op::Fork(read(fields)?),
        "restore" => Op::Restore(read(fields)?),
        "inspect" => Op::Inspect(read(fields)?),
        "sessions" => Op::Sessions(read(fields)?),
        "cancel" => Op::Cancel(read(fields)?),
        "ping" => Op::Ping(read(fields)?),
        "notices" => Op::Notices(read(fields)?),
        "flush" => Op::Flush(read(fields)?),
        "shutdown" => Op::Shutdown(read(fields)?),
        _ => return Ok(None),
    };
    Ok(Some(op))
}

/// Deserializes the fields. The error names the field that is wrong.
fn read<T: DeserializeOwned>(fields: Map<String, Value>) -> Result<T, String> {
    let names: Vec<String> = fields.keys().cloned().collect();
    let values = fields.clone();
    serde_json::from_value(Value::Object(fields)).map_err(|error| {
        // serde does not name a field of the wrong type. Deserialize each field alone to find it.
        let is_wrong = |name: &&String| {
            let alone = Map::from_iter([((*name).clone(), values[name.as_str()].clone())]);
            let error = serde_json::from_value::<T>(Value::Object(alone)).err();
            error.is_some_and(|error| is_of_value(&error.to_string()))
        };
        let message = error.to_string();
        match names.iter().find(is_wrong).filter(|_| is_of_value(&message)) {
            Some(name) => format!("{name}: {message}"),
            None => message,
        }
    })
}

/// Returns whether serde's message is about a value, not about a field that is missing or unknown.
fn is_of_value(message: &str) -> bool {
    message.starts_with("invalid ") || message.starts_with("must ")
}
