//! Saving and loading, and files that are not what they claim.

use nvfp4::*;
use std::collections::HashMap;
use std::path::PathBuf;

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("storage-{name}.safetensors"))
}

fn tensors() -> Vec<(String, QuantTensor)> {
    let x: Vec<f32> = (0..32 * 40).map(|i| ((i * 37) % 101) as f32 - 50.0).collect();
    let x = TensorRef::new(&x[..], &[2, 16, 40]).unwrap();
    let both = Quantizer::builder().directions(Directions::Both);
    let rule = ScaleRule::FourOverSix { metric: Metric::Mae, error: ErrorPath::Strict, bound: Bound::E256 };
    [
        ("plain", Quantizer::builder()),
        ("both", both),
        ("rows", both.global_scale(GlobalScale::PerRow).transform(Transform::Signs(Signs(0xBEEF)))),
        ("swizzled", both.layout(Layout::Swizzled)),
        ("bound 256", both.scale_rule(rule)),
        ("modelopt", both.profile(Profile::ModelOpt)),
        ("llm-compressor", both.profile(Profile::LlmCompressor)),
    ]
    .into_iter()
    .map(|(name, builder)| (name.to_string(), builder.build().unwrap().quantize(&x).unwrap()))
    .chain([(
        "empty".to_string(),
        both.build().unwrap().quantize(&TensorRef::new(&[0f32; 0][..], &[0, 7]).unwrap()).unwrap(),
    )])
    .collect()
}

#[test]
fn every_kind_of_tensor_survives_the_round_trip() {
    let (path, tensors) = (path("round-trip"), tensors());
    save(&path, tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))).unwrap();
    assert_eq!(load(&path).unwrap(), tensors.into_iter().collect());
}

#[test]
fn a_huge_dimension_without_elements_survives_the_round_trip() {
    let path = path("huge");
    let both = Quantizer::builder().directions(Directions::Both).build().unwrap();
    for shape in [[1 << 62, 0], [0, 1 << 62]] {
        let q = both.quantize(&TensorRef::new(&[0f32; 0][..], &shape).unwrap()).unwrap();
        save(&path, [("w", &q)]).unwrap();
        let loaded = load(&path).unwrap().remove("w").unwrap();
        assert_eq!(loaded, q);
        for side in [Side::Row, Side::Column] {
            assert_eq!(loaded.dequantize::<f32>(side).unwrap(), [0f32; 0]);
        }
    }
}

#[test]
fn two_tensors_of_one_name_are_refused() {
    let tensors = tensors();
    let twice = [("a", &tensors[0].1), ("a", &tensors[1].1)];
    assert_eq!(save(&path("twice"), twice).unwrap_err().to_string(), "two tensors are named 'a'");
}

/// Loads a file whose metadata was changed.
fn load_with(name: &str, change: impl Fn(&mut HashMap<String, String>)) -> String {
    let (path, tensors) = (path(name), tensors());
    save(&path, [("w", &tensors[2].1)]).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let mut metadata = header.metadata().clone().unwrap();
    change(&mut metadata);
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    std::fs::write(&path, safetensors::serialize(file.iter(), Some(metadata)).unwrap()).unwrap();
    load(&path).unwrap_err().to_string()
}

#[test]
fn other_formats_and_versions_are_refused() {
    let set = |key: &'static str, value: &'static str| {
        move |m: &mut HashMap<String, String>| drop(m.insert(key.to_string(), value.to_string()))
    };
    assert_eq!(load_with("version", set("version", "2")), "expected format version 1, got 2");
    assert_eq!(load_with("format", set("format", "pt")), "expected the format 'nvfp4', got 'pt'");
    assert_eq!(load_with("none", HashMap::clear), "expected the format 'nvfp4', got 'none'");
    assert!(load_with("json", set("tensors", "{")).starts_with("metadata 'tensors': EOF while parsing"));
    let missing = r#"{"v":{"shape":[2,16,40],"row":{"unit":"amax448","layout":"linear"}}}"#;
    assert_eq!(load_with("missing", set("tensors", missing)), "tensor 'v.row.global' is missing");
    let unknown = r#"{"w":{"shape":[2,16,40],"row":{"unit":"furlong","layout":"linear"}}}"#;
    assert!(load_with("unknown", set("tensors", unknown)).contains("unknown variant `furlong`"));
    let other_shape = r#"{"w":{"shape":[2,16,44],"row":{"unit":"amax448","layout":"linear"}}}"#;
    assert_eq!(load_with("shape", set("tensors", other_shape)), "codes: expected length 704, got 640");
    let huge = format!(r#"{{"w":{{"shape":[{0},{0},1],"row":{{"unit":"amax448","layout":"linear"}}}}}}"#, u64::MAX);
    let huge: &'static str = huge.leak();
    assert!(load_with("huge", set("tensors", huge)).contains("has more elements than an address can count"));
}

#[test]
fn truncated_and_absent_files_are_errors() {
    let (path, tensors) = (path("truncated"), tensors());
    save(&path, [("w", &tensors[1].1)]).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    for len in [0, 4, 8, 60, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..len]).unwrap();
        let message = load(&path).unwrap_err().to_string();
        assert!(message.starts_with("not a valid safetensors file"), "{len} bytes: {message}");
    }
    assert!(matches!(load(&path.with_extension("nowhere")), Err(Error::Io { .. })));
}
