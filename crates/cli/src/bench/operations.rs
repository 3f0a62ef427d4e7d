//! What is measured: the operations, and the memory on the host for their results.

use crate::device::Device;
use anyhow::Result;
use nvfp4_kernels::quantize::{Amax, Direction, Layout, quantize};
use nvfp4_kernels::{Implementation, Input};
use nvfp4_spec::hadamard::Signs;
use nvfp4_spec::matrix::View;
use nvfp4_spec::scale::Unit;
use nvfp4_spec::stochastic::{Random, Stream};
use nvfp4_spec::{Bound, ErrorPath, GlobalScale, Metric, Mode, Profile, Rounding, ScaleRule, Specials, Tile, e2m1};

/// The operations of a device whose names contain `filter`.
pub fn select(device: Device, filter: &str) -> Vec<&'static Operation> {
    let runs = |o: &&Operation| o.on == On::Everything || device != Device::Cpu;
    OPERATIONS.iter().filter(runs).filter(|o| o.name.contains(filter)).collect()
}

pub struct Operation {
    pub name: &'static str,
    pub kind: Kind,
    on: On,
}

/// Which devices an operation is measured on.
#[derive(PartialEq)]
enum On {
    Everything,
    Gpu,
}

pub enum Kind {
    Amax,
    Quantize(Settings),
    DequantizeBf16,
    DequantizeF32,
}

pub struct Settings {
    pub mode: Mode,
    pub amax: Source,
    pub row: bool,
    pub col: bool,
    /// Of the column direction.
    pub transform: Option<Signs>,
    pub stochastic: bool,
    /// Of the scales.
    pub layout: Layout,
}

/// Where the amaxes come from.
#[derive(Clone, Copy, PartialEq)]
pub enum Source {
    Given,
    Computed,
    /// Computed on the CPU; given on a GPU, as its goals assume.
    GivenOnGpu,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Side {
    Row,
    Column,
}

impl Settings {
    /// Whether a direction is wanted.
    pub fn wants(&self, side: Side) -> bool {
        match side {
            Side::Row => self.row,
            Side::Column => self.col,
        }
    }

    /// The transform of a direction.
    pub fn transform(&self, side: Side) -> Option<Signs> {
        self.transform.filter(|_| side == Side::Column)
    }

    /// The random numbers of a direction.
    pub fn rounding(&self, side: Side) -> Rounding<Stream> {
        match (self.stochastic, side) {
            (false, _) => Rounding::NearestEven,
            (true, Side::Row) => Rounding::Stochastic(Stream::row(1, 2)),
            (true, Side::Column) => Rounding::Stochastic(Stream::column(1, 2)),
        }
    }
}

const fn mode(tile: Tile, rule: ScaleRule) -> Mode {
    Mode { tile, global: GlobalScale::PerTensor, rule, specials: Specials::Kernel, profile: Profile::TransformerEngine }
}

const fn operation(name: &'static str, kind: Kind) -> Operation {
    Operation { name, kind, on: On::Everything }
}

const fn four_over_six(name: &'static str, tile: Tile, metric: Metric, error: ErrorPath) -> Operation {
    let rule = ScaleRule::FourOverSix { metric, error, bound: Bound::E256 };
    operation(name, Kind::Quantize(Settings { mode: mode(tile, rule), amax: Source::GivenOnGpu, ..PLAIN }))
}

/// 1×16 along rows, the amax of the tensor computed.
pub const PLAIN: Settings = Settings {
    mode: mode(Tile::Row16, ScaleRule::Six),
    amax: Source::Computed,
    row: true,
    col: false,
    transform: None,
    stochastic: false,
    layout: Layout::Linear,
};

static OPERATIONS: [Operation; 22] = {
    use {ErrorPath::*, Kind::*, Metric::*, Source::*, Tile::*};
    const ROW_SCALED: Mode = Mode { global: GlobalScale::PerRow, ..PLAIN.mode };
    const SQUARE: Mode = mode(Square16, ScaleRule::Six);
    [
        operation("amax", Amax),
        operation("quantize 1x16 amax-given", Quantize(Settings { amax: Given, ..PLAIN })),
        operation("quantize 1x16", Quantize(PLAIN)),
        Operation {
            on: On::Gpu,
            ..operation("quantize 1x16 swizzled", Quantize(Settings { layout: Layout::Swizzled, amax: Given, ..PLAIN }))
        },
        operation("quantize 1x16 row-scaled", Quantize(Settings { mode: ROW_SCALED, ..PLAIN })),
        operation("quantize 16x16", Quantize(Settings { mode: SQUARE, amax: GivenOnGpu, ..PLAIN })),
        operation("quantize 1x16 both", Quantize(Settings { col: true, ..PLAIN })),
        Operation {
            on: On::Gpu,
            ..operation("quantize 1x16 both amax-given", Quantize(Settings { col: true, amax: Given, ..PLAIN }))
        },
        four_over_six("quantize 1x16 4over6-mae-strict", Row16, Mae, Strict),
        four_over_six("quantize 1x16 4over6-mae-fast", Row16, Mae, Fast),
        four_over_six("quantize 1x16 4over6-mse-strict", Row16, Mse, Strict),
        four_over_six("quantize 1x16 4over6-mse-fast", Row16, Mse, Fast),
        four_over_six("quantize 16x16 4over6-mae-strict", Square16, Mae, Strict),
        four_over_six("quantize 16x16 4over6-mae-fast", Square16, Mae, Fast),
        four_over_six("quantize 16x16 4over6-mse-strict", Square16, Mse, Strict),
        four_over_six("quantize 16x16 4over6-mse-fast", Square16, Mse, Fast),
        operation(
            "quantize 1x16 mse",
            Quantize(Settings { mode: mode(Row16, ScaleRule::Mse), amax: GivenOnGpu, ..PLAIN }),
        ),
        operation("quantize 1x16 stochastic", Quantize(Settings { stochastic: true, amax: GivenOnGpu, ..PLAIN })),
        operation(
            "quantize 1x16 hadamard-column",
            Quantize(Settings { row: false, col: true, transform: Some(Signs::FIXED), amax: GivenOnGpu, ..PLAIN }),
        ),
        Operation {
            on: On::Gpu,
            ..operation(
                "quantize 1x16 row+hadamard-column",
                Quantize(Settings { col: true, transform: Some(Signs::FIXED), amax: Given, ..PLAIN }),
            )
        },
        operation("dequantize bf16", DequantizeBf16),
        operation("dequantize f32", DequantizeF32),
    ]
};

/// A direction's results on the host, filled with a pattern, so that pages exist and a byte that is
/// not written shows.
pub struct Buffers {
    rows: usize,
    cols: usize,
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
    pub amax: Vec<f32>,
}

/// What fills memory for results.
pub const POISON: u8 = 0xA5;

impl Buffers {
    /// For a direction of `rows` rows of `cols` elements.
    pub fn new(rows: usize, cols: usize, layout: Layout) -> Result<Self> {
        Ok(Buffers {
            rows,
            cols,
            codes: vec![POISON; rows * e2m1::packed_len(cols)],
            scales: vec![POISON; layout.scale_len(rows, cols)?],
            amax: vec![f32::NAN; rows],
        })
    }

    /// The results of an implementation: rows, columns. A direction that is not wanted stays as it
    /// was. Without `given`, amaxes are computed.
    pub fn quantize(
        implementation: Implementation,
        x: &Input<'_>,
        settings: &Settings,
        given: Option<&[f32]>,
    ) -> Result<[Buffers; 2]> {
        let new = |side, rows, cols| {
            let (rows, cols) = if settings.wants(side) { (rows, cols) } else { (0, 0) };
            Buffers::new(rows, cols, settings.layout)
        };
        let mut both = [new(Side::Row, x.rows(), x.cols())?, new(Side::Column, x.cols(), x.rows())?];
        let [row, col] = &mut both;
        quantize(
            implementation,
            x,
            settings.row.then(|| row.direction(settings, Side::Row, given)),
            settings.col.then(|| col.direction(settings, Side::Column, given)),
        )?;
        Ok(both)
    }

    /// These buffers as what a quantization writes.
    pub fn direction<'a>(&'a mut self, settings: &Settings, side: Side, given: Option<&'a [f32]>) -> Direction<'a> {
        let count = self.amax_count(settings);
        Direction {
            mode: settings.mode,
            rounding: match settings.rounding(side) {
                Rounding::NearestEven => Rounding::NearestEven,
                Rounding::Stochastic(stream) => Rounding::Stochastic(Random::Stream(stream)),
            },
            transform: settings.transform(side),
            layout: settings.layout,
            amax: given.map_or_else(|| Amax::Compute(&mut self.amax[..count]), Amax::Given),
            codes: &mut self.codes,
            scales: &mut self.scales,
        }
    }

    /// New ones of the same size.
    #[cfg(feature = "cuda")]
    pub fn new_like(&self) -> Self {
        let filled = |bytes: &[u8]| vec![POISON; bytes.len()];
        let (codes, scales) = (filled(&self.codes), filled(&self.scales));
        Buffers { rows: self.rows, cols: self.cols, codes, scales, amax: vec![f32::NAN; self.amax.len()] }
    }

    /// How many amaxes a quantization uses.
    pub fn amax_count(&self, settings: &Settings) -> usize {
        settings.mode.global.count(self.rows).min(self.amax.len())
    }

    /// The first `rows` rows of what [`PLAIN`] left here, with its amax.
    pub fn view<'a>(&'a self, rows: usize, stored: &'a [f32]) -> View<'a> {
        let cols = self.cols;
        let (codes, scales) = (&self.codes[..rows * cols / 2], &self.scales[..rows * cols / 16]);
        View { rows, cols, codes, scales, stored, global: GlobalScale::PerTensor, unit: Unit::Amax(Bound::E448) }
    }

    /// An error unless both hold the same bits.
    pub fn check_equal(&self, expected: &Buffers) -> Result<()> {
        check_bytes("codes", &self.codes, &expected.codes)?;
        check_bytes("scales", &self.scales, &expected.scales)?;
        let differs = self.amax.iter().zip(&expected.amax).position(|(a, b)| a.to_bits() != b.to_bits());
        if let Some(i) = differs {
            anyhow::bail!("amaxes differ: number {i} is {} instead of {}", self.amax[i], expected.amax[i]);
        }
        Ok(())
    }
}

fn check_bytes(what: &str, got: &[u8], expected: &[u8]) -> Result<()> {
    if got != expected {
        let at = got.iter().zip(expected).position(|(a, b)| a != b);
        let count = got.iter().zip(expected).filter(|(a, b)| a != b).count();
        let Some(at) = at else { anyhow::bail!("{what}: {} bytes instead of {}", got.len(), expected.len()) };
        anyhow::bail!(
            "{what} differ: {count} of {} bytes, the first at {at}: {:#04x} instead of {:#04x}",
            got.len(),
            got[at],
            expected[at]
        );
    }
    Ok(())
}
