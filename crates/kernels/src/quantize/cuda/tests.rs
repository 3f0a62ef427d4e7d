//! What the kernels rely on, checked on the host.

use super::launch::Params;
use super::*;
use crate::cuda::text::{ELEMENTS, assemble};
use nvfp4_spec::{Specials, e2m1, stochastic};

#[test]
fn parameters_have_the_sizes_that_the_kernels_expect() {
    assert_eq!((size_of::<DirectionParams>(), size_of::<Params>()), (112, 296));
}

#[test]
fn the_blocks_and_the_rows_of_columns_are_counted_in_31_bits() {
    let most = (1 << 31) - 1;
    // Of few columns the row direction has more blocks than the column direction.
    assert!(countable_along_columns(most, 1) && countable_along_columns(1 << 30, 17));
    assert!(countable_along_columns(usize::MAX, 0) && countable_along_columns(0, usize::MAX));
    assert!(!countable_along_columns(most + 1, 1) && !countable_along_columns(most, 16));
}

/// Every mantissa, at exponents from the smallest to the largest that regular scalings lead to:
/// reciprocals without a division's checks are those of a division.
#[test]
fn reciprocals_round_as_divisions_do() {
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(reason) => return nvfp4_testing::missing(nvfp4_testing::Need::Gpu, reason),
    };
    let kernel = "struct Params { u32* wrong; };\n\
        extern \"C\" __global__ void compare(Params p) {\n\
            u32 mantissa = blockIdx.x * 256 + threadIdx.x;\n\
            for (u32 exponent = 27; exponent <= 227; exponent += 25) {\n\
                float x = from_bits(exponent << 23 | mantissa);\n\
                if (reciprocal(x) != 1.0f / x) atomicAdd(p.wrong, 1);\n\
            }\n\
        }\n";
    let text = assemble("constexpr bool WHOLE = true, GROUPED = false;\n", &[ELEMENTS, BLOCK_TEXT, kernel]);
    let kernel = device.kernel("reciprocals", "compare", &text).unwrap();
    let stream = Stream::new(device).unwrap();
    let wrong = stream.to_device(&[0u32]).unwrap();
    // SAFETY: the kernel has one address as its parameter, of one counter.
    unsafe { kernel.launch(&stream, [1 << 15, 1, 1], 256, 0, &wrong.slice().address()) }.unwrap();
    assert_eq!(stream.to_host(wrong.slice()).unwrap(), [0]);
}

/// Scaled magnitudes next to every 512th of a code, where something may change.
fn near_steps() -> impl Iterator<Item = f32> {
    (1..=3712u32).flat_map(|n| {
        let line = n as f32 / 512.0;
        let y = if line < 4.0 {
            line / 2.0
        } else if line < 6.0 {
            line - 2.0
        } else {
            line * 2.0 - 8.0
        };
        (y.to_bits() - 64..=y.to_bits() + 64).map(f32::from_bits)
    })
}

/// The bits of a scaled magnitude that is cut off to binary16 where 1 is the smallest normal
/// number: 512 for each code.
fn cut_off(y: f32) -> u32 {
    if y < 1.0 { (y * 1024.0) as u32 } else { 1024 + ((y.to_bits() - 1f32.to_bits()) >> 13) }
}

#[test]
fn magnitudes_that_are_cut_off_have_the_codes_of_the_rule() {
    for y in near_steps() {
        // `with_ties`; its product rounds to the number before.
        let up = y.mul_add(4.0 / 11.0 * f32::EPSILON, y);
        let twice = cut_off(up.next_down()) >> 8;
        assert!(twice <= 14, "{y}");
        assert_eq!((twice + 1) >> 1, u32::from(e2m1::encode(y, Specials::Kernel)), "{y}");
    }
}

#[test]
fn magnitudes_that_are_cut_off_round_as_the_stochastic_rule() {
    for y in near_steps() {
        let sum = f64::from(y) + 2f64.powi(-26);
        let rounded = sum as f32;
        let bits = cut_off(if f64::from(rounded) > sum { rounded.next_down() } else { rounded });
        // The random byte with which the next code begins, its neighbours and the extremes.
        let first = (512 - bits % 512).div_ceil(2);
        for r in [0, first.saturating_sub(1), first, first + 1, 255].into_iter().filter(|&r| r < 256) {
            let code = u32::from(stochastic::encode(y, r as u8, Specials::Kernel));
            assert_eq!((bits + 2 * r).min(4095) >> 9, code, "{y} with {r}");
        }
    }
}

#[test]
fn multiply_adds_round_to_the_grid() {
    for y in near_steps() {
        let c = y.max(1.0 + 2.0 * f32::EPSILON);
        let value = c.mul_add(4194304.0, c.mul_add(-4194304.0, y));
        assert_eq!(value, e2m1::decode(e2m1::encode(y, Specials::Kernel)), "{y}");
    }
}

/// Every mantissa: products by a rounded reciprocal, corrected by their remainder, are
/// quotients.
#[test]
fn corrected_products_round_as_divisions_do() {
    for by in [6.0f32, 1536.0, 2688.0] {
        let reciprocal = 1.0 / by;
        for bits in 0x3F80_0000..0x4000_0000 {
            let x = f32::from_bits(bits);
            let quotient = x * reciprocal;
            let corrected = (-by).mul_add(quotient, x).mul_add(reciprocal, quotient);
            assert!(corrected == x / by, "{x} / {by}");
        }
    }
}
