//! Every checkpoint that must be refused: the message names what is wrong, and nothing is left under a final name.

mod converted;
mod generated;

use converted::beside_layers;
use generated::*;
use nvfp4_checkpoint::*;
use safetensors::Dtype;
use serde_json::json;
use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// The error of a conversion that must fail; its target must not appear.
fn refused(source: &Path, target: &Path, settings: &Settings) -> String {
    let before = target.exists();
    let error = convert(source, target, settings, &(), &AtomicBool::new(false)).unwrap_err().to_string();
    assert_eq!(target.exists(), before, "{error}");
    error
}

/// A good checkpoint in a folder, to be damaged.
fn good() -> Folder {
    let dir = Folder::new();
    folder(&dir.join("in"), &llama(Dtype::BF16), &llama_config());
    dir
}

fn open_error(dir: &Folder) -> String {
    let error = Checkpoint::open(&dir.join("in")).unwrap_err().to_string();
    assert_eq!(refused(&dir.join("in"), &dir.join("out"), &Settings::default()), error);
    error
}

const SECOND: &str = "in/model-00002-of-00002.safetensors";
const INDEX: &str = "in/model.safetensors.index.json";

#[test]
fn a_truncated_shard() {
    let dir = good();
    let bytes = fs::read(dir.join(SECOND)).unwrap();
    for keep in [0, 7, 8, 100, bytes.len() / 2, bytes.len() - 1] {
        fs::write(dir.join(SECOND), &bytes[..keep]).unwrap();
        let error = open_error(&dir);
        assert!(error.contains("model-00002-of-00002.safetensors") && error.contains("truncated"), "{keep}: {error}");
    }
}

#[test]
fn a_shard_that_shrinks_while_it_is_read() {
    let dir = good();
    let checkpoint = Checkpoint::open(&dir.join("in")).unwrap();
    let file = fs::File::options().write(true).open(dir.join(SECOND)).unwrap();
    file.set_len(2000).unwrap();
    let model = Model::new(&checkpoint).unwrap();
    let weight = model.weight("model.layers.1.mlp.down_proj").unwrap();
    let error = weight.values(0..64, &mut Buffer::default()).unwrap_err().to_string();
    let what =
        "tensor 'model.layers.1.mlp.down_proj.weight': the file ends inside it; it became shorter since it was opened";
    assert!(error.contains("model-00002-of-00002.safetensors") && error.ends_with(what), "{error}");
}

#[test]
fn a_header_that_claims_to_be_huge() {
    let dir = good();
    for len in [u64::MAX, 1 << 40, MAX_HEADER + 1] {
        let mut bytes = fs::read(dir.join(SECOND)).unwrap();
        bytes[..8].copy_from_slice(&len.to_le_bytes());
        fs::write(dir.join(SECOND), &bytes).unwrap();
        assert!(open_error(&dir).contains("more than the 100000000 that are allowed"));
    }
}

#[test]
fn a_header_that_is_not_json() {
    let dir = good();
    let mut bytes = fs::read(dir.join(SECOND)).unwrap();
    bytes[8] = b'!';
    fs::write(dir.join(SECOND), &bytes).unwrap();
    assert!(open_error(&dir).contains("header: "));
}

#[test]
fn an_index_that_names_a_missing_file() {
    let dir = good();
    fs::remove_file(dir.join(SECOND)).unwrap();
    let error = open_error(&dir);
    assert!(error.contains("'model-00002-of-00002.safetensors', which is missing"), "{error}");
}

#[test]
fn an_index_that_disagrees_with_the_files() {
    let dir = good();
    let text = fs::read_to_string(dir.join(INDEX)).unwrap();
    fs::write(dir.join(INDEX), text.replace("\"lm_head.weight\"", "\"head.weight\"")).unwrap();
    assert!(
        open_error(&dir)
            .contains("tensor 'head.weight' is not in 'model-00002-of-00002.safetensors', where the index has it")
    );
    fs::write(dir.join(INDEX), text.replace("\"lm_head.weight\":\"model-00002-of-00002.safetensors\",", "")).unwrap();
    assert!(open_error(&dir).contains("tensor 'lm_head.weight' is in the files but not in the index"));
}

#[test]
fn an_index_that_is_not_one() {
    let dir = good();
    for text in [
        "",
        "[]",
        "{}",
        "{\"weight_map\": 3}",
        "{\"weight_map\": {\"a\": 3}}",
        "{\"weight_map\": {\"a\": \"b\", \"a\": \"c\"}}",
    ] {
        fs::write(dir.join(INDEX), text).unwrap();
        assert!(open_error(&dir).contains("model.safetensors.index.json"), "{text}");
    }
}

#[test]
fn two_shards_with_one_tensor() {
    let dir = good();
    let tensors = llama(Dtype::BF16).remove(0);
    save(&dir.join("in/model-00002-of-00002.safetensors"), &tensors);
    let error = open_error(&dir);
    assert!(error.contains("is also in") && error.contains("model-00001-of-00002.safetensors"), "{error}");
}

#[test]
fn a_name_that_leads_out_of_the_folder() {
    let dir = good();
    fs::copy(dir.join(SECOND), dir.join("outside.safetensors")).unwrap();
    let text = fs::read_to_string(dir.join(INDEX)).unwrap();
    let absolute = dir.join("outside.safetensors").to_string_lossy().into_owned();
    for name in ["../outside.safetensors", &absolute, "..", "a/../../outside.safetensors", "./x", "a\\\\b", ""] {
        fs::write(dir.join(INDEX), text.replace("model-00002-of-00002.safetensors", name)).unwrap();
        assert!(open_error(&dir).contains("leads out of the folder"), "{name}");
    }
}

#[cfg(unix)]
#[test]
fn a_symbolic_link_that_leads_out_of_the_folder() {
    let dir = good();
    fs::rename(dir.join(SECOND), dir.join("outside.safetensors")).unwrap();
    std::os::unix::fs::symlink(dir.join("outside.safetensors"), dir.join(SECOND)).unwrap();
    assert!(open_error(&dir).contains("is a symbolic link that leads out of the folder"));
    fs::remove_file(dir.join(SECOND)).unwrap();
    fs::rename(dir.join("outside.safetensors"), dir.join(SECOND)).unwrap();
    fs::write(dir.join("secret"), "secret").unwrap();
    std::os::unix::fs::symlink(dir.join("secret"), dir.join("in/notes.txt")).unwrap();
    let error = refused(&dir.join("in"), &dir.join("out"), &Settings::default());
    assert!(error.contains("'notes.txt' is a symbolic link that leads out"), "{error}");
}

#[cfg(unix)]
#[test]
fn links_to_folders_are_not_followed() {
    let dir = good();
    fs::create_dir(dir.join("outside")).unwrap();
    fs::write(dir.join("outside/secret"), "secret").unwrap();
    for (to, name) in [(".", "in/loop"), ("..", "in/1_Pooling/loop"), ("../outside", "in/other")] {
        std::os::unix::fs::symlink(to, dir.join(name)).unwrap();
    }
    let companions = Checkpoint::open(&dir.join("in")).unwrap().companions().unwrap();
    assert_eq!(companions, ["1_Pooling/config.json", "tokenizer.json"].map(std::path::PathBuf::from));
    convert(&dir.join("in"), &dir.join("out"), &Settings::default(), &(), &AtomicBool::new(false)).unwrap();
}

/// A pipe without a writer blocks whoever opens it and waits; nothing here does.
#[cfg(unix)]
#[test]
fn pipes_sockets_and_devices_are_refused_at_once() {
    let fifo = |path: &Path| {
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    };
    let special = "where a file is expected";
    for name in [SECOND, INDEX, "in/config.json"] {
        let dir = good();
        fs::remove_file(dir.join(name)).unwrap();
        fifo(&dir.join(name));
        let error = open_error(&dir);
        assert!(error.contains(name) && error.ends_with(special), "{error}");
        fs::remove_file(dir.join(name)).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(dir.join(name)).unwrap();
        let error = open_error(&dir);
        assert!(error.contains(name) && error.ends_with(special), "{error}");
        fs::remove_file(dir.join(name)).unwrap();
        fs::create_dir(dir.join(name)).unwrap();
        assert!(open_error(&dir).contains("a folder, where a file is expected"));
    }
    let dir = good();
    fifo(&dir.join("in/notes.txt"));
    let error = convert(&dir.join("in"), &dir.join("out"), &Settings::default(), &(), &AtomicBool::new(false));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("in/notes.txt") && error.ends_with(special), "{error}");
    for path in [Path::new("/dev/zero"), &dir.join("in/notes.txt")] {
        assert!(Checkpoint::open(path).unwrap_err().to_string().ends_with(special));
        assert!(gguf::GgufFile::open(path).unwrap_err().to_string().ends_with(special));
        assert!(!gguf::is_gguf(path));
    }
}

#[test]
fn files_that_are_no_safetensors_are_called_that() {
    let dir = Folder::new();
    let open = |bytes: &[u8]| {
        fs::write(dir.join("model.pth"), bytes).unwrap();
        Checkpoint::open(&dir.join("model.pth")).unwrap_err().to_string()
    };
    let zip = open(b"PK\x03\x04\0\0\x08\x08\0\0data.pkl");
    assert!(
        zip.contains("not a safetensors file: it is a ZIP archive, as PyTorch's .pt, .pth and .bin files are"),
        "{zip}"
    );
    assert!(open(b"\x80\x02}q\0X\x06\0\0\0weight").contains("it is a pickle"));
    let text = open(b"version https://git-lfs.github.com/spec/v1");
    assert!(text.contains("not a safetensors file: its first bytes are not the length of a header"), "{text}");
}

#[test]
fn a_model_that_is_not_on_this_machine() {
    let error = Checkpoint::open(Path::new("Qwen/Qwen3-8B")).unwrap_err().to_string();
    let what = "No such file or folder; a model is read from this machine, so download it and give its folder";
    assert_eq!(error, format!("Qwen/Qwen3-8B: {what}"));
}

#[test]
fn a_byte_order_mark_before_json_is_passed_over() {
    let dir = good();
    let text = fs::read_to_string(dir.join("in/config.json")).unwrap();
    fs::write(dir.join("in/config.json"), format!("\u{feff}{text}")).unwrap();
    let checkpoint = Checkpoint::open(&dir.join("in")).unwrap();
    assert_eq!(checkpoint.config().unwrap()["vocab_size"], json!(64));
}

/// The Hugging Face cache keeps files under `blobs` and links to them from `snapshots/REVISION`.
#[cfg(unix)]
#[test]
fn links_within_the_hugging_face_cache_are_followed() {
    let dir = good();
    fs::create_dir_all(dir.join("hub/snapshots")).unwrap();
    fs::create_dir_all(dir.join("hub/blobs")).unwrap();
    fs::rename(dir.join("in"), dir.join("hub/snapshots/abc")).unwrap();
    let name = "hub/snapshots/abc/model-00002-of-00002.safetensors";
    fs::rename(dir.join(name), dir.join("hub/blobs/123")).unwrap();
    std::os::unix::fs::symlink("../../blobs/123", dir.join(name)).unwrap();
    convert(&dir.join("hub/snapshots/abc"), &dir.join("out"), &Settings::default(), &(), &AtomicBool::new(false))
        .unwrap();
}

#[test]
fn unknown_types() {
    let dir = good();
    let bytes = fs::read(dir.join(SECOND)).unwrap();
    let at = bytes.windows(6).position(|w| w == b"\"BF16\"").unwrap();
    let mut changed = bytes.clone();
    changed[at..at + 6].copy_from_slice(b"\"BF17\"");
    fs::write(dir.join(SECOND), changed).unwrap();
    assert!(open_error(&dir).contains("unknown type 'BF17'"));
}

#[test]
fn weights_that_are_nan_or_infinite() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let dir = Folder::new();
        let mut x = values(64 * 64, 1);
        x[64 * 37 + 5] = bad;
        let name = "model.layers.0.mlp.down_proj.weight".to_string();
        folder(&dir.join("in"), &[Tensors::from([(name, tensor(Dtype::BF16, &[64, 64], &x))])], &llama_config());
        let error = refused(&dir.join("in"), &dir.join("out"), &Settings::default());
        assert!(error.contains(&format!("'model.layers.0.mlp.down_proj' holds {bad} at row 37, column 5")), "{error}");
    }
}

#[test]
fn a_configuration_that_is_not_json() {
    let dir = good();
    for text in ["{", "{\"a\": 1, \"a\": 2}"] {
        fs::write(dir.join("in/config.json"), text).unwrap();
        assert!(open_error(&dir).contains("config.json"));
    }
}

#[test]
fn checkpoints_in_formats_that_are_not_read() {
    let dir = Folder::new();
    let config = json!({ "quantization_config": { "quant_method": "gptq" } });
    folder(&dir.join("gptq"), &[layer(0, Dtype::F16)], &config);
    assert!(refused(&dir.join("gptq"), &dir.join("out"), &Settings::default()).contains("quantized by 'gptq'"));
    for method in ["modelopt", "compressed-tensors"] {
        let fp8 = Tensor { dtype: Dtype::F8_E4M3, shape: vec![4, 16], bytes: vec![0; 64] };
        let config = json!({ "quantization_config": { "quant_method": method } });
        folder(&dir.join(method), &[Tensors::from([("a.weight".to_string(), fp8)])], &config);
        let error = refused(&dir.join(method), &dir.join("out"), &Settings::default());
        assert!(
            error.contains(&format!("FP8 by '{method}'"))
                && error.contains("without scales that are read ('weight_scale' of"),
            "{error}"
        );
    }
    fs::write(dir.join("m.gguf"), b"GGUF\x03\0\0\0\0\0\0\0").unwrap();
    assert!(refused(&dir.join("m.gguf"), &dir.join("out"), &Settings::default()).contains("this is a GGUF file"));
    fs::create_dir(dir.join("empty")).unwrap();
    assert!(refused(&dir.join("empty"), &dir.join("out"), &Settings::default()).contains("no safetensors files"));
    let missing = refused(&dir.join("nowhere"), &dir.join("out"), &Settings::default());
    assert!(missing.contains("nowhere"), "{missing}");
}

#[test]
fn a_target_that_exists() {
    let dir = good();
    fs::create_dir(dir.join("out")).unwrap();
    fs::write(dir.join("out/precious.txt"), "mine").unwrap();
    let error = refused(&dir.join("in"), &dir.join("out"), &Settings::default());
    assert!(error.contains("already exists"), "{error}");
    let force = Settings { existing: Existing::Replace, ..Settings::default() };
    let error = refused(&dir.join("in"), &dir.join("out"), &force);
    assert!(error.contains("'precious.txt', which is not part of a checkpoint"), "{error}");
    assert_eq!(fs::read_to_string(dir.join("out/precious.txt")).unwrap(), "mine");
    fs::create_dir(dir.join("out2.partial")).unwrap();
    // Files that are half written may be anybody's: ours have a journal beside them.
    for precious in ["out2.partial/precious.txt", "out2.partial/precious.part"] {
        fs::write(dir.join(precious), "mine").unwrap();
        for existing in [Existing::Refuse, Existing::Resume, Existing::Replace] {
            let said = refused(&dir.join("in"), &dir.join("out2"), &Settings { existing, ..Settings::default() });
            assert!(said.contains("out2.partial is in the way and not an unfinished conversion; move it"), "{said}");
        }
        fs::remove_file(dir.join(precious)).unwrap();
    }
}

#[test]
fn a_checkpoint_is_replaced_on_request_only_when_the_new_one_is_whole() {
    let dir = good();
    let stop = AtomicBool::new(false);
    convert(&dir.join("in"), &dir.join("out"), &Settings::default(), &(), &stop).unwrap();
    let before = contents(&dir.join("out"));
    let force = Settings { existing: Existing::Replace, target: Target::CompressedTensors, ..Settings::default() };
    let error = convert(&dir.join("in"), &dir.join("out"), &force, &(), &AtomicBool::new(true)).unwrap_err();
    assert!(matches!(error, Error::Interrupted));
    assert!(contents(&dir.join("out")) == before);
    convert(&dir.join("in"), &dir.join("out"), &force, &(), &stop).unwrap();
    assert!(contents(&dir.join("out")) != before);
    assert!(!dir.join("out.replaced").exists() && !dir.join("out.partial").exists());
}

#[cfg(target_os = "linux")]
#[test]
fn a_target_that_cannot_be_written() {
    let dir = good();
    let error = refused(&dir.join("in"), Path::new("/proc/nvfp4-out"), &Settings::default());
    assert!(error.contains("/proc/nvfp4-out.partial"), "{error}");
}

#[test]
fn a_target_in_its_source_or_around_it() {
    let dir = good();
    let before = contents(&dir.join("in"));
    let force = Settings { existing: Existing::Replace, ..Settings::default() };
    for (source, target) in [("in", "in"), ("in", "in/out"), ("in", "in/../in/out"), ("in", ".")] {
        let error = refused(&dir.join(source), &dir.join(target), &force);
        assert!(error.contains("is inside the other"), "{source} {target}: {error}");
    }
    assert!(contents(&dir.join("in")) == before);
}

#[test]
fn parts_of_a_quantized_weight_that_do_not_fit() {
    let dir = good();
    convert(&dir.join("in"), &dir.join("q"), &Settings::default(), &(), &AtomicBool::new(false)).unwrap();
    let checkpoint = Checkpoint::open(&dir.join("q")).unwrap();
    let all: Tensors = checkpoint
        .tensors()
        .map(|t| {
            (
                t.info.name.clone(),
                Tensor { dtype: t.info.dtype, shape: t.info.shape.clone(), bytes: t.bytes().unwrap() },
            )
        })
        .collect();
    let module = "model.layers.0.mlp.up_proj";
    let damaged = |change: &dyn Fn(&mut Tensors)| {
        let mut tensors = all.clone();
        change(&mut tensors);
        save(&dir.join("q/model.safetensors"), &tensors);
        let checkpoint = Checkpoint::open(&dir.join("q")).unwrap();
        Model::new(&checkpoint).unwrap_err().to_string()
    };
    let name = |part: &str| format!("{module}.{part}");
    let error = damaged(&|t| drop(t.remove(&name("weight_scale"))));
    assert!(error.contains("'model.layers.0.mlp.up_proj.weight_scale' is missing"), "{error}");
    let error = damaged(&|t| t.get_mut(&name("weight_scale")).unwrap().shape.reverse());
    assert!(error.contains("expected the scales of 96 × 4 blocks, got [4, 96]"), "{error}");
    let error = damaged(&|t| t.get_mut(&name("weight_scale")).unwrap().dtype = Dtype::U8);
    assert!(error.contains("expected F8_E4M3 scales, got U8"), "{error}");
    let error = damaged(&|t| t.get_mut(&name("weight_scale_2")).unwrap().dtype = Dtype::U32);
    assert!(error.contains("expected one F32 number"), "{error}");
}

/// What `verify` must find in a checkpoint that loads.
#[test]
fn checkpoints_that_would_load_wrongly() {
    let dir = good();
    let settings = Settings { acts: Acts::Constant(1.0), ..Settings::default() };
    convert(&dir.join("in"), &dir.join("q"), &settings, &(), &AtomicBool::new(false)).unwrap();
    let checkpoint = Checkpoint::open(&dir.join("q")).unwrap();
    let all: Tensors = checkpoint
        .tensors()
        .map(|t| {
            (
                t.info.name.clone(),
                Tensor { dtype: t.info.dtype, shape: t.info.shape.clone(), bytes: t.bytes().unwrap() },
            )
        })
        .collect();
    let found = |change: &dyn Fn(&mut Tensors), client| {
        let mut tensors = all.clone();
        change(&mut tensors);
        save(&dir.join("q/model.safetensors"), &tensors);
        let checkpoint = Checkpoint::open(&dir.join("q")).unwrap();
        let findings = beside_layers(verify(&Model::new(&checkpoint).unwrap(), client, 1).unwrap());
        findings.iter().map(|f| format!("{}: {}", f.about, f.text)).collect::<Vec<_>>().join("\n")
    };
    assert_eq!(found(&|_| {}, Client::Vllm), "");
    let module = "model.layers.0.mlp.up_proj";
    let name = |part: &str| format!("{module}.{part}");
    let set = |part: &str, at: usize, bytes: &[u8]| {
        let (part, bytes) = (name(part), bytes.to_vec());
        move |t: &mut Tensors| t.get_mut(&part).unwrap().bytes[at..at + bytes.len()].copy_from_slice(&bytes)
    };
    let float = |x: f32| x.to_le_bytes();
    assert!(found(&set("weight_scale_2", 0, &float(0.5)), Client::Vllm).contains("gate/up: tensor scales differ"));
    assert!(found(&set("weight_scale_2", 0, &float(0.0)), Client::Vllm).contains("the tensor scale is 0"));
    assert!(found(&set("weight_scale_2", 0, &float(f32::NAN)), Client::Vllm).contains("the tensor scale is NaN"));
    assert!(found(&set("weight_scale", 3, &[0x7F, 0xFF]), Client::Vllm).contains("2 block scales are NaN"));
    assert!(found(&set("weight_scale", 3, &[0xB8]), Client::Vllm).contains("1 block scales are negative"));
    assert!(found(&set("weight_scale", 3, &[0]), Client::Vllm).contains("1 blocks have the scale 0"));
    assert!(found(&|t| drop(t.remove(&name("input_scale"))), Client::Vllm).contains("vLLM reads uninitialised memory"));
    assert!(found(&set("input_scale", 0, &float(-1.0)), Client::Vllm).contains("the activation scale is -1"));
    assert!(found(&|_| {}, Client::LlamaCpp).contains("96 columns; GGUF needs a multiple of 64"));
    assert!(found(&|_| {}, Client::Transformers).contains("transformers does not load the ModelOpt dialect"));
    let plain = |t: &mut Tensors| {
        for part in ["weight", "weight_scale", "weight_scale_2", "input_scale"] {
            t.remove(&name(part));
        }
        t.insert(name("weight"), random(Dtype::BF16, &[96, 64], 1));
    };
    let text = found(&plain, Client::Vllm);
    assert!(text.contains("a server expects NVFP4") && text.contains("only 1 of 2 are NVFP4"), "{text}");
    for file in ["q/hf_quant_config.json", "q/config.json"] {
        let text = fs::read_to_string(dir.join(file)).unwrap();
        fs::write(dir.join(file), text.replace("\"lm_head\"", "\"lm_head\", \"layers.0.mlp.up\"")).unwrap();
        let found = found(&|_| {}, Client::Vllm);
        assert!(found.contains("NVFP4, but 'layers.0.mlp.up' in"), "{found}");
        fs::write(dir.join(file), text).unwrap();
    }
    let text = fs::read_to_string(dir.join("q/hf_quant_config.json")).unwrap();
    fs::write(dir.join("q/hf_quant_config.json"), text.replace("kv_cache_quant_algo", "kv")).unwrap();
    assert!(found(&|_| {}, Client::Vllm).contains("'kv_cache_quant_algo' is missing"));
}

/// Damaged headers are refused or read, in no time and without a panic.
#[test]
fn a_hundred_thousand_damaged_headers() {
    let dir = good();
    let bytes = fs::read(dir.join(SECOND)).unwrap();
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let (header, data_len) = (&bytes[8..8 + len], (bytes.len() - 8 - len) as u64);
    assert!(check_header(header, data_len));
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % below
    };
    let pieces: [&[u8]; 8] = [b"18446744073709551615", b"-1", b"[", b"}", b"\"", b"1e400", b"null", b"\"a\":{},"];
    let mut accepted = 0;
    for _ in 0..100_000 {
        let start = random(len);
        // A window keeps this fast: most of a header says the same again.
        let mut text = header[..(start + 400).min(len)].to_vec();
        if text.len() > 600 {
            text.drain(1..text.len() - 500);
        }
        for _ in 0..1 + random(3) {
            let at = random(text.len());
            match random(3) {
                0 => text[at] = random(256) as u8,
                1 => drop(text.splice(at..at, pieces[random(pieces.len())].iter().copied())),
                _ => drop(text.drain(at..(at + 1 + random(20)).min(text.len()))),
            }
            if text.is_empty() {
                text.push(b'{');
            }
        }
        accepted += u32::from(check_header(&text, data_len));
    }
    assert!(accepted < 100, "{accepted}");
}
