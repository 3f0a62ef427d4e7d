//! Arguments that several commands share: what to read, and which weights to quantize.

use anyhow::Result;
use clap::ValueEnum;
use nvfp4::checkpoint::{Checkpoint, DefaultSkips, Dialect, Fuse, Model, Pattern, Preset, Selection};

/// The dialects that a checkpoint may not tell by itself.
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

/// The checkpoint as weights, of the dialect given or found.
pub fn model(checkpoint: &Checkpoint, from: Option<From>) -> Result<Model<'_>> {
    Ok(match from {
        Some(from) => Model::with_dialect(checkpoint, from.dialect())?,
        None => Model::new(checkpoint)?,
    })
}

#[derive(Clone, Copy, ValueEnum)]
enum FuseArg {
    Auto,
    Off,
}

/// Which weights are quantized.
#[derive(clap::Args)]
pub struct Weights {
    /// Part of the model: all, mlp, experts or mlp+o.
    #[arg(long, default_value = "all")]
    preset: Preset,
    /// Leave modules alone: a glob over whole names, or re: and a regular expression. May be repeated.
    #[arg(long, value_name = "PATTERN")]
    skip: Vec<Pattern>,
    /// Quantize only these modules. May be repeated.
    #[arg(long, value_name = "PATTERN")]
    only: Vec<Pattern>,
    /// Quantize embeddings, output heads, routers and vision layers too.
    #[arg(long)]
    no_default_skips: bool,
    /// Whether q/k/v, gate/up and w1/w3 share one tensor scale, as servers that join them expect.
    #[arg(long, value_enum, default_value = "auto")]
    fuse: FuseArg,
}

impl Weights {
    pub fn selection(&self) -> Selection {
        Selection {
            preset: self.preset,
            skip: self.skip.clone(),
            only: self.only.clone(),
            default_skips: if self.no_default_skips { DefaultSkips::Off } else { DefaultSkips::On },
            fuse: match self.fuse {
                FuseArg::Auto => Fuse::Auto,
                FuseArg::Off => Fuse::Off,
            },
        }
    }
}
