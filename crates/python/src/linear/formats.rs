//! The formats of a linear layer as one text, which travels with every call, and what they say.

use crate::error::OrRaise;
use crate::parts;
use crate::words::{ACCUMULATORS, choose};
use nvfp4::{Accumulator, Direction, Directions, Finite, Precision, QuantTensor, Quantizer, Side};
use nvfp4_recipe::QuantSpec;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

/// One tensor of a layer.
pub struct Slot {
    spec: QuantSpec,
    maker: Quantizer,
    /// A tensor without elements, which has everything but the bytes.
    like: QuantTensor,
}

impl Slot {
    /// A tensor of a spec, of which these directions are made.
    pub fn of(spec: &str, directions: Directions) -> PyResult<Slot> {
        let spec: QuantSpec = spec.parse().or_raise()?;
        let like = parts::prototype(&spec, directions, Precision::F32)?;
        let maker = Quantizer::with_scales(&spec, directions, |_| Some(1.0)).or_raise()?;
        Ok(Slot { spec, maker, like })
    }

    /// The quantizer of a call; `scales` are those of delayed scaling, of both directions or of
    /// each.
    pub fn maker(&self, scales: [Option<f32>; 2], finite: Finite) -> PyResult<Quantizer> {
        let maker = match scales {
            [None, None] => self.maker,
            [scale, column_scale] => {
                let of = |side| match (&self.spec, side) {
                    (QuantSpec::Split(_), Side::Column) => column_scale,
                    _ => scale,
                };
                let scale = |side| Some(of(side).unwrap_or(1.0));
                Quantizer::with_scales(&self.spec, self.maker.directions(), scale).or_raise()?
            }
        };
        Ok(maker.with_finite(finite))
    }

    /// The format of a direction.
    pub fn like(&self, side: Side) -> PyResult<&Direction> {
        self.like.direction(side).or_raise()
    }

    /// Whether the tensor stays as it is.
    pub fn is_plain(&self) -> bool {
        matches!(self.like.row().or(self.like.col()), Some(Direction::Plain(_)))
    }
}

/// What comes after a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// A backward pass with both gradients.
    Trained,
    /// A backward pass without the weight's: only dx is asked for.
    Frozen,
    /// Nothing.
    Evaluated,
}

const PASSES: &[(&str, Pass)] = &[("trained", Pass::Trained), ("frozen", Pass::Frozen), ("evaluated", Pass::Evaluated)];

impl Pass {
    /// The directions that are made of input, weight and the gradient of the output.
    fn directions(self) -> [Directions; 3] {
        match self {
            Pass::Trained => [Directions::Both; 3],
            Pass::Frozen => [Directions::Row, Directions::Both, Directions::Row],
            Pass::Evaluated => [Directions::Row; 3],
        }
    }
}

/// The formats of a layer.
pub struct Formats {
    /// Of the input.
    pub input: Slot,
    /// Of the weight.
    pub weight: Slot,
    /// Of the gradient of the output.
    pub grad_output: Slot,
    /// What comes after the forward pass.
    pub pass: Pass,
    /// Whether the weight's row direction is given back, for later passes with the same weight.
    pub keeps: bool,
    /// How precisely FP8 is added in fprop, dgrad and wgrad.
    pub accumulators: [Accumulator; 3],
}

impl Formats {
    /// What a text says: `input | weight | grad_output | fprop dgrad wgrad | pass`, where ` keep` may
    /// follow. Texts are read once.
    pub fn of(text: &str) -> PyResult<Arc<Formats>> {
        static KNOWN: RwLock<Option<HashMap<String, Arc<Formats>>>> = RwLock::new(None);
        let known = KNOWN.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(formats) = known.as_ref().and_then(|known| known.get(text)) {
            return Ok(Arc::clone(formats));
        }
        drop(known);
        let formats = Arc::new(Formats::read(text)?);
        let mut known = KNOWN.write().unwrap_or_else(PoisonError::into_inner);
        known.get_or_insert_default().insert(text.to_string(), Arc::clone(&formats));
        Ok(formats)
    }

    fn read(text: &str) -> PyResult<Formats> {
        let wrong = || {
            let form = "'input | weight | grad_output | fprop dgrad wgrad | pass'";
            PyValueError::new_err(format!("formats: expected {form}, got '{text}'"))
        };
        let fields: Vec<&str> = text.split(" | ").collect();
        let [input, weight, grad_output, accumulators, pass] = fields[..] else { return Err(wrong()) };
        let accumulators: Vec<&str> = accumulators.split(' ').collect();
        let [fprop, dgrad, wgrad] = accumulators[..] else { return Err(wrong()) };
        let accumulator = |word| choose("accumulator", ACCUMULATORS, word);
        let (pass, keeps) = pass.strip_suffix(" keep").map_or((pass, false), |pass| (pass, true));
        let pass = choose("pass", PASSES, pass)?;
        let [of_input, of_weight, of_grad_output] = pass.directions();
        Ok(Formats {
            input: Slot::of(input, of_input)?,
            weight: Slot::of(weight, of_weight)?,
            grad_output: Slot::of(grad_output, of_grad_output)?,
            pass,
            keeps,
            accumulators: [accumulator(fprop)?, accumulator(dgrad)?, accumulator(wgrad)?],
        })
    }
}
