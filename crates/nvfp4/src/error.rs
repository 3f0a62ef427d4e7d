//! What can go wrong, and what to change.

use crate::format::{self, Conflict, Family, Side};

/// The result of a library call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that a caller or a file can get wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A length, a shape or a combination that the rules refuse.
    #[error(transparent)]
    Rule(#[from] nvfp4_spec::Error),

    /// A format or a spec that has no meaning; the text names the fix.
    #[error(transparent)]
    Format(format::Error),

    /// A file.
    #[error(transparent)]
    File(#[from] nvfp4_files::Error),

    /// The GPU, its driver or its compiler.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] nvfp4_kernels::cuda::Error),

    /// A shape does not fit the values it is given for.
    #[error("the shape {shape:?} with strides {strides:?} needs {needed} elements, got {got}")]
    Shape {
        /// The shape.
        shape: Vec<usize>,
        /// The distance between neighbours of each dimension, in elements.
        strides: Vec<usize>,
        /// How many elements it reaches over.
        needed: usize,
        /// How many there are.
        got: usize,
    },

    /// A shape whose elements, or whose rows, cannot be counted.
    #[error("the shape {shape:?} has more elements than an address can count")]
    Overflow {
        /// The shape.
        shape: Vec<usize>,
    },

    /// Shape and strides differ in rank.
    #[error("expected a stride for each dimension of the shape {shape:?}, got {strides:?}")]
    Strides {
        /// The shape.
        shape: Vec<usize>,
        /// The strides.
        strides: Vec<usize>,
    },

    /// A tensor without directions.
    #[error("a tensor needs a row direction, a column direction or both")]
    NoDirection,

    /// A row direction that claims a Hadamard transform.
    #[error("the row direction has Hadamard signs, but the transform acts on the column direction; leave them out")]
    RotatedRow,

    /// An MXFP8 direction on the other side than its tiles.
    #[error(
        "the {0} direction has MXFP8 tiles of the other direction: blocks of 1×32 (`Row32`) make a row direction, \
         blocks of 32×1 (`Column32`) a column direction"
    )]
    MxTile(Side),

    /// An update with a tensor of another shape.
    #[error("expected the shape {expected:?}, got {got:?}")]
    OtherShape {
        /// The shape that fits.
        expected: Vec<usize>,
        /// The shape it has.
        got: Vec<usize>,
    },

    /// Stochastic rounding without random numbers.
    #[error("stochastic rounding needs randomness: pass `Options {{ randomness: Some(generator.draw()?), .. }}`")]
    NoRandomness,

    /// Random numbers that nothing uses.
    #[error("randomness was given, but the quantizer rounds to nearest; use `Rounding::Stochastic` or drop it")]
    UnusedRandomness,

    /// The amax of a direction that is not written.
    #[error("an amax was given for the {0} direction, which is not written; ask for that direction or drop the amax")]
    UnusedAmax(Side),

    /// A direction that the tensor does not hold.
    #[error("there is no {0} direction; quantize again with it")]
    MissingDirection(Side),

    /// A direction of the tensor that an update cannot write.
    #[error(
        "the tensor holds a {0} direction, which the quantizer does not produce; \
         use a quantizer with `Directions::Both`, or drop the direction with `keep`"
    )]
    NotProduced(Side),

    /// A value that the finite policy refuses.
    #[error("input: expected finite values, got {value} at index {index:?}")]
    NotFinite {
        /// Where, in the input's shape.
        index: Vec<usize>,
        /// NaN or an infinity.
        value: f32,
    },

    /// A given amax that the finite policy refuses.
    #[error("the {side} direction's amax: expected finite values, got {value} at index {index}")]
    AmaxNotFinite {
        /// Which direction's.
        side: Side,
        /// Its position.
        index: usize,
        /// NaN or an infinity.
        value: f32,
    },

    /// Operands that were rotated differently, so that the rotations do not cancel.
    #[error(
        "matmul: the left operand's Hadamard signs are {left:?}, the right operand's {right:?}; \
         quantize both with the same transform"
    )]
    Rotation {
        /// Signs of the left operand; `None` for no transform.
        left: Option<nvfp4_spec::hadamard::Signs>,
        /// Signs of the right operand.
        right: Option<nvfp4_spec::hadamard::Signs>,
    },

    /// Operands in formats that no product reads together.
    #[error(
        "matmul: the left operand is {left}, the right operand {right}; {}: quantize both to one of these formats, or keep one of them \
         in high precision",
        Conflict::Formats.rule()
    )]
    Formats {
        /// Of the left operand.
        left: Family,
        /// Of the right operand.
        right: Family,
    },

    /// Another format where only NVFP4 has what was asked for.
    #[error("expected an nvfp4 direction, got {got}; quantize to nvfp4, or match on `Direction`")]
    NotNvfp4 {
        /// What it is.
        got: Family,
    },

    /// A check that a GPU does not make.
    #[cfg(feature = "cuda")]
    #[error("values that are not finite are found on the CPU only; leave `check_finite` out")]
    FiniteOnGpu,

    /// A direction in high precision, whose numbers are one array.
    #[error("a direction in high precision has no codes and scales to put in a block; keep its numbers as they are")]
    PlainBlock,

    /// A direction in high precision, which a GPU does not copy.
    #[cfg(feature = "cuda")]
    #[error("a direction in high precision is not quantized; on a GPU products take the matrix itself")]
    PlainOnGpu,

    /// An amax that a format has no use for.
    #[error("an amax was given for the {side} direction, but {format} takes none; drop it")]
    NoAmax {
        /// Which direction's.
        side: Side,
        /// The format, in recipe syntax.
        format: String,
    },

    /// Two amaxes where one scale is made from them.
    #[error("one scale serves both directions, but the row amax is {row} and the column amax {col}; give one of them")]
    TwoAmaxes {
        /// Of the row direction.
        row: f32,
        /// Of the column direction.
        col: f32,
    },

    /// A row slice that would cut a block.
    #[error(
        "rows {start}..{end} cut a block of the {side} direction; \
         slice at multiples of {of} or drop that direction first"
    )]
    CutsBlock {
        /// First row.
        start: usize,
        /// One past the last row.
        end: usize,
        /// The direction.
        side: Side,
        /// How many rows make whole blocks of it.
        of: usize,
    },

    /// A row slice outside the tensor.
    #[error("rows {start}..{end} are outside the tensor's {rows} rows")]
    OutOfRange {
        /// First row.
        start: usize,
        /// One past the last row.
        end: usize,
        /// How many there are.
        rows: usize,
    },

    /// A generator that has handed out all its offsets.
    #[error("the generator has handed out all its offsets; start one with another seed")]
    Exhausted,

    /// A generator state that no generator has.
    #[error("not a generator's state: expected start ≤ offset ≤ end, got {start}, {offset}, {end}")]
    GeneratorState {
        /// First offset.
        start: u64,
        /// Next offset.
        offset: u64,
        /// One past the last offset.
        end: u64,
    },
}

impl Error {
    /// A setting that has no meaning; the text names the fix.
    pub(crate) fn setting(text: String) -> Self {
        Error::Format(format::Error::Setting(text))
    }
}

impl From<format::Error> for Error {
    fn from(error: format::Error) -> Self {
        match error {
            format::Error::Rule(error) => Error::Rule(error),
            error => Error::Format(error),
        }
    }
}

impl From<nvfp4_kernels::Error> for Error {
    fn from(error: nvfp4_kernels::Error) -> Self {
        match error {
            nvfp4_kernels::Error::Rule(error) => Error::Rule(error),
            #[cfg(feature = "cuda")]
            nvfp4_kernels::Error::Cuda(error) => Error::Cuda(error),
        }
    }
}
