//! Weights in FP8: their scales and codes, as ModelOpt and llm-compressor make them.
//! `docs/checkpoints.md` has the rules.

use super::form::Eight;
use super::target::Target;
use super::weight::{Stored, Weight};
use nvfp4::Precision;
use nvfp4_kernels::Values;
use nvfp4_spec::fp8::Format;
use nvfp4_spec::fp8::scale::mx_byte;
use nvfp4_spec::{e4m3, e8m0};
use safetensors::Dtype;

/// How a producer rounds, for weights of one type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arithmetic {
    pub eight: Eight,
    producer: Producer,
    /// The type that the weights came in.
    precision: Precision,
    values: ScaleValues,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Producer {
    ModelOpt,
    LlmCompressor,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScaleValues {
    Any,
    /// MXFP4 has powers of two: with another, most of its values are those of FP8.
    PowersOfTwo,
}

impl Arithmetic {
    pub fn new(target: Target, weight: &Weight<'_>, eight: Eight) -> Self {
        let producer = match target {
            Target::CompressedTensors => Producer::LlmCompressor,
            _ => Producer::ModelOpt,
        };
        let values = match weight.stored {
            Stored::MxFp4 { .. } => ScaleValues::PowersOfTwo,
            _ => ScaleValues::Any,
        };
        Arithmetic { eight, producer, precision: weight.precision(), values }
    }

    /// The type that scales are stored in. llm-compressor has that of the weights.
    pub fn dtype(self) -> Dtype {
        match (self.eight, self.producer, self.precision) {
            (Eight::Mx, ..) => Dtype::U8,
            (_, Producer::LlmCompressor, Precision::Bf16) => Dtype::BF16,
            (_, Producer::LlmCompressor, Precision::F16) => Dtype::F16,
            _ => Dtype::F32,
        }
    }

    /// How many bytes a stored scale has.
    pub fn scale_bytes(self) -> usize {
        self.dtype().bitsize() / 8
    }

    /// The scale of some elements with this amax, a multiplier.
    pub fn scale(self, amax: f32) -> f32 {
        if self.values == ScaleValues::PowersOfTwo {
            return if amax == 0.0 { 1.0 } else { e8m0::decode(mx_byte(amax, Format::E4m3).max(1)) };
        }
        match self.producer {
            // A weight of zeros has 1, where ModelOpt stops.
            Producer::ModelOpt if amax == 0.0 => 1.0,
            Producer::ModelOpt => (amax / e4m3::MAX).max(f32::MIN_POSITIVE),
            Producer::LlmCompressor => match self.precision.round(amax / e4m3::MAX) {
                0.0 => match self.precision {
                    Precision::F32 => f32::EPSILON,
                    Precision::Bf16 => half::bf16::EPSILON.to_f32(),
                    Precision::F16 => half::f16::EPSILON.to_f32(),
                },
                scale => scale,
            },
        }
    }

    /// The E8M0 byte of 32 elements with this amax.
    pub fn mx_byte(self, amax: f32) -> u8 {
        match self.producer {
            Producer::ModelOpt => mx_byte(amax, Format::E4m3),
            // The exponent of the amax, which counts as the next power of two from 1.75 on.
            Producer::LlmCompressor => {
                let exponent = (amax.to_bits() + (1 << 21)) >> 23;
                exponent.saturating_sub(8).min(u32::from(e8m0::MAX_BYTE)) as u8
            }
        }
    }

    /// The code of an element. ModelOpt divides by the scale of a tensor in the weight's own type,
    /// and by the scales of parts in binary32; llm-compressor always in the weight's own.
    fn code(self, x: f32, scale: f32) -> u8 {
        let quotient = match (self.producer, self.eight) {
            (Producer::ModelOpt, Eight::Tensor) | (Producer::LlmCompressor, _) => self.precision.round(x / scale),
            (Producer::ModelOpt, _) => x / scale,
        };
        e4m3::encode(quotient)
    }

    /// Codes and scales of whole rows, for blocks from the first row of one on. The scale of a
    /// tensor is given.
    pub fn quantize(self, values: &Values<'_>, cols: usize, tensor: f32, codes: &mut Vec<u8>, scales: &mut Vec<f32>) {
        let rows = values.len() / cols.max(1);
        let (bands, strips) = (self.eight.scales(rows, cols)[0], self.eight.scales(rows, cols)[1]);
        let (tall, wide) = match self.eight {
            Eight::Tensor => (rows.max(1), cols.max(1)),
            Eight::Channel => (1, cols.max(1)),
            Eight::Block => (Eight::BLOCK, Eight::BLOCK),
            Eight::Mx => (1, Eight::MX_BLOCK),
        };
        codes.clear();
        codes.resize(values.len(), 0);
        scales.clear();
        for band in 0..bands {
            let rows = band * tall..((band + 1) * tall).min(rows);
            for strip in 0..strips {
                let cols_of = strip * wide..((strip + 1) * wide).min(cols);
                let places = || rows.clone().flat_map(|r| cols_of.clone().map(move |c| r * cols + c));
                let amax = || places().map(|i| values.get(i).abs()).fold(0.0, f32::max);
                let scale = match self.eight {
                    Eight::Tensor => tensor,
                    Eight::Channel | Eight::Block => self.scale(amax()),
                    Eight::Mx => e8m0::decode(self.mx_byte(amax())),
                };
                places().for_each(|i| codes[i] = self.code(values.get(i), scale));
                scales.push(scale);
            }
        }
    }

    /// Scales as they are stored.
    pub fn stored(self, scales: &[f32], bytes: &mut Vec<u8>) {
        bytes.clear();
        match self.dtype() {
            // Powers of two, the smallest of them subnormal.
            Dtype::U8 => bytes.extend(scales.iter().map(|scale| (scale.to_bits() >> 23) as u8)),
            Dtype::BF16 => bytes.extend(scales.iter().flat_map(|&s| half::bf16::from_f32(s).to_le_bytes())),
            Dtype::F16 => bytes.extend(scales.iter().flat_map(|&s| half::f16::from_f32(s).to_le_bytes())),
            _ => bytes.extend(scales.iter().flat_map(|s| s.to_le_bytes())),
        }
    }
}
