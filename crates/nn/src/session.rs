//! What a training run carries from step to step: parameters, gradients, the plan, delayed scales, random numbers.
//!
//! Modules hold a clone of their [`Session`]; all clones are one. Nothing here is global.

use crate::graph::Backward;
use crate::operand::Quantized;
use crate::place::{Parameter, Place};
use crate::{Error, Result, graph, values};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use nvfp4::recipe::{
    Capabilities, ColumnSource, Consumer, Edge, Family, Format, LinearSlot, Model, Module, ModulePath, Pass, Plan,
    QuantSpec, Recipe, Scales, SingleProcess, Site, Slot, States,
};
use nvfp4::{Directions, Generator, Options, QuantTensor, Randomness, Rounding, Side};
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
    model: Model,
    scales: Option<Arc<Scales>>,
    weights: BTreeMap<Site, Arc<Quantized>>,
    /// Codes on their way from one module to another.
    handed: BTreeMap<Site, Quantized>,
    phase: Phase,
    watch: Watch,
    fault: Option<Fault>,
    kept: BTreeMap<ModulePath, usize>,
}

/// What a forward pass is for.
#[derive(Clone, Debug, Default)]
enum Phase {
    /// A backward pass follows.
    #[default]
    Train,
    /// None follows: nothing is kept, delayed scaling takes no notice, and random numbers are not used up.
    Evaluate(Generator),
    /// It happened before: the random numbers of then, and delayed scaling takes no notice.
    Again(Generator),
}

/// Whether modules look for numbers that are not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Watch {
    /// In every tensor that they quantize or hand on: one more read of each.
    #[default]
    On,
    /// Only the loss and the gradients of parameters are looked at.
    Off,
}

/// The first tensor of a step that was not finite.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// The step, from 0.
    pub step: u64,
    /// The module, or the parameter.
    pub module: String,
    /// Which of its tensors: `input`, `weight`, `output`, `grad_output`, …
    pub statistic: String,
    /// Where in that tensor, as a matrix.
    pub index: Vec<usize>,
    /// NaN or an infinity.
    pub value: f32,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { step, module, statistic, index, value } = self;
        write!(f, "{statistic} of {module} at step {step}: {value} at index {index:?}")
    }
}

impl Session {
    /// A run without modules, from whose seed follow its initial parameters and its stochastic rounding.
    pub fn new(seed: u64) -> Self {
        Session(Arc::new(Mutex::new(State {
            seed,
            step: 0,
            parameters: BTreeMap::new(),
            gradients: BTreeMap::new(),
            plan: None,
            states: None,
            generator: Generator::new(seed),
            model: Model::new(),
            scales: None,
            weights: BTreeMap::new(),
            handed: BTreeMap::new(),
            phase: Phase::Train,
            watch: Watch::On,
            fault: None,
            kept: BTreeMap::new(),
        })))
    }

    /// Where the outermost modules stand; parameters have this type.
    pub fn place(&self, dtype: DType, device: &Device) -> Place {
        Place::root(self.clone(), dtype, device.clone())
    }

    /// The modules made so far, as plans see them.
    pub fn model(&self) -> Model {
        self.state().model.clone()
    }

    /// Plans all modules made so far by a recipe. In mid-training this is a change of recipe: see [`Session::apply_plan`].
    pub fn apply(&self, recipe: &Recipe) -> Result<()> {
        let plan = Plan::build(&self.model(), recipe, &Capabilities::software())?;
        self.apply_plan(plan)
    }

    /// Takes over a plan, which must be of [`Session::model`].
    ///
    /// Where there was another plan before, what has the same spec keeps its delayed scales and its cached codes. A change that is not
    /// safe is refused, and so is one between a backward pass and [`Session::next_step`] if it would lose amaxes; then nothing is changed.
    pub fn apply_plan(&self, plan: Plan) -> Result<()> {
        let mut state = self.state();
        check_model(&state.model, &plan)?;
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
        Ok(())
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

    /// A copy of the delayed scaling's state, once there is a plan.
    pub fn states(&self) -> Option<States> {
        self.state().states.clone()
    }

    /// The state of the generator for stochastic rounding.
    pub fn generator(&self) -> Generator {
        self.state().generator.clone()
    }

    /// Runs the backward pass of a loss and adds the gradients of all parameters to those of the step: call it once per micro-batch.
    ///
    /// A loss that is not finite is an error that names the step, the module and the tensor that went first; and so is any other tensor that
    /// is not, since codes may hide it from the loss.
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        let value = loss.to_dtype(DType::F64)?.to_scalar::<f64>()?;
        self.check_finite(value)?;
        self.collect(&loss.backward()?)?;
        self.check_finite(value)
    }

    fn check_finite(&self, loss: f64) -> Result<()> {
        let state = self.state();
        match (&state.fault, loss.is_finite()) {
            (None, true) => Ok(()),
            (first, _) => Err(Error::NotFinite { step: state.step, loss, first: first.clone().map(Box::new) }),
        }
    }

    /// Adds the gradients of parameters that candle's own graph found to those of the step.
    pub(crate) fn collect(&self, found: &GradStore) -> Result<()> {
        for (name, var) in self.parameters() {
            if let Some(gradient) = found.get(&var) {
                self.add_to_gradient(&Parameter { name, var }, gradient)?;
            }
        }
        Ok(())
    }

    /// The gradients of the step so far, for any optimizer of candle's.
    pub fn gradients(&self) -> Result<GradStore> {
        let state = self.state();
        let mut all = GradStore::default();
        for (name, gradient) in &state.gradients {
            all.insert(&state.parameters[name], gradient.clone());
        }
        Ok(all)
    }

    /// Ends a step, after the optimizer's: gradients go, weights are quantized anew when next read, delayed scales move on.
    pub fn next_step(&self) -> Result<()> {
        let mut state = self.state();
        if let Some(states) = state.states.as_mut() {
            states.update(Pass::Forward, &SingleProcess)?;
            states.update(Pass::Backward, &SingleProcess)?;
            state.scales = state.states.as_ref().map(|states| Arc::new(states.scales()));
        }
        state.step += 1;
        state.gradients.clear();
        state.weights.clear();
        state.handed.clear();
        state.fault = None;
        Ok(())
    }

    /// Forgets the gradients of the step: a step that is left out.
    pub fn drop_gradients(&self) {
        let mut state = self.state();
        state.gradients.clear();
        state.fault = None;
    }

    /// Runs `f` without keeping anything for a backward pass: for held-out loss.
    pub fn evaluate<T, E>(&self, f: impl FnOnce() -> std::result::Result<T, E>) -> std::result::Result<T, E> {
        self.in_phase(Phase::Evaluate(self.active_generator()), f)
    }

    /// Whether modules look for numbers that are not finite.
    pub fn set_watch(&self, watch: Watch) {
        self.state().watch = watch;
    }

    /// The first tensor of this step that was not finite.
    pub fn fault(&self) -> Option<Fault> {
        self.state().fault.clone()
    }

    /// Bytes that modules keep for backward passes at this moment, beside what candle's graph keeps ([`crate::graph_bytes`]).
    pub fn kept_bytes(&self) -> usize {
        self.state().kept.values().sum()
    }

    /// The same by module.
    pub fn kept_by_module(&self) -> BTreeMap<ModulePath, usize> {
        self.state().kept.clone()
    }

    /// Bytes of the weights' codes that are cached for this step.
    pub fn cached_bytes(&self) -> usize {
        self.state().weights.values().map(|weight| weight.code_bytes()).sum()
    }
}

/// What modules ask of their session.
impl Session {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Goes on from another moment: nothing of this one is left.
    pub(crate) fn resume(&self, step: u64, seed: u64, generator: Generator, states: States) {
        let mut state = self.state();
        (state.step, state.seed, state.generator) = (step, seed, generator);
        state.scales = Some(Arc::new(states.scales()));
        state.states = Some(states);
        state.gradients.clear();
        state.weights.clear();
        state.handed.clear();
        state.fault = None;
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

    /// Quantizes a matrix as the plan says.
    pub(crate) fn quantize(&self, site: &Site, x: &Tensor) -> Result<Quantized> {
        let plan = self.planned()?;
        if is_handed_over(&plan, site) {
            return self.state().handed.remove(site).ok_or_else(|| Error::NotHandedOver { site: site.to_string() });
        }
        let directions = plan.directions(site);
        // Nothing will read the other direction.
        let directions = match (self.is_evaluating(), directions) {
            (true, Some(Directions::Both)) => Some(Directions::Row),
            (_, directions) => directions,
        };
        self.quantize_in(&plan, site, x, directions)
    }

    /// Quantizes a matrix in these directions.
    pub(crate) fn quantize_in(
        &self,
        plan: &Plan,
        site: &Site,
        x: &Tensor,
        directions: Option<Directions>,
    ) -> Result<Quantized> {
        let spec = plan.spec(site).ok_or_else(|| self.unplanned(plan, site))?.clone();
        self.look(&site.path, &site.slot.to_string(), x)?;
        self.quantize_as(site, |side| side, spec, x, directions)
    }

    /// Quantizes by a spec; `of` says which direction's delayed scale a direction has.
    fn quantize_as(
        &self,
        site: &Site,
        of: impl Fn(Side) -> Side,
        spec: QuantSpec,
        x: &Tensor,
        directions: Option<Directions>,
    ) -> Result<Quantized> {
        let Some(directions) = directions else { return Ok(Quantized::plain(spec, x.detach())) };
        let scales = self.state().scales.clone().ok_or(Error::NoPlan)?;
        let quantizer = spec.quantizer_with(directions, |side| scales.get(site, of(side)))?;
        let randomness = match quantizer.rounding() {
            Rounding::NearestEven => None,
            Rounding::Stochastic => Some(self.draw(site)?),
        };
        let options = Options { randomness, ..Options::default() };
        let (rows, cols) = x.dims2()?;
        let observed = values::with_values(x, |x| quantizer.observe(x, &options)).map_err(|error| match error {
            Error::Nvfp4(source) => {
                Error::Tensor { site: site.to_string(), rows, cols, spec: spec.to_string(), source: Box::new(source) }
            }
            other => other,
        })?;
        let mut state = self.state();
        if let (Phase::Train, Some(states)) = (state.phase.clone(), state.states.as_mut()) {
            for (side, amax) in [(Side::Row, observed.row_amax), (Side::Column, observed.col_amax)] {
                if let Some(amax) = amax {
                    states.record(site, of(side), amax)?;
                }
            }
        }
        Ok(Quantized::new(spec, x.detach(), observed.tensor))
    }

    /// Quantizes a tensor that a module hands on, if the plan says so. Whoever takes the codes finds them; everybody else gets what they
    /// stand for.
    pub(crate) fn hand_over(&self, site: &Site, x: &Tensor) -> Result<Tensor> {
        let plan = self.planned()?;
        let Some(entry) = plan.get(site) else { return Ok(x.clone()) };
        // Attention decodes its own codes where nobody takes them.
        let directions = plan.directions(site).or(is_coded(&entry.spec).then_some(Directions::Row));
        let made = self.quantize_in(&plan, site, x, directions)?;
        let decoded = made.decoded()?;
        if let Some(Consumer::Sites(sites)) = &entry.role.consumer {
            let mut state = self.state();
            for to in sites.iter().filter(|to| matches!(to.slot, Slot::Linear(_) | Slot::Grouped { .. })) {
                state.handed.insert(to.clone(), made.clone());
            }
        }
        Ok(decoded)
    }

    /// Whether a tensor arrives quantized.
    pub(crate) fn is_handed_over(&self, site: &Site) -> Result<bool> {
        Ok(is_handed_over(&*self.planned()?, site))
    }

    /// What a matrix stands for in the format of one direction, with blocks along its rows.
    pub(crate) fn decoded(&self, site: &Site, side: Side, x: &Tensor) -> Result<Tensor> {
        let plan = self.planned()?;
        let spec = plan.spec(site).ok_or_else(|| self.unplanned(&plan, site))?;
        let from_row = side == Side::Column && spec.source() == ColumnSource::RowDequantized;
        let x = if from_row { self.decoded(site, Side::Row, x)? } else { x.clone() };
        self.along_rows(site, side, spec.format(side), &x)?.decoded()
    }

    fn along_rows(&self, site: &Site, side: Side, format: Format, x: &Tensor) -> Result<Quantized> {
        let spec = QuantSpec::from(format);
        let directions = is_coded(&spec).then_some(Directions::Row);
        self.quantize_as(site, |_| side, spec, x, directions)
    }

    /// A weight's codes: made once per step.
    pub(crate) fn weight(&self, site: &Site, weight: &Parameter) -> Result<Arc<Quantized>> {
        if let Some(held) = self.state().weights.get(site) {
            return Ok(held.clone());
        }
        let plan = self.planned()?;
        let made = Arc::new(self.quantize_in(&plan, site, weight.var.as_tensor(), plan.directions(site))?);
        self.state().weights.insert(site.clone(), made.clone());
        Ok(made)
    }

    /// Changes the sum of a parameter's gradients; `None` is a sum of nothing yet.
    pub(crate) fn add_gradient(
        &self,
        parameter: &Parameter,
        add: impl FnOnce(Option<&Tensor>) -> Result<Tensor>,
    ) -> Result<()> {
        let before = self.state().gradients.get(&parameter.name).cloned();
        let sum = add(before.as_ref())?.detach();
        self.look(&ModulePath::from(parameter.name.as_str()), "gradient", &sum)?;
        self.state().gradients.insert(parameter.name.clone(), sum);
        Ok(())
    }

    /// Adds to the sum of a parameter's gradients.
    pub(crate) fn add_to_gradient(&self, parameter: &Parameter, gradient: &Tensor) -> Result<()> {
        self.add_gradient(parameter, |sum| match sum {
            None => Ok(gradient.clone()),
            Some(sum) => Ok(sum.add(gradient)?),
        })
    }

    /// Puts a module's result into candle's graph, unless nothing follows.
    pub(crate) fn attach(
        &self,
        module: (&'static str, &ModulePath),
        arguments: &[&Tensor],
        result: Tensor,
        kept: usize,
        backward: Backward,
    ) -> Result<Tensor> {
        let (name, path) = module;
        self.look(path, "output", &result)?;
        if self.is_evaluating() || !arguments.iter().any(|x| x.track_op()) {
            return Ok(result);
        }
        let ticket = Ticket::new(self, path, kept);
        let (session, path, forward) = (self.clone(), path.clone(), self.step());
        let backward: Backward = Box::new(move |gradient| {
            let _kept = &ticket;
            let now = session.step();
            if now != forward {
                return Err(Error::StepOver { module: path.to_string(), forward, now });
            }
            backward(gradient)
        });
        graph::attach(name, arguments, result, backward)
    }

    /// Notes the first tensor that is not finite.
    pub(crate) fn look(&self, module: &ModulePath, statistic: &str, x: &Tensor) -> Result<()> {
        let (watch, seen, step) = {
            let state = self.state();
            (state.watch, state.fault.is_some(), state.step)
        };
        if seen || (watch == Watch::Off && statistic != "gradient") {
            return Ok(());
        }
        if let Some((index, value)) = values::first_not_finite(x)? {
            let (module, statistic) = (module.to_string(), statistic.to_string());
            self.state().fault = Some(Fault { step, module, statistic, index, value });
        }
        Ok(())
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

    /// Random numbers for one quantization.
    ///
    /// A weight's codes are made when somebody first reads them, which may be an evaluation; so its random numbers do not come in turn, but
    /// from the step and its place in the plan, in the half of the offsets that the generator does not reach.
    fn draw(&self, site: &Site) -> Result<Randomness<'static>> {
        let mut state = self.state();
        if let Slot::Linear(LinearSlot::Weight) | Slot::Grouped { slot: LinearSlot::Weight, .. } = site.slot {
            let entries = state.plan.as_ref().map_or(&[][..], |plan| plan.entries());
            let index = entries.iter().position(|entry| entry.role.owner == *site).unwrap_or(0) as u64;
            return Ok(Randomness::At { seed: state.seed, offset: 1 << 63 | state.step << 21 | index << 1 });
        }
        let State { phase, generator, .. } = &mut *state;
        Ok(match phase {
            Phase::Train => generator.draw()?,
            Phase::Evaluate(generator) | Phase::Again(generator) => generator.draw()?,
        })
    }

    fn unplanned(&self, plan: &Plan, site: &Site) -> Error {
        Error::OtherModel {
            recipe: plan.recipe().to_string(),
            model: site.to_string(),
            plan: plan.entries().last().map_or("no tensors".to_string(), |entry| entry.role.owner.to_string()),
        }
    }
}

fn is_coded(spec: &QuantSpec) -> bool {
    spec.format(Side::Row).family() != Family::HighPrecision
}

/// Whether some module hands this tensor over.
fn is_handed_over(plan: &Plan, site: &Site) -> bool {
    plan.entries().iter().any(|entry| match &entry.role.consumer {
        Some(Consumer::Sites(sites)) => sites.contains(site),
        None | Some(Consumer::Unknown | Consumer::HighPrecision) => false,
    })
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

/// Bytes that a node keeps, for as long as it lives.
struct Ticket {
    session: Session,
    path: ModulePath,
    bytes: usize,
}

impl Ticket {
    fn new(session: &Session, path: &ModulePath, bytes: usize) -> Self {
        *session.state().kept.entry(path.clone()).or_default() += bytes;
        Ticket { session: session.clone(), path: path.clone(), bytes }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.session.state();
        if let Some(kept) = state.kept.get_mut(&self.path) {
            *kept -= self.bytes;
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("Session").field("step", &state.step).field("parameters", &state.parameters.len()).finish()
    }
}

/// A quantized tensor that is handed over between modules.
pub(crate) type Codes = Arc<QuantTensor>;
