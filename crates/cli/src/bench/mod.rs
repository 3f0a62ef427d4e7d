//! `nvfp4 bench`: every operation beside a copy of its input, measured in the same run.

mod baseline;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod fp8;
mod gemm;
mod linear;
pub mod operations;
mod place;
mod style;

#[cfg(feature = "cuda")]
pub use gemm::Matrix;

use crate::device::Device;
use anyhow::{Result, ensure};
use nvfp4_kernels::Implementation;
use operations::Operation;
use std::process::ExitCode;
use style::Style;

/// Measure every operation against a memory copy of its input.
///
/// On the CPU, operation and copy are timed in turns, on the same threads. The table shows medians:
/// milliseconds, GB of the bf16 matrix per second (what is read, or for dequantize what is
/// restored), and the multiple of the time that a copy of that matrix takes. Each operation's
/// result is first checked against the rules on part of the input.
///
/// On a GPU (--device cuda), all data is in its memory, and repeated runs take turns among
/// copies of the matrix that are four times the GPU's cache. The table shows the median
/// microseconds of 7 batches of 20 runs, the least MB that the operation can move (the matrix once,
/// or twice where its amax has to be found first; codes and scales once), the TB/s that this gives,
/// and the fraction of a copy's TB/s. Every result is first compared with the CPU's, bit for bit,
/// on fresh random values. Matrices of a few MB measure how fast the CPU starts work, not the GPU.
///
/// The column `amax` says whether the matrix's largest magnitude was given to an operation or had
/// to be computed by it. Names mean the same on both devices, with one exception: 16x16, 4over6,
/// stochastic and hadamard compute it on the CPU and are given it on a GPU. Operations called
/// `amax-given` and row+hadamard-column are always given it; `quantize 1x16`, its `row-scaled` and
/// its `both` always compute it. Codes of FP8 and MXFP8 are E4M3 unless the name says otherwise,
/// `fp8-delayed` is given a scale and records the amax, and blocks find their own amaxes.
#[derive(clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    what: Option<What>,
    /// Where to run: cpu, cuda or cuda:N.
    #[arg(long, default_value_t = Device::Cpu)]
    device: Device,
    /// Rows and columns of the bf16 matrix, on the CPU. Default: 4096.
    #[arg(long)]
    size: Option<usize>,
    /// Rows of the bf16 matrix, on a GPU. Default: 16384.
    #[arg(long)]
    rows: Option<usize>,
    /// Columns of the bf16 matrix, on a GPU. Default: 6144.
    #[arg(long)]
    cols: Option<usize>,
    /// Only operations whose name contains this text.
    #[arg(long, default_value = "")]
    filter: String,
    /// Threads of the CPU to use. Default: one per core.
    #[arg(long)]
    threads: Option<usize>,
    /// Implementation on the CPU: scalar, avx2, avx512 or neon. Default: the fastest.
    #[arg(long)]
    implementation: Option<Implementation>,
    /// Print JSON: {rows: [{name, ms, gbps, copies}]}, or on a GPU rows of {name, us, bytes, tbps,
    /// of_copy, amax}.
    #[arg(long)]
    json: bool,
    /// Print the table in Markdown.
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
}

/// What else can be measured.
#[derive(clap::Subcommand)]
enum What {
    Gemm(gemm::Args),
    Linear(linear::Args),
}

pub fn run(args: &Args) -> Result<ExitCode> {
    match &args.what {
        Some(What::Gemm(args)) => return gemm::run(args),
        Some(What::Linear(args)) => return linear::run(args),
        None => {}
    }
    let operations = operations::select(args.device, &args.filter);
    let fp8_operations = fp8::select(&args.filter);
    ensure!(
        !operations.is_empty() || !fp8_operations.is_empty(),
        "--filter: no operation's name contains '{}'",
        args.filter
    );
    let pool = rayon::ThreadPoolBuilder::new().num_threads(args.threads.unwrap_or(0)).build()?;
    let style = Style::of(args.json, args.markdown);
    crate::until_closed(pool.install(|| match args.device {
        Device::Cpu => {
            let (size, implementation) = args.on_cpu()?;
            cpu::run(size, implementation, &operations, &fp8_operations, style)
        }
        Device::Cuda(ordinal) => {
            let shape = args.on_gpu()?;
            run_on_gpu(ordinal, shape, &operations, &fp8_operations, style)
        }
    }))?;
    Ok(ExitCode::SUCCESS)
}

impl Args {
    /// The command as it is typed.
    pub fn name(&self) -> &'static str {
        match self.what {
            None => "bench",
            Some(What::Gemm(_)) => "bench gemm",
            Some(What::Linear(_)) => "bench linear",
        }
    }

    /// The size and the implementation.
    fn on_cpu(&self) -> Result<(usize, Implementation)> {
        ensure!(
            self.rows.is_none() && self.cols.is_none(),
            "--rows and --cols are for --device cuda: the CPU's matrix is square, use --size"
        );
        let size = self.size.unwrap_or(4096);
        ensure!(
            size > 0 && size.is_multiple_of(16) && size <= 1 << 15,
            "--size: expected a multiple of 16 up to 32768, got {size}"
        );
        let implementation = self.implementation.unwrap_or_else(Implementation::best);
        ensure!(
            !implementation.is_gpu(),
            "--implementation: cuda would copy to the GPU and back each time: use --device cuda"
        );
        Ok((size, implementation))
    }

    /// Rows and columns.
    fn on_gpu(&self) -> Result<(usize, usize)> {
        ensure!(self.size.is_none(), "--size is for --device cpu: on a GPU use --rows and --cols");
        ensure!(self.implementation.is_none(), "--implementation is for --device cpu");
        let (rows, cols) = (self.rows.unwrap_or(16384), self.cols.unwrap_or(6144));
        for (name, n) in [("--rows", rows), ("--cols", cols)] {
            ensure!(n > 0 && n.is_multiple_of(16), "{name}: expected a multiple of 16, got {n}");
        }
        ensure!(
            rows.checked_mul(cols).is_some_and(|n| n <= 1 << 32),
            "--rows and --cols: expected at most 4294967296 elements, got {rows} × {cols}"
        );
        Ok((rows, cols))
    }
}

#[cfg(feature = "cuda")]
fn run_on_gpu(
    ordinal: usize,
    shape: (usize, usize),
    operations: &[&Operation],
    fp8_operations: &[&fp8::Operation],
    style: Style,
) -> Result<()> {
    cuda::run(crate::device::open(ordinal)?, shape, operations, fp8_operations, style)
}

#[cfg(not(feature = "cuda"))]
fn run_on_gpu(_: usize, _: (usize, usize), _: &[&Operation], _: &[&fp8::Operation], _: Style) -> Result<()> {
    anyhow::bail!(crate::device::NOT_BUILT)
}

pub fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
