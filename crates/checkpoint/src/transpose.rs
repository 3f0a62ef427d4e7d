//! Matrices of bytes with rows and columns exchanged.

/// The transposed matrix of elements of `size` bytes.
pub(super) fn transpose(from: &[u8], rows: usize, cols: usize, size: usize, to: &mut [u8]) {
    /// A tile whose lines stay in the first-level cache.
    const TILE: usize = 64;
    for r0 in (0..rows).step_by(TILE) {
        for c0 in (0..cols).step_by(TILE) {
            for c in c0..(c0 + TILE).min(cols) {
                for r in r0..(r0 + TILE).min(rows) {
                    let (there, here) = ((c * rows + r) * size, (r * cols + c) * size);
                    to[there..there + size].copy_from_slice(&from[here..here + size]);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposed_twice_is_the_same() {
        let from: Vec<u8> = (0..70 * 131).map(|i| i as u8).collect();
        let (mut once, mut twice) = (vec![0; from.len()], vec![0; from.len()]);
        transpose(&from, 70, 131, 1, &mut once);
        assert_eq!(once[70 + 3], from[3 * 131 + 1]);
        transpose(&once, 131, 70, 1, &mut twice);
        assert_eq!(from, twice);
    }
}
