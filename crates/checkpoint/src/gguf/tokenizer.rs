//! The tokenizer's files as llama.cpp's keys: a byte-level BPE (`tokenizer.json`) or SentencePiece (`tokenizer.model`).
//!
//! llama.cpp splits text with rules of its own, which a name (`tokenizer.ggml.pre`) chooses; the splitting rule in
//! `tokenizer.json` says which one that is. A rule that is not in the table is refused: with the wrong one a model reads
//! other tokens than it was trained on.

use super::container::Value;
use crate::Checkpoint;
use crate::folder::read_json;
use crate::{Error, Result};
use nvfp4_files::regular;
use serde_json::Value as Json;
use std::collections::BTreeMap;

/// Kinds of tokens, with the numbers that SentencePiece and GGUF have for them.
mod kind {
    pub const NORMAL: i32 = 1;
    pub const CONTROL: i32 = 3;
    pub const USER_DEFINED: i32 = 4;
    pub const UNUSED: i32 = 5;
}

/// Splitting rules and llama.cpp's names for them. All but the first differ in how many digits stay together.
const SPLITS: [(&str, &str); 3] = [
    ("'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+", "gpt-2"),
    (
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
        "llama-bpe",
    ),
    (
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
        "qwen2",
    ),
];

/// The largest SentencePiece model or chat template that is read: a vocabulary of a million tokens takes about 30 MB.
const MAX_FILE: u64 = 256 << 20;

type Entries = Vec<(String, Value)>;

/// The keys of a checkpoint's tokenizer, for a vocabulary of `size`. Without one there is no vocabulary.
pub(super) fn entries(checkpoint: &Checkpoint, size: u64) -> Result<Entries> {
    let optional = |name: &str| checkpoint.companion(name)?.map(|path| read_json(&path)).transpose();
    let (json, settings) = (optional("tokenizer.json")?, optional("tokenizer_config.json")?);
    let byte_level = json.as_ref().is_some_and(is_byte_level);
    let (mut found, tokens) = match (json, checkpoint.companion("tokenizer.model")?) {
        (Some(json), _) if byte_level => bpe(&json, size as usize)?,
        (_, Some(path)) => {
            let bytes = regular::read(&path, MAX_FILE)?;
            let added = settings.as_ref().and_then(|s| s.get("added_tokens_decoder"));
            sentence_piece(&bytes, added, size as usize).map_err(|reason| Error::content(&path, reason))?
        }
        (Some(_), None) => {
            return Err(Error::Refused(
                "tokenizer.json is not a byte-level BPE, and there is no tokenizer.model (SentencePiece) beside it: \
                 GGUF needs one of the two"
                    .to_string(),
            ));
        }
        (None, None) => return Ok(vec![key("model", Value::Text("no_vocab".to_string()))]),
    };
    let template = match checkpoint.companion("chat_template.jinja")? {
        Some(path) => {
            let text = String::from_utf8(regular::read(&path, MAX_FILE)?);
            Some(text.map_err(|_| Error::content(&path, "not UTF-8"))?)
        }
        None => settings.as_ref().and_then(|s| s.get("chat_template")).and_then(Json::as_str).map(str::to_string),
    };
    special(&mut found, &tokens, checkpoint.config().unwrap_or(&Json::Null), settings.as_ref());
    found.extend(template.map(|text| ("tokenizer.chat_template".to_string(), Value::Text(text))));
    Ok(found)
}

/// Reads a `tokenizer.json` and a `tokenizer.model`, for fuzzing: whatever the bytes, this returns. The same bytes stand for both.
#[doc(hidden)]
pub fn check_tokenizer(bytes: &[u8]) -> bool {
    const SIZE: usize = 64;
    let json = serde_json::from_slice::<Json>(bytes).ok();
    let found = match &json {
        Some(json) => bpe(json, SIZE).ok(),
        None => sentence_piece(bytes, None, SIZE).ok(),
    };
    found.is_some_and(|(mut entries, tokens)| {
        special(&mut entries, &tokens, json.as_ref().unwrap_or(&Json::Null), json.as_ref());
        true
    })
}

fn key(name: &str, value: Value) -> (String, Value) {
    (format!("tokenizer.ggml.{name}"), value)
}

/// Splitting steps of a `tokenizer.json`, in order.
fn steps(json: &Json) -> Vec<&Json> {
    match json.get("pre_tokenizer") {
        Some(one) if one.get("type").and_then(Json::as_str) == Some("Sequence") => {
            one.get("pretokenizers").and_then(Json::as_array).into_iter().flatten().collect()
        }
        Some(one) if !one.is_null() => vec![one],
        _ => Vec::new(),
    }
}

fn kind_of(step: &Json) -> &str {
    step.get("type").and_then(Json::as_str).unwrap_or_default()
}

fn is_byte_level(json: &Json) -> bool {
    steps(json).iter().any(|step| kind_of(step) == "ByteLevel")
}

/// llama.cpp's name for the splitting rule.
fn split(json: &Json) -> Result<&'static str> {
    let steps = steps(json);
    let own_rule = |step: &&Json| step.get("use_regex").and_then(Json::as_bool) != Some(false);
    let found = match &steps[..] {
        [one] if kind_of(one) == "ByteLevel" && own_rule(one) => Some("gpt-2"),
        [one, two] if kind_of(one) == "Digits" && kind_of(two) == "ByteLevel" && own_rule(two) => Some("smollm"),
        [one, two] if kind_of(one) == "Split" && kind_of(two) == "ByteLevel" => {
            let rule = one.pointer("/pattern/Regex").and_then(Json::as_str);
            SPLITS.iter().find(|(known, _)| Some(*known) == rule).map(|(_, name)| *name)
        }
        _ => None,
    };
    found.ok_or_else(|| {
        Error::Refused(
            "tokenizer.json splits text by a rule for which no name of llama.cpp's is known here; convert to modelopt, \
             which llama.cpp's own converter reads"
                .to_string(),
        )
    })
}

/// A byte-level BPE.
fn bpe(json: &Json, size: usize) -> Result<(Entries, BTreeMap<String, usize>)> {
    let wrong = |reason: String| Error::Refused(format!("tokenizer.json: {reason}"));
    let vocabulary = json.pointer("/model/vocab").and_then(Json::as_object);
    let vocabulary = vocabulary.ok_or_else(|| wrong("no object 'vocab' in 'model'".to_string()))?;
    let mut tokens: Vec<(String, i32)> = (0..size).map(|i| (format!("[PAD{i}]"), kind::UNUSED)).collect();
    let mut put = |id: Option<u64>, text: &str, kind: i32| match id.and_then(|id| tokens.get_mut(id as usize)) {
        Some(token) => {
            *token = (text.to_string(), kind);
            Ok(())
        }
        None => {
            Err(wrong(format!("the token '{text}' has no place in the 'vocab_size' of {size} that config.json gives")))
        }
    };
    for (text, id) in vocabulary {
        put(id.as_u64(), text, kind::NORMAL)?;
    }
    for added in json.get("added_tokens").and_then(Json::as_array).into_iter().flatten() {
        let text = added.get("content").and_then(Json::as_str).unwrap_or_default();
        let special = added.get("special").and_then(Json::as_bool) == Some(true) || looks_special(text);
        put(added.get("id").and_then(Json::as_u64), text, if special { kind::CONTROL } else { kind::USER_DEFINED })?;
    }
    let merges = json.pointer("/model/merges").and_then(Json::as_array).cloned().unwrap_or_default();
    let merge = |merge: &Json| match merge {
        Json::String(both) => Ok(both.clone()),
        // Newer files have pairs. A byte-level token holds no space.
        pair => match (pair.get(0).and_then(Json::as_str), pair.get(1).and_then(Json::as_str)) {
            (Some(a), Some(b)) => Ok(format!("{a} {b}")),
            _ => Err(wrong(format!("expected pairs of tokens in 'merges', got {pair}"))),
        },
    };
    let merges = merges.iter().map(merge).collect::<Result<Vec<_>>>()?;
    let ids = tokens.iter().enumerate().map(|(i, (text, _))| (text.clone(), i)).collect();
    let (texts, kinds) = tokens.into_iter().unzip();
    let entries = vec![
        key("model", Value::Text("gpt2".to_string())),
        key("pre", Value::Text(split(json)?.to_string())),
        key("tokens", Value::Texts(texts)),
        key("token_type", Value::I32s(kinds)),
        key("merges", Value::Texts(merges)),
    ];
    Ok((entries, ids))
}

/// Tokens that are marks of a conversation even where a file does not call them special.
fn looks_special(text: &str) -> bool {
    text == "<pad>" || (text.starts_with("<|") && text.ends_with("|>"))
}

/// A SentencePiece model: a Protocol Buffers message whose field 1 is a piece (text, score, kind), repeated.
fn sentence_piece(
    bytes: &[u8],
    added: Option<&Json>,
    size: usize,
) -> std::result::Result<(Entries, BTreeMap<String, usize>), String> {
    let mut pieces: Vec<(String, f32, i32)> = Vec::new();
    let mut prefix = true;
    for field in Fields(bytes) {
        match field? {
            (1, Field::Bytes(piece)) => {
                let (mut text, mut score, mut kind) = (String::new(), 0.0, kind::NORMAL);
                for field in Fields(piece) {
                    match field? {
                        (1, Field::Bytes(t)) => text = String::from_utf8_lossy(t).into_owned(),
                        (2, Field::Word(bits)) => score = f32::from_bits(bits),
                        (3, Field::Number(n)) => kind = n as i32,
                        _ => {}
                    }
                }
                pieces.push((text, score, kind));
            }
            // The normalizer: whether a space goes before the text.
            (3, Field::Bytes(normalizer)) => {
                for field in Fields(normalizer) {
                    if let (3, Field::Number(n)) = field? {
                        prefix = n != 0;
                    }
                }
            }
            _ => {}
        }
    }
    if pieces.is_empty() {
        return Err("not a SentencePiece model".to_string());
    }
    let tokens = pieces.len().max(size);
    pieces.extend((pieces.len()..tokens).map(|i| (format!("[PAD{i}]"), -1000.0, kind::UNUSED)));
    for (id, token) in added.and_then(Json::as_object).into_iter().flatten() {
        let text = token.get("content").and_then(Json::as_str).unwrap_or_default();
        let special = token.get("special").and_then(Json::as_bool) == Some(true) || looks_special(text);
        if let Some(piece) = id.parse().ok().and_then(|id: usize| pieces.get_mut(id)).filter(|p| p.0 != text) {
            *piece = (text.to_string(), -1000.0, if special { kind::CONTROL } else { kind::USER_DEFINED });
        }
    }
    if pieces.len() > size {
        return Err(format!("{} pieces, more than the 'vocab_size' of {size} that config.json gives", pieces.len()));
    }
    let ids = pieces.iter().enumerate().map(|(i, (text, ..))| (text.clone(), i)).collect();
    let entries = vec![
        key("model", Value::Text("llama".to_string())),
        key("pre", Value::Text("default".to_string())),
        key("tokens", Value::Texts(pieces.iter().map(|p| p.0.clone()).collect())),
        key("scores", Value::F32s(pieces.iter().map(|p| p.1).collect())),
        key("token_type", Value::I32s(pieces.iter().map(|p| p.2).collect())),
        key("add_space_prefix", Value::Bool(prefix)),
    ];
    Ok((entries, ids))
}

/// A field's value in Protocol Buffers' wire format; groups are not used there.
enum Field<'a> {
    Number(u64),
    Word(u32),
    Long,
    Bytes(&'a [u8]),
}

/// The fields of a message.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn number(&mut self) -> Option<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7F) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, len: u64) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(usize::try_from(len).ok()?)?;
        self.0 = rest;
        Some(taken)
    }

    fn field(&mut self) -> Option<(u64, Field<'a>)> {
        let tag = self.number()?;
        let field = match tag & 7 {
            0 => Field::Number(self.number()?),
            1 => self.take(8).map(|_| Field::Long)?,
            2 => {
                let len = self.number()?;
                Field::Bytes(self.take(len)?)
            }
            5 => Field::Word(u32::from_le_bytes(self.take(4)?.try_into().ok()?)),
            _ => return None,
        };
        Some((tag >> 3, field))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = std::result::Result<(u64, Field<'a>), String>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            self.0 = &[];
        }
        Some(field.ok_or_else(|| "not a SentencePiece model, or a truncated one".to_string()))
    }
}

/// The tokens with a meaning of their own, and whether they are put around a text.
fn special(entries: &mut Entries, tokens: &BTreeMap<String, usize>, config: &Json, settings: Option<&Json>) {
    for (ours, theirs) in [("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")] {
        let setting = settings.and_then(|s| s.get(format!("{theirs}_token")));
        let text = setting.and_then(|t| t.as_str().or(t.get("content").and_then(Json::as_str)));
        let number = config.get(format!("{theirs}_token_id"));
        let number = number.and_then(|n| n.as_u64().or(n.get(0).and_then(Json::as_u64)));
        let id = text.and_then(|t| tokens.get(t)).map(|&id| id as u64).or(number);
        entries.extend(id.map(|id| key(&format!("{ours}_token_id"), Value::U32(id as u32))));
        let add = settings.and_then(|s| s.get(format!("add_{theirs}_token"))).and_then(Json::as_bool);
        if let (Some(add), "bos" | "eos") = (add, theirs) {
            entries.push(key(&format!("add_{theirs}_token"), Value::Bool(add)));
        }
    }
}
