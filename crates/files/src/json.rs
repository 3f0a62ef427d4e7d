//! A check that JSON readers leave out.

use serde::de::{self, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::collections::BTreeSet;
use std::fmt;

/// Checks that no object in a JSON text has a key twice; readers would silently keep one of the values.
pub fn unique_keys(json: &[u8]) -> serde_json::Result<()> {
    serde_json::from_slice::<UniqueKeys>(json).map(drop)
}

/// The error about a text with its key, if it is about a number that JSON does not have. Python
/// writes and reads such numbers.
pub(crate) fn named(json: &[u8], error: serde_json::Error) -> serde_json::Error {
    match not_a_number(json) {
        Some((key, number)) => {
            de::Error::custom(format!("'{key}' is {number}, which JSON does not have; write a finite number, or null"))
        }
        None => error,
    }
}

/// The first NaN or infinity in a text, and the last key before it.
fn not_a_number(json: &[u8]) -> Option<(String, &'static str)> {
    let (mut key, mut last, mut at) = ("", "", 0);
    while let Some(byte) = json.get(at) {
        let number =
            ["NaN", "-Infinity", "Infinity"].into_iter().find(|number| json[at..].starts_with(number.as_bytes()));
        match (byte, number) {
            (_, Some(number)) => return Some((key.to_string(), number)),
            (b':', _) => key = last,
            (b'"', _) => {
                let start = at + 1;
                at = start;
                while *json.get(at)? != b'"' {
                    at += if json[at] == b'\\' { 2 } else { 1 };
                }
                last = str::from_utf8(&json[start..at]).ok()?;
            }
            _ => {}
        }
        at += 1;
    }
    None
}

/// Any JSON value whose objects have no key twice.
struct UniqueKeys;

impl<'de> Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueKeys)
    }
}

impl<'de> Visitor<'de> for UniqueKeys {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        let mut seen = BTreeSet::new();
        while let Some(key) = map.next_key::<String>()? {
            if seen.contains(&key) {
                return Err(de::Error::custom(format!("the key '{key}' stands twice in one object")));
            }
            seen.insert(key);
            map.next_value::<UniqueKeys>()?;
        }
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self, A::Error> {
        while seq.next_element::<UniqueKeys>()?.is_some() {}
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_may_repeat_in_different_objects_only() {
        let once = br#"{"a": {"a": [1, -2, 2.5, true, null, "a", {}]}, "b": [{"a": 1}, {"a": 1}]}"#;
        assert!(unique_keys(once).is_ok());
        let twice: [&[u8]; 3] = [br#"{"a": 1, "a": 1}"#, br#"{"b": {"a": 1, "c": 2, "a": 3}}"#, br#"[{"a":0,"a":0}]"#];
        for json in twice {
            let message = unique_keys(json).unwrap_err().to_string();
            assert!(message.starts_with("the key 'a' stands twice in one object"), "{message}");
        }
        assert!(unique_keys(b"{").is_err());
    }

    #[test]
    fn a_number_that_json_does_not_have_is_named_with_its_key() {
        for (json, expected) in [
            (r#"{"a": "NaN", "b": {"c": NaN}}"#, "'c' is NaN, which JSON does not have"),
            (r#"{"x\":NaN": 1, "b": [1, -Infinity]}"#, "'b' is -Infinity, which JSON does not have"),
            (r#"{"a": nan}"#, "expected ident"),
            (r#"{"a": "b"#, "EOF while parsing a string"),
            (r#"{"a": NoNe}"#, "expected value"),
        ] {
            let error = unique_keys(json.as_bytes()).unwrap_err();
            let message = named(json.as_bytes(), error).to_string();
            assert!(message.starts_with(expected), "{json}: {message}");
        }
    }
}
