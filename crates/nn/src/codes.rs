//! Codes of a tensor, where the tensor lies: the one place that knows how many kinds of devices
//! there are.

use crate::{Result, values};
use candle_core::{DType, Tensor};
use nvfp4::{Accumulator, Directions, Options, QuantTensor, Quantizer, Randomness, Side};
use std::sync::Arc;

#[cfg(feature = "nn-cuda")]
use crate::gpu;

/// Codes that several may hold.
#[derive(Clone, Debug)]
pub(crate) enum Codes {
    Cpu(Arc<QuantTensor>),
    #[cfg(feature = "nn-cuda")]
    Gpu(gpu::Codes),
}

/// Codes, and what delayed scaling is to remember.
pub(crate) struct Observed {
    pub codes: Codes,
    pub row_amax: Option<Amax>,
    pub col_amax: Option<Amax>,
}

/// The largest magnitude of a tensor, where the tensor lies.
#[derive(Clone, Debug)]
pub(crate) enum Amax {
    Cpu(f32),
    #[cfg(feature = "nn-cuda")]
    Gpu(gpu::Amax),
}

/// An operand wherever it lies.
pub(crate) type Operand = values::Operand<Codes>;

impl Codes {
    /// Quantizes a matrix where it lies.
    pub fn make(quantizer: &Quantizer, x: &Tensor, randomness: Option<Randomness<'static>>) -> Result<Observed> {
        #[cfg(feature = "nn-cuda")]
        if x.device().is_cuda() {
            let (codes, [row_amax, col_amax]) = gpu::quantize(quantizer, x, randomness)?;
            let (row_amax, col_amax) = (row_amax.map(Amax::Gpu), col_amax.map(Amax::Gpu));
            return Ok(Observed { codes: Codes::Gpu(codes), row_amax, col_amax });
        }
        let options = Options { randomness, ..Options::default() };
        let observed = values::with_values(x, |x| quantizer.observe(x, &options))?;
        let codes = Codes::Cpu(Arc::new(observed.tensor));
        Ok(Observed { codes, row_amax: observed.row_amax.map(Amax::Cpu), col_amax: observed.col_amax.map(Amax::Cpu) })
    }

    pub fn byte_len(&self) -> usize {
        match self {
            Codes::Cpu(codes) => codes.byte_len(),
            #[cfg(feature = "nn-cuda")]
            Codes::Gpu(codes) => codes.byte_len(),
        }
    }

    /// These directions alone.
    pub fn only(self, directions: Directions) -> Result<Self> {
        Ok(match self {
            Codes::Cpu(codes) => {
                let mut codes = Arc::unwrap_or_clone(codes);
                codes.keep(directions)?;
                Codes::Cpu(Arc::new(codes))
            }
            #[cfg(feature = "nn-cuda")]
            Codes::Gpu(codes) => Codes::Gpu(codes.only(directions)),
        })
    }

    /// What a direction decodes to: its matrix, in the type asked for, where the codes lie.
    pub fn decoded(&self, side: Side, dtype: DType) -> Result<Tensor> {
        match self {
            Codes::Cpu(codes) => values::decoded(codes.direction(side)?, dtype),
            #[cfg(feature = "nn-cuda")]
            Codes::Gpu(codes) => codes.decoded(side, dtype),
        }
    }

    /// A copy in the memory of the host.
    pub fn to_host(&self) -> Result<QuantTensor> {
        match self {
            Codes::Cpu(codes) => Ok((**codes).clone()),
            #[cfg(feature = "nn-cuda")]
            Codes::Gpu(codes) => codes.to_host(),
        }
    }

    /// Codes of the host, where these lie.
    pub fn beside(&self, codes: QuantTensor) -> Result<Self> {
        match self {
            Codes::Cpu(_) => Ok(Codes::Cpu(Arc::new(codes))),
            #[cfg(feature = "nn-cuda")]
            Codes::Gpu(here) => Ok(Codes::Gpu(here.upload(&codes)?)),
        }
    }

    fn on_cpu(&self) -> Result<&QuantTensor> {
        match self {
            Codes::Cpu(codes) => Ok(codes),
            #[cfg(feature = "nn-cuda")]
            Codes::Gpu(_) => Err(gpu::elsewhere()),
        }
    }

    #[cfg(feature = "nn-cuda")]
    fn on_gpu(&self) -> Result<&gpu::Codes> {
        match self {
            Codes::Cpu(_) => Err(gpu::elsewhere()),
            Codes::Gpu(codes) => Ok(codes),
        }
    }
}

/// `a · bᵀ (+ c)` of operands of which one is codes, in the type asked for.
pub(crate) fn multiply(
    a: &Operand,
    b: &Operand,
    c: Option<&Tensor>,
    accumulator: Accumulator,
    dtype: DType,
) -> Result<Tensor> {
    #[cfg(feature = "nn-cuda")]
    if let (Operand::Codes(Codes::Gpu(codes), _), _) | (_, Operand::Codes(Codes::Gpu(codes), _)) = (a, b) {
        return codes.multiply(&a.map(Codes::on_gpu)?, &b.map(Codes::on_gpu)?, c, accumulator, dtype);
    }
    values::multiply(&a.map(Codes::on_cpu)?, &b.map(Codes::on_cpu)?, c, accumulator, dtype)
}
