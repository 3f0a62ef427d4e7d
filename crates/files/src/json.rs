//! A check that JSON readers leave out.

use serde::de::{self, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::collections::BTreeSet;
use std::fmt;

/// Checks that no object in a JSON text has a key twice; readers would silently keep one of the values.
pub fn unique_keys(json: &[u8]) -> serde_json::Result<()> {
    serde_json::from_slice::<UniqueKeys>(json).map(drop)
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
}
