//! Checkpoints: what other programs write and load, read safely, converted to NVFP4, checked and
//! explained.
//!
//! No module imports what imports it. Read in this order:
//!
//! 1. what is read: `file` (one safetensors file), `folder` (a checkpoint), `weight` (its matrices)
//!    and `dialect` (its format);
//! 2. what is planned: `form`, `names`, `rules`, `joined`, `outline`, `keep`, `stacked`,
//!    `architecture`, `target`, `plan` and `split`;
//! 3. what is written, and where: `comfyui` and `written`, `eight` (weights in FP8),
//!    `configuration`, `mixed` (several forms in one checkpoint), `shards` and `beside`; `gguf` for
//!    llama.cpp;
//! 4. the conversion: `settings` (what is asked for), `existing`, `there`, `journal` and `work`
//!    (the files on the disk), `moments` and `weighing` (what is known of layers' inputs),
//!    `conversion`, `rows` (one piece of one weight), `passes` (the two passes) and `convert`; in parts, `portion` and `share` (who makes what), `attempt` (a part on
//!    the disk) and `parts`;
//! 5. whether a server would load the result: `client` and `finding`, `described`, `promised`,
//!    `place`, `dimension`, `layer`, `sizes`, `complete`, `finite` and `verify`; by which kernels,
//!    `kernel_path`.
//!
//! ```no_run
//! use nvfp4_checkpoint::{Settings, convert};
//! use std::path::Path;
//! use std::sync::atomic::AtomicBool;
//!
//! let (stop, nobody) = (AtomicBool::new(false), ());
//! let summary = convert(Path::new("Qwen3-8B"), Path::new("Qwen3-8B-NVFP4"), &Settings::default(), &nobody, &stop)?;
//! println!("{} weights, {} bytes", summary.quantized.len(), summary.after);
//! # Ok::<(), nvfp4_checkpoint::Error>(())
//! ```

#![forbid(unsafe_code)]

#[cfg(target_endian = "big")]
compile_error!("weights are read as they are in the file, which needs a little-endian machine");

mod action;
mod architecture;
mod attempt;
mod beside;
mod client;
mod comfyui;
mod compare;
mod complete;
mod configuration;
mod conversion;
mod convert;
#[cfg(test)]
mod crash;
#[cfg(test)]
mod crash_parts;
mod deciding;
mod deepseek;
mod described;
mod dialect;
mod dimension;
mod eight;
mod error;
mod existing;
mod file;
mod finding;
mod finite;
mod folder;
mod form;
mod fp8;
#[doc(hidden)]
pub mod fuzzed;
pub mod gguf;
mod groups;
mod ignored;
mod inputs;
mod joined;
mod journal;
mod keep;
mod kernel_path;
mod layer;
mod measure;
mod mixed;
mod moments;
mod mx_sources;
mod mxfp4;
mod mxfp4_values;
mod names;
mod outline;
mod parts;
mod passes;
mod place;
mod plan;
mod pool;
mod portion;
mod promised;
mod room;
mod rows;
mod ruled;
mod rules;
mod selection;
mod settings;
mod shards;
mod share;
mod sink;
mod sizes;
mod split;
mod stacked;
mod stamp;
mod statistics;
mod target;
mod there;
mod transpose;
mod verify;
mod weighing;
mod weight;
mod work;
mod written;

pub use action::Action;
pub use architecture::{Architectures, loading};
pub use client::Client;
pub use compare::{Compared, Comparison, Difference, compare, differences};
pub use convert::convert;
pub use deciding::Copied;
pub use dialect::{Dialect, Model, detect};
pub use error::{Decoding, Error, Result, Setting};
pub use existing::{Existing, Outcome};
pub use file::{MAX_HEADER, TensorFile, TensorInfo, check_header};
pub use finding::{Finding, Fix, Severity};
pub use folder::{Checkpoint, Kind, Located, check_index};
pub use form::{Eight, Form};
#[doc(hidden)]
pub use fuzzed::check_config;
pub use joined::fused;
pub use kernel_path::{Capability, KernelPath, Path, gguf_kernel_path, kernel_path};
pub use measure::Measure;
pub use moments::Moments;
pub use names::{Pattern, Preset};
pub use parts::{PartSummary, convert_part, finish};
pub use plan::{Group, Item, Plan};
pub use portion::Portion;
pub use rules::Rules;
pub use selection::{DefaultSkips, Differing, Fuse, Selection};
pub use settings::{Acts, Finished, KvCache, Observer, Pass, Round, ScaleChoice, Settings, Summary};
pub use shards::Shards;
pub use share::{Share, shares};
pub use split::{split_all, split_experts, split_like};
pub use statistics::{Statistics, statistics};
pub use target::{Activations, Target};
pub use there::check_free;
pub use verify::verify;
pub use weight::{Arrangement, Buffer, Nibbles, Nvfp4, Stored, Weight};

/// The error about the first value of some rows that is not finite.
fn first_not_finite(weight: &Weight<'_>, first_row: usize, values: &nvfp4::Values<'_>) -> crate::Error {
    let at = (0..values.len()).find(|&i| !values.get(i).is_finite()).unwrap_or(0);
    crate::Error::WeightNotFinite {
        module: weight.module.clone(),
        row: first_row + at / weight.cols,
        col: at % weight.cols,
        value: values.get(at),
    }
}
