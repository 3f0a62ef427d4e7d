//! What this machine has and lacks for running on a GPU.

use super::cache::DiskCache;
use super::compile::compiler_version;
use super::device::{Device, Properties, driver_version};
use super::environment::Environment;
use super::error::{Error, Result, Version};
use std::path::PathBuf;

/// What was found; each error's message says what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The CUDA version that the driver supports.
    pub driver: Result<Version>,
    /// NVRTC's version.
    pub compiler: Result<Version>,
    /// Every GPU, and whether it can be used.
    pub devices: Result<Vec<(Properties, Result<()>)>>,
    /// Where compiled kernels are kept.
    pub cache: Cache,
}

/// Where compiled kernels are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cache {
    /// In this folder.
    Kept(PathBuf),
    /// Nowhere, since this folder cannot be written: set `NVFP4_CACHE_DIR` to one that can.
    Unwritable(PathBuf),
    /// Nowhere, since the environment names no folder: set `NVFP4_CACHE_DIR`.
    None,
}

/// Examines everything. The only change it makes is to create the cache's folder.
pub fn doctor() -> Report {
    let cache = match Environment::read().cache {
        None => Cache::None,
        Some(folder) if DiskCache::new(Some(folder.clone())).is_writable() => Cache::Kept(folder),
        Some(folder) => Cache::Unwritable(folder),
    };
    Report { driver: driver_version(), compiler: compiler_version(), devices: devices(), cache }
}

fn devices() -> Result<Vec<(Properties, Result<()>)>> {
    let check = |properties: Properties| {
        let usable = properties.check().and_then(|()| Device::open(properties.ordinal).map(drop));
        (properties, usable)
    };
    (0..Device::count()?).map(|ordinal| Properties::read(ordinal).map(check)).collect()
}

impl Report {
    /// Everything that is missing or cannot be used, each once.
    pub fn problems(&self) -> Vec<Error> {
        let devices = self.devices.iter().flatten().filter_map(|(_, usable)| usable.as_ref().err());
        let rest = [self.driver.as_ref().err(), self.compiler.as_ref().err(), self.devices.as_ref().err()];
        let mut problems: Vec<Error> = Vec::new();
        for problem in rest.into_iter().flatten().chain(devices) {
            if !problems.contains(problem) {
                problems.push(problem.clone());
            }
        }
        problems
    }
}
