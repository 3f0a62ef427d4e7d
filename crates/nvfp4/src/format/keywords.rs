//! Keywords of recipe syntax: what specs, rule files and tables call the choices of a format.

use super::Reduction;
use super::fp8::{BlockTile, Fp8Code, MxTile, ScaleStep};
use super::settings::{Finite, Rounding, Transform};
use nvfp4_kernels::quantize::Layout;
use nvfp4_spec::{Bound, ErrorPath, GlobalScale, Metric, Precision, Profile, Specials, Tile};

/// Keywords and what they stand for, for both reading and printing.
pub type Keywords<T> = &'static [(&'static str, T)];

/// The amax rules that are not named by a user.
#[derive(Clone, Copy)]
pub(super) enum Windowed {
    Max,
    MostRecent,
}

pub(super) const AMAX_RULES: Keywords<Windowed> = &[("max", Windowed::Max), ("most-recent", Windowed::MostRecent)];
pub(super) const CODES: Keywords<Fp8Code> = &[("e4m3", Fp8Code::E4m3), ("e5m2", Fp8Code::E5m2)];
pub(super) const STEPS: Keywords<ScaleStep> = &[("any-scale", ScaleStep::Any), ("pow2-scale", ScaleStep::PowersOfTwo)];
pub(super) const REDUCTIONS: Keywords<Reduction> = &[("reduced", Reduction::Max), ("local", Reduction::Local)];
pub(super) const BLOCK_TILES: Keywords<BlockTile> = &[("1x128", BlockTile::Row128), ("128x128", BlockTile::Square128)];
pub(super) const MX_TILES: Keywords<MxTile> = &[("1x32", MxTile::Row32), ("32x32", MxTile::Square32)];
pub(super) const PRECISIONS: Keywords<Precision> =
    &[("f32", Precision::F32), ("bf16", Precision::Bf16), ("f16", Precision::F16)];
/// Tiles of NVFP4.
pub const TILES: Keywords<Tile> = &[("1x16", Tile::Row16), ("16x16", Tile::Square16)];
/// What the 32-bit scale of NVFP4 belongs to.
pub const GLOBALS: Keywords<GlobalScale> =
    &[("per-tensor", GlobalScale::PerTensor), ("row-scaled", GlobalScale::PerRow)];
/// How values become codes.
pub const ROUNDINGS: Keywords<Rounding> = &[("nearest", Rounding::NearestEven), ("stochastic", Rounding::Stochastic)];
/// The last two are what files of earlier versions say.
pub(super) const SPECIALS: Keywords<Specials> = &[
    ("kernel-specials", Specials::Kernel),
    ("reference-specials", Specials::Reference),
    ("kernel-edge", Specials::Kernel),
    ("reference-edge", Specials::Reference),
];
pub(super) const PROFILES: Keywords<Profile> = &[
    ("transformer-engine", Profile::TransformerEngine),
    ("modelopt", Profile::ModelOpt),
    ("llm-compressor", Profile::LlmCompressor),
    ("torchao", Profile::TorchAo),
];
pub(super) const FINITES: Keywords<Finite> = &[("keep-non-finite", Finite::Keep), ("check-finite", Finite::Refuse)];
pub(super) const LAYOUTS: Keywords<Layout> = &[("linear", Layout::Linear), ("swizzled", Layout::Swizzled)];
/// What 4over6 compares.
pub const METRICS: Keywords<Metric> = &[("mae", Metric::Mae), ("mse", Metric::Mse)];
/// How 4over6 computes errors.
pub const ERROR_PATHS: Keywords<ErrorPath> = &[("strict", ErrorPath::Strict), ("fast", ErrorPath::Fast)];
pub(super) const HADAMARD: Keywords<Transform> = &[("hadamard", Transform::FixedSigns)];
pub(super) const BOUNDS: Keywords<Bound> = &[("448", Bound::E448), ("256", Bound::E256)];

/// What a keyword stands for.
pub fn find<T: Copy>(words: Keywords<T>, word: &str) -> Option<T> {
    words.iter().find(|(w, _)| *w == word).map(|(_, value)| *value)
}

/// The keyword of a value.
pub fn keyword<T: Copy + PartialEq>(words: Keywords<T>, value: T) -> String {
    words.iter().find(|(_, v)| *v == value).expect("every value has a keyword").0.to_string()
}

/// The keywords as a list for a message.
pub fn list<T>(words: Keywords<T>) -> String {
    words.iter().map(|(w, _)| *w).collect::<Vec<_>>().join(", ")
}

/// The keyword of a value that is not the default.
pub fn unless<T: Copy + PartialEq>(default: T, keywords: Keywords<T>, value: T) -> Option<String> {
    (value != default).then(|| keyword(keywords, value))
}
