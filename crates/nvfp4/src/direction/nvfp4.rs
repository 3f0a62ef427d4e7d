//! A direction in NVFP4.

use super::memory::{Array, HostMemory, MemorySpace, first_negative};
use crate::{Layout, Result, Unit};
use nvfp4_kernels::{Implementation, dequantize, swizzle};
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::matrix::View;
use nvfp4_spec::{BLOCK, Bound, Element, GlobalScale, area, check_len, e2m1, zeros};
use std::borrow::Cow;
use std::fmt;

/// What a matrix in NVFP4 is, wherever its bytes lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Nvfp4Description {
    /// Number of rows.
    pub rows: usize,
    /// Number of elements of a row.
    pub cols: usize,
    /// What a stored 32-bit scale belongs to.
    pub global: GlobalScale,
    /// What a stored 32-bit scale means.
    pub unit: Unit,
    /// The signs of the Hadamard transform that the values went through.
    pub rotation: Option<Signs>,
    /// How the block scales are laid out.
    pub layout: Layout,
}

impl Nvfp4Description {
    /// Bytes of the packed codes: `rows` × `ceil(cols/2)`.
    pub fn code_len(&self) -> Result<usize> {
        Ok(area(self.rows, e2m1::packed_len(self.cols))?)
    }

    /// Bytes of the block scales.
    pub fn scale_len(&self) -> Result<usize> {
        Ok(self.layout.scale_len(self.rows, self.cols)?)
    }

    /// How many 32-bit scales are stored.
    pub fn stored_len(&self) -> usize {
        self.global.count(self.rows)
    }

    /// An error unless arrays of these lengths, and the rotation, fit it.
    fn check(&self, codes: usize, scales: usize, stored: usize) -> Result<()> {
        check_len("codes", self.code_len()?, codes)?;
        check_len("scales", self.scale_len()?, scales)?;
        check_len("global scale", self.stored_len(), stored)?;
        if self.rotation.is_some() && !self.cols.is_multiple_of(BLOCK) {
            let what = "the dimension that the Hadamard transform runs along";
            return Err(nvfp4_spec::Error::Multiple { what, of: BLOCK, got: self.cols }.into());
        }
        Ok(())
    }
}

/// A matrix quantized to NVFP4 along its rows. For a tensor's column direction that matrix is the transposed one.
#[derive(Clone, Debug, PartialEq)]
pub struct Nvfp4Direction<M: MemorySpace = HostMemory> {
    pub(crate) about: Nvfp4Description,
    pub(crate) codes: M::Bytes,
    pub(crate) scales: M::Bytes,
    pub(crate) stored: M::Floats,
}

impl<M: MemorySpace> Nvfp4Direction<M> {
    /// A direction over existing bytes. Lengths are checked, and a rotation needs rows of a multiple of 16 elements. On
    /// the host an amax must not be negative; on a GPU it is not looked at.
    pub fn from_parts(about: Nvfp4Description, codes: M::Bytes, scales: M::Bytes, stored: M::Floats) -> Result<Self> {
        about.check(codes.count(), scales.count(), stored.count())?;
        about.check_negative(M::first_negative(&stored))?;
        Ok(Nvfp4Direction { about, codes, scales, stored })
    }

    /// What it is, without its bytes.
    pub fn description(&self) -> &Nvfp4Description {
        &self.about
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.about.rows
    }

    /// Number of elements of a row.
    pub fn cols(&self) -> usize {
        self.about.cols
    }

    /// What a stored number belongs to.
    pub fn global(&self) -> GlobalScale {
        self.about.global
    }

    /// What the stored 32-bit scale means.
    pub fn unit(&self) -> Unit {
        self.about.unit
    }

    /// The bound in the global scale; `None` where no amax is stored.
    pub fn bound(&self) -> Option<Bound> {
        match self.about.unit {
            Unit::Amax(bound) => Some(bound),
            Unit::Multiplier | Unit::Divisor => None,
        }
    }

    /// The signs of the Hadamard transform that the values went through.
    pub fn rotation(&self) -> Option<Signs> {
        self.about.rotation
    }

    /// How the scales are laid out.
    pub fn layout(&self) -> Layout {
        self.about.layout
    }

    /// Bytes that codes, scales and global scale take.
    pub fn byte_len(&self) -> usize {
        self.codes.count() + self.scales.count() + 4 * self.stored.count()
    }
}

impl Nvfp4Direction {
    /// Packed codes, `rows` × `ceil(cols/2)`, the even element in the low nibble.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// E4M3 scale bytes in the [`Layout`] of this direction.
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }

    /// The stored 32-bit scale: one number, or one per row.
    pub fn stored(&self) -> &[f32] {
        &self.stored
    }

    /// The same direction with its scales in another layout.
    pub fn with_layout(mut self, layout: Layout) -> Result<Self> {
        if layout != self.about.layout {
            let Nvfp4Description { rows, cols, .. } = self.about;
            let blocks = cols.div_ceil(BLOCK);
            let mut scales = zeros(layout.scale_len(rows, cols)?, rows, cols)?;
            match layout {
                Layout::Linear => swizzle::unswizzle(Implementation::best(), &self.scales, rows, blocks, &mut scales)?,
                Layout::Swizzled => swizzle::swizzle(Implementation::best(), &self.scales, rows, blocks, &mut scales)?,
            }
            (self.scales, self.about.layout) = (scales, layout);
        }
        Ok(self)
    }

    /// The scale bytes row by row, whatever the layout.
    pub fn linear_scales(&self) -> Result<Cow<'_, [u8]>> {
        self.about.linear_scales(&self.scales)
    }

    /// Its arrays as the kernels read them.
    pub(crate) fn parts(&self) -> Result<Nvfp4Parts<'_>> {
        let (codes, scales) = (&self.codes[..], self.linear_scales()?);
        Ok(Nvfp4Parts { about: self.about, codes, scales, stored: Cow::Borrowed(&self.stored) })
    }

    /// The decoded matrix, still transposed and rotated if this is a transformed column direction.
    pub fn dequantize<T: Element>(&self) -> Result<Vec<T>> {
        self.dequantize_with(Implementation::best())
    }

    /// The decoded matrix, computed by the implementation asked for. All give the same bits.
    pub fn dequantize_with<T: Element>(&self, implementation: Implementation) -> Result<Vec<T>> {
        let parts = self.parts()?;
        let view = parts.view();
        let mut out = zeros(area(self.rows(), self.cols())?, self.rows(), self.cols())?;
        dequantize::dequantize(implementation, &view, &mut out)?;
        Ok(out)
    }

    /// Rows `start..end`, which keep their bytes.
    pub(crate) fn slice_rows(&self, start: usize, end: usize) -> Result<Self> {
        let (bytes, blocks) = (e2m1::packed_len(self.cols()), self.cols().div_ceil(BLOCK));
        let linear = Nvfp4Direction {
            about: Nvfp4Description { rows: end - start, layout: Layout::Linear, ..self.about },
            codes: self.codes[start * bytes..end * bytes].to_vec(),
            scales: self.linear_scales()?[start * blocks..end * blocks].to_vec(),
            stored: match self.about.global {
                GlobalScale::PerTensor => self.stored.clone(),
                GlobalScale::PerRow => self.stored[start..end].to_vec(),
            },
        };
        linear.with_layout(self.about.layout)
    }

    /// Elements `start..end` of every row; both ends at multiples of 16 or at the end.
    pub(crate) fn slice_cols(&self, start: usize, end: usize) -> Result<Self> {
        let (bytes, blocks) = (e2m1::packed_len(self.cols()), self.cols().div_ceil(BLOCK));
        let cut = |data: &[u8], width: usize, from: usize, to: usize| -> Vec<u8> {
            // `chunks_exact` takes no width of 0, and a direction without bytes may claim any number of rows.
            data.chunks_exact(width.max(1)).flat_map(|row| &row[from..to]).copied().collect()
        };
        let linear = Nvfp4Direction {
            about: Nvfp4Description { cols: end - start, layout: Layout::Linear, ..self.about },
            codes: cut(&self.codes, bytes, start.div_ceil(2), end.div_ceil(2)),
            scales: cut(&self.linear_scales()?, blocks, start.div_ceil(BLOCK), end.div_ceil(BLOCK)),
            stored: self.stored.clone(),
        };
        linear.with_layout(self.about.layout)
    }
}

impl Nvfp4Description {
    /// An error if a stored number is an amax and negative.
    pub(crate) fn check_stored(&self, stored: &[f32]) -> Result<()> {
        self.check_negative(first_negative(stored))
    }

    fn check_negative(&self, found: Option<(usize, f32)>) -> Result<()> {
        match (self.unit, found) {
            (Unit::Amax(_), Some((index, value))) => Err(nvfp4_spec::Error::NegativeAmax { index, value }.into()),
            _ => Ok(()),
        }
    }

    /// Scale bytes of this layout row by row.
    pub(crate) fn linear_scales<'a>(&self, scales: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        match self.layout {
            Layout::Linear => Ok(Cow::Borrowed(scales)),
            Layout::Swizzled => {
                let (rows, blocks) = (self.rows, self.cols.div_ceil(BLOCK));
                let mut linear = vec![0; rows * blocks];
                swizzle::unswizzle(Implementation::best(), scales, rows, blocks, &mut linear)?;
                Ok(Cow::Owned(linear))
            }
        }
    }
}

/// The arrays of a direction as the kernels read them, scales row by row.
pub(crate) struct Nvfp4Parts<'a> {
    pub about: Nvfp4Description,
    pub codes: &'a [u8],
    pub scales: Cow<'a, [u8]>,
    pub stored: Cow<'a, [f32]>,
}

impl Nvfp4Parts<'_> {
    pub fn view(&self) -> View<'_> {
        let Nvfp4Description { rows, cols, global, unit, .. } = self.about;
        View { rows, cols, codes: self.codes, scales: &self.scales, stored: &self.stored, global, unit }
    }
}

/// In recipe syntax, as far as the bytes tell.
impl<M: MemorySpace> fmt::Display for Nvfp4Direction<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scale = match self.about.global {
            GlobalScale::PerTensor => None,
            GlobalScale::PerRow => Some("row-scaled".to_string()),
        };
        let rotation = self.about.rotation.map(|signs| match signs {
            Signs::FIXED => "hadamard".to_string(),
            signs => format!("hadamard={:#06x}", signs.0),
        });
        let layout = match self.about.layout {
            Layout::Linear => None,
            Layout::Swizzled => Some("swizzled".to_string()),
        };
        let options: Vec<String> = [scale, rotation, layout].into_iter().flatten().collect();
        match options.is_empty() {
            true => f.write_str("nvfp4"),
            false => write!(f, "nvfp4({})", options.join(", ")),
        }
    }
}
