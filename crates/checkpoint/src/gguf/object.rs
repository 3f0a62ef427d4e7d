//! An object of `config.json` or of the tokenizer files, read by type. A value that is absent or
//! null may have a default. A value of another type is an error that names its key: a default in
//! its place would make a wrong file.

use crate::{Error, Result};
use serde_json::{Map, Value as Json};
use std::fmt::Display;

/// The most characters of a value that an error shows.
const SHOWN: usize = 80;

/// An object, with errors that say where it stands.
#[derive(Clone)]
pub(super) struct Object<'a> {
    place: String,
    fields: &'a Map<String, Json>,
}

impl<'a> Object<'a> {
    /// The object that a file is.
    pub fn new(file: &str, json: &'a Json) -> Result<Self> {
        let wrong = || Error::Refused(format!("{file}: expected an object, got {}", shown(json)));
        Ok(Object { place: file.to_string(), fields: json.as_object().ok_or_else(wrong)? })
    }

    /// An error about this object.
    pub fn wrong(&self, reason: impl Display) -> Error {
        Error::Refused(format!("{}: {reason}", self.place))
    }

    /// An error about a value that is not what is expected.
    pub fn unexpected(&self, key: &str, expected: &str, got: &Json) -> Error {
        self.wrong(format!("'{key}': expected {expected}, got {}", shown(got)))
    }

    /// An error about a key that is not there.
    pub fn missing(&self, key: &str) -> Error {
        self.wrong(format!("'{key}' is missing; GGUF needs it"))
    }

    /// The value of a key, unless it is null.
    pub fn get(&self, key: &str) -> Option<&'a Json> {
        self.fields.get(key).filter(|value| !value.is_null())
    }

    /// All keys and values.
    pub fn fields(&self) -> &'a Map<String, Json> {
        self.fields
    }

    fn read<T>(&self, key: &str, expected: &str, read: impl Fn(&'a Json) -> Option<T>) -> Result<Option<T>> {
        self.get(key).map(|value| read(value).ok_or_else(|| self.unexpected(key, expected, value))).transpose()
    }

    /// A size: a whole number from 1 on.
    pub fn size(&self, key: &str) -> Result<Option<u64>> {
        let whole = |value: &Json| value.as_u64().filter(|n| (1..=1 << 31).contains(n));
        self.read(key, "a positive whole number", whole)
    }

    /// A size that must be there.
    pub fn need(&self, key: &str) -> Result<u64> {
        self.size(key)?.ok_or_else(|| self.missing(key))
    }

    /// A number that is positive in binary32, which GGUF holds it in.
    pub fn positive(&self, key: &str) -> Result<Option<f64>> {
        let normal = |x: &f64| *x > 0.0 && (*x as f32).is_normal();
        self.read(key, "a positive number", |value| value.as_f64().filter(normal))
    }

    /// Yes or no.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.read(key, "true or false", Json::as_bool)
    }

    /// Text.
    pub fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.read(key, "text", Json::as_str)
    }

    /// A list.
    pub fn list(&self, key: &str) -> Result<Option<&'a [Json]>> {
        self.read(key, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    /// An object in this one.
    pub fn object(&self, key: &str) -> Result<Option<Object<'a>>> {
        let fields = self.read(key, "an object", Json::as_object)?;
        Ok(fields.map(|fields| Object { place: format!("{}: '{key}'", self.place), fields }))
    }

    /// A list of objects; none if it is absent.
    pub fn objects(&self, key: &str) -> Result<Vec<Object<'a>>> {
        let each = |(i, value): (usize, &'a Json)| {
            let fields = value.as_object().ok_or_else(|| self.unexpected(key, "objects in the list", value))?;
            Ok(Object { place: format!("{}: '{key}' [{i}]", self.place), fields })
        };
        self.list(key)?.unwrap_or_default().iter().enumerate().map(each).collect()
    }

    /// Refuses a flag that is not `expected`, where llama.cpp has no choice; absent counts as
    /// `otherwise`.
    pub fn must_be(&self, key: &str, expected: bool, otherwise: bool, because: &str) -> Result<()> {
        match self.flag(key)?.unwrap_or(otherwise) == expected {
            true => Ok(()),
            false => Err(self.wrong(format!("'{key}' must be {expected}: {because}"))),
        }
    }
}

/// The beginning of a value.
pub(super) fn shown(value: &Json) -> String {
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
