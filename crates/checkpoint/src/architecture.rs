//! Who loads a model once it is NVFP4: by the architecture that `config.json` names, and by files
//! of other programs beside it.

use super::client::Client;
use super::dialect::{Dialect, Model};
use super::finding::{Finding, Fix, Severity};
use super::form::Eight;
use super::outline::Outline;
use super::stacked::is_expert;
use super::weight::{Stored, Weight};
use crate::Result;
use serde_json::Value;

/// Which models are converted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Architectures {
    /// Those that some program may load afterwards.
    #[default]
    Served,
    /// Everything that has weights.
    Any,
}

/// What happens to models that no server loads in NVFP4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Treatment {
    /// They are not converted.
    Refuse,
    /// They are converted, and the result says who reads it.
    Tell,
}

/// Architectures that no server loads in NVFP4, by the beginnings of their names.
const UNSERVED: [(&[&str], Treatment, &str); 5] = [
    (
        &["GPT2", "OpenAIGPT", "ImageGPT", "DecisionTransformer"],
        Treatment::Refuse,
        "its weights have inputs before outputs (Conv1D), so blocks would run along the wrong dimension",
    ),
    (
        &[
            "T5",
            "MT5",
            "UMT5",
            "LongT5",
            "SwitchTransformers",
            "Bart",
            "MBart",
            "Pegasus",
            "Marian",
            "M2M100",
            "Blenderbot",
        ],
        Treatment::Refuse,
        "no server runs its kind of encoder and decoder in NVFP4",
    ),
    (&["Jamba"], Treatment::Refuse, "vLLM 0.32 does not load it in NVFP4, not even ModelOpt's own export"),
    (&["MambaFor", "FalconMambaFor"], Treatment::Refuse, "vLLM 0.32 quantizes none of its layers"),
    (
        &["DistilBert", "Electra", "Albert", "Deberta", "MPNet", "Camembert"],
        Treatment::Tell,
        "vLLM 0.32 has no code for it",
    ),
];

/// The architectures that vLLM has code for (August 2026).
const VLLM: &str = "\
    AXK1ForCausalLM AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM ArcticForCausalLM AriaForConditionalGeneration \
    AudioFlamingo3ForConditionalGeneration BagelForConditionalGeneration BailingMoeForCausalLM BailingMoeV2ForCausalLM \
    BailingMoeV2_5ForCausalLM BailingMoeV3ForCausalLM BeeForConditionalGeneration BertForMaskedLM \
    BertForSequenceClassification BertForTokenClassification BertModel BertSpladeSparseEmbeddingModel BgeM3EmbeddingModel \
    Blip2ForConditionalGeneration BloomForCausalLM CLIPModel ChameleonForConditionalGeneration \
    ChatGLMForConditionalGeneration ChatGLMModel Cheers CheersForConditionalGeneration Cohere2ForCausalLM \
    Cohere2MoeForCausalLM Cohere2VisionForConditionalGeneration CohereAsrForConditionalGeneration CohereForCausalLM \
    ColBERTJinaRobertaModel ColBERTLfm2Model ColBERTModernBertModel ColModernVBertForRetrieval ColPaliForRetrieval ColQwen3 \
    ColQwen3_5 Cosmos3EdgeForConditionalGeneration Cosmos3ForConditionalGeneration CwmForCausalLM DbrxForCausalLM \
    DeciLMForCausalLM DeepseekForCausalLM DeepseekOCR2ForCausalLM DeepseekOCRForCausalLM DeepseekV2ForCausalLM \
    DeepseekV32ForCausalLM DeepseekV3BidirectionalModel DeepseekV3ForCausalLM DeepseekV4ForCausalLM DeepseekVLV2ForCausalLM \
    DiffusionGemmaForBlockDiffusion Dots3NoteForCausalLM DotsOCRForCausalLM Eagle2_5_VLForConditionalGeneration \
    Emu3ForConditionalGeneration Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM Ernie4_5_VLMoeForConditionalGeneration \
    Exaone4ForCausalLM Exaone4_5_ForConditionalGeneration ExaoneForCausalLM ExaoneMoeForCausalLM Fairseq2LlamaForCausalLM \
    FalconForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM FireRedASR2ForConditionalGeneration \
    FireRedLIDForConditionalGeneration FlexOlmoForCausalLM FunASRForConditionalGeneration \
    FunAudioChatForConditionalGeneration GLM4VForCausalLM GPT2ForSequenceClassification GPT2LMHeadModel \
    GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoXForCausalLM Gemma2ForCausalLM Gemma2Model Gemma3ForCausalLM \
    Gemma3ForConditionalGeneration Gemma3TextModel Gemma3nForCausalLM Gemma3nForConditionalGeneration Gemma4ForCausalLM \
    Gemma4ForConditionalGeneration Gemma4UnifiedForConditionalGeneration GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM \
    Glm4MoeLiteForCausalLM Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration GlmAsrForConditionalGeneration \
    GlmForCausalLM GlmMoeDsaForCausalLM GlmOcrForConditionalGeneration GptOssForCausalLM \
    Granite4VisionForConditionalGeneration GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeHybridForCausalLM \
    GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM GraniteSWAForCausalLM GraniteSpeechForConditionalGeneration \
    GraniteSpeechPlusForConditionalGeneration GritLM GteModel GteNewForSequenceClassification GteNewModel H2OVLChatModel \
    HCXVisionForCausalLM HCXVisionV2ForCausalLM HF_ColBERT HYV3ForCausalLM HfMoondream HrmTextForCausalLM \
    HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HunYuanVLForConditionalGeneration HyperCLOVAXForCausalLM \
    IQuestCoderForCausalLM IQuestLoopCoderForCausalLM Idefics3ForConditionalGeneration InklingForCausalLM \
    InklingForConditionalGeneration InternLM2ForCausalLM InternLM2ForRewardModel InternLM3ForCausalLM \
    InternS1ForConditionalGeneration InternS1ProForConditionalGeneration InternS2MobiusForConditionalGeneration \
    InternS2PreviewForConditionalGeneration InternVLChatModel InternVLForConditionalGeneration IsaacForConditionalGeneration \
    Jais2ForCausalLM JambaForCausalLM JambaForSequenceClassification JinaEmbeddingsV5Model JinaForRanking JinaVLForRanking \
    KananaVForConditionalGeneration KeyeForConditionalGeneration KeyeVL1_5ForConditionalGeneration \
    KimiK25ForConditionalGeneration KimiK3ForConditionalGeneration KimiLinearForCausalLM KimiVLForConditionalGeneration \
    LLaMAForCausalLM LagunaForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration \
    LightOnOCRForConditionalGeneration Llama4ForCausalLM Llama4ForConditionalGeneration \
    LlamaBidirectionalForSequenceClassification LlamaBidirectionalModel LlamaForCausalLM LlamaModel \
    LlamaNemotronVLForSequenceClassification LlamaNemotronVLModel Llama_Nemotron_Nano_VL LlavaForConditionalGeneration \
    LlavaNextForConditionalGeneration LlavaNextVideoForConditionalGeneration LlavaOnevision2ForConditionalGeneration \
    LlavaOnevisionForConditionalGeneration LongcatFlashForCausalLM LongcatFlashNgramForCausalLM MPTForCausalLM \
    Mamba2ForCausalLM MambaForCausalLM MellumForCausalLM MiDashengLMModel MiMoForCausalLM MiMoV2FlashForCausalLM \
    MiMoV2ForCausalLM MiMoV2OmniForCausalLM MiniCPM3ForCausalLM MiniCPMForCausalLM MiniCPMO MiniCPMV \
    MiniCPMV4_6ForConditionalGeneration MiniMaxM2ForCausalLM MiniMaxM3SparseForCausalLM \
    MiniMaxM3SparseForConditionalGeneration Ministral3ForCausalLM Mistral3ForConditionalGeneration MistralForCausalLM \
    MistralLarge3ForCausalLM MistralModel MixtralForCausalLM ModernBertForSequenceClassification \
    ModernBertForTokenClassification ModernBertModel Molmo2ForConditionalGeneration MolmoForCausalLM Moondream3ForCausalLM \
    MoonshotKimiaForCausalLM MossAudioModel MossTranscribeDiarizeForConditionalGeneration MptForCausalLM \
    MuseGlimmerForCausalLM MuseGlimmerForConditionalGeneration NVLM_D NemotronForCausalLM NemotronHForCausalLM \
    NemotronHPuzzleForCausalLM NemotronH_Nano_Omni_Reasoning_V3 NemotronH_Nano_VL_V2 NemotronH_Omni_Reasoning_V3 \
    NemotronH_Super_Omni_Reasoning_V3 NemotronParseForConditionalGeneration NomicBertModel OPTForCausalLM Olmo2ForCausalLM \
    Olmo3ForCausalLM OlmoForCausalLM OlmoHybridForCausalLM OlmoeForCausalLM OpenAIPrivacyFilterForTokenClassification \
    OpenCUAForConditionalGeneration OpenPanguVLForConditionalGeneration OpenVLAForActionPrediction OpsColQwen3Model \
    OrionForCausalLM Ovis Ovis2_5 Ovis2_6ForCausalLM Ovis2_6_MoeForCausalLM PaddleOCRVLForConditionalGeneration \
    PaliGemmaForConditionalGeneration PanguEmbeddedForCausalLM PanguProMoEV2ForCausalLM PanguUltraMoEForCausalLM \
    Param2MoEForCausalLM Phi3ForCausalLM Phi3VForCausalLM Phi4ForCausalLMV Phi4MMForCausalLM PhiForCausalLM \
    PhiMoEForCausalLM PixtralForConditionalGeneration Plamo3ForCausalLM QianfanOCRForConditionalGeneration \
    Qwen2AudioForConditionalGeneration Qwen2ForCausalLM Qwen2ForProcessRewardModel Qwen2ForRewardModel Qwen2Model \
    Qwen2MoeForCausalLM Qwen2VLForConditionalGeneration Qwen2_5OmniForConditionalGeneration Qwen2_5OmniModel \
    Qwen2_5_VLForConditionalGeneration Qwen3ASRForConditionalGeneration Qwen3ASRForcedAlignerForTokenClassification \
    Qwen3ASRRealtimeGeneration Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM \
    Qwen3OmniMoeForConditionalGeneration Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration \
    Qwen3VLNemotronEmbedModel Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM \
    Qwen3_5MoeForConditionalGeneration RForConditionalGeneration RWForCausalLM Rnj1ForCausalLM RobertaForMaskedLM \
    RobertaForSequenceClassification RobertaForTokenClassification RobertaModel SarvamMLAForCausalLM SarvamMoEForCausalLM \
    SeedOssForCausalLM SiglipModel SkyworkR1VChatModel SmolLM3ForCausalLM SmolVLMForConditionalGeneration SolarForCausalLM \
    StableLMEpochForCausalLM StableLmForCausalLM Starcoder2ForCausalLM Step1ForCausalLM Step3TextForCausalLM \
    Step3VLForConditionalGeneration Step3p5ForCausalLM Step3p7ForConditionalGeneration StepVLForConditionalGeneration \
    TeleChat2ForCausalLM TeleChat3ForCausalLM TeleFLMForCausalLM UltravoxModel UnlimitedOCRForCausalLM VaultGemmaForCausalLM \
    VibeVoiceAsrForConditionalGeneration VoxtralForConditionalGeneration VoxtralRealtimeGeneration \
    VoyageQwen3BidirectionalEmbedModel WhisperForConditionalGeneration XLMRobertaForSequenceClassification \
    XLMRobertaForTokenClassification XLMRobertaModel Zamba2ForCausalLM";

/// Why a model is not converted: no program would load the result.
pub(super) fn refusal(model: &Model<'_>) -> Result<Option<String>> {
    let checkpoint = model.checkpoint;
    let adapter = |w: &Weight<'_>| w.module.contains("lora_A") || w.module.contains("lora_B");
    let adapters = !model.weights.is_empty() && model.weights.iter().all(adapter);
    if adapters || checkpoint.companion("adapter_config.json")?.is_some() {
        return Ok(Some("a LoRA adapter, not a model; merge it into its model and convert that".to_string()));
    }
    let named = |start: &str| {
        let name = |f: &super::TensorFile| f.path().file_name().is_some_and(|n| n.to_string_lossy().starts_with(start));
        checkpoint.files().iter().any(name)
    };
    if checkpoint.config().is_some_and(|c| c.get("_class_name").is_some()) || named("diffusion_pytorch_model") {
        let reason = "a model of diffusers, which reads neither ModelOpt's nor compressed-tensors' NVFP4";
        return Ok(Some(reason.to_string()));
    }
    if checkpoint.config().is_none() && checkpoint.companion("params.json")?.is_some() {
        let reason = "in Mistral's own form (params.json), which servers do not read in NVFP4; use \
                      the files that have a config.json";
        return Ok(Some(reason.to_string()));
    }
    let architecture = model.architecture().unwrap_or_default();
    let refused = unserved(architecture).filter(|(treatment, _)| *treatment == Treatment::Refuse);
    Ok(refused.map(|(_, reason)| format!("{architecture}: {reason}")))
}

/// A finding if a client would not load a checkpoint of this architecture, or might not.
pub fn loading(model: &Model<'_>, client: Client) -> Option<Finding> {
    let finding = |severity, text: String| Finding::new(severity, "architecture", text);
    if client != Client::Vllm {
        return None;
    }
    let Some(architecture) = model.architecture() else {
        let text = "config.json names no architecture, so no server knows how to run these weights";
        return Some(finding(Severity::Problem, text.to_string()));
    };
    // GPT-OSS's experts in one tensor have a loader for MXFP4 and for BF16.
    let joined = |w: &Weight<'_>| match &w.stored {
        Stored::Nvfp4(_) => w.is_transposed(),
        Stored::MxFp4 { .. } => true,
        Stored::Plain(_) | Stored::Fp8 { .. } => false,
    };
    if architecture.starts_with("GptOss") && model.dialect != Dialect::Plain && model.weights.iter().any(joined) {
        let text = format!(
            "{architecture}: vLLM 0.32 has no loader for its experts in NVFP4, and does not load \
             ModelOpt's own export either"
        );
        return Some(finding(Severity::Problem, text).with(Fix::Decode));
    }
    if let Some(reason) = unread(model, architecture) {
        return Some(finding(Severity::Problem, format!("{architecture}: {reason}")));
    }
    if let Some((_, reason)) = unserved(architecture) {
        return Some(finding(Severity::Problem, format!("{architecture}: {reason}")).with(Fix::Decode));
    }
    let known = VLLM.split_whitespace().any(|name| name == architecture);
    (!known).then(|| {
        let text = format!("vLLM (August 2026) has no code for {architecture}; it would try transformers'");
        finding(Severity::Note, text)
    })
}

fn unserved(architecture: &str) -> Option<(Treatment, &'static str)> {
    let found = UNSERVED.iter().find(|(names, ..)| names.iter().any(|name| architecture.starts_with(name)));
    found.map(|(_, treatment, reason)| (*treatment, *reason))
}

/// Why vLLM does not read a form that it reads of other architectures.
fn unread(model: &Model<'_>, architecture: &str) -> Option<&'static str> {
    let one = |w: &Weight<'_>| matches!(w.stored, Stored::Nvfp4(_) | Stored::Fp8 { eight: Eight::Tensor, .. });
    let by_heads = |w: &Weight<'_>| w.module.ends_with(".query_key_value") && one(w);
    let scaled = |w: &Weight<'_>| match &w.stored {
        Stored::Nvfp4(parts) => parts.input.is_some(),
        Stored::Fp8 { input, .. } => input.is_some(),
        Stored::Plain(_) | Stored::MxFp4 { .. } => false,
    };
    let adapter = |w: &Weight<'_>| w.module.contains("_adapter_list.") && scaled(w);
    let has = |wanted: &dyn Fn(&Weight<'_>) -> bool| model.weights.iter().any(wanted);
    match model.dialect {
        Dialect::ModelOpt | Dialect::CompressedTensors if architecture.starts_with("Bloom") && has(&by_heads) => Some(
            "vLLM 0.32 sorts its query_key_value by heads, and fails with the one number of a tensor scale; keep it \
                 plain",
        ),
        Dialect::ModelOpt | Dialect::CompressedTensors if architecture.starts_with("Zamba2") && has(&adapter) => {
            Some("vLLM 0.32 does not find the activation scales of its adapters; leave them out")
        }
        Dialect::ModelOpt
            if architecture.starts_with("ExaoneMoe")
                && model.weight("lm_head").is_some_and(|head| matches!(head.stored, Stored::Plain(_)))
                && !model.names_all() =>
        {
            Some(
                "vLLM 0.32 asks for its output head without a name, so no list of ModelOpt's leaves it alone; use \
                 compressed-tensors' format, or several forms",
            )
        }
        Dialect::CompressedTensors
            if architecture.starts_with("GraniteMoeHybrid") && has(&|w| is_expert(&w.module) && scaled(w)) =>
        {
            Some(
                "vLLM 0.32 does not find the activation scales of its experts in compressed-tensors' format; use \
                 ModelOpt's, or leave them out",
            )
        }
        _ => None,
    }
}

/// Names that vLLM has for modules of some architectures when it asks the configuration for their
/// form: a part of the name in the file, and what stands there instead. The first expert of a layer
/// stands for all. A joined module is here where the architecture's class does not say what it is
/// joined from.
const CALLED: [(&[&str], &str, &[&str]); 9] = [
    (&["MiniMaxM2", "PhimoeFor"], ".block_sparse_moe.experts.0.", &[".mlp.experts.0."]),
    (&["PhimoeFor"], ".block_sparse_moe.gate", &[".mlp.router"]),
    (&["GraniteMoeHybrid"], ".mamba.", &[".mixer."]),
    (&["Glm4v"], ".attn.qkv", &[".attn.q_proj", ".attn.k_proj", ".attn.v_proj"]),
    (&["Glm4vFor", "StableLm", "StableLM", "Orion"], ".gate_proj", &[".gate_up_proj"]),
    (&["Glm4vFor", "StableLm", "StableLM", "Orion"], ".up_proj", &[".gate_up_proj"]),
    (&["StableLm", "StableLM", "Orion", "GPTJ"], ".q_proj", &[".qkv_proj"]),
    (&["StableLm", "StableLM", "Orion", "GPTJ"], ".k_proj", &[".qkv_proj"]),
    (&["StableLm", "StableLM", "Orion", "GPTJ"], ".v_proj", &[".qkv_proj"]),
];

/// What else vLLM calls a module when it asks the configuration for its form.
pub(super) fn called_by_vllm(config: Option<&Value>, module: &str) -> Vec<String> {
    let architecture = Outline::new(config).architecture().unwrap_or_default();
    let called = CALLED
        .iter()
        .filter(|(names, part, _)| module.contains(part) && names.iter().any(|name| architecture.starts_with(name)));
    called.flat_map(|(_, part, others)| others.iter().map(move |other| module.replace(part, other))).collect()
}

/// Whether transformers asks for weights of linear layers to set their initial values, also where
/// the checkpoint has codes for them.
pub(super) fn sets_weights_of_codes(model: &Model<'_>) -> bool {
    let sets = |name: &str| ["FalconFor", "Mamba2For", "ModernBert"].iter().any(|start| name.starts_with(start));
    model.architecture().is_some_and(sets)
}

/// What transformers 5 calls a module that stays, in a model of text and images: files keep older
/// names, in which `model.` does not stand before the vision tower, or `vision_model.` inside of it.
pub(super) fn called_by_transformers(config: Option<&Value>, module: &str) -> Option<String> {
    let architecture = Outline::new(config).architecture()?;
    let bare = module.replace(".vision_model.", ".");
    let name = if bare.starts_with("model.") { bare } else { format!("model.{bare}") };
    (architecture.ends_with("ForConditionalGeneration") && name != module).then_some(name)
}

/// The output heads that a server builds for an architecture whether or not the checkpoint has
/// them: they may be tied to the embedding.
pub(super) fn heads(architecture: Option<&str>) -> &'static [&'static str] {
    match architecture {
        Some(name) if name.starts_with("Whisper") => &["lm_head", "proj_out"],
        Some(name) if name.starts_with("GPTNeoX") => &["lm_head", "embed_out"],
        _ => &["lm_head"],
    }
}

/// Whether a model writes text.
pub(super) fn writes(model: &Model<'_>) -> bool {
    let named = |name: &str| name.ends_with("ForCausalLM") || name.ends_with("ForConditionalGeneration");
    model.architecture().is_some_and(named)
}
