//! What a tensor that is not finite is reported as.

use std::fmt;

/// The first tensor of a step that was not finite.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// The step, from 0.
    pub step: u64,
    /// The module, or the parameter.
    pub module: String,
    /// Which of its tensors: `input`, `weight`, `output`, `grad_output`, …
    pub statistic: String,
    /// Where in that tensor, as a matrix.
    pub index: Vec<usize>,
    /// NaN or an infinity.
    pub value: f32,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { step, module, statistic, index, value } = self;
        write!(f, "{statistic} of {module} at step {step}: {value} at index {index:?}")
    }
}
