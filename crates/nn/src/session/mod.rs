//! What a training run carries from step to step: parameters, gradients, the plan, delayed scales,
//! random numbers.
//!
//! Modules hold a clone of their [`Session`]; all clones are one. Nothing here is global. This file
//! has a run's steps; `delayed.rs` tells delayed scaling what was seen, `gradients.rs` adds up
//! gradients, `quantize.rs` is what modules ask for, `weights.rs` keeps the codes of weights,
//! `nodes.rs` counts what is kept for backward passes, `watch.rs` looks for numbers that are not
//! finite.

mod delayed;
mod gradients;
mod nodes;
mod quantize;
mod watch;
mod weights;

pub use watch::Watch;

use crate::operand::Quantized;
use crate::{Error, Fault, Parameter, Result};
use candle_core::{Tensor, Var};
use nvfp4::Generator;
use nvfp4_recipe::{
    Capabilities, Edge, Model, Module, ModulePath, Pass, Plan, Recipe, Scales, SingleProcess, Site, States,
};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

/// A training run.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::Optimizer;
/// use nvfp4_nn::{AdamW, Bias, Linear, Session};
///
/// # fn main() -> nvfp4_nn::Result<()> {
/// let session = Session::new(42);
/// let place = session.place(DType::F32, &Device::Cpu);
/// let fc1 = Linear::new(&place.child("fc1"), 32, 64, Bias::With)?;
/// let fc2 = Linear::new(&place.child("fc2"), 64, 32, Bias::With)?;
/// session.apply(&"nvfp4".parse()?)?; // plans every module made so far
///
/// let mut optimizer = AdamW::new(session.parameters(), Default::default())?;
/// let x = Tensor::ones((16, 32), DType::F32, &Device::Cpu)?;
/// for _ in 0..3 {
///     let loss = fc2.forward(&fc1.forward(&x)?.relu()?)?.sqr()?.mean_all()?;
///     session.backward(&loss)?; // as often as there are micro-batches
///     optimizer.step(&session.gradients()?)?;
///     session.next_step()?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Session(Arc<Mutex<State>>);

/// Everything that a run remembers.
pub(crate) struct State {
    pub seed: u64,
    pub step: u64,
    pub parameters: BTreeMap<String, Var>,
    pub gradients: BTreeMap<String, Tensor>,
    pub plan: Option<Arc<Plan>>,
    pub states: Option<States>,
    pub generator: Generator,
    /// Weights whose codes are there between steps.
    pub stored: BTreeMap<Site, Parameter>,
    model: Model,
    scales: Option<Arc<Scales>>,
    weights: BTreeMap<Site, weights::Cached>,
    /// Codes on their way from one module to another.
    handed: BTreeMap<Site, Quantized>,
    phase: Phase,
    watch: Watch,
    fault: Option<Fault>,
    #[cfg(feature = "nn-cuda")]
    looks: Option<crate::gpu::Looks<watch::Look>>,
    #[cfg(feature = "nn-cuda")]
    amaxes: Option<crate::gpu::Amaxes<delayed::Whose>>,
    kept: BTreeMap<ModulePath, usize>,
}

/// What a forward pass is for.
#[derive(Clone, Debug, Default)]
enum Phase {
    /// A backward pass follows.
    #[default]
    Train,
    /// None follows: nothing is kept, delayed scaling takes no notice, and random numbers are not
    /// used up.
    Evaluate(Generator),
    /// It is a recomputation, with the random numbers of the first time.
    Again(Generator),
}

impl Session {
    /// A run without modules. Its initial parameters and its stochastic rounding follow from the
    /// seed.
    pub fn new(seed: u64) -> Self {
        Session(Arc::new(Mutex::new(State {
            seed,
            step: 0,
            parameters: BTreeMap::new(),
            gradients: BTreeMap::new(),
            plan: None,
            states: None,
            generator: Generator::new(seed),
            stored: BTreeMap::new(),
            model: Model::new(),
            scales: None,
            weights: BTreeMap::new(),
            handed: BTreeMap::new(),
            phase: Phase::Train,
            watch: Watch::On,
            fault: None,
            #[cfg(feature = "nn-cuda")]
            looks: None,
            #[cfg(feature = "nn-cuda")]
            amaxes: None,
            kept: BTreeMap::new(),
        })))
    }

    /// The modules made so far, as plans see them.
    pub fn model(&self) -> Model {
        self.state().model.clone()
    }

    /// Plans all modules made so far by a recipe. In mid-training this is a change of recipe: see
    /// [`Session::apply_plan`].
    pub fn apply(&self, recipe: &Recipe) -> Result<()> {
        let plan = Plan::build(&self.model(), recipe, &Capabilities::software())?;
        self.apply_plan(plan)
    }

    /// Follows a plan, which must be one of [`Session::model`].
    ///
    /// Where there was another plan before, what has the same spec keeps its delayed scales and its
    /// cached codes. A change that is not safe is refused, and so is one between a backward pass
    /// and [`Session::next_step`] if it would lose amaxes; then nothing is changed.
    pub fn apply_plan(&self, plan: Plan) -> Result<()> {
        let mut state = self.state();
        check_model(&state.model, &plan)?;
        state.record_amaxes()?;
        let before = (state.plan.clone(), state.states.clone(), state.scales.clone(), state.weights.clone());
        match (state.plan.clone(), state.states.as_mut()) {
            (Some(before), Some(states)) => {
                let transition = before.transition(&plan)?;
                states.apply(&transition)?;
                let stale: BTreeSet<&Site> = transition.stale_weights().collect();
                state.weights.retain(|site, _| !stale.contains(site));
            }
            _ => state.states = Some(States::new(&plan)?),
        }
        state.scales = state.states.as_ref().map(|states| Arc::new(states.scales()));
        state.plan = Some(Arc::new(plan));
        drop(state);
        self.store_weights().inspect_err(|_| {
            let mut state = self.state();
            (state.plan, state.states, state.scales, state.weights) = before;
        })
    }

    /// The plan, once there is one.
    pub fn plan(&self) -> Option<Arc<Plan>> {
        self.state().plan.clone()
    }

    /// The number of the step under way, from 0.
    pub fn step(&self) -> u64 {
        self.state().step
    }

    /// All parameters by name: the masters, in high precision.
    pub fn parameters(&self) -> BTreeMap<String, Var> {
        self.state().parameters.clone()
    }

    /// A copy of the delayed scaling's state, once there is a plan. Waits for a GPU.
    pub fn states(&self) -> Result<Option<States>> {
        let mut state = self.state();
        state.record_amaxes()?;
        Ok(state.states.clone())
    }

    /// The state of the generator for stochastic rounding.
    pub fn generator(&self) -> Generator {
        self.state().generator.clone()
    }

    /// Ends a step, after the optimizer's: gradients go, weights are quantized anew when next read,
    /// delayed scales move on.
    pub fn next_step(&self) -> Result<()> {
        let mut state = self.state();
        state.record_amaxes()?;
        if let Some(states) = state.states.as_mut() {
            states.update(Pass::Forward, &SingleProcess)?;
            states.update(Pass::Backward, &SingleProcess)?;
            state.scales = state.states.as_ref().map(|states| Arc::new(states.scales()));
        }
        state.step += 1;
        state.gradients.clear();
        state.weights.clear();
        state.handed.clear();
        state.look_anew()?;
        drop(state);
        self.store_weights()
    }

    /// Runs `f` without keeping anything for a backward pass: for held-out loss. Inside,
    /// [`Session::fault`] is that of the evaluation; afterwards it is what it was before.
    pub fn evaluate<T, E: From<Error>>(
        &self,
        f: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        let before = self.fault()?;
        self.state().look_anew()?;
        let result = self.in_phase(Phase::Evaluate(self.active_generator()), f);
        self.begin_looking(before)?;
        result
    }
}

/// What modules ask of their session, beside what the files of this folder add.
impl Session {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Continues from another state, and forgets this one.
    pub(crate) fn resume(&self, step: u64, seed: u64, generator: Generator, states: States) -> Result<()> {
        let mut state = self.state();
        (state.step, state.seed, state.generator) = (step, seed, generator);
        state.forget_amaxes()?;
        state.scales = Some(Arc::new(states.scales()));
        state.states = Some(states);
        state.gradients.clear();
        state.weights.clear();
        state.handed.clear();
        state.look_anew()?;
        drop(state);
        self.store_weights()
    }

    pub(crate) fn declare(&self, module: Module) {
        self.state().model.add(module);
    }

    pub(crate) fn connect(&self, edge: Edge) {
        self.state().model.connect(edge);
    }

    pub(crate) fn planned(&self) -> Result<Arc<Plan>> {
        self.plan().ok_or(Error::NoPlan)
    }

    pub(crate) fn is_evaluating(&self) -> bool {
        matches!(self.state().phase, Phase::Evaluate(_))
    }

    /// The generator that the forward pass under way draws from, as it is now.
    pub(crate) fn active_generator(&self) -> Generator {
        let state = self.state();
        match &state.phase {
            Phase::Train => state.generator.clone(),
            Phase::Evaluate(generator) | Phase::Again(generator) => generator.clone(),
        }
    }

    /// Runs a forward pass again, with the random numbers that it began with.
    pub(crate) fn again<T, E>(
        &self,
        from: Generator,
        f: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        self.in_phase(Phase::Again(from), f)
    }

    fn in_phase<T, E>(&self, phase: Phase, f: impl FnOnce() -> std::result::Result<T, E>) -> std::result::Result<T, E> {
        /// Puts the phase back, also when `f` panics.
        struct Back(Session, Option<Phase>);
        impl Drop for Back {
            fn drop(&mut self) {
                self.0.state().phase = self.1.take().unwrap_or_default();
            }
        }
        let before = std::mem::replace(&mut self.state().phase, phase);
        let _back = Back(self.clone(), Some(before));
        f()
    }
}

/// An error unless a plan has exactly the tensors of a model.
fn check_model(model: &Model, plan: &Plan) -> Result<()> {
    let sites = |roles: Vec<String>| roles.into_iter().collect::<BTreeSet<String>>();
    let ours = sites(model.roles().iter().map(|role| role.to_string()).collect());
    let theirs = sites(plan.entries().iter().map(|entry| entry.role.to_string()).collect());
    if ours == theirs {
        return Ok(());
    }
    let only = |a: &BTreeSet<String>, b: &BTreeSet<String>| a.difference(b).next().cloned();
    Err(Error::OtherModel {
        recipe: plan.recipe().to_string(),
        model: only(&ours, &theirs).unwrap_or_else(|| "no more".to_string()),
        plan: only(&theirs, &ours).unwrap_or_else(|| "no more".to_string()),
    })
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("Session").field("step", &state.step).field("parameters", &state.parameters.len()).finish()
    }
}
