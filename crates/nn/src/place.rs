//! Where a module stands: its path, its parameters, and how they begin.

use crate::{Error, Result, Session};
use candle_core::{DType, Device, Shape, Tensor, Var};
use nvfp4_recipe::{Edge, Module, ModulePath, Site};
use nvfp4_spec::philox::{philox4x32, words};
use rayon::prelude::*;

/// Where a module stands in a model. Made by [`Session::place`]; each module gets a [`Place::child`].
#[derive(Clone, Debug)]
pub struct Place {
    session: Session,
    path: ModulePath,
    dtype: DType,
    device: Device,
    weights: Option<Init>,
    storage: Storage,
}

/// How the weights of linear layers exist between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Storage {
    /// As masters in high precision; codes are made when a step first reads them, and go with it.
    #[default]
    Masters,
    /// As codes too, which are always there: made with the plan and at the end of each step, and exchanged with files by
    /// [`Session::stored_weights`] and [`Session::load_weights`].
    MastersAndCodes,
}

/// What a parameter is before the first step. Random values follow from the session's seed, the parameter's name and the position, and
/// from nothing else: not from the order in which modules are made, nor from the machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// The same number everywhere.
    Constant(f64),
    /// Evenly between −a and a.
    Uniform(f64),
    /// Normally around 0, with this standard deviation: sums of twelve uniform numbers, so never beyond six of them.
    Normal(f64),
}

/// A parameter: its name in files, and its master copy.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// The module's path and the parameter's own name.
    pub name: String,
    /// What the optimizer changes.
    pub var: Var,
}

impl Place {
    pub(crate) fn root(session: Session, dtype: DType, device: Device) -> Self {
        Place { session, path: ModulePath::from(""), dtype, device, weights: None, storage: Storage::Masters }
    }

    /// A place inside this one.
    pub fn child(&self, name: &str) -> Self {
        Place { path: self.path.child(name), ..self.clone() }
    }

    /// The same place, where weights of linear layers begin like this; the default is evenly within ±1/√(inputs).
    pub fn with_weights(&self, init: Init) -> Self {
        Place { weights: Some(init), ..self.clone() }
    }

    /// The same place, where weights of linear layers are stored like this.
    pub fn with_storage(&self, storage: Storage) -> Self {
        Place { storage, ..self.clone() }
    }

    /// The path.
    pub fn path(&self) -> &ModulePath {
        &self.path
    }

    /// Where parameters lie.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The session.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Makes a parameter of this place.
    pub fn parameter(&self, name: &str, shape: impl Into<Shape>, init: Init) -> Result<Parameter> {
        let (name, shape) = (self.path.child(name).to_string(), shape.into());
        let seed = self.session.state().seed;
        let values = init.values(shape.elem_count(), seed, &name);
        let values = Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(self.dtype)?.to_device(&self.device)?;
        let var = Var::from_tensor(&values)?;
        let mut state = self.session.state();
        if state.parameters.contains_key(&name) {
            return Err(Error::Duplicate(name));
        }
        state.parameters.insert(name.clone(), var.clone());
        Ok(Parameter { name, var })
    }

    /// The parameter of a linear layer with this many inputs.
    pub(crate) fn weight(&self, name: &str, shape: (usize, usize)) -> Result<Parameter> {
        let init = self.weights.unwrap_or(Init::Uniform(1.0 / (shape.1 as f64).sqrt()));
        self.parameter(name, shape, init)
    }

    /// Says whose codes are to be there between steps, if this place asks for that.
    pub(crate) fn store(&self, site: Site, weight: &Parameter) {
        if self.storage == Storage::MastersAndCodes {
            self.session.state().stored.insert(site, weight.clone());
        }
    }

    /// Says that this module quantizes tensors.
    pub fn declare(&self, module: Module) {
        self.session.declare(module);
    }

    /// Says that a tensor is handed over quantized.
    pub fn connect(&self, edge: Edge) {
        self.session.connect(edge);
    }
}

impl Init {
    fn values(self, count: usize, seed: u64, name: &str) -> Vec<f64> {
        let [low, high] = words(nvfp4_files::fingerprint(name.bytes()));
        // Four numbers in [0, 1) for each call.
        let uniforms = |call: u64| {
            let [i, j] = words(call);
            philox4x32([i, j, low, high], words(seed)).map(|word| f64::from(word) / 4294967296.0)
        };
        match self {
            Init::Constant(value) => vec![value; count],
            Init::Uniform(a) => (0..count as u64).into_par_iter().map(|i| a * (2.0 * uniforms(i)[0] - 1.0)).collect(),
            Init::Normal(deviation) => (0..count as u64)
                .into_par_iter()
                .map(|i| (0..3).flat_map(|part| uniforms(3 * i + part)).sum::<f64>() - 6.0)
                .map(|normal| deviation * normal)
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn initial_values_follow_from_seed_name_and_position_alone() {
        let values = Init::Normal(2.0).values(4096, 7, "a.weight");
        assert_eq!(values[..100], Init::Normal(2.0).values(100, 7, "a.weight")[..]);
        assert_ne!(values, Init::Normal(2.0).values(4096, 8, "a.weight"));
        assert_ne!(values, Init::Normal(2.0).values(4096, 7, "b.weight"));
        let n = values.len() as f64;
        let (mean, square) = (values.iter().sum::<f64>() / n, values.iter().map(|v| v * v).sum::<f64>() / n);
        // Five standard deviations of either estimate.
        assert!(mean.abs() < 5.0 * 2.0 / n.sqrt() && (square - 4.0).abs() < 5.0 * 4.0 * (2.0 / n).sqrt());
        assert!(Init::Uniform(0.5).values(1000, 1, "x").iter().all(|v| (-0.5..0.5).contains(v)));
    }
}
