//! The words of settings. A word that is not known is a `ValueError` that names the known ones.

use nvfp4::{
    Accumulator, Bound as E4m3Bound, Directions, ErrorPath, Finite, GlobalScale, Layout, Metric, Precision, Profile,
    Rounding, ScaleRule, Side, Specials, Tile,
};
use nvfp4_recipe::{AttentionSlot, BackwardOverride, LinearSlot, Reduction, Slot};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Words and what they stand for.
pub type Words<T> = &'static [(&'static str, T)];

pub const TILES: Words<Tile> = &[("1x16", Tile::Row16), ("16x16", Tile::Square16)];
pub const GLOBALS: Words<GlobalScale> = &[("per-tensor", GlobalScale::PerTensor), ("row-scaled", GlobalScale::PerRow)];
pub const ROUNDINGS: Words<Rounding> = &[("nearest", Rounding::NearestEven), ("stochastic", Rounding::Stochastic)];
pub const DIRECTIONS: Words<Directions> =
    &[("row", Directions::Row), ("column", Directions::Column), ("both", Directions::Both)];
pub const SIDES: Words<Side> = &[("row", Side::Row), ("column", Side::Column)];
pub const SPECIALS: Words<Specials> = &[("kernel", Specials::Kernel), ("reference", Specials::Reference)];
pub const PROFILES: Words<Profile> = &[
    ("transformer-engine", Profile::TransformerEngine),
    ("modelopt", Profile::ModelOpt),
    ("llm-compressor", Profile::LlmCompressor),
    ("torchao", Profile::TorchAo),
];
pub const LAYOUTS: Words<Layout> = &[("linear", Layout::Linear), ("swizzled", Layout::Swizzled)];
pub const FINITES: Words<Finite> = &[("keep", Finite::Keep), ("refuse", Finite::Refuse)];
pub const ACCUMULATORS: Words<Accumulator> =
    &[("precise", Accumulator::Precise), ("split", Accumulator::Split), ("fast", Accumulator::Fast)];
pub const PRECISIONS: Words<Precision> =
    &[("float32", Precision::F32), ("bfloat16", Precision::Bf16), ("float16", Precision::F16)];
pub const REDUCTIONS: Words<Reduction> = &[("max", Reduction::Max), ("local", Reduction::Local)];
pub const BACKWARDS: Words<BackwardOverride> = &[
    ("none", BackwardOverride::None),
    ("high-precision", BackwardOverride::HighPrecision),
    ("dequantized", BackwardOverride::Dequantized),
];
pub const SCALE_RULES: Words<ScaleRule> = {
    const fn rule(metric: Metric, error: ErrorPath, bound: E4m3Bound) -> ScaleRule {
        ScaleRule::FourOverSix { metric, error, bound }
    }
    use {E4m3Bound::*, ErrorPath::*, Metric::*};
    &[
        ("six", ScaleRule::Six),
        ("mse", ScaleRule::Mse),
        ("modelopt-mse", ScaleRule::ModelOptMse),
        ("modelopt-4over6", ScaleRule::ModelOptFourOverSix),
        ("4over6-mae-strict-448", rule(Mae, Strict, E448)),
        ("4over6-mae-strict-256", rule(Mae, Strict, E256)),
        ("4over6-mae-fast-448", rule(Mae, Fast, E448)),
        ("4over6-mae-fast-256", rule(Mae, Fast, E256)),
        ("4over6-mse-strict-448", rule(Mse, Strict, E448)),
        ("4over6-mse-strict-256", rule(Mse, Strict, E256)),
        ("4over6-mse-fast-448", rule(Mse, Fast, E448)),
        ("4over6-mse-fast-256", rule(Mse, Fast, E256)),
    ]
};

/// What a word stands for; `setting` is what a user calls it.
pub fn choose<T: Clone>(setting: &str, words: Words<T>, word: &str) -> PyResult<T> {
    words.iter().find(|(known, _)| *known == word).map(|(_, value)| value.clone()).ok_or_else(|| {
        let known: Vec<String> = words.iter().map(|(known, _)| format!("'{known}'")).collect();
        PyValueError::new_err(format!("unknown {setting} '{word}'; there are {}", known.join(", ")))
    })
}

/// The word for a value.
pub fn word<T: PartialEq>(words: Words<T>, value: T) -> &'static str {
    words.iter().find(|(_, known)| *known == value).map_or("?", |(word, _)| word)
}

/// An element type: a word, `torch.bfloat16`, `numpy.float32` or a numpy dtype.
pub fn precision(dtype: &Bound<'_, PyAny>) -> PyResult<Precision> {
    let text = match dtype.extract::<String>() {
        Ok(text) => text,
        Err(_) => match dtype.getattr("__name__") {
            Ok(name) => name.to_string(),
            Err(_) => dtype.str()?.to_string(),
        },
    };
    choose("dtype", PRECISIONS, text.strip_prefix("torch.").unwrap_or(&text))
}

/// The slot of a linear layer, of an expert of a grouped one, or of attention.
pub fn slot(text: &str, expert: Option<u32>) -> PyResult<Slot> {
    let linear = LinearSlot::ALL.into_iter().find(|slot| slot.name() == text);
    let attention = AttentionSlot::ALL.into_iter().find(|slot| slot.name() == text);
    match (linear, attention, expert) {
        (Some(slot), _, Some(expert)) => Ok(Slot::Grouped { slot, expert }),
        (Some(slot), _, None) => Ok(Slot::Linear(slot)),
        (_, Some(slot), None) => Ok(Slot::Attention(slot)),
        (_, Some(_), Some(_)) => Err(PyValueError::new_err("attention has no experts; leave `expert` out")),
        (None, None, _) => {
            let linear = LinearSlot::ALL.map(LinearSlot::name);
            let attention = AttentionSlot::ALL.map(AttentionSlot::name);
            let known = [&linear[..], &attention[..]].concat().join("', '");
            Err(PyValueError::new_err(format!("unknown slot '{text}'; there are '{known}'")))
        }
    }
}
