//! The 32-bit scales of operands.

use crate::cuda::GROUP_SCALES;
use crate::dequantize::cuda::View;
use crate::fp8::cuda::View as Fp8View;
use nvfp4_spec::GlobalScale;
use nvfp4_spec::fp8::{Scales, Tile};
use nvfp4_spec::scale::Unit;

/// The 32-bit scale of an operand: its kind, and the address of the stored numbers, 0 for a plain
/// operand.
#[derive(Clone, Copy)]
pub(super) struct Global {
    pub stored: u64,
    pub of: GlobalScale,
    pub unit: Unit,
    /// Numbers from one group to the next.
    pub step: u32,
}

impl Global {
    pub const NONE: Global = Global { stored: 0, of: GlobalScale::PerTensor, unit: Unit::Multiplier, step: 1 };

    /// That of an FP8 operand: the scale of the whole matrix, if it has one.
    pub fn of_fp8(view: &Fp8View<'_>) -> Self {
        match (view.scales, view.tile) {
            (Scales::F32(scale), Tile::Tensor) => {
                Global { stored: scale.address(), step: GROUP_SCALES as u32, ..Global::NONE }
            }
            _ => Global::NONE,
        }
    }

    pub fn of_view(view: &View<'_>) -> Self {
        Global { stored: view.stored.address(), of: view.global, unit: view.unit, step: 1 }
    }
}
