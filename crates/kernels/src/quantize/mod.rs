//! Quantization of a matrix in its row direction, its column direction, or both. **Exact.**
//!
//! The column direction is the quantization of the transposed matrix; see [`nvfp4_spec::matrix`].

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod avx2;
#[cfg(feature = "cuda")]
pub mod cuda;
mod scalar;

use crate::input::check_len;
use crate::{Implementation, Input, Result};
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::stochastic::Random;
use nvfp4_spec::{BLOCK, Error, Mode, Rounding, e2m1, swizzle};

/// How scale bytes are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Layout {
    /// Row-major, unpadded.
    #[default]
    Linear,
    /// In tiles of 128 × 4, zero-padded; see [`nvfp4_spec::swizzle`].
    Swizzled,
}

impl Layout {
    /// Bytes that the scales of a quantized matrix of `rows` rows of `cols` elements take.
    pub fn scale_len(self, rows: usize, cols: usize) -> Result<usize> {
        let blocks = cols.div_ceil(BLOCK);
        Ok(match self {
            Layout::Linear => rows.checked_mul(blocks).ok_or(Error::TooLarge { rows, cols })?,
            Layout::Swizzled => swizzle::len(rows, blocks)?,
        })
    }
}

/// The source of a direction's amax: one value, or one per row of that direction.
#[derive(Debug)]
pub enum Amax<'a> {
    /// The caller knows it. Values beyond it saturate.
    Given(&'a [f32]),
    /// It is computed and stored here.
    Compute(&'a mut [f32]),
}

impl Amax<'_> {
    fn len(&self) -> usize {
        match self {
            Amax::Given(amax) => amax.len(),
            Amax::Compute(amax) => amax.len(),
        }
    }
}

/// What to write for one direction.
#[derive(Debug)]
pub struct Direction<'a> {
    /// Tile, global scale, scale rule, specials.
    pub mode: Mode,
    /// How values become codes.
    pub rounding: Rounding<Random<'a>>,
    /// The Hadamard transform along the direction's rows, before everything else.
    pub transform: Option<Signs>,
    /// How scales are laid out.
    pub layout: Layout,
    /// Where the amax comes from.
    pub amax: Amax<'a>,
    /// `rows · ceil(cols/2)` bytes.
    pub codes: &'a mut [u8],
    /// [`Layout::scale_len`] bytes.
    pub scales: &'a mut [u8],
}

impl Direction<'_> {
    /// Checks settings, lengths and a given amax for a direction of `rows` rows of `cols` elements.
    fn check(&self, rows: usize, cols: usize) -> Result<()> {
        let random = match self.rounding {
            Rounding::Stochastic(Random::Bytes(bytes)) => Some(bytes.len()),
            _ => None,
        };
        let lens = Lens { codes: self.codes.len(), scales: self.scales.len(), amax: self.amax.len(), random };
        let amaxes = self.mode.global.count(rows);
        check(&self.mode, &self.rounding, self.transform, self.layout, lens, amaxes, (rows, cols))?;
        if let Amax::Given(amax) = self.amax
            && let Some(index) = amax.iter().position(|&a| a < 0.0)
        {
            return Err(Error::NegativeAmax { index, value: amax[index] }.into());
        }
        Ok(())
    }
}

/// Lengths of the buffers of a direction, on the host or on a GPU.
struct Lens {
    codes: usize,
    scales: usize,
    amax: usize,
    /// Random bytes, where the caller brings them.
    random: Option<usize>,
}

/// Checks settings and lengths for a direction of `rows` rows of `cols` elements, which has so many
/// amaxes.
fn check<R>(
    mode: &Mode,
    rounding: &Rounding<R>,
    transform: Option<Signs>,
    layout: Layout,
    lens: Lens,
    amaxes: usize,
    (rows, cols): (usize, usize),
) -> Result<()> {
    mode.check(rounding)?;
    if transform.is_some() && !cols.is_multiple_of(BLOCK) {
        let what = "the dimension that the Hadamard transform runs along";
        return Err(Error::Multiple { what, of: BLOCK, got: cols }.into());
    }
    let code_len = rows.checked_mul(e2m1::packed_len(cols)).ok_or(Error::TooLarge { rows, cols })?;
    check_len("codes", code_len, lens.codes)?;
    check_len("scales", layout.scale_len(rows, cols)?, lens.scales)?;
    check_len("amax", amaxes, lens.amax)?;
    if let Some(got) = lens.random {
        let expected = Layout::Linear.scale_len(rows, cols)?.checked_mul(BLOCK);
        let expected = expected.ok_or(Error::TooLarge { rows, cols })?;
        check_len("random bytes (16 per block)", expected, got)?;
    }
    Ok(())
}

/// Quantizes `x` in the directions that are given.
///
/// ```
/// use nvfp4_kernels::quantize::{Amax, Direction, Layout, quantize};
/// use nvfp4_kernels::{Implementation, Input};
/// use nvfp4_spec::{Mode, Rounding};
///
/// let x = Input::new((&[3.0f32; 16][..]).into(), 1, 16)?;
/// let (mut codes, mut scales, mut amax) = ([0; 8], [0; 1], [0.0]);
/// let row = Direction {
///     mode: Mode::default(),
///     rounding: Rounding::NearestEven,
///     transform: None,
///     layout: Layout::Linear,
///     amax: Amax::Compute(&mut amax),
///     codes: &mut codes,
///     scales: &mut scales,
/// };
/// quantize(Implementation::best(), &x, Some(row), None)?;
/// assert_eq!((codes, scales, amax), ([0x77; 8], [0x7E], [3.0]));
/// # Ok::<(), nvfp4_kernels::Error>(())
/// ```
pub fn quantize(
    implementation: Implementation,
    x: &Input<'_>,
    row: Option<Direction<'_>>,
    col: Option<Direction<'_>>,
) -> Result<()> {
    if let Some(row) = &row {
        row.check(x.rows(), x.cols())?;
    }
    if let Some(col) = &col {
        col.check(x.cols(), x.rows())?;
    }
    match implementation {
        Implementation::Scalar => scalar::quantize(x, row, col),
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx2(token) => avx2::quantize(token, None, x, row, col).map(drop),
        #[cfg(target_arch = "aarch64")]
        Implementation::Neon(token) => avx2::quantize(token, None, x, row, col).map(drop),
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx512(token) => avx2::quantize(token.avx2(), Some(token), x, row, col).map(drop),
        #[cfg(feature = "cuda")]
        Implementation::Cuda(device) => cuda::on_host(device, x, row, col),
    }
}
