//! What stochastic rounding does with its random bytes, seen through whole quantizations: no bytes
//! are used twice, block indices have 64 bits, and rows do not depend on each other.

use nvfp4_spec::matrix::{Matrix, quantize};
use nvfp4_spec::stochastic::{OFFSETS_PER_CALL, Random, Stream};
use nvfp4_spec::{BLOCK, Mode, Rounding, e2m1};
use std::collections::HashSet;

const COLS: usize = 1024;
const BLOCKS: u64 = (COLS / BLOCK) as u64;

/// How each element of a row was rounded, +1 up and −1 down, for rows whose elements all lie
/// halfway between two codes. The first of each block holds the largest magnitude and is left out.
fn roundings(rows: usize, stream: Stream) -> Vec<Vec<i32>> {
    let row: [f32; COLS] = std::array::from_fn(|i| if i % BLOCK == 0 { 6.0 } else { 0.25 });
    let x = Matrix::new(rows, COLS, &row.repeat(rows)).unwrap();
    // With this amax every scale is 1, so that scaled values are the values.
    let q = quantize(&x, &[2688.0], &Mode::default(), Rounding::Stochastic(Random::Stream(stream))).unwrap();
    let code = |r, c| e2m1::code_at(q.view().code_row(r), c);
    let rounding = |r, c: usize| match (c % BLOCK, code(r, c)) {
        (0, 7) => None,
        (1.., 0) => Some(-1),
        (1.., 1) => Some(1),
        (_, other) => panic!("element {c} of row {r} has the code {other}"),
    };
    (0..rows).map(|r| (0..COLS).filter_map(|c| rounding(r, c)).collect()).collect()
}

#[test]
fn no_two_rows_directions_calls_or_seeds_draw_the_same_bytes() {
    let mut seen = HashSet::new();
    let streams = [
        Stream::row(7, 40),
        Stream::column(7, 40),
        Stream::row(7, 40 + OFFSETS_PER_CALL),
        Stream::row(7, 40 + (1 << 32)),
        Stream::row(8, 40),
        Stream::row(7 + (1 << 32), 40),
        Stream { first_block: 1 << 32, ..Stream::row(7, 40) },
    ];
    for stream in streams {
        for (r, row) in roundings(20, stream).into_iter().enumerate() {
            assert!(seen.insert(row), "row {r} of {stream:?} repeats");
        }
    }
}

#[test]
fn block_indices_count_on_beyond_32_bits() {
    let at = |first_block| Stream { first_block, ..Stream::row(3, 9) };
    // Two rows before block 2³², two after it, in one call and in two.
    let whole = roundings(4, at((1 << 32) - 2 * BLOCKS));
    assert_eq!(whole[2..], roundings(2, at(1 << 32)));
    assert_eq!(whole[1..3], roundings(2, at((1 << 32) - BLOCKS)));
    let from_zero = roundings(4, at(0));
    assert!(whole.iter().all(|row| !from_zero.contains(row)), "the index wrapped at 2³²");
}

#[test]
fn every_pair_of_rows_is_uncorrelated() {
    let rows = roundings(96, Stream::row(5, 0));
    let n = rows[0].len() as f64;
    let (mut pairs, mut squares) = (0.0, 0.0);
    for (i, a) in rows.iter().enumerate() {
        for (j, b) in rows[..i].iter().enumerate() {
            let sum = f64::from(a.iter().zip(b).map(|(x, y)| x * y).sum::<i32>());
            assert!(sum.abs() < 6.0 * n.sqrt(), "rows {i} and {j}: {sum} is beyond 6 deviations of {n} random signs");
            (pairs, squares) = (pairs + 1.0, squares + sum * sum / n);
        }
    }
    // Each square has mean 1 and variance below 2.
    assert!((squares - pairs).abs() < 6.0 * (2.0 * pairs).sqrt(), "{squares} for {pairs} pairs");
}
