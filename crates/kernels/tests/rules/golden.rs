//! Golden cases of the kind `quantize`; testdata/golden/README.md says what a file holds.

use half::{bf16, f16};
use nvfp4_spec::matrix::Matrix;
use nvfp4_spec::{Bound, ErrorPath, GlobalScale, Metric, Mode, ScaleRule, Specials, Tile};
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::path::Path;

/// What one direction of a case is for one kind of specials.
pub struct Expected {
    pub name: String,
    pub input: Matrix,
    pub mode: Mode,
    /// Packed codes, row by row.
    pub codes: Vec<u8>,
    /// Scale bytes, row by row; rows of padding may follow.
    pub scales: Vec<u8>,
}

/// Both directions of all cases with both specials, as far as they are on record; and how many cases
/// there are.
pub fn quantize_cases() -> (usize, Vec<Expected>) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/golden");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.file_name().unwrap().to_string_lossy().starts_with("quantize__"));
    files.sort();
    let mut all = Vec::new();
    for path in &files {
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let (metadata, file) = (header.metadata().clone().unwrap(), SafeTensors::deserialize(&bytes).unwrap());
        let input = matrix(&file);
        for specials in [Specials::Kernel, Specials::Reference] {
            let mode = mode(&metadata, specials);
            for (suffix, input) in [("", input.clone()), ("_t", input.transpose())] {
                // No kernel produced this direction, so its record holds with reference specials
                // only.
                let emulated = mode.global == GlobalScale::PerRow && metadata["kernel_emulated"] != "tuned_1D";
                if specials == Specials::Kernel && suffix == "_t" && emulated {
                    continue;
                }
                let recorded = |tensor: &str| {
                    let plain = file.tensor(&format!("{tensor}{suffix}"));
                    let kernel = file.tensor(&format!("{tensor}{suffix}_kernel"));
                    kernel
                        .ok()
                        .filter(|_| specials == Specials::Kernel)
                        .unwrap_or_else(|| plain.unwrap())
                        .data()
                        .to_vec()
                };
                let name = format!("{}, {specials:?}, data{suffix}", path.file_name().unwrap().display());
                all.push(Expected { name, input, mode, codes: recorded("data"), scales: recorded("scale") });
            }
        }
    }
    (files.len(), all)
}

fn matrix(file: &SafeTensors<'_>) -> Matrix {
    let input = file.tensor("input").unwrap();
    let [rows, cols] = input.shape()[..] else { panic!("an input with two dimensions") };
    let halves = input.data().as_chunks().0.iter().map(|&b| u16::from_le_bytes(b));
    match input.dtype() {
        Dtype::F32 => {
            let values = input.data().as_chunks().0.iter().map(|&b| f32::from_le_bytes(b));
            Matrix::new(rows, cols, &values.collect::<Vec<f32>>())
        }
        Dtype::BF16 => Matrix::new(rows, cols, &halves.map(bf16::from_bits).collect::<Vec<bf16>>()),
        Dtype::F16 => Matrix::new(rows, cols, &halves.map(f16::from_bits).collect::<Vec<f16>>()),
        other => panic!("an input of {other:?}"),
    }
    .unwrap()
}

fn mode(metadata: &HashMap<String, String>, specials: Specials) -> Mode {
    let (tile, global) = match metadata["scaling"].as_str() {
        "tensor1d" => (Tile::Row16, GlobalScale::PerTensor),
        "row1d" => (Tile::Row16, GlobalScale::PerRow),
        "tensor2d" => (Tile::Square16, GlobalScale::PerTensor),
        other => panic!("scaling '{other}'"),
    };
    let four_over_six = ScaleRule::FourOverSix {
        metric: if metadata["err_mode"] == "MSE" { Metric::Mse } else { Metric::Mae },
        error: if metadata["fast_math"] == "True" { ErrorPath::Fast } else { ErrorPath::Strict },
        bound: if metadata["e4m3_max"] == "256" { Bound::E256 } else { Bound::E448 },
    };
    let rule = if metadata["use_4over6"] == "True" { four_over_six } else { ScaleRule::Six };
    Mode { tile, global, rule, specials, ..Mode::default() }
}
