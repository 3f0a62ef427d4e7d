//! The largest magnitude of a matrix, of its rows and of its columns. **Exact.**

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) mod avx2;
#[cfg(feature = "cuda")]
pub mod cuda;

use crate::input::check_len;
use crate::{Implementation, Input, Result};
use nvfp4_spec::matrix::Matrix;
use nvfp4_spec::{Specials, scale};

/// The maxima to compute, any of them in one call.
#[derive(Debug, Default)]
pub struct Outputs<'a> {
    /// The maximum over everything.
    pub tensor: Option<&'a mut f32>,
    /// One per row.
    pub rows: Option<&'a mut [f32]>,
    /// One per column.
    pub cols: Option<&'a mut [f32]>,
}

/// Computes the maxima in `outputs`. NaN is ignored with kernel specials and wins with reference
/// specials.
pub fn amax(implementation: Implementation, x: &Input<'_>, specials: Specials, outputs: Outputs<'_>) -> Result<()> {
    if let Some(rows) = &outputs.rows {
        check_len("row amax", x.rows(), rows.len())?;
    }
    if let Some(cols) = &outputs.cols {
        check_len("column amax", x.cols(), cols.len())?;
    }
    match implementation {
        Implementation::Scalar => scalar(x, specials, outputs),
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx2(token) => avx2::amax(token, x, specials, outputs),
        #[cfg(target_arch = "aarch64")]
        Implementation::Neon(token) => avx2::amax(token, x, specials, outputs),
        #[cfg(target_arch = "x86_64")]
        Implementation::Avx512(token) => avx2::amax(token.avx2(), x, specials, outputs),
        #[cfg(feature = "cuda")]
        Implementation::Cuda(device) => cuda::on_host(device, x, specials, outputs)?,
    }
    Ok(())
}

fn scalar(x: &Input<'_>, specials: Specials, outputs: Outputs<'_>) {
    let matrix = x.to_matrix();
    if let Some(tensor) = outputs.tensor {
        *tensor = scale::amax(matrix.data(), specials);
    }
    let per_row = |matrix: &Matrix, out: &mut [f32]| {
        out.iter_mut().enumerate().for_each(|(r, amax)| *amax = scale::amax(matrix.row(r), specials));
    };
    if let Some(rows) = outputs.rows {
        per_row(&matrix, rows);
    }
    if let Some(cols) = outputs.cols {
        per_row(&matrix.transpose(), cols);
    }
}
