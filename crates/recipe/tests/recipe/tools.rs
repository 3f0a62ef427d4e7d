//! Short ways to say what tests need.

use nvfp4_recipe::Error;
use nvfp4_recipe::*;

pub fn recipe(name: &str) -> Recipe {
    name.parse().unwrap_or_else(|error| panic!("{error}"))
}

pub fn spec(text: &str) -> QuantSpec {
    text.parse().unwrap_or_else(|error| panic!("{error}"))
}

/// A recipe that gives each linear slot a spec and everything else high precision.
pub fn linear(input: &str, weight: &str, grad_output: &str) -> Recipe {
    let key = format!("{input}; {weight}; {grad_output}");
    let (input, weight, grad_output) = (spec(input), spec(weight), spec(grad_output));
    Recipe::from_fn(&key, move |role| {
        Ok(match role.slot() {
            Slot::Linear(slot) | Slot::Grouped { slot, .. } => match slot {
                LinearSlot::Input | LinearSlot::Output => input.clone(),
                LinearSlot::Weight => weight.clone(),
                LinearSlot::GradOutput | LinearSlot::GradInput => grad_output.clone(),
            },
            Slot::Attention(_) | Slot::Extension(_) => QuantSpec::HIGH_PRECISION,
        })
    })
}

pub fn model(modules: impl IntoIterator<Item = Module>) -> Model {
    let mut model = Model::new();
    modules.into_iter().for_each(|module| _ = model.add(module));
    model
}

/// A model of every kind of module.
pub fn zoo() -> Model {
    let mut model = Model::new();
    let decoder = TransformerLayer { kind: LayerKind::Decoder, ..TransformerLayer::default() };
    model.nest("layers.0", &TransformerLayer::default()).nest("layers.1", &decoder);
    model.add(Module::grouped_linear("layers.1.experts", 3));
    model
}

pub fn try_plan(model: &Model, recipe: &Recipe) -> Result<Plan> {
    Plan::build(model, recipe, &Capabilities::software())
}

pub fn plan(model: &Model, recipe: &Recipe) -> Plan {
    try_plan(model, recipe).unwrap_or_else(|error| panic!("{error}"))
}

/// The problems of a plan that is refused.
pub fn problems(model: &Model, recipe: &Recipe) -> Vec<Problem> {
    unwrap_problems(try_plan(model, recipe))
}

pub fn unwrap_problems<T: std::fmt::Debug>(result: Result<T>) -> Vec<Problem> {
    match result.unwrap_err() {
        Error::Problems(Problems(problems)) => problems,
        error => panic!("not a list of problems: {error}"),
    }
}

/// The spec of a linear layer's tensor, as text.
pub fn text(recipe: &Recipe, slot: impl Into<Slot>) -> String {
    recipe.spec(&Role::new(Site::new("m", slot))).unwrap().to_string()
}

pub fn grouped(slot: LinearSlot) -> Slot {
    Slot::Grouped { slot, expert: 1 }
}

pub fn extension(pass: Pass) -> ExtensionSlot {
    ExtensionSlot::new("router", "logits", pass).unwrap()
}
