//! What quantization cost: a reference and a model, a layer at a time and side by side.

use crate::decoder::{Decoder, Rows};
use crate::drift::Drift;
use crate::linear::{Activations, KeysValues, Run, Watch};
use crate::memory;
use crate::saturation::{Blocks, Saturation};
use crate::score::{Said, Speaker, positions, score};
use crate::source::Source;
use crate::state::{Kept, StateFile};
use crate::{Error, Result, refused};
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

/// A way to run one of the two models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Lane {
    /// The reference, as it is stored.
    Reference,
    /// The model's weights alone.
    Weights,
    /// Its weights and activations.
    Activations,
    /// All that its checkpoint says.
    Served,
}

/// What is run of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lanes {
    /// As it is served, and what each part costs.
    Each,
    /// As it is served.
    Served,
}

/// Hears how far an evaluation is. Work is counted in multiplications.
pub trait Progress {
    /// It begins, with this much to do.
    fn begin(&mut self, _work: u64) {}
    /// This much is done of it; `what` is what was.
    fn advance(&mut self, _work: u64, _what: &str) {}
}

/// Hears nothing.
impl Progress for () {}

/// What to evaluate.
pub struct Evaluate<'e, 'a> {
    /// The reference; none to look at one model alone.
    pub reference: Option<&'e Source<'a>>,
    /// The model.
    pub model: &'e Source<'a>,
    /// The text.
    pub rows: &'e Rows,
    /// Positions at the start of a row that predict what is given anyway.
    pub given: usize,
    /// In what activations are multiplied.
    pub activations: Activations,
    /// What is run.
    pub lanes: Lanes,
    /// Where states are kept, to continue.
    pub state: Option<&'e StateFile>,
}

/// What an evaluation found.
#[derive(Clone, Debug)]
pub struct Evaluation {
    /// What each way to run said at each position, the reference first if there is one.
    pub said: Vec<(Lane, Vec<Said>)>,
    /// How far the state is from the reference's after each layer.
    pub drift: Vec<Drift>,
    /// Blocks of activations by module, where they are in 4 bits.
    pub blocks: BTreeMap<String, Blocks>,
}

impl<'e, 'a> Evaluate<'e, 'a> {
    /// The ways to run, in order.
    pub fn lanes(&self) -> Vec<Lane> {
        let mut lanes: Vec<Lane> = self.reference.map(|_| Lane::Reference).into_iter().collect();
        let four_bit = match self.activations {
            Activations::Plain => false,
            Activations::AsStored => self.model.quantizes_activations(),
            Activations::PerRow => true,
        };
        if self.lanes == Lanes::Each {
            lanes.extend((four_bit || self.model.keeps_fp8()).then_some(Lane::Weights));
            lanes.extend((four_bit && self.model.keeps_fp8()).then_some(Lane::Activations));
        }
        lanes.push(Lane::Served);
        lanes
    }

    /// An error unless both models can be compared.
    fn check(&self) -> Result<()> {
        let Some(reference) = self.reference else { return Ok(()) };
        let shape = |s: &Source<'_>| (s.config().layers, s.config().hidden, s.config().vocabulary);
        let (one, other) = (shape(reference), shape(self.model));
        if one != other {
            return Err(refused(format!(
                "the reference has {} layers of {} and {} tokens, the model {} of {} and {}; they are not of one model",
                one.0, one.1, one.2, other.0, other.1, other.2
            )));
        }
        Ok(())
    }

    /// Multiplications of a layer, and of logits, for one way to run.
    fn work(&self, positions: usize) -> (u64, u64) {
        let config = self.model.config();
        let elements = |part: &str| -> u64 {
            let weights = self.model.model().weights.iter();
            weights.filter(|w| w.module.contains(part)).map(|w| w.elements()).sum()
        };
        let layer = elements("layers.") / config.layers as u64;
        (layer * self.rows.tokens().len() as u64, (config.vocabulary * config.hidden * positions) as u64)
    }

    /// Bytes of memory that it needs at most, about: states, the largest part of a layer, and what
    /// is computed of a row.
    pub fn peak(&self) -> u64 {
        let (config, lanes) = (self.model.config(), self.lanes().len() as u64);
        let tokens = self.rows.tokens().len() as u64;
        let state = tokens * config.hidden as u64 * 4;
        let sources = [self.reference, Some(self.model)];
        let weights = sources.into_iter().flatten().map(memory::weights).max().unwrap_or(0);
        let routed = sources.into_iter().flatten().any(memory::has_experts);
        // Experts see all tokens of all ways to run at once.
        let copies = if routed { 2 * lanes * state } else { 0 };
        // They are written as a whole.
        let written = if self.state.is_some() { lanes * state } else { 0 };
        lanes * state + copies + written + weights + memory::row(config, self.rows.longest()) + memory::FIXED
    }

    /// Bytes of a GPU's memory that it needs at most, about; none on a CPU. The driver's own come
    /// beside them.
    pub fn gpu_peak(&self) -> Option<u64> {
        let sources = [self.reference, Some(self.model)].into_iter().flatten();
        sources.filter_map(|source| memory::gpu(source, self.rows.tokens().len())).max()
    }

    /// Runs both.
    pub fn run(&self, progress: &mut dyn Progress, stop: &AtomicBool) -> Result<Evaluation> {
        self.check()?;
        let (lanes, at) = (self.lanes(), positions(self.rows, self.given));
        if at.is_empty() {
            return Err(refused("the text has nothing to predict; take a longer one"));
        }
        let decoders: Vec<Decoder<'_, 'a>> = self.reference.into_iter().chain([self.model]).map(Decoder::new).collect();
        let (reference, model) = (decoders.first().filter(|_| self.reference.is_some()), &decoders[decoders.len() - 1]);
        let (layer_work, head_work) = self.work(at.len());
        let count = lanes.len() as u64;
        progress.begin(count * (layer_work * self.model.config().layers as u64 + head_work));
        let watch = Saturation::new(self.model, self.activations)?;
        let runs: Vec<Run<'_>> = lanes.iter().map(|lane| self.run_of(*lane, &watch)).collect();
        let len = self.rows.tokens().len() * self.model.config().hidden;
        let fits = |kept: &Kept| {
            kept.states.len() == lanes.len()
                && kept.states.iter().all(|state| state.len() == len)
                && kept.layer <= self.model.config().layers
                && kept.drift.len() == if reference.is_some() { kept.layer } else { 0 }
        };
        let Kept { mut layer, mut states, mut drift, blocks } =
            match self.state.map(|file| file.read(fits)).transpose()?.flatten() {
                Some(kept) => kept,
                None => {
                    let embed = |lane: &Lane| match (lane, reference) {
                        (Lane::Reference, Some(reference)) => reference.embed(self.rows.tokens()),
                        _ => model.embed(self.rows.tokens()),
                    };
                    let states = lanes.iter().map(embed).collect::<Result<Vec<_>>>()?;
                    Kept { layer: 0, states, drift: Vec::new(), blocks: BTreeMap::new() }
                }
            };
        watch.continue_from(blocks);
        progress.advance(count * layer_work * layer as u64, "");
        let own = usize::from(reference.is_some());
        while layer < self.model.config().layers {
            if let Some(reference) = reference {
                reference.advance(layer, self.rows, &mut states[..own], &runs[..own], stop)?;
            }
            model.advance(layer, self.rows, &mut states[own..], &runs[own..], stop)?;
            if reference.is_some() {
                drift.push(Drift::of(&states[0], &states[states.len() - 1]));
            }
            layer += 1;
            progress.advance(count * layer_work, &format!("layer {layer}"));
            let stopped = stop.load(Ordering::Relaxed);
            if let Some(file) = self.state.filter(|file| stopped || file.is_due()) {
                let kept = Kept { layer, states, drift: drift.clone(), blocks: watch.blocks() };
                file.write(&kept)?;
                states = kept.states;
            }
            if stopped {
                return Err(Error::Interrupted);
            }
        }
        let decoder = |lane: &Lane| if *lane == Lane::Reference { &decoders[0] } else { model };
        let speakers =
            lanes.iter().zip(states).map(|(lane, states)| Speaker { decoder: decoder(lane), states }).collect();
        let vocabulary = self.model.config().vocabulary as u64;
        let said = score(speakers, self.rows, &at, stop, &mut |words| {
            progress.advance(count * head_work * words as u64 / vocabulary, "logits");
        })?;
        if let Some(file) = self.state {
            file.remove()?;
        }
        Ok(Evaluation { said: lanes.into_iter().zip(said).collect(), drift, blocks: watch.blocks() })
    }

    fn run_of<'w>(&self, lane: Lane, watch: &'w dyn Watch) -> Run<'w> {
        match lane {
            Lane::Reference => Run::AS_STORED,
            Lane::Weights => Run { activations: Activations::Plain, keys_values: KeysValues::Plain, watch: &() },
            Lane::Activations => Run { activations: self.activations, keys_values: KeysValues::Plain, watch: &() },
            Lane::Served => Run { activations: self.activations, keys_values: KeysValues::AsStored, watch },
        }
    }
}
