//! Errors in the arguments of a call.

use std::fmt;

/// The result of a checked rule.
pub type Result<T> = std::result::Result<T, Error>;

/// What a caller got wrong, with what was expected.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// A slice does not have the length that the shape asks for.
    Length {
        /// Which slice.
        what: &'static str,
        /// The length that fits.
        expected: usize,
        /// The length it has.
        got: usize,
    },
    /// A dimension must be a multiple of something.
    Multiple {
        /// Which dimension.
        what: &'static str,
        /// What it must be a multiple of.
        of: usize,
        /// Its value.
        got: usize,
    },
    /// The operands of a product differ in K, the length that it sums over.
    InnerLength {
        /// K of the left operand.
        expected: usize,
        /// K of the right operand.
        got: usize,
    },
    /// The number of elements does not fit the address space, or there is no memory for them.
    TooLarge {
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
    },
    /// Two settings that have no meaning together; the text names the fix.
    Combination(&'static str),
    /// A given amax is negative.
    NegativeAmax {
        /// Its position.
        index: usize,
        /// Its value.
        value: f32,
    },
    /// A block scale that a layout cannot hold.
    ScaleByte {
        /// Its position.
        index: usize,
        /// The byte.
        byte: u8,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Length { what, expected, got } => write!(f, "{what}: expected length {expected}, got {got}"),
            Error::Multiple { what, of, got } => write!(f, "{what}: expected a multiple of {of}, got {got}"),
            Error::InnerLength { expected, got } => write!(f, "matmul: expected K = {expected}, got K = {got}"),
            Error::TooLarge { rows, cols } => write!(f, "a matrix of {rows} × {cols} elements is too large"),
            Error::Combination(why) => f.write_str(why),
            Error::NegativeAmax { index, value } => {
                write!(f, "amax: expected a magnitude, got {value} at index {index}")
            }
            Error::ScaleByte { index, byte } => {
                write!(f, "scales: expected a finite non-negative E4M3 byte, got {byte:#04x} at index {index}")
            }
        }
    }
}

impl std::error::Error for Error {}

/// Checks the length of a slice; the error names it as `what`.
pub fn check_len(what: &'static str, expected: usize, got: usize) -> Result<()> {
    if expected == got { Ok(()) } else { Err(Error::Length { what, expected, got }) }
}

/// `rows · cols`, or an error where it overflows.
pub fn area(rows: usize, cols: usize) -> Result<usize> {
    rows.checked_mul(cols).ok_or(Error::TooLarge { rows, cols })
}

/// `len` zeros, which a matrix of `rows` × `cols` asks for, or an error where there is no memory
/// for them.
///
/// A shape alone proves nothing: a matrix without columns may have any number of rows, and a
/// repeated row any number of copies. So memory whose size comes from a shape, not from existing
/// elements, is allocated here.
pub fn zeros<T: Copy + Default>(len: usize, rows: usize, cols: usize) -> Result<Vec<T>> {
    // Allocated twice: a reservation returns an error instead of aborting, and only `vec!` uses the
    // system's zeroed pages.
    Vec::<T>::new().try_reserve_exact(len).map_err(|_| Error::TooLarge { rows, cols })?;
    Ok(vec![T::default(); len])
}
