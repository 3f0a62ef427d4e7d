//! The configuration of a checkpoint in other forms than NVFP4, or in several: ModelOpt names the
//! algorithm of every module, compressed-tensors has a group of modules for each form.

use super::action::Action;
use super::architecture;
use super::configuration::{compressed_tensors_of, kv_scheme, nvfp4_group, producer};
use super::form::Eight;
use super::plan::{Item, Plan};
use super::stacked::is_expert;
use super::target::{Activations, Extras, Kv, Target};
use super::weight::{MX_BLOCK, Stored};
use nvfp4_spec::BLOCK;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// What a server must do with a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Scheme {
    Nvfp4,
    Nvfp4WeightOnly,
    /// MXFP4, as the source has it.
    MxFp4,
    /// FP8, with activation scales that are stored, or with those that come up.
    Fp8(Eight, Inputs),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Inputs {
    Stored,
    Dynamic,
}

/// The forms of a checkpoint, and the modules that have each.
pub(super) struct Mixed<'p> {
    target: Target,
    ignore: &'p [String],
    kv: Kv,
    /// How the source has activations beside its MXFP4.
    mxfp4_inputs: Value,
    schemes: BTreeMap<Scheme, BTreeSet<String>>,
}

impl<'p> Mixed<'p> {
    /// None where all that is quantized is NVFP4 of one kind, or the target has no configuration.
    pub fn new(
        plan: &'p Plan<'_>,
        target: Target,
        source: Option<&Value>,
        ignore: &'p [String],
        extras: Extras,
    ) -> Option<Self> {
        if !plan.is_mixed() || !matches!(target, Target::ModelOpt | Target::CompressedTensors) {
            return None;
        }
        let mut schemes: BTreeMap<Scheme, BTreeSet<String>> = BTreeMap::new();
        for item in &plan.items {
            if let Some(scheme) = scheme(item, target, extras.activations) {
                let module = &item.weight.module;
                let modules = schemes.entry(scheme).or_default();
                modules.insert(module.clone());
                modules.extend(architecture::called_by_vllm(source, module));
            }
        }
        let mxfp4_inputs = mxfp4_inputs(source).cloned().unwrap_or_default();
        Some(Mixed { target, ignore, kv: extras.kv, mxfp4_inputs, schemes })
    }

    /// `quantization_config` of `config.json`.
    pub fn config(&self) -> Value {
        match self.target {
            Target::CompressedTensors => self.compressed_tensors(),
            _ => self.modelopt(),
        }
    }

    /// `hf_quant_config.json`, where the target has one.
    pub fn quantization(&self) -> Option<Value> {
        (self.target == Target::ModelOpt).then(|| {
            let mut own = json!({ "quant_algo": self.algorithm(), "kv_cache_quant_algo": self.kv.algorithm() });
            own["group_size"] = self.single().map_or(json!(BLOCK), |scheme| json!(scheme.group_size()));
            if self.single().is_none() {
                own["quantized_layers"] = self.layers();
            }
            own["exclude_modules"] = json!(self.ignore);
            json!({ "producer": producer(), "quantization": own })
        })
    }

    /// The only form.
    fn single(&self) -> Option<Scheme> {
        let mut schemes = self.schemes.keys();
        schemes.next().filter(|_| schemes.next().is_none()).copied()
    }

    fn algorithm(&self) -> &'static str {
        self.single().map_or("MIXED_PRECISION", Scheme::algorithm)
    }

    fn layers(&self) -> Value {
        let mut layers: BTreeMap<&str, Value> = BTreeMap::new();
        for (scheme, modules) in &self.schemes {
            let mut layer = json!({ "quant_algo": scheme.algorithm() });
            if let Some(size) = scheme.group_size() {
                layer["group_size"] = json!(size);
            }
            layers.extend(modules.iter().map(|module| (module.as_str(), layer.clone())));
        }
        json!(layers)
    }

    fn modelopt(&self) -> Value {
        let mut groups = Map::new();
        for (i, (scheme, modules)) in self.schemes.iter().enumerate() {
            let mut group = scheme.modelopt_group();
            let targets = if self.single().is_some() { json!(["Linear"]) } else { json!(modules) };
            group.insert("targets".to_string(), targets);
            groups.insert(format!("group_{i}"), Value::Object(group));
        }
        let mut description = json!({ "config_groups": groups });
        if self.single().is_none() {
            description["quantized_layers"] = self.layers();
        }
        description["ignore"] = json!(self.ignore);
        description["quant_algo"] = json!(self.algorithm());
        if let Some(scheme) = kv_scheme(self.kv) {
            description["kv_cache_scheme"] = scheme;
        }
        description["producer"] = producer();
        description["quant_method"] = json!("modelopt");
        description
    }

    fn compressed_tensors(&self) -> Value {
        let group = |(i, (scheme, modules)): (usize, (&Scheme, &BTreeSet<String>))| {
            let targets = match self.single() {
                Some(_) => vec!["Linear".to_string()],
                None => targets(modules),
            };
            (format!("group_{i}"), scheme.group(&targets, &self.mxfp4_inputs))
        };
        let groups: Map<String, Value> = self.schemes.iter().enumerate().map(group).collect();
        let format = self.single().map_or("mixed-precision", Scheme::format);
        compressed_tensors_of(Value::Object(groups), format, self.ignore, self.kv)
    }
}

/// What a compressed-tensors source says about activations beside MXFP4.
fn mxfp4_inputs(source: Option<&Value>) -> Option<&Value> {
    let groups = source?.pointer("/quantization_config/config_groups")?.as_object()?;
    let is = |group: &&Value, key: &str, value: usize| group.pointer(&format!("/weights/{key}")) == Some(&json!(value));
    groups
        .values()
        .find(|group| is(group, "num_bits", 4) && is(group, "group_size", MX_BLOCK))?
        .get("input_activations")
}

/// A group of compressed-tensors' MXFP4.
fn mxfp4_group(targets: &[String], inputs: &Value) -> Value {
    json!({
        "targets": targets,
        "weights": {
            "num_bits": 4, "type": "float", "symmetric": true, "group_size": MX_BLOCK, "strategy": "group",
            "block_structure": null, "dynamic": false, "actorder": null, "scale_dtype": "torch.uint8",
            "zp_dtype": "torch.uint8", "observer": "memoryless_minmax", "observer_kwargs": {},
        },
        "input_activations": inputs,
        "output_activations": null,
        "format": Scheme::MxFp4.format(),
    })
}

fn scheme(item: &Item<'_>, target: Target, activations: Activations) -> Option<Scheme> {
    if let Some(eight) = item.action.eight() {
        let stored = match (&item.weight.stored, &item.action) {
            (Stored::Fp8 { input: Some(_), .. }, Action::Retain(_)) => Inputs::Stored,
            _ if target == Target::ModelOpt && eight == Eight::Tensor => Inputs::Stored,
            _ => Inputs::Dynamic,
        };
        return Some(Scheme::Fp8(eight, stored));
    }
    if item.action == Action::RetainMxFp4 {
        return Some(Scheme::MxFp4);
    }
    item.action.is_nvfp4().then(|| match item.has_fp4_inputs(activations) {
        true => Scheme::Nvfp4,
        false => Scheme::Nvfp4WeightOnly,
    })
}

impl Scheme {
    /// ModelOpt's name.
    fn algorithm(self) -> &'static str {
        match self {
            Scheme::Nvfp4 => "NVFP4",
            Scheme::Nvfp4WeightOnly => "W4A16_NVFP4",
            // No reader of ModelOpt's format has it, so it is refused there.
            Scheme::MxFp4 => "MXFP4",
            Scheme::Fp8(Eight::Tensor, _) => "FP8",
            Scheme::Fp8(Eight::Channel, _) => "FP8_PER_CHANNEL_PER_TOKEN",
            Scheme::Fp8(Eight::Block, _) => "FP8_PB_WO",
            Scheme::Fp8(Eight::Mx, _) => "MXFP8",
        }
    }

    fn group_size(self) -> Option<usize> {
        match self {
            Scheme::Nvfp4 | Scheme::Nvfp4WeightOnly => Some(BLOCK),
            Scheme::MxFp4 => Some(MX_BLOCK),
            Scheme::Fp8(Eight::Mx, _) => Some(Eight::MX_BLOCK),
            Scheme::Fp8(Eight::Tensor | Eight::Channel | Eight::Block, _) => None,
        }
    }

    /// How ModelOpt describes the numbers of a group.
    fn modelopt_group(self) -> Map<String, Value> {
        let bits = if matches!(self, Scheme::Fp8(..)) { 8 } else { 4 };
        let mut numbers = json!({ "dynamic": false, "num_bits": bits, "type": "float" });
        if let Some(size) = self.group_size() {
            numbers["group_size"] = json!(size);
        }
        let mut group = Map::new();
        if !matches!(self, Scheme::Nvfp4WeightOnly | Scheme::Fp8(Eight::Block, _)) {
            group.insert("input_activations".to_string(), numbers.clone());
        }
        match self {
            Scheme::Fp8(Eight::Channel, _) => numbers["strategy"] = json!("channel"),
            Scheme::Fp8(Eight::Block, _) => {
                numbers["strategy"] = json!("block");
                numbers["block_structure"] = json!([Eight::BLOCK, Eight::BLOCK]);
            }
            _ => {}
        }
        group.insert("weights".to_string(), numbers);
        group
    }

    /// compressed-tensors' name of the form.
    fn format(self) -> &'static str {
        match self {
            Scheme::Nvfp4 | Scheme::Nvfp4WeightOnly => "nvfp4-pack-quantized",
            Scheme::MxFp4 => "mxfp4-pack-quantized",
            Scheme::Fp8(Eight::Mx, _) => "mxfp8-quantized",
            Scheme::Fp8(..) => "float-quantized",
        }
    }

    /// A group of compressed-tensors'.
    fn group(self, targets: &[String], mxfp4_inputs: &Value) -> Value {
        let (eight, inputs) = match self {
            Scheme::Nvfp4 => return nvfp4_group(targets, Activations::Nvfp4),
            Scheme::MxFp4 => return mxfp4_group(targets, mxfp4_inputs),
            Scheme::Nvfp4WeightOnly => return nvfp4_group(targets, Activations::Plain),
            Scheme::Fp8(eight, inputs) => (eight, inputs),
        };
        let numbers = |strategy: &str, group: Option<usize>, block: Option<[usize; 2]>, dynamic: bool| {
            let scale = if eight == Eight::Mx { json!("torch.uint8") } else { Value::Null };
            let observer = if dynamic { Value::Null } else { json!("memoryless_minmax") };
            json!({
                "num_bits": 8, "type": "float", "symmetric": true, "group_size": group, "strategy": strategy,
                "block_structure": block, "dynamic": dynamic, "actorder": null, "scale_dtype": scale,
                "zp_dtype": null, "observer": observer, "observer_kwargs": {},
            })
        };
        let (weights, input) = match eight {
            Eight::Tensor => (numbers("tensor", None, None, false), numbers("token", None, None, true)),
            Eight::Channel => (numbers("channel", None, None, false), numbers("token", None, None, true)),
            Eight::Block => {
                let square = [Eight::BLOCK, Eight::BLOCK];
                (numbers("block", None, Some(square), false), numbers("group", Some(Eight::BLOCK), None, true))
            }
            Eight::Mx => {
                let size = Some(Eight::MX_BLOCK);
                (numbers("group", size, None, false), numbers("group", size, None, true))
            }
        };
        let input = if inputs == Inputs::Stored { numbers("tensor", None, None, false) } else { input };
        json!({
            "targets": targets, "weights": weights, "input_activations": input, "output_activations": null,
            "format": self.format(),
        })
    }
}

/// Modules as targets of a group. The experts of a layer have one form, so one expression stands for
/// all of them: a server tries every target for every module. vLLM gives the beginning of a name
/// another form (`backbone.layers` is its `model.layers`), but not that of an expression; and of
/// experts without a gate it asks for one that has no name.
fn targets(modules: &BTreeSet<String>) -> Vec<String> {
    let parent =
        |parent: &str| match parent.match_indices("layers.").find(|(at, _)| *at == 0 || parent[..*at].ends_with('.')) {
            Some((at, _)) => format!("(.*\\.)?{}", regex_lite::escape(&parent[at..])),
            None => regex_lite::escape(parent),
        };
    let target = |module: &String| match module.split_once(".experts.").filter(|_| is_expert(module)) {
        Some((before, _)) => format!("re:{}\\.experts\\.\\d+\\..*$", parent(before)),
        None => module.to_string(),
    };
    modules.iter().map(target).collect::<BTreeSet<String>>().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_one_target() {
        let modules = ["l.0.mlp.experts.0.up", "l.0.mlp.experts.11.up", "m.layers.0.mlp.experts.0.down", "l.0.attn.q"];
        let layers = r"re:(.*\.)?layers\.0\.mlp\.experts\.\d+\..*$";
        let expected = ["l.0.attn.q", layers, r"re:l\.0\.mlp\.experts\.\d+\..*$"];
        assert_eq!(targets(&modules.map(str::to_string).into()), expected);
    }
}
