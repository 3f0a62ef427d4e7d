//! The operations of 256-bit vectors that the twins use, each on two NEON registers. They do what
//! x86-64 does under these names, bit for bit, but for the sign of a NaN that an operation makes.
//! Names, arguments and order of lanes are Intel's: most operations act on the two halves apart.

mod floats;
mod integers;
mod moves;

pub(crate) use floats::*;
pub(crate) use integers::*;
pub(crate) use moves::*;

use std::arch::aarch64::*;

/// Four doublewords, or other integers.
#[allow(non_camel_case_types)]
pub(crate) type __m128i = uint32x4_t;

/// Four binary32 numbers.
#[allow(non_camel_case_types)]
pub(crate) type __m128 = float32x4_t;

/// 32 bytes of integers.
#[allow(non_camel_case_types)]
#[derive(Clone, Copy)]
pub(crate) struct __m256i(pub __m128i, pub __m128i);

/// Eight binary32 numbers.
#[allow(non_camel_case_types)]
#[derive(Clone, Copy)]
pub(crate) struct __m256(pub __m128, pub __m128);

/// Operations on integers, half by half: what the lanes are taken as, and NEON's instruction.
macro_rules! lanes {
    ($($name:ident, $narrow:ident: $to:ident, $op:ident, $from:ident;)*) => { $(
        #[target_feature(enable = "neon")]
        #[inline]
        #[allow(dead_code)] // not every operation is used in both widths
        pub(crate) fn $narrow(a: __m128i, b: __m128i) -> __m128i {
            $from($op($to(a), $to(b)))
        }
        #[target_feature(enable = "neon")]
        #[inline]
        #[allow(dead_code)]
        pub(crate) fn $name(a: __m256i, b: __m256i) -> __m256i {
            __m256i($narrow(a.0, b.0), $narrow(a.1, b.1))
        }
    )* };
}
use lanes;

/// As it is.
#[target_feature(enable = "neon")]
#[inline]
fn same(x: __m128i) -> __m128i {
    x
}
