//! The token that proves the CPU has AVX-512 with the dot products of bytes. On ARM there is none.

#[cfg(target_arch = "x86_64")]
use crate::avx2::Avx2;

/// What no ARM CPU has.
#[cfg(target_arch = "aarch64")]
#[derive(Clone, Copy, Debug)]
pub(crate) enum Avx512 {}

/// Proof that this CPU has AVX-512 (F, BW, VL, VNNI), and AVX2; it may have BF16 too.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Avx512 {
    avx2: Avx2,
    bf16: bool,
}

#[cfg(target_arch = "x86_64")]
impl Avx512 {
    /// The token, if the CPU has the instructions.
    pub fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        let bf16 = is_x86_feature_detected!("avx512bf16");
        Avx2::detect().filter(|_| has_all).map(|avx2| Avx512 { avx2, bf16 })
    }

    /// The proof of AVX2 in it.
    pub fn avx2(self) -> Avx2 {
        self.avx2
    }

    /// Whether it also proves the products of bf16.
    pub fn has_bf16(self) -> bool {
        self.bf16
    }
}
