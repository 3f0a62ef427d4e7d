//! `nvfp4 bench gemm`: products beside the same product by another library, measured in the same
//! run.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;

#[cfg(feature = "cuda")]
pub use cuda::Matrix;

use super::place::{Place, check_size};
use super::style::Style;
use anyhow::{Result, ensure};
use nvfp4_kernels::Implementation;
use std::process::ExitCode;

/// Measure products of M × K activations and N × K weights.
///
/// On the CPU, NVFP4 × NVFP4 gives the correctly rounded sum; bf16 × NVFP4 ("weight-only") adds in
/// binary32, as do products of two matrices in MXFP8, or in FP8 with a scale per tensor. The same
/// product of f32 matrices by the `gemm` crate (AVX2, also where the CPU has AVX-512) is timed in
/// turns with them, on the same threads. NVFP4 weights are prepared, which products with up to four
/// rows read, and there several times, so that no product finds them in cache. The table shows
/// medians, how many times faster than f32 ours are, and the fraction of the floor: the time that a
/// copy takes to read and write the bytes that a product must read and write, over its own. Results
/// are first checked on part of the outputs, NVFP4 × NVFP4 bit for bit, weight-only against its
/// bound.
///
/// On a GPU (--device cuda), all data is in its memory, the weights in the order of its tensor
/// cores, and outputs are bf16. cuBLAS's bf16 product is timed beside ours, alone and after
/// decoding the weights, or both sides, to bf16; `-` where cuBLAS is missing. Each is a CUDA graph
/// of 20 calls (8 from M = 16384 on) over four sets of weights; graphs run in turns, and the table
/// shows the median of 11 turns, in microseconds per call. `/cuBLAS` is our time over that of
/// cuBLAS. The floor is the time of the bytes that a product must read and write, at the speed of a
/// copy in the same run, or of its operations, at the best rate of cuBLAS in the same run,
/// whichever is longer; `of floor` is that over our time. About 200 outputs of each are first
/// checked against their bound.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    place: Place,
    /// Rows of the activations, a list. Default: 1,16,256, or on a GPU 1,16,64,256,1024,4096,16384.
    #[arg(long, value_delimiter = ',')]
    m: Vec<usize>,
    /// Rows of the weights. Default: 4096, or on a GPU 8192.
    #[arg(long)]
    n: Option<usize>,
    /// Columns of both. Default: 4096, or on a GPU 8192.
    #[arg(long)]
    k: Option<usize>,
    /// The format of both operands, on a GPU. FP8 is timed with every accumulator that it has: `precise` adds in binary32, `split` and
    /// `fast` on FP8 tensor cores.
    #[arg(long, value_enum, default_value_t = Operands::Nvfp4)]
    format: Operands,
    /// Implementation on the CPU: scalar, avx2, avx512 or neon. Default: the fastest.
    #[arg(long)]
    implementation: Option<Implementation>,
    /// Show which kernels are used, on a GPU.
    #[arg(long)]
    verbose: bool,
    /// Print JSON: rows of {m, n, k, f32_ms, nvfp4_ms, nvfp4_speedup, nvfp4_of_floor,
    /// weight_only_ms, …, mxfp8_ms, …, fp8_ms, …, weights_floor_ms}, or on a GPU {m, n, k, weight_only: {us, of_cublas, of_floor, kernel},
    /// nvfp4: {…}, cublas_us, decode_weights_us, decode_both_us}.
    #[arg(long)]
    json: bool,
    /// Print the table in Markdown.
    #[arg(long, conflicts_with_all = ["json", "verbose"])]
    markdown: bool,
}

/// The format of operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Operands {
    /// NVFP4 activations, and bf16 ones, with NVFP4 weights.
    Nvfp4,
    /// FP8 with a scale per tensor.
    Fp8,
    /// FP8 in blocks: 1×128 activations, 128×128 weights.
    Fp8Block,
    /// MXFP8.
    Mxfp8,
}

impl Operands {
    #[cfg(feature = "cuda")]
    fn name(self) -> &'static str {
        match self {
            Operands::Nvfp4 => "nvfp4",
            Operands::Fp8 => "fp8",
            Operands::Fp8Block => "fp8-block",
            Operands::Mxfp8 => "mxfp8",
        }
    }
}

/// What to multiply.
struct Sizes {
    m: Vec<usize>,
    n: usize,
    k: usize,
}

/// What to print.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Table(Style),
    /// A table of text, and the kernels that were chosen.
    Verbose,
}

impl Format {
    fn style(self) -> Style {
        match self {
            Format::Table(style) => style,
            Format::Verbose => Style::Text,
        }
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let on_cpu = || {
        let (sizes, implementation) = args.on_cpu()?;
        cpu::run(&sizes, implementation, args.format().style())
    };
    let on_gpu = |ordinal| run_on_gpu(ordinal, &args.on_gpu()?, args.format, args.format());
    crate::until_closed(args.place.run(on_cpu, on_gpu))?;
    Ok(ExitCode::SUCCESS)
}

impl Args {
    fn on_cpu(&self) -> Result<(Sizes, Implementation)> {
        ensure!(!self.verbose, "--verbose is for --device cuda: on the CPU --implementation says what multiplies");
        ensure!(self.format == Operands::Nvfp4, "--format is for --device cuda: on the CPU both are NVFP4");
        let implementation = self.implementation.unwrap_or_else(Implementation::best);
        ensure!(
            !implementation.is_gpu(),
            "--implementation: cuda would copy to the GPU and back each time: use --device cuda"
        );
        Ok((self.sizes(&[1, 16, 256], 4096)?, implementation))
    }

    fn on_gpu(&self) -> Result<Sizes> {
        ensure!(self.implementation.is_none(), "--implementation is for --device cpu");
        self.sizes(&[1, 16, 64, 256, 1024, 4096, 16384], 8192)
    }

    /// The sizes that were asked for, or else these.
    fn sizes(&self, m: &[usize], n_and_k: usize) -> Result<Sizes> {
        let m = if self.m.is_empty() { m.to_vec() } else { self.m.clone() };
        let (n, k) = (self.n.unwrap_or(n_and_k), self.k.unwrap_or(n_and_k));
        for (name, values) in [("--m", &m[..]), ("--n", &[n]), ("--k", &[k])] {
            for &value in values {
                check_size(name, value, 1 << 15)?;
            }
        }
        Ok(Sizes { m, n, k })
    }

    fn format(&self) -> Format {
        match (Style::of(self.json, self.markdown), self.verbose) {
            (Style::Text, true) => Format::Verbose,
            (style, _) => Format::Table(style),
        }
    }
}

#[cfg(feature = "cuda")]
fn run_on_gpu(ordinal: usize, sizes: &Sizes, operands: Operands, format: Format) -> Result<()> {
    let device = crate::device::open(ordinal)?;
    match operands {
        Operands::Nvfp4 => cuda::run(device, sizes, format),
        _ => cuda::fp8::run(device, sizes, operands, format.style()),
    }
}

#[cfg(not(feature = "cuda"))]
fn run_on_gpu(_: usize, _: &Sizes, _: Operands, _: Format) -> Result<()> {
    anyhow::bail!(crate::device::NOT_BUILT)
}
