//! What `convert` takes from statistics of activations: scales and codes that are chosen by them.

use clap::ValueEnum;
use nvfp4_checkpoint::{Round, ScaleChoice};
use nvfp4_spec::gptq::Order;
use std::path::{Path, PathBuf};

/// Scales and codes by statistics.
#[derive(clap::Args)]
pub struct Calibrated {
    /// How to choose block scales: by the largest value, by the least squared error, 4over6, or as
    /// ModelOpt's searches do, to the bit. With --stats by the error of outputs: imatrix weights the
    /// squared error by the mean squares of inputs, local-hessian by their products within a block.
    #[arg(long, value_enum, default_value = "max")]
    scale: ScaleArg,
    /// How numbers become codes when scales are found: nearest, or gptq, which mends the rounding of
    /// each column in those after it and needs --stats with whole Hessians.
    #[arg(long, value_enum, default_value = "nearest")]
    round: RoundArg,
    /// The order of columns in GPTQ: natural, or static, the largest inputs first.
    #[arg(long, value_enum, default_value = "natural")]
    gptq_order: OrderArg,
    /// What GPTQ adds to the diagonal of the Hessian, as a share of its mean.
    #[arg(long, default_value_t = nvfp4_spec::gptq::DAMPING)]
    gptq_damping: f64,
    /// Statistics that `nvfp4 calibrate` wrote, for --scale imatrix or local-hessian and --round
    /// gptq [default: the file of --acts].
    #[arg(long, value_name = "FILE.safetensors")]
    stats: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum ScaleArg {
    Max,
    Mse,
    #[value(name = "4over6")]
    FourOverSix,
    #[value(name = "modelopt-mse")]
    ModelOptMse,
    #[value(name = "modelopt-4over6")]
    ModelOptFourOverSix,
    Imatrix,
    LocalHessian,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum RoundArg {
    Nearest,
    Gptq,
}

#[derive(Clone, Copy, ValueEnum)]
enum OrderArg {
    Natural,
    Static,
}

impl Calibrated {
    /// How block scales are chosen, as an argument.
    pub fn scale_arg(&self) -> ScaleArg {
        self.scale
    }

    /// How block scales are chosen.
    pub fn scale(&self) -> ScaleChoice {
        match self.scale {
            ScaleArg::Max => ScaleChoice::Max,
            ScaleArg::Mse => ScaleChoice::Mse,
            ScaleArg::FourOverSix => ScaleChoice::FourOverSix,
            ScaleArg::ModelOptMse => ScaleChoice::ModelOptMse,
            ScaleArg::ModelOptFourOverSix => ScaleChoice::ModelOptFourOverSix,
            ScaleArg::Imatrix => ScaleChoice::Imatrix,
            ScaleArg::LocalHessian => ScaleChoice::LocalHessian,
        }
    }

    /// How numbers become codes.
    pub fn round(&self) -> Round {
        match self.round {
            RoundArg::Nearest => Round::Nearest,
            RoundArg::Gptq => Round::Gptq {
                order: match self.gptq_order {
                    OrderArg::Natural => Order::Natural,
                    OrderArg::Static => Order::Activation,
                },
                damping: self.gptq_damping,
            },
        }
    }

    /// The file of statistics; where none is named and one is needed, that of activation scales.
    pub fn statistics(&self, acts: Option<&Path>) -> Option<PathBuf> {
        let needed =
            matches!(self.scale, ScaleArg::Imatrix | ScaleArg::LocalHessian) || self.round != RoundArg::Nearest;
        let acts = acts.filter(|path| needed && path.extension().is_some_and(|e| e == "safetensors"));
        self.stats.clone().or_else(|| acts.map(Path::to_path_buf))
    }

    /// What was chosen, for reports.
    pub fn chosen(&self) -> Vec<(&'static str, String)> {
        let word = |value: Option<clap::builder::PossibleValue>| value.map_or(String::new(), |v| v.get_name().into());
        let mut chosen = vec![("--scale", word(self.scale.to_possible_value()))];
        if self.round != RoundArg::Nearest {
            chosen.push(("--round", word(self.round.to_possible_value())));
            chosen.push(("--gptq-order", word(self.gptq_order.to_possible_value())));
            chosen.push(("--gptq-damping", self.gptq_damping.to_string()));
        }
        if let Some(path) = &self.stats {
            chosen.push(("--stats", path.display().to_string()));
        }
        chosen
    }
}
