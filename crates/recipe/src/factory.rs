//! Recipes: what answers "how is this tensor quantized?".

use super::accumulators::Accumulators;
use super::attention::AttentionPrecision;
use super::backward::BackwardOverride;
use super::decision::{Decision, Reason};
use super::presets::Preset;
use super::role::Role;
use super::rules::Rules;
use super::training::Nvfp4Training;
use crate::{Error, Result};
use nvfp4::Finite;
use nvfp4::format::QuantSpec;
use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

/// A factory of specs: a preset, a rule file or a function. Recipes are values: changing one makes
/// another.
///
/// ```
/// use nvfp4_recipe::{Capabilities, LinearSlot, Model, Module, Plan, Recipe, Site, Slot};
///
/// // Dispatch by the kind of module, then delegate.
/// let (attention, rest): (Recipe, Recipe) = ("mxfp8+attention".parse()?, "nvfp4".parse()?);
/// let recipe = Recipe::from_fn("mxfp8 attention, nvfp4 elsewhere", move |role| match role.slot() {
///     Slot::Attention(_) => attention.spec(role),
///     _ => rest.spec(role),
/// });
/// let mut model = Model::new();
/// model.add(Module::linear("fc"));
/// let plan = Plan::build(&model, &recipe, &Capabilities::software())?;
/// assert_eq!(plan.spec(&Site::new("fc", LinearSlot::Weight)).unwrap().to_string(), "nvfp4(16x16)");
/// # Ok::<(), nvfp4_recipe::Error>(())
/// ```
#[derive(Clone)]
pub struct Recipe {
    source: Source,
    backward: BackwardOverride,
    attention: Option<AttentionPrecision>,
    finite: Finite,
    /// What the source says, if there is none.
    accumulators: Option<Accumulators>,
    notes: Arc<[String]>,
}

#[derive(Clone)]
enum Source {
    Preset(Preset),
    Rules(Arc<Rules>),
    Function { key: Arc<str>, spec: Arc<SpecFn> },
}

type SpecFn = dyn Fn(&Role) -> Result<QuantSpec> + Send + Sync;

/// The largest rule file that is read.
const MAX_FILE: u64 = 16 << 20;

impl Recipe {
    /// A recipe from a function. The key stands for the function where recipes are compared, so it
    /// must change when the answers do.
    pub fn from_fn(key: &str, spec: impl Fn(&Role) -> Result<QuantSpec> + Send + Sync + 'static) -> Self {
        Recipe::new(Source::Function { key: key.into(), spec: Arc::new(spec) })
    }

    /// A recipe from the text of a rule file; the error lists everything that is wrong with it.
    ///
    /// ```toml
    /// name = "nvfp4 with careful ends"
    /// backward = "none"            # or "high-precision", "dequantized"
    /// finite = "keep"              # or "refuse": see [`Recipe::with_finite`]
    ///
    /// [[rule]]                     # the first rule that fits decides
    /// path = ["layers.0.**", "layers.31.**"]
    /// spec = "high-precision"
    ///
    /// [[rule]]
    /// module = "grouped"           # linear, grouped, attention, extension
    /// slot = "weight"              # also a list; a user's slot is written `kind:slot`
    /// pass = "forward"
    /// spec = "nvfp4(16x16, 4over6-mae-strict-256)"
    ///
    /// [default]                    # for everything that no rule fits
    /// preset = "nvfp4"
    ///
    /// [nvfp4]                      # switches of the preset nvfp4, wherever this file names it
    /// activations = "row-scaled"
    ///
    /// [accumulators]               # of products of FP8 operands on a GPU
    /// fprop = "split"              # or "fast", "precise"
    ///
    /// [require]
    /// attention = "high-precision"
    /// ```
    pub fn from_toml(text: &str) -> Result<Self> {
        let rules = Rules::parse(text).map_err(Error::Problems)?;
        let (backward, attention, finite) = (rules.backward, rules.attention, rules.finite);
        Ok(Recipe { backward, attention, finite, ..Recipe::new(Source::Rules(Arc::new(rules))) })
    }

    /// A recipe from a rule file.
    pub fn from_file(path: &Path) -> Result<Self> {
        let text = nvfp4_files::regular::read_text(path, MAX_FILE)?;
        Recipe::from_toml(&text).map_err(|error| match error {
            Error::Problems(problems) => Error::Problems(problems.in_file(path)),
            error => error,
        })
    }

    fn new(source: Source) -> Self {
        let (backward, finite) = (BackwardOverride::None, Finite::Keep);
        Recipe { source, backward, attention: None, finite, accumulators: None, notes: Arc::default() }
    }

    /// The same recipe with another backward pass.
    pub fn with_backward(&self, backward: BackwardOverride) -> Self {
        Recipe { backward, ..self.clone() }
    }

    /// The same recipe, which refuses a model whose attention would not be computed in this
    /// precision in the forward pass.
    pub fn require_attention(&self, precision: AttentionPrecision) -> Self {
        Recipe { attention: Some(precision), ..self.clone() }
    }

    /// The same recipe with another answer to NaN and infinities in the tensors that it quantizes.
    /// The bytes of finite tensors are the same.
    ///
    /// With [`Finite::Refuse`] the quantizers of a plan refuse such a tensor, on the CPU and in
    /// every format. A tensor that stays in high precision is not checked: its values go into the
    /// results as they are.
    pub fn with_finite(&self, finite: Finite) -> Self {
        Recipe { finite, ..self.clone() }
    }

    /// The same recipe with other accumulators of FP8 products.
    pub fn with_accumulators(&self, accumulators: Accumulators) -> Self {
        Recipe { accumulators: Some(accumulators), ..self.clone() }
    }

    pub(super) fn with_notes(self, notes: Vec<String>) -> Self {
        Recipe { notes: notes.into(), ..self }
    }

    /// What the backward pass computes with.
    pub fn backward(&self) -> BackwardOverride {
        self.backward
    }

    /// What is done about NaN and infinities.
    pub fn finite(&self) -> Finite {
        self.finite
    }

    /// How precisely a GPU adds the products of FP8 operands.
    pub fn accumulators(&self) -> Accumulators {
        self.accumulators.unwrap_or_else(|| match &self.source {
            Source::Preset(preset) => preset.accumulators(),
            Source::Rules(rules) => rules.accumulators,
            Source::Function { .. } => Accumulators::default(),
        })
    }

    /// The precision that attention must have.
    pub fn required_attention(&self) -> Option<AttentionPrecision> {
        self.attention
    }

    /// What a user should know about how the recipe was made.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// A short name.
    pub fn name(&self) -> String {
        match &self.source {
            Source::Preset(preset) => preset.to_string(),
            Source::Rules(rules) => rules.name.clone(),
            Source::Function { key, .. } => key.to_string(),
        }
    }

    /// The spec of a tensor.
    pub fn spec(&self, role: &Role) -> Result<QuantSpec> {
        Ok(self.decide(role)?.spec)
    }

    /// The spec of a tensor and what it follows from.
    pub fn decide(&self, role: &Role) -> Result<Decision> {
        let decision = match &self.source {
            Source::Preset(preset) => {
                Decision { spec: preset.spec(role)?, reason: Reason::Recipe(preset.to_string().into()) }
            }
            Source::Rules(rules) => rules.decide(role)?,
            Source::Function { key, spec } => Decision { spec: spec(role)?, reason: Reason::Recipe(key.clone()) },
        };
        Ok(Decision { spec: self.backward.apply(role.pass(), decision.spec)?, ..decision })
    }

    /// The rules, if the recipe is a rule file.
    pub(super) fn rules(&self) -> Option<&Rules> {
        match &self.source {
            Source::Rules(rules) => Some(rules),
            _ => None,
        }
    }
}

/// Recipes are equal if all that decides their answers is. A function counts as its key.
impl PartialEq for Recipe {
    fn eq(&self, other: &Self) -> bool {
        let sources = match (&self.source, &other.source) {
            (Source::Preset(a), Source::Preset(b)) => a == b,
            (Source::Rules(a), Source::Rules(b)) => a == b,
            (Source::Function { key: a, .. }, Source::Function { key: b, .. }) => a == b,
            _ => false,
        };
        sources
            && self.backward == other.backward
            && self.attention == other.attention
            && self.finite == other.finite
            && self.accumulators() == other.accumulators()
    }
}

impl fmt::Debug for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Recipe");
        match &self.source {
            Source::Preset(preset) => debug.field("preset", preset),
            Source::Rules(rules) => debug.field("rules", rules),
            Source::Function { key, .. } => debug.field("function", key),
        };
        debug
            .field("backward", &self.backward)
            .field("attention", &self.attention)
            .field("finite", &self.finite)
            .field("accumulators", &self.accumulators())
            .finish()
    }
}

impl From<Preset> for Recipe {
    fn from(preset: Preset) -> Self {
        Recipe::new(Source::Preset(preset))
    }
}

impl From<Nvfp4Training> for Recipe {
    fn from(training: Nvfp4Training) -> Self {
        Preset::nvfp4(training).into()
    }
}

/// A preset by its name.
impl FromStr for Recipe {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Ok(name.parse::<Preset>()?.into())
    }
}
