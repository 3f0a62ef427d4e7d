//! FP8 as it is stored: which elements share a scale, and their values.

use super::folder::Located;
use super::form::Eight;
use nvfp4_spec::e4m3;
use safetensors::Dtype;
use std::sync::LazyLock;

/// The kind of scales of an FP8 weight of this shape, by the shape of the tensor that holds them.
pub(super) fn kind(rows: usize, cols: usize, scale: &Located<'_>) -> Option<Eight> {
    let blocks = Eight::Block.scales(rows, cols);
    match (scale.info.dtype, &scale.info.shape[..]) {
        (Dtype::U8, shape) => (shape == Eight::Mx.scales(rows, cols)).then_some(Eight::Mx),
        (Dtype::F8_E8M0, &[tall, wide] | &[tall, 1, wide, 1]) => ([tall, wide] == blocks).then_some(Eight::Block),
        (Dtype::F32 | Dtype::BF16 | Dtype::F16, shape) => match *shape {
            [] | [1] => Some(Eight::Tensor),
            [tall] | [tall, 1] if tall == rows && rows > 1 => Some(Eight::Channel),
            [tall, wide] | [tall, 1, wide, 1] if [tall, wide] == blocks => Some(Eight::Block),
            [1, 1] => Some(Eight::Tensor),
            _ => None,
        },
        _ => None,
    }
}

/// The values of rows of codes, `fl(code · scale)`. Scales begin with those of the first row.
pub(super) fn decode(eight: Eight, first_row: usize, cols: usize, codes: &[u8], scales: &[f32], out: &mut [f32]) {
    let (table, per_row) = (&*VALUES, eight.scales(1, cols)[1]);
    let wide = match eight {
        Eight::Tensor | Eight::Channel => cols,
        Eight::Block => Eight::BLOCK,
        Eight::Mx => Eight::MX_BLOCK,
    };
    for (i, (row, out)) in codes.chunks_exact(cols).zip(out.chunks_exact_mut(cols)).enumerate() {
        let band = match eight {
            Eight::Tensor => 0,
            Eight::Channel | Eight::Mx => i,
            Eight::Block => (first_row + i) / Eight::BLOCK - first_row / Eight::BLOCK,
        };
        let scales = &scales[band * per_row..][..per_row];
        for ((row, out), scale) in row.chunks(wide).zip(out.chunks_mut(wide)).zip(scales) {
            row.iter().zip(out).for_each(|(&b, v)| *v = table[usize::from(b)] * scale);
        }
    }
}

/// The value of every E4M3 byte.
static VALUES: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|byte| e4m3::decode(byte as u8)));
