//! `nvfp4 generate`: what a model says.

use crate::device::Device;
use crate::interrupt::interrupts;
use crate::source::From;
use crate::{Host, json, until_closed};
use anyhow::{Result, ensure};
use nvfp4_files::regular;
use nvfp4_model::{Activations, Generation, KeysValues, Run, Sampling, Source, Tokens, generate, open};
use serde_json::{Value, json};
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Continue a text with a model, plain or quantized, on a CPU or a GPU.
#[derive(clap::Args)]
pub struct Args {
    /// Model folder.
    model: PathBuf,
    /// The text to continue.
    #[arg(long)]
    prompt: String,
    /// Tokens to generate at most.
    #[arg(long, default_value_t = 64)]
    tokens: usize,
    /// 0 takes the most likely token; more makes others more likely.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Draw from the most likely tokens that have this share of the probability.
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Seed of the random numbers.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Format of the checkpoint, when it cannot be detected.
    #[arg(long, value_enum)]
    from: Option<From>,
    /// Where products with weights are computed: cpu, cuda or cuda:N.
    #[arg(long, default_value = "cpu")]
    device: Device,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, host: Host) -> Result<ExitCode> {
    ensure!(args.temperature >= 0.0 && args.temperature.is_finite(), "--temperature: expected 0 or more");
    ensure!(args.top_p > 0.0 && args.top_p <= 1.0, "--top-p: expected a share, above 0 and at most 1");
    let (place, checkpoint) = (args.device.place()?, open(&args.model)?);
    let source = Source::new(&checkpoint, args.from.map(|from| from.dialect()))?.on(place);
    let tokens = Tokens::read(&args.model)?;
    let prompt = [tokens.beginning()?, tokens.encode(&args.prompt)?].concat();
    let sampling = match args.temperature {
        0.0 => Sampling::Greedy,
        temperature => Sampling::Random { temperature, top_p: args.top_p, seed: args.seed },
    };
    let ends = ends(&args.model, checkpoint.config())?;
    let generation = Generation { prompt: &prompt, most: args.tokens, ends: &ends, sampling };
    let run = Run { activations: Activations::AsStored, keys_values: KeysValues::AsStored, watch: &() };
    let (mut all, mut printed) = (Vec::new(), 0);
    let start = Instant::now();
    let made = generate(&source, &generation, &run, interrupts(host)?, |token| {
        all.push(token);
        let text = tokens.decode(&all)?;
        // A token may end within a character, which the next completes.
        if !args.json && !text.ends_with('\u{FFFD}') {
            let _ = write!(stdout().lock(), "{}", crate::names::shown_lines(text.get(printed..).unwrap_or_default()));
            let _ = stdout().lock().flush(); // a closed pipe has all that it wants
            printed = text.len();
        }
        Ok(())
    })?;
    let seconds = start.elapsed().as_secs_f64();
    let rate = made.len() as f64 / seconds.max(1e-9);
    if args.json {
        let text = tokens.decode(&made)?;
        let report = json!({ "text": text, "prompt_tokens": prompt.len(), "tokens": made, "seconds": seconds, "tokens_per_second": rate });
        json::print("generate", &report)?;
        return Ok(ExitCode::SUCCESS);
    }
    until_closed(writeln!(stdout().lock()).map_err(Into::into))?;
    crate::say::say(format_args!("{} after {}: {rate:.1} tokens/s", made.len(), prompt.len()));
    Ok(ExitCode::SUCCESS)
}

/// The tokens that end a text.
fn ends(model: &Path, config: Option<&Value>) -> Result<Vec<u32>> {
    let path = model.join("generation_config.json");
    let generation: Option<Value> = if path.exists() { Some(regular::read_json(&path, 1 << 20)?) } else { None };
    let found = [generation.as_ref(), config]
        .into_iter()
        .flatten()
        .find_map(|json| json.get("eos_token_id").filter(|id| !id.is_null()));
    let ids = found.map(|id| id.as_array().cloned().unwrap_or_else(|| vec![id.clone()])).unwrap_or_default();
    Ok(ids.iter().filter_map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect())
}
