//! What a source is stored as: plain numbers, FP8, MXFP4 and the dialects of NVFP4.

mod converted;
mod generated;

use converted::*;
use generated::*;
use nvfp4::{Precision, Profile, Quantizer, Side, TensorRef, Unit};
use nvfp4_checkpoint::*;
use safetensors::Dtype;
use serde_json::json;

#[test]
fn every_source_type_is_quantized_as_its_values() {
    for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
        let dir = Folder::new();
        let x = values(64 * 96, 5);
        save(&dir.join("m.safetensors"), &Tensors::from([("a.weight".into(), tensor(dtype, &[64, 96], &x))]));
        run(&dir.join("m.safetensors"), &dir.join("out"), &to(Target::ModelOpt)).unwrap();
        let rounded: Vec<f32> = match dtype {
            Dtype::BF16 => x.iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect(),
            Dtype::F16 => x.iter().map(|&x| half::f16::from_f32(x).to_f32()).collect(),
            _ => x,
        };
        let quantizer = Quantizer::builder().profile(Profile::ModelOpt).build().unwrap();
        let expected = quantizer.quantize(&TensorRef::new(&rounded[..], &[64, 96]).unwrap()).unwrap();
        let written = Checkpoint::open(&dir.join("out")).unwrap();
        let bytes = |name: &str| written.get(name).unwrap().bytes().unwrap();
        assert_eq!(bytes("a.weight"), expected.nvfp4(Side::Row).unwrap().codes(), "{dtype:?}");
        assert_eq!(bytes("a.weight_scale"), expected.nvfp4(Side::Row).unwrap().scales());
    }
}

#[test]
fn fp8_with_block_scales_is_decoded_and_quantized() {
    let (rows, cols) = (200, 144);
    let dir = Folder::new();
    let bytes: Vec<u8> = (0..rows * cols).map(|i| (i * 31 % 0x7F) as u8 | ((i as u8 & 1) << 7)).collect();
    let scales: Vec<f32> = vec![0.5, 0.25, 0.003, 1.7];
    let decoded: Vec<f32> = (0..rows * cols)
        .map(|i| nvfp4_spec::e4m3::decode(bytes[i]) * scales[i / cols / 128 * 2 + i % cols / 128])
        .collect();
    let weight = Tensor { dtype: Dtype::F8_E4M3, shape: vec![rows, cols], bytes };
    let tensors = Tensors::from([
        ("a.weight".to_string(), weight),
        ("a.weight_scale_inv".to_string(), tensor(Dtype::F32, &[2, 2], &scales)),
    ]);
    save(&dir.join("m.safetensors"), &tensors);
    let settings = Settings { memory: 1, ..to(Target::ModelOpt) };
    run(&dir.join("m.safetensors"), &dir.join("out"), &settings).unwrap();
    let quantizer = Quantizer::builder().profile(Profile::ModelOpt).build().unwrap();
    let expected = quantizer.quantize(&TensorRef::new(&decoded[..], &[rows, cols]).unwrap()).unwrap();
    let written = Checkpoint::open(&dir.join("out")).unwrap();
    assert!(written.get("a.weight_scale_inv").is_none());
    assert_eq!(written.get("a.weight").unwrap().bytes().unwrap(), expected.nvfp4(Side::Row).unwrap().codes());
}

#[test]
fn mxfp4_experts_keep_their_values() {
    let (experts, outputs, groups) = (3, 8, 2);
    let dir = Folder::new();
    let blocks: Vec<u8> = (0..experts * outputs * groups * 16).map(|i| (i * 73 % 256) as u8).collect();
    let scales: Vec<u8> = (0..experts * outputs * groups).map(|i| 110 + (i % 18) as u8).collect();
    let byte = |shape: Vec<usize>, bytes: Vec<u8>| Tensor { dtype: Dtype::U8, shape, bytes };
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    let mut tensors = Tensors::from([
        (format!("{name}_blocks"), byte(vec![experts, outputs, groups, 16], blocks.clone())),
        (format!("{name}_scales"), byte(vec![experts, outputs, groups], scales.clone())),
        (format!("{name}_bias"), random(Dtype::BF16, &[experts, outputs], 1)),
    ]);
    let config = json!({ "architectures": ["Llama4ForCausalLM"], "quantization_config": { "quant_method": "mxfp4" } });
    folder(&dir.join("in"), &[tensors.clone()], &config);
    let summary = run(&dir.join("in"), &dir.join("out"), &to(Target::ModelOpt)).unwrap();
    assert_eq!(summary.quantized[0].measure.error, 0.0, "exact");
    let written = Checkpoint::open(&dir.join("out")).unwrap();
    let part = |suffix: &str| written.get(&format!("{name}{suffix}")).unwrap();
    assert_eq!(part("").info.shape, [experts, groups * 16, outputs]);
    assert_eq!(part("_weight_scale").info.shape, [experts, groups * 2, outputs]);
    let (codes, bytes) = (part("").bytes().unwrap(), part("_weight_scale").bytes().unwrap());
    let globals: Vec<f32> =
        part("_weight_scale_2").bytes().unwrap().as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
    for (e, o, k) in (0..experts * outputs * groups * 32)
        .map(|i| (i / (outputs * groups * 32), i / (groups * 32) % outputs, i % (groups * 32)))
    {
        let code = |packed: &[u8], at: usize| packed[at] >> (4 * (k % 2)) & 15;
        let row = (e * outputs + o) * groups;
        let before = nvfp4_spec::e2m1::decode(code(&blocks, row * 16 + k / 2))
            * 2f32.powi(i32::from(scales[row + k / 32]) - 127);
        let after = nvfp4_spec::e2m1::decode(code(&codes, (e * groups * 16 + k / 2) * outputs + o))
            * nvfp4_spec::e4m3::decode(bytes[(e * groups * 2 + k / 16) * outputs + o])
            * globals[e];
        assert_eq!(before, after);
    }
    let refused = run(&dir.join("in"), &dir.join("ct"), &to(Target::CompressedTensors)).unwrap_err().to_string();
    assert!(refused.contains("convert to ModelOpt's form"), "{refused}");

    // Read back: the same values, one tensor scale for each expert; decoded, inputs before outputs.
    let source = Checkpoint::open(&dir.join("in")).unwrap();
    let (source, model) = (Model::new(&source).unwrap(), Model::new(&written).unwrap());
    assert_eq!(model.weights.iter().map(|w| (w.matrices(), w.rows, w.cols)).collect::<Vec<_>>(), [(3, 24, 64)]);
    let all = |model: &Model<'_>, rows: std::ops::Range<usize>| {
        let mut buffer = Buffer::default();
        let values = model.weight(name).unwrap().values(rows, &mut buffer).unwrap();
        (0..values.len()).map(|i| values.get(i)).collect::<Vec<f32>>()
    };
    for rows in [0..24, 0..8, 3..5, 6..19] {
        assert_eq!(all(&source, rows.clone()), all(&model, rows));
    }
    assert_eq!(beside_layers(verify(&model, Client::Vllm, 1).unwrap()), []);
    run(&dir.join("out"), &dir.join("again"), &to(Target::ModelOpt)).unwrap();
    let weights = |folder: &str| contents(&dir.join(folder))["model.safetensors"].clone();
    assert!(weights("out") == weights("again"), "relabelled to itself");
    run(&dir.join("out"), &dir.join("plain"), &to(Target::Plain(Precision::Bf16))).unwrap();
    let plain = Checkpoint::open(&dir.join("plain")).unwrap();
    let decoded = plain.get(name).unwrap();
    assert_eq!((decoded.info.dtype, &decoded.info.shape[..]), (Dtype::BF16, &[experts, groups * 32, outputs][..]));
    let (decoded, values) = (decoded.bytes().unwrap(), all(&model, 0..24));
    let at = |e: usize, k: usize, o: usize| {
        half::bf16::from_le_bytes(decoded.as_chunks().0[(e * groups * 32 + k) * outputs + o]).to_f32()
    };
    assert!((0..values.len()).all(|i| at(i / 512, i % 64, i / 64 % 8) == values[i]), "BF16 holds all of them");

    tensors.get_mut(&format!("{name}_scales")).unwrap().bytes[5] = 255;
    folder(&dir.join("nan"), &[tensors], &json!({}));
    let refused = run(&dir.join("nan"), &dir.join("nan-out"), &to(Target::ModelOpt)).unwrap_err().to_string();
    assert!(refused.contains("holds NaN"), "{refused}");
}

#[test]
fn no_mxfp4_experts_are_decoded_to_no_experts_of_the_same_shape() {
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    let dir = Folder::new();
    let empty = |shape: &[usize]| Tensor { dtype: Dtype::U8, shape: shape.to_vec(), bytes: Vec::new() };
    let tensors = Tensors::from([
        (format!("{name}_blocks"), empty(&[0, 8, 2, 16])),
        (format!("{name}_scales"), empty(&[0, 8, 2])),
    ]);
    folder(&dir.join("in"), &[tensors], &json!({}));
    for precision in [Precision::Bf16, Precision::F32] {
        let out = dir.join(&format!("{precision:?}"));
        run(&dir.join("in"), &out, &to(Target::Plain(precision))).unwrap();
        assert_eq!(tensors_of(&out)[name].shape, [0, 64, 8]);
    }
}

#[test]
fn nvfp4_is_relabelled_without_quantizing_again() {
    let dir = Folder::new();
    folder(&dir.join("in"), &llama(Dtype::BF16), &llama_config());
    let acts = Settings { acts: Acts::Constant(0.5), ..to(Target::ModelOpt) };
    run(&dir.join("in"), &dir.join("modelopt"), &acts).unwrap();
    run(&dir.join("modelopt"), &dir.join("ct"), &to(Target::CompressedTensors)).unwrap();
    run(&dir.join("ct"), &dir.join("back"), &to(Target::ModelOpt)).unwrap();
    let (a, b) = (Checkpoint::open(&dir.join("modelopt")).unwrap(), Checkpoint::open(&dir.join("ct")).unwrap());
    let down = "model.layers.1.mlp.down_proj";
    let bytes = |c: &Checkpoint, name: &str| c.get(&format!("{down}.{name}")).unwrap().bytes().unwrap();
    assert_eq!(bytes(&a, "weight"), bytes(&b, "weight_packed"));
    assert_eq!(bytes(&a, "weight_scale"), bytes(&b, "weight_scale"));
    let float = |bytes: Vec<u8>| f32::from_le_bytes(bytes.try_into().unwrap());
    assert_eq!(float(bytes(&b, "weight_global_scale")), 1.0 / float(bytes(&a, "weight_scale_2")));
    assert_eq!(float(bytes(&b, "input_global_scale")), 2.0);
    assert_eq!(json_of(&dir.join("back/hf_quant_config.json")), json_of(&dir.join("modelopt/hf_quant_config.json")));
    let back = Checkpoint::open(&dir.join("back")).unwrap();
    assert_eq!(bytes(&a, "weight"), bytes(&back, "weight"));
    assert_eq!(beside_layers(verify(&Model::new(&b).unwrap(), Client::Transformers, 1).unwrap()), []);
}

/// The same numbers in ComfyUI's and torchao's order.
#[test]
fn other_dialects_are_read_in_their_own_order() {
    let (rows, cols) = (160, 96);
    let dir = Folder::new();
    let x = values(rows * cols, 3);
    let quantizer = Quantizer::builder().profile(Profile::ModelOpt).build().unwrap();
    let q = quantizer.quantize(&TensorRef::new(&x[..], &[rows, cols]).unwrap()).unwrap();
    let row = q.nvfp4(Side::Row).unwrap();
    assert_eq!(row.unit(), Unit::Multiplier);
    let swizzled = nvfp4_spec::swizzle::swizzle(row.scales(), rows, cols / 16).unwrap();
    let byte = |dtype, shape: Vec<usize>, bytes: Vec<u8>| Tensor { dtype, shape, bytes };
    let swapped = row.codes().iter().map(|b| b.rotate_left(4)).collect();
    let scales = byte(Dtype::F8_E4M3, vec![256, swizzled.len() / 256], swizzled);
    let global = tensor(Dtype::F32, &[], row.stored());
    let comfy = Tensors::from([
        ("a.weight".to_string(), byte(Dtype::U8, vec![rows, cols / 2], swapped)),
        ("a.weight_scale".to_string(), scales.clone()),
        ("a.weight_scale_2".to_string(), global.clone()),
    ]);
    save(&dir.join("unmarked.safetensors"), &comfy);
    let unmarked = Checkpoint::open(&dir.join("unmarked.safetensors")).unwrap();
    let refused = Model::new(&unmarked).unwrap_err().to_string();
    assert!(refused.contains("nothing says which it is"), "{refused}");
    let mut marked = comfy.clone();
    marked.insert("a.comfy_quant".into(), byte(Dtype::U8, vec![19], br#"{"format": "nvfp4"}"#.to_vec()));
    save(&dir.join("comfy.safetensors"), &marked);
    let torchao = Tensors::from([
        ("a._weight_qdata".to_string(), byte(Dtype::U8, vec![rows, cols / 2], row.codes().to_vec())),
        ("a._weight_scale".to_string(), scales),
        ("a._weight_per_tensor_scale".to_string(), global),
    ]);
    let entry = r#"{"_type": "NVFP4Tensor", "_data": {"block_size": 16, "is_swizzled_scales": true}}"#;
    save_with(&dir.join("torchao.safetensors"), &torchao, &[("a.weight", entry)]);
    for (name, dialect) in [("comfy", Dialect::ComfyUi), ("torchao", Dialect::TorchAo)] {
        let checkpoint = Checkpoint::open(&dir.join(&format!("{name}.safetensors"))).unwrap();
        let model = Model::new(&checkpoint).unwrap();
        assert_eq!(model.dialect, dialect);
        let expected = row.dequantize::<f32>().unwrap();
        let mut buffer = Buffer::default();
        for rows in [0..rows, 5..131, 130..160] {
            let values = model.weights[0].values(rows.clone(), &mut buffer).unwrap();
            assert!((0..values.len()).all(|i| values.get(i) == expected[rows.start * cols + i]), "{name} {rows:?}");
        }
        run(&dir.join(&format!("{name}.safetensors")), &dir.join(name), &to(Target::ModelOpt)).unwrap();
        let written = Checkpoint::open(&dir.join(name)).unwrap();
        assert_eq!(written.get("a.weight").unwrap().bytes().unwrap(), row.codes());
        assert_eq!(written.get("a.weight_scale").unwrap().bytes().unwrap(), row.scales());
        assert_eq!(written.tensors().count(), 3);
    }
}

#[test]
fn kept_fp8_weights_are_decoded_to_bf16() {
    let dir = Folder::new();
    let weight = Tensor { dtype: Dtype::F8_E4M3, shape: vec![16, 128], bytes: vec![0x38; 16 * 128] };
    let tensors = Tensors::from([
        ("lm_head.weight".to_string(), weight.clone()),
        ("lm_head.weight_scale_inv".to_string(), tensor(Dtype::F32, &[1, 1], &[2.0])),
        ("a.weight".to_string(), weight),
        ("a.weight_scale_inv".to_string(), tensor(Dtype::F32, &[1, 1], &[2.0])),
    ]);
    save(&dir.join("m.safetensors"), &tensors);
    run(&dir.join("m.safetensors"), &dir.join("out"), &to(Target::ModelOpt)).unwrap();
    let written = Checkpoint::open(&dir.join("out")).unwrap();
    let head = written.get("lm_head.weight").unwrap();
    assert_eq!((head.info.dtype, head.bytes().unwrap()), (Dtype::BF16, [0x00, 0x40].repeat(16 * 128)));
    assert!(written.get("lm_head.weight_scale_inv").is_none());
}
