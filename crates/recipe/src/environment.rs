//! TransformerEngine's environment variables. They are read here, when asked, and nowhere else.

use super::backward::BackwardOverride;
use super::factory::Recipe;
use super::problem::{Problem, Problems};
use super::training::{Nvfp4Training, SCOPES, Scope};
use crate::{Error, Result};
use nvfp4::format::keywords::{Keywords, find, list};
use nvfp4::{ErrorPath, GlobalScale, Metric, Rounding, Tile, Transform};

const FOUR_OVER_SIX: &str = "NVTE_NVFP4_4OVER6";
const ROW_SCALED: &str = "NVTE_NVFP4_ROW_SCALED_ACTIVATION";
const PER_TOKEN: &str = "NVTE_NVFP4_PER_TOKEN_ACTIVATION";

#[derive(Clone, Copy, PartialEq)]
enum Switch {
    Off,
    On,
}

const SWITCHES: &[(&str, Switch)] = &[("0", Switch::Off), ("1", Switch::On)];
const METRICS: &[(&str, Metric)] = &[("MAE", Metric::Mae), ("MSE", Metric::Mse)];
const BACKWARDS: &[(&str, BackwardOverride)] = &[
    ("none", BackwardOverride::None),
    ("high_precision", BackwardOverride::HighPrecision),
    ("dequantized", BackwardOverride::Dequantized),
];

impl Recipe {
    /// The NVFP4 training recipe as the environment says; the error lists every variable that is
    /// wrong.
    ///
    /// | variable | values | default |
    /// |---|---|---|
    /// | `NVTE_NVFP4_DISABLE_RHT` | 0, 1 | 0 |
    /// | `NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING` | 0, 1 | 0 |
    /// | `NVTE_NVFP4_DISABLE_2D_QUANTIZATION` | 0, 1 | 0 |
    /// | `NVTE_NVFP4_ROW_SCALED_ACTIVATION`, formerly `NVTE_NVFP4_PER_TOKEN_ACTIVATION` | 0, 1 | 0 |
    /// | `NVTE_NVFP4_4OVER6` | none, weights, activations, all | none |
    /// | `NVTE_NVFP4_4OVER6_E4M3_USE_256` | none, weights, activations, all | all |
    /// | `NVTE_NVFP4_4OVER6_ERR_MODE` | MAE, MSE | MAE |
    /// | `NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH` | 0, 1 | 0 |
    /// | `NVTE_BACKWARD_OVERRIDE` | none, high_precision, dequantized | none |
    /// | `NVTE_USE_FAST_MATH` | 0, 1 | 0 |
    pub fn from_env() -> Result<Self> {
        // A value that is not text is reported like any other unknown value.
        Recipe::from_vars(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    /// The same from any source of variables. An empty value counts as none.
    pub fn from_vars(get: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let mut reader = Reader { get: &get, problems: Vec::new() };
        let default = Nvfp4Training::default();
        let training = Nvfp4Training {
            transform: reader.off("NVTE_NVFP4_DISABLE_RHT", default.transform, Transform::None),
            gradients: reader.off("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", default.gradients, Rounding::NearestEven),
            weights: reader.off("NVTE_NVFP4_DISABLE_2D_QUANTIZATION", default.weights, Tile::Row16),
            activations: reader.row_scaled(),
            four_over_six: reader.read(FOUR_OVER_SIX, SCOPES).unwrap_or(Scope::None),
            ..default
        };
        let scope = training.four_over_six;
        let bound_256 = reader.detail(scope, "NVTE_NVFP4_4OVER6_E4M3_USE_256", SCOPES, Scope::All);
        let metric = reader.detail(scope, "NVTE_NVFP4_4OVER6_ERR_MODE", METRICS, Metric::Mae);
        let fast = reader.detail(scope, "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH", SWITCHES, Switch::Off);
        let error = if fast == Switch::On { ErrorPath::Fast } else { ErrorPath::Strict };
        let backward = reader.read("NVTE_BACKWARD_OVERRIDE", BACKWARDS).unwrap_or_default();
        let mut notes = Vec::new();
        if reader.read("NVTE_USE_FAST_MATH", SWITCHES) == Some(Switch::On) {
            notes.push("NVTE_USE_FAST_MATH=1 has no effect: the bytes are TransformerEngine's without it".to_string());
        }
        if !reader.problems.is_empty() {
            return Err(Error::Problems(Problems(reader.problems)));
        }
        let training = Nvfp4Training { bound_256, metric, error, ..training };
        Ok(Recipe::from(training).with_backward(backward).with_notes(notes))
    }
}

struct Reader<'a> {
    get: &'a dyn Fn(&str) -> Option<String>,
    problems: Vec<Problem>,
}

impl Reader<'_> {
    fn problem(&mut self, variable: &'static str, reason: String) {
        self.problems.push(Problem::Variable { variable, reason });
    }

    fn read<T: Copy>(&mut self, variable: &'static str, words: Keywords<T>) -> Option<T> {
        let value = (self.get)(variable).filter(|value| !value.is_empty())?;
        let found = find(words, &value);
        if found.is_none() {
            self.problem(variable, format!("unknown value '{value}'; allowed are {}", list(words)));
        }
        found
    }

    /// A switch that turns something off.
    fn off<T>(&mut self, variable: &'static str, on: T, off: T) -> T {
        match self.read(variable, SWITCHES) {
            Some(Switch::On) => off,
            Some(Switch::Off) | None => on,
        }
    }

    /// A setting of 4over6. It needs 4over6 itself, unless it has the default value.
    fn detail<T: Copy + PartialEq>(
        &mut self,
        four_over_six: Scope,
        variable: &'static str,
        words: Keywords<T>,
        default: T,
    ) -> T {
        let value = self.read(variable, words).unwrap_or(default);
        let nothing = find(words, "none").is_some_and(|none| none == value);
        // Where 4over6 itself has a wrong value, that is the message.
        let known = !self.problems.iter().any(|p| matches!(p, Problem::Variable { variable: FOUR_OVER_SIX, .. }));
        if value != default && !nothing && known && four_over_six == Scope::None {
            let reason = format!("needs {FOUR_OVER_SIX}=weights, activations or all; set that, or unset this");
            self.problem(variable, reason);
        }
        value
    }

    fn row_scaled(&mut self) -> GlobalScale {
        let (new, old) = (self.read(ROW_SCALED, SWITCHES), self.read(PER_TOKEN, SWITCHES));
        if let (Some(new), Some(old)) = (new, old)
            && new != old
        {
            self.problem(PER_TOKEN, format!("is the older name of {ROW_SCALED}, which has another value; unset one"));
        }
        match new.or(old) {
            Some(Switch::On) => GlobalScale::PerRow,
            Some(Switch::Off) | None => GlobalScale::PerTensor,
        }
    }
}
