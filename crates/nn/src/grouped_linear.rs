//! `y_e = x_e·w_eᵀ + b_e` for each expert `e`: x is [tokens, inputs], sorted by expert, and the
//! splits say how many tokens each has.
//!
//! Each expert is a linear layer of its own, exactly. Tokens are padded with rows of zeros to whole
//! tiles of the plan, inside.

use crate::projection::{Kept, Projection};
use crate::{Bias, Error, Place, Result, Session};
use candle_core::Tensor;
use nvfp4_recipe::{Module, ModulePath};

/// Linear layers that are computed together, one per expert.
#[derive(Clone, Debug)]
pub struct GroupedLinear {
    session: Session,
    path: ModulePath,
    experts: Vec<Projection>,
}

/// A grouped layer and the tokens of each expert: a module.
#[derive(Clone, Debug)]
pub struct Routed {
    layer: GroupedLinear,
    splits: Vec<usize>,
}

impl GroupedLinear {
    /// Layers at a place; the parameters of expert `e` are `e.weight` and `e.bias`.
    pub fn new(place: &Place, experts: u32, inputs: usize, outputs: usize, bias: Bias) -> Result<Self> {
        place.declare(Module::grouped_linear(place.path(), experts));
        let expert = |e: u32| Projection::expert(place, &place.child(&e.to_string()), (inputs, outputs), bias, e);
        Ok(GroupedLinear {
            session: place.session().clone(),
            path: place.path().clone(),
            experts: (0..experts).map(expert).collect::<Result<_>>()?,
        })
    }

    /// The weight's master copy of an expert, [outputs, inputs].
    pub fn weight(&self, expert: usize) -> Option<&Tensor> {
        self.experts.get(expert).map(Projection::weight)
    }

    /// With this many tokens for each expert, in the order of the experts; 0 is allowed.
    pub fn routed(&self, splits: &[usize]) -> Routed {
        Routed { layer: self.clone(), splits: splits.to_vec() }
    }

    /// An error unless the splits are of these tokens.
    fn check(&self, x: &Tensor, splits: &[usize]) -> Result<()> {
        let (tokens, _) = x.dims2()?;
        let refuse = |expected, got, fix| Err(Error::Size { module: self.path.to_string(), expected, got, fix });
        if splits.len() != self.experts.len() {
            let expected = format!("a split for each of {} experts", self.experts.len());
            return refuse(expected, splits.len().to_string(), "give 0 for an expert without tokens");
        }
        let sum: usize = splits.iter().sum();
        if sum != tokens {
            return refuse(format!("splits of {tokens} tokens"), sum.to_string(), "every token goes to one expert");
        }
        self.experts.iter().try_for_each(|expert| expert.check(x))
    }

    /// The experts that have tokens.
    fn groups(&self, splits: &[usize]) -> Result<Vec<Group<'_>>> {
        let padded = self.session.planned()?.pad(&self.path, splits);
        let padded = padded.ok_or_else(|| Error::NoPlan)?;
        let mut start = 0;
        let mut groups = Vec::new();
        for ((expert, &tokens), padded) in self.experts.iter().zip(splits).zip(padded) {
            if tokens > 0 {
                groups.push(Group { expert, start, tokens, padded });
            }
            start += tokens;
        }
        Ok(groups)
    }
}

/// An expert with tokens: the first of them, how many there are, and how many with padding.
struct Group<'a> {
    expert: &'a Projection,
    start: usize,
    tokens: usize,
    padded: usize,
}

impl Group<'_> {
    /// This expert's rows, padded.
    fn of(&self, x: &Tensor) -> Result<Tensor> {
        let rows = x.narrow(0, self.start, self.tokens)?;
        Ok(rows.pad_with_zeros(0, 0, self.padded - self.tokens)?)
    }

    /// The rows without padding.
    fn real(&self, y: &Tensor) -> Result<Tensor> {
        Ok(y.narrow(0, 0, self.tokens)?)
    }
}

impl Routed {
    fn run(&self, x: &Tensor) -> Result<Tensor> {
        let layer = self.layer.clone();
        layer.check(x, &self.splits)?;
        let groups = layer.groups(&self.splits)?;
        let Some(first) = groups.first() else {
            let outputs = layer.experts.first().map_or(Ok(0), |expert| expert.weight().dim(0))?;
            return Ok(Tensor::zeros((0, outputs), x.dtype(), x.device())?);
        };
        if first.expert.is_plain()? {
            let rows = |group: &Group| group.expert.plain(&x.narrow(0, group.start, group.tokens)?);
            return Ok(Tensor::cat(&groups.iter().map(rows).collect::<Result<Vec<_>>>()?, 0)?);
        }
        let (mut outputs, mut kept) = (Vec::new(), Vec::new());
        for group in &groups {
            let (y, keep) = group.expert.forward(&group.of(&x.detach())?)?;
            outputs.push(group.real(&y)?);
            kept.push(keep);
        }
        let y = Tensor::cat(&outputs, 0)?;
        let bytes = kept.iter().map(Kept::byte_len).sum();
        let anchor = first.expert.weight().clone();
        drop(groups);
        let Routed { layer: own, splits } = self.clone();
        let backward = move |dy: &Tensor| {
            let groups = own.groups(&splits)?;
            let rows = groups.iter().zip(&kept).map(|(group, kept)| {
                let dx = group.expert.backward(kept, &group.of(dy)?)?;
                group.real(&dx)
            });
            Ok(vec![Some(Tensor::cat(&rows.collect::<Result<Vec<_>>>()?, 0)?), None])
        };
        layer.session.attach(("grouped-linear", &layer.path), &[x, &anchor], y, bytes, Box::new(backward))
    }
}

impl candle_core::Module for Routed {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Ok(self.run(x)?)
    }
}
