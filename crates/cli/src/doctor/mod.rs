//! `nvfp4 doctor`: what this build and this machine can run.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod products;

use crate::{exit, json, sizes, until_closed};
use anyhow::Result;
use nvfp4_kernels::Implementation;
use serde_json::{Value, json};
use std::io::{Write, stdout};
use std::process::ExitCode;

/// Report what this build can run on this machine, and what is missing.
///
/// Tests every GPU: quantizes a small matrix on it and compares the bits with the CPU's. Says which
/// small products cuBLASLt computes within their bound; what it does not, goes another way. Exits
/// with 1 if a GPU fails the test of bits, and with 0 otherwise, also without a GPU.
#[derive(clap::Args)]
pub struct Args {
    /// Print JSON: {version, cpu, memory, cuda}.
    #[arg(long)]
    json: bool,
}

/// What there is to say about GPUs.
struct Section {
    /// What each line is about, and the line.
    lines: Vec<(String, String)>,
    json: Value,
    outcome: Outcome,
}

#[derive(Clone, Copy, PartialEq)]
enum Outcome {
    Passed,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    Failed,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let all = Implementation::available().into_iter().map(|i| i.to_string());
    let implementations: Vec<String> = all.filter(|name| name != "cuda").collect();
    let (version, threads) = (env!("CARGO_PKG_VERSION"), rayon::current_num_threads());
    let (gpus, memory) = (gpus(), memory());
    let mut out = stdout().lock();
    until_closed(if args.json {
        let cpu = json!({ "implementations": implementations, "threads": threads });
        let memory = memory.map(|(total, free)| json!({ "bytes": total, "available": free }));
        let report = json!({ "version": version, "cpu": cpu, "memory": memory, "cuda": gpus.json });
        json::print("doctor", &report)
    } else {
        let cpu = format!("{}; threads: {threads}", implementations.join(", "));
        let memory = memory.map_or("unknown on this system".to_string(), |(total, free)| {
            format!("{}, {} available", sizes::show(total), sizes::show(free))
        });
        let own = [("nvfp4", version.to_string()), ("cpu", cpu), ("memory", memory)];
        let own = own.map(|(about, line)| (about.to_string(), line));
        let mut lines = own.iter().chain(&gpus.lines);
        lines.try_for_each(|(about, line)| writeln!(out, "{about:<8} {line}")).map_err(Into::into)
    })?;
    Ok(exit::checked(gpus.outcome == Outcome::Passed))
}

/// Bytes of memory, and how many a new program can have, where the system says so in `/proc`.
fn memory() -> Option<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kilobytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    Some((kilobytes("MemTotal:")? * 1024, kilobytes("MemAvailable:")? * 1024))
}

#[cfg(feature = "cuda")]
fn gpus() -> Section {
    cuda::examine()
}

#[cfg(not(feature = "cuda"))]
fn gpus() -> Section {
    let problem = "not in this build: install it with the feature `cuda` (cargo install --locked --path crates/cli --features cuda; \
                   for Python see docs/python.md)";
    Section {
        lines: vec![("cuda".to_string(), problem.to_string())],
        json: json!({ "built": false, "problems": [problem] }),
        outcome: Outcome::Passed,
    }
}
