//! What the names of modules say: patterns over them, scales of keys and values, and parts of a
//! model. Which weights a server joins is in `joined`, which are kept by default in `keep`.

use crate::{Error, Result};
use regex_lite::Regex;
use std::fmt;
use std::str::FromStr;

/// A pattern over whole module names: a glob (`*` and `?`, dots included), or a regular expression
/// after `re:`.
///
/// ```
/// use nvfp4_checkpoint::Pattern;
///
/// let pattern: Pattern = "model.layers.0.*".parse()?;
/// assert!(pattern.matches("model.layers.0.mlp.up_proj") && !pattern.matches("model.layers.01.mlp.up_proj"));
/// assert!("re:.*(up|down)_proj".parse::<Pattern>()?.matches("model.layers.0.mlp.up_proj"));
/// # Ok::<(), nvfp4_checkpoint::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Pattern {
    text: String,
    regex: Regex,
}

impl Pattern {
    /// Whether it matches a whole module name.
    pub fn matches(&self, module: &str) -> bool {
        self.regex.is_match(module)
    }
}

impl FromStr for Pattern {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let body = match text.strip_prefix("re:") {
            Some(regex) => regex.to_string(),
            None => text.chars().map(glob_char).collect(),
        };
        let regex = Regex::new(&format!("^(?:{body})$"));
        let regex =
            regex.map_err(|e| Error::Refused(format!("the pattern '{text}' is not a regular expression: {e}")))?;
        Ok(Pattern { text: text.to_string(), regex })
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn glob_char(c: char) -> String {
    match c {
        '*' => ".*".to_string(),
        '?' => ".".to_string(),
        _ => regex_lite::escape(c.encode_utf8(&mut [0; 4])),
    }
}

/// The scale of an attention's keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KvScale<'n> {
    /// The attention, `X.self_attn`.
    pub attention: &'n str,
    /// Whose it is, `k` or `v`.
    pub letter: &'n str,
}

impl<'n> KvScale<'n> {
    /// The scale that has this name, in either dialect.
    pub fn named(tensor: &'n str) -> Option<Self> {
        let (module, last) = tensor.rsplit_once('.')?;
        let letter = last.strip_suffix("_scale")?;
        let attention = module.strip_suffix(&format!(".{letter}_proj")).unwrap_or(module);
        KvScale::new(attention, letter)
    }

    /// The scale of what a projection makes, `X.self_attn.k_proj` or `X.self_attn.v_proj`.
    pub fn of_projection(module: &'n str) -> Option<Self> {
        let (attention, last) = module.rsplit_once('.')?;
        KvScale::new(attention, last.strip_suffix("_proj")?)
    }

    fn new(attention: &'n str, letter: &'n str) -> Option<Self> {
        let known = attention.ends_with("self_attn") && ["k", "v"].contains(&letter);
        known.then_some(KvScale { attention, letter })
    }

    /// What ModelOpt calls it.
    pub fn modelopt(&self) -> String {
        format!("{}.{letter}_proj.{letter}_scale", self.attention, letter = self.letter)
    }

    /// What compressed-tensors calls it.
    pub fn compressed_tensors(&self) -> String {
        format!("{}.{}_scale", self.attention, self.letter)
    }
}

/// Which part of a model is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Preset {
    /// Every weight that the defaults allow.
    #[default]
    All,
    /// The feed-forward layers.
    Mlp,
    /// The experts of a mixture.
    Experts,
    /// The feed-forward layers and the output projections of attention.
    MlpAndOutput,
}

impl Preset {
    /// Whether a module belongs to it.
    pub fn has(self, module: &str) -> bool {
        let experts = module.contains(".experts.") || module.contains("block_sparse_moe.");
        let mlp = experts || module.contains(".mlp.") || module.contains(".feed_forward.");
        match self {
            Preset::All => true,
            Preset::Mlp => mlp,
            Preset::Experts => experts,
            Preset::MlpAndOutput => mlp || module.ends_with(".o_proj"),
        }
    }
}

impl FromStr for Preset {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "all" => Ok(Preset::All),
            "mlp" => Ok(Preset::Mlp),
            "experts" => Ok(Preset::Experts),
            "mlp+o" => Ok(Preset::MlpAndOutput),
            _ => Err(Error::Refused(format!("expected all, mlp, experts or mlp+o, got '{text}'"))),
        }
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Preset::All => "all",
            Preset::Mlp => "mlp",
            Preset::Experts => "experts",
            Preset::MlpAndOutput => "mlp+o",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_whole_names_and_escape_the_rest() {
        let matches = |pattern: &str, name: &str| pattern.parse::<Pattern>().unwrap().matches(name);
        assert!(matches("*.o_proj", "model.layers.0.self_attn.o_proj"));
        assert!(!matches("o_proj", "model.layers.0.self_attn.o_proj"));
        assert!(!matches("a.b", "aXb") && matches("a?b", "aXb"));
        assert!(matches("re:model\\.layers\\.[0-3]\\..*", "model.layers.2.mlp.up_proj"));
        let error = "re:(".parse::<Pattern>().unwrap_err().to_string();
        assert!(error.starts_with("the pattern 're:(' is not a regular expression"), "{error}");
    }

    #[test]
    fn scales_of_keys_and_values_are_known_by_both_names() {
        for letter in ["k", "v"] {
            let scale = KvScale { attention: "l.0.self_attn", letter };
            assert_eq!(KvScale::named(&scale.modelopt()), Some(scale));
            assert_eq!(KvScale::named(&scale.compressed_tensors()), Some(scale));
            assert_eq!(KvScale::of_projection(&format!("l.0.self_attn.{letter}_proj")), Some(scale));
        }
        assert_eq!(
            KvScale::named("l.0.self_attn.k_proj.k_scale").unwrap().compressed_tensors(),
            "l.0.self_attn.k_scale"
        );
        assert_eq!(KvScale::named("l.0.self_attn.k_proj.weight_scale"), None);
        assert_eq!(KvScale::named("l.0.self_attn.q_scale"), None);
        assert_eq!(KvScale::named("l.0.mixer.k_scale"), None);
        assert_eq!(KvScale::of_projection("l.0.self_attn.qkv_proj"), None);
    }

    #[test]
    fn presets_choose_parts_of_a_layer() {
        let chosen = |preset: &str| {
            let preset: Preset = preset.parse().unwrap();
            ["l.self_attn.q_proj", "l.self_attn.o_proj", "l.mlp.up_proj", "l.mlp.experts.0.up_proj"]
                .map(|m| preset.has(m))
        };
        assert_eq!(chosen("all"), [true; 4]);
        assert_eq!(chosen("mlp"), [false, false, true, true]);
        assert_eq!(chosen("experts"), [false, false, false, true]);
        assert_eq!(chosen("mlp+o"), [false, true, true, true]);
        assert!("most".parse::<Preset>().is_err());
    }
}
