//! How positions are encoded: what `config.json` says about rotary embeddings, as llama.cpp's keys
//! and divisors.

use super::container::Value;
use super::family::Family;
use super::object::Object;
use crate::Result;
use serde_json::Value as Json;

/// The base of the frequencies by default.
const BASE: f64 = 10_000.0;

/// How positions are encoded.
#[derive(Debug)]
pub(super) struct Rope {
    base: f64,
    scaling: Scaling,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Scaling {
    None,
    Linear { factor: f64 },
    Yarn { factor: f64, original: u32 },
    Llama3 { factor: f64, low: f64, high: f64, original: u32 },
}

impl Rope {
    /// From `rope_theta` and `rope_scaling`, or `rope_parameters`, which newer configurations have
    /// for both. Where two of them give a value, the values must be equal.
    pub fn of(config: &Object<'_>, family: Family) -> Result<Self> {
        whole_heads(config)?;
        let (mut base, mut scaling) = (config.positive("rope_theta")?, None);
        for key in ["rope_parameters", "rope_scaling"] {
            let Some(own) = config.object(key)? else { continue };
            whole_heads(&own)?;
            let (here, of) = (own.positive("rope_theta")?, Scaling::of(&own)?);
            if base.zip(here).is_some_and(|(a, b)| a != b) {
                return Err(own.wrong("'rope_theta' differs from the one elsewhere in config.json; remove one"));
            }
            if scaling.is_some_and(|other| other != of) {
                return Err(config.wrong("'rope_parameters' and 'rope_scaling' differ; remove one"));
            }
            (base, scaling) = (base.or(here), Some(of));
        }
        let scaling = scaling.unwrap_or(Scaling::None);
        if matches!(scaling, Scaling::Llama3 { .. }) && family != Family::Llama {
            let family = family.name();
            return Err(config.wrong(format!("llama.cpp's '{family}' models do not have the rope type 'llama3'")));
        }
        Ok(Rope { base: base.unwrap_or(BASE), scaling })
    }

    /// As llama.cpp's keys, without the architecture before them.
    pub fn keys(&self) -> Vec<(&'static str, Value)> {
        let float = |key, of: f64| (key, Value::F32(of as f32));
        let kind = |of: &str| ("rope.scaling.type", Value::Text(of.to_string()));
        let mut keys = vec![float("rope.freq_base", self.base)];
        match self.scaling {
            Scaling::None | Scaling::Llama3 { .. } => {}
            Scaling::Linear { factor } => keys.extend([float("rope.scaling.factor", factor), kind("linear")]),
            Scaling::Yarn { factor, original } => keys.extend([
                float("rope.scaling.factor", factor),
                kind("yarn"),
                ("rope.scaling.original_context_length", Value::U32(original)),
            ]),
        }
        keys
    }

    /// What each frequency is divided by, where that is not one number: Llama 3's rule keeps short
    /// waves, divides long ones by the factor, and interpolates between.
    pub fn divisors(&self, head_dim: u64) -> Option<Vec<f32>> {
        let Scaling::Llama3 { factor, low, high, original } = self.scaling else { return None };
        let original = f64::from(original);
        let divisor = |i: u64| {
            let wavelength = 2.0 * std::f64::consts::PI * self.base.powf(2.0 * i as f64 / head_dim as f64);
            if wavelength < original / high {
                1.0
            } else if wavelength > original / low {
                factor
            } else {
                let smooth = (original / wavelength - low) / (high - low);
                1.0 / ((1.0 - smooth) / factor + smooth)
            }
        };
        Some((0..head_dim / 2).map(|i| divisor(i) as f32).collect())
    }
}

/// Refuses heads that are rotated only in part.
fn whole_heads(object: &Object<'_>) -> Result<()> {
    match object.positive("partial_rotary_factor")? {
        None | Some(1.0) => Ok(()),
        Some(part) => Err(object.wrong(format!(
            "'partial_rotary_factor' is {part}; llama.cpp rotates whole heads in these models, so \
             only 1 is written as GGUF"
        ))),
    }
}

impl Scaling {
    fn of(own: &Object<'_>) -> Result<Self> {
        if let Some((key, value)) = own.fields().iter().find(|(_, value)| value.is_object()) {
            return Err(own.unexpected(key, "one encoding for all layers", value));
        }
        let kind = match (own.text("rope_type")?, own.text("type")?) {
            (Some(a), Some(b)) if a != b => {
                return Err(own.wrong(format!("'rope_type' is '{a}' and 'type' is '{b}'; remove one")));
            }
            (a, b) => a.or(b),
        };
        let need = |key: &str| own.positive(key)?.ok_or_else(|| own.missing(key));
        let original = || {
            let key = "original_max_position_embeddings";
            let n = need(key)?;
            let whole = n.fract() == 0.0 && n <= f64::from(u32::MAX);
            let wrong = || own.unexpected(key, "a positive whole number", own.get(key).unwrap_or(&Json::Null));
            if whole { Ok(n as u32) } else { Err(wrong()) }
        };
        Ok(match kind {
            None if own.get("factor").is_some() => {
                return Err(own.wrong("it has a 'factor' and no 'rope_type', which says what the factor is for"));
            }
            None | Some("default") => Scaling::None,
            Some("linear") => Scaling::Linear { factor: need("factor")? },
            Some("yarn") => {
                let factor = need("factor")?;
                llama_cpps_yarn(own, factor)?;
                Scaling::Yarn { factor, original: original()? }
            }
            Some("llama3") => {
                let (low, high) = (need("low_freq_factor")?, need("high_freq_factor")?);
                if high <= low {
                    let text =
                        format!("'high_freq_factor' is {high}, which must be more than 'low_freq_factor', {low}");
                    return Err(own.wrong(text));
                }
                Scaling::Llama3 { factor: need("factor")?, low, high, original: original()? }
            }
            Some(other) => return Err(own.wrong(format!("the rope type '{other}' is not written as GGUF"))),
        })
    }
}

/// Refuses settings of YaRN that differ from llama.cpp's defaults.
fn llama_cpps_yarn(own: &Object<'_>, factor: f64) -> Result<()> {
    let attention = 0.1 * factor.max(1.0).ln() + 1.0;
    for (key, expected) in [("beta_fast", 32.0), ("beta_slow", 1.0), ("attention_factor", attention)] {
        if own.positive(key)?.is_some_and(|x| (x - expected).abs() > 1e-6) {
            return Err(own.wrong(format!("'{key}' is not {expected}, the only value that is written as GGUF")));
        }
    }
    if let Some(key) = ["mscale", "mscale_all_dim"].into_iter().find(|key| own.get(key).is_some()) {
        return Err(own.wrong(format!("'{key}' is not written as GGUF")));
    }
    own.must_be("truncate", true, true, "llama.cpp rounds the dimensions between which YaRN interpolates")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn llama_3s_divisors_go_from_one_to_the_factor() {
        let json = json!({ "rope_theta": 500_000.0, "rope_scaling": { "rope_type": "llama3", "factor": 8.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192 }});
        let rope = |json: &Json| Rope::of(&Object::new("config.json", json).unwrap(), Family::Llama);
        let divisors = rope(&json).unwrap().divisors(128).unwrap();
        assert_eq!((divisors.len(), divisors[0], divisors[63]), (64, 1.0, 8.0));
        assert!(divisors.is_sorted() && divisors.iter().any(|d| (1.5..7.5).contains(d)));
        let error = rope(&json!({ "rope_scaling": { "rope_type": "longrope" } })).unwrap_err().to_string();
        assert!(error.contains("the rope type 'longrope' is not written"), "{error}");
    }
}
