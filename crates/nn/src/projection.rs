//! The three products of a linear layer, without a node of the graph: what all modules with weights
//! are made of.

use crate::operand::{Quantized, multiply, multiply_add};
use crate::{Error, Init, Parameter, Place, Result, Session, sums};
use candle_core::{D, Module as _, Tensor};
use nvfp4::{Directions, Generator, Side};
use nvfp4_recipe::{KeepInput, LinearSlot, Module, ModulePath, QuantSpec, Saved, Site, Slot};

/// Whether a linear layer adds a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Bias {
    /// It does.
    #[default]
    With,
    /// It does not.
    Without,
}

/// A linear layer over matrices.
#[derive(Clone, Debug)]
pub(crate) struct Projection {
    pub session: Session,
    pub path: ModulePath,
    expert: Option<u32>,
    weight: Parameter,
    bias: Option<Parameter>,
}

/// What the backward pass needs of the input.
pub(crate) enum Kept {
    /// One direction of it.
    Direction(Quantized),
    /// All of it, to be quantized again with the random numbers of the first time.
    Original(Tensor, Generator),
}

impl Kept {
    pub fn byte_len(&self) -> usize {
        match self {
            Kept::Direction(input) => input.byte_len(),
            Kept::Original(input, _) => input.elem_count() * input.dtype().size_in_bytes(),
        }
    }
}

impl Projection {
    /// A layer that declares itself.
    pub fn new(place: &Place, (inputs, outputs): (usize, usize), bias: Bias, keep: KeepInput) -> Result<Self> {
        place.declare(Module::linear(place.path()).keep_input(keep));
        Projection::parameters(place, place, (inputs, outputs), bias, None)
    }

    /// One of the layers of a module that declares itself; its parameters stand at a place of their
    /// own.
    pub fn expert(owner: &Place, place: &Place, sizes: (usize, usize), bias: Bias, expert: u32) -> Result<Self> {
        Projection::parameters(owner, place, sizes, bias, Some(expert))
    }

    fn parameters(
        owner: &Place,
        place: &Place,
        (inputs, outputs): (usize, usize),
        bias: Bias,
        expert: Option<u32>,
    ) -> Result<Self> {
        let weight = place.weight("weight", (outputs, inputs))?;
        let bias = match bias {
            Bias::With => Some(place.parameter("bias", outputs, Init::Constant(0.0))?),
            Bias::Without => None,
        };
        let projection =
            Projection { session: owner.session().clone(), path: owner.path().clone(), expert, weight, bias };
        place.store(projection.site(LinearSlot::Weight), &projection.weight);
        Ok(projection)
    }

    pub fn weight(&self) -> &Tensor {
        self.weight.var.as_tensor()
    }

    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref().map(|bias| bias.var.as_tensor())
    }

    fn site(&self, slot: LinearSlot) -> Site {
        match self.expert {
            None => Site::new(&self.path, slot),
            Some(expert) => Site::new(&self.path, Slot::Grouped { slot, expert }),
        }
    }

    /// Whether the plan leaves all tensors as they are. Then the module is candle's own graph, bit
    /// for bit.
    pub fn is_plain(&self) -> Result<bool> {
        let plan = self.session.planned()?;
        let plain = |slot| plan.spec(&self.site(slot)).is_some_and(|spec| *spec == QuantSpec::HIGH_PRECISION);
        use LinearSlot::*;
        Ok([Input, Weight, GradOutput].into_iter().all(plain)
            && [Output, GradInput].into_iter().all(|slot| plan.spec(&self.site(slot)).is_none() || plain(slot)))
    }

    /// The same in candle's own graph.
    pub fn plain(&self, x: &Tensor) -> Result<Tensor> {
        let y = candle_nn::Linear::new(self.weight().clone(), self.bias().cloned()).forward(x)?;
        self.session.look(&self.path, "output", &y)?;
        Ok(y)
    }

    /// `y = x·wᵀ + b`, x being [tokens, inputs].
    pub fn forward(&self, x: &Tensor) -> Result<(Tensor, Kept)> {
        let before = self.session.active_generator();
        let input = self.session.quantize(&self.site(LinearSlot::Input), x)?;
        let weight = self.session.weight(&self.site(LinearSlot::Weight), &self.weight)?;
        let fprop = self.session.planned()?.accumulators().fprop;
        let y = multiply(&input.side(Side::Row)?, &weight.side(Side::Row)?, fprop, x)?;
        let y = match self.bias() {
            None => y,
            Some(bias) => y.broadcast_add(&bias.detach())?,
        };
        let y = self.session.hand_over(&self.site(LinearSlot::Output), &y)?;
        Ok((y, self.keep(x, input, before)?))
    }

    fn keep(&self, x: &Tensor, input: Quantized, before: Generator) -> Result<Kept> {
        let saved = self.session.planned()?.saved_input(&self.path);
        Ok(match saved {
            _ if self.session.is_evaluating() => Kept::Original(x.detach(), before),
            Some(Saved::Original) if input.code_bytes() > 0 => Kept::Original(x.detach(), before),
            _ => Kept::Direction(input.only(Side::Column)?),
        })
    }

    /// Adds `dw = dyᵀ·x` and `db = Σ dy` to the gradients, and gives `dx = dy·w`.
    pub fn backward(&self, kept: &Kept, dy: &Tensor) -> Result<Tensor> {
        let gradient = self.session.quantize(&self.site(LinearSlot::GradOutput), dy)?;
        let weight = self.session.weight(&self.site(LinearSlot::Weight), &self.weight)?;
        let sums = self.session.planned()?.accumulators();
        let dx = multiply(&gradient.side(Side::Row)?, &weight.side(Side::Column)?, sums.dgrad, dy)?;
        self.session.look(&self.path, "grad_input", &dx)?;
        let dx = self.session.hand_over(&self.site(LinearSlot::GradInput), &dx)?;

        let input = match kept {
            Kept::Direction(input) => input.side(Side::Column)?,
            Kept::Original(input, before) => self.column(input, before)?.side(Side::Column)?,
        };
        let turned = gradient.side(Side::Column)?;
        self.session.add_gradient(&self.weight, |sum| multiply_add(&turned, &input, sum, sums.wgrad, dy))?;
        if let Some(bias) = &self.bias {
            let db = sums::sum(dy, 0)?.squeeze(0)?;
            self.session.add_to_gradient(bias, &db)?;
        }
        Ok(dx)
    }

    /// The column direction of an input that was kept as it is. It records no amax, and draws the
    /// random numbers of the first time.
    fn column(&self, x: &Tensor, before: &Generator) -> Result<Quantized> {
        let (site, plan) = (self.site(LinearSlot::Input), self.session.planned()?);
        let coded = matches!(plan.directions(&site), Some(Directions::Column | Directions::Both));
        let again = || self.session.quantize_in(&plan, &site, x, coded.then_some(Directions::Column));
        self.session.again(before.clone(), again)
    }

    /// A tensor as a matrix of tokens.
    pub fn matrix(&self, x: &Tensor) -> Result<Tensor> {
        let features = x.dim(D::Minus1)?;
        let tokens = x.elem_count().checked_div(features).unwrap_or(0);
        Ok(x.detach().reshape((tokens, features))?)
    }

    /// A matrix of tokens, with the leading dimensions of another tensor.
    pub fn shaped_like(&self, y: &Tensor, x: &Tensor) -> Result<Tensor> {
        let mut shape = x.dims().to_vec();
        if let Some(last) = shape.last_mut() {
            *last = y.dim(1)?;
        }
        Ok(y.reshape(shape)?)
    }

    /// An error unless the last dimension is the number of inputs.
    pub fn check(&self, x: &Tensor) -> Result<()> {
        let (expected, got) = (self.weight().dim(1)?, x.dim(D::Minus1)?);
        match expected == got {
            true => Ok(()),
            false => Err(Error::Size {
                module: self.path.to_string(),
                expected: format!("{expected} features"),
                got: format!("{got}"),
                fix: "the last dimension of the input is the features",
            }),
        }
    }
}
