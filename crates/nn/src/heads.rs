//! The layouts of attention's tensors: packed by token for the layers around it, by head for its
//! products.

use crate::{Error, Result};
use candle_core::Tensor;
use nvfp4_recipe::{Family, Format, ModulePath};

/// Along which axis of [batch, heads, tokens, features] a product sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Along {
    Features,
    Tokens,
}

/// Whether codes depend on the axis: blocks do, one scale per tensor does not.
pub(crate) fn has_axes(format: &Format) -> bool {
    !matches!(format.family(), Family::Fp8 | Family::HighPrecision)
}

/// How many heads there are, and of what size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    pub queries: usize,
    pub groups: usize,
    pub size: usize,
}

impl Heads {
    /// An error unless a tensor is packed queries, keys and values.
    pub fn check(&self, module: &ModulePath, x: &Tensor) -> Result<()> {
        let expected = (self.queries + 2 * self.groups) * self.size;
        match x.dims() {
            [_, _, features] if *features == expected => Ok(()),
            dims => Err(Error::Size {
                module: module.to_string(),
                expected: format!("[batch, sequence, {expected}]"),
                got: format!("{dims:?}"),
                fix: "pack the heads of queries, then of keys, then of values",
            }),
        }
    }

    /// Packed queries, keys and values, each [batch, heads, tokens, size].
    pub fn split(&self, packed: &Tensor) -> Result<[Tensor; 3]> {
        let (batch, tokens, _) = packed.dims3()?;
        let part = |first: usize, heads: usize| -> Result<Tensor> {
            let part = packed.narrow(2, first * self.size, heads * self.size)?;
            Ok(part.reshape((batch, tokens, heads, self.size))?.transpose(1, 2)?.contiguous()?)
        };
        Ok([part(0, self.queries)?, part(self.queries, self.groups)?, part(self.queries + self.groups, self.groups)?])
    }

    /// The reverse; keys and values come for each head of queries and are summed over those that
    /// share them.
    pub fn packed(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let shared = |x: &Tensor| -> Result<Tensor> {
            let (batch, heads, tokens, size) = x.dims4()?;
            Ok(x.reshape((batch, self.groups, heads / self.groups, tokens, size))?.sum(2)?)
        };
        let parts = [self.joined(q)?, self.joined(&shared(k)?)?, self.joined(&shared(v)?)?];
        Ok(Tensor::cat(&parts, 2)?)
    }

    /// Heads side by side, [batch, tokens, heads·size].
    pub fn joined(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, heads, tokens, size) = x.dims4()?;
        Ok(x.transpose(1, 2)?.reshape((batch, tokens, heads * size))?)
    }

    /// Heads of queries apart: the reverse of [`Heads::joined`].
    pub fn queries(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, tokens, _) = x.dims3()?;
        Ok(x.reshape((batch, tokens, self.queries, self.size))?.transpose(1, 2)?.contiguous()?)
    }

    /// Keys or values once for each head of queries.
    pub fn repeated(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, groups, tokens, size) = x.dims4()?;
        match self.queries / groups {
            1 => Ok(x.clone()),
            times => Ok(x.unsqueeze(2)?.expand((batch, groups, times, tokens, size))?.reshape((
                batch,
                self.queries,
                tokens,
                size,
            ))?),
        }
    }
}
