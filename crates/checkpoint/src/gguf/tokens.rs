//! What GGUF says about tokens: keys, and kinds of tokens.

use super::container::Value;

/// Keys and values of a file.
pub(super) type Entries = Vec<(String, Value)>;

/// Kinds of tokens, with the numbers that SentencePiece and GGUF have for them.
pub(super) mod kind {
    pub const NORMAL: i32 = 1;
    pub const CONTROL: i32 = 3;
    pub const USER_DEFINED: i32 = 4;
    pub const UNUSED: i32 = 5;
}

/// A key about the tokenizer.
pub(super) fn key(name: &str, value: Value) -> (String, Value) {
    (format!("tokenizer.ggml.{name}"), value)
}

/// The kind of a token that was added to a vocabulary. Some are marks of a conversation even where
/// a file does not call them special.
pub(super) fn added(text: &str, special: bool) -> i32 {
    let special = special || text == "<pad>" || (text.starts_with("<|") && text.ends_with("|>"));
    if special { kind::CONTROL } else { kind::USER_DEFINED }
}
