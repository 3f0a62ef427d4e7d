//! Products of quantized tensors. What they compute is written in [`nvfp4_spec::gemm`].

use crate::direction::{BlockRef, Elements, Fp8Parts, Nvfp4Parts, Parts, plain_input};
use crate::format::Family;
use crate::{Direction, Element, Error, QuantTensor, Result, Side, Signs, TensorRef};
use nvfp4_kernels::{Implementation, gemm};
use nvfp4_spec::{area, zeros};
use std::borrow::Cow;
use std::sync::Arc;

pub use nvfp4_kernels::gemm::{Accumulate, Accumulator, Epilogue, Product};

/// `α·A·Bᵀ (+ bias) (+ β·C)`: `a` is [M, K], `b` is [N, K], the result [M, N], row-major.
///
/// The three products of a linear layer are `x.row · w.row`, `dy.row · w.col` and `dy.col · x.col`. Operands are of one format, or one of
/// them is in high precision ([`multiply`](crate::format::multiply) is the rule); others are refused, and so are operands whose Hadamard
/// transforms differ: only equal rotations cancel.
///
/// An operand is a direction, or the block of one ([`Direction::in_block`]), which is read where it lies.
///
/// NVFP4 × NVFP4 is correctly rounded before the scales. In every other product sums are in binary32, within
/// [`nvfp4_spec::gemm::bound`] of the exact ones.
///
/// ```
/// use nvfp4::{Product, Quantizer, Side, TensorRef, matmul};
///
/// let x = Quantizer::default().quantize(&TensorRef::new(&[2.0f32; 2 * 16][..], &[2, 16])?)?;
/// let w = Quantizer::default().quantize(&TensorRef::new(&[0.5f32; 3 * 16][..], &[3, 16])?)?;
/// let product = Product { bias: Some(&[0.0, 1.0, 2.0]), ..Product::default() };
/// let y: Vec<f32> = matmul(x.direction(Side::Row)?, w.direction(Side::Row)?, &product)?;
/// assert_eq!(y, [16.0, 17.0, 18.0, 16.0, 17.0, 18.0]);
/// # Ok::<(), nvfp4::Error>(())
/// ```
pub fn matmul<'a, T: Element>(
    a: impl Into<Operand<'a>>,
    b: impl Into<Operand<'a>>,
    product: &Product<'_, T>,
) -> Result<Vec<T>> {
    matmul_with(Implementation::best(), a, b, product)
}

/// [`matmul`] by the implementation asked for. On the CPU all give the same bits where both operands are NVFP4; a GPU and other operands
/// are within the bound.
pub fn matmul_with<'a, T: Element>(
    implementation: Implementation,
    a: impl Into<Operand<'a>>,
    b: impl Into<Operand<'a>>,
    product: &Product<'_, T>,
) -> Result<Vec<T>> {
    let (a, b) = (a.into(), b.into());
    check(a, b)?;
    let prepared = b.prepared();
    let (a, b) = (Held::new(a)?, Held::new(b)?);
    let (a, b) = (a.operand()?, b.operand()?);
    let mut out = zeros(area(a.rows(), b.rows())?, a.rows(), b.rows())?;
    multiply(implementation, a, b, prepared, product, &mut out)?;
    Ok(out)
}

/// `α·X·Wᵀ (+ bias) (+ β·C)` of a plain tensor [M, K] and a quantized one [N, K]: the product of a layer whose weights alone are
/// quantized. Sums are in binary32, within [`nvfp4_spec::gemm::bound`] of the exact ones.
///
/// A weight that is Hadamard-transformed is refused: `x` is not.
///
/// ```
/// use nvfp4::{Product, Quantizer, Side, TensorRef, matmul_plain};
///
/// let x = TensorRef::new(&[2.0f32; 16][..], &[1, 16])?;
/// let w = Quantizer::default().quantize(&TensorRef::new(&[0.5f32; 3 * 16][..], &[3, 16])?)?;
/// let y: Vec<f32> = matmul_plain(&x, w.direction(Side::Row)?, &Product::default())?;
/// assert_eq!(y, [16.0; 3]);
/// # Ok::<(), nvfp4::Error>(())
/// ```
pub fn matmul_plain<'a, T: Element>(
    x: &TensorRef<'_>,
    w: impl Into<Operand<'a>>,
    product: &Product<'_, T>,
) -> Result<Vec<T>> {
    matmul_plain_with(Implementation::best(), x, w, product)
}

/// [`matmul_plain`] by the implementation asked for.
pub fn matmul_plain_with<'a, T: Element>(
    implementation: Implementation,
    x: &TensorRef<'_>,
    w: impl Into<Operand<'a>>,
    product: &Product<'_, T>,
) -> Result<Vec<T>> {
    let w = w.into();
    let rotation = w.like().rotation();
    if rotation.is_some() {
        return Err(Error::Rotation { left: None, right: rotation });
    }
    let prepared = w.prepared();
    let w = Held::new(w)?;
    let w = w.operand()?;
    let mut out = zeros(area(x.rows(), w.rows())?, x.rows(), w.rows())?;
    x.with_input(|x| multiply(implementation, x.into(), w, prepared, product, &mut out))?;
    Ok(out)
}

/// The product, with the bytes of a weight that was prepared.
fn multiply<'a, T: Element>(
    implementation: Implementation,
    a: gemm::Operand<'a>,
    b: gemm::Operand<'a>,
    prepared: Option<&'a [u8]>,
    product: &Product<'_, T>,
    out: &mut [T],
) -> Result<()> {
    match (&b, prepared) {
        (gemm::Operand::Nvfp4(view), Some(_)) => {
            gemm::gemm_prepared(implementation, a, view, prepared, product, out)?;
        }
        _ => gemm::gemm(implementation, a, b, product, out)?,
    }
    Ok(())
}

/// Products that belong together, as those of the experts of a layer: a list of pairs of any sizes, and a result for each. The same
/// `product` goes for all, so a bias asks for equal N, and a C for equal sizes; [`gemm::grouped`] takes one each.
pub fn matmul_grouped<T: Element>(pairs: &[(&Direction, &Direction)], product: &Product<'_, T>) -> Result<Vec<Vec<T>>> {
    matmul_grouped_with(Implementation::best(), pairs, product)
}

/// [`matmul_grouped`] by the implementation asked for.
pub fn matmul_grouped_with<T: Element>(
    implementation: Implementation,
    pairs: &[(&Direction, &Direction)],
    product: &Product<'_, T>,
) -> Result<Vec<Vec<T>>> {
    let mut held = Vec::with_capacity(pairs.len());
    let mut outs = Vec::with_capacity(pairs.len());
    for (a, b) in pairs {
        let pair = ((*a).into(), (*b).into());
        check(pair.0, pair.1)?;
        held.push((Held::new(pair.0)?, Held::new(pair.1)?));
        outs.push(zeros(area(a.rows(), b.rows())?, a.rows(), b.rows())?);
    }
    let members = held
        .iter()
        .zip(&mut outs)
        .map(|((a, b), out)| Ok(gemm::Member { a: a.operand()?, b: b.operand()?, product: *product, out }));
    let mut members: Vec<gemm::Member<'_, T>> = members.collect::<Result<_>>()?;
    gemm::grouped(implementation, &mut members)?;
    Ok(outs)
}

/// An error unless a product reads both operands.
fn check(a: Operand<'_>, b: Operand<'_>) -> Result<()> {
    let (a, b) = (a.like(), b.like());
    check_pair((a.family(), a.rotation()), (b.family(), b.rotation()))
}

/// An error unless a product reads operands of these formats and rotations.
pub(crate) fn check_pair(
    (left, left_signs): (Family, Option<Signs>),
    (right, right_signs): (Family, Option<Signs>),
) -> Result<()> {
    if left.with(&right).is_none() {
        return Err(Error::Formats { left, right });
    }
    match left_signs == right_signs {
        true => Ok(()),
        false => Err(Error::Rotation { left: left_signs, right: right_signs }),
    }
}

/// What a product reads: a direction, or the block of one, which stays where it is.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a> {
    /// A direction.
    Direction(&'a Direction),
    /// The bytes of one.
    Block(BlockRef<'a>),
    /// One of them that was prepared as the right operand of products with few rows.
    Prepared(&'a PreparedWeight<'a>),
}

/// A weight in the order in which products with few rows read it fastest on this CPU, beside its own: 4.5 bits per element more. NVFP4
/// alone has one, and other products read the weight as it is. The outputs are those of the weight itself: the same bits where both
/// operands are NVFP4, and elsewhere within the same bound.
///
/// ```
/// use nvfp4::{PreparedWeight, Product, Quantizer, Side, TensorRef, matmul_plain};
///
/// let x = TensorRef::new(&[2.0f32; 16][..], &[1, 16])?;
/// let w = Quantizer::default().quantize(&TensorRef::new(&[0.5f32; 3 * 16][..], &[3, 16])?)?;
/// let w = PreparedWeight::new(w.direction(Side::Row)?)?;
/// let y: Vec<f32> = matmul_plain(&x, &w, &Product::default())?;
/// assert_eq!(y, [16.0; 3]);
/// # Ok::<(), nvfp4::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PreparedWeight<'a> {
    weight: Operand<'a>,
    bytes: Option<Cow<'a, [u8]>>,
}

impl<'a> PreparedWeight<'a> {
    /// Reorders a weight.
    pub fn new(weight: impl Into<Operand<'a>>) -> Result<Self> {
        let weight = weight.into();
        let bytes = match Held::new(weight)? {
            Held::Nvfp4(parts) => gemm::prepare(Implementation::best(), &parts.view())?,
            Held::Fp8(_) | Held::Plain(..) => None,
        };
        Ok(PreparedWeight { weight, bytes: bytes.map(Cow::Owned) })
    }

    /// A weight and the bytes of [`PreparedWeight::bytes`] that were kept. A product refuses bytes of another length.
    pub fn over(weight: impl Into<Operand<'a>>, bytes: &'a [u8]) -> Self {
        PreparedWeight { weight: weight.into(), bytes: Some(Cow::Borrowed(bytes)) }
    }

    /// The bytes in the order of this CPU and version; nothing if it reads the weight as it is.
    pub fn bytes(&self) -> Option<&[u8]> {
        self.bytes.as_deref()
    }

    /// The same, without a copy where they are its own.
    pub fn into_bytes(self) -> Option<Vec<u8>> {
        self.bytes.map(Cow::into_owned)
    }
}

impl<'a> From<&'a PreparedWeight<'a>> for Operand<'a> {
    fn from(weight: &'a PreparedWeight<'a>) -> Self {
        Operand::Prepared(weight)
    }
}

impl<'a> From<&'a Direction> for Operand<'a> {
    fn from(direction: &'a Direction) -> Self {
        Operand::Direction(direction)
    }
}

impl<'a> From<BlockRef<'a>> for Operand<'a> {
    fn from(block: BlockRef<'a>) -> Self {
        Operand::Block(block)
    }
}

impl<'a> Operand<'a> {
    /// A direction of its format.
    fn like(self) -> &'a Direction {
        match self {
            Operand::Direction(direction) => direction,
            Operand::Block(block) => block.like(),
            Operand::Prepared(prepared) => prepared.weight.like(),
        }
    }

    /// Its bytes in the order of products with few rows.
    fn prepared(self) -> Option<&'a [u8]> {
        match self {
            Operand::Prepared(prepared) => prepared.bytes(),
            Operand::Direction(_) | Operand::Block(_) => None,
        }
    }
}

/// An operand in the order in which kernels read it.
enum Held<'a> {
    Nvfp4(Nvfp4Parts<'a>),
    Fp8(Fp8Parts<'a>),
    Plain(Arc<Elements>, (usize, usize)),
}

impl<'a> Held<'a> {
    fn new(operand: Operand<'a>) -> Result<Self> {
        Ok(match operand {
            Operand::Direction(Direction::Nvfp4(d)) => Held::Nvfp4(d.parts()?),
            Operand::Direction(Direction::Fp8(d)) => Held::Fp8(d.parts()),
            Operand::Direction(Direction::Plain(d)) => Held::Plain(d.upright(), (d.rows, d.cols)),
            Operand::Block(block) => match block.parts()? {
                Parts::Nvfp4(parts) => Held::Nvfp4(parts),
                Parts::Fp8(parts) => Held::Fp8(parts),
            },
            Operand::Prepared(prepared) => Held::new(prepared.weight)?,
        })
    }

    fn operand(&self) -> Result<gemm::Operand<'_>> {
        Ok(match self {
            Held::Nvfp4(parts) => gemm::Operand::Nvfp4(parts.view()),
            Held::Fp8(parts) => gemm::Operand::Fp8(parts.view()),
            Held::Plain(elements, (rows, cols)) => gemm::Operand::Plain(plain_input(elements, *rows, *cols)?),
        })
    }
}

impl QuantTensor {
    /// The product of this tensor's row direction and the other's, transposed: `self · otherᵀ`, [M, N].
    pub fn matmul<T: Element>(&self, other: &QuantTensor) -> Result<Vec<T>> {
        matmul(self.direction(Side::Row)?, other.direction(Side::Row)?, &Product::default())
    }
}
