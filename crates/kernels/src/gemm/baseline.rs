//! The binary32 product of the `gemm` crate, which benchmarks compare ours with.

/// `out = A·Bᵀ` for `a` [m, k] and `b` [n, k], on all threads of the current rayon pool.
///
/// # Panics
///
/// If a length does not fit the shape.
pub fn f32(a: &[f32], b: &[f32], (m, n, k): (usize, usize, usize), out: &mut [f32]) {
    assert!(a.len() == m * k && b.len() == n * k && out.len() == m * n, "lengths fit the shape");
    let (rows, steps) = ([k as isize, n as isize], 1);
    let threads = gemm::Parallelism::Rayon(0);
    // SAFETY: the lengths were checked against the strides: rows of A and B are k apart, rows of
    // the output n.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            steps,
            rows[1],
            false,
            a.as_ptr(),
            steps,
            rows[0],
            b.as_ptr(),
            rows[0],
            steps,
            0.0,
            1.0,
            false,
            false,
            false,
            threads,
        );
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_small_product() {
        let mut out = [0.0; 6];
        super::f32(&[1.0, 2.0, 3.0, 4.0], &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0], (2, 3, 2), &mut out);
        assert_eq!(out, [1.0, 2.0, 3.0, 3.0, 4.0, 7.0]);
    }
}
