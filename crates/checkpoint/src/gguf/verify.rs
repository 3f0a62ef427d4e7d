//! Would llama.cpp load this file, and load it correctly?

use super::container::{ALIGNMENT, Value};
use super::family::Family;
use super::file::{GgufFile, GgufTensor};
use super::sizes::{self, Has, Mixture, Sizes};
use crate::Result;
use crate::finding::Finding;
use crate::statistics::Statistics;
use nvfp4_spec::e4m3;

impl GgufFile {
    /// Counts over an NVFP4 tensor.
    pub fn statistics(&self, tensor: &GgufTensor) -> Result<Statistics> {
        let (mut sum, mut codes, mut scales) = (Statistics::default(), Vec::new(), Vec::new());
        let step = ((8 << 20) / tensor.cols().max(1)).max(1);
        for start in (0..tensor.rows()).step_by(step) {
            let rows = start..(start + step).min(tensor.rows());
            self.codes_and_scales(tensor, rows, &mut codes, &mut scales)?;
            sum.count(&codes, &scales);
        }
        Ok(sum)
    }
}

/// Tokenizers that llama.cpp has (August 2026).
const TOKENIZERS: [&str; 8] = ["bert", "gemma4", "gpt2", "llama", "plamo2", "plamo3", "rwkv", "t5"];

/// Rules by which llama.cpp splits text before it merges bytes (August 2026).
const SPLITS: &str = "\
    a.x-4.0 afmoe bailingmoe bailingmoe2 bloom chameleon chatglm-bpe codeshell cohere2moe command-r dbrx deepseek-coder \
    deepseek-llm deepseek-r1-qwen deepseek-v3 default exaone exaone-moe exaone4 f2llmv2 falcon falcon-h1 falcon3 gemma4 \
    gigachat glm4 gpt-2 gpt-4o gpt3-finnish granite-docling granite-embed-multi-311m granite-embed-multi-97m grok-2 hunyuan \
    hunyuan-dense jais jais-2 jina-de jina-es jina-v1-en jina-v2-code jina-v2-de jina-v2-es jina-v5-nano joyai-llm kanana2 \
    kimi-k2 kormo laguna lfm2 llada-moe llama-bpe llama-v3 llama3 llama4 megrez mellum mellum2 midm-2.0 minerva-7b minicpm5 \
    minimax-m2 modern-bert mpt olmo phi-2 pixtral poro-chat qwen2 qwen35 refact roberta-bpe sarvam-moe seed-coder smaug-bpe \
    smollm solar-open stablelm2 starcoder superbpe talkie tekken tiny_aya trillion viking whitespace youtu";

/// Checks a file for llama.cpp. An empty list means that nothing was found.
pub fn verify(file: &GgufFile) -> Result<Vec<Finding>> {
    let mut check = Check { file, findings: Vec::new() };
    if file.nvfp4().next().is_none() {
        check.problem("file", "no tensor is NVFP4");
    }
    match file.architecture() {
        None => check.problem("general.architecture", "missing, or not text"),
        Some(arch) => match Family::named(arch) {
            Some(family) => check.model(family),
            None => drop(check.size(&format!("{arch}.block_count"), Presence::Needed)),
        },
    }
    check.tokenizer();
    check.slots();
    let scaled = file.nvfp4().find(|tensor| check.has_scale(tensor)).map(|tensor| tensor.name.as_str());
    let family = file.architecture().and_then(Family::named);
    for tensor in file.nvfp4() {
        if family.is_some_and(|family| family.loses_scale(&tensor.name)) && check.has_scale(tensor) {
            check.problem(
                &tensor.name,
                "llama.cpp leaves out the tensor scales of Qwen2's MLP: results are not numbers",
            );
        }
        check.weight(tensor, scaled)?;
    }
    check.findings.sort_by_key(|f| std::cmp::Reverse(f.severity));
    Ok(check.findings)
}

/// Whether llama.cpp asks for a key.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    Needed,
    Optional,
}

/// A file that is being checked.
struct Check<'f> {
    file: &'f GgufFile,
    findings: Vec<Finding>,
}

impl<'f> Check<'f> {
    fn problem(&mut self, about: &str, text: impl Into<String>) {
        self.findings.push(Finding::problem(about, text));
    }

    fn note(&mut self, about: &str, text: impl Into<String>) {
        self.findings.push(Finding::note(about, text));
    }

    /// A value of the type that `read` takes, which llama.cpp insists on.
    fn value<T>(
        &mut self,
        key: &str,
        presence: Presence,
        expected: &str,
        read: impl Fn(&'f Value) -> Option<T>,
    ) -> Option<T> {
        match self.file.values().get(key) {
            None if presence == Presence::Optional => None,
            None => {
                self.problem(key, "missing");
                None
            }
            Some(value) => {
                let read = read(value);
                if read.is_none() {
                    self.problem(key, format!("expected {expected}, got {}", described(value)));
                }
                read
            }
        }
    }

    fn size(&mut self, key: &str, presence: Presence) -> Option<u64> {
        self.value(key, presence, "a positive whole number of 32 bits", |value| match value {
            Value::U32(n) if *n > 0 => Some(u64::from(*n)),
            _ => None,
        })
    }

    fn positive(&mut self, key: &str, presence: Presence) {
        self.value(key, presence, "a positive binary32 number", |value| match value {
            Value::F32(x) if x.is_finite() && *x > 0.0 => Some(()),
            _ => None,
        });
    }

    /// Sizes, tensors and their shapes.
    fn model(&mut self, family: Family) {
        let arch = family.name();
        let key = |name: &str| format!("{arch}.{name}");
        self.size(&key("context_length"), Presence::Needed);
        self.positive(&key("attention.layer_norm_rms_epsilon"), Presence::Needed);
        self.positive(&key("rope.freq_base"), Presence::Optional);
        self.positive(&key("rope.scaling.factor"), Presence::Optional);
        self.size(&key("rope.scaling.original_context_length"), Presence::Optional);
        self.text(&key("rope.scaling.type"), Presence::Optional);
        // llama.cpp reads these as one number or one for each layer.
        let by_layer = ["feed_forward_length", "attention.head_count", "attention.head_count_kv"];
        let is_list =
            |name: &&str| matches!(self.file.values().get(&key(name)), Some(Value::I32s(_) | Value::Skipped(_)));
        if let Some(name) = by_layer.into_iter().find(is_list) {
            return self.note(&key(name), "a list: the shapes of tensors are not checked");
        }
        let before = self.findings.len();
        let sizes = self.sizes(family);
        let Some(sizes) = sizes.filter(|_| self.findings.len() == before) else { return };
        self.shapes(&sizes);
    }

    /// The sizes that the keys give; every one that is missing or wrong is a problem.
    fn sizes(&mut self, family: Family) -> Option<Sizes> {
        use Presence::{Needed, Optional};
        let key = |name: &str| format!("{}.{name}", family.name());
        let layers = self.size(&key("block_count"), Needed);
        let hidden = self.size(&key("embedding_length"), Needed);
        let feed_forward = self.size(&key("feed_forward_length"), Needed);
        let heads = self.size(&key("attention.head_count"), Needed);
        let kv_heads = self.size(&key("attention.head_count_kv"), Optional).or(heads);
        let head_dim = self.size(&key("attention.key_length"), Optional);
        let head_dim = head_dim.or(hidden.zip(heads).map(|(hidden, heads)| hidden / heads));
        for name in ["attention.value_length", "rope.dimension_count"] {
            let own = self.size(&key(name), Optional).or(head_dim);
            if let (Some(own), Some(head_dim)) = (own, head_dim)
                && own != head_dim
            {
                self.problem(&key(name), format!("{own}, but attention.key_length is {head_dim}"));
            }
        }
        if let (Some(heads), Some(kv_heads)) = (heads, kv_heads)
            && !heads.is_multiple_of(kv_heads)
        {
            self.problem(&key("attention.head_count"), format!("{heads}, not a multiple of head_count_kv, {kv_heads}"));
        }
        let count = match family {
            Family::Qwen3Moe => self.size(&key("expert_count"), Needed),
            // Files of other programs have 0 for no experts.
            _ => self.file.values().get(&key("expert_count")).and_then(Value::number).filter(|n| *n > 0),
        };
        let used = self.size(&key("expert_used_count"), if count.is_some() { Needed } else { Optional });
        if let (Some(used), Some(count)) = (used, count)
            && used > count
        {
            self.problem(&key("expert_used_count"), format!("{used}, more than the {count} experts"));
        }
        let own = self.size(&key("expert_feed_forward_length"), Optional);
        let experts = count.zip(used).zip(own.or(feed_forward));
        let stated = self.size(&key("vocab_size"), Optional);
        let tokens = match self.file.values().get("tokenizer.ggml.tokens") {
            Some(Value::Texts(tokens)) => Some(tokens.len() as u64),
            _ => None,
        };
        if let (Some(stated), Some(tokens)) = (stated, tokens)
            && stated != tokens
        {
            self.problem(&key("vocab_size"), format!("{stated}, but tokenizer.ggml.tokens has {tokens}"));
        }
        Some(Sizes {
            family,
            layers: layers?,
            hidden: hidden?,
            heads: heads?,
            kv_heads: kv_heads?,
            head_dim: head_dim?,
            feed_forward: feed_forward?,
            vocabulary: tokens.or(stated)?,
            experts: experts.map(|((count, used), feed_forward)| Mixture { count, used, feed_forward }),
        })
    }

    fn shapes(&mut self, sizes: &Sizes) {
        let file = self.file;
        // A file that claims more layers than it has tensors already lacks one of the first.
        let shown = Sizes { layers: sizes.layers.min(file.tensors().len() as u64), ..*sizes };
        for (layer, part, last) in shown.needed() {
            let name = sizes::name(layer, part, last);
            if file.get(&name).is_none() {
                self.problem(&name, "missing");
            }
        }
        for tensor in file.tensors() {
            let (name, dims) = (&tensor.name, &tensor.dims);
            let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
            if layer.is_some_and(|(layer, _)| layer.parse().is_ok_and(|layer: u64| layer >= sizes.layers)) {
                self.problem(name, format!("beyond the {} layers of block_count", sizes.layers));
            }
            if !self.belongs(sizes, name) {
                self.problem(name, format!("llama.cpp's '{}' models have no such tensor", sizes.family.name()));
            } else if let Some(misfit) = sizes.misfit(name, dims) {
                let (key, len) = (misfit.in_gguf(), sizes.len(misfit));
                self.problem(name, format!("has the dimensions {dims:?}, but {key} is {len}"));
            }
            if name == "rope_freqs.weight" && *dims != [sizes.head_dim / 2] {
                let half = sizes.head_dim / 2;
                self.problem(name, format!("has the dimensions {dims:?}, expected half a head, [{half}]"));
            }
        }
    }

    /// Whether a model has a tensor of this name. llama.cpp counts those that it has loaded, and
    /// refuses a file with more.
    fn belongs(&self, sizes: &Sizes, name: &str) -> bool {
        let Some((module, last)) = name.rsplit_once('.') else { return false };
        let part = match module.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((layer, _)) if layer.parse::<u64>().is_err() => return false,
            Some((_, part)) => part,
            None => module,
        };
        let rotates = ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];
        let known = |name: &str, last: &str| sizes.dims(name).is_some() && sizes.has(part, last) != Has::Never;
        match last {
            "scale" | "input_scale" => known(&format!("{module}.weight"), "weight"),
            _ => known(name, last) || sizes.family == Family::Llama && rotates.contains(&name),
        }
    }

    /// Types that ggml does not have, and tensors that do not directly follow each other, as
    /// llama.cpp expects.
    fn slots(&mut self) {
        let tensors = self.file.tensors();
        let alignment = self.file.values().get("general.alignment").and_then(Value::number).unwrap_or(ALIGNMENT);
        for tensor in tensors.iter().filter(|tensor| !tensor.kind.is_known()) {
            self.problem(&tensor.name, format!("{}, which ggml (August 2026) does not have", tensor.kind));
        }
        for (tensor, next) in tensors.iter().zip(tensors.iter().skip(1)).filter(|(tensor, _)| tensor.kind.is_known()) {
            let (end, start) = ((tensor.start + tensor.len).next_multiple_of(alignment), next.start);
            if end != start {
                let (kind, dims) = (tensor.kind, &tensor.dims);
                let text = format!("{kind} of {dims:?} ends before byte {end}, but the next tensor starts at {start}");
                self.problem(&tensor.name, format!("{text}: llama.cpp refuses the file"));
            }
        }
    }

    fn has_scale(&self, tensor: &GgufTensor) -> bool {
        let module = tensor.name.strip_suffix(".weight").unwrap_or(&tensor.name);
        self.file.get(&format!("{module}.scale")).is_some()
    }

    fn text(&mut self, key: &str, presence: Presence) -> Option<&'f str> {
        self.value(key, presence, "text", Value::text)
    }

    fn tokenizer(&mut self) {
        let model = match self.text("tokenizer.ggml.model", Presence::Needed) {
            Some("no_vocab" | "none") => return self.note("tokenizer", "none: the source had no tokenizer files"),
            None => return,
            Some(model) => model,
        };
        if !TOKENIZERS.contains(&model) {
            let text = format!("'{model}', which llama.cpp (August 2026) does not have");
            self.problem("tokenizer.ggml.model", text);
        }
        let texts = |value: &'f Value| match value {
            Value::Texts(texts) if !texts.is_empty() => Some(texts.len()),
            _ => None,
        };
        let tokens = self.value("tokenizer.ggml.tokens", Presence::Needed, "a list of text", texts);
        self.value("tokenizer.ggml.merges", Presence::Optional, "a list", |value| match value {
            Value::Texts(_) | Value::Skipped(0) => Some(()),
            _ => None,
        });
        let Some(tokens) = tokens else { return };
        let lists = [("scores", "binary32 numbers"), ("token_type", "32-bit whole numbers")];
        for (name, kind) in lists {
            let expected = format!("{tokens} {kind}, one for each token");
            self.value(&format!("tokenizer.ggml.{name}"), Presence::Optional, &expected, |value| match value {
                Value::F32s(list) => (name == "scores" && list.len() == tokens).then_some(()),
                Value::I32s(list) => (name == "token_type" && list.len() == tokens).then_some(()),
                _ => None,
            });
        }
        for name in ["bos", "eos", "unknown", "padding"] {
            let expected = format!("the number of one of {tokens} tokens");
            self.value(
                &format!("tokenizer.ggml.{name}_token_id"),
                Presence::Optional,
                &expected,
                |value| match value {
                    Value::U32(id) if (*id as usize) < tokens => Some(()),
                    _ => None,
                },
            );
        }
        for name in ["add_bos_token", "add_eos_token", "add_space_prefix"] {
            self.value(&format!("tokenizer.ggml.{name}"), Presence::Optional, "yes or no", |value| match value {
                Value::Bool(_) => Some(()),
                _ => None,
            });
        }
        // Other tokenizers do not split text first.
        let split = self.text("tokenizer.ggml.pre", Presence::Optional).filter(|_| model == "gpt2");
        if let Some(split) = split.filter(|split| !SPLITS.split_whitespace().any(|known| known == *split)) {
            self.problem("tokenizer.ggml.pre", format!("'{split}', which llama.cpp (August 2026) does not have"));
        }
        self.text("tokenizer.chat_template", Presence::Optional);
    }

    /// The scales and codes of an NVFP4 tensor. `scaled` is one that has a tensor scale.
    fn weight(&mut self, tensor: &GgufTensor, scaled: Option<&str>) -> Result<()> {
        let (file, name) = (self.file, tensor.name.as_str());
        let bad = |scales: &[f32]| scales.iter().copied().find(|s| !(s.is_finite() && *s > 0.0));
        if let Some(bad) = bad(&file.scales(tensor)?) {
            self.problem(name, format!("a tensor scale is {bad}"));
        }
        if let Some(bad) = file.input_scales(tensor)?.as_deref().and_then(bad) {
            self.problem(name, format!("an activation scale is {bad}"));
        }
        match scaled.filter(|_| !self.has_scale(tensor)) {
            Some(other) => self.problem(name, format!("no tensor scale, which '{other}' has: llama.cpp takes 1")),
            None if scaled.is_none() => self.note(name, "no tensor scale: llama.cpp takes 1"),
            None => {}
        }
        let counts = file.statistics(tensor)?;
        let unsigned: u64 = counts.scales[usize::from(e4m3::NAN_BYTE)..].iter().sum();
        if unsigned > 0 {
            self.problem(name, format!("{unsigned} block scales are NaN or negative: llama.cpp reads other values"));
        }
        if counts.vanished > 0 {
            let vanished = counts.vanished;
            self.note(name, format!("{vanished} blocks have the scale 0 and codes that are not: they decode to zeros"));
        }
        Ok(())
    }
}

/// A value of a file in a few words.
fn described(value: &Value) -> String {
    let list = |len: usize, of: &str| format!("a list of {len} {of}");
    match value {
        Value::U32(n) => n.to_string(),
        Value::I32(n) => format!("{n}, signed"),
        Value::Long(n) => format!("{n}, of 64 bits"),
        Value::F32(x) => format!("{x:?}, of 32 bits"),
        Value::F64(x) => format!("{x:?}, of 64 bits"),
        Value::Bool(b) => b.to_string(),
        Value::Text(_) => "text".to_string(),
        Value::Texts(texts) => list(texts.len(), "texts"),
        Value::I32s(numbers) => list(numbers.len(), "signed numbers"),
        Value::F32s(numbers) => list(numbers.len(), "binary32 numbers"),
        Value::Skipped(len) => format!("a list of {len} others"),
    }
}
