//! A direction in NVFP4.

use crate::{Layout, Result, Unit};
use nvfp4_kernels::{Implementation, dequantize, swizzle};
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::matrix::View;
use nvfp4_spec::{BLOCK, Bound, Element, GlobalScale, area, check_len, e2m1, zeros};
use std::borrow::Cow;
use std::fmt;

/// The stored 32-bit scale.
#[derive(Clone, Debug, PartialEq)]
pub enum Global {
    /// One number.
    PerTensor(f32),
    /// One number per row.
    PerRow(Vec<f32>),
}

impl Global {
    /// What the numbers belong to.
    pub fn scope(&self) -> GlobalScale {
        match self {
            Global::PerTensor(_) => GlobalScale::PerTensor,
            Global::PerRow(_) => GlobalScale::PerRow,
        }
    }

    /// The numbers.
    pub fn values(&self) -> &[f32] {
        match self {
            Global::PerTensor(value) => std::slice::from_ref(value),
            Global::PerRow(values) => values,
        }
    }

    pub(crate) fn from_values(scope: GlobalScale, values: Vec<f32>) -> Self {
        match scope {
            GlobalScale::PerTensor => Global::PerTensor(values[0]),
            GlobalScale::PerRow => Global::PerRow(values),
        }
    }
}

/// A matrix quantized to NVFP4 along its rows. For a tensor's column direction that matrix is the transposed one.
#[derive(Clone, Debug, PartialEq)]
pub struct Nvfp4Direction {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) codes: Vec<u8>,
    pub(crate) scales: Vec<u8>,
    pub(crate) global: Global,
    pub(crate) unit: Unit,
    pub(crate) rotation: Option<Signs>,
    pub(crate) layout: Layout,
}

impl Nvfp4Direction {
    /// A direction over existing bytes. Lengths are checked, an amax must not be negative, and a rotation needs rows of a
    /// multiple of 16 elements.
    #[allow(clippy::too_many_arguments)] // each is a field; a second struct of the same fields would say no more
    pub fn from_parts(
        rows: usize,
        cols: usize,
        codes: Vec<u8>,
        scales: Vec<u8>,
        global: Global,
        unit: Unit,
        rotation: Option<Signs>,
        layout: Layout,
    ) -> Result<Self> {
        check_len("codes", area(rows, e2m1::packed_len(cols))?, codes.len())?;
        check_len("scales", layout.scale_len(rows, cols)?, scales.len())?;
        check_len("global scale", global.scope().count(rows), global.values().len())?;
        if let (Unit::Amax(_), Some(index)) = (unit, global.values().iter().position(|&a| a < 0.0)) {
            return Err(nvfp4_spec::Error::NegativeAmax { index, value: global.values()[index] }.into());
        }
        if rotation.is_some() && !cols.is_multiple_of(BLOCK) {
            let what = "the dimension that the Hadamard transform runs along";
            return Err(nvfp4_spec::Error::Multiple { what, of: BLOCK, got: cols }.into());
        }
        Ok(Nvfp4Direction { rows, cols, codes, scales, global, unit, rotation, layout })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of elements of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Packed codes, `rows` × `ceil(cols/2)`, the even element in the low nibble.
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// E4M3 scale bytes in the [`Layout`] of this direction.
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }

    /// The stored 32-bit scale.
    pub fn global(&self) -> &Global {
        &self.global
    }

    /// What the stored 32-bit scale means.
    pub fn unit(&self) -> Unit {
        self.unit
    }

    /// The bound in the global scale; `None` where no amax is stored.
    pub fn bound(&self) -> Option<Bound> {
        match self.unit {
            Unit::Amax(bound) => Some(bound),
            Unit::Multiplier | Unit::Divisor => None,
        }
    }

    /// The signs of the Hadamard transform that the values went through.
    pub fn rotation(&self) -> Option<Signs> {
        self.rotation
    }

    /// How the scales are laid out.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Bytes that codes, scales and global scale take.
    pub fn byte_len(&self) -> usize {
        self.codes.len() + self.scales.len() + 4 * self.global.values().len()
    }

    /// The same direction with its scales in another layout.
    pub fn with_layout(mut self, layout: Layout) -> Result<Self> {
        if layout != self.layout {
            let (rows, blocks) = (self.rows, self.cols.div_ceil(BLOCK));
            let mut scales = zeros(layout.scale_len(rows, self.cols)?, rows, self.cols)?;
            match layout {
                Layout::Linear => swizzle::unswizzle(Implementation::best(), &self.scales, rows, blocks, &mut scales)?,
                Layout::Swizzled => swizzle::swizzle(Implementation::best(), &self.scales, rows, blocks, &mut scales)?,
            }
            (self.scales, self.layout) = (scales, layout);
        }
        Ok(self)
    }

    /// The scale bytes row by row, whatever the layout.
    pub fn linear_scales(&self) -> Result<Cow<'_, [u8]>> {
        match self.layout {
            Layout::Linear => Ok(Cow::Borrowed(&self.scales)),
            Layout::Swizzled => {
                let (rows, blocks) = (self.rows, self.cols.div_ceil(BLOCK));
                let mut scales = vec![0; rows * blocks];
                swizzle::unswizzle(Implementation::best(), &self.scales, rows, blocks, &mut scales)?;
                Ok(Cow::Owned(scales))
            }
        }
    }

    /// A view for the kernels, with scales from [`Nvfp4Direction::linear_scales`].
    pub(crate) fn view<'a>(&'a self, scales: &'a [u8]) -> View<'a> {
        View {
            rows: self.rows,
            cols: self.cols,
            codes: &self.codes,
            scales,
            stored: self.global.values(),
            global: self.global.scope(),
            unit: self.unit,
        }
    }

    /// The decoded matrix, still transposed and rotated if this is a transformed column direction.
    pub fn dequantize<T: Element>(&self) -> Result<Vec<T>> {
        self.dequantize_with(Implementation::best())
    }

    /// The decoded matrix, computed by the implementation asked for. All give the same bits.
    pub fn dequantize_with<T: Element>(&self, implementation: Implementation) -> Result<Vec<T>> {
        let scales = self.linear_scales()?;
        let view = self.view(&scales);
        let mut out = zeros(area(self.rows, self.cols)?, self.rows, self.cols)?;
        dequantize::dequantize(implementation, &view, &mut out)?;
        Ok(out)
    }

    /// Rows `start..end`, which keep their bytes.
    pub(crate) fn slice_rows(&self, start: usize, end: usize) -> Result<Self> {
        let (bytes, blocks) = (e2m1::packed_len(self.cols), self.cols.div_ceil(BLOCK));
        let global = match &self.global {
            Global::PerTensor(value) => Global::PerTensor(*value),
            Global::PerRow(values) => Global::PerRow(values[start..end].to_vec()),
        };
        let linear = Nvfp4Direction {
            rows: end - start,
            codes: self.codes[start * bytes..end * bytes].to_vec(),
            scales: self.linear_scales()?[start * blocks..end * blocks].to_vec(),
            global,
            layout: Layout::Linear,
            ..*self
        };
        linear.with_layout(self.layout)
    }

    /// Elements `start..end` of every row; both ends at multiples of 16 or at the end.
    pub(crate) fn slice_cols(&self, start: usize, end: usize) -> Result<Self> {
        let (bytes, blocks) = (e2m1::packed_len(self.cols), self.cols.div_ceil(BLOCK));
        let cut = |data: &[u8], width: usize, from: usize, to: usize| -> Vec<u8> {
            // `chunks_exact` takes no width of 0, and a direction without bytes may claim any number of rows.
            data.chunks_exact(width.max(1)).flat_map(|row| &row[from..to]).copied().collect()
        };
        let linear = Nvfp4Direction {
            cols: end - start,
            codes: cut(&self.codes, bytes, start.div_ceil(2), end.div_ceil(2)),
            scales: cut(&self.linear_scales()?, blocks, start.div_ceil(BLOCK), end.div_ceil(BLOCK)),
            global: self.global.clone(),
            layout: Layout::Linear,
            ..*self
        };
        linear.with_layout(self.layout)
    }
}

/// In the words of a spec, as far as the bytes tell.
impl fmt::Display for Nvfp4Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scale = match self.global {
            Global::PerTensor(_) => None,
            Global::PerRow(_) => Some("row-scaled".to_string()),
        };
        let rotation = self.rotation.map(|signs| match signs {
            Signs::FIXED => "hadamard".to_string(),
            signs => format!("hadamard={:#06x}", signs.0),
        });
        let layout = match self.layout {
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
