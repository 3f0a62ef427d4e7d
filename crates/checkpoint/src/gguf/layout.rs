//! Where every byte of a GGUF file goes, known before the first weight is read.

use super::container::{Described, Type, Value, header};
use super::family::{Config, Family, Place, Rope};
use super::tokenizer;
use crate::dialect::Model;
use crate::folder::{Checkpoint, Located};
use crate::names::KvScale;
use crate::plan::{Item, Plan};
use crate::shards::{Cast, Placed, RowOrder, Shard, Unit};
use crate::target::{Activations, Role};
use crate::weight::Stored;
use crate::{Error, Result};
use nvfp4_spec::gguf::BLOCK_ELEMENTS;
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet};

/// What the file is called while it is written.
pub(in super::super) const FILE: &str = "model.gguf";

/// llama.cpp's number for a file that is mostly NVFP4, and the version of its block formats.
const FILE_TYPE: u32 = 39;
const BLOCKS_VERSION: u32 = 2;

/// Whether it is a tensor that llama.cpp computes by itself, or does not use.
fn is_dropped(name: &str) -> bool {
    name.ends_with(".rotary_emb.inv_freq") || KvScale::named(name).is_some()
}

/// Lays out the file of a model.
pub(in super::super) fn lay_out<'a>(model: &Model<'a>, plan: &Plan<'a>, activations: Activations) -> Result<Shard<'a>> {
    let family = Family::of(model.architecture())?;
    let config = Config::new(model.checkpoint.config())?;
    check_sizes(model, &config)?;
    let mut layout = Layout {
        family,
        config: &config,
        quantized: plan.quantized().map(|item| item.weight.module.as_str()).collect(),
        slots: Vec::new(),
        index: BTreeMap::new(),
        seen: BTreeMap::new(),
    };
    let first: BTreeMap<&str, usize> =
        plan.items.iter().enumerate().map(|(i, item)| (item.weight.stored.parts()[0].info.name.as_str(), i)).collect();
    let others: BTreeMap<&str, Located<'a>> = model.others.iter().map(|t| (t.info.name.as_str(), *t)).collect();
    let mut units = Vec::new();
    for tensor in model.checkpoint.tensors() {
        let name = tensor.info.name.as_str();
        match (first.get(name), others.get(name)) {
            (Some(&i), _) => units.push((Unit::Weight(i), layout.weight(&plan.items[i], activations)?)),
            (None, Some(_)) if is_dropped(name) => {}
            (None, Some(&other)) => units.push((Unit::Other(other), layout.other(&other)?)),
            (None, None) => {}
        }
    }
    layout.check_experts()?;
    let divisors = Rope::of(&config)?.divisors(config.head_dim()?);
    let divisors = divisors.map(|d| layout.slot("rope_freqs.weight", Type::F32, vec![d.len() as u64]).map(|s| (s, d)));
    let divisors = divisors.transpose()?;

    let entries = entries(model, family, &config)?;
    let (header, starts, len) = header(&entries, &layout.slots);
    let placed = units.into_iter().map(|(unit, to)| Placed {
        unit,
        offsets: to.parts.into_iter().map(|(role, slot, offset)| (role, starts[slot] + offset)).collect(),
        order: to.order,
        cast: to.cast,
    });
    let bytes = |d: Vec<f32>| d.into_iter().flat_map(f32::to_le_bytes).collect();
    Ok(Shard {
        file: FILE.to_string(),
        header,
        len,
        units: placed.collect(),
        names: layout.slots.iter().map(|s| s.name.clone()).collect(),
        constants: divisors.into_iter().map(|(slot, d)| (starts[slot], bytes(d))).collect(),
    })
}

/// Refuses sizes of `config.json` that the tensors do not bear out, before anything is allocated for them.
fn check_sizes(model: &Model<'_>, config: &Config<'_>) -> Result<()> {
    let rows = |name: &str| match model.weight(name) {
        Some(weight) if weight.elements() > 0 => weight.rows as u64,
        _ => 0,
    };
    for (key, size, module) in [
        ("vocab_size", config.number("vocab_size")?, "model.embed_tokens"),
        ("head_dim", config.head_dim()?, "model.layers.0.self_attn.q_proj"),
    ] {
        let held = rows(module);
        if size > held {
            return Err(config.wrong(format!("'{key}' is {size}, but '{module}' has {held} rows")));
        }
    }
    Ok(())
}

/// Keys and values: what the model is, its parameters, its tokenizer.
fn entries(model: &Model<'_>, family: Family, config: &Config<'_>) -> Result<Vec<(String, Value)>> {
    let text = |key: &str, text: &str| (key.to_string(), Value::Text(text.to_string()));
    let root = model.checkpoint.root();
    let name = root.canonicalize().ok().and_then(|p| Some(p.file_name()?.to_string_lossy().into_owned()));
    let mut entries = vec![
        text("general.architecture", family.name()),
        text("general.type", "model"),
        text("general.name", &name.unwrap_or_else(|| "model".to_string())),
        ("general.quantization_version".to_string(), Value::U32(BLOCKS_VERSION)),
        ("general.file_type".to_string(), Value::U32(FILE_TYPE)),
    ];
    entries.extend(family.parameters(config)?);
    entries.extend(tokenizer::entries(model.checkpoint, config.number("vocab_size")?)?);
    Ok(entries)
}

/// Reads the parameters of a model as the family that it names, or else as each of them, for fuzzing.
pub(in super::super) fn check_parameters(checkpoint: &Checkpoint) -> bool {
    let Ok(config) = Config::new(checkpoint.config()) else { return false };
    let rope = Rope::of(&config).map(|rope| rope.divisors(128));
    rope.is_ok() && [Family::Llama, Family::Qwen3Moe].iter().all(|family| family.parameters(&config).is_ok())
}

/// Where the parts of a unit go: a slot, and an offset in it.
struct Destination {
    parts: Vec<(Role, usize, u64)>,
    order: RowOrder,
    cast: Cast,
}

/// A file that is being laid out.
struct Layout<'c> {
    family: Family,
    config: &'c Config<'c>,
    /// Modules that will be NVFP4.
    quantized: BTreeSet<&'c str>,
    slots: Vec<Described>,
    index: BTreeMap<String, usize>,
    /// Which matrices of each tensor of experts have been seen.
    seen: BTreeMap<String, BTreeSet<u64>>,
}

impl Layout<'_> {
    /// The slot of a tensor; several experts have one together.
    fn slot(&mut self, name: &str, kind: Type, dims: Vec<u64>) -> Result<usize> {
        let next = self.slots.len();
        let slot = *self.index.entry(name.to_string()).or_insert(next);
        if slot == next {
            self.slots.push(Described { name: name.to_string(), kind, dims });
            return Ok(slot);
        }
        let own = &self.slots[slot];
        if name.contains("_exps.") && own.kind == kind && own.dims == dims {
            return Ok(slot);
        }
        if !name.contains("_exps.") {
            return Err(twice(&format!("'{name}'")));
        }
        Err(Error::Refused(format!(
            "'{name}' would be {} of {:?} and {kind} of {dims:?}; all experts of a layer must be alike in GGUF",
            own.kind, own.dims
        )))
    }

    fn place(&self, tensor: &str) -> Result<Place> {
        let found = self.family.place(tensor, self.config)?;
        found.ok_or_else(|| {
            let family = self.family.name();
            Error::Refused(format!("tensor '{tensor}' has no place in llama.cpp's '{family}' models"))
        })
    }

    fn weight(&mut self, item: &Item<'_>, activations: Activations) -> Result<Destination> {
        let weight = &item.weight;
        let place = self.place(&format!("{}.weight", weight.module))?;
        let (rows, cols) = (weight.rows as u64, weight.cols as u64);
        let quantized = item.action.is_nvfp4();
        let (kind, cast) = match (&weight.stored, place.name.ends_with(".ffn_gate_inp.weight")) {
            _ if quantized => (Type::NVFP4, Cast::None),
            (_, true) => (Type::F32, Cast::F32),
            (Stored::Plain(tensor), _) => (float(tensor)?, Cast::None),
            (_, false) => (Type::BF16, Cast::None),
        };
        let matrix = kind.byte_len(&[cols, rows]).ok_or_else(|| {
            Error::Refused(format!("'{}' has {cols} columns; GGUF needs a multiple of {BLOCK_ELEMENTS}", weight.module))
        })?;
        let experts = match place.expert {
            None => None,
            Some(expert) => {
                let count = self.config.experts()?;
                if expert as u64 >= count {
                    return Err(Error::Refused(format!(
                        "'{}' is beyond the {count} experts that config.json gives",
                        weight.module
                    )));
                }
                if !self.seen.entry(place.name.clone()).or_default().insert(expert as u64) {
                    return Err(twice(&format!("expert {expert} of '{}'", place.name)));
                }
                Some((expert as u64, count))
            }
        };
        let (at, dims) = match experts {
            None => (0, vec![cols, rows]),
            Some((expert, count)) => (expert, vec![cols, rows, count]),
        };
        let role = if quantized { Role::Blocks } else { Role::Whole };
        let start = at
            .checked_mul(matrix)
            .ok_or_else(|| Error::Refused(format!("'{}' would lie beyond what 64 bits can count", weight.module)))?;
        let mut parts = vec![(role, self.slot(&place.name, kind, dims)?, start)];
        if quantized {
            let module = place.name.strip_suffix(".weight").unwrap_or(&place.name);
            let scalars = vec![experts.map_or(1, |(_, count)| count)];
            let scale = self.slot(&format!("{module}.scale"), Type::F32, scalars.clone())?;
            parts.push((Role::Global, scale, 4 * at));
            if activations == Activations::Nvfp4 {
                let scale = self.slot(&format!("{module}.input_scale"), Type::F32, scalars)?;
                parts.push((Role::Input, scale, 4 * at));
            }
        }
        Ok(Destination { parts, order: order(&place, weight.rows, &weight.module)?, cast })
    }

    /// Norms and biases, which llama.cpp wants in F32.
    fn other(&mut self, tensor: &Located<'_>) -> Result<Destination> {
        let place = self.place(&tensor.info.name)?;
        float(tensor)?;
        if let (Some(module), false) = (tensor.info.name.strip_suffix(".bias"), is_query(&place.name))
            && self.quantized.contains(module)
        {
            return Err(Error::Refused(format!(
                "'{module}' has a bias, beside which llama.cpp does not read NVFP4; leave it alone: --skip '{module}'"
            )));
        }
        let [len] = tensor.info.shape[..] else {
            return Err(tensor.wrong("expected one dimension, to be written as GGUF"));
        };
        let slot = self.slot(&place.name, Type::F32, vec![len as u64])?;
        Ok(Destination {
            parts: vec![(Role::Whole, slot, 0)],
            order: order(&place, len, &tensor.info.name)?,
            cast: Cast::F32,
        })
    }

    fn check_experts(&self) -> Result<()> {
        for (name, seen) in &self.seen {
            let count = self.config.experts()?;
            if seen.len() as u64 != count {
                let seen = seen.len();
                return Err(Error::Refused(format!("'{name}' would hold {seen} experts, config.json says {count}")));
            }
        }
        Ok(())
    }
}

/// The error about two tensors for one place.
fn twice(place: &str) -> Error {
    Error::Refused(format!("two tensors of the source would be {place} in GGUF; remove or rename one of them there"))
}

fn is_query(name: &str) -> bool {
    ["attn_q.", "attn_k.", "attn_v."].iter().any(|part| name.contains(part))
}

fn order(place: &Place, rows: usize, name: &str) -> Result<RowOrder> {
    match place.head {
        None => Ok(RowOrder::AsStored),
        Some(head) if head % 2 == 0 && rows.is_multiple_of(head) => Ok(RowOrder::Interleaved(head)),
        Some(head) => Err(Error::Refused(format!("'{name}' has {rows} rows, which are not heads of {head}"))),
    }
}

fn float(tensor: &Located<'_>) -> Result<Type> {
    match tensor.info.dtype {
        Dtype::F32 => Ok(Type::F32),
        Dtype::F16 => Ok(Type::F16),
        Dtype::BF16 => Ok(Type::BF16),
        other => Err(tensor.wrong(format!("{other:?} is not written as GGUF"))),
    }
}
