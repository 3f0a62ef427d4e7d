//! `nvfp4 tune`: what products cost on a GPU, measured and kept.

#[cfg(feature = "cuda")]
mod cuda;

use crate::device::Device;
use anyhow::{Result, bail};
use std::process::ExitCode;

/// Measure what products cost on a GPU and keep it, so that the fastest kernel is chosen there.
///
/// Several kernels compute the same product of NVFP4 matrices; one way decodes both sides and calls
/// cuBLAS. Which one a program takes follows from costs that ship with it for each chip. This
/// command measures them on this machine's GPU, with K = 8192 and up to as many rows of weights,
/// and keeps them in a file beside the compiled kernels, which `nvfp4 doctor` names. Programs that
/// start later, also in Python, read it.
///
/// No program times anything by itself. Results of a run depend on the file, never on a clock: as
/// long as it stays, the same seed gives the same bits. Another file, or none, may choose other
/// kernels. They add in another order, so products may then differ in their last bits.
///
/// The table shows each cost as it ships, as it was in use before, and as it is now. `step` is what
/// a block of threads takes for 64 columns, by the kernel of that shape; `split` what sharing an
/// output among blocks adds; `library step` the same as `step` in cuBLAS; `decode` how fast
/// operands are decoded before it. The last two are what the kernels without cuBLAS do to an element
/// before they multiply, in bytes that would take as long. Each comes from medians of products that
/// take turns, after the GPU was kept busy. Nothing else should run on it meanwhile.
#[derive(clap::Args)]
#[cfg_attr(
    not(feature = "cuda"),
    command(about = "Measure what products cost on a GPU: not in this build, which is without the feature `cuda`")
)]
pub struct Args {
    /// The GPU: cuda or cuda:N.
    #[arg(long, default_value_t = Device::Cuda(0))]
    device: Device,
    /// Measure, and keep nothing.
    #[arg(long)]
    dry_run: bool,
    /// Remove what was kept, so that the costs are again those that ship. Measures nothing.
    #[arg(long, conflicts_with = "dry_run")]
    reset: bool,
    /// Print JSON: {device, gpu, capability, outcome, file, costs: [{name, unit, shipped, before,
    /// now}]}.
    #[arg(long)]
    json: bool,
}

/// What is done with the costs.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
#[derive(Clone, Copy)]
enum Task {
    Keep,
    DryRun,
    Reset,
}

/// What is printed.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
#[derive(Clone, Copy)]
enum Output {
    Text,
    Json,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let Device::Cuda(ordinal) = args.device else {
        bail!("--device: tune measures a GPU: use cuda or cuda:N");
    };
    let task = match (args.dry_run, args.reset) {
        (_, true) => Task::Reset,
        (true, false) => Task::DryRun,
        (false, false) => Task::Keep,
    };
    on_gpu(ordinal, task, if args.json { Output::Json } else { Output::Text })?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(feature = "cuda")]
fn on_gpu(ordinal: usize, task: Task, output: Output) -> Result<()> {
    cuda::run(crate::device::open(ordinal)?, task, output)
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(_: usize, _: Task, _: Output) -> Result<()> {
    bail!(crate::device::NOT_BUILT)
}
