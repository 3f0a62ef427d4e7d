//! Products `α·A·Bᵀ (+ bias) (+ β·C)`. On the CPU **Exact** where both operands are NVFP4; where
//! one is FP8 or plain, and on a GPU, **Bounded**: sums in binary32, within
//! [`nvfp4_spec::gemm::bound`] of the exact ones, under the conditions written there.
//!
//! Any two kinds can be multiplied here; callers decide which pairs make sense.

#[cfg(feature = "baseline")]
pub mod baseline;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(target_arch = "x86_64")]
mod exact;
#[cfg(target_arch = "x86_64")]
mod mixed;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod pieces;
mod prepared;
mod units;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod writer;

use crate::input::check_len;
use crate::{Implementation, Input, Result};
use nvfp4_spec::matrix::{Matrix, View};
use nvfp4_spec::{Element, Error, fp8, gemm as spec};

pub use prepared::{gemm_prepared, prepare};
pub use spec::{Accumulate, Accumulator, Epilogue, Product};
pub use units::{Stored, Units, units};

/// One side of a product, with rows along K.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a> {
    /// A quantized matrix with linear scales.
    Nvfp4(View<'a>),
    /// An FP8 or MXFP8 matrix; one with tiles of 32 in a column is taken transposed.
    Fp8(fp8::View<'a>),
    /// Elements as they are.
    Plain(Input<'a>),
}

impl<'a> From<&View<'a>> for Operand<'a> {
    fn from(view: &View<'a>) -> Self {
        Operand::Nvfp4(*view)
    }
}

impl<'a> From<&fp8::View<'a>> for Operand<'a> {
    fn from(view: &fp8::View<'a>) -> Self {
        Operand::Fp8(*view)
    }
}

impl<'a> From<&Input<'a>> for Operand<'a> {
    fn from(input: &Input<'a>) -> Self {
        Operand::Plain(*input)
    }
}

impl<'a> Operand<'a> {
    /// Number of rows: M or N.
    pub fn rows(&self) -> usize {
        self.shape().0
    }

    /// Rows, and K.
    fn shape(&self) -> (usize, usize) {
        match self {
            Operand::Nvfp4(view) => (view.rows, view.cols),
            Operand::Fp8(view) => view.tile.along_k((view.rows, view.cols)),
            Operand::Plain(input) => (input.rows(), input.cols()),
        }
    }

    fn check(&self) -> Result<()> {
        match self {
            Operand::Nvfp4(view) => view.check()?,
            Operand::Fp8(view) => view.check()?,
            // An input was checked when it was made.
            Operand::Plain(_) => {}
        }
        Ok(())
    }

    /// The values of a plain operand, gathered.
    fn gathered(&self) -> Option<Matrix> {
        match self {
            Operand::Nvfp4(_) | Operand::Fp8(_) => None,
            Operand::Plain(input) => Some(input.to_matrix()),
        }
    }

    /// As `spec` takes it; `matrix` is what [`Operand::gathered`] gave.
    fn to_spec<'b>(self, matrix: Option<&'b Matrix>) -> spec::Operand<'b>
    where
        'a: 'b,
    {
        match (self, matrix) {
            (Operand::Nvfp4(view), _) => spec::Operand::Nvfp4(view),
            (Operand::Fp8(view), _) => spec::Operand::Fp8(view),
            (Operand::Plain(_), matrix) => spec::Operand::Plain(matrix.expect("a plain operand was gathered")),
        }
    }
}

/// Checks a product and returns the number of its outputs. Reads only lengths, so no operand has to
/// be gathered.
fn check<T>(a: &Operand<'_>, b: &Operand<'_>, product: &Product<'_, T>) -> Result<usize> {
    a.check()?;
    b.check()?;
    Ok(product.check(a.shape(), b.shape())?)
}

/// `out = α·A·Bᵀ (+ bias) (+ β·C)`; `out` is `a.rows` × `b.rows`, row-major.
///
/// ```
/// use nvfp4_kernels::gemm::{Product, gemm};
/// use nvfp4_kernels::{Implementation, Input};
/// use nvfp4_spec::matrix::{self, Matrix};
/// use nvfp4_spec::{Mode, Rounding};
///
/// let w = Matrix::new(1, 16, &[6.0f32; 16])?;
/// // With an amax of 6 · 448 the tensor scale is 1, so nothing here is rounded.
/// let w = matrix::quantize(&w, &[2688.0], &Mode::default(), Rounding::NearestEven)?;
/// let x = Input::new((&[2.0f32; 32][..]).into(), 2, 16)?;
/// let mut y = [0.0f32; 2];
/// gemm(Implementation::best(), &x, &w.view(), &Product::default(), &mut y)?;
/// assert_eq!(y, [16.0 * 12.0; 2]);
/// # Ok::<(), nvfp4_kernels::Error>(())
/// ```
pub fn gemm<'a, T: Element>(
    implementation: Implementation,
    a: impl Into<Operand<'a>>,
    b: impl Into<Operand<'a>>,
    product: &Product<'_, T>,
    out: &mut [T],
) -> Result<()> {
    let (a, b) = (a.into(), b.into());
    let outputs = a.rows().checked_mul(b.rows()).ok_or(Error::TooLarge { rows: a.rows(), cols: b.rows() })?;
    check_len("output", outputs, out.len())?;
    match implementation {
        Implementation::Scalar => scalar(a, b, product, out),
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx2(token) => vectors(exact::Vectors::Avx2(token), a, b, product, out),
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx512(token) => vectors(exact::Vectors::Avx512(token), a, b, product, out),
        #[cfg(target_arch = "aarch64")]
        Implementation::Neon(token) => neon::gemm(token, a, b, product, out),
        // A sum in a given order of additions is computed on the CPU.
        #[cfg(feature = "cuda")]
        Implementation::Cuda(_) if product.accumulate == Accumulate::Reference => {
            gemm(Implementation::best(), a, b, product, out)
        }
        #[cfg(feature = "cuda")]
        Implementation::Cuda(device) => {
            check(&a, &b, product)?;
            cuda::on_host(device, a, b, product, out)
        }
    }
}

/// One product of a group.
#[derive(Debug)]
pub struct Member<'a, T> {
    /// The left operand, M rows of its own.
    pub a: Operand<'a>,
    /// The right operand.
    pub b: Operand<'a>,
    /// Everything else about it.
    pub product: Product<'a, T>,
    /// `a.rows` × `b.rows`, row-major.
    pub out: &'a mut [T],
}

/// A group of products, for example those of the experts of a layer, each with operands of any
/// size. A product without outputs is a no-op. A product with K = 0, for example the weight
/// gradient of an expert without tokens, has sums of exactly 0.
///
/// All are checked before any is computed.
pub fn grouped<T: Element>(implementation: Implementation, members: &mut [Member<'_, T>]) -> Result<()> {
    for member in &*members {
        check_len("output", check(&member.a, &member.b, &member.product)?, member.out.len())?;
    }
    for member in members.iter_mut().filter(|member| !member.out.is_empty()) {
        gemm(implementation, member.a, member.b, &member.product, member.out)?;
    }
    Ok(())
}

fn scalar<T: Element>(a: Operand<'_>, b: Operand<'_>, product: &Product<'_, T>, out: &mut [T]) -> Result<()> {
    let (left, right) = (a.gathered(), b.gathered());
    out.copy_from_slice(&spec::gemm(a.to_spec(left.as_ref()), b.to_spec(right.as_ref()), product)?);
    Ok(())
}

#[cfg(target_arch = "x86_64")]
fn vectors<T: Element>(
    vectors: exact::Vectors,
    a: Operand<'_>,
    b: Operand<'_>,
    product: &Product<'_, T>,
    out: &mut [T],
) -> Result<()> {
    check(&a, &b, product)?;
    // The rule covers a product without outputs or with K = 0.
    if out.is_empty() || a.shape().1 == 0 {
        return scalar(a, b, product, out);
    }
    match (&a, &b) {
        (Operand::Nvfp4(a), Operand::Nvfp4(b)) => exact::gemm(vectors, a, b, product, out),
        (a, b) => {
            let gathered = [a.gathered(), b.gathered()];
            mixed::gemm(vectors, (a, b), gathered.each_ref().map(Option::as_ref), product, out)
        }
    }
    Ok(())
}
