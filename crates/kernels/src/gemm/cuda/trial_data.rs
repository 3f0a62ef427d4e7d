//! The operands of trials: every code, scales of all sizes, and sums that tell a short accumulator
//! from one in binary32.

use super::product_kind::ProductKind;
use crate::gemm::Operand as HostOperand;
use nvfp4_spec::fp8::{self, Format, MX_BLOCK, Scales, Tile};
use nvfp4_spec::gemm::Operand;
use nvfp4_spec::matrix;
use nvfp4_spec::philox::philox4x32;
use nvfp4_spec::scale::Unit;
use nvfp4_spec::{BLOCK, Bound, GlobalScale, e4m3, e8m0};

/// Sizes of all products. Swizzled scales of A have two tiles of rows; all have padding.
const M: usize = 136;
const N: usize = 64;
const K: usize = 288;

/// An operand in host memory.
pub(super) enum Factor {
    Nvfp4(matrix::Quantized),
    Fp8(fp8::Quantized),
}

impl Factor {
    /// As the rule takes it.
    pub fn operand(&self) -> Operand<'_> {
        match self {
            Factor::Nvfp4(q) => Operand::Nvfp4(q.view()),
            Factor::Fp8(q) => Operand::Fp8(q.view()),
        }
    }

    /// As it is copied to a GPU.
    pub fn on_host(&self) -> HostOperand<'_> {
        match self {
            Factor::Nvfp4(q) => HostOperand::Nvfp4(q.view()),
            Factor::Fp8(q) => HostOperand::Fp8(q.view()),
        }
    }
}

/// Which operand of a product.
#[derive(Clone, Copy, PartialEq)]
enum Place {
    Left,
    Right,
}

impl Place {
    fn rows(self) -> usize {
        match self {
            Place::Left => M,
            Place::Right => N,
        }
    }

    /// A number for each index, the same in every run.
    fn random(self, index: usize, what: u32) -> u32 {
        philox4x32([index as u32, what, 0, 0], [self.rows() as u32, 2026])[0]
    }
}

/// The products of a kind.
pub(super) fn cases(kind: ProductKind) -> Vec<(Factor, Factor)> {
    use Format::{E4m3, E5m2};
    use GlobalScale::{PerRow, PerTensor};
    use Place::{Left, Right};
    let mx = |a: (Format, Tile), b: (Format, Tile)| (mxfp8(Left, a), mxfp8(Right, b));
    match kind {
        ProductKind::Nvfp4 => vec![(nvfp4(Left, PerTensor), nvfp4(Right, PerTensor))],
        ProductKind::Nvfp4RowScaled => vec![
            (nvfp4(Left, PerRow), nvfp4(Right, PerTensor)),
            (nvfp4(Left, PerTensor), nvfp4(Right, PerRow)),
            (nvfp4(Left, PerRow), nvfp4(Right, PerRow)),
        ],
        ProductKind::Mxfp8 => vec![
            mx((E4m3, Tile::Row32), (E4m3, Tile::Row32)),
            mx((E4m3, Tile::Row32), (E4m3, Tile::Column32)),
            mx((E4m3, Tile::Column32), (E4m3, Tile::Row32)),
            mx((E4m3, Tile::Column32), (E4m3, Tile::Column32)),
            mx((E5m2, Tile::Row32), (E4m3, Tile::Row32)),
        ],
        ProductKind::Fp8Split | ProductKind::Fp8Fast => vec![
            (tensor(Left, E4m3), tensor(Right, E4m3)),
            (tensor(Left, E5m2), tensor(Right, E4m3)),
            (tensor(Left, E4m3), tensor(Right, E5m2)),
        ],
    }
}

/// Any codes and scales from 0 to 448. The first output is a sum of 2¹⁰ and many times 2⁻¹⁰; a scale
/// of the last row of A is NaN.
fn nvfp4(place: Place, global: GlobalScale) -> Factor {
    let (rows, blocks) = (place.rows(), K / BLOCK);
    let mut codes: Vec<u8> = (0..rows * K / 2).map(|i| place.random(i, 1) as u8).collect();
    let mut scales: Vec<u8> = (0..rows * blocks).map(|i| (place.random(i, 2) % 0x7F) as u8).collect();
    let (half, one, four) = (0x1, 0x2, 0x6);
    match place {
        Place::Left => {
            codes[..K / 2].fill(half << 4 | half);
            codes[..BLOCK / 2].fill(0);
            codes[0] = four;
            scales[..blocks].fill(e4m3::encode(e4m3::MIN_POSITIVE));
            scales[0] = e4m3::encode(256.0);
            scales[rows * blocks - 1] = e4m3::NAN_BYTE;
        }
        Place::Right => {
            codes[..K / 2].fill(one << 4 | one);
            scales[..blocks].fill(e4m3::encode(1.0));
        }
    }
    let stored = (0..global.count(rows)).map(|i| 100.0 * (1 + i % 7) as f32).collect();
    let unit = Unit::Amax(Bound::E448);
    Factor::Nvfp4(matrix::Quantized { rows, cols: K, codes, scales, stored, global, unit })
}

/// Codes without NaN and infinity.
fn finite(format: Format, byte: u32) -> u8 {
    if format.decode(byte as u8).is_finite() { byte as u8 } else { format.encode(1.0) }
}

/// Powers of two that the blocks of A along K have and those of B lack: they leave the products, and
/// show whether scales far from 1 are multiplied.
const SHIFTS: [i32; 4] = [0, 60, -90, 90];

/// Any codes and scales within 2⁸ of a shift, otherwise as [`nvfp4`].
fn mxfp8(place: Place, (format, tile): (Format, Tile)) -> Factor {
    let (rows, blocks) = (place.rows(), K / MX_BLOCK);
    let shift = |block: usize| match place {
        Place::Left => SHIFTS[block % SHIFTS.len()],
        Place::Right => -SHIFTS[block % SHIFTS.len()],
    };
    let scale = |block: usize, power: i32| (i32::from(e8m0::encode_up(1.0)) + shift(block) + power) as u8;
    let mut codes: Vec<u8> = (0..rows * K).map(|i| finite(format, place.random(i, 3))).collect();
    let mut scales: Vec<u8> =
        (0..rows * blocks).map(|i| scale(i % blocks, (place.random(i, 4) % 17) as i32 - 8)).collect();
    let one = format.encode(1.0);
    codes[..K].fill(one);
    let first = |block: usize| match (place, block) {
        (Place::Left, 0) => 10,
        (Place::Left, _) => -10,
        (Place::Right, _) => 0,
    };
    scales[..blocks].iter_mut().enumerate().for_each(|(block, byte)| *byte = scale(block, first(block)));
    if place == Place::Left {
        codes[1..MX_BLOCK].fill(0);
        scales[rows * blocks - 1] = e8m0::NAN_BYTE;
    }
    let (codes, scales, rows, cols) = match tile {
        Tile::Column32 => (transposed(&codes, rows), transposed(&scales, rows), K, rows),
        _ => (codes, scales, rows, K),
    };
    Factor::Fp8(fp8::Quantized { rows, cols, format, tile, codes, scales: Scales::E8m0(scales) })
}

fn transposed(bytes: &[u8], rows: usize) -> Vec<u8> {
    let cols = bytes.len() / rows;
    (0..bytes.len()).map(|i| bytes[i % rows * cols + i / rows]).collect()
}

/// Any codes, one scale.
fn tensor(place: Place, format: Format) -> Factor {
    let rows = place.rows();
    let codes = (0..rows * K).map(|i| finite(format, place.random(i, 5))).collect();
    let scales = Scales::F32(vec![if place == Place::Left { 0.37 } else { 1.25 }]);
    Factor::Fp8(fp8::Quantized { rows, cols: K, format, tile: Tile::Tensor, codes, scales })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A trial that lacks a code would not notice that it is read wrongly.
    #[test]
    fn every_code_and_scale_is_there() {
        let Factor::Nvfp4(q) = nvfp4(Place::Right, GlobalScale::PerTensor) else { panic!("NVFP4") };
        assert!((0..=255).all(|byte| q.codes.contains(&byte)) && (0..0x7F).all(|byte| q.scales.contains(&byte)));
        for format in Format::ALL {
            let Factor::Fp8(q) = mxfp8(Place::Left, (format, Tile::Row32)) else { panic!("MXFP8") };
            let finite = (0..=255).filter(|&byte| format.decode(byte).is_finite());
            assert!(finite.into_iter().all(|byte| q.codes.contains(&byte)));
        }
    }

    #[test]
    fn both_directions_of_a_matrix_are_the_same_operand() {
        let factors = [Tile::Row32, Tile::Column32].map(|tile| mxfp8(Place::Left, (Format::E4m3, tile)));
        let [Factor::Fp8(row), Factor::Fp8(column)] = factors else { panic!("MXFP8") };
        let (row, column) = (row.view(), column.view());
        for (i, k) in (0..M).flat_map(|i| (0..K).map(move |k| (i, k))) {
            assert_eq!(row.value(i, k).to_bits(), column.value(k, i).to_bits(), "({i}, {k})");
        }
    }
}
