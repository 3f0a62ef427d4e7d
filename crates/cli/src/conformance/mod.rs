//! `nvfp4 conformance DIR`: runs every golden case through every implementation on this machine and
//! compares bits.

mod case;
mod fp8;
mod gemm;
mod quantize;
mod report;
mod table;

use crate::{exit, json, until_closed};
use anyhow::{Context, Result, bail};
use case::Case;
use nvfp4_kernels::Implementation;
use report::{Differences, Report};
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

/// Check the golden cases in a folder, bit for bit.
///
/// Each `.safetensors` file of the folder is one case; its metadata says what kind. Every case runs
/// on every implementation of this machine, NVFP4 cases with both treatments of NaN and −0. Exits
/// with 1 on any mismatch.
#[derive(clap::Args)]
pub struct Args {
    /// Folder that holds the golden cases.
    dir: PathBuf,
    /// Run only this implementation: scalar, avx2, avx512, neon or cuda. Default: all that this
    /// machine has.
    #[arg(long, value_name = "NAME")]
    implementation: Option<Chosen>,
    /// Print JSON: {implementations, specials, modes: [{mode, cases, mismatches}], cases,
    /// mismatches, errors, problems}.
    #[arg(long)]
    json: bool,
}

/// An implementation by its name. A GPU is only opened in [`run`], which says if there is none.
#[derive(Clone, Copy)]
enum Chosen {
    Cpu(Implementation),
    Cuda,
}

impl FromStr for Chosen {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        if name == "cuda" { Ok(Chosen::Cuda) } else { name.parse().map(Chosen::Cpu) }
    }
}

impl Chosen {
    fn open(self) -> Result<Implementation> {
        match self {
            Chosen::Cpu(implementation) => Ok(implementation),
            Chosen::Cuda => "cuda".parse().map_err(anyhow::Error::msg),
        }
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let implementations = match args.implementation {
        None => Implementation::available(),
        Some(one) => vec![one.open()?],
    };
    let mut report = Report::new();
    for path in golden_files(&args.dir)? {
        let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        match check_file(&path, &implementations) {
            Ok((label, differences)) => report.add(&name, label, differences),
            Err(error) => report.fail(&name, &error),
        }
    }
    let names: Vec<String> = implementations.iter().map(Implementation::to_string).collect();
    if args.json {
        let mut json = report.to_json();
        json["implementations"] = names.into();
        json["specials"] = json!(["kernel", "reference"]);
        json::print("conformance", &json)?;
    } else {
        let text = format!("implementations: {}; specials: kernel, reference\n{report}", names.join(", "));
        until_closed(std::io::stdout().write_all(text.as_bytes()).map_err(Into::into))?;
    }
    Ok(exit::checked(report.passed()))
}

fn golden_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(dir).with_context(|| format!("cannot read the folder {}", dir.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            files.push(path);
        }
    }
    if files.is_empty() {
        bail!("{} holds no .safetensors file", dir.display());
    }
    files.sort();
    Ok(files)
}

/// The label of a case (its kind and mode) and where it differs.
fn check_file(path: &Path, implementations: &[Implementation]) -> Result<(String, Differences)> {
    let case = Case::read(path)?;
    let mut differences = Differences::default();
    let label = match case.meta("kind")? {
        "quantize" => quantize::check(&case, implementations, &mut differences)?,
        "rht" => quantize::check_hadamard(&case, implementations, &mut differences)?,
        "fastmath" => quantize::check_fast_math(&case, &mut differences)?,
        "sr" => quantize::check_stochastic(&case, &mut differences)?,
        "qgemm" => gemm::check(&case, implementations, &mut differences)?,
        "row_scaled_gemm" => gemm::check_row_scaled(&case, implementations, &mut differences)?,
        "swizzle" => table::check_swizzle(&case, implementations, &mut differences)?,
        "fp8_current" => fp8::check_current(&case, implementations, &mut differences)?,
        "fp8_delayed" => fp8::check_delayed(&case, implementations, &mut differences)?,
        "fp8_block" => fp8::check_block(&case, implementations, &mut differences)?,
        "mxfp8" => fp8::check_mx(&case, implementations, &mut differences)?,
        "table" => match fp8::check_table(&case, implementations, &mut differences)? {
            Some(label) => label,
            None => table::check(&case, &mut differences)?,
        },
        kind => bail!("unknown kind of case '{kind}'"),
    };
    Ok((label, differences))
}
