//! What can be done with NVFP4 data that has one global scale per row, and with data that has one
//! per tensor.
//!
//! In the row direction those scales belong to tokens and go wherever the tokens go. In the column
//! direction they belong to features, and each covers every token: a part of the tokens has no such
//! scale of its own.

use nvfp4::{GlobalScale, Side};
use std::fmt;

/// A use of a quantized tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Use {
    /// Decoding.
    Dequantize,
    /// A product.
    Matmul,
    /// Products of several experts in one call.
    GroupedMatmul,
    /// A product that adds to its output.
    Accumulate,
    /// A product whose output is quantized.
    QuantizedOutput,
    /// Another shape with the same last dimension.
    View,
    /// A copy.
    Copy,
    /// Some of the rows.
    SliceRows,
    /// Rows split among experts, each part quantized on its own.
    SplitRows,
    /// Quantizing with an amax that is known beforehand.
    KnownAmax,
    /// Scales in the layout of block-scaled tensor cores.
    Swizzle,
    /// Kept from the forward pass for the backward pass, on the device or off it.
    Save,
    /// A norm that quantizes its output.
    FusedNorm,
    /// An activation that quantizes its output.
    FusedActivation,
    /// Quantizing a gradient and summing it for a bias.
    FusedBiasGradient,
    /// Rows gathered from all workers (sequence parallelism).
    AllGather,
    /// Rows of a weight sharded among workers and gathered again.
    Shard,
    /// A product that runs while parts of an operand are still arriving.
    Overlap,
    /// Attention.
    Attention,
}

impl Use {
    /// All of them.
    pub const ALL: [Use; 19] = {
        use Use::*;
        [
            Dequantize,
            Matmul,
            GroupedMatmul,
            Accumulate,
            QuantizedOutput,
            View,
            Copy,
            SliceRows,
            SplitRows,
            KnownAmax,
            Swizzle,
            Save,
            FusedNorm,
            FusedActivation,
            FusedBiasGradient,
            AllGather,
            Shard,
            Overlap,
            Attention,
        ]
    };
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Use::Dequantize => "decoding",
            Use::Matmul => "a product",
            Use::GroupedMatmul => "a grouped product",
            Use::Accumulate => "a product that adds to its output",
            Use::QuantizedOutput => "a product with quantized output",
            Use::View => "a view",
            Use::Copy => "a copy",
            Use::SliceRows => "a slice of rows",
            Use::SplitRows => "rows split among experts",
            Use::KnownAmax => "quantizing with a known amax",
            Use::Swizzle => "swizzled scales",
            Use::Save => "keeping it for the backward pass",
            Use::FusedNorm => "a norm that quantizes",
            Use::FusedActivation => "an activation that quantizes",
            Use::FusedBiasGradient => "a bias gradient that quantizes",
            Use::AllGather => "gathering rows from all workers",
            Use::Shard => "sharding rows among workers",
            Use::Overlap => "a product overlapped with communication",
            Use::Attention => "attention",
        })
    }
}

/// Whether a use is possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Support {
    /// As it is.
    Yes,
    /// With the same result, in another way than usual.
    Instead(&'static str),
    /// Not at all; the text says what to do.
    No(&'static str),
}

/// Whether a direction of an NVFP4 tensor can be used in this way.
pub fn support(usage: Use, scale: GlobalScale, side: Side) -> Support {
    use GlobalScale::{PerRow, PerTensor};
    use Support::*;
    match (usage, scale, side) {
        (Use::Attention, ..) => No("attention reads FP8 and MXFP8; give its tensors one of those"),

        (
            Use::Dequantize | Use::Matmul | Use::GroupedMatmul | Use::Accumulate | Use::View | Use::Copy | Use::Swizzle,
            ..,
        ) => Yes,
        (Use::SplitRows | Use::KnownAmax | Use::Save, ..) => Yes,

        (Use::SliceRows, _, Side::Row) => Yes,
        (Use::SliceRows, _, Side::Column) => Instead("slices begin and end at multiples of 16"),

        (Use::QuantizedOutput | Use::FusedNorm | Use::FusedActivation | Use::FusedBiasGradient, PerTensor, _) => Yes,
        (Use::QuantizedOutput, PerRow, _) => Instead("the product is computed, then quantized"),
        (Use::FusedNorm, PerRow, _) => Instead("the norm is computed, then quantized"),
        (Use::FusedActivation, PerRow, _) => Instead("the activation is computed, then quantized"),
        (Use::FusedBiasGradient, PerRow, _) => Instead("the gradient is summed, then quantized"),

        (Use::AllGather | Use::Shard, PerTensor, _) => Instead("workers agree on one amax before they quantize"),
        (Use::AllGather | Use::Shard, PerRow, Side::Row) => Yes,
        (Use::AllGather, PerRow, Side::Column) => No(
            "a scale of the column direction covers every worker's rows; gather in high precision and quantize after, \
             or use one scale per tensor in the column direction",
        ),
        (Use::Shard, PerRow, Side::Column) => {
            No("a scale of the column direction covers every worker's rows; use one scale per tensor in that direction")
        }

        (Use::Overlap, PerTensor, _) => Yes,
        (Use::Overlap, PerRow, _) => No("the scales of rows that have not arrived are not known; \
             turn the overlap off or use one scale per tensor"),
    }
}
