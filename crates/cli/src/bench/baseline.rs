//! The product in binary32 by another library, to compare ours with. Builds with the feature
//! `baseline` have it, since that library takes long to build.

/// Multiplies `a`, M × K, with the transpose of `b`, N × K; sizes are (M, N, K).
pub type Multiply = fn(a: &[f32], b: &[f32], sizes: (usize, usize, usize), out: &mut [f32]);

#[cfg(feature = "baseline")]
pub const F32: Option<Multiply> = Some(nvfp4_kernels::gemm::baseline::f32);
#[cfg(not(feature = "baseline"))]
pub const F32: Option<Multiply> = None;

/// Why columns are empty.
pub const NOT_BUILT: &str = "f32 is not measured: build with `--features baseline` to have it";
