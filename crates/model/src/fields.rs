//! Sizes, numbers and flags of `config.json`.

use crate::{Result, refused};
use serde_json::Value;

/// A configuration's JSON.
pub(crate) struct Fields<'a>(pub &'a Value);

impl Fields<'_> {
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    pub fn size(&self, name: &str) -> Result<usize> {
        self.optional_size(name)?.ok_or_else(|| refused(format!("config.json has no '{name}'")))
    }

    pub fn optional_size(&self, name: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        // No real size comes near; products of a few of these fit an address.
        let size = value.as_u64().filter(|size| (1..1 << 28).contains(size));
        let size = size.ok_or_else(|| refused(format!("config.json: '{name}' is {value}; expected a size")))?;
        Ok(Some(size as usize))
    }

    /// A size that no real model has more of; so much is set aside before weights are looked at.
    pub fn small_size(&self, name: &str) -> Result<Option<usize>> {
        match self.optional_size(name)? {
            Some(size) if size > 1 << 16 => {
                Err(refused(format!("config.json: '{name}' is {size}; expected at most {}", 1 << 16)))
            }
            size => Ok(size),
        }
    }

    /// A number above 0, if it is there.
    pub fn positive(&self, name: &str) -> Result<Option<f64>> {
        match self.number(name)? {
            Some(number) if number <= 0.0 => {
                Err(refused(format!("config.json: '{name}' is {number}; expected a positive number")))
            }
            number => Ok(number),
        }
    }

    pub fn number(&self, name: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = value.as_f64().filter(|number| number.is_finite());
        number.map(Some).ok_or_else(|| refused(format!("config.json: '{name}' is {value}; expected a number")))
    }

    pub fn flag(&self, name: &str) -> Option<bool> {
        self.get(name).and_then(Value::as_bool)
    }
}
