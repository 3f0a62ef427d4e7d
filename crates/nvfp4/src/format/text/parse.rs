//! Text to formats and specs. What is not understood is answered with what would have been.

use super::*;
use std::num::IntErrorKind;
use std::str::FromStr;

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
                step: options.word(STEPS)?.unwrap_or(ScaleStep::PowersOfTwo),
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
                return Err(Error::Setting(format!("'{text}': unknown format '{name}'; there are {known}")));
            }
        };
        options.finish(name)?;
        Ok(format)
    }
}

fn nvfp4_settings(options: &mut Options<'_>) -> Result<QuantizerBuilder> {
    let transform = match (options.word(HADAMARD)?, options.value("hadamard")?) {
        (Some(_), Some(_)) => return Err(options.error("two Hadamard transforms: leave one out")),
        (Some(fixed), None) => fixed,
        (None, Some(value)) => Transform::Signs(options.signs(value)?),
        (None, None) => Transform::None,
    };
    let builder = QuantizerBuilder::default()
        .tile(options.word(TILES)?.unwrap_or_default())
        .global_scale(options.word(GLOBALS)?.unwrap_or_default())
        .rounding(options.word(ROUNDINGS)?.unwrap_or_default())
        .specials(options.word(SPECIALS)?.unwrap_or_default())
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
        Error::Setting(format!("'{}': {reason}", self.text))
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

    fn word<T: Copy>(&mut self, words: Keywords<T>) -> Result<Option<T>> {
        self.take(list(words), |option| find(words, option))
    }

    /// The text behind `key=`.
    fn value(&mut self, key: &str) -> Result<Option<&'a str>> {
        self.take(format!("{key}=…"), |option| {
            option.split_once('=').filter(|(k, _)| k.trim() == key).map(|(_, value)| value.trim())
        })
    }

    fn number(&mut self, key: &str, default: u32) -> Result<u32> {
        let Some(value) = self.value(key)? else { return Ok(default) };
        match value.parse::<u32>() {
            Ok(number) => Ok(number),
            Err(error) if *error.kind() == IntErrorKind::PosOverflow => {
                Err(self.error(&format!("{key} is far too large: {value}")))
            }
            Err(_) => Err(self.error(&format!("{key} needs a whole number, got '{value}'"))),
        }
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
        let allowed = "six, mse, modelopt-mse, modelopt-4over6, 4over6-{mae,mse}-{strict,fast}-{448,256}".to_string();
        let rule = self.take(allowed, |option| match option {
            "six" => Some(ScaleRule::Six),
            "mse" => Some(ScaleRule::Mse),
            "modelopt-mse" => Some(ScaleRule::ModelOptMse),
            "modelopt-4over6" => Some(ScaleRule::ModelOptFourOverSix),
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
