//! Whether programs would load a checkpoint, and load it right.

use crate::error::OrRaise;
use crate::threads;
use crate::words::{Words, choose};
use nvfp4_checkpoint::gguf::{self, GgufFile};
use nvfp4_checkpoint::{Checkpoint, Client, Dialect, Finding, Fix, Model, Severity};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::path::{Path, PathBuf};

pyo3::create_exception!(
    nvfp4,
    ConversionError,
    PyValueError,
    "A checkpoint was written that programs would not load, or load wrongly; `problems` is the list of why."
);

/// The dialects that may not be detected from a checkpoint alone.
pub const DIALECTS: Words<Dialect> = &[
    ("plain", Dialect::Plain),
    ("modelopt", Dialect::ModelOpt),
    ("compressed-tensors", Dialect::CompressedTensors),
    ("torchao", Dialect::TorchAo),
    ("comfyui", Dialect::ComfyUi),
];

/// What is wrong with an NVFP4 checkpoint: a list of texts, empty if a program would load it, and
/// load it right.
///
/// `client` is the program: 'vllm', 'sglang', 'tensorrt-llm', 'llama.cpp', 'transformers' or
/// 'comfyui'; the default is 'vllm', for GGUF 'llama.cpp'. `from_` is the format of the checkpoint,
/// where it cannot be detected.
#[pyfunction]
#[pyo3(signature = (path, *, client=None, from_=None))]
pub fn verify(py: Python<'_>, path: PathBuf, client: Option<&str>, from_: Option<&str>) -> PyResult<Vec<String>> {
    let client = client.map(str::parse).transpose().or_raise()?;
    let dialect = from_.map(|dialect| choose("from_", DIALECTS, dialect)).transpose()?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let findings = threads::run(py, || findings(&path, client, dialect, threads))?.or_raise()?;
    Ok(texts(&findings, Severity::Problem))
}

/// What a check for a program finds in a folder or a file.
pub fn findings(
    path: &Path,
    client: Option<Client>,
    dialect: Option<Dialect>,
    threads: usize,
) -> nvfp4_checkpoint::Result<Vec<Finding>> {
    if gguf::is_gguf(path) {
        let mut findings = gguf::verify(&GgufFile::open(path)?)?;
        if let Some(client) = client.filter(|&client| client != Client::LlamaCpp) {
            let text = format!("{client} does not load GGUF here; check it for llama.cpp");
            findings.insert(0, Finding::problem("file", text));
        }
        return Ok(findings);
    }
    let checkpoint = Checkpoint::open(path)?;
    let model = match dialect {
        Some(dialect) => Model::with_dialect(&checkpoint, dialect)?,
        None => Model::new(&checkpoint)?,
    };
    nvfp4_checkpoint::verify(&model, client.unwrap_or_default(), threads)
}

/// The texts of findings of one severity.
pub fn texts(findings: &[Finding], severity: Severity) -> Vec<String> {
    let some = findings.iter().filter(|finding| finding.severity == severity);
    let text = |finding: &Finding| match fix(finding) {
        Some(fix) => format!("{}: {} [fix: {fix}]", finding.about, finding.text),
        None => format!("{}: {}", finding.about, finding.text),
    };
    some.map(text).collect()
}

/// The call that removes a finding.
fn fix(finding: &Finding) -> Option<String> {
    match finding.fix? {
        Fix::Convert(target) => Some(format!("nvfp4.convert(..., to='{target}')")),
        Fix::ConvertWithOneScale(target) => Some(format!("nvfp4.convert(..., to='{target}', fix_scales=True)")),
        Fix::Decode => Some("the command `nvfp4 dequant` decodes it".to_string()),
        _ => None,
    }
}
