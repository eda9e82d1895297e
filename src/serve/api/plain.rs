//! Special tokens written out in messages: `<|im_end|>` in a user's text ends the user's turn, as it does
//! with other servers, because a chat template makes one text of messages and markup. Where messages come
//! from people who must not write markup, the operator has such messages refused.
//!
//! Every message that a client sends is checked, except the model's own, whose markup is the model's.

use axum::http::StatusCode;
use serde_json::Value;

use crate::error::ApiError;
use llmctl_base::Result;
use llmctl_models::text::{Encode, Tokenizer};
use llmctl_template::{Content, Conversation, Message, Role};

/// # Errors
/// 400 that names the token, or says that a text is longer than the context.
pub fn check(
    tokenizer: &Tokenizer,
    context_tokens: usize,
    conversation: &Conversation,
) -> std::result::Result<(), ApiError> {
    let Conversation { messages, tools, documents, kwargs } = conversation;
    let (mut of_tools, mut others) = (Vec::new(), Vec::new());
    tools.iter().for_each(|tool| gather(tool, &mut of_tools));
    documents.iter().chain(kwargs.values()).for_each(|value| gather(value, &mut others));
    let of_message = |(index, message)| (format!("messages[{index}]"), texts_of(message));
    let rest = [("tools", of_tools), ("chat_template_kwargs", others)];
    let all = messages.iter().enumerate().map(of_message);
    for (param, texts) in all.chain(rest.map(|(param, texts)| (param.to_owned(), texts))) {
        for text in texts {
            if let Some(id) = special_in(tokenizer, context_tokens, text)? {
                return Err(refusal(tokenizer.id_to_token(id).unwrap_or_default(), param));
            }
        }
    }
    Ok(())
}

fn texts_of(message: &Message) -> Vec<&str> {
    let mut texts = vec![message.role.as_str()];
    texts.extend(message.name.as_deref());
    match &message.content {
        _ if message.role == Role::Assistant => {}
        None => {}
        Some(Content::Text(text)) => texts.push(text),
        Some(Content::Parts(parts)) => parts.iter().for_each(|part| gather(part, &mut texts)),
    }
    texts
}

fn gather<'a>(value: &'a Value, texts: &mut Vec<&'a str>) {
    match value {
        Value::String(text) => texts.push(text),
        Value::Array(items) => items.iter().for_each(|item| gather(item, texts)),
        Value::Object(members) => members.iter().for_each(|(name, value)| {
            texts.push(name);
            gather(value, texts);
        }),
        _ => {}
    }
}

fn refusal(token: &str, param: String) -> ApiError {
    let message = format!(
        "{param}: the text holds {token:?}, a special token of the model, and this server refuses those \
         (--refuse-special-tokens)"
    );
    ApiError::new(StatusCode::BAD_REQUEST, Some("special_token_in_text"), message).param(param)
}

/// The first special token that a prompt with this text would hold.
fn special_in(tokenizer: &Tokenizer, context_tokens: usize, text: &str) -> Result<Option<u32>> {
    let options = Encode { add_special: false, parse_special: true };
    let ids = tokenizer.encode_prompt(text, options, context_tokens)?;
    Ok(ids.into_iter().find(|&id| tokenizer.is_special(id)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use llmctl_models::text::{TokenKind, VocabSpec};
    use llmctl_template::ToolCall;

    fn tokenizer() -> Tokenizer {
        let mut tokens = vec!["<unk>".to_owned(), "<|end|>".to_owned()];
        tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
        let kinds = [TokenKind::Unknown, TokenKind::Control].into_iter();
        let kinds = kinds.chain(std::iter::repeat_n(TokenKind::Byte, 256)).collect();
        let scores = vec![0.0; tokens.len()];
        let model = "llama".to_owned();
        Tokenizer::from_vocab(&VocabSpec { model, tokens, kinds, scores, ..VocabSpec::default() })
            .expect("a vocabulary")
    }

    #[test]
    fn whatever_a_client_writes_is_looked_at() {
        let tokenizer = tokenizer();
        let of = |messages: Vec<Message>| Conversation { messages, ..Conversation::default() };
        let bad = "a<|end|>b";
        let parts = |text: &str| Content::Parts(vec![json!({"type": "text", "text": text})]);
        for (conversation, param) in [
            (of(vec![Message::user("fine"), Message::user(bad)]), "messages[1]"),
            (of(vec![Message::system(bad)]), "messages[0]"),
            (of(vec![Message { content: Some(parts(bad)), ..Message::user("") }]), "messages[0]"),
            (of(vec![Message { name: Some(bad.to_owned()), ..Message::user("") }]), "messages[0]"),
            (Conversation { tools: vec![json!({"function": {"name": bad}})], ..of(vec![]) }, "tools"),
            (
                Conversation {
                    kwargs: json!({"x": [bad]}).as_object().expect("an object").clone(),
                    ..of(vec![])
                },
                "chat_template_kwargs",
            ),
        ] {
            let refused = check(&tokenizer, 1000, &conversation).expect_err(param);
            assert_eq!(
                (refused.code, refused.param.as_deref()),
                (Some("special_token_in_text"), Some(param))
            );
            assert!(refused.message.contains("<|end|>"), "{refused:?}");
        }
    }

    #[test]
    fn what_the_model_said_and_what_only_looks_like_a_token_is_fine() {
        let said = Message {
            reasoning: Some("<|end|>".to_owned()),
            tool_calls: vec![ToolCall { id: None, name: "f".to_owned(), arguments: json!("<|end|>") }],
            ..Message::new(Role::Assistant, "<|end|>")
        };
        let messages = vec![Message::user("<|end| > <|END|> <unknown>"), said];
        assert_eq!(check(&tokenizer(), 1000, &Conversation { messages, ..Conversation::default() }), Ok(()));
    }
}
