//! `nvfp4 verify`: would a program load this checkpoint, and load it correctly?

use crate::names::shown;
use crate::say::out;
use crate::sizes::counted;
use crate::source::{self, From};
use crate::{advice, exit, json, until_closed};
use anyhow::Result;
use nvfp4_checkpoint::gguf::{self, GgufFile};
use nvfp4_checkpoint::{Capability, Checkpoint, Client, Finding, Severity, Stored, gguf_kernel_path, kernel_path};
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Check that an inference server would load an NVFP4 checkpoint, and load it correctly.
///
/// Checks scales and codes, merged weights, the configuration, and for missing tensors. Exits with
/// 1 and lists the problems if the checkpoint would not load, or would load incorrectly; notes do
/// not count.
#[derive(clap::Args)]
pub struct Args {
    /// Model folder or file.
    dir: PathBuf,
    /// The program that will load it: vllm, sglang, tensorrt-llm, llama.cpp,
    /// transformers or comfyui.
    #[arg(long = "for", default_value = "vllm", value_name = "PROGRAM")]
    client: Client,
    /// Also say which kernels that program takes on a GPU of this compute capability, such as 9.0:
    /// native (FP4 tensor cores), decoded (Marlin and its like), emulated or refused. The rules are
    /// read from the programs' sources.
    #[arg(long, value_name = "CAPABILITY")]
    gpu: Option<Capability>,
    /// Format of the checkpoint, when it cannot be detected.
    #[arg(long, value_enum)]
    from: Option<From>,
    /// Print JSON: {dialect, for, weights, passed, findings: [{severity, about, text, fix}],
    /// kernels}; kernels, with --gpu: {gpu, path, text, source}.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let (report, passed) = match args.json {
        true => perform(args, &mut std::io::sink())?,
        false => perform(args, &mut out())?,
    };
    if args.json {
        json::print("verify", &report)?;
    }
    Ok(exit::checked(passed))
}

/// Checks, and writes what was found. Returns the same as JSON, and whether there is no problem.
pub fn perform(args: &Args, out: &mut impl Write) -> Result<(Value, bool)> {
    let (dialect, weights, beside, findings, kernels) = if gguf::is_gguf(&args.dir) {
        let file = GgufFile::open(&args.dir)?;
        let mut findings = gguf::verify(&file)?;
        if args.client != Client::LlamaCpp {
            let text = format!("{} does not load GGUF here; check it with --for llama.cpp", args.client);
            findings.insert(0, Finding::problem("file", text));
        }
        ("GGUF".to_string(), file.nvfp4().count(), [0; 2], findings, args.gpu.map(gguf_kernel_path))
    } else {
        let checkpoint = Checkpoint::open(&args.dir)?;
        let model = source::model(&checkpoint, args.from)?;
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let findings = nvfp4_checkpoint::verify(&model, args.client, threads)?;
        let weights = model.weights.iter().filter(|w| w.format() == "NVFP4").count();
        let count = |is: &dyn Fn(&Stored<'_>) -> bool| model.weights.iter().filter(|w| is(&w.stored)).count();
        let fp8 = count(&|stored| matches!(stored, Stored::Fp8 { .. }));
        let mxfp4 = count(&|stored| matches!(stored, Stored::MxFp4 { .. }));
        let kernels = args.gpu.map(|gpu| kernel_path(&model, args.client, gpu));
        (model.dialect.to_string(), weights, [fp8, mxfp4], findings, kernels)
    };
    let passed = findings.iter().all(|f| f.severity != Severity::Problem);
    until_closed(print(out, &findings).and_then(|()| match passed {
        true => {
            let beside = beside.iter().zip(["FP8 weight", "MXFP4 weight"]).filter(|(count, _)| **count > 0);
            let beside: String = beside.map(|(count, word)| format!(", {}", counted(*count, word))).collect();
            let weights = counted(weights, "NVFP4 weight");
            writeln!(out, "ok       {weights}{beside} ({dialect}), for {}", args.client).map_err(Into::into)
        }
        false => Ok(()),
    }))?;
    let kernels = args.gpu.zip(kernels);
    if let Some((gpu, found)) = &kernels {
        let line = format!("{} on {gpu}: {}, {} [{}]", args.client, found.path, found.kernels, found.source);
        until_closed(writeln!(out, "kernels  {line}").map_err(Into::into))?;
    }
    let list: Vec<Value> = findings.iter().map(to_json).collect();
    let mut report = json!({
        "dialect": dialect, "for": args.client.to_string(), "weights": weights, "passed": passed, "findings": list
    });
    if let Some((gpu, found)) = &kernels {
        report["kernels"] = json!({
            "gpu": gpu.to_string(), "path": found.path.to_string(), "text": found.kernels, "source": found.source
        });
    }
    Ok((report, passed))
}

fn word(finding: &Finding) -> &'static str {
    match finding.severity {
        Severity::Problem => "problem",
        Severity::Note => "note",
    }
}

/// What was found, and the command that removes it.
pub fn sentence(finding: &Finding) -> String {
    match advice::fix(finding) {
        Some(fix) => format!("{} [fix: {fix}]", finding.text),
        None => finding.text.clone(),
    }
}

/// A finding as JSON.
pub fn to_json(f: &Finding) -> Value {
    json!({ "severity": word(f), "about": f.about, "text": f.text, "fix": advice::fix(f) })
}

/// A line per finding.
pub fn print(out: &mut impl Write, findings: &[Finding]) -> Result<()> {
    for finding in findings {
        writeln!(out, "{:<8} {}: {}", word(finding), shown(&finding.about), shown(&sentence(finding)))?;
    }
    Ok(())
}
