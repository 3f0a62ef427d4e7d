//! Formats and specs as text: what tables print is what rule files say. The grammar is in the documentation of [`QuantSpec`].

mod parse;
mod print;

use super::format::{BlockTile, Fp8Code, MxTile, Reduction, ScaleStep};
use super::spec::QuantSpec;
use super::training::Scope;
use crate::quantizer::Finite;
use crate::{
    Bound, Edge, Error, ErrorPath, GlobalScale, Layout, Metric, Precision, Profile, Rounding, Tile, Transform,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Words and what they stand for, for both reading and printing.
pub(super) type Words<T> = &'static [(&'static str, T)];

/// The amax rules that are not named by a user.
#[derive(Clone, Copy)]
enum Windowed {
    Max,
    MostRecent,
}

const AMAX_RULES: Words<Windowed> = &[("max", Windowed::Max), ("most-recent", Windowed::MostRecent)];
const CODES: Words<Fp8Code> = &[("e4m3", Fp8Code::E4m3), ("e5m2", Fp8Code::E5m2)];
const STEPS: Words<ScaleStep> = &[("any-scale", ScaleStep::Any), ("pow2-scale", ScaleStep::PowersOfTwo)];
const REDUCTIONS: Words<Reduction> = &[("reduced", Reduction::Max), ("local", Reduction::Local)];
const BLOCK_TILES: Words<BlockTile> = &[("1x128", BlockTile::Row128), ("128x128", BlockTile::Square128)];
const MX_TILES: Words<MxTile> = &[("1x32", MxTile::Row32), ("32x32", MxTile::Square32)];
const PRECISIONS: Words<Precision> = &[("f32", Precision::F32), ("bf16", Precision::Bf16), ("f16", Precision::F16)];
pub(super) const TILES: Words<Tile> = &[("1x16", Tile::Row16), ("16x16", Tile::Square16)];
pub(super) const GLOBALS: Words<GlobalScale> =
    &[("per-tensor", GlobalScale::PerTensor), ("row-scaled", GlobalScale::PerRow)];
pub(super) const ROUNDINGS: Words<Rounding> =
    &[("nearest", Rounding::NearestEven), ("stochastic", Rounding::Stochastic)];
const EDGES: Words<Edge> = &[("kernel-edge", Edge::Kernel), ("reference-edge", Edge::Reference)];
const PROFILES: Words<Profile> = &[
    ("transformer-engine", Profile::TransformerEngine),
    ("modelopt", Profile::ModelOpt),
    ("llm-compressor", Profile::LlmCompressor),
    ("torchao", Profile::TorchAo),
];
const FINITES: Words<Finite> = &[("keep-non-finite", Finite::Keep), ("check-finite", Finite::Refuse)];
/// What a whole recipe says, where a single spec says one of [`FINITES`].
pub(super) const POLICIES: Words<Finite> = &[("keep", Finite::Keep), ("refuse", Finite::Refuse)];
const LAYOUTS: Words<Layout> = &[("linear", Layout::Linear), ("swizzled", Layout::Swizzled)];
pub(super) const METRICS: Words<Metric> = &[("mae", Metric::Mae), ("mse", Metric::Mse)];
pub(super) const ERROR_PATHS: Words<ErrorPath> = &[("strict", ErrorPath::Strict), ("fast", ErrorPath::Fast)];
pub(super) const TRANSFORMS: Words<Transform> = &[("none", Transform::None), ("fixed-signs", Transform::FixedSigns)];
pub(super) const SCOPES: Words<Scope> =
    &[("none", Scope::None), ("weights", Scope::Weights), ("activations", Scope::Activations), ("all", Scope::All)];
const HADAMARD: Words<Transform> = &[("hadamard", Transform::FixedSigns)];
const BOUNDS: Words<Bound> = &[("448", Bound::E448), ("256", Bound::E256)];

/// What a word stands for.
pub(super) fn find<T: Copy>(words: Words<T>, word: &str) -> Option<T> {
    words.iter().find(|(w, _)| *w == word).map(|(_, value)| *value)
}

/// The word of a value.
pub(super) fn word<T: Copy + PartialEq>(words: Words<T>, value: T) -> String {
    words.iter().find(|(_, v)| *v == value).expect("every value has a word").0.to_string()
}

/// The words as a list for a message.
pub(super) fn list<T>(words: Words<T>) -> String {
    words.iter().map(|(w, _)| *w).collect::<Vec<_>>().join(", ")
}

impl Serialize for QuantSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for QuantSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}
