//! `nvfp4 verify`: would a program load this checkpoint, and load it right?

use crate::names::shown;
use crate::say::out;
use crate::sizes::counted;
use crate::source::{self, From};
use crate::{exit, until_closed};
use anyhow::Result;
use nvfp4_checkpoint::gguf::{self, GgufFile};
use nvfp4_checkpoint::{Checkpoint, Client, Finding, Severity};
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Check that a program would load an NVFP4 checkpoint, and load it right.
///
/// Looks at scales and codes, at what the program joins, at what the configuration says, and for tensors that are missing.
/// Exits with 1 if it would not load, or not rightly, and lists why; notes do not count.
#[derive(clap::Args)]
pub struct Args {
    /// Model folder or file.
    dir: PathBuf,
    /// The program: vllm, llama.cpp or transformers.
    #[arg(long = "for", default_value = "vllm", value_name = "PROGRAM")]
    client: Client,
    /// Whose checkpoint it is, if it does not say.
    #[arg(long, value_enum)]
    from: Option<From>,
    /// Print JSON: {dialect, for, findings: [{severity, about, text}]}.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let (dialect, weights, findings) = if gguf::is_gguf(&args.dir) {
        let file = GgufFile::open(&args.dir)?;
        let mut findings = gguf::verify(&file)?;
        if args.client != Client::LlamaCpp {
            let text = format!("{} does not load GGUF here; check it with --for llama.cpp", args.client);
            findings.insert(0, Finding { severity: Severity::Problem, about: "file".to_string(), text });
        }
        ("GGUF".to_string(), file.nvfp4().count(), findings)
    } else {
        let checkpoint = Checkpoint::open(&args.dir)?;
        let model = source::model(&checkpoint, args.from)?;
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let findings = nvfp4_checkpoint::verify(&model, args.client, threads)?;
        let weights = model.weights.iter().filter(|w| w.format() == "NVFP4").count();
        (model.dialect.to_string(), weights, findings)
    };
    let mut out = out();
    until_closed(if args.json {
        let list: Vec<Value> = findings.iter().map(to_json).collect();
        let report = json!({ "dialect": dialect, "for": args.client.to_string(), "findings": list });
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?).map_err(Into::into)
    } else if findings.is_empty() {
        writeln!(out, "ok       {} ({dialect}), for {}", counted(weights, "NVFP4 weight"), args.client)
            .map_err(Into::into)
    } else {
        print(&mut out, &findings)
    })?;
    Ok(exit::checked(findings.iter().all(|f| f.severity != Severity::Problem)))
}

fn word(finding: &Finding) -> &'static str {
    match finding.severity {
        Severity::Problem => "problem",
        Severity::Note => "note",
    }
}

/// A finding as JSON.
pub fn to_json(f: &Finding) -> Value {
    json!({ "severity": word(f), "about": f.about, "text": f.text })
}

/// A line per finding.
pub fn print(out: &mut impl Write, findings: &[Finding]) -> Result<()> {
    for finding in findings {
        writeln!(out, "{:<8} {}: {}", word(finding), shown(&finding.about), shown(&finding.text))?;
    }
    Ok(())
}
