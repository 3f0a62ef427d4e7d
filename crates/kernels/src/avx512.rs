//! The token that proves the CPU has AVX-512 with the instructions for products of small integers and of bf16.

use crate::avx2::Avx2;

/// Proof that this CPU has AVX-512 (F, BW, VL, VNNI, BF16), and AVX2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Avx512(Avx2);

impl Avx512 {
    /// The token, if the CPU has the instructions.
    pub fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx512bf16");
        Avx2::detect().filter(|_| has_all).map(Avx512)
    }

    /// The proof of AVX2 in it.
    pub fn avx2(self) -> Avx2 {
        self.0
    }
}
