//! Largest magnitudes with AVX2, on all threads: integer maxima, so the order does not matter.

use super::Outputs;
use crate::avx2::{Avx2, largest, load, magnitudes, max, store, value_of, zero};
use crate::{Input, Values};
use nvfp4_spec::{BLOCK, Element, Specials};
use rayon::prelude::*;

pub(super) fn amax(token: Avx2, x: &Input<'_>, specials: Specials, outputs: Outputs<'_>) {
    match x.values() {
        Values::F32(values) => all(token, values, x, specials, outputs),
        Values::Bf16(values) => all(token, values, x, specials, outputs),
        Values::F16(values) => all(token, values, x, specials, outputs),
    }
}

/// Elements that one task looks at.
const TASK: usize = 1 << 18;

fn all<T: Element>(token: Avx2, values: &[T], x: &Input<'_>, specials: Specials, mut outputs: Outputs<'_>) {
    let (rows, cols, stride) = (x.rows(), x.cols(), x.stride());
    if rows == 0 || cols == 0 {
        return super::scalar(x, specials, outputs);
    }
    let height = TASK.div_ceil(cols);
    let panels = rows.div_ceil(height);
    let mut row_parts: Vec<Option<&mut [f32]>> = match outputs.rows.take() {
        Some(out) => out.chunks_mut(height).map(Some).collect(),
        None => (0..panels).map(|_| None).collect(),
    };
    let with_columns = outputs.cols.is_some();
    let maxima = row_parts
        .par_iter_mut()
        .enumerate()
        .map(|(p, out)| {
            let first = p * height;
            let mut panel = Panel { tensor: 0, cols: vec![T::default(); if with_columns { cols } else { 0 }] };
            for r in first..rows.min(first + height) {
                let row = &values[r * stride..][..cols];
                // SAFETY: an Avx2 token is only made after detection.
                let bits = unsafe { row_amax(token, row, specials, &mut panel.cols) };
                panel.tensor = panel.tensor.max(bits);
                if let Some(out) = out {
                    out[r - first] = value_of(bits, T::PRECISION);
                }
            }
            panel
        })
        .reduce_with(|mut a, b| {
            a.tensor = a.tensor.max(b.tensor);
            for (a, b) in a.cols.iter_mut().zip(b.cols) {
                if b.to_f32().to_bits() > a.to_f32().to_bits() {
                    *a = b;
                }
            }
            a
        })
        .expect("there is at least one row");
    if let Some(tensor) = outputs.tensor {
        *tensor = value_of(maxima.tensor, T::PRECISION);
    }
    if let Some(out) = outputs.cols {
        for (out, m) in out.iter_mut().zip(&maxima.cols) {
            *out = m.to_f32();
        }
    }
}

struct Panel<T> {
    tensor: u32,
    cols: Vec<T>,
}

/// The bits of a row's largest magnitude. If `cols` is not empty, it also collects a maximum per
/// column.
#[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma,f16c"))]
#[cfg_attr(target_arch = "aarch64", target_feature(enable = "neon"))]
pub(crate) fn row_amax<T: Element>(_: Avx2, row: &[T], specials: Specials, cols: &mut [T]) -> u32 {
    let (blocks, tail) = row.as_chunks::<BLOCK>();
    let mut all = [zero(); 4];
    if cols.is_empty() {
        let (fours, rest) = blocks.as_chunks::<4>();
        for four in fours {
            for (m, x) in all.iter_mut().zip(four) {
                *m = max::<T>(*m, magnitudes::<T>(load(x), specials));
            }
        }
        for x in rest {
            all[0] = max::<T>(all[0], magnitudes::<T>(load(x), specials));
        }
    } else {
        for (x, column) in blocks.iter().zip(cols.as_chunks_mut::<BLOCK>().0) {
            let m = magnitudes::<T>(load(x), specials);
            all[0] = max::<T>(all[0], m);
            store(max::<T>(load(column), m), column);
        }
    }
    if !tail.is_empty() {
        let mut padded = [T::default(); BLOCK];
        padded[..tail.len()].copy_from_slice(tail);
        let m = magnitudes::<T>(load(&padded), specials);
        all[0] = max::<T>(all[0], m);
        if !cols.is_empty() {
            let rest = cols.as_chunks_mut::<BLOCK>().1;
            let mut column = [T::default(); BLOCK];
            column[..rest.len()].copy_from_slice(rest);
            store(max::<T>(load(&column), m), &mut padded);
            rest.copy_from_slice(&padded[..rest.len()]);
        }
    }
    largest::<T>(max::<T>(max::<T>(all[0], all[1]), max::<T>(all[2], all[3])))
}
