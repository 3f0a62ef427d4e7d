//! Tensors to NVFP4 on the CPU.

use super::Options;
use crate::direction::{Direction, Nvfp4Description, Nvfp4Direction};
use crate::format::{Directions, Finite, Nvfp4, Side};
use crate::{Result, TensorRef};
use nvfp4_kernels::quantize::{self as kernel, Amax};
use nvfp4_kernels::{Implementation, Input};
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::{Mode, Rounding as Rule, zeros};
use std::mem::take;

impl Nvfp4 {
    /// Quantizes a tensor: the row direction and the column direction, as far as they are asked for.
    pub(super) fn quantize(
        &self,
        x: &TensorRef<'_>,
        directions: Directions,
        options: &Options<'_>,
    ) -> Result<(Option<Direction>, Option<Direction>)> {
        let mut row = directions.has(Side::Row).then(|| self.blank(x.rows(), x.cols(), None));
        let mut col = directions.has(Side::Column).then(|| self.blank(x.cols(), x.rows(), self.transform.signs()));
        self.write(x, options, row.as_mut(), col.as_mut())?;
        Ok((row, col))
    }

    /// A direction without bytes.
    fn blank(&self, rows: usize, cols: usize, rotation: Option<Signs>) -> Direction {
        let about = self.description(rows, cols, rotation);
        Direction::Nvfp4(Nvfp4Direction { about, codes: Vec::new(), scales: Vec::new(), stored: Vec::new() })
    }

    /// What a direction in this format is.
    pub(crate) fn description(&self, rows: usize, cols: usize, rotation: Option<Signs>) -> Nvfp4Description {
        let unit = self.mode.profile.unit(self.mode.rule.bound());
        Nvfp4Description { rows, cols, global: self.mode.global, unit, rotation, layout: self.layout }
    }

    /// Quantizes into directions of the right shape, whose buffers are reused where they fit. On an error nothing is changed.
    pub(super) fn write(
        &self,
        x: &TensorRef<'_>,
        options: &Options<'_>,
        row: Option<&mut Direction>,
        col: Option<&mut Direction>,
    ) -> Result<()> {
        if self.finite == Finite::Refuse {
            options.check_amaxes()?;
        }
        let (rule, signs) = (Rule::NearestEven, self.transform.signs());
        let randomness = options.randomness;
        let mut row = row
            .map(|d| Writer::new(d, self, options.row_amax, randomness.map_or(rule, |r| r.row()), None))
            .transpose()?;
        let mut col = col
            .map(|d| Writer::new(d, self, options.col_amax, randomness.map_or(rule, |r| r.col()), signs))
            .transpose()?;
        // Memory first: a tensor that is too large to quantize may be too large to look at.
        if self.finite == Finite::Refuse {
            x.check_finite()?;
        }
        x.with_input(|input: &Input<'_>| {
            let implementation = options.implementation.unwrap_or_else(Implementation::best);
            let (row, col) = (row.as_mut().map(Writer::target), col.as_mut().map(Writer::target));
            Ok(kernel::quantize(implementation, input, row, col)?)
        })?;
        [row, col].into_iter().flatten().for_each(|writer| writer.finish(x));
        Ok(())
    }
}

/// A direction being written. Buffers of the right length are reused; others are made new and put in its place at the end.
/// The kernel checks everything before it writes, so a refusal leaves the direction as it was.
struct Writer<'a> {
    direction: &'a mut Direction,
    fresh: Option<Buffers>,
    amax: Vec<f32>,
    given: Option<&'a [f32]>,
    mode: Mode,
    rounding: Rule<nvfp4_spec::stochastic::Random<'a>>,
    about: Nvfp4Description,
}

struct Buffers {
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl<'a> Writer<'a> {
    fn new(
        direction: &'a mut Direction,
        format: &Nvfp4,
        given: Option<&'a [f32]>,
        rounding: Rule<nvfp4_spec::stochastic::Random<'a>>,
        transform: Option<Signs>,
    ) -> Result<Self> {
        let (rows, cols) = (direction.rows(), direction.cols());
        let about = format.description(rows, cols, transform);
        let amax = zeros(about.stored_len(), rows, cols)?;
        let (code_len, scale_len) = (about.code_len()?, about.scale_len()?);
        let fits = |d: &Nvfp4Direction| d.codes.len() == code_len && d.scales.len() == scale_len;
        let fresh = match direction.nvfp4().is_ok_and(fits) {
            true => None,
            false => Some(Buffers { codes: zeros(code_len, rows, cols)?, scales: zeros(scale_len, rows, cols)? }),
        };
        Ok(Writer { direction, fresh, amax, given, mode: format.mode, rounding, about })
    }

    fn target(&mut self) -> kernel::Direction<'_> {
        let (codes, scales) = match (&mut self.fresh, &mut *self.direction) {
            (Some(fresh), _) => (&mut fresh.codes, &mut fresh.scales),
            (None, Direction::Nvfp4(d)) => (&mut d.codes, &mut d.scales),
            (None, Direction::Fp8(_) | Direction::Plain(_)) => unreachable!("only NVFP4's buffers are reused"),
        };
        kernel::Direction {
            mode: self.mode,
            rounding: self.rounding,
            transform: self.about.rotation,
            layout: self.about.layout,
            amax: match self.given {
                Some(amax) => Amax::Given(amax),
                None => Amax::Compute(&mut self.amax),
            },
            codes,
            scales,
        }
    }

    fn finish(self, x: &TensorRef<'_>) {
        let precision = match self.about.rotation {
            Some(_) => nvfp4_spec::hadamard::PRECISION,
            None => x.values().precision(),
        };
        let amax = self.given.map_or(self.amax, <[f32]>::to_vec);
        let stored = amax.iter().map(|&a| self.mode.profile.stored(a, self.mode.rule.bound(), precision)).collect();
        let Buffers { codes, scales } = match (self.fresh, &mut *self.direction) {
            (Some(fresh), _) => fresh,
            (None, Direction::Nvfp4(d)) => Buffers { codes: take(&mut d.codes), scales: take(&mut d.scales) },
            (None, Direction::Fp8(_) | Direction::Plain(_)) => unreachable!("only NVFP4's buffers are reused"),
        };
        *self.direction = Direction::Nvfp4(Nvfp4Direction { about: self.about, codes, scales, stored });
    }
}
