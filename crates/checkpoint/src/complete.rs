//! Is everything there that a server asks for? A server fills what it finds. Most of what it does
//! not find stays uninitialised memory, without an error: its own check skips quantized layers.

use super::architecture::writes;
use super::dialect::{Dialect, Model, missing_part};
use super::finding::Report;
use super::keep::{Defaults, Part};
use super::layer::{self, Parts};
use super::outline::Outline;
use super::place::{beside_layers, kind_of, layer_of, layer_of_any};
use super::sizes::Sizes;
use super::weight::Weight;
use crate::Result;
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet};

/// Looks for parts of quantized weights, and for layers, embedding, norm and head of a model whose
/// configuration says how many layers it has.
pub(super) fn check(model: &Model<'_>, report: &mut Report) {
    check_parts(model, report);
    let config = model.checkpoint.config();
    let outline = Outline::new(config);
    for wrong in outline.mistyped() {
        let (key, value, expected) = (wrong.key, wrong.value, wrong.expected);
        report.problem("config.json", format!("'{key}' is {value}, expected {expected}: a server refuses it"));
    }
    let two = config
        .is_some_and(|c| c.get("is_encoder_decoder").is_some_and(|v| v == true) || c.get("decoder_layers").is_some());
    let sizes = Sizes::new(model, &outline);
    sizes.check_types(report);
    sizes.check_biases(report);
    if two {
        return;
    }
    let Some(layers) = outline.layers() else {
        if writes(model) && !outline.names_layers() {
            let text = "'num_hidden_layers' is missing: whether layers are missing, and their sizes, was not checked";
            report.note("config.json", text);
        }
        return;
    };
    let table = model.weights.iter().any(|w| beside_layers(&w.module) == Some("embed_tokens"));
    for (key, asked) in
        [("hidden_size", outline.hidden().is_none()), ("vocab_size", outline.vocabulary().is_none() && table)]
    {
        if writes(model) && asked && outline.mistyped().iter().all(|wrong| wrong.key != key) {
            report.note("config.json", format!("'{key}' is missing: sizes were not compared with it"));
        }
    }
    let found = Layers::find(model, layers);
    if !outline.is_irregular() {
        found.check_numbers(layers, report);
        // Known parts are required. All others are compared from layer to layer.
        let parts = model.architecture().and_then(Parts::of).filter(|_| model.dialect != Dialect::TorchAo);
        let compared = found.check_family(model, parts.as_ref(), &outline, report);
        found.check_kinds(&compared, &outline, report);
        if sizes.is_uniform() {
            found.check_uniform(&compared, report);
            found.check_beside(model, &outline, report);
        }
        found.check_experts(&outline, report);
    }
    found.check_further(layers, &outline, report);
    check_ends(model, &outline, &found, report);
    sizes.check_layers(&found.prefix, layers, report);
    sizes.check_ends(report);
}

/// A quantized weight with only some of its parts.
struct Incomplete<'m> {
    module: &'m str,
    there: &'m str,
    missing: Vec<String>,
}

/// Tensors that are part of a quantized weight by their names and types, where other parts are
/// missing.
fn incomplete<'m>(model: &'m Model<'_>) -> impl Iterator<Item = Incomplete<'m>> {
    let has = |name: &str| model.checkpoint.get(name).is_some();
    let (codes, of_codes, parts) = match model.dialect {
        Dialect::CompressedTensors => (".weight_packed", Dtype::U8, &["weight_scale", "weight_global_scale"][..]),
        Dialect::Fp8Block => (".weight", Dtype::F8_E4M3, &["weight_scale_inv"][..]),
        _ => (".weight", Dtype::U8, &["weight_scale", "weight_scale_2"][..]),
    };
    model.others.iter().filter_map(move |tensor| {
        let (name, dtype) = (tensor.info.name.as_str(), tensor.info.dtype);
        let whole = |module| Incomplete { module, there: name, missing: Vec::new() };
        if let Some(module) = name.strip_suffix(".weight_scale").filter(|_| dtype == Dtype::F8_E4M3) {
            let missing = format!("{module}{codes}");
            return (!has(&missing)).then(|| Incomplete { missing: vec![missing], ..whole(module) });
        }
        // Scales of experts in one tensor follow an underscore.
        let (module, join) = match name.strip_suffix(codes).filter(|_| dtype == of_codes) {
            Some(module) => (module, '.'),
            None if dtype == Dtype::U8 && has(&format!("{name}_weight_scale")) => (name, '_'),
            None => return None,
        };
        // Other formats of the same library have scales of other types, or under another name.
        let scale = model.checkpoint.get(&format!("{module}{join}weight_scale"));
        if scale.is_some_and(|scale| scale.info.dtype != Dtype::F8_E4M3) {
            return None;
        }
        let missing: Vec<String> =
            parts.iter().map(|part| format!("{module}{join}{part}")).filter(|p| !has(p)).collect();
        (!missing.is_empty()).then(|| Incomplete { missing, ..whole(module) })
    })
}

/// Refuses a model with a quantized weight that cannot be decoded: it would be copied as if its
/// codes were its values.
pub(super) fn refuse_incomplete(model: &Model<'_>) -> Result<()> {
    let quantized = model.dialect.is_nvfp4() || model.dialect == Dialect::Fp8Block;
    match incomplete(model).next().filter(|_| quantized) {
        Some(Incomplete { there, missing, .. }) => Err(missing_part(model.checkpoint, &missing[0], there)),
        None => Ok(()),
    }
}

/// Reports quantized weights with missing parts.
fn check_parts(model: &Model<'_>, report: &mut Report) {
    for Incomplete { module, there, missing } in incomplete(model) {
        let missing = missing.join("' and '");
        let text = match there.ends_with(".weight_scale") {
            true => format!("block scales without codes ('{missing}')"),
            false => format!("NVFP4 codes without '{missing}': a server leaves the scale uninitialised"),
        };
        report.problem(module, text);
    }
}

/// Names of tensors by layer, after the layer's number, without scales, and with `#` for the number
/// of an expert.
type Kinds = BTreeMap<usize, BTreeSet<String>>;

/// What the layers of a model hold.
struct Layers {
    prefix: String,
    kinds: Kinds,
    /// Numbers of experts by layer and kind.
    experts: BTreeMap<(usize, String), BTreeSet<u64>>,
    /// Names of tensors of layers after the last one that the configuration counts, by layer.
    further: BTreeMap<usize, BTreeSet<String>>,
}

impl Layers {
    /// The layers that write text. A model may have others, for vision or for the prediction of
    /// further tokens. Where none has a name that is known, they are those with the most tensors.
    fn find(model: &Model<'_>, layers: u64) -> Self {
        let most = |place: fn(&str) -> Option<(&str, usize, &str)>| {
            let count = |found: &Layers| found.kinds.values().map(BTreeSet::len).sum::<usize>();
            Self::all(model, layers, place).into_values().max_by_key(count)
        };
        most(layer_of).or_else(|| most(layer_of_any)).unwrap_or_else(|| Layers::of("layers"))
    }

    /// All layers by their prefixes.
    fn all(model: &Model<'_>, layers: u64, place: fn(&str) -> Option<(&str, usize, &str)>) -> BTreeMap<String, Self> {
        let mut all: BTreeMap<String, Layers> = BTreeMap::new();
        for tensor in model.checkpoint.tensors() {
            let Some((prefix, layer, rest)) = place(&tensor.info.name) else { continue };
            let found = all.entry(prefix.to_string()).or_insert_with(|| Layers::of(prefix));
            if layer as u64 >= layers {
                found.further.entry(layer).or_default().insert(rest.to_string());
                continue;
            }
            let kinds = found.kinds.entry(layer).or_default();
            let Some(kind) = kind_of(rest) else { continue };
            if let Some(expert) = rest.split('.').find_map(|part| part.parse::<u64>().ok()) {
                found.experts.entry((layer, kind.clone())).or_default().insert(expert);
            }
            kinds.insert(kind);
        }
        all
    }

    fn of(prefix: &str) -> Self {
        let (kinds, experts, further) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Layers { prefix: prefix.to_string(), kinds, experts, further }
    }

    /// Layers after the last one predict further tokens, or the configuration counts too few.
    fn check_further(&self, layers: u64, outline: &Outline<'_>, report: &mut Report) {
        let marks = ["eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head", "mtp"];
        let predicts = |names: &BTreeSet<String>| names.iter().any(|name| marks.iter().any(|mark| name.contains(mark)));
        let unknown = self.further.iter().find(|(_, names)| !predicts(names));
        if let Some((layer, _)) = unknown.filter(|_| !outline.predicts()) {
            let text = format!("has tensors, but config.json says {layers} layers: a server leaves it out, or refuses");
            report.problem(&format!("{}.{layer}", self.prefix), text);
        }
    }

    fn check_numbers(&self, layers: u64, report: &mut Report) {
        let missing = layers.saturating_sub(self.kinds.len() as u64);
        // The first gap is found after at most as many steps as there are layers with tensors.
        if let Some(first) = (0..layers).find(|layer| !self.kinds.contains_key(&(*layer as usize))) {
            let more = if missing > 1 { format!(", nor have {} more", missing - 1) } else { String::new() };
            let text = format!(
                "has no tensors{more}; config.json says {layers} layers, and a server leaves them uninitialised"
            );
            report.problem(&format!("{}.{first}", self.prefix), text);
        }
    }

    /// A layer that lacks what every layer of its family has. Returns the biases that its models
    /// may have or not.
    fn check_family(
        &self,
        model: &Model<'_>,
        parts: Option<&Parts>,
        outline: &Outline<'_>,
        report: &mut Report,
    ) -> Kinds {
        let Some(parts) = parts else { return self.kinds.clone() };
        let architecture = model.architecture().unwrap_or_default();
        if let Some(other) = outline.text("hidden_act").filter(|name| !ACTIVATIONS.contains(name)) {
            report.problem("config.json", format!("'hidden_act' is '{other}', which no server has for {architecture}"));
        }
        for (&layer, kinds) in &self.kinds {
            let missing = parts.missing(layer::feed_forward(architecture, outline, layer), kinds);
            let Some(first) = missing.first() else { continue };
            let more = if missing.len() > 1 { format!(" and {} more", missing.len() - 1) } else { String::new() };
            let there = self.kinds.iter().take(64).find(|(_, kinds)| kinds.contains(*first));
            let whose = match there {
                Some((other, _)) => format!("layer {other} has"),
                None => format!("every layer of {architecture} has"),
            };
            let text = format!(
                "'{first}'{more} missing, which {whose}: a server leaves it uninitialised, or refuses the checkpoint"
            );
            report.problem(&format!("{}.{layer}", self.prefix), text);
        }
        let open = |kind: &&String| kind.ends_with(".bias") && !parts.has(kind);
        let beside = |kinds: &BTreeSet<String>| kinds.iter().filter(open).cloned().collect();
        self.kinds.iter().map(|(layer, kinds)| (*layer, beside(kinds))).collect()
    }

    /// A layer that lacks what others of its type have. Layers of other types have something else
    /// instead.
    fn check_kinds(&self, compared: &Kinds, outline: &Outline<'_>, report: &mut Report) {
        let mut variants: BTreeMap<(Option<String>, &BTreeSet<String>), Vec<usize>> = BTreeMap::new();
        for (&layer, kinds) in compared {
            variants.entry((outline.kind(layer), kinds)).or_default().push(layer);
        }
        // A model has few variants. If a file claims many, each is compared with the most common
        // ones.
        let mut common: Vec<_> = variants.iter().collect();
        common.sort_by_key(|(_, layers)| std::cmp::Reverse(layers.len()));
        common.truncate(16);
        for ((of, kinds), layers) in &variants {
            let fuller = common.iter().filter(|((other, more), there)| {
                other == of && more.len() > kinds.len() && more.is_superset(kinds) && there.len() >= layers.len()
            });
            let Some(((_, more), there)) = fuller.max_by_key(|(_, there)| there.len()) else { continue };
            let missing: Vec<&String> = more.difference(kinds).collect();
            let rest = if missing.len() > 1 { format!(" and {} more", missing.len() - 1) } else { String::new() };
            for layer in layers {
                let text = format!(
                    "'{}'{rest} missing, which layer {} has: a server leaves it uninitialised, or \
                     refuses the checkpoint",
                    missing[0], there[0]
                );
                report.problem(&format!("{}.{layer}", self.prefix), text);
            }
        }
    }

    /// Reports layers that lack what the others have, in families whose layers are alike except for
    /// experts: a server does not find it under another name.
    fn check_uniform(&self, compared: &Kinds, report: &mut Report) {
        let mixed = |kinds: &BTreeSet<String>| kinds.iter().any(|kind| kind.contains("experts"));
        let feed_forward = |kind: &str| kind.starts_with("mlp.") || kind.starts_with("block_sparse_moe.");
        let common = |kinds: &BTreeSet<String>| compared.values().filter(|other| *other == kinds).count();
        let usual = compared.values().take(64).rev().max_by_key(|kinds| common(kinds));
        for (layer, kinds) in compared {
            let alike = usual.is_some_and(|usual| mixed(usual) == mixed(kinds));
            let needed = |kind: &&String| (alike || !feed_forward(kind)) && !kinds.contains(*kind);
            let missing = usual.into_iter().flatten().find(needed);
            // A layer that has less than others is another finding.
            if let Some(missing) = missing.filter(|_| usual.is_some_and(|usual| !usual.is_superset(kinds))) {
                let text = format!(
                    "'{missing}' missing, which other layers have: a server leaves it uninitialised, or refuses"
                );
                report.problem(&format!("{}.{layer}", self.prefix), text);
            }
        }
    }

    /// Reports what is missing beside the layers of such a family.
    fn check_beside(&self, model: &Model<'_>, outline: &Outline<'_>, report: &mut Report) {
        let Some(parent) = self.prefix.strip_suffix(".layers").filter(|_| writes(model)) else { return };
        let normed = self.kinds.values().flatten().any(|kind| kind.contains("norm"));
        for (last, asked) in [("embed_tokens.weight", outline.vocabulary().is_some()), ("norm.weight", normed)] {
            let name = format!("{parent}.{last}");
            if asked && model.checkpoint.get(&name).is_none() {
                report.problem(&name, "missing: a server leaves it uninitialised, or refuses the checkpoint");
            }
        }
    }

    fn check_experts(&self, outline: &Outline<'_>, report: &mut Report) {
        let routed = |kind: &str| kind.contains("experts.#.") && !kind.contains("shared");
        let Some(experts) = outline.experts() else {
            let there = self.experts.iter().find(|((_, kind), _)| routed(kind)).filter(|_| !outline.names_experts());
            if let Some(((layer, _), numbers)) = there {
                let count = numbers.len();
                let text =
                    format!("no 'num_experts', but layer {layer} has {count}: a server uses a number of its own");
                report.problem("config.json", text);
            }
            return;
        };
        // LongCat's experts that do nothing have weights in files of transformers.
        let all = experts.saturating_add(outline.constant("zero_expert_num").unwrap_or(0));
        for ((layer, kind), numbers) in self.experts.iter().filter(|((_, kind), _)| routed(kind)) {
            let text = match (numbers.len() as u64, numbers.last()) {
                (count, _) if count < experts => format!("only {count} of {experts} experts have a '{kind}'"),
                (_, Some(last)) if *last >= all && !outline.varies() => {
                    format!("expert {last} has a '{kind}', but config.json says {experts} experts: a server refuses it")
                }
                _ => continue,
            };
            report.problem(&format!("{}.{layer}", self.prefix), text);
        }
    }
}

/// What stands before and after the layers: the embedding, the last norm and the head.
fn check_ends(model: &Model<'_>, outline: &Outline<'_>, layers: &Layers, report: &mut Report) {
    let defaults = Defaults::new(outline);
    let part = |w: &Weight<'_>| defaults.reason(&w.module, w.rows);
    let outer = |name: &str| layer_of(name).is_none() && defaults.reason(name, 0) != Some(Part::Perception);
    let writes = writes(model);
    if outline.vocabulary().is_some() && !model.weights.iter().any(|w| part(w) == Some(Part::Embedding)) {
        report.problem("embedding", "missing: a server leaves it uninitialised, or refuses the checkpoint");
    }
    let is_norm = |name: &str| name.contains("norm") || name.contains("ln_f");
    let normed = layers.kinds.values().flatten().any(|kind| is_norm(kind));
    let last = |t: &super::Located<'_>| is_norm(&t.info.name) && outer(&t.info.name);
    if writes && normed && !model.others.iter().any(last) {
        report.problem("norm", "the norm after the last layer is missing: a server leaves it uninitialised");
    }
    let head = model.weights.iter().any(|w| part(w) == Some(Part::Head));
    if writes && outline.tied() == Some(false) && !head {
        let text = "missing, and 'tie_word_embeddings' in config.json is false: a server leaves it uninitialised";
        report.problem("output head", text);
    }
}

/// What transformers accepts as `hidden_act`.
const ACTIVATIONS: [&str; 21] = [
    "gelu",
    "gelu_10",
    "gelu_accurate",
    "gelu_fast",
    "gelu_new",
    "gelu_python",
    "gelu_python_tanh",
    "gelu_pytorch_tanh",
    "laplace",
    "leaky_relu",
    "linear",
    "mish",
    "prelu",
    "quick_gelu",
    "relu",
    "relu2",
    "relu6",
    "sigmoid",
    "silu",
    "swish",
    "tanh",
];
