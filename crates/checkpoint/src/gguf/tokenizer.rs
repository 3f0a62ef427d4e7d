//! The tokenizer's files as llama.cpp's keys: a byte-level BPE (`tokenizer.json`, in `bpe.rs`) or
//! SentencePiece (`tokenizer.model`), and the special tokens.

use super::bpe::{self, Around, bpe};
use super::container::Value;
use super::object::Object;
use super::tokens::{Entries, added, key, kind};
use crate::folder::read_json;
use crate::{Checkpoint, Error, Result};
use nvfp4_files::regular;
use serde_json::Value as Json;
use std::collections::BTreeMap;

/// The largest SentencePiece model or chat template that is read: a vocabulary of a million tokens
/// takes about 30 MB.
const MAX_FILE: u64 = 256 << 20;

/// The keys of a checkpoint's tokenizer, for a vocabulary of `size`. Without one there is no
/// vocabulary.
pub(super) fn entries(checkpoint: &Checkpoint, config: &Object<'_>, size: u64) -> Result<Entries> {
    let optional = |name: &str| checkpoint.companion(name)?.map(|path| read_json(&path)).transpose();
    let (json, settings) = (optional("tokenizer.json")?, optional("tokenizer_config.json")?);
    let settings = settings.as_ref().map(|json| Object::new("tokenizer_config.json", json)).transpose()?;
    let byte_level = json.as_ref().filter(|json| bpe::is_byte_level(json));
    let (mut found, tokens, around) = match (byte_level, checkpoint.companion("tokenizer.model")?) {
        (Some(json), _) => {
            let (entries, tokens, around) = bpe(json, size as usize)?;
            (entries, tokens, Some(around))
        }
        (_, Some(path)) => {
            let bytes = regular::read(&path, MAX_FILE)?;
            let added = settings.as_ref().map(|s| s.object("added_tokens_decoder")).transpose()?.flatten();
            let read = sentence_piece(&bytes, added.as_ref(), size as usize);
            let (entries, tokens) = read.map_err(|reason| Error::content(&path, reason))?;
            (entries, tokens, None)
        }
        (None, None) if json.is_some() => {
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
        None => settings.as_ref().map(chat_template).transpose()?.flatten(),
    };
    special(&mut found, &tokens, size, config, settings.as_ref(), around)?;
    found.extend(template.map(|text| ("tokenizer.chat_template".to_string(), Value::Text(text))));
    Ok(found)
}

/// The chat template in the settings: text, or a list of templates with names, of which the default
/// one is taken.
fn chat_template(settings: &Object<'_>) -> Result<Option<String>> {
    let name = "chat_template";
    if settings.get(name).is_none_or(Json::is_string) {
        return Ok(settings.text(name)?.map(str::to_string));
    }
    for one in settings.objects(name)? {
        if one.text("name")? == Some("default") {
            return one.text("template")?.map(|text| Some(text.to_string())).ok_or_else(|| one.missing("template"));
        }
    }
    Err(settings.wrong("no template in the list 'chat_template' has the name 'default'"))
}

/// Reads a `tokenizer.json` and a `tokenizer.model`, for fuzzing: whatever the bytes, this returns.
/// The same bytes are used for both.
#[doc(hidden)]
pub fn check_tokenizer(bytes: &[u8]) -> bool {
    const SIZE: usize = 64;
    let json = serde_json::from_slice::<Json>(bytes).ok();
    let check = || -> Option<()> {
        let nothing = Json::Object(serde_json::Map::new());
        let object = Object::new("fuzzed", json.as_ref().unwrap_or(&nothing)).ok()?;
        let (mut entries, tokens, around) = match &json {
            Some(json) => bpe(json, SIZE).map(|(entries, tokens, around)| (entries, tokens, Some(around))).ok()?,
            None => sentence_piece(bytes, None, SIZE).map(|(entries, tokens)| (entries, tokens, None)).ok()?,
        };
        let _ = chat_template(&object);
        special(&mut entries, &tokens, SIZE as u64, &object, Some(&object), around).ok()
    };
    check().is_some()
}

/// A SentencePiece model: a Protocol Buffers message whose field 1 is a piece (text, score, kind),
/// repeated.
fn sentence_piece(
    bytes: &[u8],
    added: Option<&Object<'_>>,
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
    for (id, token) in added_pieces(added).map_err(|error| error.to_string())? {
        // A token beyond the vocabulary has no embedding.
        if let Some(piece) = pieces.get_mut(id).filter(|piece| piece.0 != token.0) {
            *piece = (token.0, -1000.0, token.1);
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

/// Tokens that the settings add to a SentencePiece model: numbers, texts and kinds.
fn added_pieces(added_tokens: Option<&Object<'_>>) -> Result<Vec<(usize, (String, i32))>> {
    let mut found = Vec::new();
    for (name, value) in added_tokens.map(|object| object.fields()).into_iter().flatten() {
        let list = added_tokens.expect("it has fields");
        let id = name.parse().map_err(|_| list.unexpected(name, "numbers of tokens as keys", value))?;
        let token = list.object(name)?.ok_or_else(|| list.missing(name))?;
        let text = token.text("content")?.ok_or_else(|| token.missing("content"))?;
        found.push((id, (text.to_string(), added(text, token.flag("special")?.unwrap_or(false)))));
    }
    Ok(found)
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

/// The special tokens, and whether they are put around a text.
fn special(
    entries: &mut Entries,
    tokens: &BTreeMap<String, usize>,
    size: u64,
    config: &Object<'_>,
    settings: Option<&Object<'_>>,
    around: Option<Around>,
) -> Result<()> {
    for (ours, theirs) in [("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")] {
        let number = number(config, &format!("{theirs}_token_id"), size)?;
        let named = settings.map(|s| named(s, &format!("{theirs}_token"), tokens)).transpose()?.flatten();
        let id = named.or(number);
        entries.extend(id.map(|id| key(&format!("{ours}_token_id"), Value::U32(id))));
        if !["bos", "eos"].contains(&theirs) {
            continue;
        }
        let add = format!("add_{theirs}_token");
        let put = around.as_ref().map(|around| around.puts(theirs, tokens, id)).transpose()?.flatten();
        let put = settings.map(|s| s.flag(&add)).transpose()?.flatten().or(put);
        entries.extend(put.map(|put| key(&add, Value::Bool(put))));
    }
    Ok(())
}

/// The token that the settings name: by its text, or by an object with it.
fn named(settings: &Object<'_>, name: &str, tokens: &BTreeMap<String, usize>) -> Result<Option<u32>> {
    let text = match settings.get(name) {
        Some(Json::Object(_)) => {
            let object = settings.object(name)?.expect("it is an object");
            Some(object.text("content")?.ok_or_else(|| object.missing("content"))?)
        }
        _ => settings.text(name)?,
    };
    let find = |text: &str| {
        let stranger = || settings.wrong(format!("'{name}' is '{text}', which is not a token of the vocabulary"));
        tokens.get(text).map(|&id| id as u32).ok_or_else(stranger)
    };
    text.map(find).transpose()
}

/// The token that `config.json` numbers; the first, where it has several. A padding token of -1 is
/// none.
fn number(config: &Object<'_>, name: &str, size: u64) -> Result<Option<u32>> {
    let Some(value) = config.get(name).filter(|value| !(name == "pad_token_id" && value.as_i64() == Some(-1))) else {
        return Ok(None);
    };
    let several = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    let id = |value: &Json| value.as_u64().filter(|id| *id < size).and_then(|id| u32::try_from(id).ok());
    let ids: Option<Vec<u32>> = several.iter().map(id).collect();
    let expected = format!("the number of a token, less than the 'vocab_size' of {size}");
    let first = ids.and_then(|ids| ids.first().copied());
    first.map(Some).ok_or_else(|| config.unexpected(name, &expected, value))
}
