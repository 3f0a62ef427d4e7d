//! The output of a direction: its settings, amaxes and buffers, and the parts of them that each
//! panel writes.

use crate::avx2::Avx2;
use crate::quantize::{Amax, Direction, Layout};
use crate::scatter::Scatter;
use crate::{Result, swizzle};
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::stochastic::Random;
use nvfp4_spec::{BLOCK, Mode, Rounding, e2m1};

/// The amaxes of a direction.
enum Amaxes<'a> {
    Known(Vec<f32>),
    /// To be computed, beforehand or row by row together with the codes, and stored here.
    Compute(&'a mut [f32]),
}

/// A direction's settings, its amaxes and its buffers, scales in linear layout.
pub(super) struct Target<'a> {
    token: Avx2,
    pub mode: Mode,
    rounding: Rounding<Random<'a>>,
    pub transform: Option<Signs>,
    rows: usize,
    blocks: usize,
    bytes: usize,
    amax: Amaxes<'a>,
    codes: &'a mut [u8],
    scales: &'a mut [u8],
    /// Linear scales, before they are swizzled into `scales`.
    linear: Option<Vec<u8>>,
}

impl<'a> Target<'a> {
    pub fn new(token: Avx2, d: Direction<'a>, rows: usize, cols: usize) -> Self {
        let amax = match d.amax {
            Amax::Given(amax) => Amaxes::Known(amax.to_vec()),
            Amax::Compute(out) => Amaxes::Compute(out),
        };
        let blocks = cols.div_ceil(BLOCK);
        let linear = (d.layout == Layout::Swizzled).then(|| vec![0; rows * blocks]);
        Target {
            token,
            mode: d.mode,
            rounding: d.rounding,
            transform: d.transform,
            rows,
            blocks,
            bytes: e2m1::packed_len(cols),
            amax,
            codes: d.codes,
            scales: d.scales,
            linear,
        }
    }

    pub fn needs_amax(&self) -> bool {
        matches!(self.amax, Amaxes::Compute(_))
    }

    pub fn set_amax(&mut self, values: Vec<f32>) {
        if let Amaxes::Compute(out) = &mut self.amax {
            out.copy_from_slice(&values);
        }
        self.amax = Amaxes::Known(values);
    }

    /// The row direction in parts of `height` rows.
    pub fn split(&mut self, height: usize, panels: usize) -> (Option<RowContext<'_>>, Vec<Option<RowPart<'_>>>) {
        let (amax, mut on_the_way) = match &mut self.amax {
            Amaxes::Known(values) => (&values[..], None),
            Amaxes::Compute(out) => (&[][..], Some(out.chunks_mut(height))),
        };
        let scales = self.linear.as_deref_mut().unwrap_or(self.scales);
        let mut codes = self.codes.chunks_mut(height * self.bytes);
        let mut scales = scales.chunks_mut(height * self.blocks);
        let parts = (0..panels)
            .map(|_| {
                Some(RowPart {
                    codes: codes.next().expect("a panel has rows"),
                    scales: scales.next().expect("a panel has rows"),
                    amax: on_the_way.as_mut().map(|chunks| chunks.next().expect("a panel has rows")),
                    bytes: self.bytes,
                    blocks: self.blocks,
                })
            })
            .collect();
        (Some(RowContext { mode: self.mode, rounding: self.rounding, amax }), parts)
    }

    /// The column direction, written to from all panels.
    pub fn scatter(&mut self) -> ColContext<'_> {
        let Amaxes::Known(amax) = &self.amax else { unreachable!("column amaxes are found beforehand") };
        ColContext {
            mode: self.mode,
            rounding: self.rounding,
            transform: self.transform,
            amax,
            codes: Scatter::new(self.codes),
            scales: Scatter::new(self.linear.as_deref_mut().unwrap_or(self.scales)),
        }
    }

    pub fn finish(self) -> Result<()> {
        if let Some(linear) = self.linear {
            swizzle::swizzle(self.token.into(), &linear, self.rows, self.blocks, self.scales)?;
        }
        Ok(())
    }
}

/// What all panels need of the row direction.
pub(super) struct RowContext<'a> {
    pub mode: Mode,
    pub rounding: Rounding<Random<'a>>,
    pub amax: &'a [f32],
}

/// The rows of the row direction that one panel writes.
pub(super) struct RowPart<'a> {
    pub codes: &'a mut [u8],
    pub scales: &'a mut [u8],
    /// Row amaxes that are computed together with the codes.
    pub amax: Option<&'a mut [f32]>,
    /// Bytes of codes and of scales per row.
    pub bytes: usize,
    pub blocks: usize,
}

impl RowPart<'_> {
    /// The part from its row `r` on.
    pub fn rows_from(&mut self, r: usize) -> RowPart<'_> {
        RowPart {
            codes: &mut self.codes[r * self.bytes..],
            scales: &mut self.scales[r * self.blocks..],
            amax: self.amax.as_deref_mut().map(|amax| &mut amax[r..]),
            ..*self
        }
    }
}

/// What all panels need of the column direction, whose buffers they share.
pub(super) struct ColContext<'a> {
    pub mode: Mode,
    pub rounding: Rounding<Random<'a>>,
    pub transform: Option<Signs>,
    pub amax: &'a [f32],
    pub codes: Scatter<'a, u8>,
    pub scales: Scatter<'a, u8>,
}
