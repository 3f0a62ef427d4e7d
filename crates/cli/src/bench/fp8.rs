//! FP8 and MXFP8: what is measured, and how the CPU runs and checks it.

use anyhow::{Result, ensure};
use half::bf16;
use nvfp4_kernels::fp8::dequantize::dequantize;
use nvfp4_kernels::fp8::quantize::{Direction, Outputs, quantize};
use nvfp4_kernels::{Implementation, Input, Values, amax};
use nvfp4_spec::Specials;
use nvfp4_spec::fp8::{AmaxRule, Format, Mode, ScaleVec, Scales, Scaling, Side, View};

/// The operations whose names contain `filter`.
pub fn select(filter: &str) -> Vec<&'static Operation> {
    OPERATIONS.iter().filter(|o| o.name.contains(filter)).collect()
}

pub struct Operation {
    pub name: &'static str,
    pub kind: Kind,
    pub scaling: Scale,
    format: Format,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    Rows,
    Both,
    DequantizeBf16,
    DequantizeF32,
}

/// Where scales come from.
#[derive(Clone, Copy, PartialEq)]
pub enum Scale {
    /// From an amax that is given.
    Given,
    /// From an amax that is found first.
    Current,
    /// Given, and the amax is recorded.
    Delayed,
    Row128,
    Square128,
    Mx,
    MxSquare,
}

const fn operation(name: &'static str, kind: Kind, scaling: Scale) -> Operation {
    Operation { name, kind, scaling, format: Format::E4m3 }
}

static OPERATIONS: [Operation; 19] = {
    use {Kind::*, Scale::*};
    [
        operation("quantize fp8-current amax-given", Rows, Given),
        Operation { format: Format::E5m2, ..operation("quantize fp8-current e5m2 amax-given", Rows, Given) },
        operation("quantize fp8-current", Rows, Current),
        operation("quantize fp8-current both amax-given", Both, Given),
        operation("quantize fp8-delayed", Rows, Delayed),
        operation("quantize fp8-1x128", Rows, Row128),
        operation("quantize fp8-1x128 both", Both, Row128),
        operation("quantize fp8-128x128", Rows, Square128),
        operation("quantize fp8-128x128 both", Both, Square128),
        operation("quantize mxfp8", Rows, Mx),
        Operation { format: Format::E5m2, ..operation("quantize mxfp8 e5m2", Rows, Mx) },
        operation("quantize mxfp8 both", Both, Mx),
        operation("quantize mxfp8 32x32", Rows, MxSquare),
        operation("quantize mxfp8 32x32 both", Both, MxSquare),
        operation("dequantize fp8-current bf16", DequantizeBf16, Given),
        operation("dequantize fp8-current f32", DequantizeF32, Given),
        operation("dequantize fp8-1x128 bf16", DequantizeBf16, Row128),
        operation("dequantize fp8-128x128 bf16", DequantizeBf16, Square128),
        operation("dequantize mxfp8 bf16", DequantizeBf16, Mx),
    ]
};

/// An operation with the memory that it writes to.
pub struct Run<'a> {
    operation: &'a Operation,
    implementation: Implementation,
    x: Input<'a>,
    amax: f32,
    pub results: Results,
}

/// The outputs of an operation, filled with a pattern, so that pages exist and a byte that is not
/// written shows.
#[derive(PartialEq)]
pub struct Results {
    pub row: Buffers,
    pub col: Option<Buffers>,
    pub amax: f32,
    pub bf16s: Vec<bf16>,
    pub f32s: Vec<f32>,
}

#[derive(PartialEq)]
pub struct Buffers {
    pub codes: Vec<u8>,
    pub scales: ScaleVec,
}

impl Buffers {
    fn new(mode: &Mode, side: Side, shape: (usize, usize)) -> Result<Self> {
        let (rows, cols) = mode.shape(side, shape);
        let count = mode.tile(side).scale_count(rows, cols)?;
        let scales = match mode.scaling {
            Scaling::Mx | Scaling::MxSquare => Scales::E8m0(vec![0xA5; count]),
            _ => Scales::F32(vec![-1.0; count]),
        };
        Ok(Buffers { codes: vec![0xA5; rows * cols], scales })
    }

    fn direction(&mut self) -> Direction<'_> {
        let scales = match &mut self.scales {
            Scales::F32(scales) => Scales::F32(&mut scales[..]),
            Scales::E8m0(scales) => Scales::E8m0(&mut scales[..]),
        };
        Direction { codes: &mut self.codes, scales }
    }
}

impl<'a> Run<'a> {
    /// An operation on a matrix of `rows` rows of `cols` elements whose amax is known.
    pub fn new(
        operation: &'a Operation,
        implementation: Implementation,
        x: &'a [bf16],
        (rows, cols): (usize, usize),
        amax: f32,
    ) -> Result<Self> {
        let mode = operation.mode(amax);
        let col = match operation.kind {
            Kind::Both => Some(Buffers::new(&mode, Side::Column, (rows, cols))?),
            _ => None,
        };
        let (bf16s, f32s) = match operation.kind {
            Kind::DequantizeBf16 => (vec![bf16::ONE; x.len()], vec![]),
            Kind::DequantizeF32 => (vec![], vec![1.0; x.len()]),
            Kind::Rows | Kind::Both => (vec![], vec![]),
        };
        let row = Buffers::new(&mode, Side::Row, (rows, cols))?;
        let results = Results { row, col, amax: -1.0, bf16s, f32s };
        let x = Input::new(Values::Bf16(x), rows, cols)?;
        let mut run = Run { operation, implementation, x, amax, results };
        if !run.results.bf16s.is_empty() || !run.results.f32s.is_empty() {
            run.quantize(&mode)?;
        }
        Ok(run)
    }

    /// Runs an operation on the first rows and compares with the scalar implementation, which is
    /// `spec`.
    pub fn check(
        operation: &Operation,
        implementation: Implementation,
        x: &[bf16],
        shape: (usize, usize),
        amax: f32,
    ) -> Result<()> {
        let results = |implementation| -> Result<Results> {
            let mut run = Run::new(operation, implementation, x, shape, amax)?;
            run.once()?;
            Ok(run.results)
        };
        ensure!(results(implementation)? == results(Implementation::Scalar)?, "results differ");
        Ok(())
    }

    /// Runs the operation.
    pub fn once(&mut self) -> Result<()> {
        let mut amax = self.amax;
        if self.operation.scaling == Scale::Current {
            let wanted = amax::Outputs { tensor: Some(&mut amax), ..Default::default() };
            amax::amax(self.implementation, &self.x, Specials::Kernel, wanted)?;
        }
        let mode = self.operation.mode(amax);
        let Results { row, bf16s, f32s, .. } = &mut self.results;
        let (rows, cols, format, tile) = (self.x.rows(), self.x.cols(), mode.format, mode.tile(Side::Row));
        let view = View { rows, cols, format, tile, codes: &row.codes, scales: row.scales.view() };
        match self.operation.kind {
            Kind::Rows | Kind::Both => self.quantize(&mode)?,
            Kind::DequantizeBf16 => dequantize(self.implementation, &view, bf16s)?,
            Kind::DequantizeF32 => dequantize(self.implementation, &view, f32s)?,
        }
        Ok(())
    }

    fn quantize(&mut self, mode: &Mode) -> Result<()> {
        let Results { row, col, amax, .. } = &mut self.results;
        let wanted = Outputs {
            row: Some(row.direction()),
            col: col.as_mut().map(Buffers::direction),
            amax: (self.operation.scaling == Scale::Delayed).then_some(amax),
        };
        Ok(quantize(self.implementation, &self.x, mode, wanted)?)
    }
}

impl Operation {
    /// How the matrix is quantized, given its amax.
    pub fn mode(&self, amax: f32) -> Mode {
        let scaling = match self.scaling {
            Scale::Given | Scale::Current | Scale::Delayed => {
                Scaling::Tensor { scale: AmaxRule::CURRENT.tensor_scale(amax, self.format) }
            }
            Scale::Row128 => Scaling::Row128(AmaxRule::BLOCK),
            Scale::Square128 => Scaling::Square128(AmaxRule::BLOCK),
            Scale::Mx => Scaling::Mx,
            Scale::MxSquare => Scaling::MxSquare,
        };
        Mode { format: self.format, scaling }
    }
}
