//! How this engine runs formats on a device.

use nvfp4::format::{Family, Name};
use nvfp4_kernels::gemm::{self, Accumulator, Stored};
use std::collections::BTreeSet;
use std::fmt;

pub use nvfp4_kernels::gemm::Units;

/// How products of a format run on a device: by what this engine does there, not by what the chip
/// could do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Execution {
    /// On the CPU, or in a program of the user's.
    Software,
    /// On a GPU, by these units.
    On(Units),
    /// Not at all.
    Missing,
}

impl fmt::Display for Execution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Execution::Software => f.write_str("in software"),
            Execution::On(units) => write!(f, "{units}"),
            Execution::Missing => f.write_str("missing"),
        }
    }
}

/// What a device can run. High precision runs everywhere, so a recipe that quantizes nothing asks
/// for nothing.
///
/// ```
/// use nvfp4_recipe::{Accumulator, Capabilities, Execution, Family, Units};
///
/// let (hopper, sums) = (Capabilities::gpu(9, 0), Accumulator::Split);
/// assert_eq!(Capabilities::software().execution(&Family::Nvfp4, sums), Execution::Software);
/// assert_eq!(hopper.execution(&Family::Nvfp4, sums), Execution::On(Units::Bf16TensorCores));
/// assert_eq!(hopper.execution(&Family::Fp8, sums), Execution::On(Units::Fp8TensorCores));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    gpu: Option<(u32, u32)>,
    missing: BTreeSet<Family>,
    custom: BTreeSet<Name>,
}

impl Capabilities {
    /// Everything in software: any CPU.
    pub fn software() -> Self {
        Capabilities::default()
    }

    /// A GPU by its compute capability. One that is too old for this engine's kernels leaves the
    /// work to the CPU.
    pub fn gpu(major: u32, minor: u32) -> Self {
        Capabilities { gpu: Some((major, minor)), ..Capabilities::default() }
    }

    /// The same device in a build that lacks these formats.
    pub fn without(mut self, family: Family) -> Self {
        self.missing.insert(family);
        self
    }

    /// The same device in a program that knows a user's format.
    pub fn with_custom(mut self, name: Name) -> Self {
        self.custom.insert(name);
        self
    }

    /// How products of a format run; FP8's with this accumulator.
    pub fn execution(&self, family: &Family, accumulator: Accumulator) -> Execution {
        if self.missing.contains(family) {
            return Execution::Missing;
        }
        let stored = match family {
            Family::Nvfp4 => Stored::Nvfp4,
            Family::Fp8 => Stored::Fp8,
            Family::Fp8Block => Stored::Fp8Block,
            Family::Mxfp8 => Stored::Mxfp8,
            Family::Custom(name) if !self.custom.contains(name) => return Execution::Missing,
            Family::HighPrecision | Family::Custom(_) => return Execution::Software,
        };
        self.gpu
            .and_then(|capability| gemm::units(stored, accumulator, capability))
            .map_or(Execution::Software, Execution::On)
    }
}
