//! The two kernels, their variants and their parameters, laid out as in `units.cuh`.

use super::{Direction, Mode, Scale, Scaling};
use crate::Result;
use crate::cuda::text::{PRECISIONS, Variants, assemble_fp8, format, precision};
use crate::cuda::{
    self, Device, GROUP_SCALES, GROUPS, Groups, GroupsParams, Input, Kernel, Matrix, Source, Stream, divisor,
};
use nvfp4_spec::fp8::{AmaxRule, BLOCK, Format, MX_BLOCK, ScaleValues};
use nvfp4_spec::{BLOCK as UNIT, Precision};

/// Parameters of both kernels.
#[derive(Clone, Copy)]
#[repr(C)]
pub(in crate::fp8) struct Params {
    x: u64,
    rows: u64,
    cols: u64,
    stride: u64,
    row_codes: u64,
    row_scales: u64,
    col_codes: u64,
    col_scales: u64,
    tensor: u64,
    amax: u64,
    number: f32,
    divisor_magic: u32,
    divisor_shift: u32,
    wide: u32,
    groups: GroupsParams,
}

/// Threads of a group of the kernel over rows.
const THREADS_OF_ROWS: u32 = 128;
/// The same of the kernel over panels.
const THREADS_OF_PANELS: u32 = 256;

/// One run of a kernel.
#[derive(Clone, Copy)]
pub(in crate::fp8) struct Launch {
    pub variant: Variant,
    pub params: Params,
    pub grid: Grid,
}

/// How many groups of threads run.
#[derive(Clone, Copy, Debug)]
pub(in crate::fp8) enum Grid {
    /// This many.
    All(u32),
    /// At most this many; if the device holds fewer at once, each processes more than one share.
    AtOnce(u32),
}

impl Launch {
    /// The row direction of tensors and of blocks along rows.
    pub fn rows(matrix: Matrix<'_>, mode: &Mode<'_>, row: &Direction<'_>, amax: Option<u64>) -> Result<Self> {
        let (x, groups) = matrix;
        let (rows, cols, scaling) = (x.rows(), x.cols(), mode.scaling.kind());
        let tile = scaling.width();
        // Rows are counted in whole tiles.
        let units = cols.div_ceil(tile).checked_mul(tile / UNIT).and_then(|units| units.checked_mul(rows));
        let units = units.filter(|&units| units < 1 << 31).ok_or(cuda::Error::TooManyBlocks { rows, cols })?;
        let whole = is_whole(x, Some(row));
        let variant = Variant {
            function: Function::Rows,
            row: true,
            whole,
            // Contiguous rows are one row.
            flat: whole && x.stride() == cols && cols.is_multiple_of(tile) && groups.is_none(),
            ..Variant::new(matrix, mode, amax)
        };
        let mut params = params(matrix, mode, [Some(row), None], amax);
        if units > 0 {
            (params.divisor_magic, params.divisor_shift) = divisor(units / rows);
        }
        if variant.flat {
            (params.rows, params.cols, params.stride) = (1, params.rows * params.cols, 0);
        }
        let groups = units.div_ceil((THREADS_OF_ROWS * variant.per_thread()) as usize).max(1);
        Ok(Launch { variant, params, grid: Grid::AtOnce(groups as u32) })
    }

    /// The column direction, with or without the row direction, and squares in either.
    pub fn panels(
        matrix: Matrix<'_>,
        mode: &Mode<'_>,
        [row, col]: [Option<&Direction<'_>>; 2],
        amax: Option<u64>,
    ) -> Result<Self> {
        let (x, groups) = matrix;
        let (rows, cols) = (groups.map_or(x.rows(), Groups::padded_rows), x.cols());
        let panels = rows.div_ceil(BLOCK).checked_mul(cols.div_ceil(BLOCK)).filter(|&panels| panels < 1 << 31);
        let panels = panels.ok_or(cuda::Error::TooManyBlocks { rows, cols })?;
        let variant = Variant {
            function: Function::Panels,
            row: row.is_some(),
            col: col.is_some(),
            whole: is_whole(x, row),
            ..Variant::new(matrix, mode, amax)
        };
        let mut params = params(matrix, mode, [row, col], amax);
        (params.divisor_magic, params.divisor_shift) = divisor(cols.div_ceil(BLOCK));
        // Row length of the column direction's codes: transposed, or in the order of the matrix.
        let pitch = match variant.scaling {
            Kind::Blocks32 | Kind::Squares32 => cols,
            Kind::Tensors | Kind::Blocks128 | Kind::Squares128 => rows,
        };
        params.wide = col.is_some_and(|col| aligned(col, pitch)).into();
        Ok(Launch { variant, params, grid: Grid::All(panels as u32) })
    }

    /// Queues it on a stream.
    pub fn run(&self, stream: &Stream) -> Result<()> {
        let (device, threads) = (stream.device(), self.variant.threads());
        let kernel = self.variant.kernel(device)?;
        let groups = match self.grid {
            Grid::All(groups) => groups,
            Grid::AtOnce(groups) => {
                groups.min((kernel.max_blocks_per_sm(threads, 0)? * device.multiprocessors()).max(1))
            }
        };
        // SAFETY: `Params` is laid out as in units.cuh; addresses and lengths were checked.
        unsafe { kernel.launch(stream, [groups, 1, 1], threads, 0, &self.params) }?;
        Ok(())
    }
}

/// Whether rows of `cols` codes begin at multiples of 16 bytes and end there.
fn aligned(direction: &Direction<'_>, cols: usize) -> bool {
    cols.is_multiple_of(UNIT) && direction.codes.address().is_multiple_of(16)
}

/// Whether units are whole, of elements and of the row direction's codes.
fn is_whole(x: &Input<'_>, row: Option<&Direction<'_>>) -> bool {
    x.rows_aligned() && x.cols().is_multiple_of(UNIT) && row.is_none_or(|row| aligned(row, x.cols()))
}

fn params(
    (x, groups): Matrix<'_>,
    mode: &Mode<'_>,
    [row, col]: [Option<&Direction<'_>>; 2],
    amax: Option<u64>,
) -> Params {
    let codes = |direction: Option<&Direction<'_>>| direction.map_or(0, |d| d.codes.address());
    let scales = |direction: Option<&Direction<'_>>| direction.map_or(0, Direction::scale_address);
    let (tensor, number) = match mode.scaling {
        Scaling::Tensor(Scale::Value(scale)) => (0, scale),
        Scaling::Tensor(Scale::Memory(scale)) => (scale.address(), 0.0),
        Scaling::Tensor(Scale::OfAmax { amax, rule }) => (amax.address(), rule.epsilon),
        Scaling::Row128(rule) | Scaling::Square128(rule) => (0, rule.epsilon),
        Scaling::Mx | Scaling::MxSquare => (0, 0.0),
    };
    Params {
        x: x.values().address(),
        rows: x.rows() as u64,
        cols: x.cols() as u64,
        stride: x.stride() as u64,
        row_codes: codes(row),
        row_scales: scales(row),
        col_codes: codes(col),
        col_scales: scales(col),
        tensor,
        amax: amax.unwrap_or(0),
        number,
        divisor_magic: 0,
        divisor_shift: 0,
        wide: 0,
        groups: groups.map(Groups::params).unwrap_or_default(),
    }
}

/// The settings of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in crate::fp8) struct Variant {
    function: Function,
    precision: Precision,
    format: Format,
    scaling: Kind,
    source: ScaleSource,
    values: ScaleValues,
    row: bool,
    col: bool,
    amax: bool,
    whole: bool,
    flat: bool,
    grouped: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Function {
    Rows,
    Panels,
}

/// A scaling without its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Tensors,
    Blocks128,
    Squares128,
    Blocks32,
    Squares32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ScaleSource {
    Value,
    Memory,
    OfAmax,
}

impl Scaling<'_> {
    fn kind(&self) -> Kind {
        match self {
            Scaling::Tensor(_) => Kind::Tensors,
            Scaling::Row128(_) => Kind::Blocks128,
            Scaling::Square128(_) => Kind::Squares128,
            Scaling::Mx => Kind::Blocks32,
            Scaling::MxSquare => Kind::Squares32,
        }
    }

    /// Whether squares share a scale: they are found in panels, even for the row direction alone.
    pub(super) fn in_squares(&self) -> bool {
        match self.kind() {
            Kind::Squares128 | Kind::Squares32 => true,
            Kind::Tensors | Kind::Blocks128 | Kind::Blocks32 => false,
        }
    }
}

impl Kind {
    /// Columns that share a scale, or of a unit.
    fn width(self) -> usize {
        match self {
            Kind::Tensors => UNIT,
            Kind::Blocks128 | Kind::Squares128 => BLOCK,
            Kind::Blocks32 | Kind::Squares32 => MX_BLOCK,
        }
    }
}

impl Variant {
    /// A variant without outputs.
    fn new((x, groups): Matrix<'_>, mode: &Mode<'_>, amax: Option<u64>) -> Self {
        let source = match mode.scaling {
            Scaling::Tensor(Scale::Memory(_)) => ScaleSource::Memory,
            Scaling::Tensor(Scale::OfAmax { .. }) => ScaleSource::OfAmax,
            _ => ScaleSource::Value,
        };
        let values = match mode.scaling {
            Scaling::Tensor(Scale::OfAmax { rule, .. }) | Scaling::Row128(rule) | Scaling::Square128(rule) => {
                rule.values
            }
            _ => ScaleValues::Any,
        };
        Variant {
            function: Function::Rows,
            precision: x.values().precision(),
            format: mode.format,
            scaling: mode.scaling.kind(),
            source,
            values,
            row: false,
            col: false,
            amax: amax.is_some(),
            whole: false,
            flat: false,
            grouped: groups.is_some(),
        }
    }

    /// Name, function and text.
    pub fn source(self) -> (&'static str, &'static str, String) {
        const UNITS: &str = include_str!("units.cuh");
        let scaling = match self.scaling {
            Kind::Tensors => "TENSORS",
            Kind::Blocks128 => "BLOCKS_128",
            Kind::Squares128 => "SQUARES_128",
            Kind::Blocks32 => "BLOCKS_32",
            Kind::Squares32 => "SQUARES_32",
        };
        let source = match self.source {
            ScaleSource::Value => "VALUE",
            ScaleSource::Memory => "MEMORY",
            ScaleSource::OfAmax => "OF_AMAX",
        };
        let values = match self.values {
            ScaleValues::Any => "ANY",
            ScaleValues::PowersOfTwo => "POWERS_OF_TWO",
        };
        let settings = format!(
            "constexpr Precision INPUT = {};\nconstexpr Format FORMAT = {};\nconstexpr Scaling SCALING = {scaling};\n\
             constexpr ScaleSource SOURCE = {source};\nconstexpr ScaleValues VALUES = {values};\n\
             constexpr bool ROW = {}, COLUMN = {}, AMAX = {}, WHOLE = {}, FLAT = {}, GROUPED = {};\n\
             constexpr unsigned GROUP_SCALES = {GROUP_SCALES};\n\
             constexpr int PER_THREAD = {}, MIN_BLOCKS = {};\n",
            precision(self.precision),
            format(self.format),
            self.row,
            self.col,
            self.amax,
            self.whole,
            self.flat,
            self.grouped,
            self.per_thread(),
            self.min_blocks(),
        );
        let (function, file) = match self.function {
            Function::Rows => ("quantize_fp8_rows", include_str!("rows.cu")),
            Function::Panels => ("quantize_fp8_panels", include_str!("panels.cu")),
        };
        ("fp8 quantize", function, assemble_fp8(&settings, &[GROUPS, UNITS, file]))
    }

    /// Units of a thread at a time: enough loads in flight.
    fn per_thread(self) -> u32 {
        match (self.function, self.precision) {
            (Function::Panels, _) => 4,
            (Function::Rows, Precision::F32) => 1,
            (Function::Rows, _) => 2,
        }
    }

    /// Threads of a group.
    pub fn threads(self) -> u32 {
        match self.function {
            Function::Rows => THREADS_OF_ROWS,
            Function::Panels => THREADS_OF_PANELS,
        }
    }

    /// How many groups of threads a multiprocessor should hold at a time, which limits registers.
    fn min_blocks(self) -> u32 {
        match (self.function, self.precision) {
            (Function::Rows, _) => 6,
            (Function::Panels, Precision::F32) => 2,
            (Function::Panels, _) => 3,
        }
    }

    fn kernel(self, device: Device) -> Result<Kernel> {
        static VARIANTS: Variants<Variant> = Variants::new();
        Ok(VARIANTS.get(device, self, Variant::source)?)
    }
}

/// Texts for [`crate::sources`]: every scaling in every direction. Formats, types, whole or ragged,
/// and with or without an amax alternate.
pub(crate) fn sources() -> Vec<(String, Source)> {
    // SAFETY: nothing is ever read there.
    let memory = unsafe { cuda::Slice::from_raw(16, 1) };
    let x = Input::new(cuda::Values::F32(memory), 1, 1).expect("one element");
    let powers = AmaxRule::BLOCK;
    let scalings = [
        Scaling::Tensor(Scale::Value(1.0)),
        Scaling::Tensor(Scale::Memory(memory)),
        Scaling::Tensor(Scale::OfAmax { amax: memory, rule: AmaxRule::CURRENT }),
        Scaling::Row128(AmaxRule::CURRENT),
        Scaling::Row128(powers),
        Scaling::Square128(powers),
        Scaling::Mx,
        Scaling::MxSquare,
    ];
    let mut all = Vec::new();
    for (i, scaling) in scalings.into_iter().enumerate() {
        for (j, (row, col)) in [(true, false), (false, true), (true, true)].into_iter().enumerate() {
            for (k, format) in Format::ALL.into_iter().enumerate() {
                let n = i + j + k;
                let mode = Mode { format, scaling };
                let rows = !col && !scaling.in_squares();
                let variant = Variant {
                    function: if rows { Function::Rows } else { Function::Panels },
                    row,
                    col,
                    whole: n.is_multiple_of(2),
                    flat: rows && n.is_multiple_of(4),
                    precision: PRECISIONS[(n + j) % 3],
                    ..Variant::new((&x, None), &mode, (n % 3 == 0).then_some(16))
                };
                all.push(cuda::entry(variant, Variant::source));
                if n.is_multiple_of(2) {
                    let grouped = Variant { whole: true, flat: false, grouped: true, ..variant };
                    all.push(cuda::entry(grouped, Variant::source));
                }
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::{Outputs, plan};
    use super::*;
    use crate::cuda::SliceMut;
    use nvfp4_spec::fp8::Scales;

    #[test]
    fn parameters_have_the_size_that_the_kernels_expect() {
        assert_eq!(size_of::<Params>(), 120);
    }

    fn direction<'a>() -> Direction<'a> {
        // SAFETY: nothing is ever read or written there.
        unsafe { Direction { codes: SliceMut::from_raw(16, 0), scales: Scales::F32(SliceMut::from_raw(16, 1)) } }
    }

    /// The launches for a matrix without memory, in rows or in columns.
    fn planned(rows: usize, cols: usize, scaling: Scaling<'_>, columns: bool) -> Result<Vec<Launch>> {
        // SAFETY: as above.
        let x = cuda::Values::F32(unsafe { cuda::Slice::from_raw(16, usize::MAX) });
        let x = Input::strided(x, rows, cols, cols).unwrap();
        let (row, col) = if columns { (None, Some(direction())) } else { (Some(direction()), None) };
        plan((&x, None), &Mode { format: Format::E4m3, scaling }, &Outputs { row, col, amax: None })
    }

    #[test]
    fn without_elements_only_the_scale_of_a_tensor_is_written() {
        for (rows, cols) in [(0, 0), (0, 1 << 62), (1 << 62, 0), (0, usize::MAX), (7, 0)] {
            for columns in [false, true] {
                let tensor = planned(rows, cols, Scaling::Tensor(Scale::Value(1.0)), columns).unwrap();
                assert!(matches!(tensor[..], [Launch { grid: Grid::AtOnce(1), .. }]), "{rows} × {cols}");
                for scaling in [Scaling::Mx, Scaling::MxSquare] {
                    assert!(planned(rows, cols, scaling, columns).unwrap().is_empty(), "{rows} × {cols}");
                }
            }
        }
    }

    #[test]
    fn units_and_panels_are_counted_in_31_bits() {
        let (most, tensor, blocks) =
            ((1 << 31) - 1, Scaling::Tensor(Scale::Value(1.0)), Scaling::Row128(AmaxRule::BLOCK));
        for (rows, cols, scaling, columns) in [
            (most, 16, tensor, false),
            (1, 16 * most, tensor, false),
            (1 << 27, 100, blocks, false),
            (most, 128, blocks, true),
        ] {
            assert!(planned(rows, cols, scaling, columns).is_ok(), "{rows} × {cols}");
        }
        for (rows, cols, scaling, columns) in [
            (most, 17, tensor, false),
            (1 << 28, 1, blocks, false),
            (1 << 40, 16, tensor, false),
            (1 << 38, 1, blocks, true),
        ] {
            assert!(planned(rows, cols, scaling, columns).is_err(), "{rows} × {cols}");
        }
    }
}
