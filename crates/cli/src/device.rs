//! `--device`: where a command runs.

use nvfp4::Implementation;
use nvfp4_model::Place;
use std::fmt;
use std::str::FromStr;

/// What a build without GPUs answers to `--device cuda`.
#[cfg(not(feature = "cuda"))]
pub const NOT_BUILT: &str = "--device cuda: this build cannot use a GPU: build it with `--features cuda`";

/// GPU `ordinal`, with a compiler for its kernels.
#[cfg(feature = "cuda")]
pub fn open(ordinal: usize) -> anyhow::Result<nvfp4_kernels::cuda::Device> {
    use nvfp4_kernels::cuda;
    let device = cuda::Device::open(ordinal).and_then(|device| cuda::compiler_version().map(|_| device));
    device.map_err(|reason| anyhow::anyhow!("{reason}; `nvfp4 doctor` lists what is missing"))
}

/// The CPU, or a GPU by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Cpu,
    Cuda(usize),
}

impl Device {
    /// What runs there; an error that names what is missing if nothing does.
    #[cfg(feature = "cuda")]
    pub fn implementation(self) -> anyhow::Result<Implementation> {
        match self {
            Device::Cpu => Ok(Implementation::best()),
            Device::Cuda(ordinal) => open(ordinal).map(Implementation::Cuda),
        }
    }

    /// What runs there; an error that names what is missing if nothing does.
    #[cfg(not(feature = "cuda"))]
    pub fn implementation(self) -> anyhow::Result<Implementation> {
        match self {
            Device::Cpu => Ok(Implementation::best()),
            Device::Cuda(_) => anyhow::bail!(NOT_BUILT),
        }
    }

    /// Where a model's products are computed; an error that names what is missing if nothing is.
    #[cfg(feature = "cuda")]
    pub fn place(self) -> anyhow::Result<Place> {
        Ok(match self {
            Device::Cpu => Place::Cpu,
            Device::Cuda(ordinal) => Place::Gpu(nvfp4::cuda::Gpu::new(open(ordinal)?)?.into()),
        })
    }

    /// Where a model's products are computed; an error that names what is missing if nothing is.
    #[cfg(not(feature = "cuda"))]
    pub fn place(self) -> anyhow::Result<Place> {
        match self {
            Device::Cpu => Ok(Place::Cpu),
            Device::Cuda(_) => anyhow::bail!(NOT_BUILT),
        }
    }
}

/// The device of candle's tensors; an error that names what is missing.
#[cfg(feature = "train")]
impl TryFrom<Device> for candle_core::Device {
    type Error = anyhow::Error;

    fn try_from(device: Device) -> anyhow::Result<Self> {
        match device {
            Device::Cpu => Ok(candle_core::Device::Cpu),
            Device::Cuda(ordinal) if cfg!(feature = "nn-cuda") => Ok(candle_core::Device::new_cuda(ordinal)?),
            Device::Cuda(_) => anyhow::bail!(
                "--device cuda: this build trains on the CPU: build it with `--features nn-cuda`, which needs nvcc"
            ),
        }
    }
}

impl FromStr for Device {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let number = match name {
            "cpu" => return Ok(Device::Cpu),
            "cuda" => Some(0),
            // `parse` would take a sign too.
            _ => name
                .strip_prefix("cuda:")
                .filter(|n| n.bytes().all(|b| b.is_ascii_digit()))
                .and_then(|n| n.parse().ok()),
        };
        number.map(Device::Cuda).ok_or_else(|| "expected cpu, cuda or cuda:N with N the number of a GPU".to_string())
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for (name, device) in [("cpu", Device::Cpu), ("cuda:0", Device::Cuda(0)), ("cuda:13", Device::Cuda(13))] {
            assert_eq!(name.parse(), Ok(device));
            assert_eq!(device.to_string(), name);
        }
        assert_eq!("cuda".parse(), Ok(Device::Cuda(0)));
        for name in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:+1", "CUDA", "cuda:99999999999999999999"] {
            assert!(name.parse::<Device>().is_err(), "{name}");
        }
    }
}
