"""Adapters of peft beside codes, and models that accelerate places."""

import peft
import pytest
import torch

from test_transformers import TOKENS, checkpoints, layers, loaded, trained  # noqa: F401  (a fixture)


def test_peft_trains_and_saves_adapters(checkpoints, tmp_path):  # noqa: F811
    model = loaded(checkpoints("llama", activations=True))
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    losses = trained(adapted)
    assert losses[-1] < losses[0] - 0.2
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(loaded(checkpoints("llama", activations=True)), tmp_path)
    with torch.no_grad():
        assert torch.equal(again.eval()(TOKENS).logits, adapted.eval()(TOKENS).logits)


def test_models_of_experts_have_adapters_beside_attention(checkpoints):  # noqa: F811
    """peft itself takes names of experts for those of one parameter in this family."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
    losses = trained(peft.get_peft_model(loaded(checkpoints("qwen3-moe")), config))
    assert losses[-1] < losses[0] - 0.2


def test_devices_are_given_by_a_map(checkpoints, tmp_path):  # noqa: F811
    folder = checkpoints("mixtral")
    with torch.no_grad():
        expected = loaded(folder)(TOKENS).logits
        for map in ("cpu", {"": "cpu"}, "auto"):
            model = loaded(folder, device_map=map, low_cpu_mem_usage=True)
            assert layers(model) and torch.equal(model(TOKENS).logits, expected)
    parts = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    with pytest.raises(ValueError, match="codes do not go with offloading, here to cpu, disk"):
        loaded(folder, device_map=parts, offload_folder=tmp_path)
