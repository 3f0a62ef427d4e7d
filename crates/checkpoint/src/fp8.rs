//! FP8 as it is stored: which elements share a scale, and their values.

use super::folder::Located;
use super::form::Eight;
use nvfp4_kernels::Implementation;
use nvfp4_kernels::fp8::dequantize::dequantize_row;
use nvfp4_spec::fp8::Format;
use safetensors::Dtype;
use std::num::NonZeroUsize;

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
    let (implementation, per_row) = (Implementation::best(), eight.scales(1, cols)[1]);
    let wide = match eight {
        Eight::Tensor | Eight::Channel => cols,
        Eight::Block => Eight::BLOCK,
        Eight::Mx => Eight::MX_BLOCK,
    };
    let wide = NonZeroUsize::new(wide).expect("a quantized weight has columns");
    for (i, (row, out)) in codes.chunks_exact(cols).zip(out.chunks_exact_mut(cols)).enumerate() {
        let band = match eight {
            Eight::Tensor => 0,
            Eight::Channel | Eight::Mx => i,
            Eight::Block => (first_row + i) / Eight::BLOCK - first_row / Eight::BLOCK,
        };
        let scales = &scales[band * per_row..][..per_row];
        dequantize_row(implementation, Format::E4m3, row, wide, scales, out).expect("every tile has a scale");
    }
}
