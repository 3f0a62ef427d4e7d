//! Where a product is measured: arguments that the benchmarks of products share.

use crate::device::Device;
use anyhow::{Result, ensure};

/// The CPU with some threads, or a GPU.
#[derive(clap::Args)]
pub struct Place {
    /// Where to run: cpu, cuda or cuda:N.
    #[arg(long, default_value_t = Device::Cpu)]
    pub device: Device,
    /// Threads of the CPU to use. Default: one per core.
    #[arg(long)]
    threads: Option<usize>,
}

impl Place {
    /// Runs `on_cpu` with the threads that were asked for, or `on_gpu` with the number of the GPU.
    pub fn run<R: Send>(
        &self,
        on_cpu: impl FnOnce() -> Result<R> + Send,
        on_gpu: impl FnOnce(usize) -> Result<R>,
    ) -> Result<R> {
        match self.device {
            Device::Cpu => {
                rayon::ThreadPoolBuilder::new().num_threads(self.threads.unwrap_or(0)).build()?.install(on_cpu)
            }
            Device::Cuda(ordinal) => {
                ensure!(self.threads.is_none(), "--threads is for --device cpu");
                on_gpu(ordinal)
            }
        }
    }
}

/// Refuses a size that is not between 1 and `most`.
pub fn check_size(name: &str, value: usize, most: usize) -> Result<()> {
    ensure!((1..=most).contains(&value), "{name}: expected 1 to {most}, got {value}");
    Ok(())
}
