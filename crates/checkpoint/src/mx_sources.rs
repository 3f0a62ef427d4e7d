//! Weights in MXFP4, by the names of those who publish them, and DeepSeek-V4's FP8 beside them.
//!
//! | | codes of `X`, two in a byte | powers of two, one for 32 |
//! |---|---|---|
//! | GPT-OSS | `X_blocks`, 16 bytes in the last dimension | `X_scales` |
//! | compressed-tensors | `X.weight_packed` | `X.weight_scale`, U8 |
//! | DeepSeek-V4 | `X.weight`, I8 | `X.scale`, F8_E8M0 |

use super::dialect::{Grouping, product};
use super::folder::Located;
use super::form::Eight;
use super::weight::{Arrangement, MX_BLOCK, Stored};
use crate::Result;
use safetensors::Dtype;

impl<'a> Grouping<'a> {
    /// GPT-OSS's: `X_blocks` and `X_scales`.
    pub(super) fn mxfp4(&mut self) -> Result<()> {
        for module in self.modules("_blocks") {
            let blocks_name = format!("{module}_blocks");
            let blocks = self.need(&blocks_name, &blocks_name)?;
            let scales = self.need(&format!("{module}_scales"), &blocks_name)?;
            let (Dtype::U8, Dtype::U8, [leading @ .., groups, 16]) =
                (blocks.info.dtype, scales.info.dtype, &blocks.info.shape[..])
            else {
                return Err(blocks.wrong("expected MXFP4 blocks: U8 of shape […, groups, 16]"));
            };
            if scales.info.shape != blocks.info.shape[..blocks.info.shape.len() - 1] {
                return Err(scales.wrong(format!("expected one scale per block of {:?}", blocks.info.shape)));
            }
            let (rows, cols) = (product(&blocks, leading)?, product(&blocks, &[*groups, MX_BLOCK])?);
            let arrangement = Arrangement::Experts(if let [experts, _] = leading { *experts } else { 1 });
            self.add(module, rows, cols, Stored::MxFp4 { blocks, scales, arrangement })?;
        }
        Ok(())
    }

    /// compressed-tensors' `mxfp4-pack-quantized`, which has no tensor scale.
    pub(super) fn packed_mxfp4(&mut self) -> Result<()> {
        for module in self.modules(".weight_packed") {
            let name = |part: &str| format!("{module}.{part}");
            let scales = self.checkpoint.get(&name("weight_scale"));
            let Some(scales) = scales.filter(|scales| scales.info.dtype == Dtype::U8) else { continue };
            if self.checkpoint.get(&name("weight_global_scale")).is_some() {
                continue;
            }
            let codes = self.need(&name("weight_packed"), &name("weight_scale"))?;
            self.matrix(module, codes, scales)?;
        }
        Ok(())
    }

    /// DeepSeek-V4's `scale`: beside FP8 for blocks of 128 × 128, beside packed codes for 32 of a
    /// row.
    pub(super) fn deepseek_v4(&mut self) -> Result<()> {
        for module in self.modules(".scale") {
            let scale_name = format!("{module}.scale");
            let Some(weight) = self.checkpoint.get(&format!("{module}.weight")) else { continue };
            let scale = self.need(&scale_name, &scale_name)?;
            match (weight.info.dtype, &weight.info.shape[..]) {
                (Dtype::F8_E4M3, &[rows, cols]) => {
                    let expected = Eight::Block.scales(rows, cols);
                    if scale.info.shape != expected || !matches!(scale.info.dtype, Dtype::F8_E8M0 | Dtype::F32) {
                        let (dtype, got) = (scale.info.dtype, &scale.info.shape);
                        return Err(scale.wrong(format!(
                            "expected one scale per 128 × 128 block, F8_E8M0 or F32 of {expected:?}, got {dtype:?} of \
                             {got:?}"
                        )));
                    }
                    self.add(module, rows, cols, Stored::Fp8 { weight, scale, input: None, eight: Eight::Block })?;
                }
                (Dtype::I8 | Dtype::U8, [_, _]) if matches!(scale.info.dtype, Dtype::F8_E8M0 | Dtype::U8) => {
                    self.matrix(module, weight, scale)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// A matrix of MXFP4.
    fn matrix(&mut self, module: &str, blocks: Located<'a>, scales: Located<'a>) -> Result<()> {
        let &[rows, bytes] = &blocks.info.shape[..] else {
            return Err(blocks.wrong("expected packed codes, a matrix of bytes"));
        };
        let cols = product(&blocks, &[bytes, 2])?;
        if !cols.is_multiple_of(MX_BLOCK) {
            return Err(blocks.wrong(format!("expected rows of a multiple of {MX_BLOCK} elements, got {cols}")));
        }
        let expected = [rows, cols / MX_BLOCK];
        if scales.info.shape != expected {
            let got = &scales.info.shape;
            return Err(scales.wrong(format!("expected one scale for {MX_BLOCK} of a row, {expected:?}, got {got:?}")));
        }
        self.add(module, rows, cols, Stored::MxFp4 { blocks, scales, arrangement: Arrangement::Rows })
    }
}
