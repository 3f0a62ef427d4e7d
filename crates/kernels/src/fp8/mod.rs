//! FP8 and MXFP8 beside NVFP4: the rules of [`nvfp4_spec::fp8`] on borrowed memory.

pub mod dequantize;
pub mod quantize;
