//! A tensor as products read it, and the products themselves.

use crate::codes::{Codes, Operand};
use crate::{Result, codes};
use candle_core::{DType, Tensor};
use nvfp4::{Accumulator, Directions, Precision, QuantTensor, Side};
use nvfp4_recipe::{ColumnSource, Family, Format, QuantSpec, Stored};

/// A matrix and the codes that its spec makes of it. A direction without codes is the matrix
/// itself.
#[derive(Clone, Debug)]
pub(crate) struct Quantized {
    spec: QuantSpec,
    /// In the type of the module; `None` where nothing reads it any more.
    plain: Option<Tensor>,
    codes: Option<Codes>,
    dtype: DType,
}

impl Quantized {
    pub fn plain(spec: QuantSpec, x: Tensor) -> Self {
        Quantized { spec, dtype: x.dtype(), plain: Some(x), codes: None }
    }

    pub fn new(spec: QuantSpec, x: Tensor, codes: Codes) -> Self {
        Quantized { spec, dtype: x.dtype(), plain: Some(x), codes: Some(codes) }
    }

    /// A copy of the codes, if there are any.
    pub fn codes(&self) -> Result<Option<QuantTensor>> {
        self.codes.as_ref().map(Codes::to_host).transpose()
    }

    /// Other codes of the same kind, and nothing else.
    pub fn with_codes(&self, codes: QuantTensor) -> Result<Self> {
        let codes = self.codes.as_ref().map(|own| own.beside(codes)).transpose()?;
        Ok(Quantized { codes, ..self.clone() })
    }

    /// Bytes of the codes.
    pub fn code_bytes(&self) -> usize {
        self.codes.as_ref().map_or(0, |codes| codes.byte_len())
    }

    /// Bytes that are kept, but for a matrix that candle's graph holds anyway.
    pub fn byte_len(&self) -> usize {
        let plain = self.plain.as_ref().map_or(0, |x| x.elem_count() * x.dtype().size_in_bytes());
        plain + self.code_bytes()
    }

    /// What the row direction stands for, in the type of the module.
    pub fn decoded(&self) -> Result<Tensor> {
        Ok(match self.side(Side::Row)? {
            Operand::Plain(x) => x.to_dtype(self.dtype)?,
            Operand::Codes(codes, side) => codes.decoded(side, self.dtype)?,
        })
    }

    /// What a product reads in a direction.
    pub fn side(&self, side: Side) -> Result<Operand> {
        let format = self.spec.format(side);
        if let (Some(codes), true) = (&self.codes, is_coded(&format)) {
            return Ok(Operand::Codes(codes.clone(), side));
        }
        let matrix = match (side, self.spec.source(), &self.codes) {
            // What the row direction decodes to.
            (Side::Column, ColumnSource::RowDequantized, Some(codes)) => codes.decoded(Side::Row, self.dtype)?,
            (Side::Column, ColumnSource::RowDequantized, None) => cast(self.held(), &self.spec.format(Side::Row))?,
            _ => self.held().clone(),
        };
        let matrix = cast(&matrix, &format)?;
        Ok(Operand::Plain(match side {
            Side::Row => matrix,
            Side::Column => matrix.t()?,
        }))
    }

    /// What is left when only one direction will be read.
    pub fn only(self, side: Side) -> Result<Self> {
        let decodes = side == Side::Column && self.spec.source() == ColumnSource::RowDequantized;
        let format = self.spec.format(side);
        let wanted = match (is_coded(&format), side) {
            (true, Side::Row) => Some(Directions::Row),
            (true, Side::Column) => Some(Directions::Column),
            (false, _) if decodes && self.codes.is_some() => Some(Directions::Row),
            (false, _) => None,
        };
        match wanted {
            Some(directions) => {
                let codes = self.codes.map(|codes| codes.only(directions)).transpose()?;
                Ok(Quantized { codes, plain: None, ..self })
            }
            // Kept in the type that the product reads, which may be a smaller one.
            None => {
                let plain = cast(self.held(), &format)?;
                Ok(Quantized { plain: Some(plain), codes: None, ..self })
            }
        }
    }

    fn held(&self) -> &Tensor {
        self.plain.as_ref().expect("a direction without codes keeps its matrix")
    }
}

fn is_coded(format: &Format) -> bool {
    format.family() != Family::HighPrecision
}

fn cast(x: &Tensor, format: &Format) -> Result<Tensor> {
    Ok(match format {
        Format::HighPrecision(Stored::Cast(precision)) => x.to_dtype(match precision {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::BF16,
            Precision::F16 => DType::F16,
        })?,
        _ => x.clone(),
    })
}

/// `a · bᵀ` in the type of `like`: sums of plain operands are candle's, in binary32 where an
/// operand is smaller.
pub(crate) fn multiply(a: &Operand, b: &Operand, accumulator: Accumulator, like: &Tensor) -> Result<Tensor> {
    match (a, b) {
        (Operand::Plain(a), Operand::Plain(b)) => {
            let (a, b) = (widened(a, like)?, widened(b, like)?);
            Ok(a.matmul(&b.t()?)?.to_dtype(like.dtype())?)
        }
        _ => codes::multiply(a, b, None, accumulator, like.dtype()),
    }
}

/// `c + a · bᵀ`, for the gradient of a weight: `a` is the output's gradient, `b` the input, both
/// turned.
pub(crate) fn multiply_add(
    a: &Operand,
    b: &Operand,
    c: Option<&Tensor>,
    accumulator: Accumulator,
    like: &Tensor,
) -> Result<Tensor> {
    match (a, b) {
        (Operand::Plain(a), Operand::Plain(b)) => {
            let (a, b) = (widened(a, like)?, widened(b, like)?);
            // Turned twice, as candle's own graph does it: the order of the sum is that of its
            // product.
            let product = b.matmul(&a.t()?)?.t()?.to_dtype(like.dtype())?;
            Ok(match c {
                None => product.contiguous()?,
                Some(c) => c.add(&product)?,
            })
        }
        _ => codes::multiply(a, b, c, accumulator, like.dtype()),
    }
}

/// Smaller types in binary32, but on a GPU, whose sums are in binary32 anyway.
fn widened(x: &Tensor, like: &Tensor) -> Result<Tensor> {
    Ok(match like.dtype() {
        DType::F64 => x.to_dtype(DType::F64)?,
        DType::BF16 | DType::F16 if like.device().is_cuda() => x.to_dtype(like.dtype())?,
        _ => x.to_dtype(DType::F32)?,
    })
}
