//! Formats and specs as text: what tables print is what rule files say. The grammar is in the documentation of [`QuantSpec`].

use super::format::{
    AmaxRule, BlockTile, Delayed, Epsilon, Family, Format, Fp8, Fp8Block, Fp8Code, MxTile, Mxfp8, Nvfp4, Reduction,
    ScaleStep, Stored,
};
use super::name::Name;
use super::spec::{ColumnSource, QuantSpec};
use crate::quantizer::{Finite, Quantizer, QuantizerBuilder, Transform};
use crate::{
    Bound, Edge, Error, ErrorPath, GlobalScale, Layout, Metric, Precision, Profile, Result, Rounding, ScaleRule, Signs,
    Tile,
};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// Words and what they stand for, for both reading and printing.
type Words<T> = &'static [(&'static str, T)];

/// The amax rules that are not named by a user.
#[derive(Clone, Copy)]
enum Windowed {
    Max,
    MostRecent,
}

const AMAX_RULES: Words<Windowed> = &[("max", Windowed::Max), ("most-recent", Windowed::MostRecent)];
const CODES: Words<Fp8Code> = &[("e4m3", Fp8Code::E4m3), ("e5m2", Fp8Code::E5m2)];
const STEPS: Words<ScaleStep> = &[("any-scale", ScaleStep::Any), ("pow2-scale", ScaleStep::PowerOfTwo)];
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
const LAYOUTS: Words<Layout> = &[("linear", Layout::Linear), ("swizzled", Layout::Swizzled)];
pub(super) const METRICS: Words<Metric> = &[("mae", Metric::Mae), ("mse", Metric::Mse)];
pub(super) const ERROR_PATHS: Words<ErrorPath> = &[("strict", ErrorPath::Strict), ("fast", ErrorPath::Fast)];
const BOUNDS: Words<Bound> = &[("448", Bound::E448), ("256", Bound::E256)];

/// What a word stands for.
pub(super) fn find<T: Copy>(words: Words<T>, word: &str) -> Option<T> {
    words.iter().find(|(w, _)| *w == word).map(|(_, value)| *value)
}

/// The words as a list for a message.
pub(super) fn list<T>(words: Words<T>) -> String {
    words.iter().map(|(w, _)| *w).collect::<Vec<_>>().join(", ")
}

fn word<T: Copy + PartialEq>(words: Words<T>, value: T) -> String {
    words.iter().find(|(_, v)| *v == value).expect("every value has a word").0.to_string()
}

/// The word of a value that is not the default.
fn unless<T: Copy + PartialEq>(default: T, words: Words<T>, value: T) -> Option<String> {
    (value != default).then(|| word(words, value))
}

fn epsilon_text(epsilon: Epsilon) -> Option<String> {
    (epsilon != Epsilon::ZERO).then(|| format!("epsilon={}", epsilon.value()))
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, options): (_, Vec<Option<String>>) = match self {
            Format::HighPrecision(Stored::AsIs) => ("high-precision", vec![]),
            Format::HighPrecision(Stored::Cast(precision)) => {
                ("high-precision", vec![Some(word(PRECISIONS, *precision))])
            }
            Format::Fp8(fp8) => {
                let step = unless(ScaleStep::Any, STEPS, fp8.step);
                ("fp8", vec![Some(word(CODES, fp8.code)), step, epsilon_text(fp8.epsilon)])
            }
            Format::Delayed(delayed) => ("fp8-delayed", delayed_options(delayed)),
            Format::Fp8Block(block) => {
                let tile = unless(BlockTile::Row128, BLOCK_TILES, block.tile);
                let step = unless(ScaleStep::PowerOfTwo, STEPS, block.step);
                ("fp8-block", vec![Some(word(CODES, block.code)), tile, step, epsilon_text(block.epsilon)])
            }
            Format::Mxfp8(mx) => ("mxfp8", vec![Some(word(CODES, mx.code)), unless(MxTile::Row32, MX_TILES, mx.tile)]),
            Format::Nvfp4(format) => ("nvfp4", nvfp4_options(format)),
            Format::Custom(name) => ("custom", vec![Some(name.to_string())]),
        };
        f.write_str(name)?;
        let options: Vec<String> = options.into_iter().flatten().collect();
        if options.is_empty() { Ok(()) } else { write!(f, "({})", options.join(", ")) }
    }
}

fn delayed_options(delayed: &Delayed) -> Vec<Option<String>> {
    let default = Delayed::new(delayed.code());
    let amax = match delayed.amax() {
        AmaxRule::Max => None,
        AmaxRule::MostRecent => Some("most-recent".to_string()),
        AmaxRule::Named(name) => Some(format!("amax={name}")),
    };
    vec![
        Some(word(CODES, delayed.code())),
        (delayed.history() != default.history()).then(|| format!("history={}", delayed.history())),
        (delayed.margin() != default.margin()).then(|| format!("margin={}", delayed.margin())),
        amax,
        unless(default.reduction(), REDUCTIONS, delayed.reduction()),
    ]
}

fn nvfp4_options(format: &Nvfp4) -> Vec<Option<String>> {
    let (settings, default) = (format.settings(), Nvfp4::default().settings());
    let transform = match settings.transform {
        Transform::None => None,
        Transform::FixedSigns => Some("hadamard".to_string()),
        Transform::Signs(signs) => Some(format!("hadamard={:#06x}", signs.0)),
    };
    let rule = match settings.mode.rule {
        ScaleRule::Six => None,
        ScaleRule::FourOverSix { metric, error, bound } => {
            Some(format!("4over6-{}-{}-{}", word(METRICS, metric), word(ERROR_PATHS, error), word(BOUNDS, bound)))
        }
    };
    vec![
        unless(default.mode.tile, TILES, settings.mode.tile),
        unless(default.mode.global, GLOBALS, settings.mode.global),
        transform,
        unless(default.rounding, ROUNDINGS, settings.rounding),
        rule,
        unless(default.mode.edge, EDGES, settings.mode.edge),
        unless(default.mode.profile, PROFILES, settings.mode.profile),
        unless(default.layout, LAYOUTS, settings.layout),
        unless(default.finite, FINITES, settings.finite),
    ]
}

impl fmt::Display for Nvfp4 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Format::Nvfp4(*self).fmt(f)
    }
}

impl fmt::Display for QuantSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            QuantSpec::Uniform(format) => format.fmt(f),
            QuantSpec::Split(split) => {
                write!(f, "{} / {}", split.row(), split.col())?;
                match split.source() {
                    ColumnSource::Original => Ok(()),
                    ColumnSource::RowDequantized => f.write_str(" from row"),
                }
            }
        }
    }
}

impl FromStr for QuantSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let Some((row, col)) = text.split_once('/') else { return Ok(QuantSpec::Uniform(text.parse()?)) };
        let (col, source) = match col.trim().strip_suffix("from row") {
            Some(col) => (col, ColumnSource::RowDequantized),
            None => (col, ColumnSource::Original),
        };
        QuantSpec::split(row.parse()?, col.parse()?, source)
    }
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (name, mut options) = Options::split(text.trim())?;
        let format = match name {
            "high-precision" => Format::HighPrecision(options.word(PRECISIONS)?.map_or(Stored::AsIs, Stored::Cast)),
            "fp8" => Format::Fp8(Fp8 {
                code: options.word(CODES)?.unwrap_or_default(),
                step: options.word(STEPS)?.unwrap_or(ScaleStep::Any),
                epsilon: options.epsilon()?,
            }),
            "fp8-delayed" => {
                let amax = match (options.word(AMAX_RULES)?, options.value("amax")?) {
                    (Some(_), Some(_)) => return Err(options.error("two amax rules: leave one out")),
                    (_, Some(name)) => AmaxRule::Named(name.parse()?),
                    (Some(Windowed::MostRecent), _) => AmaxRule::MostRecent,
                    (Some(Windowed::Max) | None, _) => AmaxRule::Max,
                };
                let delayed = Delayed::new(options.word(CODES)?.unwrap_or_default()).with_amax(amax);
                let history = options.number("history", delayed.history() as u32)?;
                let margin = options.number("margin", delayed.margin().into())?;
                let reduction = options.word(REDUCTIONS)?.unwrap_or(Reduction::Max);
                let delayed = delayed.with_history(history)?.with_margin(margin)?;
                Format::Delayed(delayed.with_reduction(reduction))
            }
            "fp8-block" => Format::Fp8Block(Fp8Block {
                code: options.word(CODES)?.unwrap_or_default(),
                tile: options.word(BLOCK_TILES)?.unwrap_or_default(),
                step: options.word(STEPS)?.unwrap_or(ScaleStep::PowerOfTwo),
                epsilon: options.epsilon()?,
            }),
            "mxfp8" => Format::Mxfp8(Mxfp8 {
                code: options.word(CODES)?.unwrap_or_default(),
                tile: options.word(MX_TILES)?.unwrap_or_default(),
            }),
            "nvfp4" => Format::Nvfp4(Nvfp4::new(nvfp4_settings(&mut options)?)?),
            "custom" => Format::Custom(options.name()?),
            _ => {
                let known = "high-precision, fp8, fp8-delayed, fp8-block, mxfp8, nvfp4, custom(NAME)";
                return Err(Error::Spec(format!("'{text}': unknown format '{name}'; there are {known}")));
            }
        };
        options.finish(name)?;
        Ok(format)
    }
}

fn nvfp4_settings(options: &mut Options<'_>) -> Result<QuantizerBuilder> {
    let transform = match (options.flag("hadamard"), options.value("hadamard")?) {
        (true, Some(_)) => return Err(options.error("two Hadamard transforms: leave one out")),
        (true, None) => Transform::FixedSigns,
        (false, Some(value)) => Transform::Signs(options.signs(value)?),
        (false, None) => Transform::None,
    };
    let builder = Quantizer::builder()
        .tile(options.word(TILES)?.unwrap_or_default())
        .global_scale(options.word(GLOBALS)?.unwrap_or_default())
        .rounding(options.word(ROUNDINGS)?.unwrap_or_default())
        .edge(options.word(EDGES)?.unwrap_or_default())
        .profile(options.word(PROFILES)?.unwrap_or_default())
        .layout(options.word(LAYOUTS)?.unwrap_or_default())
        .finite(options.word(FINITES)?.unwrap_or_default());
    Ok(builder.transform(transform).scale_rule(options.scale_rule()?))
}

/// The words between a format's brackets. Each is taken once; what nobody takes is an error that lists what would have been.
struct Options<'a> {
    text: &'a str,
    left: Vec<&'a str>,
    allowed: Vec<String>,
}

impl<'a> Options<'a> {
    /// A format's name and its options.
    fn split(text: &'a str) -> Result<(&'a str, Self)> {
        let options = |left| Options { text, left, allowed: Vec::new() };
        let Some((name, rest)) = text.split_once('(') else { return Ok((text, options(Vec::new()))) };
        match rest.strip_suffix(')') {
            Some(inside) => Ok((name.trim(), options(inside.split(',').map(str::trim).collect()))),
            None => Err(options(Vec::new()).error("the bracket is not closed")),
        }
    }

    fn error(&self, reason: &str) -> Error {
        Error::Spec(format!("'{}': {reason}", self.text))
    }

    /// Takes the option for which there is an answer, if there is one.
    fn take<T>(&mut self, allowed: String, answer: impl Fn(&'a str) -> Option<T>) -> Result<Option<T>> {
        let mut taken = Vec::new();
        self.left.retain(|option| match answer(option) {
            Some(value) => {
                taken.push((*option, value));
                false
            }
            None => true,
        });
        self.allowed.push(allowed);
        if let [(first, _), (second, _), ..] = &taken[..] {
            return Err(self.error(&format!("'{first}' and '{second}' cannot both be: leave one out")));
        }
        Ok(taken.pop().map(|(_, value)| value))
    }

    fn word<T: Copy>(&mut self, words: Words<T>) -> Result<Option<T>> {
        self.take(list(words), |option| find(words, option))
    }

    fn flag(&mut self, word: &str) -> bool {
        self.take(word.to_string(), |option| (option == word).then_some(())).is_ok_and(|taken| taken.is_some())
    }

    /// The text behind `key=`.
    fn value(&mut self, key: &str) -> Result<Option<&'a str>> {
        self.take(format!("{key}=…"), |option| {
            option.split_once('=').filter(|(k, _)| k.trim() == key).map(|(_, value)| value.trim())
        })
    }

    fn number(&mut self, key: &str, default: u32) -> Result<u32> {
        let Some(value) = self.value(key)? else { return Ok(default) };
        value.parse().map_err(|_| self.error(&format!("{key} needs a whole number, got '{value}'")))
    }

    fn epsilon(&mut self) -> Result<Epsilon> {
        let Some(value) = self.value("epsilon")? else { return Ok(Epsilon::ZERO) };
        Epsilon::new(value.parse().map_err(|_| self.error(&format!("epsilon needs a number, got '{value}'")))?)
    }

    fn signs(&self, value: &str) -> Result<Signs> {
        let digits = value.strip_prefix("0x").filter(|d| d.len() <= 4 && d.chars().all(|c| c.is_ascii_hexdigit()));
        digits.and_then(|d| u16::from_str_radix(d, 16).ok()).map(Signs).ok_or_else(|| {
            self.error(&format!("hadamard needs 16 signs as a hexadecimal number, as in 0xd7e8, got '{value}'"))
        })
    }

    fn scale_rule(&mut self) -> Result<ScaleRule> {
        let four_over_six = |option: &str| {
            let mut words = option.strip_prefix("4over6-")?.splitn(3, '-');
            Some(ScaleRule::FourOverSix {
                metric: find(METRICS, words.next()?)?,
                error: find(ERROR_PATHS, words.next()?)?,
                bound: find(BOUNDS, words.next()?)?,
            })
        };
        let allowed = "six, 4over6-{mae,mse}-{strict,fast}-{448,256}".to_string();
        let rule = self.take(allowed, |option| match option {
            "six" => Some(ScaleRule::Six),
            _ => four_over_six(option),
        })?;
        Ok(rule.unwrap_or_default())
    }

    /// The only option, as a name.
    fn name(&mut self) -> Result<Name> {
        match std::mem::take(&mut self.left)[..] {
            [name] => name.parse(),
            _ => Err(self.error("expected one name, as in custom(my-format)")),
        }
    }

    fn finish(self, name: &str) -> Result<()> {
        match self.left.first() {
            None => Ok(()),
            Some(option) => {
                let allowed = self.allowed.join(", ");
                Err(self.error(&format!("unknown option '{option}'; {name} takes {allowed}")))
            }
        }
    }
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

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Family::HighPrecision => f.write_str("high-precision"),
            Family::Fp8 => f.write_str("fp8"),
            Family::Fp8Block => f.write_str("fp8-block"),
            Family::Mxfp8 => f.write_str("mxfp8"),
            Family::Nvfp4 => f.write_str("nvfp4"),
            Family::Custom(name) => write!(f, "custom({name})"),
        }
    }
}
