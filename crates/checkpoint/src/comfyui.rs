//! ComfyUI's form of a weight: the high nibble holds the even column, scales are swizzled in tiles of
//! 128 rows and 4 blocks, and a tensor of JSON beside them says that it is NVFP4.
//!
//! comfy-kitchen 0.2.40 pads rows to a multiple of 16. A reader cannot tell rows that were added, so
//! a weight with another number of rows is refused.

use super::dialect::Model;
use super::finding::Report;
use super::plan::Plan;
use super::weight::Stored;
use crate::{Error, Result, Setting};
use nvfp4_kernels::{Implementation, swizzle};
use nvfp4_spec::BLOCK;
use nvfp4_spec::swizzle::{TILE_COLS, TILE_ROWS};

/// The last part of a marker's name.
pub(super) const NAME: &str = "comfy_quant";
/// The text of the marker.
pub(super) const MARKER: &[u8] = br#"{"format": "nvfp4"}"#;
/// Rows whose scales are in one row of tiles.
pub(super) const ROWS: usize = TILE_ROWS;

/// The shape of the scales of a weight.
pub(super) fn scales(rows: usize, cols: usize) -> [usize; 2] {
    [rows.next_multiple_of(TILE_ROWS), (cols / BLOCK).next_multiple_of(TILE_COLS)]
}

/// An error if a weight has no form in ComfyUI.
pub(super) fn check(plan: &Plan<'_>) -> Result<()> {
    for item in plan.quantized() {
        let (module, rows) = (&item.weight.module, item.weight.rows);
        if item.weight.is_transposed() {
            let reason = format!("ComfyUI has no form for experts in one tensor, as '{module}'; use ModelOpt's");
            return Err(Error::setting(Setting::Target, reason));
        }
        if !rows.is_multiple_of(BLOCK) {
            let reason = format!("'{module}' has {rows} rows, and ComfyUI wants a multiple of 16: skip this weight");
            return Err(Error::Refused(reason));
        }
    }
    Ok(())
}

/// The codes with the even column in the high nibble.
pub(super) fn swap(codes: &[u8], swapped: &mut Vec<u8>) {
    swapped.clear();
    swapped.extend(codes.iter().map(|byte| byte.rotate_left(4)));
}

/// The scales of some rows, from the first of a tile on, in their tiles.
pub(super) fn tile(
    implementation: Implementation,
    (rows, cols): (usize, usize),
    scales: &[u8],
    swizzled: &mut Vec<u8>,
) -> Result<()> {
    let [tall, wide] = self::scales(rows, cols);
    swizzled.resize(tall * wide, 0);
    Ok(swizzle::swizzle(implementation, scales, rows, cols / BLOCK, swizzled)?)
}

/// Checks that ComfyUI is told of every weight that it is NVFP4.
pub(super) fn verify(model: &Model<'_>, report: &mut Report) {
    // An entry of a file's metadata makes the same tensors as ComfyUI loads it.
    let listed = |module: &str| {
        let texts = model.checkpoint.files().iter().filter_map(|file| file.metadata().get("_quantization_metadata"));
        let layers = texts.filter_map(|text| serde_json::from_str::<serde_json::Value>(text).ok());
        layers.into_iter().any(|json| json.get("layers").and_then(|layers| layers.get(module)).is_some())
    };
    for weight in &model.weights {
        let marker = model.checkpoint.get(&format!("{}.{NAME}", weight.module));
        let marked = marker.is_some() || listed(&weight.module);
        match (&weight.stored, marked) {
            (Stored::Nvfp4(_), false) => {
                report.problem(&weight.module, format!("NVFP4 without '{NAME}': ComfyUI takes the codes for numbers"))
            }
            (Stored::Nvfp4(_), true) if !weight.rows.is_multiple_of(BLOCK) => {
                report.problem(&weight.module, format!("{} rows; ComfyUI wants a multiple of 16", weight.rows));
            }
            (Stored::Plain(_), true) => {
                report.problem(&weight.module, format!("'{NAME}' beside a weight that is not quantized"));
            }
            _ => {}
        }
    }
}
