//! Formats and specs to text. Defaults are left out, but for the FP8 code.

use super::*;
use crate::ScaleRule;
use crate::recipe::format::{AmaxRule, Delayed, Epsilon, Family, Format, Nvfp4, Stored};
use crate::recipe::spec::ColumnSource;
use crate::recipe::training::Nvfp4Training;
use std::fmt;

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
                let step = unless(ScaleStep::PowersOfTwo, STEPS, block.step);
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

/// `nvfp4`, and the switches that are not as usual, in the words of a rule file.
impl fmt::Display for Nvfp4Training {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Nvfp4Training::default();
        let transform = match self.transform {
            Transform::Signs(signs) => Some(format!("signs {:#06x}", signs.0)),
            transform => unless(default.transform, TRANSFORMS, transform),
        };
        let switches = [
            ("transform", transform),
            ("gradients", unless(default.gradients, ROUNDINGS, self.gradients)),
            ("weights", unless(default.weights, TILES, self.weights)),
            ("activations", unless(default.activations, GLOBALS, self.activations)),
            ("four-over-six", unless(default.four_over_six, SCOPES, self.four_over_six)),
            ("bound-256", unless(default.bound_256, SCOPES, self.bound_256)),
            ("metric", unless(default.metric, METRICS, self.metric)),
            ("error", unless(default.error, ERROR_PATHS, self.error)),
        ];
        let switches: Vec<String> =
            switches.into_iter().filter_map(|(key, word)| Some(format!("{key} = {}", word?))).collect();
        match switches.is_empty() {
            true => f.write_str("nvfp4"),
            false => write!(f, "nvfp4 with {}", switches.join(", ")),
        }
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
