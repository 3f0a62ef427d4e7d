//! `nvfp4 recipe`: what a recipe does to every layer, before anything is trained.

use crate::recipes::NAMED;
use crate::say::say;
use crate::{advice, exit, json, until_closed};
use anyhow::{Result, anyhow};
use clap::Subcommand;
use nvfp4_recipe::{
    Capabilities, Error, Model, Module, Name, Plan, Preset, Problem, Recipe, TransformerLayer, Warning,
};
use serde_json::json;
use std::collections::BTreeSet;
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Show or check a recipe: which tensor of which layer is quantized how.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Explain(ExplainArgs),
    Check(CheckArgs),
}

/// What a recipe is applied to.
#[derive(clap::Args)]
struct Target {
    /// The config.json of a model with the layers of Llama, Qwen, Mistral or DeepSeek. Without it,
    /// the model is one transformer layer and 8 experts.
    #[arg(long, value_name = "CONFIG_JSON")]
    model: Option<PathBuf>,
    /// Compute capability of a GPU, such as 9.0, to show which of its units run each format.
    /// Without it, all run in software.
    #[arg(long, value_name = "MAJOR.MINOR", value_parser = compute_capability)]
    gpu: Option<(u32, u32)>,
    /// Name of a custom(NAME) format that your program can run; may be repeated.
    #[arg(long, value_name = "NAME")]
    custom: Vec<Name>,
}

/// Print the format of every tensor of every layer.
///
/// Exits with 1 and lists the problems if the recipe cannot be used or does not fit the model.
#[derive(clap::Args)]
struct ExplainArgs {
    /// A preset, a rule file, or `env` for TransformerEngine's environment variables.
    #[arg(long_help = recipe_help())]
    recipe: String,
    #[command(flatten)]
    target: Target,
    /// Print only the differences from this recipe.
    #[arg(long, value_name = "RECIPE", conflicts_with = "json")]
    against: Option<String>,
    /// Print JSON: {recipe, fingerprint, tensors, attention, runs, warnings}, or {errors,
    /// warnings}.
    #[arg(long)]
    json: bool,
}

/// Check a rule file, alone and against a model.
///
/// Exits with 1 and lists the problems if it cannot be used or does not fit the model.
#[derive(clap::Args)]
struct CheckArgs {
    /// The rule file.
    file: PathBuf,
    #[command(flatten)]
    target: Target,
    /// Print JSON: {errors, warnings}.
    #[arg(long)]
    json: bool,
}

impl Args {
    /// The command as it is typed.
    pub fn name(&self) -> &'static str {
        match self.command {
            Command::Explain(_) => "recipe explain",
            Command::Check(_) => "recipe check",
        }
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    match &args.command {
        Command::Explain(args) => explain(args),
        Command::Check(args) => check(args),
    }
}

fn explain(args: &ExplainArgs) -> Result<ExitCode> {
    let (model, device) = (args.target.model()?, args.target.device());
    let plan = |recipe: &str| read(recipe).and_then(|recipe| Plan::build(&model, &recipe, &device));
    let plans = plan(&args.recipe).and_then(|plan_| Ok((plan_, args.against.as_deref().map(plan).transpose()?)));
    let (plan, against) = match plans {
        Ok(plans) => plans,
        Err(error) => return problems(error, args.json.then_some("recipe explain")),
    };
    let mut out = stdout().lock();
    until_closed(match against {
        _ if args.json => json::print("recipe explain", &plan.to_json()),
        None => write!(out, "{plan}").map_err(Into::into),
        Some(other) if other == plan => writeln!(out, "no difference").map_err(Into::into),
        Some(other) => write!(out, "{}", other.diff(&plan)).map_err(Into::into),
    })?;
    Ok(ExitCode::SUCCESS)
}

fn check(args: &CheckArgs) -> Result<ExitCode> {
    let (model, device) = (args.target.model()?, args.target.device());
    let plan = match Recipe::from_file(&args.file).and_then(|recipe| Plan::build(&model, &recipe, &device)) {
        Ok(plan) => plan,
        Err(error) => return problems(error, args.json.then_some("recipe check")),
    };
    // What a rule is for is not known without the model that it was written for.
    let known = |warning: &&Warning| args.target.model.is_some() || !matches!(warning, Warning::UnusedRule { .. });
    let warnings: Vec<String> = plan.warnings().iter().filter(known).map(ToString::to_string).collect();
    let mut out = stdout().lock();
    until_closed(match args.json {
        true => json::print("recipe check", &json!({ "errors": [], "warnings": warnings })),
        false => warnings
            .iter()
            .try_for_each(|warning| writeln!(out, "warning: {warning}"))
            .and_then(|()| writeln!(out, "{}: no errors, {} tensors", args.file.display(), plan.entries().len()))
            .map_err(Into::into),
    })?;
    Ok(ExitCode::SUCCESS)
}

impl Target {
    fn model(&self) -> Result<Model> {
        match &self.model {
            Some(path) => Model::from_config_file(path).map_err(|error| anyhow!("--model {error}")),
            None => {
                let mut model = Model::new();
                model.nest("layers.0", &TransformerLayer::default());
                model.add(Module::grouped_linear("layers.0.experts", 8));
                Ok(model)
            }
        }
    }

    fn device(&self) -> Capabilities {
        let device = self.gpu.map_or(Capabilities::software(), |(major, minor)| Capabilities::gpu(major, minor));
        self.custom.iter().cloned().fold(device, Capabilities::with_custom)
    }
}

fn recipe_help() -> String {
    let presets: Vec<&str> = Preset::names().collect();
    format!(
        "A preset, a rule file, or `env` for TransformerEngine's environment variables. Presets, each also with +attention:\n  {}\n\
         Rule files of `nvfp4 train`, by name:\n  {}",
        presets.join("\n  "),
        NAMED.map(|(name, _)| name).join("\n  ")
    )
}

fn compute_capability(text: &str) -> std::result::Result<(u32, u32), String> {
    let parsed = text.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    parsed.ok_or_else(|| "expected two numbers, as in 9.0 or 12.0".to_string())
}

/// A preset or a recipe of `crates/cli/recipes` by its name, the environment, or a file.
pub fn read(name: &str) -> nvfp4_recipe::Result<Recipe> {
    let path = Path::new(name);
    match name.parse::<Preset>() {
        Ok(preset) => Ok(preset.into()),
        Err(_) if let Some((_, text)) = NAMED.iter().find(|(known, _)| *known == name) => Recipe::from_toml(text),
        Err(_) if name == "env" => Recipe::from_env(),
        Err(_) if path.exists() || path.extension().is_some_and(|extension| extension == "toml") => {
            Recipe::from_file(path)
        }
        Err(error) => {
            let named: Vec<&str> = NAMED.iter().map(|(name, _)| *name).collect();
            Err(Error::Setting(format!("{name}: no such file, and {error}; or {}", named.join(", "))))
        }
    }
}

/// Prints everything that is wrong, line by line. Other errors are handled as elsewhere. JSON has
/// each problem by itself.
fn problems(error: Error, json_of: Option<&str>) -> Result<ExitCode> {
    // The text has the cause in it; `anyhow!(error)` would say it twice.
    let Error::Problems(problems) = error else { return Err(anyhow!("{error}")) };
    if let Some(command) = json_of {
        let errors: Vec<String> = problems.0.iter().map(Problem::to_string).collect();
        let hints: BTreeSet<String> = problems.0.iter().filter_map(advice::about_recipe).collect();
        json::print(command, &json!({ "errors": errors, "warnings": [], "hints": hints }))?;
    } else {
        problems.lines().iter().for_each(|line| say(format_args!("error: {line}")));
        let hints: BTreeSet<String> = problems.0.iter().filter_map(advice::about_recipe).collect();
        hints.iter().for_each(|hint| say(format_args!("hint: {hint}")));
    }
    Ok(exit::checked(false))
}
