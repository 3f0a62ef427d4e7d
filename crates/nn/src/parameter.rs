//! A parameter, and what it is before the first step.

use candle_core::Var;
use nvfp4_spec::philox::{philox4x32, words};
use rayon::prelude::*;

/// A parameter: its name in files, and its master copy.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// The module's path and the parameter's own name.
    pub name: String,
    /// What the optimizer changes.
    pub var: Var,
}

/// What a parameter is before the first step. Random values follow from the session's seed, the
/// parameter's name and the position, and from nothing else: not from the order in which modules
/// are made, nor from the machine.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Init {
    /// The same number everywhere.
    Constant(f64),
    /// Uniform between −a and a.
    Uniform(f64),
    /// Normal around 0, with this standard deviation: a sum of twelve uniform numbers, so never
    /// beyond six deviations.
    Normal(f64),
}

impl Init {
    /// The first `count` values of a parameter with this name.
    pub(crate) fn values(self, count: usize, seed: u64, name: &str) -> Vec<f64> {
        let [low, high] = words(nvfp4_files::fingerprint(name.bytes()));
        // Four numbers in [0, 1) for each call.
        let uniforms = |call: u64| {
            let [i, j] = words(call);
            philox4x32([i, j, low, high], words(seed)).map(|word| f64::from(word) / 4294967296.0)
        };
        match self {
            Init::Constant(value) => vec![value; count],
            Init::Uniform(a) => (0..count as u64).into_par_iter().map(|i| a * (2.0 * uniforms(i)[0] - 1.0)).collect(),
            Init::Normal(deviation) => (0..count as u64)
                .into_par_iter()
                .map(|i| (0..3).flat_map(|part| uniforms(3 * i + part)).sum::<f64>() - 6.0)
                .map(|normal| deviation * normal)
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn initial_values_follow_from_seed_name_and_position_alone() {
        let values = Init::Normal(2.0).values(4096, 7, "a.weight");
        assert_eq!(values[..100], Init::Normal(2.0).values(100, 7, "a.weight")[..]);
        assert_ne!(values, Init::Normal(2.0).values(4096, 8, "a.weight"));
        assert_ne!(values, Init::Normal(2.0).values(4096, 7, "b.weight"));
        let n = values.len() as f64;
        let (mean, square) = (values.iter().sum::<f64>() / n, values.iter().map(|v| v * v).sum::<f64>() / n);
        // Five standard deviations of either estimate.
        assert!(mean.abs() < 5.0 * 2.0 / n.sqrt() && (square - 4.0).abs() < 5.0 * 4.0 * (2.0 / n).sqrt());
        assert!(Init::Uniform(0.5).values(1000, 1, "x").iter().all(|v| (-0.5..0.5).contains(v)));
    }
}
