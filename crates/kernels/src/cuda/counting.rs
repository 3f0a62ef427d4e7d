//! How kernels count the blocks of a matrix.

use nvfp4_spec::BLOCK;

/// Whether the blocks of `rows` rows of `cols` elements fit a 31-bit index, which is what kernels
/// use.
pub(crate) fn countable(rows: usize, cols: usize) -> bool {
    rows.checked_mul(cols.div_ceil(BLOCK)).is_some_and(|blocks| blocks < 1 << 31)
}

/// A multiplier `m` and a shift `s` with `n / d = (n·m >> 32) >> s` for every n < 2³¹; (0, 0) for d
/// = 1.
///
/// With l = ceil(log₂ d) and m = ceil(2^(31+l) / d), m·d exceeds 2^(31+l) by less than 2^l, too
/// little to show.
pub(crate) fn divisor(d: usize) -> (u32, u32) {
    let l = d.next_power_of_two().trailing_zeros();
    if l == 0 { (0, 0) } else { ((1u64 << (31 + l)).div_ceil(d as u64) as u32, l - 1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_counted_in_31_bits() {
        let most = (1 << 31) - 1;
        for (rows, cols) in [(most, 16), (1, most * 16), (most, 1), (0, usize::MAX), (usize::MAX, 0)] {
            assert!(countable(rows, cols), "{rows} × {cols}");
        }
        for (rows, cols) in [(most, 17), (1, most * 16 + 1), (most + 1, 1), (usize::MAX, usize::MAX)] {
            assert!(!countable(rows, cols), "{rows} × {cols}");
        }
    }

    #[test]
    fn multiplications_divide() {
        for d in (1..200).chain([1000, 6144 / 16, 65535, 65536, 65537, (1 << 27) - 1, 1 << 30, (1 << 31) - 1]) {
            let (magic, shift) = divisor(d);
            for n in [0, 1, d - 1, d, d + 1, 2 * d - 1, 7 * d + 3, 1 << 30, (1 << 31) - 2, (1 << 31) - 1] {
                let n = n as u64;
                if n < 1 << 31 {
                    let quotient = if magic == 0 { n } else { ((n * u64::from(magic)) >> 32) >> shift };
                    assert_eq!(quotient, n / d as u64, "{n} / {d}");
                }
            }
        }
    }
}
