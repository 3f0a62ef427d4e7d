//! Saving and loading, and files that are not what they claim.

use nvfp4::*;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

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

/// The tensor of [`tensors`] in another format.
fn other(spec: &str) -> QuantTensor {
    let x: Vec<f32> = (0..32 * 40).map(|i| ((i * 37) % 101) as f32 - 50.0).collect();
    let spec: QuantSpec = spec.parse().unwrap();
    let quantizer = Quantizer::with_scales(&spec, Directions::Both, |_| Some(3.7)).unwrap();
    quantizer.quantize(&TensorRef::new(&x[..], &[2, 16, 40]).unwrap()).unwrap()
}

const OTHERS: [&str; 11] = [
    "fp8(e4m3)",
    "fp8-delayed(e5m2)",
    "fp8-block(e4m3)",
    "fp8-block(e5m2, 128x128)",
    "mxfp8(e4m3)",
    "mxfp8(e5m2)",
    "mxfp8(e4m3, 32x32)",
    "high-precision",
    "high-precision(bf16)",
    "high-precision(f16) / mxfp8(e4m3)",
    "nvfp4 / high-precision",
];

fn version(path: &Path) -> String {
    let bytes = std::fs::read(path).unwrap();
    SafeTensors::read_metadata(&bytes).unwrap().1.metadata().clone().unwrap()["version"].clone()
}

#[test]
fn every_format_survives_the_round_trip() {
    let path = path("formats");
    let all: BTreeMap<String, QuantTensor> = OTHERS.iter().map(|spec| (spec.to_string(), other(spec))).collect();
    save(&path, all.iter().map(|(name, tensor)| (name.as_str(), tensor))).unwrap();
    assert_eq!((load(&path).unwrap(), version(&path).as_str()), (all, "2"));
    for (spec, mut tensor) in OTHERS.iter().map(|spec| (spec, other(spec))) {
        // One direction alone, and what shares its buffer shares it again.
        save(&path, [("w", &tensor)]).unwrap();
        assert_eq!(load(&path).unwrap()["w"].byte_len(), tensor.byte_len(), "{spec}");
        tensor.keep(Directions::Column).unwrap();
        save(&path, [("w", &tensor)]).unwrap();
        assert_eq!(load(&path).unwrap().remove("w"), Some(tensor), "{spec}");
    }
}

#[test]
fn nvfp4_alone_is_written_as_programs_of_version_1_read_it() {
    let (path, tensors) = (path("version-1"), tensors());
    save(&path, tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))).unwrap();
    assert_eq!(version(&path), "1");
    // A file as version 1 wrote it, byte for byte what it was before there were others.
    let json = r#"{"w":{"shape":[2,16,40],"row":{"unit":"amax448","layout":"linear"}}}"#;
    let (path, plain) = (self::path("old"), &tensors[0].1);
    save(&path, [("w", plain)]).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(SafeTensors::read_metadata(&bytes).unwrap().1.metadata().clone().unwrap()["tensors"], json);
    assert_eq!(&load(&path).unwrap()["w"], plain);
}

#[test]
fn other_formats_are_not_taken_on_trust() {
    let set = |key: &'static str, value: &str| {
        let value = value.to_string();
        move |parts: &mut Parts| drop(parts.metadata.insert(key.to_string(), value.clone()))
    };
    assert_eq!(
        load_changed("fp8-as-1", &other("fp8"), set("version", "1")),
        "tensor 'w.row': format version 1 has nvfp4 alone"
    );
    let entry = |name: &str, spec: &str, row: &str| {
        let json = format!(r#"{{"w":{{"shape":[2,16,40],"row":{row}}}}}"#);
        load_changed(name, &other(spec), set("tensors", &json))
    };
    assert!(entry("unknown-format", "fp8", r#"{"format":"fp7"}"#).contains("unknown variant `fp7`"));
    assert!(entry("fp8-extra", "fp8", r#"{"format":"fp8","colour":"red"}"#).contains("unknown field `colour`"));
    assert!(entry("no-tile", "fp8-block", r#"{"format":"fp8-block"}"#).contains("missing field `tile`"));
    assert!(entry("tile", "fp8-block", r#"{"format":"fp8-block","tile":"1x64"}"#).contains("unknown variant `1x64`"));
    assert_eq!(entry("mx-as-fp8", "mxfp8", r#"{"format":"fp8"}"#), "tensor 'w.row.scales': expected F32, got F8_E8M0");
    assert_eq!(entry("fp8-as-mx", "fp8", r#"{"format":"mxfp8"}"#), "tensor 'w.row.scales': expected F8_E8M0, got F32");
    assert_eq!(
        entry("rows-as-squares", "fp8-block", r#"{"format":"fp8-block","tile":"128x128"}"#),
        "tensor 'w.row.scales': expected the shape [1, 1], got [32, 1]"
    );
    assert_eq!(entry("plain-as-fp8", "high-precision", r#"{"format":"fp8"}"#), "tensor 'w.row.codes' is missing");
    assert_eq!(
        entry("row-of-row", "high-precision", r#"{"format":"high-precision","values":"row"}"#),
        "tensor 'w.row': its values are the row direction's, which has none"
    );
    let lonely = load_changed(
        "lonely",
        &other("high-precision"),
        set("tensors", r#"{"w":{"shape":[2,16,40],"col":{"format":"high-precision","values":"row"}}}"#),
    );
    assert_eq!(lonely, "tensor 'w.col': its values are the row direction's, which has none");
    for (spec, part, dtype, message) in [
        ("fp8", "w.row.codes", Dtype::U8, "tensor 'w.row.codes': expected F8_E4M3 or F8_E5M2, got U8"),
        ("mxfp8", "w.col.scales", Dtype::U8, "tensor 'w.col.scales': expected F8_E8M0, got U8"),
        ("high-precision", "w.row.values", Dtype::I32, "tensor 'w.row.values': expected F32 or BF16 or F16, got I32"),
    ] {
        let got = load_changed("other-dtype", &other(spec), |parts| parts.tensors.get_mut(part).unwrap().0 = dtype);
        assert_eq!(got, message);
    }
    for (spec, part, shape, message) in [
        ("mxfp8", "w.col.codes", vec![40, 32], "tensor 'w.col.codes': expected the shape [32, 40], got [40, 32]"),
        ("mxfp8", "w.row.scales", vec![64, 1], "tensor 'w.row.scales': expected the shape [32, 2], got [64, 1]"),
        ("fp8", "w.row.scales", vec![1], "tensor 'w.row.scales': expected the shape [], got [1]"),
        (
            "high-precision",
            "w.row.values",
            vec![40, 32],
            "tensor 'w.row.values': expected the shape [32, 40], got [40, 32]",
        ),
    ] {
        let changed = |parts: &mut Parts| parts.tensors.get_mut(part).unwrap().1 = shape.clone();
        assert_eq!(load_changed("other-shape", &other(spec), changed), message);
    }
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
fn a_tensor_survives_as_bytes_too() {
    for (name, tensor) in tensors().into_iter().chain(OTHERS.map(|spec| (spec.to_string(), other(spec)))) {
        let bytes = to_bytes(&tensor).unwrap();
        assert_eq!(from_bytes(&bytes).unwrap(), tensor, "{name}");
        let error = from_bytes(&bytes[..bytes.len() - 1]).unwrap_err().to_string();
        assert!(error.starts_with("the bytes of a tensor: "), "{error}");
    }
    // They are those of a file, which has to have one tensor.
    let (path, all) = (path("bytes"), tensors());
    save(&path, [("w", &all[0].1)]).unwrap();
    assert_eq!(from_bytes(&std::fs::read(&path).unwrap()).unwrap(), all[0].1);
    save(&path, all.iter().map(|(name, tensor)| (name.as_str(), tensor))).unwrap();
    let error = from_bytes(&std::fs::read(&path).unwrap()).unwrap_err().to_string();
    assert_eq!(error, "the bytes of a tensor: expected one tensor, got 8");
}

#[test]
fn two_tensors_of_one_name_are_refused() {
    let tensors = tensors();
    let twice = [("a", &tensors[0].1), ("a", &tensors[1].1)];
    let path = path("twice");
    let message = save(&path, twice).unwrap_err().to_string();
    assert_eq!(message, format!("{}: two tensors are named 'a'", path.display()));
}

/// A file in parts, to be changed and written again.
struct Parts {
    metadata: HashMap<String, String>,
    tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

/// What `load` says of a file that was changed, without the path that it begins with.
fn load_changed(name: &str, tensor: &QuantTensor, change: impl Fn(&mut Parts)) -> String {
    let path = path(name);
    save(&path, [("w", tensor)]).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let part = |(name, view): (&str, TensorView<'_>)| {
        (name.to_string(), (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
    };
    let mut parts = Parts { metadata: header.metadata().clone().unwrap(), tensors: file.iter().map(part).collect() };
    change(&mut parts);
    let views = parts
        .tensors
        .iter()
        .map(|(name, (dtype, shape, data))| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    std::fs::write(&path, safetensors::serialize(views, Some(parts.metadata)).unwrap()).unwrap();
    reason(&path)
}

/// The error of loading a file, which must begin with its path.
fn reason(path: &Path) -> String {
    let message = load(path).unwrap_err().to_string();
    message.strip_prefix(&format!("{}: ", path.display())).unwrap_or_else(|| panic!("{message}")).to_string()
}

/// A tensor of [2, 16, 40] with a scale per row and column, and a rotated column direction.
fn rotated() -> QuantTensor {
    tensors().remove(2).1
}

#[test]
fn other_formats_and_versions_are_refused() {
    let load_with = |name: &str, key: &str, value: &str| {
        load_changed(name, &rotated(), |parts| drop(parts.metadata.insert(key.to_string(), value.to_string())))
    };
    assert_eq!(load_with("version", "version", "3"), "expected format version 1 or 2, got 3");
    assert_eq!(load_with("format", "format", "pt"), "expected the format 'nvfp4', got 'pt'");
    let none = load_changed("none", &rotated(), |parts| parts.metadata.clear());
    assert_eq!(none, "expected the format 'nvfp4', got 'none'");
    assert!(load_with("json", "tensors", "{").starts_with("metadata 'tensors': EOF while parsing"));
    let missing = r#"{"v":{"shape":[2,16,40],"row":{"unit":"amax448","layout":"linear"}}}"#;
    assert_eq!(load_with("missing", "tensors", missing), "tensor 'v.row.codes' is missing");
    let unknown = r#"{"w":{"shape":[2,16,40],"row":{"unit":"furlong","layout":"linear"}}}"#;
    assert!(load_with("unknown", "tensors", unknown).contains("unknown variant `furlong`"));
    let extra = r#"{"w":{"shape":[2,16,40],"colour":"red"}}"#;
    assert!(load_with("extra", "tensors", extra).contains("unknown field `colour`"));
    let huge = format!(r#"{{"w":{{"shape":[{0},{0},1],"row":{{"unit":"amax448","layout":"linear"}}}}}}"#, u64::MAX);
    let huge = load_with("huge-shape", "tensors", &huge);
    assert!(
        huge.starts_with("tensor 'w': the shape [") && huge.ends_with("has more elements than an address can count")
    );
}

#[test]
fn a_tensor_without_directions_is_refused() {
    let message = load_changed("no-direction", &rotated(), |parts| {
        parts.metadata.insert("tensors".into(), r#"{"w":{"shape":[2,16,40]}}"#.into());
    });
    assert_eq!(message, "tensor 'w': a tensor needs a row direction, a column direction or both");
}

#[test]
fn a_rotation_is_refused_where_no_transform_can_have_been() {
    let entry = |json: &'static str| {
        load_changed("rotation", &rotated(), move |parts| drop(parts.metadata.insert("tensors".into(), json.into())))
    };
    assert_eq!(
        entry(
            r#"{"w":{"shape":[32,40],"col":{"unit":"amax448","rotation":1,"layout":"linear"},
                       "row":{"unit":"amax448","rotation":1,"layout":"linear"}}}"#
        ),
        "tensor 'w.row': the dimension that the Hadamard transform runs along: expected a multiple of 16, got 40"
    );
    // The transposed tensor: its row direction has 32 elements a row.
    let turned = load_changed("turned", &rotated(), |parts| {
        let json = r#"{"w":{"shape":[40,32],"row":{"unit":"amax448","rotation":1,"layout":"linear"}}}"#;
        parts.metadata.insert("tensors".into(), json.into());
        for part in ["codes", "scales", "global"] {
            let column = parts.tensors.remove(&format!("w.col.{part}")).unwrap();
            parts.tensors.insert(format!("w.row.{part}"), column);
        }
    });
    assert_eq!(
        turned,
        "tensor 'w': the row direction has Hadamard signs, but the transform acts on the column direction; leave them out"
    );
    let ragged = Quantizer::builder().directions(Directions::Column).build().unwrap();
    let ragged = ragged.quantize(&TensorRef::new(&[1f32; 18 * 16][..], &[18, 16]).unwrap()).unwrap();
    let message = load_changed("ragged", &ragged, |parts| {
        let json = r#"{"w":{"shape":[18,16],"col":{"unit":"amax448","rotation":1,"layout":"linear"}}}"#;
        parts.metadata.insert("tensors".into(), json.into());
    });
    assert_eq!(
        message,
        "tensor 'w.col': the dimension that the Hadamard transform runs along: expected a multiple of 16, got 18"
    );
}

#[test]
fn a_tensor_of_another_type_is_refused() {
    for (part, other, message) in [
        ("w.row.codes", Dtype::I8, "tensor 'w.row.codes': expected U8, got I8"),
        ("w.col.scales", Dtype::U8, "tensor 'w.col.scales': expected F8_E4M3, got U8"),
        ("w.row.global", Dtype::I32, "tensor 'w.row.global': expected F32, got I32"),
    ] {
        let got = load_changed("dtype", &rotated(), |parts| parts.tensors.get_mut(part).unwrap().0 = other);
        assert_eq!(got, message);
    }
}

#[test]
fn a_tensor_of_another_shape_is_refused_even_where_its_length_fits() {
    let tensors = tensors();
    let (rows, swizzled, plain) = (&tensors[2].1, &tensors[3].1, &tensors[0].1);
    for (tensor, part, shape, message) in [
        (rows, "w.row.codes", vec![640], "tensor 'w.row.codes': expected the shape [32, 20], got [640]"),
        (rows, "w.row.codes", vec![20, 32], "tensor 'w.row.codes': expected the shape [32, 20], got [20, 32]"),
        (rows, "w.col.scales", vec![80], "tensor 'w.col.scales': expected the shape [40, 2], got [80]"),
        (rows, "w.row.global", vec![32, 1], "tensor 'w.row.global': expected the shape [] or [32], got [32, 1]"),
        (plain, "w.row.global", vec![1], "tensor 'w.row.global': expected the shape [] or [32], got [1]"),
        (swizzled, "w.row.scales", vec![128, 4], "tensor 'w.row.scales': expected the shape [512], got [128, 4]"),
    ] {
        let got = load_changed("part-shape", tensor, |parts| parts.tensors.get_mut(part).unwrap().1 = shape.clone());
        assert_eq!(got, message);
    }
    let other = load_changed("shape", rows, |parts| {
        let json = r#"{"w":{"shape":[2,16,44],"row":{"unit":"amax448","layout":"linear"}}}"#;
        parts.metadata.insert("tensors".into(), json.into());
    });
    assert_eq!(other, "tensor 'w.row.codes': expected the shape [32, 22], got [32, 20]");
}

#[test]
fn a_negative_amax_is_refused() {
    let message = load_changed("negative", &rotated(), |parts| {
        parts.tensors.get_mut("w.col.global").unwrap().2[12..16].copy_from_slice(&(-1f32).to_le_bytes());
    });
    assert_eq!(message, "tensor 'w.col': amax: expected a magnitude, got -1 at index 3");
}

#[test]
fn a_key_that_stands_twice_is_refused() {
    let entry = r#"{"shape":[2,16,40],"row":{"unit":"amax448","layout":"linear"}}"#;
    let message = load_changed("twice-tensor", &rotated(), |parts| {
        parts.metadata.insert("tensors".into(), format!(r#"{{"w":{entry},"w":{entry}}}"#));
    });
    assert!(message.starts_with("metadata 'tensors': the key 'w' stands twice in one object"), "{message}");
    let message = load_changed("twice-field", &rotated(), |parts| {
        let json = r#"{"w":{"shape":[9],"shape":[2,16,40]}}"#;
        parts.metadata.insert("tensors".into(), json.into());
    });
    assert!(message.starts_with("metadata 'tensors': the key 'shape' stands twice in one object"), "{message}");
    // The same in the file's own header.
    let path = path("twice-header");
    let header =
        r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}"#;
    std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
    assert!(reason(&path).starts_with("header: the key 'a' stands twice in one object"));
}

#[test]
fn truncated_and_absent_files_are_errors() {
    let path = path("truncated");
    for tensor in OTHERS.iter().map(|spec| other(spec)).chain([tensors().remove(1).1]) {
        save(&path, [("w", &tensor)]).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        for len in [0, 4, 8, 60, bytes.len() / 2, bytes.len() - 1] {
            std::fs::write(&path, &bytes[..len]).unwrap();
            let message = reason(&path);
            assert!(message.starts_with("not a valid safetensors file"), "{len} bytes: {message}");
        }
    }
    assert!(matches!(load(&path.with_extension("nowhere")), Err(Error::File(nvfp4_files::Error::Io { .. }))));
}
