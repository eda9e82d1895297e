//! Folders with a `tokenizer.model` of SentencePiece: the vocabulary as plain data, without tokenizer.json.
//!
//! The file is a protocol buffer; only the fields that decide ids are read: pieces with score and type, the
//! kind of model, ids of special pieces, and the treatment of spaces. Format: sentencepiece's
//! `sentencepiece_model.proto`. Every length is checked against the file's size before it is used.

use std::path::Path;

use super::hf::optional_json;
use crate::text::{HfSettings, TokenKind, VocabSpec};
use llmctl_base::error::{LoadError, LoadResult};

/// Name of the file.
const FILE: &str = "tokenizer.model";

/// Reads the vocabulary from the content of the folder's file, completed by the tokens of added_tokens.json and
/// tokenizer_config.json.
///
/// # Errors
/// [`LoadError::Malformed`] for a damaged file, [`LoadError::Tokenizer`] for a kind that llmctl does not run.
pub(super) fn vocab_spec(folder: &Path, bytes: &[u8], settings: &HfSettings) -> LoadResult<VocabSpec> {
    let path = folder.join(FILE);
    let malformed = |message: String| LoadError::malformed(&path, "SentencePiece model", message);
    let model = PieceModel::parse(bytes).map_err(malformed)?;
    model.check().map_err(|message| LoadError::Tokenizer(format!("{}: {message}", path.display())))?;
    let mut spec = model.spec();
    let added = added_tokens(folder, settings)?;
    let most = spec.tokens.len() + added.len() + MAX_HOLES;
    for (id, text, is_special) in added {
        let kind = if is_special { TokenKind::Control } else { TokenKind::UserDefined };
        place(&mut spec, id, text, kind, most).map_err(malformed)?;
    }
    let id_of = |text: &Option<String>| {
        let at = spec.tokens.iter().position(|token| Some(token) == text.as_ref());
        at.and_then(|at| u32::try_from(at).ok())
    };
    let (bos, eos) = (id_of(&settings.bos), id_of(&settings.eos));
    spec.bos = bos.or(spec.bos);
    spec.eos = eos.or(spec.eos);
    spec.add_bos = settings.add_bos;
    spec.add_eos = settings.add_eos;
    Ok(spec)
}

/// Most ids without a token below all added ones; more mean a damaged file.
const MAX_HOLES: usize = 1 << 20;

/// Puts an added token at its id, which is below `most`, and holes before it.
fn place(spec: &mut VocabSpec, id: u32, text: String, kind: TokenKind, most: usize) -> Result<(), String> {
    let id = id as usize;
    if id >= most {
        return Err(format!("has {} tokens, but one is added as {id}", spec.tokens.len()));
    }
    for hole in spec.tokens.len()..=id {
        spec.tokens.push(format!("[PAD{hole}]"));
        spec.scores.push(0.0);
        spec.kinds.push(TokenKind::Unused);
    }
    let is_unknown = spec.kinds[id] == TokenKind::Unknown;
    spec.tokens[id] = text;
    spec.kinds[id] = if is_unknown { TokenKind::Unknown } else { kind };
    Ok(())
}

/// Lists the added tokens of both files, with whether each is special; tokenizer_config.json has the last word.
fn added_tokens(folder: &Path, settings: &HfSettings) -> LoadResult<Vec<(u32, String, bool)>> {
    let listed = optional_json(&folder.join("added_tokens.json"))?.unwrap_or_default();
    let mut added: Vec<(u32, String, bool)> = Vec::new();
    for (text, id) in listed.as_object().into_iter().flatten() {
        if let Some(id) = id.as_u64().and_then(|id| u32::try_from(id).ok()) {
            let looks_special = text.starts_with("<|") || text.starts_with('<') && text.ends_with('>');
            added.push((id, text.clone(), looks_special));
        }
    }
    added.sort();
    added.extend(settings.added.iter().map(|(id, token)| (*id, token.content.clone(), token.special)));
    Ok(added)
}

/// The fields of a model that are used.
#[derive(Debug, Default)]
struct PieceModel {
    pieces: Vec<(String, f32, TokenKind)>,
    /// 1 unigram, 2 BPE, 3 words, 4 characters.
    kind: u64,
    bos: Option<u32>,
    eos: Option<u32>,
    has_char_map: bool,
    adds_dummy_prefix: bool,
    removes_extra_whitespaces: bool,
}

/// One field of a message.
enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

impl Field<'_> {
    /// Returns an id, which is absent if negative.
    fn id(&self) -> Option<u32> {
        match self {
            Field::Number(number) => i32::try_from(*number as i64).ok().and_then(|id| u32::try_from(id).ok()),
            Field::Bytes(_) => None,
        }
    }

    fn flag(&self) -> bool {
        matches!(self, Field::Number(1..))
    }
}

impl PieceModel {
    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let mut model = PieceModel {
            kind: 1,
            bos: Some(1),
            eos: Some(2),
            adds_dummy_prefix: true,
            removes_extra_whitespaces: true,
            ..PieceModel::default()
        };
        each_field(bytes, &mut |number, field| {
            match (number, field) {
                (1, Field::Bytes(piece)) => model.add_piece(piece)?,
                (2, Field::Bytes(trainer)) => each_field(trainer, &mut |number, field| {
                    match (number, &field) {
                        (3, Field::Number(kind)) => model.kind = *kind,
                        (41, _) => model.bos = field.id(),
                        (42, _) => model.eos = field.id(),
                        _ => {}
                    }
                    Ok(())
                })?,
                (3, Field::Bytes(normalizer)) => each_field(normalizer, &mut |number, field| {
                    match (number, &field) {
                        (2, Field::Bytes(map)) => model.has_char_map = !map.is_empty(),
                        (3, _) => model.adds_dummy_prefix = field.flag(),
                        (4, _) => model.removes_extra_whitespaces = field.flag(),
                        _ => {}
                    }
                    Ok(())
                })?,
                _ => {}
            }
            Ok(())
        })?;
        match model.pieces.is_empty() {
            true => Err("has no pieces".to_owned()),
            false => Ok(model),
        }
    }

    fn add_piece(&mut self, bytes: &[u8]) -> Result<(), String> {
        let (mut text, mut score, mut kind) = (String::new(), 0.0, TokenKind::Normal);
        let index = self.pieces.len();
        each_field(bytes, &mut |number, field| {
            match (number, field) {
                (1, Field::Bytes(bytes)) => {
                    text = str::from_utf8(bytes)
                        .map_err(|error| format!("piece {index} is not UTF-8: {error}"))?
                        .to_owned();
                }
                (2, Field::Number(bits)) => score = f32::from_bits(bits as u32),
                (3, Field::Number(number)) => {
                    let number = u32::try_from(number).ok();
                    kind = number
                        .and_then(TokenKind::from_number)
                        .ok_or_else(|| format!("piece {index} has an unknown type"))?;
                }
                _ => {}
            }
            Ok(())
        })?;
        self.pieces.push((text, score, kind));
        Ok(())
    }

    /// Refuses what [`VocabSpec`] cannot express.
    fn check(&self) -> Result<(), String> {
        match self.kind {
            2 if !self.has_char_map => Ok(()),
            2 => Err("not supported: a SentencePiece model that normalises characters; a folder with \
                      tokenizer.json works"
                .to_owned()),
            kind => {
                let name = match kind {
                    1 => "unigram",
                    3 => "word",
                    _ => "character",
                };
                Err(format!(
                    "not supported: a SentencePiece model of the kind {name} (BPE is); a folder with \
                     tokenizer.json works"
                ))
            }
        }
    }

    fn spec(self) -> VocabSpec {
        let id_of = |kind| self.pieces.iter().position(|piece| piece.2 == kind).map(|at| at as u32);
        let in_range = |id: Option<u32>| id.filter(|&id| (id as usize) < self.pieces.len());
        let mut spec = VocabSpec {
            model: "llama".to_owned(),
            unk: id_of(TokenKind::Unknown),
            bos: in_range(self.bos),
            eos: in_range(self.eos),
            add_space_prefix: Some(self.adds_dummy_prefix),
            remove_extra_whitespaces: Some(self.removes_extra_whitespaces),
            ..VocabSpec::default()
        };
        for (text, score, kind) in self.pieces {
            spec.tokens.push(text);
            spec.scores.push(score);
            spec.kinds.push(kind);
        }
        spec
    }
}

/// Calls `visit` with number and value of each field of a message.
fn each_field<'a>(
    bytes: &'a [u8],
    visit: &mut dyn FnMut(u64, Field<'a>) -> Result<(), String>,
) -> Result<(), String> {
    let mut rest = bytes;
    while !rest.is_empty() {
        let tag = varint(&mut rest)?;
        let field = match tag & 7 {
            0 => Field::Number(varint(&mut rest)?),
            1 => Field::Number(u64::from_le_bytes(*fixed(&mut rest)?)),
            2 => {
                let len = varint(&mut rest)?;
                Field::Bytes(taken(&mut rest, usize::try_from(len).unwrap_or(usize::MAX))?)
            }
            5 => Field::Number(u32::from_le_bytes(*fixed(&mut rest)?).into()),
            kind => return Err(format!("has a field of the unknown wire type {kind}")),
        };
        visit(tag >> 3, field)?;
    }
    Ok(())
}

fn taken<'a>(rest: &mut &'a [u8], len: usize) -> Result<&'a [u8], String> {
    let (taken, after) = rest.split_at_checked(len).ok_or("ends within a field")?;
    *rest = after;
    Ok(taken)
}

fn fixed<'a, const N: usize>(rest: &mut &'a [u8]) -> Result<&'a [u8; N], String> {
    taken(rest, N)?.first_chunk().ok_or_else(|| "ends within a field".to_owned())
}

/// Reads a number of seven bits per byte, the lowest first.
fn varint(rest: &mut &[u8]) -> Result<u64, String> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let byte = taken(rest, 1)?[0];
        value |= u64::from(byte & 127) << shift;
        if byte < 128 {
            return Ok(value);
        }
    }
    Err("has a number that is too long".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Encodes a field of bytes.
    fn bytes(number: u8, value: &[u8]) -> Vec<u8> {
        let mut out = vec![number << 3 | 2];
        assert!(value.len() < 128);
        out.push(value.len() as u8);
        out.extend(value);
        out
    }

    fn piece(text: &str, score: f32, kind: u8) -> Vec<u8> {
        let mut inner = bytes(1, text.as_bytes());
        inner.push(2 << 3 | 5);
        inner.extend(score.to_le_bytes());
        inner.extend([3 << 3, kind]);
        bytes(1, &inner)
    }

    fn file(model_kind: u8, normalizer: &[u8]) -> Vec<u8> {
        let mut file = piece("<unk>", 0.0, 2);
        for (text, score) in [("a", -3.0), ("b", -4.0), ("ab", -1.0), ("\u{2581}", -5.0)] {
            file.extend(piece(text, score, 1));
        }
        file.extend(bytes(2, &[3 << 3, model_kind]));
        file.extend(bytes(3, normalizer));
        file
    }

    fn read(model: &[u8], added: Option<&[u8]>) -> LoadResult<VocabSpec> {
        let folder = tempfile::tempdir().unwrap();
        if let Some(added) = added {
            std::fs::write(folder.path().join("added_tokens.json"), added).unwrap();
        }
        vocab_spec(folder.path(), model, &HfSettings::default())
    }

    #[test]
    fn a_model_becomes_a_vocabulary() {
        let spec = read(&file(2, &[3 << 3, 0]), None).unwrap();
        assert_eq!(spec.tokens, ["<unk>", "a", "b", "ab", "\u{2581}"]);
        assert_eq!(spec.scores, [0.0, -3.0, -4.0, -1.0, -5.0]);
        assert_eq!((spec.unk, spec.add_space_prefix), (Some(0), Some(false)));
        assert_eq!(spec.kinds[..2], [TokenKind::Unknown, TokenKind::Normal]);
    }

    #[test]
    fn added_tokens_take_their_ids() {
        let added = br#"{"<|end|>": 6}"#;
        let model = file(2, &[]);
        let spec = read(&model, Some(added)).unwrap();
        assert_eq!(spec.tokens[5..], ["[PAD5]", "<|end|>"]);
        assert_eq!(spec.kinds[5..], [TokenKind::Unused, TokenKind::Control]);
        let far = br#"{"<|end|>": 4000000}"#;
        let error = read(&model, Some(far));
        assert!(error.unwrap_err().to_string().contains("one is added as 4000000"));
        let steps = br#"{"a": 1000000, "b": 2000000, "c": 3000000}"#;
        let error = read(&model, Some(steps)).unwrap_err().to_string();
        assert!(error.contains("one is added as 2000000"), "the holes of all together: {error}");
    }

    #[test]
    fn other_kinds_are_refused_by_name() {
        for (kind, normalizer, word) in
            [(1, &[][..], "unigram"), (3, &[], "word"), (2, &[2 << 3 | 2, 1, 7], "normalises")]
        {
            let error = read(&file(kind, normalizer), None).unwrap_err();
            let message = error.to_string();
            assert!(message.contains(word) && message.contains("tokenizer.json"), "{message}");
        }
    }

    #[test]
    fn damaged_files_are_refused() {
        let whole = file(2, &[]);
        for end in 1..whole.len() - 1 {
            // A cut between two fields is a shorter model; any other is an error, and none panics.
            let _ = read(&whole[..end], None);
        }
        for bad in [&whole[..whole.len() - 1], &[255; 12], &[1 << 3 | 3], b"\x0a\x7f"] {
            let error = read(bad, None).unwrap_err().to_string();
            assert!(error.contains(FILE), "{error}");
        }
    }
}
