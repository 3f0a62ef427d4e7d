//! Every kind of module at a small size, and one step of it.

use candle_core::{DType, Device, Module, Tensor};
use nvfp4_nn::*;
use nvfp4_recipe::{HandOver, Preset, Recipe};
use std::collections::BTreeMap;

pub const BATCH: usize = 2;
pub const TOKENS: usize = 32;
pub const HIDDEN: usize = 64;
/// Tokens of each expert: uneven, and none.
pub const SPLITS: [usize; 4] = [17, 0, 15, 32];

/// Every module, each in the ways that differ in what they compute.
pub const KINDS: [&str; 13] = [
    "linear",
    "linear without bias",
    "layer norm linear",
    "rms norm linear",
    "gelu mlp",
    "swiglu mlp",
    "grouped linear",
    "attention",
    "grouped-query attention",
    "multihead attention",
    "multihead attention with norm",
    "gpt layer",
    "llama layer",
];

/// A module in a session of its own, and its input, which is a parameter too so that its gradient can be read.
pub struct Case {
    pub session: Session,
    pub module: Box<dyn Module>,
    pub x: Parameter,
}

impl Case {
    pub fn new(kind: &str, dtype: DType, seed: u64) -> Self {
        let session = Session::new(seed);
        let place = session.place(dtype, &Device::Cpu);
        let x = place.parameter("x", input_shape(kind), Init::Normal(1.0)).unwrap();
        let module = module(kind, &place.child("m"));
        Case { session, module, x }
    }

    /// A case under a recipe.
    pub fn with(kind: &str, recipe: &Recipe, seed: u64) -> Self {
        let case = Case::new(kind, DType::F32, seed);
        case.session.apply(recipe).unwrap_or_else(|e| panic!("{kind}: {e}"));
        case
    }

    /// A forward and a backward pass, whose loss weighs outputs by position.
    pub fn run(&self) -> Outcome {
        let (y, loss) = self.loss();
        self.session.backward(&loss).unwrap();
        Outcome { y: bits(&y), gradients: self.gradients() }
    }

    pub fn loss(&self) -> (Tensor, Tensor) {
        let y = self.module.forward(&self.x.var).unwrap();
        let loss = y.mul(&weights_like(&y)).unwrap().sum_all().unwrap();
        (y, loss)
    }

    /// The gradients of all parameters, the input's among them.
    pub fn gradients(&self) -> BTreeMap<String, Vec<u64>> {
        let found = self.session.gradients().unwrap();
        let all = self.session.parameters();
        all.iter().filter_map(|(name, var)| Some((name.clone(), bits(found.get(var)?)))).collect()
    }
}

/// What a step gives, as bits.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub y: Vec<u64>,
    pub gradients: BTreeMap<String, Vec<u64>>,
}

pub fn module(kind: &str, place: &Place) -> Box<dyn Module> {
    let mlp = |norm, activation| MlpConfig { hidden: HIDDEN, inner: 96, norm, activation, bias: Bias::With };
    let attention = |groups| AttentionConfig { heads: 4, groups, head_size: 16, mask: Mask::Causal };
    let multihead = |norm| MultiheadConfig {
        hidden: HIDDEN,
        heads: 4,
        groups: 4,
        mask: Mask::Causal,
        norm,
        bias: Bias::With,
        hand_over: HandOver::None,
    };
    let (layer_norm, rms) = (NormKind::LayerNorm, NormKind::RmsNorm);
    match kind {
        "linear" => Box::new(Linear::new(place, HIDDEN, 48, Bias::With).unwrap()),
        "linear without bias" => Box::new(Linear::new(place, HIDDEN, 48, Bias::Without).unwrap()),
        "layer norm linear" => Box::new(LayerNormLinear::new(place, layer_norm, HIDDEN, 48, Bias::With).unwrap()),
        "rms norm linear" => Box::new(LayerNormLinear::new(place, rms, HIDDEN, 48, Bias::Without).unwrap()),
        "gelu mlp" => Box::new(LayerNormMlp::new(place, mlp(layer_norm, Activation::Gelu)).unwrap()),
        "silu mlp" => Box::new(LayerNormMlp::new(place, mlp(layer_norm, Activation::Silu)).unwrap()),
        "swiglu mlp" => Box::new(LayerNormMlp::new(place, mlp(rms, Activation::SwiGlu)).unwrap()),
        "grouped linear" => Box::new(GroupedLinear::new(place, 4, HIDDEN, 48, Bias::With).unwrap().routed(&SPLITS)),
        "attention" => Box::new(DotProductAttention::new(place, attention(4)).unwrap()),
        "grouped-query attention" => Box::new(DotProductAttention::new(place, attention(2)).unwrap()),
        "multihead attention" => Box::new(MultiheadAttention::new(place, multihead(None)).unwrap()),
        "multihead attention with norm" => {
            Box::new(MultiheadAttention::new(place, multihead(Some(layer_norm))).unwrap())
        }
        "gpt layer" => Box::new(TransformerLayer::new(place, LayerConfig::gpt(HIDDEN, 4)).unwrap()),
        "silu layer" => {
            let config = LayerConfig { activation: Activation::Silu, ..LayerConfig::gpt(HIDDEN, 4) };
            Box::new(TransformerLayer::new(place, config).unwrap())
        }
        "llama layer" => Box::new(TransformerLayer::new(place, LayerConfig::llama(HIDDEN, 4, 2, 96)).unwrap()),
        other => panic!("no such module: {other}"),
    }
}

pub fn input_shape(kind: &str) -> Vec<usize> {
    match kind {
        "grouped linear" => vec![BATCH * TOKENS, HIDDEN],
        "attention" => vec![BATCH, TOKENS, 12 * 16],
        "grouped-query attention" => vec![BATCH, TOKENS, 8 * 16],
        _ => vec![BATCH, TOKENS, HIDDEN],
    }
}

/// Numbers between −1 and 1 by position, different for neighbours.
pub fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0).collect()
}

pub fn weights_like(y: &Tensor) -> Tensor {
    let numbers = numbers(y.elem_count(), 5);
    Tensor::from_vec(numbers, y.shape(), &Device::Cpu).unwrap().to_dtype(y.dtype()).unwrap()
}

/// The bits of all numbers, whatever their type.
pub fn bits(x: &Tensor) -> Vec<u64> {
    values(x).into_iter().map(f64::to_bits).collect()
}

pub fn values(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

pub fn recipe(text: &str) -> Recipe {
    text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// Every tensor of linear layers by one spec; attention as it is.
pub fn all(spec: &str) -> Recipe {
    let rules = format!("[[rule]]\nmodule = \"attention\"\nspec = \"high-precision\"\n[default]\nspec = \"{spec}\"\n");
    Recipe::from_toml(&rules).unwrap()
}

/// A spec for each operand of linear layers.
pub fn operands(input: &str, weight: &str, grad_output: &str) -> Recipe {
    let rule = |slot: &str, spec: &str| format!("[[rule]]\nslot = \"{slot}\"\nspec = \"{spec}\"\n");
    let rules = rule("input", input) + &rule("weight", weight) + &rule("grad_output", grad_output);
    Recipe::from_toml(&(rules + "[default]\nspec = \"high-precision\"\n")).unwrap()
}

/// Every preset, and those that quantize attention.
pub fn presets() -> Vec<String> {
    let quantized = ["current_scaling+attention", "delayed_scaling+attention", "mxfp8+attention"];
    Preset::names().map(str::to_string).chain(quantized.map(str::to_string)).collect()
}
