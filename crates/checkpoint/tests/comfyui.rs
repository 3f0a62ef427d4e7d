//! ComfyUI's single file: the values of a conversion to ModelOpt's form, with the other nibble first and scales in
//! tiles.

mod converted;
mod generated;

use converted::*;
use generated::*;
use nvfp4::Precision;
use nvfp4_checkpoint::*;
use nvfp4_spec::swizzle;
use safetensors::Dtype;
use std::fs;
use std::sync::atomic::AtomicBool;

/// Weights of more than one tile, in both directions, and a norm.
fn source() -> Tensors {
    let named = |name: &str, shape: &[usize], seed| (name.to_string(), random(Dtype::BF16, shape, seed));
    Tensors::from([
        named("blocks.0.img_attn.qkv.weight", &[400, 144], 1),
        named("blocks.0.img_attn.proj.weight", &[16, 400], 2),
        named("blocks.0.norm.weight", &[144], 3),
    ])
}

const WEIGHTS: [(&str, usize, usize); 2] = [("blocks.0.img_attn.qkv", 400, 144), ("blocks.0.img_attn.proj", 16, 400)];

#[test]
fn the_codes_and_scales_are_modelopts_in_comfyuis_order() {
    let dir = Folder::new();
    save(&dir.join("in.safetensors"), &source());
    let (from, out) = (dir.join("in.safetensors"), dir.join("out.safetensors"));
    run(&from, &dir.join("modelopt"), &to(Target::ModelOpt)).unwrap();
    let summary = run(&from, &out, &to(Target::ComfyUi)).unwrap();
    assert_eq!((summary.quantized.len(), summary.findings), (2, vec![]));
    assert!(out.is_file() && !dir.join("out.safetensors.partial").exists());
    let (packed, written) = (Checkpoint::open(&dir.join("modelopt")).unwrap(), Checkpoint::open(&out).unwrap());
    let bytes = |checkpoint: &Checkpoint, name: &str| checkpoint.get(name).unwrap().bytes().unwrap();
    for (module, rows, cols) in WEIGHTS {
        let swapped: Vec<u8> =
            bytes(&packed, &format!("{module}.weight")).iter().map(|byte| byte.rotate_left(4)).collect();
        assert!(bytes(&written, &format!("{module}.weight")) == swapped);
        let scales = bytes(&packed, &format!("{module}.weight_scale"));
        let tiled = swizzle::swizzle(&scales, rows, cols / 16).unwrap();
        let found = written.get(&format!("{module}.weight_scale")).unwrap();
        assert_eq!(found.info.shape, [rows.next_multiple_of(128), (cols / 16).next_multiple_of(4)]);
        assert!(found.bytes().unwrap() == tiled);
        let scale = format!("{module}.weight_scale_2");
        assert_eq!(bytes(&written, &scale), bytes(&packed, &scale));
        assert_eq!(bytes(&written, &format!("{module}.comfy_quant")), br#"{"format": "nvfp4"}"#);
    }
    assert_eq!(written.tensors().count(), 2 * 4 + 1);
    let model = Model::new(&written).unwrap();
    assert_eq!(model.dialect, Dialect::ComfyUi);
    assert_eq!(verify(&model, Client::ComfyUi, 1).unwrap(), []);
    assert!(verify(&model, Client::Vllm, 1).unwrap()[0].text.contains("does not load the ComfyUI dialect"));
    let differences = compare(&Model::new(&packed).unwrap(), &model, 1).unwrap();
    assert!(differences.weights.iter().all(|weight| weight.measure.largest == 0.0));
    // Back again, and decoded.
    run(&out, &dir.join("back"), &to(Target::ModelOpt)).unwrap();
    run(&out, &dir.join("plain"), &to(Target::Plain(Precision::F32))).unwrap();
    run(&dir.join("modelopt"), &dir.join("expected"), &to(Target::Plain(Precision::F32))).unwrap();
    let back = Checkpoint::open(&dir.join("back")).unwrap();
    for (module, ..) in WEIGHTS {
        for part in ["weight", "weight_scale", "weight_scale_2"] {
            let name = format!("{module}.{part}");
            assert!(bytes(&back, &name) == bytes(&packed, &name), "{name}");
        }
    }
    let plain = |name: &str| fs::read(dir.join(name).join("model.safetensors")).unwrap();
    assert!(plain("plain") == plain("expected"));
}

/// The bytes do not depend on memory, interruptions, parts, or on whether the source was NVFP4 already.
#[test]
fn the_same_bytes_in_pieces_resumed_in_parts_and_from_modelopt() {
    let dir = Folder::new();
    save(&dir.join("in.safetensors"), &source());
    let from = dir.join("in.safetensors");
    for scale in [ScaleChoice::Max, ScaleChoice::Mse, ScaleChoice::ModelOptMse, ScaleChoice::ModelOptFourOverSix] {
        let settings = Settings { scale, acts: Acts::Constant(0.5), ..to(Target::ComfyUi) };
        let at = |name: &str| dir.join(&format!("{name}-{scale:?}.safetensors"));
        run(&from, &at("a"), &settings).unwrap();
        let whole = fs::read(at("a")).unwrap();
        let small = Settings { memory: 1, threads: 1, ..settings.clone() };
        run(&from, &at("b"), &small).unwrap();
        assert!(fs::read(at("b")).unwrap() == whole);
        let stopped = convert(&from, &at("c"), &small, &(), &AtomicBool::new(true));
        assert!(matches!(stopped, Err(Error::Interrupted)) && !at("c").exists());
        run(&from, &at("c"), &Settings { existing: Existing::Resume, ..small.clone() }).unwrap();
        assert!(fs::read(at("c")).unwrap() == whole);
        for part in Portion::all(2) {
            convert_part(&from, &at("d"), &settings, part, &(), &AtomicBool::new(false)).unwrap();
        }
        finish(&from, &at("d"), &settings, &(), &AtomicBool::new(false)).unwrap();
        assert!(fs::read(at("d")).unwrap() == whole);
        let packed = dir.join(&format!("modelopt-{scale:?}"));
        run(&from, &packed, &Settings { target: Target::ModelOpt, ..settings.clone() }).unwrap();
        run(&packed, &at("e"), &Settings { acts: Acts::None, ..settings.clone() }).unwrap();
        assert!(fs::read(at("e")).unwrap() == whole);
        run(&from, &at("a"), &Settings { existing: Existing::Replace, ..settings }).unwrap();
        assert!(fs::read(at("a")).unwrap() == whole);
    }
}

#[test]
fn what_comfyui_has_no_form_for_is_refused_by_name() {
    let dir = Folder::new();
    save(&dir.join("in.safetensors"), &source());
    let refused = |source: &str, target: &str, settings: &Settings| {
        let said = run(&dir.join(source), &dir.join(target), settings).unwrap_err().to_string();
        assert!(!dir.join(target).exists() && !dir.join(&format!("{target}.partial")).exists(), "{said}");
        said
    };
    let said = refused("in.safetensors", "out", &to(Target::ComfyUi));
    assert!(said.contains("a name that ends in .safetensors"), "{said}");
    let kv = Settings { kv: KvCache::Fp8Cast, ..to(Target::ComfyUi) };
    let said = refused("in.safetensors", "out.safetensors", &kv);
    assert!(said.contains("does not record how keys and values are kept"), "{said}");
    let rules = Rules::from_toml("[default]\nform = \"fp8\"").unwrap();
    let fp8 = Settings { selection: Selection { rules, ..Selection::default() }, ..to(Target::ComfyUi) };
    let said = refused("in.safetensors", "out.safetensors", &fp8);
    assert!(said.contains("is not written for ComfyUI"), "{said}");
    let mut odd = source();
    odd.insert("final.weight".to_string(), random(Dtype::BF16, &[24, 64], 4));
    save(&dir.join("odd.safetensors"), &odd);
    let said = refused("odd.safetensors", "out.safetensors", &to(Target::ComfyUi));
    assert!(said.contains("'final' has 24 rows, and ComfyUI wants a multiple of 16: skip this weight"), "{said}");
    fs::write(dir.join("notes.safetensors"), "mine").unwrap();
    let replace = Settings { existing: Existing::Replace, ..to(Target::ComfyUi) };
    let said = run(&dir.join("in.safetensors"), &dir.join("notes.safetensors"), &replace).unwrap_err().to_string();
    assert!(said.contains("neither a GGUF file nor a safetensors file") && dir.join("notes.safetensors").exists());
}

#[test]
fn verify_for_comfyui_asks_for_a_marker_of_every_weight() {
    let dir = Folder::new();
    save(&dir.join("in.safetensors"), &source());
    run(&dir.join("in.safetensors"), &dir.join("out.safetensors"), &to(Target::ComfyUi)).unwrap();
    let mut tensors = tensors_of(&dir.join("out.safetensors"));
    let marker = tensors.remove("blocks.0.img_attn.qkv.comfy_quant").unwrap();
    save(&dir.join("lost.safetensors"), &tensors);
    let said = verified(&dir.join("lost.safetensors"), Client::ComfyUi);
    assert!(said.len() == 1 && said[0].text.contains("NVFP4 without 'comfy_quant'"), "{said:?}");
    let entry = r#"{"layers": {"blocks.0.img_attn.qkv": {"format": "nvfp4"}}}"#;
    save_with(&dir.join("listed.safetensors"), &tensors, &[("_quantization_metadata", entry)]);
    assert_eq!(verified(&dir.join("listed.safetensors"), Client::ComfyUi), []);
    tensors.insert("blocks.0.img_attn.qkv.comfy_quant".to_string(), marker.clone());
    tensors.insert("plain.weight".to_string(), random(Dtype::BF16, &[16, 16], 5));
    tensors.insert("plain.comfy_quant".to_string(), marker);
    save(&dir.join("plain.safetensors"), &tensors);
    let said = verified(&dir.join("plain.safetensors"), Client::ComfyUi);
    assert!(said.len() == 1 && said[0].text.contains("beside a weight that is not quantized"), "{said:?}");
}
