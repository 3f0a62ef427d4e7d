//! The accumulators of FP8 tensor cores.

/// How precisely a GPU may add the products of two FP8 operands. Hopper's FP8 tensor cores are
/// twice as fast as its bf16 ones, and add in fewer bits.
///
/// The model, which tests compare with the chip: an instruction adds 32 products and its
/// accumulator. It aligns all 33 to the largest and cuts off what lies below 2⁻¹³ of that one's
/// power of two, and the sum has as many bits.
///
/// A CPU, and a GPU that multiplies in another way, add in binary32 whatever is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Accumulator {
    /// In binary32, within [`bound`](super::bound).
    #[default]
    Precise,
    /// Every 128 products the tensor cores' sum is added to one in binary32 and begins anew:
    /// TransformerEngine's `use_split_accumulator`.
    Split,
    /// The tensor cores' own sum to the end.
    Fast,
}

/// How many products the tensor cores add before a split accumulator takes their sum.
pub const SPLIT: usize = 128;
/// How many products an instruction adds.
const PRODUCTS: usize = 32;

impl Accumulator {
    /// How far a sum may be from the exact one, given the sum of the products' magnitudes.
    ///
    /// An instruction has 33 summands, and each loses less than 2⁻¹³ of the largest, which is at
    /// most the magnitude; so does its sum. That is 34·2⁻¹³ of the magnitude for each instruction.
    /// A split sum of 128 products has four of them, and the magnitudes of its parts add up to the
    /// whole, so they lose 136·2⁻¹³ of it together; the additions in binary32 come on top. A fast
    /// sum has K/32 of them.
    ///
    /// ```
    /// use nvfp4_spec::gemm::{Accumulator, bound};
    ///
    /// let [precise, split, fast] =
    ///     [Accumulator::Precise, Accumulator::Split, Accumulator::Fast].map(|sums| sums.bound(4096, 1.0));
    /// assert_eq!(precise, bound(4096, 1.0));
    /// assert!(precise < split && split < 0.018 && fast > 0.5);
    /// ```
    pub fn bound(self, k: usize, magnitude: f64) -> f64 {
        let instructions = |k: usize| 34.0 * 2f64.powi(-13) * k.div_ceil(PRODUCTS) as f64;
        let binary32 = super::bound(k.div_ceil(SPLIT), magnitude);
        match self {
            Accumulator::Precise => super::bound(k, magnitude),
            Accumulator::Split => instructions(k.min(SPLIT)) * magnitude + binary32,
            Accumulator::Fast => instructions(k) * magnitude + binary32,
        }
    }
}
