//! The memory that an evaluation says it needs is what it needs at most. A process of its own: what a process took
//! at most is counted for all of it.
#![cfg(target_os = "linux")]

mod generated;

use generated::*;
use half::bf16;
use nvfp4_checkpoint::{Acts, Settings};
use nvfp4_model::{Activations, Evaluate, Lanes, Rows, Source, open};
use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::Path;

const WIDE: usize = 4096;
const INNER: usize = 14336;
const VOCABULARY: usize = 8192;

/// Writes a Llama in the shapes of Llama 3 8B, a row at a time.
fn large(folder: &Path, layers: usize) {
    std::fs::create_dir_all(folder).unwrap();
    let mut shapes = vec![
        ("model.embed_tokens".to_string(), vec![VOCABULARY, WIDE]),
        ("lm_head".to_string(), vec![VOCABULARY, WIDE]),
        ("model.norm".to_string(), vec![WIDE]),
    ];
    for layer in 0..layers {
        let own = [
            ("input_layernorm", vec![WIDE]),
            ("post_attention_layernorm", vec![WIDE]),
            ("self_attn.q_proj", vec![WIDE, WIDE]),
            ("self_attn.k_proj", vec![1024, WIDE]),
            ("self_attn.v_proj", vec![1024, WIDE]),
            ("self_attn.o_proj", vec![WIDE, WIDE]),
            ("mlp.gate_proj", vec![INNER, WIDE]),
            ("mlp.up_proj", vec![INNER, WIDE]),
            ("mlp.down_proj", vec![WIDE, INNER]),
        ];
        shapes.extend(own.map(|(name, shape)| (format!("model.layers.{layer}.{name}"), shape)));
    }
    let (mut header, mut end) = (Map::new(), 0);
    for (name, shape) in &shapes {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        header
            .insert(format!("{name}.weight"), json!({ "dtype": "BF16", "shape": shape, "data_offsets": [start, end] }));
    }
    let mut header = Value::Object(header).to_string();
    header.extend(std::iter::repeat_n(' ', (8 - header.len() % 8) % 8));
    let file = std::fs::File::create(folder.join("model.safetensors")).unwrap();
    let mut file = std::io::BufWriter::with_capacity(1 << 20, file);
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    for (seed, (name, shape)) in shapes.iter().enumerate() {
        let cols = *shape.last().unwrap();
        let value = |i: usize| if name.ends_with("norm") { 1.0 } else { 0.02 * usual("x", i + seed) };
        // Rows differ by where they begin.
        let line: Vec<u8> = (0..2 * cols).flat_map(|i| bf16::from_f32(value(i)).to_le_bytes()).collect();
        let rows = shape.iter().product::<usize>() / cols;
        (0..rows).for_each(|row| file.write_all(&line[2 * (row * 7 % cols)..][..2 * cols]).unwrap());
    }
    file.flush().unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDE, "intermediate_size": INNER,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
}

/// Bytes that this process has had in memory at most since the last call.
fn most() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    let most = line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10;
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    most
}

fn evaluates_within(reference: Option<&Path>, model: &Path, tokens: &[(usize, usize)]) {
    let (first, second) = (reference.map(|path| open(path).unwrap()), open(model).unwrap());
    let first = first.as_ref().map(|checkpoint| Source::new(checkpoint, None).unwrap());
    let second = Source::new(&second, None).unwrap();
    for &(count, length) in tokens {
        let row: Vec<u32> = (0..length).map(|i| (i * 37 % VOCABULARY) as u32).collect();
        let rows = Rows::new(std::iter::repeat_n(&row[..], count));
        let evaluate = Evaluate {
            reference: first.as_ref(),
            model: &second,
            rows: &rows,
            given: 0,
            activations: Activations::AsStored,
            lanes: Lanes::Each,
            state: None,
        };
        most();
        evaluate.run(&mut (), &GO).unwrap();
        let (most, stated) = (most(), evaluate.peak());
        println!("{count} rows of {length}: {} MB, stated {} MB", most >> 20, stated >> 20);
        assert!(most <= stated, "{count} rows of {length}: {most} bytes, stated {stated}");
        assert!(stated <= 2 * most + (64 << 20), "{count} rows of {length}: {most} bytes, stated {stated}");
    }
}

/// With `NVFP4_TEST_LAYERS=27` the checkpoint has 12 GB; the default is two layers.
#[test]
#[ignore = "writes a checkpoint of a gigabyte"]
fn an_evaluation_takes_the_memory_that_it_states() {
    let dir = Folder::new("memory");
    let layers = std::env::var("NVFP4_TEST_LAYERS").map_or(2, |layers| layers.parse().unwrap());
    large(&dir.join("large"), layers);
    let bytes = std::fs::metadata(dir.join("large/model.safetensors")).unwrap().len();
    println!("{layers} layers, {} MB on disk", bytes >> 20);
    if layers > 2 {
        evaluates_within(None, &dir.join("large"), &[(1, 16)]);
        return;
    }
    evaluates_within(None, &dir.join("large"), &[(1, 16), (8, 64), (1, 600)]);
    let settings = Settings { acts: Acts::Constant(0.01), ..Settings::default() };
    converted(&dir.join("large"), &dir.join("packed"), &settings);
    evaluates_within(Some(&dir.join("large")), &dir.join("packed"), &[(1, 16), (4, 64)]);
}
