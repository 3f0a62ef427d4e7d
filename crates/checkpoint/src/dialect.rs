//! The dialect of a checkpoint, and which of its tensors together are one weight.
//!
//! | | codes of `X` | block scales | tensor scale | even column |
//! |---|---|---|---|---|
//! | ModelOpt | `X.weight` | `X.weight_scale`, row by row | `X.weight_scale_2`, a multiplier | low nibble |
//! | compressed-tensors | `X.weight_packed` | `X.weight_scale`, row by row | `X.weight_global_scale`, a divisor | low nibble |
//! | torchao | `X._weight_qdata` | `X._weight_scale`, either layout | `X._weight_per_tensor_scale`, a multiplier | low nibble |
//! | ComfyUI | `X.weight` | `X.weight_scale`, swizzled | `X.weight_scale_2`, a multiplier | high nibble |
//!
//! ModelOpt and ComfyUI differ in nothing but a marker, and reading one as the other gives noise:
//! without the marker, or the configuration that says ModelOpt, a checkpoint is refused rather than
//! guessed at.

use super::folder::{Checkpoint, Located};
use super::form::Eight;
use super::fp8;
use super::outline::Outline;
use super::weight::{Arrangement, Nibbles, Nvfp4, Stored, Weight};
use crate::{Error, Result};
use nvfp4::{Layout, Unit};
use nvfp4_spec::{BLOCK, swizzle};
use safetensors::Dtype;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The library whose names and layout a checkpoint has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dialect {
    /// Not quantized: BF16, F16 or F32.
    Plain,
    /// FP8 with one scale per 128 × 128 block (`weight_scale_inv`), as DeepSeek publishes.
    Fp8Block,
    /// MXFP4 experts (`…_blocks`, `…_scales`), as GPT-OSS is published.
    MxFp4,
    /// DeepSeek-V4 as it is published: FP8 in blocks and MXFP4 experts, both with `scale`.
    DeepSeekV4,
    /// The same with its experts in NVFP4.
    DeepSeekV4Nvfp4,
    /// NVIDIA ModelOpt's NVFP4.
    ModelOpt,
    /// compressed-tensors' `nvfp4-pack-quantized`.
    CompressedTensors,
    /// torchao's `NVFP4Tensor`.
    TorchAo,
    /// ComfyUI's NVFP4 (comfy-kitchen).
    ComfyUi,
}

impl Dialect {
    /// Whether weights are stored in NVFP4.
    pub fn is_nvfp4(self) -> bool {
        use Dialect::{ComfyUi, CompressedTensors, DeepSeekV4Nvfp4, ModelOpt, TorchAo};
        matches!(self, ModelOpt | CompressedTensors | DeepSeekV4Nvfp4 | TorchAo | ComfyUi)
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dialect::Plain => "not quantized",
            Dialect::Fp8Block => "FP8 with block scales",
            Dialect::MxFp4 => "MXFP4",
            Dialect::DeepSeekV4 => "DeepSeek-V4's FP8 and MXFP4",
            Dialect::DeepSeekV4Nvfp4 => "DeepSeek-V4's FP8 and NVFP4",
            Dialect::ModelOpt => "ModelOpt",
            Dialect::CompressedTensors => "compressed-tensors",
            Dialect::TorchAo => "torchao",
            Dialect::ComfyUi => "ComfyUI",
        })
    }
}

/// A checkpoint seen as weights of modules and everything else.
#[derive(Debug)]
pub struct Model<'a> {
    /// The checkpoint.
    pub checkpoint: &'a Checkpoint,
    /// Its dialect.
    pub dialect: Dialect,
    /// Matrices that are quantized or might be.
    pub weights: Vec<Weight<'a>>,
    /// All other tensors.
    pub others: Vec<Located<'a>>,
}

impl<'a> Model<'a> {
    /// Detects the dialect of a checkpoint and groups its tensors.
    pub fn new(checkpoint: &'a Checkpoint) -> Result<Self> {
        Self::with_dialect(checkpoint, detect(checkpoint)?)
    }

    /// Groups the tensors of a checkpoint of this dialect.
    pub fn with_dialect(checkpoint: &'a Checkpoint, dialect: Dialect) -> Result<Self> {
        let mut grouping =
            Grouping { checkpoint, taken: BTreeSet::new(), weights: BTreeMap::new(), named: BTreeMap::new() };
        match dialect {
            Dialect::Plain => {}
            Dialect::Fp8Block => grouping.fp8()?,
            Dialect::MxFp4 => grouping.mxfp4()?,
            Dialect::TorchAo => grouping.torchao()?,
            Dialect::ModelOpt => {
                grouping.nvfp4(dialect)?;
                grouping.experts()?;
                grouping.scaled_fp8()?;
            }
            Dialect::CompressedTensors => {
                grouping.nvfp4(dialect)?;
                grouping.packed_mxfp4()?;
                grouping.scaled_fp8()?;
            }
            Dialect::DeepSeekV4 => grouping.deepseek_v4()?,
            Dialect::DeepSeekV4Nvfp4 => {
                grouping.nvfp4(dialect)?;
                grouping.deepseek_v4()?;
            }
            Dialect::ComfyUi => grouping.nvfp4(dialect)?,
        }
        grouping.plain()?;
        // Tensors keep the order of their files, so that a converted checkpoint reads its source
        // from front to back.
        let (mut weights, mut others) = (Vec::new(), Vec::new());
        for tensor in checkpoint.tensors() {
            match grouping.weights.remove(&tensor.info.name) {
                Some(weight) => weights.push(weight),
                None if grouping.taken.contains(tensor.info.name.as_str()) => {}
                None => others.push(tensor),
            }
        }
        Ok(Model { checkpoint, dialect, weights, others })
    }

    /// A weight by the name of its module.
    pub fn weight(&self, module: &str) -> Option<&Weight<'a>> {
        self.weights.iter().find(|w| w.module == module)
    }

    /// The architecture that `config.json` names.
    pub fn architecture(&self) -> Option<&str> {
        Outline::new(self.checkpoint.config()).architecture()
    }

    /// Whether the configuration names each quantized module, so that all others are not.
    pub(super) fn names_all(&self) -> bool {
        let algorithm = self.description().and_then(|d| d.get("quant_algo")).and_then(Value::as_str);
        algorithm.is_some_and(|algorithm| algorithm.eq_ignore_ascii_case("MIXED_PRECISION"))
    }

    /// What servers go by: `config.json`, or ModelOpt's own file where that says nothing.
    pub(super) fn description(&self) -> Option<&'a Value> {
        let config = self.checkpoint.config().and_then(|c| c.get("quantization_config")).filter(|c| c.is_object());
        config.or_else(|| self.checkpoint.quantization().and_then(|q| q.get("quantization")))
    }
}

/// Detects the dialect of a checkpoint: by its marks, never by likelihood.
///
/// ```
/// use nvfp4_checkpoint::{Checkpoint, Dialect, Model, detect};
///
/// # use safetensors::{Dtype, tensor::TensorView};
/// # let folder = std::env::temp_dir().join(format!("nvfp4-detect-{}", std::process::id()));
/// # let source = folder.join("model");
/// # std::fs::create_dir_all(&source).unwrap();
/// # let config = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}"#;
/// # std::fs::write(source.join("config.json"), config).unwrap();
/// # let bytes = [0x80, 0x3F].repeat(32 * 64); // 1.0 in BF16
/// # let weight = TensorView::new(Dtype::BF16, vec![32, 64], &bytes).unwrap();
/// # let file = source.join("model.safetensors");
/// # safetensors::serialize_to_file([("model.layers.0.mlp.down_proj.weight", weight)], None, &file).unwrap();
/// // `source` is a folder with one BF16 weight of 32 × 64.
/// let checkpoint = Checkpoint::open(&source)?;
/// assert_eq!(detect(&checkpoint)?, Dialect::Plain);
/// let weights = Model::new(&checkpoint)?.weights;
/// assert_eq!((weights[0].module.as_str(), weights[0].rows), ("model.layers.0.mlp.down_proj", 32));
/// # std::fs::remove_dir_all(&folder).unwrap();
/// # Ok::<(), nvfp4_checkpoint::Error>(())
/// ```
pub fn detect(checkpoint: &Checkpoint) -> Result<Dialect> {
    let has = |suffix: &str| checkpoint.tensors().any(|t| t.info.name.ends_with(suffix));
    let config = checkpoint.config().and_then(|c| c.get("quantization_config")).filter(|c| !c.is_null());
    let text = |value: Option<&Value>| value.and_then(Value::as_str).unwrap_or_default().to_lowercase();
    let method = text(config.and_then(|c| c.get("quant_method")));
    let producer = checkpoint.quantization().and_then(|q| q.get("producer")).and_then(|p| p.get("name"));
    let refuse = |reason: String| Error::content(checkpoint.root(), reason);
    let metadata = |wanted: &str| checkpoint.files().iter().any(|f| f.metadata().values().any(|v| v.contains(wanted)));
    if has(".comfy_quant") || checkpoint.files().iter().any(|f| f.metadata().contains_key("_quantization_metadata")) {
        return Ok(Dialect::ComfyUi);
    }
    if metadata("\"NVFP4Tensor\"") {
        return Ok(Dialect::TorchAo);
    }
    if has(".weight_packed") {
        let mxfp4 = |t: Located<'_>| {
            let scale = t.info.name.strip_suffix("_packed").and_then(|w| checkpoint.get(&format!("{w}_scale")));
            t.info.name.ends_with(".weight_packed") && scale.is_some_and(|scale| scale.info.dtype == Dtype::U8)
        };
        return match has(".weight_global_scale") || checkpoint.tensors().any(mxfp4) {
            true => Ok(Dialect::CompressedTensors),
            false => Err(refuse(format!(
                "packed weights without 'weight_global_scale': compressed-tensors in the format '{}', not NVFP4 or MXFP4",
                text(config.and_then(|c| c.get("format")))
            ))),
        };
    }
    // DeepSeek-V4 has `scale` beside FP8 and packed codes.
    let deepseek = |t: Located<'_>| {
        let weight = t.info.name.strip_suffix(".scale").and_then(|x| checkpoint.get(&format!("{x}.weight")));
        let eight = |w: &Located<'_>| matches!(w.info.dtype, Dtype::F8_E4M3);
        weight.is_some_and(|w| eight(&w) || t.info.dtype == Dtype::F8_E8M0)
    };
    if checkpoint.tensors().any(deepseek) {
        return Ok(if has(".weight_scale_2") { Dialect::DeepSeekV4Nvfp4 } else { Dialect::DeepSeekV4 });
    }
    // Experts in one tensor are called `…_weight_scale_2`.
    if has(".weight_scale_2") || has("_weight_scale_2") {
        return match method.starts_with("modelopt") || text(producer) == "modelopt" {
            true => Ok(Dialect::ModelOpt),
            false => Err(Error::UnclearDialect { path: checkpoint.root().to_path_buf() }),
        };
    }
    if has(".weight_scale_inv") {
        return Ok(Dialect::Fp8Block);
    }
    if has("_blocks") && has("_scales") {
        return Ok(Dialect::MxFp4);
    }
    let is_fp8 = |t: Located<'_>| t.info.dtype == Dtype::F8_E4M3 && t.info.name.ends_with(".weight");
    let scaled = has(".weight_scale") && checkpoint.tensors().any(is_fp8);
    match config {
        _ if scaled && (method.starts_with("modelopt") || text(producer) == "modelopt") => Ok(Dialect::ModelOpt),
        Some(_) if scaled && method.starts_with("compressed") => Ok(Dialect::CompressedTensors),
        Some(_) if checkpoint.tensors().any(is_fp8) => Err(refuse(format!(
            "FP8 by '{method}' without scales that are read ('weight_scale' of ModelOpt or compressed-tensors, or \
             'weight_scale_inv'); use the checkpoint in BF16 that it was made from"
        ))),
        Some(_) if !method.is_empty() => Err(refuse(format!(
            "quantized by '{method}', which is not read; use the checkpoint in BF16 that it was made from"
        ))),
        _ => Ok(Dialect::Plain),
    }
}

/// Tensors on their way into weights. A weight is filed under the name of its first tensor.
pub(super) struct Grouping<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    taken: BTreeSet<&'a str>,
    weights: BTreeMap<String, Weight<'a>>,
    /// The first tensor of the weight of each module.
    named: BTreeMap<String, &'a str>,
}

impl<'a> Grouping<'a> {
    /// Modules that have a tensor with this suffix.
    pub(super) fn modules(&self, suffix: &str) -> Vec<&'a str> {
        self.checkpoint.tensors().filter_map(|t| t.info.name.strip_suffix(suffix)).collect()
    }

    pub(super) fn need(&self, name: &str, because: &str) -> Result<Located<'a>> {
        self.checkpoint.get(name).ok_or_else(|| missing_part(self.checkpoint, name, because))
    }

    /// Takes in a weight whose parts fit each other: the one place where sizes that a file claims
    /// become sizes to work with.
    ///
    /// A quantized weight has elements, so that its rows, columns and matrices are at most as many
    /// as the file has bytes. Where one of them is zero, another may be any number, without a byte
    /// in the file. A tensor of 0 experts is the one exception: nothing goes through their rows.
    pub(super) fn add(&mut self, module: &str, rows: usize, cols: usize, stored: Stored<'a>) -> Result<()> {
        let (parts, first) = (stored.parts(), stored.first());
        let weight = Weight { module: module.to_string(), rows, cols, stored };
        let plain = matches!(stored, Stored::Plain(_));
        if !plain && weight.matrices() > 0 && (rows == 0 || cols == 0) {
            return Err(first.wrong(format!("a quantized weight of {rows} × {cols} has no elements; remove it")));
        }
        if let Some(other) = self.named.insert(module.to_string(), &first.info.name) {
            return Err(first.wrong(format!("'{other}' is the weight of '{module}' already; remove one of them")));
        }
        self.taken.extend(parts.iter().map(|p| p.info.name.as_str()));
        self.weights.insert(first.info.name.clone(), weight);
        Ok(())
    }

    /// Every other matrix of floats that is called a weight.
    fn plain(&mut self) -> Result<()> {
        for tensor in self.checkpoint.tensors() {
            let (Some(module), [rows, cols]) = (tensor.info.name.strip_suffix(".weight"), &tensor.info.shape[..])
            else {
                continue;
            };
            let float = matches!(tensor.info.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32);
            if float && !self.taken.contains(tensor.info.name.as_str()) {
                self.add(module, *rows, *cols, Stored::Plain(tensor))?;
            }
        }
        Ok(())
    }

    fn fp8(&mut self) -> Result<()> {
        for module in self.modules(".weight_scale_inv") {
            let scale_name = format!("{module}.weight_scale_inv");
            let weight = self.need(&format!("{module}.weight"), &scale_name)?;
            let scale = self.need(&scale_name, &scale_name)?;
            let (Dtype::F8_E4M3, &[rows, cols]) = (weight.info.dtype, &weight.info.shape[..]) else {
                return Err(weight.wrong("expected a matrix of F8_E4M3 beside its 'weight_scale_inv'"));
            };
            if !matches!(scale.info.dtype, Dtype::F32 | Dtype::BF16) {
                return Err(scale.wrong("expected scales in F32 or BF16"));
            }
            let expected = Eight::Block.scales(rows, cols);
            if scale.info.shape != expected {
                let got = &scale.info.shape;
                return Err(scale.wrong(format!("expected one scale per 128 × 128 block, {expected:?}, got {got:?}")));
            }
            self.add(module, rows, cols, Stored::Fp8 { weight, scale, input: None, eight: Eight::Block })?;
        }
        Ok(())
    }

    /// FP8 with `weight_scale`, as ModelOpt and compressed-tensors have it: per tensor, per channel,
    /// in blocks, or MXFP8.
    fn scaled_fp8(&mut self) -> Result<()> {
        for module in self.modules(".weight_scale") {
            let Some(weight) = self.checkpoint.get(&format!("{module}.weight")) else { continue };
            let (Dtype::F8_E4M3, &[rows, cols]) = (weight.info.dtype, &weight.info.shape[..]) else { continue };
            let scale_name = format!("{module}.weight_scale");
            let scale = self.need(&scale_name, &scale_name)?;
            let Some(eight) = fp8::kind(rows, cols, &scale) else {
                let (dtype, got) = (scale.info.dtype, &scale.info.shape);
                return Err(scale.wrong(format!(
                    "expected the scales of {rows} × {cols} in FP8: per tensor, row, 128 × 128 block, or 32 of a row in \
                     U8; got {dtype:?} of {got:?}"
                )));
            };
            let input = self.checkpoint.get(&format!("{module}.input_scale"));
            let float = |t: &Located<'_>| matches!(t.info.dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16);
            let number = |t: &Located<'_>| float(t) && t.info.len == (t.info.dtype.bitsize() / 8) as u64;
            if let Some(input) = input.filter(|input| !number(input)) {
                return Err(input.wrong("expected one number, a float"));
            }
            self.add(module, rows, cols, Stored::Fp8 { weight, scale, input, eight })?;
        }
        Ok(())
    }

    fn nvfp4(&mut self, dialect: Dialect) -> Result<()> {
        let (codes, global, input, unit) = match dialect {
            Dialect::CompressedTensors => ("weight_packed", "weight_global_scale", "input_global_scale", Unit::Divisor),
            _ => ("weight", "weight_scale_2", "input_scale", Unit::Multiplier),
        };
        let (nibbles, layout) = match dialect {
            Dialect::ComfyUi => (Nibbles::EvenHigh, Layout::Swizzled),
            _ => (Nibbles::EvenLow, Layout::Linear),
        };
        for module in self.modules(&format!(".{global}")) {
            let name = |part: &str| format!("{module}.{part}");
            let codes_at = self.need(&name(codes), &name(global))?;
            // ModelOpt's FP8 layers have no second scale, but other 4-bit formats do: only bytes
            // can hold codes.
            let parts = Nvfp4 {
                codes: codes_at,
                scales: self.need(&name("weight_scale"), &name(codes))?,
                global: self.checkpoint.get(&name(global)),
                input: self.checkpoint.get(&name(input)),
                nibbles,
                layout,
                unit,
                arrangement: Arrangement::Rows,
            };
            self.add_nvfp4(module, parts)?;
            let marker = self.checkpoint.get(&name("comfy_quant"));
            self.taken.extend(marker.map(|m| m.info.name.as_str()));
        }
        Ok(())
    }

    /// ModelOpt's experts in one tensor: `X`, `X_weight_scale`, `X_weight_scale_2`, inputs before
    /// outputs.
    fn experts(&mut self) -> Result<()> {
        for module in self.modules("_weight_scale_2") {
            let name = |part: &str| format!("{module}_{part}");
            let codes = self.need(module, &name("weight_scale_2"))?;
            let scales = self.need(&name("weight_scale"), module)?;
            let (Dtype::U8, &[experts, bytes, outputs]) = (codes.info.dtype, &codes.info.shape[..]) else {
                return Err(codes.wrong("expected packed codes of experts, U8 of three dimensions"));
            };
            let (rows, cols) = (product(&codes, &[experts, outputs])?, product(&codes, &[bytes, 2])?);
            let expected = [experts, cols / BLOCK, outputs];
            if scales.info.dtype != Dtype::F8_E4M3 || !cols.is_multiple_of(BLOCK) || scales.info.shape != expected {
                return Err(scales.wrong(format!("expected F8_E4M3 scales of {expected:?}")));
            }
            let global = self.need(&name("weight_scale_2"), module)?;
            let input = self.checkpoint.get(&name("input_scale"));
            for scalar in [Some(global), input].into_iter().flatten() {
                let fits = scalar.info.len == 4 || Some(scalar.info.len) == (experts as u64).checked_mul(4);
                if scalar.info.dtype != Dtype::F32 || !fits {
                    return Err(scalar.wrong(format!("expected one F32 number, or one for each of {experts} experts")));
                }
            }
            let parts = Nvfp4 {
                codes,
                scales,
                global: Some(global),
                input,
                nibbles: Nibbles::EvenLow,
                layout: Layout::Linear,
                unit: Unit::Multiplier,
                arrangement: Arrangement::Experts(experts),
            };
            self.add(module, rows, cols, Stored::Nvfp4(parts))?;
        }
        Ok(())
    }

    fn torchao(&mut self) -> Result<()> {
        for file in self.checkpoint.files() {
            for (tensor, text) in file.metadata().iter().filter(|(_, text)| text.contains("\"NVFP4Tensor\"")) {
                let invalid = |reason: String| Error::content(file.path(), reason);
                let entry: Value =
                    serde_json::from_str(text).map_err(|e| invalid(format!("metadata of '{tensor}': {e}")))?;
                let swizzled = entry.pointer("/_data/is_swizzled_scales").and_then(Value::as_bool);
                let layout = match swizzled {
                    Some(true) => Layout::Swizzled,
                    Some(false) => Layout::Linear,
                    None => return Err(invalid(format!("metadata of '{tensor}': no 'is_swizzled_scales'"))),
                };
                let (module, last) = tensor.rsplit_once('.').unwrap_or(("", tensor));
                let name = |part: &str| format!("{module}.{}", format_args!("_{last}_{part}"));
                let parts = Nvfp4 {
                    codes: self.need(&name("qdata"), tensor)?,
                    scales: self.need(&name("scale"), tensor)?,
                    global: self.checkpoint.get(&name("per_tensor_scale")),
                    input: self.checkpoint.get(&name("act_per_tensor_scale")),
                    nibbles: Nibbles::EvenLow,
                    layout,
                    unit: Unit::Multiplier,
                    arrangement: Arrangement::Rows,
                };
                self.add_nvfp4(module, parts)?;
            }
        }
        Ok(())
    }

    fn add_nvfp4(&mut self, module: &str, parts: Nvfp4<'a>) -> Result<()> {
        let (Dtype::U8, &[rows, bytes]) = (parts.codes.info.dtype, &parts.codes.info.shape[..]) else {
            let (dtype, shape) = (parts.codes.info.dtype, &parts.codes.info.shape);
            return Err(parts
                .codes
                .wrong(format!("expected packed codes, a matrix of U8, got {dtype:?} of {shape:?}")));
        };
        let cols = product(&parts.codes, &[bytes, 2])?;
        if parts.scales.info.dtype != Dtype::F8_E4M3 {
            return Err(parts.scales.wrong(format!("expected F8_E4M3 scales, got {:?}", parts.scales.info.dtype)));
        }
        if !cols.is_multiple_of(BLOCK) {
            return Err(parts.codes.wrong(format!("expected rows of a multiple of {BLOCK} elements, got {cols}")));
        }
        let fits = match parts.layout {
            Layout::Linear => parts.scales.info.shape == [rows, cols / BLOCK],
            Layout::Swizzled => parts.scales.info.len == swizzle::len(rows, cols / BLOCK)? as u64,
        };
        if !fits {
            let got = &parts.scales.info.shape;
            return Err(parts
                .scales
                .wrong(format!("expected the scales of {rows} × {} blocks, got {got:?}", cols / BLOCK)));
        }
        for scalar in [parts.global, parts.input].into_iter().flatten() {
            if scalar.info.dtype != Dtype::F32 || scalar.info.len != 4 {
                return Err(scalar.wrong("expected one F32 number"));
            }
        }
        self.add(module, rows, cols, Stored::Nvfp4(parts))
    }
}

/// The error about a tensor that another one needs.
pub(super) fn missing_part(checkpoint: &Checkpoint, name: &str, because: &str) -> Error {
    Error::content(checkpoint.root(), format!("tensor '{name}' is missing, which '{because}' needs"))
}

/// The product of sizes that a tensor claims.
pub(super) fn product(tensor: &Located<'_>, sizes: &[usize]) -> Result<usize> {
    let shape = &tensor.info.shape;
    let product = sizes.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
    product.ok_or_else(|| tensor.wrong(format!("the shape {shape:?} has more elements than an address can count")))
}
