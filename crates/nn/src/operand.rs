//! A tensor as products read it, and the products themselves.

use crate::{Result, values};
use candle_core::{DType, Device, Tensor};
use nvfp4::recipe::{ColumnSource, Family, Format, QuantSpec, Stored};
use nvfp4::{Direction, Directions, Precision, QuantTensor, Side};
use std::sync::Arc;

/// Codes that several hold.
type Codes = Arc<QuantTensor>;

/// A matrix and the codes that its spec makes of it. A direction without codes is the matrix itself.
#[derive(Clone, Debug)]
pub(crate) struct Quantized {
    spec: QuantSpec,
    /// In the type of the module; `None` where nothing reads it any more.
    plain: Option<Tensor>,
    codes: Option<Codes>,
    dtype: DType,
    device: Device,
}

/// One side of a product: rows along the sum.
pub(crate) enum Operand {
    Plain(Tensor),
    Codes(Codes, Side),
}

impl Quantized {
    pub fn plain(spec: QuantSpec, x: Tensor) -> Self {
        Quantized { spec, dtype: x.dtype(), device: x.device().clone(), plain: Some(x), codes: None }
    }

    pub fn new(spec: QuantSpec, x: Tensor, codes: QuantTensor) -> Self {
        Quantized { codes: Some(Arc::new(codes)), ..Quantized::plain(spec, x) }
    }

    /// A copy of the codes, if there are any.
    pub fn codes(&self) -> Option<QuantTensor> {
        self.codes.as_deref().cloned()
    }

    /// Other codes of the same kind, and nothing else.
    pub fn with_codes(&self, codes: QuantTensor) -> Self {
        Quantized { codes: Some(Arc::new(codes)), ..self.clone() }
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
            Operand::Codes(codes, side) => values::decoded(codes.direction(side)?, self.dtype, &self.device)?,
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
            (Side::Column, ColumnSource::RowDequantized, Some(codes)) => {
                values::decoded(codes.direction(Side::Row)?, self.dtype, &self.device)?
            }
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
                let mut codes =
                    self.codes.map_or_else(|| unreachable!("a coded direction was made"), Arc::unwrap_or_clone);
                codes.keep(directions)?;
                Ok(Quantized { codes: Some(Arc::new(codes)), plain: None, ..self })
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

/// `a · bᵀ` in the type and on the device of `like`: sums of plain operands are candle's, in binary32 where an operand is smaller.
pub(crate) fn multiply(a: &Operand, b: &Operand, like: &Tensor) -> Result<Tensor> {
    match (a, b) {
        (Operand::Plain(a), Operand::Plain(b)) => {
            let (a, b) = (widened(a, like)?, widened(b, like)?);
            Ok(a.matmul(&b.t()?)?.to_dtype(like.dtype())?)
        }
        _ => coded(a, b, None, like),
    }
}

/// `c + a · bᵀ`, for the gradient of a weight: `a` is the output's gradient, `b` the input, both turned.
pub(crate) fn multiply_add(a: &Operand, b: &Operand, c: Option<&Tensor>, like: &Tensor) -> Result<Tensor> {
    match (a, b) {
        (Operand::Plain(a), Operand::Plain(b)) => {
            let (a, b) = (widened(a, like)?, widened(b, like)?);
            // Turned twice, as candle's own graph does it: the order of the sum is that of its product.
            let product = b.matmul(&a.t()?)?.t()?.to_dtype(like.dtype())?;
            Ok(match c {
                None => product.contiguous()?,
                Some(c) => c.add(&product)?,
            })
        }
        _ => coded(a, b, c, like),
    }
}

/// Smaller types in binary32.
fn widened(x: &Tensor, like: &Tensor) -> Result<Tensor> {
    Ok(x.to_dtype(if like.dtype() == DType::F64 { DType::F64 } else { DType::F32 })?)
}

fn coded(a: &Operand, b: &Operand, c: Option<&Tensor>, like: &Tensor) -> Result<Tensor> {
    let (a, b) = (a.held()?, b.held()?);
    values::multiply(a.direction()?, b.direction()?, c, like.dtype(), like.device())
}

/// An operand of a product of which one at least is codes.
enum Held<'a> {
    Codes(&'a QuantTensor, Side),
    Plain(Direction),
}

impl Held<'_> {
    fn direction(&self) -> Result<&Direction> {
        Ok(match self {
            Held::Codes(codes, side) => codes.direction(*side)?,
            Held::Plain(direction) => direction,
        })
    }
}

impl Operand {
    fn held(&self) -> Result<Held<'_>> {
        Ok(match self {
            Operand::Codes(codes, side) => Held::Codes(codes, *side),
            Operand::Plain(x) => Held::Plain(values::direction(x)?),
        })
    }
}
