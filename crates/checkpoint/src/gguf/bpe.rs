//! A byte-level BPE, from `tokenizer.json`.
//!
//! llama.cpp splits text with rules of its own, which a name (`tokenizer.ggml.pre`) chooses; the
//! splitting rule in `tokenizer.json` says which one that is. A rule that is not in the table is
//! refused, and so is a setting that llama.cpp does not have: with another rule a model reads other
//! tokens than it was trained on.

use super::container::Value;
use super::object::{Object, shown};
use super::tokens::{Entries, added, key, kind};
use crate::{Error, Result};
use serde_json::Value as Json;
use std::collections::{BTreeMap, BTreeSet};

/// Splitting rules and llama.cpp's names for them. The last two differ in how many digits stay
/// together.
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

/// llama.cpp's rule that keeps a whole word that is a token, and puts the first token before a text
/// unasked.
const LLAMA: &str = "llama-bpe";

/// Tokens that are put around a text.
pub(super) struct Around {
    before: Option<String>,
    after: Option<String>,
    split: &'static str,
}

impl Around {
    /// Whether the token `bos` or `eos` is put there, if llama.cpp would do otherwise by default.
    pub fn puts(&self, which: &str, tokens: &BTreeMap<String, usize>, id: Option<u32>) -> Result<Option<bool>> {
        let (text, unasked) = match which {
            "bos" => (&self.before, self.split == LLAMA),
            _ => (&self.after, false),
        };
        if let Some(text) = text
            && tokens.get(text).map(|&id| id as u32) != id
        {
            return Err(Error::Refused(format!(
                "tokenizer.json: 'post_processor' puts '{text}' around a text, which is not the \
                 '{which}_token'; llama.cpp puts no other token there"
            )));
        }
        Ok((text.is_some() != unasked).then_some(text.is_some()))
    }
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

/// Whether it is a tokenizer of bytes, which the rest of this file reads.
pub(super) fn is_byte_level(json: &Json) -> bool {
    steps(json).iter().any(|step| kind_of(step) == "ByteLevel")
}

/// llama.cpp's name for the splitting rule.
fn split(json: &Json) -> Result<&'static str> {
    let steps = steps(json);
    let found = match &steps[..] {
        [bytes] if kind_of(bytes) == "ByteLevel" => byte_level(bytes, true)?.then_some("gpt-2"),
        [digits, bytes] if kind_of(digits) == "Digits" && kind_of(bytes) == "ByteLevel" => {
            let digits = Object::new("tokenizer.json: 'pre_tokenizer'", digits)?;
            digits.must_be("individual_digits", true, false, "llama.cpp's 'smollm' takes digits one by one")?;
            byte_level(bytes, true)?.then_some("smollm")
        }
        [split, bytes] if kind_of(split) == "Split" && kind_of(bytes) == "ByteLevel" => {
            let split = Object::new("tokenizer.json: 'pre_tokenizer'", split)?;
            split.must_be("invert", false, false, "llama.cpp keeps what the rule finds")?;
            match split.text("behavior")? {
                Some("Isolated") => {}
                other => return Err(split.wrong(format!("'behavior' is {other:?}, llama.cpp does 'Isolated'"))),
            }
            let rule = split.object("pattern")?.map(|pattern| pattern.text("Regex")).transpose()?.flatten();
            let found = SPLITS.iter().find(|(known, _)| Some(*known) == rule).map(|(_, name)| *name);
            let as_bytes = byte_level(bytes, false)?;
            found.filter(|_| as_bytes)
        }
        _ => None,
    };
    found.ok_or_else(|| {
        Error::Refused(
            "tokenizer.json splits text by a rule that has no known name in llama.cpp; convert to modelopt, \
             which llama.cpp's own converter reads"
                .to_string(),
        )
    })
}

/// Whether the step to bytes splits by GPT-2's rule, or does not, as `splits` says.
fn byte_level(step: &Json, splits: bool) -> Result<bool> {
    let step = Object::new("tokenizer.json: 'pre_tokenizer'", step)?;
    step.must_be("add_prefix_space", false, false, "llama.cpp puts no space before a text")?;
    Ok(step.flag("use_regex")?.unwrap_or(true) == splits)
}

/// A byte-level BPE.
pub(super) fn bpe(json: &Json, size: usize) -> Result<(Entries, BTreeMap<String, usize>, Around)> {
    let whole = Object::new("tokenizer.json", json)?;
    let split = split(json)?;
    check_normalizer(&whole)?;
    if let Some(decoder) = whole.object("decoder")?
        && decoder.text("type")? != Some("ByteLevel")
    {
        return Err(decoder.wrong("expected the 'type' 'ByteLevel', as llama.cpp does"));
    }
    let model = whole.object("model")?.ok_or_else(|| whole.missing("model"))?;
    check_model(&model, split)?;
    let vocabulary = model.object("vocab")?.ok_or_else(|| model.missing("vocab"))?;
    if vocabulary.fields().is_empty() {
        return Err(model.wrong("'vocab' is empty"));
    }
    let mut tokens: Vec<Option<(String, i32)>> = vec![None; size];
    let mut put = |id: &Json, text: &str, kind: i32| -> Result<()> {
        let Some(token) = id.as_u64().and_then(|id| tokens.get_mut(id as usize)) else {
            let id = shown(id);
            return Err(whole.wrong(format!(
                "the token '{text}' has no place in the 'vocab_size' of {size} that config.json \
                 gives: its number is {id}"
            )));
        };
        match token {
            Some((other, own)) if other != text || *own != kind::NORMAL => {
                Err(whole.wrong(format!("the tokens '{other}' and '{text}' have one number, {}", shown(id))))
            }
            _ => {
                *token = Some((text.to_string(), kind));
                Ok(())
            }
        }
    };
    for (text, id) in vocabulary.fields() {
        put(id, text, kind::NORMAL)?;
    }
    for token in whole.objects("added_tokens")? {
        let text = token.text("content")?.filter(|text| !text.is_empty()).ok_or_else(|| token.missing("content"))?;
        for strip in ["lstrip", "rstrip", "single_word"] {
            token.must_be(strip, false, false, "llama.cpp takes a token out of any text around it")?;
        }
        let kind = added(text, token.flag("special")?.unwrap_or(false));
        put(token.get("id").unwrap_or(&Json::Null), text, kind)?;
    }
    let merges = merges(&model, &vocabulary)?;
    let tokens = tokens.into_iter().enumerate();
    let (texts, kinds): (Vec<String>, Vec<i32>) =
        tokens.map(|(i, token)| token.unwrap_or_else(|| (format!("[PAD{i}]"), kind::UNUSED))).unzip();
    let mut ids = BTreeMap::new();
    for (i, text) in texts.iter().enumerate() {
        if let Some(other) = ids.insert(text.clone(), i) {
            return Err(whole.wrong(format!("the token '{text}' has two numbers, {other} and {i}")));
        }
    }
    let entries = vec![
        key("model", Value::Text("gpt2".to_string())),
        key("pre", Value::Text(split.to_string())),
        key("tokens", Value::Texts(texts)),
        key("token_type", Value::I32s(kinds)),
        key("merges", Value::Texts(merges)),
    ];
    Ok((entries, ids, around(&whole, split)?))
}

/// Refuses a normalizer that changes text. llama.cpp has none for these tokenizers; NFC leaves text
/// as programs write it.
fn check_normalizer(whole: &Object<'_>) -> Result<()> {
    let Some(normalizer) = whole.object("normalizer")? else { return Ok(()) };
    let steps = match normalizer.text("type")? {
        Some("Sequence") => normalizer.objects("normalizers")?,
        _ => vec![normalizer],
    };
    for step in steps {
        let name = step.text("type")?.unwrap_or_default();
        if name != "NFC" {
            return Err(step.wrong(format!("llama.cpp does not do '{name}'; only NFC can be left out without loss")));
        }
    }
    Ok(())
}

/// Refuses settings of a BPE that llama.cpp does not have.
fn check_model(model: &Object<'_>, split: &str) -> Result<()> {
    match model.text("type")? {
        Some("BPE") => {}
        other => return Err(model.wrong(format!("expected the 'type' 'BPE', got '{}'", other.unwrap_or_default()))),
    }
    for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if model.text(key)?.is_some_and(|text| !text.is_empty()) {
            return Err(model.wrong(format!("'{key}' is not empty, which llama.cpp does not support")));
        }
    }
    if let Some(dropout) = model.get("dropout").filter(|value| value.as_f64() != Some(0.0)) {
        return Err(model.unexpected("dropout", "none, as llama.cpp does", dropout));
    }
    model.must_be("byte_fallback", false, false, "llama.cpp does not do it for a BPE of bytes")?;
    let because = format!("llama.cpp's '{split}' does so");
    model.must_be("ignore_merges", split == LLAMA, false, &because)
}

/// Merges, each two tokens with a space between. Newer files have pairs. A byte-level token holds
/// no space.
fn merges(model: &Object<'_>, vocabulary: &Object<'_>) -> Result<Vec<String>> {
    let known = |text: &str| vocabulary.fields().contains_key(text);
    let list = model.list("merges")?.ok_or_else(|| model.missing("merges"))?;
    let (mut seen, mut merges) = (BTreeSet::new(), Vec::new());
    for merge in list {
        let pair = match merge {
            Json::String(both) => both.split_once(' '),
            Json::Array(pair) => match &pair[..] {
                [Json::String(a), Json::String(b)] => Some((a.as_str(), b.as_str())),
                _ => None,
            },
            _ => None,
        };
        let whole = |text: &str| !text.is_empty() && !text.contains(' ');
        let Some((a, b)) = pair.filter(|(a, b)| whole(a) && whole(b)) else {
            return Err(model.unexpected("merges", "pairs of tokens", merge));
        };
        let both = format!("{a}{b}");
        if let Some(stranger) = [a, b, &both].into_iter().find(|text| !known(text)) {
            return Err(model.wrong(format!("'merges' has {}, but '{stranger}' is not in 'vocab'", shown(merge))));
        }
        if !seen.insert((a, b)) {
            return Err(model.wrong(format!("'merges' has {} twice", shown(merge))));
        }
        merges.push(format!("{a} {b}"));
    }
    Ok(merges)
}

/// What the last step puts around a text.
fn around(whole: &Object<'_>, split: &'static str) -> Result<Around> {
    let mut found = Around { before: None, after: None, split };
    let Some(step) = whole.object("post_processor")? else { return Ok(found) };
    let steps = match step.text("type")? {
        Some("Sequence") => step.objects("processors")?,
        _ => vec![step],
    };
    for step in steps {
        match step.text("type")?.unwrap_or_default() {
            "ByteLevel" => {}
            "TemplateProcessing" => {
                let mut place = &mut found.before;
                for piece in step.objects("single")? {
                    match (piece.object("SpecialToken")?, piece.object("Sequence")?) {
                        (Some(token), None) if place.is_none() => *place = token.text("id")?.map(str::to_string),
                        (None, Some(_)) => place = &mut found.after,
                        _ => return Err(step.wrong("llama.cpp puts at most one token before and after a text")),
                    }
                }
            }
            other => return Err(step.wrong(format!("llama.cpp does not do '{other}'"))),
        }
    }
    Ok(found)
}
