//! Arguments that several commands share: what to read, and which weights to quantize.

use anyhow::{Context, Result, anyhow};
use clap::ValueEnum;
use nvfp4_checkpoint::{
    Architectures, Checkpoint, DefaultSkips, Dialect, Differing, Fuse, Model, Pattern, Preset, Rules, Selection, Target,
};
use nvfp4_files::regular;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The dialects that cannot always be detected.
#[derive(Clone, Copy, ValueEnum)]
pub enum From {
    Plain,
    Modelopt,
    CompressedTensors,
    Torchao,
    Comfyui,
}

impl From {
    pub fn dialect(self) -> Dialect {
        match self {
            From::Plain => Dialect::Plain,
            From::Modelopt => Dialect::ModelOpt,
            From::CompressedTensors => Dialect::CompressedTensors,
            From::Torchao => Dialect::TorchAo,
            From::Comfyui => Dialect::ComfyUi,
        }
    }
}

/// The weights of a checkpoint, in the dialect that is given or detected.
pub fn model(checkpoint: &Checkpoint, from: Option<From>) -> Result<Model<'_>> {
    Ok(match from {
        Some(from) => Model::with_dialect(checkpoint, from.dialect())?,
        None => Model::new(checkpoint)?,
    })
}

/// The checkpoint as a conversion sees it: with experts in matrices of their own.
pub fn split(checkpoint: Checkpoint, selection: &Selection, target: Target, from: Option<From>) -> Result<Checkpoint> {
    Ok(nvfp4_checkpoint::split_experts(checkpoint, selection, target, from.map(From::dialect))?)
}

/// `--fuse` before files are read.
#[derive(Clone)]
enum FuseArg {
    Auto,
    Off,
    File(PathBuf),
}

impl FromStr for FuseArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(FuseArg::Auto),
            "off" => Ok(FuseArg::Off),
            file if file.ends_with(".json") => Ok(FuseArg::File(file.into())),
            _ => Err("expected auto, off or a .json file".to_string()),
        }
    }
}

/// A preset and the name that it was asked for by.
#[derive(Clone)]
struct PresetArg {
    name: String,
    part: Preset,
    rules: Rules,
}

impl FromStr for PresetArg {
    type Err = nvfp4_checkpoint::Error;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let (part, rules) = Rules::preset(name)?;
        Ok(PresetArg { name: name.to_string(), part, rules })
    }
}

/// Which weights are quantized.
#[derive(clap::Args)]
pub struct Weights {
    /// Part of the model in NVFP4: all, mlp, experts or mlp+o; or all of it: experts+fp8 or mlp+fp8
    /// (the rest in FP8), or fp8.
    #[arg(long, default_value = "all")]
    preset: PresetArg,
    /// A form for each weight: a TOML file of rules, the first that matches decides. Forms: nvfp4,
    /// nvfp4-w4a4, nvfp4-w4a16, fp8, fp8-tensor, fp8-channel, fp8-block, mxfp8, keep.
    #[arg(long, value_name = "FILE.toml", conflicts_with = "preset")]
    rules: Option<PathBuf>,
    /// Do not quantize these modules: a glob that matches the whole name, or re:REGEX. May be
    /// repeated.
    #[arg(long, value_name = "PATTERN")]
    skip: Vec<Pattern>,
    /// Quantize only these modules (same patterns). May be repeated.
    #[arg(long, value_name = "PATTERN")]
    only: Vec<Pattern>,
    /// Also quantize embeddings, output heads, routers, vision and audio layers.
    #[arg(long)]
    no_default_skips: bool,
    /// Which weights share one tensor scale, because servers merge them into one matrix: auto
    /// (q/k/v, gate/up and whatever else vLLM merges), off, or a JSON file with lists of module
    /// names, such as [["q_proj", "k_proj"], ["w1", "w3"]].
    #[arg(long, value_name = "auto|off|FILE.json", default_value = "auto")]
    fuse: FuseArg,
    /// Give merged weights of an NVFP4 source one tensor scale, the largest, where theirs differ. A
    /// weight is requantized only if its block scales cannot absorb the difference exactly.
    #[arg(long)]
    fix_scales: bool,
    /// Convert models that no server is known to load, too: LoRA adapters, GPT-2, T5, Jamba,
    /// diffusers models.
    #[arg(long)]
    any_architecture: bool,
}

impl Weights {
    pub fn fix_scales(&self) -> bool {
        self.fix_scales
    }

    /// The options that say which weights, in words.
    pub fn chosen(&self) -> Vec<(&'static str, String)> {
        let fuse = match &self.fuse {
            FuseArg::Auto => "auto".to_string(),
            FuseArg::Off => "off".to_string(),
            FuseArg::File(path) => path.display().to_string(),
        };
        let patterns = |patterns: &[Pattern]| patterns.iter().map(Pattern::to_string).collect::<Vec<_>>().join(", ");
        let which = match &self.rules {
            Some(path) => ("--rules", path.display().to_string()),
            None => ("--preset", self.preset.name.clone()),
        };
        let mut chosen = vec![which, ("--fuse", fuse)];
        for (name, list) in [("--skip", &self.skip), ("--only", &self.only)] {
            if !list.is_empty() {
                chosen.push((name, patterns(list)));
            }
        }
        let flags = [
            ("--no-default-skips", self.no_default_skips),
            ("--fix-scales", self.fix_scales),
            ("--any-architecture", self.any_architecture),
        ];
        chosen.extend(flags.into_iter().filter(|(_, on)| *on).map(|(name, _)| (name, "yes".to_string())));
        chosen
    }

    pub fn selection(&self) -> Result<Selection> {
        Ok(Selection {
            preset: self.preset.part,
            skip: self.skip.clone(),
            only: self.only.clone(),
            default_skips: if self.no_default_skips { DefaultSkips::Off } else { DefaultSkips::On },
            fuse: match &self.fuse {
                FuseArg::Auto => Fuse::Auto,
                FuseArg::Off => Fuse::Off,
                FuseArg::File(path) => Fuse::Names(names(path)?),
            },
            differing: if self.fix_scales { Differing::Rescale } else { Differing::Keep },
            rules: match &self.rules {
                Some(path) => rules(path)?,
                None => self.preset.rules.clone(),
            },
            architectures: if self.any_architecture { Architectures::Any } else { Architectures::Served },
        })
    }
}

/// The largest list of names or amaxes that is read.
pub const MAX_LIST: u64 = 64 << 20;

fn rules(path: &Path) -> Result<Rules> {
    let text = regular::read_text(path, MAX_LIST).map_err(|error| anyhow!("--rules {error}"))?;
    Rules::from_toml(&text).map_err(|error| anyhow!("--rules {}: {error}", path.display()))
}

fn names(path: &Path) -> Result<Vec<Vec<String>>> {
    let json: Value = regular::read_json(path, MAX_LIST).map_err(|error| anyhow!("--fuse {error}"))?;
    serde_json::from_value(json).with_context(|| {
        format!(
            "--fuse {}: expected lists of names, such as [[\"q_proj\", \"k_proj\"], [\"w1\", \"w3\"]]",
            path.display()
        )
    })
}
