//! The vocabulary of a Hugging Face folder in GGUF's form.
//!
//! tokenizer.model is taken as it is; from tokenizer.json tokens, merges or scores are derived. GGUF names
//! the rule that splits words instead of storing it, so the candidates are tried: only a vocabulary that
//! encodes a text of many scripts like the folder's own tokenizer is written. Source of the keys: llama.cpp's
//! `conversion/base.py`.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value;

use super::super::files::ModelFiles;
use super::super::{hf, tokenizer, tokenizer_files};
use super::head::GgufHead;
use crate::text::{Encode, TokenKind, Tokenizer, VocabSpec, pre_tokenizer_candidates};
use llmctl_base::error::{LoadError, LoadResult};

/// Text that tells the rules of published tokenizers apart.
const PROBE: &str = "I'LL say it's 12345 x=1; naïve\r\n\t  résumé 漢字かな 한글 \u{301}a🦙\n\n\nif (a[0] == 'b'):\n        return 3.14159 # HelloWorld's\n    Привет, мир! أهلا 1 23 456   end  \u{2026}\u{201c}q\u{201d} camelCase HTTPServer don't WE'VE \u{0e01}\u{0e32} <tag/> a_b-c //x\n";

/// Writes the vocabulary, the special tokens and the chat templates.
///
/// # Errors
/// [`LoadError::Tokenizer`] for a tokenizer that GGUF cannot express.
pub(super) fn write(head: &mut GgufHead, files: &ModelFiles, folder: &Path, rows: usize) -> LoadResult<()> {
    let reference = files.tokenizer()?;
    let mut spec = vocabulary(folder, &reference, rows)?;
    spec.bos = reference.bos().filter(|&id| (id as usize) < rows);
    spec.eos = reference.eos().filter(|&id| (id as usize) < rows);
    write_spec(head, &spec);
    write_ends(head, files, &reference, &spec)?;
    if let Some(pad) = padding(folder, &reference)?.filter(|&id| (id as usize) < rows) {
        head.set("tokenizer.ggml.padding_token_id", pad);
    }
    let templates = files.chat_templates()?;
    if let Some(template) = &templates.default {
        head.set("tokenizer.chat_template", template.as_str());
    }
    for (name, template) in &templates.others {
        head.set(format!("tokenizer.chat_template.{name}"), template.as_str());
    }
    Ok(())
}

/// Returns a vocabulary that encodes like the folder's tokenizer.
fn vocabulary(folder: &Path, reference: &Tokenizer, rows: usize) -> LoadResult<VocabSpec> {
    let json = hf::optional_json(&folder.join("tokenizer.json"))?;
    let mut candidates = Vec::new();
    // A model of pieces that llmctl does not run may stand beside a tokenizer.json.
    let listed = tokenizer_files::vocab_spec(folder, &tokenizer::hf_settings(folder)?);
    candidates.extend(if json.is_some() { listed.ok().flatten() } else { listed? });
    if let Some(json) = &json {
        candidates.extend(json_candidates(json, folder)?);
    }
    let adds = |special: Option<u32>, at_start: bool| {
        let (with, without) = (encoded(reference, "a", true), encoded(reference, "a", false));
        let edge = if at_start { with.first() } else { with.last() };
        special.is_some() && edge.copied() == special && with.len() > without.len()
    };
    let (adds_bos, adds_eos) = (adds(reference.bos(), true), adds(reference.eos(), false));
    for mut spec in candidates {
        fit_rows(&mut spec, rows);
        (spec.bos, spec.eos) = (reference.bos(), reference.eos());
        (spec.add_bos, spec.add_eos) = (Some(adds_bos), Some(adds_eos));
        if is_equal(reference, &spec) {
            return Ok(spec);
        }
    }
    Err(LoadError::Tokenizer(format!(
        "{}: no vocabulary that GGUF can store encodes texts like this folder's tokenizer; llmctl runs the folder itself",
        folder.display()
    )))
}

fn encoded(tokenizer: &Tokenizer, text: &str, add_special: bool) -> Vec<u32> {
    tokenizer.encode(text, Encode { add_special, parse_special: true }).unwrap_or_default()
}

/// Returns whether both encode the probe alike.
fn is_equal(reference: &Tokenizer, spec: &VocabSpec) -> bool {
    let Ok(candidate) = Tokenizer::from_vocab(spec) else { return false };
    let texts = PROBE.split_inclusive('\n').chain([PROBE, ""]);
    texts.into_iter().all(|text| encoded(reference, text, true) == encoded(&candidate, text, true))
}

/// Makes the lists as long as the embedding table, which GGUF requires: holes at the end, or a cut.
fn fit_rows(spec: &mut VocabSpec, rows: usize) {
    let has_scores = spec.scores.len() == spec.tokens.len();
    for id in spec.tokens.len()..rows {
        spec.tokens.push(format!("[PAD{id}]"));
        spec.kinds.push(TokenKind::Unused);
        if has_scores {
            spec.scores.push(-10_000.0);
        }
    }
    spec.tokens.truncate(rows);
    spec.kinds.truncate(rows);
    spec.scores.truncate(rows);
}

/// Lists the vocabularies that a tokenizer.json may mean, the most likely first.
fn json_candidates(json: &Value, folder: &Path) -> LoadResult<Vec<VocabSpec>> {
    let error = |message: &str| {
        LoadError::Tokenizer(format!("{}: {message}", folder.join("tokenizer.json").display()))
    };
    let model = &json["model"];
    if model["merges"].as_array().is_none() {
        return Err(error("only BPE vocabularies can be written as GGUF"));
    }
    let base = tokens_of(json, folder)?.ok_or_else(|| error("key \"model.vocab\": is not a vocabulary"))?;
    let merges = merges_of(model).ok_or_else(|| error("key \"model.merges\": is not a list of pairs"))?;
    if model["byte_fallback"].as_bool() == Some(true) {
        return Ok(scored(base, &merges));
    }
    let merges: Vec<String> = merges.iter().map(|[left, right]| format!("{left} {right}")).collect();
    let named = |pre: &'static str| VocabSpec {
        model: "gpt2".to_owned(),
        pre: Some(pre.to_owned()),
        merges: merges.clone(),
        ..base.clone()
    };
    Ok(pre_tokenizer_candidates(&json["pre_tokenizer"]).into_iter().map(named).collect())
}

/// Reads tokens and their kinds by id.
fn tokens_of(json: &Value, folder: &Path) -> LoadResult<Option<VocabSpec>> {
    let mut texts: HashMap<u32, (String, TokenKind)> = HashMap::new();
    let Some(vocab) = json["model"]["vocab"].as_object() else { return Ok(None) };
    let id_of = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok());
    for (text, id) in vocab {
        let Some(id) = id_of(id) else { return Ok(None) };
        let is_byte = text.len() == 6 && text.starts_with("<0x") && text.ends_with('>');
        texts.insert(id, (text.clone(), if is_byte { TokenKind::Byte } else { TokenKind::Normal }));
    }
    let unknown = json["model"]["unk_token"].as_str();
    let kind = |text: &str, is_special: bool| match is_special {
        _ if Some(text) == unknown => TokenKind::Unknown,
        true => TokenKind::Control,
        false => TokenKind::UserDefined,
    };
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        if let (Some(id), Some(text)) = (id_of(&token["id"]), token["content"].as_str()) {
            let is_special = token["special"].as_bool().unwrap_or(false);
            texts.insert(id, (text.to_owned(), kind(text, is_special)));
        }
    }
    for (id, token) in tokenizer::hf_settings(folder)?.added {
        texts.entry(id).or_insert_with(|| (token.content.clone(), kind(&token.content, token.special)));
    }
    let mut spec = VocabSpec::default();
    let size = texts.keys().max().map_or(0, |id| id + 1);
    // Ids far beyond the vocabulary mean a damaged file.
    if size as usize > 2 * texts.len() + (1 << 20) {
        return Ok(None);
    }
    for id in 0..size {
        let (text, kind) = texts.remove(&id).unwrap_or_else(|| (format!("[PAD{id}]"), TokenKind::Unused));
        if kind == TokenKind::Unknown {
            spec.unk = Some(id);
        }
        spec.tokens.push(text);
        spec.kinds.push(kind);
    }
    Ok(Some(spec))
}

/// Reads merges, each a pair or a text with a space between.
fn merges_of(model: &Value) -> Option<Vec<[String; 2]>> {
    let pair = |merge: &Value| match merge {
        Value::String(text) => text.split_once(' ').map(|(left, right)| [left.to_owned(), right.to_owned()]),
        Value::Array(parts) => match &parts[..] {
            [Value::String(left), Value::String(right)] => Some([left.clone(), right.clone()]),
            _ => None,
        },
        _ => None,
    };
    model["merges"].as_array()?.iter().map(pair).collect()
}

/// Returns SentencePiece vocabularies whose scores order merges as the list does. They differ in the space before a
/// text.
fn scored(base: VocabSpec, merges: &[[String; 2]]) -> Vec<VocabSpec> {
    let mut first: HashMap<String, usize> = HashMap::new();
    for (rank, [left, right]) in merges.iter().enumerate() {
        first.entry(format!("{left}{right}")).or_insert(rank);
    }
    let score = |text: &String| first.get(text).map_or(0.0, |&rank| -(rank as f32));
    let scores: Vec<f32> = base.tokens.iter().map(score).collect();
    let spec = |add_space_prefix| VocabSpec {
        model: "llama".to_owned(),
        pre: Some("default".to_owned()),
        scores: scores.clone(),
        add_space_prefix: Some(add_space_prefix),
        ..base.clone()
    };
    vec![spec(true), spec(false)]
}

fn write_spec(head: &mut GgufHead, spec: &VocabSpec) {
    const PREFIX: &str = "tokenizer.ggml";
    head.set(format!("{PREFIX}.model"), spec.model.as_str());
    if let Some(pre) = &spec.pre {
        head.set(format!("{PREFIX}.pre"), pre.as_str());
    }
    head.set(format!("{PREFIX}.tokens"), &spec.tokens[..]);
    if !spec.scores.is_empty() {
        head.set(format!("{PREFIX}.scores"), &spec.scores[..]);
    }
    let kinds: Vec<i32> = spec.kinds.iter().map(|kind| kind.number() as i32).collect();
    head.set(format!("{PREFIX}.token_type"), &kinds[..]);
    if !spec.merges.is_empty() {
        head.set(format!("{PREFIX}.merges"), &spec.merges[..]);
    }
    for (name, id) in [("bos", spec.bos), ("eos", spec.eos), ("unknown", spec.unk)] {
        if let Some(id) = id {
            head.set(format!("{PREFIX}.{name}_token_id"), id);
        }
    }
    for (name, flag) in [
        ("add_bos_token", spec.add_bos),
        ("add_eos_token", spec.add_eos),
        ("add_space_prefix", spec.add_space_prefix),
        ("remove_extra_whitespaces", spec.remove_extra_whitespaces),
    ] {
        if let Some(flag) = flag {
            head.set(format!("{PREFIX}.{name}"), flag);
        }
    }
}

/// Writes the ends of a turn that neither the EOS nor the tokens' texts tell.
fn write_ends(
    head: &mut GgufHead,
    files: &ModelFiles,
    reference: &Tokenizer,
    spec: &VocabSpec,
) -> LoadResult<()> {
    let known = reference.turn_terminators();
    let mut others = files.generation()?.eos_token_ids;
    others.retain(|id| Some(*id) != spec.eos && !known.contains(id) && (*id as usize) < spec.tokens.len());
    others.sort_unstable();
    others.dedup();
    for (key, id) in ["eot", "eom"].into_iter().zip(others) {
        head.set(format!("tokenizer.ggml.{key}_token_id"), id);
    }
    Ok(())
}

/// Returns the id of the padding token.
fn padding(folder: &Path, reference: &Tokenizer) -> LoadResult<Option<u32>> {
    let config = hf::tokenizer_config(folder)?.unwrap_or_default();
    let named = &config["pad_token"];
    let text = named.as_str().or_else(|| named["content"].as_str());
    Ok(text.and_then(|text| reference.token_to_id(text)))
}
