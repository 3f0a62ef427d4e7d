//! `nvfp4 recipe`: what a recipe does to every layer, before anything is trained.

use crate::until_closed;
use anyhow::{Context, Result, anyhow};
use clap::Subcommand;
use nvfp4::Error;
use nvfp4::recipe::{Capabilities, Model, Module, Plan, Preset, Problem, Problems, Recipe, TransformerLayer, Warning};
use serde_json::{Value, json};
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The exit status of a recipe that was read and found wrong.
const PROBLEMS: u8 = 2;

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

/// Print what every layer of a model resolves to.
///
/// Without --model the layers are those of one transformer layer and of 8 experts. Exits with 2, and lists everything that
/// is wrong, if the recipe does not fit the model.
#[derive(clap::Args)]
struct ExplainArgs {
    /// A preset, a rule file, or `env` for TransformerEngine's environment variables.
    recipe: String,
    /// A checkpoint's config.json.
    #[arg(long)]
    model: Option<PathBuf>,
    /// Print only what differs from this recipe.
    #[arg(long, value_name = "RECIPE", conflicts_with = "json")]
    against: Option<String>,
    /// Print JSON: {recipe, fingerprint, tensors, attention, runs, warnings}, or {errors}.
    #[arg(long)]
    json: bool,
}

/// Check a rule file, alone and against a model.
///
/// Exits with 2, and lists everything that is wrong, if it cannot be used. Without --model it is tried on one transformer
/// layer and on 8 experts.
#[derive(clap::Args)]
struct CheckArgs {
    /// The rule file.
    file: PathBuf,
    /// A checkpoint's config.json.
    #[arg(long)]
    model: Option<PathBuf>,
    /// Print JSON: {errors, warnings}.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    match &args.command {
        Command::Explain(args) => explain(args),
        Command::Check(args) => check(args),
    }
}

fn explain(args: &ExplainArgs) -> Result<ExitCode> {
    let model = read_model(args.model.as_deref())?;
    let plan = |recipe: &str| read_recipe(recipe).and_then(|recipe| build(&model, &recipe));
    let plans = plan(&args.recipe).and_then(|plan_| Ok((plan_, args.against.as_deref().map(plan).transpose()?)));
    let (plan, against) = match plans {
        Ok(plans) => plans,
        Err(error) => return problems(error, args.json),
    };
    let mut out = stdout().lock();
    until_closed(match against {
        _ if args.json => print_json(&mut out, &plan.to_json()),
        None => write!(out, "{plan}").map_err(Into::into),
        Some(other) => write!(out, "{}", other.diff(&plan)).map_err(Into::into),
    })?;
    Ok(ExitCode::SUCCESS)
}

fn check(args: &CheckArgs) -> Result<ExitCode> {
    let model = read_model(args.model.as_deref())?;
    let plan = match Recipe::from_file(&args.file).and_then(|recipe| build(&model, &recipe)) {
        Ok(plan) => plan,
        Err(error) => return problems(error, args.json),
    };
    // What a rule is for is not known without the model that it was written for.
    let known = |warning: &&Warning| args.model.is_some() || !matches!(warning, Warning::UnusedRule { .. });
    let warnings: Vec<String> = plan.warnings().iter().filter(known).map(ToString::to_string).collect();
    let mut out = stdout().lock();
    until_closed(match args.json {
        true => print_json(&mut out, &json!({ "errors": [], "warnings": warnings })),
        false => warnings
            .iter()
            .try_for_each(|warning| writeln!(out, "warning: {warning}"))
            .and_then(|()| writeln!(out, "{}: no errors, {} tensors", args.file.display(), plan.entries().len()))
            .map_err(Into::into),
    })?;
    Ok(ExitCode::SUCCESS)
}

fn build(model: &Model, recipe: &Recipe) -> nvfp4::Result<Plan> {
    Plan::build(model, recipe, &Capabilities::software())
}

/// A preset by its name, the environment, or a file.
fn read_recipe(name: &str) -> nvfp4::Result<Recipe> {
    let path = Path::new(name);
    match name.parse::<Preset>() {
        Ok(preset) => Ok(preset.into()),
        Err(_) if name == "env" => Recipe::from_env(),
        Err(_) if path.exists() || path.extension().is_some_and(|extension| extension == "toml") => {
            Recipe::from_file(path)
        }
        Err(error) => Err(error),
    }
}

fn read_model(path: Option<&Path>) -> Result<Model> {
    match path {
        Some(path) => Model::from_config_file(path).with_context(|| format!("--model {}", path.display())),
        None => {
            let mut model = Model::new();
            model.nest("layers.0", &TransformerLayer::default());
            model.add(Module::grouped_linear("layers.0.experts", 8));
            Ok(model)
        }
    }
}

/// Everything that is wrong, one line each; other errors are as anywhere.
fn problems(error: Error, as_json: bool) -> Result<ExitCode> {
    let Error::Recipe(Problems(problems)) = error else { return Err(anyhow!(error)) };
    if as_json {
        let errors: Vec<String> = problems.iter().map(Problem::to_string).collect();
        until_closed(print_json(&mut stdout().lock(), &json!({ "errors": errors, "warnings": [] })))?;
    } else {
        problems.iter().for_each(|problem| eprintln!("error: {problem}"));
    }
    Ok(ExitCode::from(PROBLEMS))
}

fn print_json(out: &mut impl Write, value: &Value) -> Result<()> {
    writeln!(out, "{}", serde_json::to_string_pretty(value)?).map_err(Into::into)
}
