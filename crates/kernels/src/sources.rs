//! The kernel texts of all operations, for tests that compile them without a GPU.

use crate::cuda::Source;
use crate::{amax, dequantize, finite, fp8, gemm, hadamard, quantize, swizzle};

/// Texts that cover every function, element type and setting, but not every combination. Each comes
/// with its variant as text, which begins with the name of the function.
pub fn sources() -> Vec<(String, Source)> {
    let operations = [
        crate::cuda::groups_sources(),
        amax::cuda::sources(),
        quantize::cuda::sources(),
        dequantize::cuda::sources(),
        swizzle::cuda::sources(),
        hadamard::cuda::sources(),
        finite::cuda::sources(),
        gemm::cuda::sources(),
        fp8::quantize::cuda::sources(),
        fp8::dequantize::cuda::sources(),
        fp8::delayed::cuda::sources(),
    ];
    operations.concat()
}
