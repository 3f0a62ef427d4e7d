//! `nvfp4 demo`: a generated checkpoint, converted and verified with the commands that a user would
//! type.

use crate::{Cli, Command, Host, convert, diff, exit, json, normal, run, sizes, until_closed, verify};
use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use half::bf16;
use nvfp4_files::durable;
use rayon::prelude::*;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize_to_file};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Generate a small Llama-shaped checkpoint, convert it to NVFP4, verify it and write a report.
#[derive(clap::Args)]
pub struct Args {
    /// Working folder: a new or empty one, or that of an earlier demo [default: a new temporary
    /// folder].
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Number of layers, at most 1024; 8 make about 60 MB.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1024))]
    layers: u16,
    /// Seed of the weights.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Print JSON: {model, bytes, report, convert, verify, diff}, the last three as those commands
    /// do.
    #[arg(long)]
    json: bool,
}

/// Marks a folder as a demo's.
const MARK: &str = ".nvfp4-demo";

/// What a demo makes in its folder.
const MADE: [&str; 6] = [MARK, "llama", "llama-NVFP4", "llama-NVFP4.partial", "llama-NVFP4.replaced-1", "report.html"];

const VOCABULARY: usize = 6144;
const HIDDEN: usize = 512;
const FEED_FORWARD: usize = 1536;

/// The demonstration.
pub fn demonstrate(args: &Args, host: Host) -> Result<ExitCode> {
    let default = || std::env::temp_dir().join(format!("nvfp4-demo-{}", std::process::id()));
    let dir = args.dir.clone().unwrap_or_else(default);
    let model = dir.join("llama");
    check(&dir)?;
    std::fs::create_dir_all(&model).with_context(|| model.display().to_string())?;
    durable::write(&dir.join(MARK), b"Made by nvfp4 demo, which may replace what is in here.\n")?;
    let bytes = generate(&model, args.layers.into(), args.seed)?;
    let text = |name: &str| dir.join(name).to_string_lossy().into_owned();
    let (source, target, report) = (text("llama"), text("llama-NVFP4"), text("report.html"));
    let commands = [
        vec!["nvfp4", "convert", &source, &target, "--report", &report, "--quiet", "--force"],
        vec!["nvfp4", "verify", &target, "--for", "vllm"],
        vec!["nvfp4", "diff", &source, &target, "--top", "3"],
    ];
    if args.json {
        let mut found = json!({ "model": source, "bytes": bytes, "report": report });
        let mut passed = true;
        for words in &commands {
            let command = Cli::try_parse_from(words)?.command;
            let (name, (result, good)) = (command.name(), silently(command, host)?);
            (found[name], passed) = (result, passed && good);
        }
        json::print("demo", &found)?;
        return Ok(exit::checked(passed));
    }
    say(&format!(
        "generated a Llama of {} layers, {} in BF16, in {}\n",
        args.layers,
        sizes::show(bytes),
        model.display()
    ))?;
    for command in commands {
        say(&format!("$ {}", command.join(" ")))?;
        let code = run(Cli::try_parse_from(&command)?.command, host)?;
        if code != ExitCode::SUCCESS {
            return Ok(code);
        }
        say("")?;
    }
    say(&format!("Open {report} in a browser. When done: rm -r {}", dir.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// What a command of the demonstration finds, as JSON, and whether it found no problem.
fn silently(command: Command, host: Host) -> Result<(Value, bool)> {
    match command {
        Command::Convert(args) => convert::perform(&args, host, &mut std::io::sink()),
        Command::Verify(args) => verify::perform(&args, &mut std::io::sink()),
        Command::Diff(args) => diff::perform(&args, &mut std::io::sink()),
        _ => bail!("a demo has no such command"),
    }
}

/// An error if a folder holds anything but an earlier demo: its files are replaced, and the user is
/// told to remove them.
fn check(dir: &Path) -> Result<()> {
    if dir.symlink_metadata().is_err() {
        return Ok(());
    }
    let entries = std::fs::read_dir(dir).with_context(|| format!("--dir {}", dir.display()))?;
    let names = entries.map(|entry| Ok(entry?.file_name())).collect::<Result<Vec<_>>>()?;
    let earlier = names.iter().any(|name| name == MARK);
    let mine = names.iter().find(|name| !earlier || !MADE.iter().any(|made| name == made));
    ensure!(
        mine.is_none(),
        "--dir {}: it holds '{}', which no demo made; name a new or empty folder",
        dir.display(),
        mine.map(|name| name.to_string_lossy()).unwrap_or_default()
    );
    Ok(())
}

fn say(line: &str) -> Result<()> {
    until_closed(writeln!(stdout().lock(), "{line}").map_err(Into::into))
}

/// Writes the checkpoint; returns its bytes.
fn generate(folder: &Path, layers: usize, seed: u64) -> Result<u64> {
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_string(), vec![VOCABULARY, HIDDEN]),
        ("lm_head.weight".to_string(), vec![VOCABULARY, HIDDEN]),
        ("model.norm.weight".to_string(), vec![HIDDEN]),
    ];
    for layer in 0..layers {
        let own = [
            ("input_layernorm", vec![HIDDEN]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("self_attn.q_proj", vec![HIDDEN, HIDDEN]),
            ("self_attn.k_proj", vec![HIDDEN / 2, HIDDEN]),
            ("self_attn.v_proj", vec![HIDDEN / 2, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, HIDDEN]),
            ("mlp.gate_proj", vec![FEED_FORWARD, HIDDEN]),
            ("mlp.up_proj", vec![FEED_FORWARD, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, FEED_FORWARD]),
        ];
        shapes.extend(own.map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape)));
    }
    let data = shapes.iter().enumerate().map(|(i, (_, shape))| weights(shape, seed * 10_000 + i as u64));
    let data = data.collect::<Result<Vec<_>>>()?;
    let view = |((name, shape), data): (&(String, Vec<usize>), _)| {
        Ok((name.clone(), TensorView::new(Dtype::BF16, shape.clone(), data)?))
    };
    let views = shapes.iter().zip(data.iter().map(|d: &Vec<u8>| &d[..])).map(view).collect::<Result<Vec<_>>>()?;
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    durable::write_with(&folder.join("model.safetensors"), |part| -> Result<()> {
        Ok(serialize_to_file(views, Some(metadata), part)?)
    })?;
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD, "num_hidden_layers": layers, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16", "tie_word_embeddings": false
    });
    durable::write(&folder.join("config.json"), &serde_json::to_vec_pretty(&config)?)?;
    durable::write(&folder.join("tokenizer.json"), &serde_json::to_vec_pretty(&tokenizer())?)?;
    Ok(data.iter().map(|d| d.len() as u64).sum())
}

/// A tokenizer whose tokens are bytes: a byte-level BPE without merges.
fn tokenizer() -> Value {
    let level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    // Bytes that have no printable character are named by the characters from U+0100 on.
    let printable = |byte: &u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let others: Vec<u8> = (0..=255).filter(|byte| !printable(byte)).collect();
    let name = |byte: u8| match others.iter().position(|&other| other == byte) {
        Some(i) => char::from_u32(0x100 + i as u32).expect("U+0100 to U+0143 are characters"),
        None => char::from(byte),
    };
    let vocabulary: Map<String, Value> = (0..=255).map(|byte| (name(byte).to_string(), json!(byte))).collect();
    json!({
        "version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level,
        "model": { "type": "BPE", "vocab": vocabulary, "merges": [] }
    })
}

/// Normal values whose spread varies, so that tails are heavy, as in trained weights; in some
/// tensors more than in others.
fn weights(shape: &[usize], seed: u64) -> Result<Vec<u8>> {
    let (rows, cols) = if let [rows, cols] = *shape { (rows, cols) } else { (1, shape[0]) };
    let (z, spread) =
        (normal::standard::<f32>(rows, cols, 2 * seed)?, normal::standard::<f32>(rows, cols, 2 * seed + 1)?);
    let tail = 0.3 + 0.1 * (seed * 7 % 5) as f32;
    let mut bytes = vec![0; z.len() * 2];
    bytes.par_chunks_mut(2).zip(z.par_iter().zip(&spread)).for_each(|(to, (z, s))| {
        to.copy_from_slice(&bf16::from_f32(0.02 * z * (tail * s).exp()).to_le_bytes());
    });
    Ok(bytes)
}
