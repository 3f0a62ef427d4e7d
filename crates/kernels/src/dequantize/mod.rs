//! From codes and scales back to values. **Exact.**

use crate::input::check_len;
use crate::{Destination, Error, Implementation, Result};
use nvfp4_spec::matrix::{self, View};

/// Decodes a quantized matrix with linear scales into a contiguous row-major one.
pub fn dequantize(implementation: Implementation, q: &View<'_>, out: Destination<'_>) -> Result<()> {
    q.check()?;
    let (rows, cols) = (q.rows, q.cols);
    check_len("output", rows.checked_mul(cols).ok_or(Error::TooLarge { rows, cols })?, out.len())?;
    match implementation {
        Implementation::Scalar => match out {
            Destination::F32(out) => out.copy_from_slice(&matrix::dequantize(q)?),
            Destination::Bf16(out) => out.copy_from_slice(&matrix::dequantize(q)?),
            Destination::F16(out) => out.copy_from_slice(&matrix::dequantize(q)?),
        },
    }
    Ok(())
}
