//! Where every byte of a GGUF file goes, known before the first weight is read.

use super::container::{Described, Type, Value, header};
use super::family::Family;
use super::names::Place;
use super::object::Object;
use super::rope::Rope;
use super::sizes::{self, Sizes};
use super::tokenizer;
use crate::dialect::Model;
use crate::dimension::Dim;
use crate::folder::{Checkpoint, Located};
use crate::names::KvScale;
use crate::plan::{Item, Plan};
use crate::shards::{Cast, Placed, RowOrder, Shard, Unit};
use crate::target::Activations;
use crate::weight::{Stored, sized};
use crate::written::Role;
use crate::{Error, Result, Setting};
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
    let config = model.checkpoint.config();
    let config =
        config.ok_or_else(|| Error::Refused("GGUF needs the model's config.json beside its weights".into()))?;
    let config = Object::new("config.json", config)?;
    let sizes = Sizes::of(family, &config)?;
    Family::check(&config)?;
    let mut layout = Layout {
        sizes,
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
    // From here on, every size of config.json is the size of some tensor, which bounds what is made
    // with it.
    layout.check_complete(model, &config)?;
    if let Some(module) = layout.quantized.iter().find(|module| family.loses_scale(module)) {
        return Err(Error::Refused(format!(
            "'{module}': llama.cpp leaves out the tensor scales of Qwen2's MLP, and its results are not numbers; skip \
             '**.mlp.*', or convert it to modelopt"
        )));
    }
    let divisors = Rope::of(&config, family)?.divisors(sizes.head_dim);
    let divisors = divisors.map(|d| layout.slot("rope_freqs.weight", Type::F32, vec![d.len() as u64]).map(|s| (s, d)));
    let divisors = divisors.transpose()?;

    let entries = entries(model, &config, &sizes)?;
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

/// Keys and values: what the model is, its parameters, its tokenizer.
fn entries(model: &Model<'_>, config: &Object<'_>, sizes: &Sizes) -> Result<Vec<(String, Value)>> {
    let text = |key: &str, text: &str| (key.to_string(), Value::Text(text.to_string()));
    let root = model.checkpoint.root();
    let name = root.canonicalize().ok().and_then(|p| Some(p.file_name()?.to_string_lossy().into_owned()));
    let mut entries = vec![
        text("general.architecture", sizes.family.name()),
        text("general.type", "model"),
        text("general.name", &name.unwrap_or_else(|| "model".to_string())),
        ("general.quantization_version".to_string(), Value::U32(BLOCKS_VERSION)),
        ("general.file_type".to_string(), Value::U32(FILE_TYPE)),
    ];
    entries.extend(sizes.family.parameters(config, sizes)?);
    entries.extend(tokenizer::entries(model.checkpoint, config, sizes.vocabulary)?);
    Ok(entries)
}

/// Reads the parameters of a model as the family that it names, or else as each of them, for
/// fuzzing.
pub(in super::super) fn check_parameters(checkpoint: &Checkpoint) -> bool {
    let Some(Ok(config)) = checkpoint.config().map(|json| Object::new("config.json", json)) else { return false };
    let check = |family: Family| -> Result<()> {
        Family::check(&config)?;
        family.parameters(&config, &Sizes::of(family, &config)?)?;
        Rope::of(&config, family).map(|rope| drop(rope.divisors(128)))
    };
    [Family::Llama, Family::Qwen3Moe].into_iter().all(|family| check(family).is_ok())
}

/// Where the parts of a unit go: a slot, and an offset in it.
struct Destination {
    parts: Vec<(Role, usize, u64)>,
    order: RowOrder,
    cast: Cast,
}

/// A file that is being laid out.
struct Layout<'c> {
    sizes: Sizes,
    /// Modules that will be NVFP4.
    quantized: BTreeSet<&'c str>,
    slots: Vec<Described>,
    index: BTreeMap<String, usize>,
    /// Which matrices of each tensor of experts have been seen.
    seen: BTreeMap<String, BTreeSet<u64>>,
}

impl Layout<'_> {
    /// The slot of a tensor; the experts of a layer share one.
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
        let family = self.sizes.family;
        let found = family.place(tensor, &self.sizes)?;
        found.ok_or_else(|| {
            let family = family.name();
            Error::Refused(format!("tensor '{tensor}' has no place in llama.cpp's '{family}' models"))
        })
    }

    /// Refuses a tensor of the source whose shape, slowest dimension first, is not what config.json
    /// says.
    fn check_shape(&self, place: &Place, tensor: &str, shape: &[usize]) -> Result<()> {
        let mut dims: Vec<u64> = shape.iter().rev().map(|&d| d as u64).collect();
        let count = self.sizes.len(Dim::Experts);
        dims.extend(place.expert.map(|_| count));
        let Some(misfit) = self.sizes.misfit(&place.name, &dims) else { return Ok(()) };
        let of_one = self.sizes.dims(&place.name).unwrap_or_default();
        let of_one = &of_one[..of_one.len() - usize::from(place.expert.is_some())];
        let expected: Vec<u64> = of_one.iter().rev().map(|&dim| self.sizes.len(dim)).collect();
        Err(Error::Refused(format!(
            "config.json: {} is {}, so '{tensor}' must have the shape {expected:?}, but it has {shape:?}",
            misfit.in_config(),
            self.sizes.len(misfit)
        )))
    }

    fn weight(&mut self, item: &Item<'_>, activations: Activations) -> Result<Destination> {
        let weight = &item.weight;
        let place = self.place(&format!("{}.weight", weight.module))?;
        let shape = match weight.matrices() {
            1 => vec![weight.rows, weight.cols],
            n => vec![n, weight.rows / n.max(1), weight.cols],
        };
        self.check_shape(&place, &format!("{}.weight", weight.module), &shape)?;
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
                let count = self.sizes.len(Dim::Experts);
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
            let reason = format!("'{module}' has a bias, with which llama.cpp does not read NVFP4; skip the weight");
            return Err(Error::setting(Setting::Skip, reason));
        }
        let [len] = tensor.info.shape[..] else {
            return Err(tensor.wrong("expected one dimension, to be written as GGUF"));
        };
        self.check_shape(&place, &tensor.info.name, &[len])?;
        let slot = self.slot(&place.name, Type::F32, vec![len as u64])?;
        Ok(Destination {
            parts: vec![(Role::Whole, slot, 0)],
            order: order(&place, len, &tensor.info.name)?,
            cast: Cast::F32,
        })
    }

    fn check_experts(&self) -> Result<()> {
        let count = self.sizes.len(Dim::Experts);
        match self.seen.iter().find(|(_, seen)| seen.len() as u64 != count) {
            None => Ok(()),
            Some((name, seen)) => {
                let seen = seen.len();
                Err(Error::Refused(format!("'{name}' would hold {seen} experts, config.json says {count}")))
            }
        }
    }

    /// Refuses a source that lacks a tensor, before llama.cpp does.
    fn check_complete(&self, model: &Model<'_>, config: &Object<'_>) -> Result<()> {
        let lacks = |(layer, part, last): &(Option<u64>, &str, &str)| {
            !self.index.contains_key(&sizes::name(*layer, part, last))
        };
        if let Some((layer, part, last)) = self.sizes.needed().find(lacks) {
            let (name, layers) = (Family::source(layer, part, last), self.sizes.layers);
            return Err(Error::Refused(format!(
                "the source has no '{name}', which llama.cpp's '{}' models have (config.json: \
                 'num_hidden_layers' is {layers})",
                self.sizes.family.name()
            )));
        }
        let tied = config.flag("tie_word_embeddings")?.unwrap_or(false);
        match (model.weight("lm_head"), model.weight("model.embed_tokens")) {
            (None, _) if !tied => Err(config.wrong(
                "there is no 'lm_head.weight', and 'tie_word_embeddings' is not true; llama.cpp \
                 would take the embedding",
            )),
            (Some(head), Some(embedding)) if tied && !same(&head.stored.parts(), &embedding.stored.parts())? => {
                Err(config.wrong(
                    "'tie_word_embeddings' is true, but 'lm_head.weight' is not 'model.embed_tokens.weight'; llama.cpp \
                     would take it: remove the tensor, or set the key to false",
                ))
            }
            _ => Ok(()),
        }
    }
}

/// Whether two weights have the same bytes.
fn same(ours: &[Located<'_>], theirs: &[Located<'_>]) -> Result<bool> {
    const PIECE: u64 = 8 << 20;
    let kinds = |parts: &[Located<'_>]| parts.iter().map(|t| (t.info.dtype, t.info.len)).collect::<Vec<_>>();
    if kinds(ours) != kinds(theirs) {
        return Ok(false);
    }
    let (mut left, mut right) = (Vec::new(), Vec::new());
    for (a, b) in ours.iter().zip(theirs) {
        for start in (0..a.info.len).step_by(PIECE as usize) {
            let len = PIECE.min(a.info.len - start) as usize;
            a.read(start, sized(&mut left, len))?;
            b.read(start, sized(&mut right, len))?;
            if left[..len] != right[..len] {
                return Ok(false);
            }
        }
    }
    Ok(true)
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
