//! The forms that weights are written in, side by side in one checkpoint.

use super::target::Target;
use crate::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// Which elements of an FP8 weight share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Eight {
    /// All of them: one 32-bit number.
    Tensor,
    /// Each row, an output channel, has a number of its own.
    Channel,
    /// Blocks of 128 × 128.
    Block,
    /// MXFP8: 32 of a row, and a power of two in E8M0.
    Mx,
}

impl Eight {
    /// Rows and columns that share a scale in blocks.
    pub(super) const BLOCK: usize = 128;
    /// Elements that share a scale in MXFP8.
    pub(super) const MX_BLOCK: usize = 32;

    /// How many scales the rows and the columns of a matrix have.
    pub(super) fn scales(self, rows: usize, cols: usize) -> [usize; 2] {
        match self {
            Eight::Tensor => [1, 1],
            Eight::Channel => [rows, 1],
            Eight::Block => [rows.div_ceil(Eight::BLOCK), cols.div_ceil(Eight::BLOCK)],
            Eight::Mx => [rows, cols.div_ceil(Eight::MX_BLOCK)],
        }
    }

    /// What the number of columns must be a multiple of.
    pub(super) fn columns(self) -> usize {
        match self {
            Eight::Tensor | Eight::Channel => 1,
            Eight::Block => Eight::BLOCK,
            Eight::Mx => Eight::MX_BLOCK,
        }
    }
}

impl fmt::Display for Eight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Eight::Tensor => "FP8 per tensor",
            Eight::Channel => "FP8 per channel",
            Eight::Block => "FP8 in blocks of 128 x 128",
            Eight::Mx => "MXFP8",
        })
    }
}

/// The form that a rule gives to weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Form {
    /// NVFP4; activations are in NVFP4 too where their scales are given.
    Nvfp4,
    /// NVFP4 for weights and activations; their scales must be given.
    W4A4,
    /// NVFP4 for weights alone, also where scales of activations are given.
    W4A16,
    /// FP8 as the target's readers have it by default: per tensor for ModelOpt, per channel for
    /// compressed-tensors.
    Fp8,
    /// FP8 with scales of this kind.
    Eight(Eight),
    /// MXFP4, where a weight is MXFP4 already.
    MxFp4,
    /// As it is: FP8, MXFP8, MXFP4 and NVFP4 keep their bytes.
    Keep,
}

impl Form {
    const WORDS: [(&'static str, Form); 10] = [
        ("nvfp4", Form::Nvfp4),
        ("nvfp4-w4a4", Form::W4A4),
        ("nvfp4-w4a16", Form::W4A16),
        ("fp8", Form::Fp8),
        ("fp8-tensor", Form::Eight(Eight::Tensor)),
        ("fp8-channel", Form::Eight(Eight::Channel)),
        ("fp8-block", Form::Eight(Eight::Block)),
        ("mxfp8", Form::Eight(Eight::Mx)),
        ("mxfp4", Form::MxFp4),
        ("keep", Form::Keep),
    ];

    /// The kind of scales, for FP8.
    pub(super) fn eight(self, target: Target) -> Option<Eight> {
        match self {
            Form::Eight(eight) => Some(eight),
            Form::Fp8 if target == Target::CompressedTensors => Some(Eight::Channel),
            Form::Fp8 => Some(Eight::Tensor),
            Form::Nvfp4 | Form::W4A4 | Form::W4A16 | Form::MxFp4 | Form::Keep => None,
        }
    }
}

impl FromStr for Form {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Form::WORDS.iter().find(|(word, _)| *word == text);
        found.map(|(_, form)| *form).ok_or_else(|| {
            let words: Vec<&str> = Form::WORDS.iter().map(|(word, _)| *word).collect();
            Error::Refused(format!("expected a form ({}), got '{text}'", words.join(", ")))
        })
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = Form::WORDS.iter().find(|(_, form)| form == self);
        f.write_str(word.map_or("", |(word, _)| word))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_have_one_word_each() {
        for (word, form) in Form::WORDS {
            assert_eq!((word.parse::<Form>().unwrap(), form.to_string().as_str()), (form, word));
        }
        let error = "fp16".parse::<Form>().unwrap_err().to_string();
        assert!(error.starts_with("expected a form (nvfp4, nvfp4-w4a4,") && error.ends_with("got 'fp16'"), "{error}");
    }
}
