//! A linear layer: a projection for each way to run it, and a bias.

use crate::Result;
use crate::place::Placed;
use crate::projection::{ActivationScale, FourBit, Projection, Weights};
use std::sync::Arc;

/// In what activations are multiplied by quantized weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activations {
    /// As they are: only what weights lost is seen.
    Plain,
    /// As the checkpoint says: in 4 bits where a weight has an activation scale.
    AsStored,
    /// In 4 bits for every NVFP4 weight, with a scale per row.
    PerRow,
}

/// How keys and values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeysValues {
    /// As they are.
    Plain,
    /// As the checkpoint says: in FP8, with its scales, where it says so.
    AsStored,
}

/// Sees what goes through a model.
pub trait Watch: Sync {
    /// The input of a module, rows of `cols`.
    fn input(&self, _module: &str, _x: &[f32], _cols: usize) {}
    /// The output of a module for its last input, without its bias, rows of `cols`.
    fn output(&self, _module: &str, _y: &[f32], _cols: usize) {}
    /// How many tokens went to each expert of a module.
    fn routed(&self, _module: &str, _counts: &[u64]) {}
    /// Keys, after rotation, and values of an attention module.
    fn cached(&self, _module: &str, _keys: &[f32], _values: &[f32]) {}
}

/// Sees nothing.
impl Watch for () {}

/// One way to run a model.
#[derive(Clone, Copy)]
pub struct Run<'w> {
    /// Activations.
    pub activations: Activations,
    /// Keys and values.
    pub keys_values: KeysValues,
    /// Who watches.
    pub watch: &'w dyn Watch,
}

impl Run<'_> {
    /// Everything as the checkpoint says, unwatched.
    pub const AS_STORED: Run<'static> =
        Run { activations: Activations::AsStored, keys_values: KeysValues::AsStored, watch: &() };
}

/// A linear layer.
pub struct Linear {
    module: String,
    inputs: usize,
    weights: Weights,
    stored: Option<FourBit>,
    per_row: Option<FourBit>,
    bias: Option<Vec<f32>>,
}

impl Linear {
    /// A layer of a matrix; `scale` is that of its input, where it has one.
    pub fn new(module: String, matrix: Placed, scale: Option<f32>, bias: Option<Vec<f32>>) -> Self {
        let (inputs, matrix) = (matrix.cols(), Arc::new(matrix));
        let stored = scale.and_then(|scale| FourBit::new(matrix.clone(), ActivationScale::Stored(scale)));
        let per_row = FourBit::new(matrix.clone(), ActivationScale::PerRow);
        Linear { module, inputs, weights: Weights(matrix), stored, per_row, bias }
    }

    /// How many numbers come out per row.
    pub fn outputs(&self) -> usize {
        self.weights.outputs()
    }

    /// Outputs for rows of inputs.
    pub fn apply(&self, x: &[f32], run: &Run<'_>) -> Result<Vec<f32>> {
        run.watch.input(&self.module, x, self.inputs);
        let quantized = match run.activations {
            Activations::Plain => None,
            Activations::AsStored => self.stored.as_ref(),
            Activations::PerRow => self.per_row.as_ref(),
        };
        let rows = x.len() / self.inputs;
        let mut out = match quantized {
            Some(projection) => projection.apply(x, rows)?,
            None => self.weights.apply(x, rows)?,
        };
        run.watch.output(&self.module, &out, self.outputs());
        if let Some(bias) = &self.bias {
            out.chunks_exact_mut(bias.len()).for_each(|row| row.iter_mut().zip(bias).for_each(|(y, b)| *y += b));
        }
        Ok(out)
    }
}
