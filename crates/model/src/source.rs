//! A checkpoint as a decoder reads it: linear layers and vectors by their names.

use crate::config::Config;
use crate::linear::Linear;
use crate::matrix::Matrix;
use crate::place::{Place, Placed};
use crate::{Result, refused};
use half::{bf16, f16};
use nvfp4::Unit;
use nvfp4_checkpoint::{Checkpoint, Dialect, Located, Model, Stored, Weight, split_all};
use safetensors::Dtype;
use serde_json::Value;
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

/// Opens a model's folder. Experts that lie in one tensor are matrices of their own, whichever
/// order it has, but for GPT-OSS's.
pub fn open(folder: &Path) -> Result<Checkpoint> {
    split_all(Checkpoint::open(folder)?)
}

/// A checkpoint and what its configuration says.
pub struct Source<'a> {
    model: Model<'a>,
    index: HashMap<String, usize>,
    config: Config,
    /// What precedes `layers.0` and `embed_tokens`.
    prefix: String,
    place: Place,
}

impl<'a> Source<'a> {
    /// Reads the configuration of a checkpoint and finds its tensors. Products are computed on the
    /// CPU.
    pub fn new(checkpoint: &'a Checkpoint, dialect: Option<Dialect>) -> Result<Self> {
        let json = checkpoint.config().ok_or_else(|| {
            refused(format!("{}: there is no config.json; give the model's folder", checkpoint.root().display()))
        })?;
        let config = Config::new(json)?;
        let model = match dialect {
            Some(dialect) => Model::with_dialect(checkpoint, dialect)?,
            None => Model::new(checkpoint)?,
        };
        let index: HashMap<String, usize> =
            model.weights.iter().enumerate().map(|(i, w)| (w.module.clone(), i)).collect();
        let prefix =
            index.keys().filter_map(|name| name.strip_suffix("embed_tokens")).min_by_key(|prefix| prefix.len());
        let prefix = prefix.ok_or_else(|| {
            refused(format!("{}: no tensor is called 'embed_tokens.weight'", checkpoint.root().display()))
        })?;
        let source = Source { prefix: prefix.to_string(), index, config, model, place: Place::Cpu };
        let embeddings = source.weight(&source.name("embed_tokens"))?;
        let (rows, cols, config) = (embeddings.rows, embeddings.cols, &source.config);
        if cols != config.hidden || rows < config.vocabulary {
            let (vocabulary, hidden) = (config.vocabulary, config.hidden);
            return Err(refused(format!(
                "the embeddings are {rows} × {cols}, but config.json says {vocabulary} × {hidden}; they are not of one model"
            )));
        }
        Ok(source)
    }

    /// The same, with products computed there.
    #[must_use]
    pub fn on(self, place: Place) -> Self {
        Source { place, ..self }
    }

    /// Where products are computed.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Its settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The checkpoint seen as weights.
    pub fn model(&self) -> &Model<'a> {
        &self.model
    }

    /// The name of a part of the decoder.
    pub fn name(&self, part: &str) -> String {
        format!("{}{part}", self.prefix)
    }

    /// A weight by the name of its module.
    pub fn weight(&self, module: &str) -> Result<&Weight<'a>> {
        self.find(module).ok_or_else(|| {
            let prefix = format!("{module}.");
            let other = self.model.checkpoint.tensors().find(|tensor| {
                tensor.info.name.starts_with(&prefix) && tensor.info.name != format!("{prefix}bias")
            });
            match other {
                Some(other) => refused(format!(
                    "'{}' is not of the format of the other weights ({}); a checkpoint has one: convert it again, or name \
                     the format with --from",
                    other.info.name, self.model.dialect
                )),
                None => refused(format!("the checkpoint has no weight '{module}'; is the download complete?")),
            }
        })
    }

    /// A weight, if it is there.
    pub fn find(&self, module: &str) -> Option<&Weight<'a>> {
        self.index.get(module).map(|&i| &self.model.weights[i])
    }

    /// The numbers of a small tensor, if it is there.
    pub fn vector(&self, name: &str) -> Result<Option<Vec<f32>>> {
        self.model.checkpoint.get(name).map(|tensor| floats(&tensor)).transpose()
    }

    /// A vector of this length.
    pub fn need_vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        let found = self.vector(name)?.ok_or_else(|| refused(format!("the checkpoint has no tensor '{name}'")))?;
        if found.len() != len {
            let got = found.len();
            return Err(refused(format!("'{name}' has {got} elements; config.json asks for {len}")));
        }
        Ok(found)
    }

    /// Rows of a weight, where they are multiplied.
    pub fn matrix(&self, weight: &Weight<'_>, rows: Range<usize>) -> Result<Placed> {
        self.place.hold(Matrix::read(weight, rows)?)
    }

    /// A linear layer of these outputs and inputs, with its bias if it has one.
    pub fn linear(&self, module: &str, outputs: usize, inputs: usize) -> Result<Linear> {
        let weight = self.weight(module)?;
        if (weight.rows, weight.cols) != (outputs, inputs) {
            let (rows, cols) = (weight.rows, weight.cols);
            return Err(refused(format!("'{module}' is {rows} × {cols}; config.json asks for {outputs} × {inputs}")));
        }
        let bias = format!("{module}.bias");
        let bias = self.model.checkpoint.get(&bias).map(|_| self.need_vector(&bias, outputs)).transpose()?;
        Ok(Linear::new(module.to_string(), self.matrix(weight, 0..outputs)?, input_scale(weight)?, bias))
    }

    /// One of GPT-OSS's experts, which are stored in one tensor, inputs before outputs where it is
    /// plain.
    pub fn stacked(&self, module: &str, expert: usize, outputs: usize, inputs: usize) -> Result<Linear> {
        let own = |all: Vec<f32>| match all.get(expert * outputs..(expert + 1) * outputs) {
            Some(own) => Ok(own.to_vec()),
            None => Err(refused(format!("'{module}_bias' has {} elements, too few for expert {expert}", all.len()))),
        };
        let bias = self.vector(&format!("{module}_bias"))?.map(own).transpose()?;
        if let Some(weight) = self.find(module) {
            if weight.cols != inputs || weight.rows != weight.matrices() * outputs || expert >= weight.matrices() {
                let (rows, cols) = (weight.rows, weight.cols);
                return Err(refused(format!(
                    "'{module}' is {rows} × {cols}; config.json asks for experts of {outputs} × {inputs}"
                )));
            }
            let rows = expert * outputs..(expert + 1) * outputs;
            return Ok(Linear::new(module.to_string(), self.matrix(weight, rows)?, input_scale(weight)?, bias));
        }
        let tensor = self.model.checkpoint.get(module);
        let tensor = tensor.ok_or_else(|| refused(format!("the checkpoint has no experts '{module}'")))?;
        let size = tensor.info.dtype.bitsize() / 8;
        if tensor.info.shape.len() != 3 || tensor.info.shape[1..] != [inputs, outputs] || expert >= tensor.info.shape[0]
        {
            let shape = &tensor.info.shape;
            return Err(refused(format!(
                "'{module}' is {shape:?}; config.json asks for experts of {inputs} × {outputs}"
            )));
        }
        let mut bytes = vec![0; inputs * outputs * size];
        tensor.read((expert * bytes.len()) as u64, &mut bytes)?;
        let values = decoded(&tensor, &bytes)?;
        let turned = (0..outputs).flat_map(|o| (0..inputs).map(move |i| (i, o))).map(|(i, o)| values[i * outputs + o]);
        let matrix = self.place.hold(Matrix::new(turned.collect(), inputs))?;
        Ok(Linear::new(module.to_string(), matrix, None, bias))
    }

    /// Whether the checkpoint says that keys and values are kept in FP8.
    pub fn keeps_fp8(&self) -> bool {
        let checkpoint = self.model.checkpoint;
        let algorithm = checkpoint.quantization().and_then(|q| q.pointer("/quantization/kv_cache_quant_algo"));
        let scheme = checkpoint.config().and_then(|c| c.pointer("/quantization_config/kv_cache_scheme"));
        algorithm.and_then(Value::as_str) == Some("FP8") || scheme.is_some_and(|scheme| scheme["num_bits"] == 8)
    }

    /// Whether any weight has an activation scale.
    pub fn quantizes_activations(&self) -> bool {
        self.model.weights.iter().any(|w| matches!(&w.stored, Stored::Nvfp4(parts) if parts.input.is_some()))
    }
}

/// The activation scale of a weight as a multiplier, if it has one. Experts of one tensor share the
/// largest, as servers do.
pub fn input_scale(weight: &Weight<'_>) -> Result<Option<f32>> {
    let Stored::Nvfp4(parts) = &weight.stored else { return Ok(None) };
    let Some(input) = parts.input.filter(|tensor| tensor.info.len > 0) else { return Ok(None) };
    let multiplier = |stored: f32| if parts.unit == Unit::Divisor { 1.0 / stored } else { stored };
    let scales: Vec<f32> = floats(&input)?.into_iter().map(multiplier).collect();
    if let Some(wrong) = scales.iter().find(|scale| !(scale.is_normal() && **scale > 0.0)) {
        return Err(refused(format!(
            "the activation scale of '{}' is {wrong}; expected a positive number: calibrate the model again",
            weight.module
        )));
    }
    Ok(scales.into_iter().reduce(f32::max))
}

/// The numbers of a plain tensor.
fn floats(tensor: &Located<'_>) -> Result<Vec<f32>> {
    decoded(tensor, &tensor.bytes()?)
}

fn decoded(tensor: &Located<'_>, bytes: &[u8]) -> Result<Vec<f32>> {
    Ok(match tensor.info.dtype {
        Dtype::F32 => bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
        Dtype::BF16 => bytes.as_chunks::<2>().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32()).collect(),
        Dtype::F16 => bytes.as_chunks::<2>().0.iter().map(|&b| f16::from_le_bytes(b).to_f32()).collect(),
        other => return Err(refused(format!("'{}' is {other:?}; expected F32, BF16 or F16", tensor.info.name))),
    })
}
