//! Every kernel compiled for every generation of GPUs. Needs NVRTC but no GPU; without NVRTC it is
//! skipped.
#![cfg(feature = "cuda")]

use nvfp4_kernels::cuda::{self, Source};
use nvfp4_testing::{Need, missing};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

const ARCHITECTURES: [&str; 4] = ["sm_80", "sm_90a", "sm_100a", "sm_120a"];

/// Architectures with conversion instructions that PORTABLE turns off.
const PORTABLE_TOO: [&str; 2] = ["sm_90a", "sm_100a"];

/// A variant, an architecture, and the text.
type Job<'a> = (&'a str, &'static str, Source);

#[test]
fn every_kernel_compiles_for_every_generation() {
    if let Err(reason) = cuda::compiler_version() {
        return missing(Need::Nvrtc, reason);
    }
    let sources = nvfp4_kernels::sources();
    let mut jobs: Vec<Job<'_>> = Vec::new();
    for (i, (variant, source)) in sources.iter().enumerate() {
        let architectures = ARCHITECTURES.iter().filter(|architecture| runs_on(variant, source, architecture));
        jobs.extend(architectures.map(|&architecture| (variant.as_str(), architecture, source.clone())));
        // One portable variant in three: enough for every operation to have some.
        if i % 3 == 0 && runs_on(variant, source, "sm_80") {
            let text = format!("#define PORTABLE\n{}", source.text);
            let portable = Source { text, ..source.clone() };
            jobs.extend(PORTABLE_TOO.map(|architecture| (variant.as_str(), architecture, portable.clone())));
        }
    }
    let next = AtomicUsize::new(0);
    let work = || {
        let mut problems = Vec::new();
        while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            problems.extend(problem(job));
        }
        problems
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let problems: Vec<String> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    println!("{} texts, {} compilations, {threads} threads", sources.len(), jobs.len());
    assert!(problems.is_empty(), "{} of {} failed:\n{}", problems.len(), jobs.len(), problems.join("\n"));
}

/// Whether a kernel is ever launched on an architecture: only Hopper has `wgmma`, and clusters
/// began with it.
fn runs_on(variant: &str, source: &Source, architecture: &str) -> bool {
    let shares = source.text.contains("SPLIT = 2;");
    let hopper = ["gemm_wgmma ", "gemm_promoted ", "gemm_group_maps "];
    let hopper = hopper.iter().any(|kernel| variant.starts_with(kernel));
    (!hopper || architecture == "sm_90a") && (!shares || architecture != "sm_80")
}

/// Why a job fails: it does not compile, or the machine code lacks the function that is launched.
fn problem((variant, architecture, source): &Job<'_>) -> Option<String> {
    let function = variant.split(' ').next().unwrap_or_default();
    match cuda::compile(source, architecture) {
        Ok(image) if image.windows(function.len()).any(|w| w == function.as_bytes()) => None,
        Ok(_) => Some(format!("{architecture}, {variant}: no function '{function}' in the machine code")),
        Err(error) => Some(format!("{architecture}, {variant}: {error}")),
    }
}
