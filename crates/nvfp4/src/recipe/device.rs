//! What a device can run. Formats that its tensor cores do not know run in software, with the same bits.

use super::format::Family;
use super::name::Name;
use std::collections::BTreeSet;
use std::fmt;

/// How a format runs on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Runs {
    /// In the instructions of its tensor cores.
    Native,
    /// In software.
    Software,
    /// Not at all.
    Missing,
}

impl fmt::Display for Runs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Runs::Native => "native",
            Runs::Software => "in software",
            Runs::Missing => "missing",
        })
    }
}

/// What a device can run. High precision runs everywhere, so a recipe that quantizes nothing asks for nothing.
///
/// ```
/// use nvfp4::recipe::{Capabilities, Family, Runs};
///
/// assert_eq!(Capabilities::gpu(9, 0).runs(&Family::Fp8), Runs::Native);
/// assert_eq!(Capabilities::gpu(9, 0).runs(&Family::Nvfp4), Runs::Software);
/// assert_eq!(Capabilities::gpu(12, 0).runs(&Family::Nvfp4), Runs::Native);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    native: BTreeSet<Family>,
    missing: BTreeSet<Family>,
    custom: BTreeSet<Name>,
}

impl Capabilities {
    /// Everything in software: any CPU, any GPU.
    pub fn software() -> Self {
        Capabilities::default()
    }

    /// A GPU by its compute capability: FP8 is native from 8.9, FP8 with scales per 128 on Hopper (9.0), MXFP8 and NVFP4 from
    /// 10.0.
    pub fn gpu(major: u32, minor: u32) -> Self {
        let fp8 = ((major, minor) >= (8, 9)).then_some(Family::Fp8);
        let block = (major == 9).then_some(Family::Fp8Block);
        let blackwell = (major >= 10).then_some([Family::Mxfp8, Family::Nvfp4]);
        let native = fp8.into_iter().chain(block).chain(blackwell.into_iter().flatten()).collect();
        Capabilities { native, ..Capabilities::default() }
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

    /// How a format runs.
    pub fn runs(&self, family: &Family) -> Runs {
        match family {
            Family::HighPrecision => Runs::Native,
            family if self.missing.contains(family) => Runs::Missing,
            Family::Custom(name) if !self.custom.contains(name) => Runs::Missing,
            family if self.native.contains(family) => Runs::Native,
            _ => Runs::Software,
        }
    }
}
