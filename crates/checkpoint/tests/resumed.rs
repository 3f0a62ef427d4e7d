//! Every form that is written, with every way to choose scales: the same bytes with hardly any memory, and after
//! a stop.

mod converted;
mod generated;

use converted::*;
use generated::*;
use nvfp4_checkpoint::*;
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Stops a conversion when some weights are written.
struct Stop {
    stop: AtomicBool,
    left: AtomicBool,
}

impl Observer for Stop {
    fn finished(&self, _: &Finished) {
        // Not the first weight but the second.
        if !self.left.swap(false, Ordering::Relaxed) {
            self.stop.store(true, Ordering::Relaxed);
        }
    }
}

fn read(path: &Path) -> BTreeMap<String, Vec<u8>> {
    if path.is_dir() { contents(path) } else { BTreeMap::from([(String::new(), fs::read(path).unwrap())]) }
}

fn forms() -> Vec<Settings> {
    let mut all = Vec::new();
    for target in [Target::ModelOpt, Target::CompressedTensors, Target::Gguf, Target::ComfyUi] {
        for scale in [
            ScaleChoice::Max,
            ScaleChoice::Mse,
            ScaleChoice::FourOverSix,
            ScaleChoice::ModelOptMse,
            ScaleChoice::ModelOptFourOverSix,
        ] {
            all.push(Settings { scale, ..to(target) });
        }
    }
    for target in [Target::ModelOpt, Target::CompressedTensors] {
        for preset in ["mlp+fp8", "fp8"] {
            let (preset, rules) = Rules::preset(preset).unwrap();
            all.push(Settings { selection: Selection { preset, rules, ..Selection::default() }, ..to(target) });
        }
        for form in ["fp8-channel", "fp8-block", "mxfp8"] {
            let rules = Rules::from_toml(&format!("[default]\nform = \"{form}\"")).unwrap();
            all.push(Settings { selection: Selection { rules, ..Selection::default() }, ..to(target) });
        }
    }
    all
}

#[test]
fn every_form_has_the_same_bytes_in_small_pieces_and_resumed() {
    let dir = Folder::new();
    // Wide enough for blocks of 128.
    let named = |name: &str, shape: &[usize], seed| (name.to_string(), random(Dtype::BF16, shape, seed));
    let wide = Tensors::from([
        named("model.layers.0.mlp.down_proj.weight", &[256, 384], 1),
        named("model.layers.0.mlp.up_proj.weight", &[384, 256], 2),
        named("model.layers.0.self_attn.o_proj.weight", &[256, 128], 3),
        named("model.norm.weight", &[256], 4),
    ]);
    folder(&dir.join("plain"), &[wide], &llama_config());
    for_llama_cpp::source(&dir.join("for-llama-cpp"), "LlamaForCausalLM", 0);
    for (n, settings) in forms().into_iter().enumerate() {
        let (source, end) = match settings.target {
            Target::Gguf => ("for-llama-cpp", ".gguf"),
            Target::ComfyUi => ("plain", ".safetensors"),
            _ => ("plain", ""),
        };
        let source = dir.join(source);
        let (whole, small, resumed) =
            (dir.join(&format!("a{n}{end}")), dir.join(&format!("b{n}{end}")), dir.join(&format!("c{n}{end}")));
        run(&source, &whole, &settings).unwrap_or_else(|error| panic!("{settings:?}: {error}"));
        let expected = read(&whole);
        let least = Settings { memory: 1, threads: 1, ..settings };
        run(&source, &small, &least).unwrap();
        assert!(read(&small) == expected, "in small pieces: {least:?}");
        let observer = Stop { stop: AtomicBool::new(false), left: AtomicBool::new(true) };
        let stopped = convert(&source, &resumed, &least, &observer, &observer.stop);
        assert!(matches!(stopped, Err(Error::Interrupted)) && !resumed.exists(), "{least:?}");
        run(&source, &resumed, &Settings { existing: Existing::Resume, ..least.clone() }).unwrap();
        assert!(read(&resumed) == expected, "resumed: {least:?}");
    }
}
