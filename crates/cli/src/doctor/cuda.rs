//! The driver, the compiler, the GPUs, and a run on each.

use super::products::Products;
use super::{Outcome, Section};
use crate::bench::operations::{Buffers, PLAIN};
use crate::normal;
use anyhow::Result;
use nvfp4_kernels::cuda::{self, Cache, Device, Environment, Properties, Version};
use nvfp4_kernels::gemm::cuda::{Costs, Kept};
use nvfp4_kernels::gemm::cuda::{ProductKind, verdict};
use nvfp4_kernels::{Implementation, Input, Values};
use serde_json::{Value, json};

pub fn examine() -> Section {
    let report = cuda::doctor();
    let mut problems: Vec<String> = report.problems().iter().map(|p| p.to_string()).collect();
    let mut outcome = Outcome::Passed;
    let mut lines = vec![
        ("driver".to_string(), found("supports CUDA ", &report.driver)),
        ("nvrtc".to_string(), found("", &report.compiler)),
    ];
    let mut gpus = Vec::new();
    match &report.devices {
        // The line above has said it.
        Err(error) if report.driver.as_ref().err() == Some(error) => lines.push(line("gpu", "none")),
        Err(error) => lines.push(line("gpu", format!("none: {error}"))),
        Ok(devices) => {
            for (properties, usable) in devices {
                let architecture = architecture(properties);
                lines.push((format!("gpu {}", properties.ordinal), describe(properties, architecture.as_deref())));
                let checked = match usable {
                    Err(error) => Check::Unusable(error.to_string()),
                    Ok(()) => match check(properties.ordinal) {
                        Ok(()) => Check::Ok,
                        Err(error) => Check::Failed(format!("{error:#}")),
                    },
                };
                lines.push(line("", checked.text()));
                let products = products(properties.ordinal, &checked);
                if !products.0.is_empty() {
                    lines.push(line("", products.text()));
                }
                problems.extend(products.problems().map(|problem| format!("gpu {}: {problem}", properties.ordinal)));
                if let Check::Failed(reason) = &checked {
                    outcome = Outcome::Failed;
                    // Why kernels cannot be compiled is in the list already.
                    if !problems.contains(reason) {
                        problems.push(format!("gpu {}: {reason}", properties.ordinal));
                    }
                }
                let mut gpu = to_json(properties, architecture, &checked, &products);
                if let Ok(device) = Device::open(properties.ordinal) {
                    let (text, costs) = describe_costs(&Costs::kept(device));
                    lines.push(line("", text));
                    problems.extend(costs["problem"].as_str().map(String::from));
                    gpu["costs"] = costs;
                }
                gpus.push(gpu);
            }
        }
    }
    let (text, cache) = describe_cache(&report.cache);
    lines.push(line("cache", text));
    if let Some(problem) = cache["problem"].as_str() {
        problems.push(problem.to_string());
    }
    let portable = Environment::read().portable;
    if portable {
        lines.push(line("note", "NVFP4_CUDA_PORTABLE is set: kernels leave the GPU's conversion instructions alone"));
    }
    let json = json!({
        "built": true,
        "driver": found_json(&report.driver),
        "nvrtc": found_json(&report.compiler),
        "gpus": gpus,
        "cache": cache,
        "portable": portable,
        "problems": problems,
    });
    Section { lines, json, outcome }
}

/// How a GPU's run went.
enum Check {
    Ok,
    Failed(String),
    /// It is too old, or cannot be opened, and was not tried.
    Unusable(String),
}

impl Check {
    fn text(&self) -> String {
        match self {
            Check::Ok => format!("check ok: {CHECK_ROWS} × {CHECK_COLS} values quantized with the CPU's bits"),
            Check::Failed(reason) => format!("check FAILED: {reason}"),
            Check::Unusable(reason) => format!("not used: {reason}"),
        }
    }
}

const CHECK_ROWS: usize = 64;
const CHECK_COLS: usize = 1024;

/// Compiles and runs, and compares with the CPU.
fn check(ordinal: usize) -> Result<()> {
    let device = Device::open(ordinal)?;
    let x = normal::with_outliers(CHECK_ROWS, CHECK_COLS, 1)?;
    let x = Input::new(Values::Bf16(&x), CHECK_ROWS, CHECK_COLS)?;
    let [expected, _] = Buffers::quantize(Implementation::best(), &x, &PLAIN, None)?;
    let [got, _] = Buffers::quantize(Implementation::Cuda(device), &x, &PLAIN, None)?;
    got.check_equal(&expected)
}

/// What becomes of products by cuBLASLt; of none where the GPU does not work.
fn products(ordinal: usize, checked: &Check) -> Products {
    let device = match checked {
        Check::Ok => Device::open(ordinal).ok(),
        Check::Failed(_) | Check::Unusable(_) => None,
    };
    let each = |device| ProductKind::ALL.map(|kind| (kind, verdict(device, kind))).to_vec();
    Products(device.map_or(Vec::new(), each))
}

fn line(about: &str, text: impl Into<String>) -> (String, String) {
    (about.to_string(), text.into())
}

fn found(before: &str, version: &cuda::Result<Version>) -> String {
    version.as_ref().map_or_else(|error| error.to_string(), |version| format!("{before}{version}"))
}

fn found_json(version: &cuda::Result<Version>) -> Value {
    match version {
        Ok(version) => json!({ "version": version.to_string() }),
        Err(error) => json!({ "version": null, "problem": error.to_string() }),
    }
}

/// What kernels are compiled for, if there is a compiler.
fn architecture(properties: &Properties) -> Option<String> {
    let (major, minor) = properties.capability;
    cuda::supported_architectures().ok().map(|supported| cuda::architecture(major, minor, &supported))
}

fn describe(p: &Properties, architecture: Option<&str>) -> String {
    let (major, minor) = p.capability;
    let compiled = architecture.map_or_else(String::new, |a| format!(", kernels compiled for {a}"));
    format!(
        "{}: compute capability {major}.{minor}{compiled}, {} multiprocessors, {:.1} GiB of \
         memory, {:.0} MiB of L2 cache",
        p.name,
        p.multiprocessors,
        p.memory as f64 / (1u64 << 30) as f64,
        p.l2_cache as f64 / (1u64 << 20) as f64,
    )
}

fn to_json(p: &Properties, architecture: Option<String>, checked: &Check, products: &Products) -> Value {
    let (result, problem) = match checked {
        Check::Ok => ("ok", None),
        Check::Failed(reason) => ("failed", Some(reason)),
        Check::Unusable(reason) => ("not run", Some(reason)),
    };
    json!({
        "ordinal": p.ordinal,
        "name": p.name,
        "capability": format!("{}.{}", p.capability.0, p.capability.1),
        "architecture": architecture,
        "multiprocessors": p.multiprocessors,
        "memory": p.memory,
        "l2_cache": p.l2_cache,
        "check": result,
        "problem": problem,
        "products": products.to_json(),
    })
}

/// Where the costs come from that choose among kernels.
fn describe_costs(kept: &Kept) -> (String, Value) {
    match kept {
        Kept::Nothing => ("costs as shipped".to_string(), json!({ "source": "shipped", "file": null })),
        Kept::Tuned(path, _) => {
            let file = path.display().to_string();
            (format!("costs tuned, from {file}"), json!({ "source": "tuned", "file": file }))
        }
        Kept::Ignored(path, reason) => {
            let file = path.display().to_string();
            let problem =
                format!("{file} is ignored, because {reason}: run `nvfp4 tune` again, or `nvfp4 tune --reset`");
            (format!("costs as shipped: {problem}"), json!({ "source": "shipped", "file": file, "problem": problem }))
        }
    }
}

fn describe_cache(cache: &Cache) -> (String, Value) {
    let anew = "kernels are compiled anew in every process: set NVFP4_CACHE_DIR to a folder that can be written";
    match cache {
        Cache::Kept(folder) => {
            let folder = folder.display().to_string();
            (format!("{folder} (writable)"), json!({ "folder": folder, "writable": true }))
        }
        Cache::Unwritable(folder) => {
            let folder = folder.display().to_string();
            let problem = format!("{folder} cannot be written, so {anew}");
            (problem.clone(), json!({ "folder": folder, "writable": false, "problem": problem }))
        }
        Cache::None => {
            let problem = format!("no folder, so {anew}");
            (problem.clone(), json!({ "folder": null, "writable": false, "problem": problem }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_name_their_file_and_what_is_wrong_with_it() {
        let path = || "/cache/costs.txt".into();
        let (text, json) = describe_costs(&Kept::Nothing);
        assert_eq!((text.as_str(), &json["source"]), ("costs as shipped", &json!("shipped")));
        let (text, json) = describe_costs(&Kept::Ignored(path(), "it is damaged".to_string()));
        assert!(text.starts_with("costs as shipped: /cache/costs.txt is ignored, because it is damaged: "), "{text}");
        assert!(text.ends_with(json["problem"].as_str().unwrap()), "{text}");
    }
}
