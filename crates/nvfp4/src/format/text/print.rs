//! Formats and specs to text. Defaults are left out, but for the FP8 code.

use super::*;
use std::fmt;

fn epsilon_text(epsilon: Epsilon) -> Option<String> {
    (epsilon != Epsilon::ZERO).then(|| format!("epsilon={}", epsilon.value()))
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, options): (_, Vec<Option<String>>) = match self {
            Format::HighPrecision(Stored::AsIs) => ("high-precision", vec![]),
            Format::HighPrecision(Stored::Cast(precision)) => {
                ("high-precision", vec![Some(keyword(PRECISIONS, *precision))])
            }
            Format::Fp8(fp8) => {
                let step = unless(ScaleStep::Any, STEPS, fp8.step);
                ("fp8", vec![Some(keyword(CODES, fp8.code)), step, epsilon_text(fp8.epsilon)])
            }
            Format::Delayed(delayed) => ("fp8-delayed", delayed_options(delayed)),
            Format::Fp8Block(block) => {
                let tile = unless(BlockTile::Row128, BLOCK_TILES, block.tile);
                let step = unless(ScaleStep::PowersOfTwo, STEPS, block.step);
                ("fp8-block", vec![Some(keyword(CODES, block.code)), tile, step, epsilon_text(block.epsilon)])
            }
            Format::Mxfp8(mx) => {
                ("mxfp8", vec![Some(keyword(CODES, mx.code)), unless(MxTile::Row32, MX_TILES, mx.tile)])
            }
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
        Some(keyword(CODES, delayed.code())),
        (delayed.history() != default.history()).then(|| format!("history={}", delayed.history())),
        (delayed.margin() != default.margin()).then(|| format!("margin={}", delayed.margin())),
        amax,
        unless(default.reduction(), REDUCTIONS, delayed.reduction()),
    ]
}

fn nvfp4_options(format: &Nvfp4) -> Vec<Option<String>> {
    let (settings, default) = (format, Nvfp4::default());
    let transform = match settings.transform {
        Transform::None => None,
        Transform::FixedSigns => Some("hadamard".to_string()),
        Transform::Signs(signs) => Some(format!("hadamard={:#06x}", signs.0)),
    };
    let rule = match settings.mode.rule {
        ScaleRule::Six => None,
        ScaleRule::Mse => Some("mse".to_string()),
        ScaleRule::ModelOptMse => Some("modelopt-mse".to_string()),
        ScaleRule::ModelOptFourOverSix => Some("modelopt-4over6".to_string()),
        ScaleRule::FourOverSix { metric, error, bound } => Some(format!(
            "4over6-{}-{}-{}",
            keyword(METRICS, metric),
            keyword(ERROR_PATHS, error),
            keyword(BOUNDS, bound)
        )),
    };
    vec![
        unless(default.mode.tile, TILES, settings.mode.tile),
        unless(default.mode.global, GLOBALS, settings.mode.global),
        transform,
        unless(default.rounding, ROUNDINGS, settings.rounding),
        rule,
        unless(default.mode.specials, SPECIALS, settings.mode.specials),
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
