//! Where a module stands: its path, and what parameters made there have in common.

use crate::{Error, Init, Parameter, Result, Session};
use candle_core::{DType, Device, Shape, Tensor, Var};
use nvfp4_recipe::{Edge, Module, ModulePath, Site};

/// Where a module stands in a model. Made by [`Session::place`]; each module gets a
/// [`Place::child`].
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
    /// As codes too, which are always there: made with the plan and at the end of each step, and
    /// exchanged with files by [`Session::stored_weights`] and [`Session::load_weights`].
    MastersAndCodes,
}

impl Session {
    /// The place of the outermost modules; parameters have this type.
    pub fn place(&self, dtype: DType, device: &Device) -> Place {
        let (session, path, device) = (self.clone(), ModulePath::from(""), device.clone());
        Place { session, path, dtype, device, weights: None, storage: Storage::Masters }
    }
}

impl Place {
    /// A place inside this one.
    pub fn child(&self, name: &str) -> Self {
        Place { path: self.path.child(name), ..self.clone() }
    }

    /// The same place, where weights of linear layers begin like this; the default is uniform
    /// within ±1/√(inputs).
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
