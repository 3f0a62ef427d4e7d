//! Generated matrices: each value is a function of the seed and its position, whatever the number
//! of threads.

use half::bf16;
use nvfp4_spec::philox::{philox4x32, words};
use nvfp4_spec::{Element, Result, area, zeros};
use rayon::prelude::*;

/// Standard normal values, one in 1000 of them 20 times larger.
pub fn with_outliers(rows: usize, cols: usize, seed: u64) -> Result<Vec<bf16>> {
    let value = |i: usize| {
        let [low, high] = words(i as u64);
        let [a, b, c, _] = philox4x32([low, high, 0, 0xDE30], words(seed));
        let [normal, _] = normals(a, b);
        bf16::from_f64(if c % 1000 == 0 { 20.0 * normal } else { normal })
    };
    let mut values = room(rows, cols)?;
    values.par_iter_mut().enumerate().for_each(|(i, to)| *to = value(i));
    Ok(values)
}

/// Standard normal values.
pub fn standard<T: Element>(rows: usize, cols: usize, seed: u64) -> Result<Vec<T>> {
    /// Values that a thread makes at a time; four of them come from one call of Philox.
    const PART: usize = 1 << 14;
    let mut values = room(rows, cols)?;
    values.par_chunks_mut(PART).enumerate().for_each(|(part, values)| {
        for (i, four) in values.chunks_mut(4).enumerate() {
            let [low, high] = words((part * (PART / 4) + i) as u64);
            let [a, b, c, d] = philox4x32([low, high, 0, 0x5D40], words(seed));
            let ([v0, v1], [v2, v3]) = (normals(a, b), normals(c, d));
            for (to, from) in four.iter_mut().zip([v0, v1, v2, v3]) {
                *to = T::from_f32(from as f32);
            }
        }
    });
    Ok(values)
}

/// A matrix of zeros, or an error if there is no memory for it.
fn room<T: Element>(rows: usize, cols: usize) -> Result<Vec<T>> {
    zeros(area(rows, cols)?, rows, cols)
}

/// Two independent standard normal values from two random words (Box–Muller).
fn normals(a: u32, b: u32) -> [f64; 2] {
    let uniform = |word: u32| (f64::from(word) + 0.5) / 4294967296.0;
    let (radius, angle) = ((-2.0 * uniform(a).ln()).sqrt(), std::f64::consts::TAU * uniform(b));
    [radius * angle.cos(), radius * angle.sin()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn standard_values_have_mean_0_and_variance_1_and_depend_on_the_seed_alone() {
        let (rows, cols) = (300, 1001);
        let values: Vec<f32> = standard(rows, cols, 3).unwrap();
        let n = (rows * cols) as f64;
        let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let variance = values.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n;
        // Five standard deviations of either estimate.
        assert!(mean.abs() < 5.0 / n.sqrt() && (variance - 1.0).abs() < 5.0 * (2.0 / n).sqrt(), "{mean} {variance}");
        let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        assert!(one_thread.install(|| standard::<f32>(rows, cols, 3)).unwrap() == values);
        assert!(standard::<f32>(rows, cols, 4).unwrap() != values);
        assert!(
            standard::<f32>(100, cols, 3).unwrap()[..] == values[..100 * cols],
            "more rows leave the first ones as they are"
        );
    }
}
