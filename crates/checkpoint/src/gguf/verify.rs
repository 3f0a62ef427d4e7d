//! Would llama.cpp load this file, and load it right?

use super::file::{GgufFile, GgufTensor};
use crate::Result;
use crate::statistics::Statistics;
use crate::verify::{Finding, Severity};
use nvfp4_spec::e4m3;
use std::collections::BTreeSet;

/// Tensors that every layer of the families written here has.
const LAYER: [&str; 6] = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm"];

/// Tensors that a layer has once, or once for all experts.
const FEED_FORWARD: [&str; 3] = ["ffn_gate", "ffn_up", "ffn_down"];

impl GgufFile {
    /// Counts over an NVFP4 tensor.
    pub fn statistics(&self, tensor: &GgufTensor) -> Result<Statistics> {
        let (mut sum, mut codes, mut scales) = (Statistics::default(), Vec::new(), Vec::new());
        let step = ((8 << 20) / tensor.cols().max(1)).max(1);
        for start in (0..tensor.rows()).step_by(step) {
            let rows = start..(start + step).min(tensor.rows());
            self.codes_and_scales(tensor, rows, &mut codes, &mut scales)?;
            sum.count(&codes, &scales);
        }
        Ok(sum)
    }
}

/// Checks a file for llama.cpp. An empty list is a clean bill.
pub fn verify(file: &GgufFile) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let mut say = |severity, about: &str, text: String| {
        findings.push(Finding { severity, about: about.to_string(), text });
    };
    let (problem, note) = (Severity::Problem, Severity::Note);
    if file.nvfp4().next().is_none() {
        say(problem, "file", "no tensor is NVFP4".to_string());
    }
    let names: BTreeSet<&str> = file.tensors().iter().map(|t| t.name.as_str()).collect();
    match file.architecture() {
        None => say(problem, "general.architecture", "missing".to_string()),
        Some(arch) => {
            let layers = file.values().get(&format!("{arch}.block_count")).and_then(|v| v.number());
            if layers.is_none() {
                say(problem, &format!("{arch}.block_count"), "missing, or not a whole number".to_string());
            }
            let layer = |i: u64| LAYER.iter().map(move |part| format!("blk.{i}.{part}.weight"));
            let whole = ["token_embd.weight".to_string(), "output_norm.weight".to_string()];
            // A file that claims more layers than it has tensors lacks the first of them already.
            let layers = layers.unwrap_or(0).min(names.len() as u64);
            let known = ["llama", "qwen2", "qwen3", "qwen3moe"].contains(&arch);
            for name in whole.into_iter().chain((0..layers).flat_map(layer)).filter(|_| known) {
                if !names.contains(name.as_str()) {
                    say(problem, &name, "missing".to_string());
                }
            }
            for (i, part) in (0..layers).filter(|_| known).flat_map(|i| FEED_FORWARD.map(|part| (i, part))) {
                let has = |end: &str| names.contains(format!("blk.{i}.{part}{end}.weight").as_str());
                if !has("") && !has("_exps") {
                    say(problem, &format!("blk.{i}.{part}.weight"), "missing, and so are experts of it".to_string());
                }
            }
        }
    }
    match file.values().get("tokenizer.ggml.model").and_then(|v| v.text()) {
        None => say(problem, "tokenizer.ggml.model", "missing".to_string()),
        Some("no_vocab") => say(note, "tokenizer", "none: the source had no tokenizer's files".to_string()),
        Some(_) => {}
    }
    for tensor in file.nvfp4() {
        if let Some(bad) = file.scales(tensor)?.iter().find(|s| !(s.is_finite() && **s > 0.0)) {
            say(problem, &tensor.name, format!("a tensor scale is {bad}"));
        }
        let module = tensor.name.strip_suffix(".weight").unwrap_or(&tensor.name);
        if !names.contains(format!("{module}.scale").as_str()) {
            say(note, &tensor.name, "no tensor scale: llama.cpp takes 1".to_string());
        }
        let counts = file.statistics(tensor)?;
        let unsigned: u64 = counts.scales[usize::from(e4m3::NAN_BYTE)..].iter().sum();
        if unsigned > 0 {
            say(problem, &tensor.name, format!("{unsigned} block scales are NaN or negative: llama.cpp reads others"));
        }
        if counts.vanished > 0 {
            let text =
                format!("{} blocks have the scale 0 and codes that are not: they decode to zeros", counts.vanished);
            say(note, &tensor.name, text);
        }
    }
    findings.sort_by_key(|f| std::cmp::Reverse(f.severity));
    Ok(findings)
}
