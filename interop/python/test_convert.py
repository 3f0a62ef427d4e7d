"""Conversion of models: what is converted, what is left, and what the report says about it."""

import copy
import logging
import pickle
import warnings

import pytest
import torch
from test_modules import model, same, step
from torch import nn
from torch.nn.utils import prune

import nvfp4
import nvfp4.te as te
import nvfp4.torch
from nvfp4.torch import convert_module


class Named(nn.Linear):
    """A subclass that leaves the product alone."""

    def __init__(self, size):
        super().__init__(size, size)
        self.tag = "mine"

    def described(self):
        return f"{self.tag} {self.in_features}"


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.stacked = nn.Parameter(torch.randn(4, 64, 64))

    def forward(self, x):
        return x @ self.stacked.sum(0)


class Conv1D(nn.Module):
    """What transformers has under this name: a linear layer whose weight lies transposed."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) / 8), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


def reasons(report):
    return {left.name: left.reason for left in report.left}


def test_the_report_says_what_was_converted_and_what_was_left():
    plain = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Embedding(10, 64), nn.Linear(64, 32, bias=False))
    rules = '[[rule]]\npath = "3"\nspec = "high-precision"\n[default]\npreset = "nvfp4"'
    report = convert_module(plain, nvfp4.Recipe.from_toml(rules))
    assert report.model is plain
    assert [(c.name, c.parameters) for c in report.converted] == [("0", 64 * 64 + 64)]
    assert reasons(report) == {"2": "a table, not a product", "3": "the recipe leaves it in high precision"}
    assert report.parameters == sum(p.numel() for p in plain.parameters()) and report.converted_parameters == 4160
    assert report.line == (
        "nvfp4: converted 1 layer (59.6 % of 6,976 parameters); left 2 (a table, not a product); "
        "3 (the recipe leaves it in high precision)"
    )
    assert "input=nvfp4(hadamard), weight=nvfp4(16x16)" in str(report) and report.line in str(report)
    assert report.warnings == []
    with pytest.raises(TypeError, match="changes the model in place; call the model"):
        report(torch.randn(2, 64))


def test_the_line_is_logged_and_warnings_are_given(caplog):
    misspelt = nvfp4.Recipe.from_toml('[[rule]]\npath = "lmhead"\nspec = "high-precision"\n[default]\npreset = "nvfp4"')
    with caplog.at_level(logging.INFO, "nvfp4"), pytest.warns(UserWarning, match="rule 1 .line 1, lmhead. decides nothing"):
        report = convert_module(nn.ModuleDict({"lm_head": nn.Linear(64, 64)}), misspelt)
    assert caplog.messages == [report.line]
    with pytest.warns(UserWarning, match=r"88.3 % of the parameters could not be converted: 1: Experts, several matrices"):
        convert_module(nn.Sequential(nn.Linear(46, 46), Experts()), "nvfp4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_module(model(), "nvfp4")


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_the_reason_of_everything_that_is_left():
    pruned = prune.random_unstructured(nn.Linear(64, 64), "weight", 0.5)
    replaced = nn.Linear(64, 64)
    replaced.forward = replaced.forward
    parts = {
        "attention": nn.MultiheadAttention(64, 4),
        "scaled": Scaled(64, 64),
        "lazy": nn.LazyLinear(64),
        "experts": Experts(),
        "convolution": nn.Conv1d(4, 4, 3),
        "cell": nn.GRUCell(4, 4),
        "normed": nn.utils.weight_norm(nn.Linear(64, 64)),
        "spectral": nn.utils.spectral_norm(nn.Linear(64, 64)),
        "pruned": pruned,
        "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)),
        "wide": nn.Linear(64, 64, dtype=torch.float64),
        "replaced": replaced,
        "te": te.Linear(64, 64),
        "lm_head": nn.Linear(64, 64),
    }
    whole = nn.ModuleDict(parts)
    kinds = {name: type(part) for name, part in parts.items()}
    names = {name for name, _ in whole.named_parameters()}
    with pytest.warns(UserWarning, match="could not be converted"):
        report = convert_module(whole, "nvfp4")
    assert report.converted == []
    hook = "a hook computes its weight (weight_norm, spectral_norm or pruning); use torch.nn.utils.parametrizations after the conversion"
    assert reasons(report) == {
        "attention": "it multiplies by its weights itself; use projections that are torch.nn.Linear",
        "attention.out_proj": "torch.nn.MultiheadAttention reads this weight itself",
        "scaled": "a subclass of torch.nn.Linear with a forward of its own",
        "lazy": "its shape is not known yet; call the model once, then convert it",
        "experts": "several matrices in one parameter; use nvfp4.torch.GroupedLinear for experts",
        "convolution": "a convolution",
        "cell": "not a torch.nn.Linear",
        "normed": hook,
        "spectral": hook,
        "pruned": hook,
        "parametrized": "it is parametrized; convert it first, then parametrize it",
        "wide": "its weight is torch.float64; torch.float32, torch.bfloat16 and torch.float16 are quantized",
        "replaced": "its forward was replaced, as accelerate does; convert it before",
        "te": "it follows nvfp4.te.autocast",
        "lm_head": 'an output head; head="convert" takes it too',
    }
    assert {name: type(part) for name, part in whole.items()} == kinds
    assert {name for name, _ in whole.named_parameters()} == names
    for name in ("normed", "spectral", "pruned", "parametrized"):
        for _ in range(2):
            whole[name](torch.randn(4, 64)).sum().backward()
    assert "pruned.weight_orig" in whole.state_dict()


def test_parametrized_after_the_conversion():
    layer = nn.Sequential(nn.Linear(64, 64))
    convert_module(layer, "nvfp4")
    nn.utils.parametrizations.weight_norm(layer[0])
    twin = nvfp4.torch.Linear(64, 64)
    twin.load_state_dict({"weight": layer[0].weight, "bias": layer[0].bias})
    x = torch.randn(32, 64)
    assert torch.equal(layer(x), twin(x))
    layer(x).sum().backward()
    assert layer[0].parametrizations.weight.original0.grad is not None


def test_the_head_is_left_unless_asked_for():
    class Language(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.table, self.inner, self.out = nn.Embedding(96, 64), nn.Linear(64, 64), nn.Linear(64, 96, bias=False)
            if tied:
                self.out.weight = self.table.weight

        def get_output_embeddings(self):
            return self.out

    class Silent(Language):
        get_output_embeddings = None

    for language in (Language(True), Language(False), Silent(True)):
        report = convert_module(nn.DataParallel(language), "nvfp4")
        assert [c.name for c in report.converted] == ["inner"] and type(language.out) is nn.Linear
        assert reasons(report)["out"] == 'an output head; head="convert" takes it too'
        assert [c.name for c in convert_module(language, "nvfp4", head="convert").converted] == ["inner", "out"]
    assert [c.name for c in convert_module(Silent(False), "nvfp4").converted] == ["inner", "out"]
    rules = nvfp4.Recipe.from_toml('[[rule]]\npath = "lm_head"\nspec = "high-precision"\n[default]\npreset = "nvfp4"')
    assert convert_module(nn.ModuleDict({"lm_head": nn.Linear(64, 64)}), rules).warnings == []
    with pytest.raises(ValueError, match="unknown head 'yes'; there are 'leave', 'convert'"):
        convert_module(model(), "nvfp4", head="yes")


def test_names_that_only_heads_have():
    names = ["lm_head", "output_layer", "embed_out", "v_head", "shared_head"]
    whole = nn.ModuleDict({name: nn.Linear(64, 64) for name in names})
    inner = nn.ModuleDict({"lm_head": nn.ModuleDict({"dense": nn.Linear(64, 64)}), "head_proj": nn.Linear(64, 64)})
    report = convert_module(nn.ModuleDict({"a": whole, "b": inner}), "nvfp4")
    assert [c.name for c in report.converted] == ["b.head_proj"]
    assert set(reasons(report)) == {*(f"a.{name}" for name in names), "b.lm_head.dense"}


def test_a_filter_is_asked_about_every_module_with_matrices_and_the_report_says_what_it_left():
    def whole():
        return nn.ModuleDict({"table": nn.Embedding(96, 64), "attention": nn.MultiheadAttention(64, 4), "fc": nn.Linear(64, 64)})

    asked = []
    with pytest.warns(UserWarning, match="could not be converted: attention"):
        report = convert_module(whole(), "nvfp4", filter_fn=lambda module, name: asked.append((type(module), name)) or True)
    linear = nn.modules.linear.NonDynamicallyQuantizableLinear
    modules = [(nn.Embedding, "table"), (nn.MultiheadAttention, "attention"), (linear, "attention.out_proj"), (nn.Linear, "fc")]
    assert asked == modules and [c.name for c in report.converted] == ["fc"]
    assert reasons(report)["table"] == "a table, not a product"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = convert_module(whole(), "nvfp4", filter_fn=lambda module, name: name == "fc")
    assert [c.name for c in report.converted] == ["fc"]
    assert set(reasons(report).values()) == {"filter_fn leaves it"}
    untouched = whole()
    with pytest.raises(ValueError, match=r"filter_fn\(module, 'table'\) on Embedding raised AttributeError: .*in_features") as raised:
        convert_module(untouched, "nvfp4", filter_fn=lambda module, name: module.in_features > 1)
    assert isinstance(raised.value.__cause__, AttributeError) and type(untouched["fc"]) is nn.Linear
    with pytest.raises(ValueError, match=r"it is called as filter_fn\(module, name\)"):
        convert_module(untouched, "nvfp4", filter_fn=lambda name: True)
    with pytest.raises(TypeError, match=r"filter_fn: expected a function of \(module, name\), got str"):
        convert_module(untouched, "nvfp4", filter_fn="fc")


def test_rules_know_models_in_wrappers_by_their_own_names():
    rules = nvfp4.Recipe.from_toml('[[rule]]\npath = "2"\nspec = "high-precision"\n[default]\npreset = "nvfp4"')
    for wrapped in (torch.compile(model()), nn.DataParallel(model()), torch.compile(nn.DataParallel(model()))):
        names = []
        report = convert_module(wrapped, rules, filter_fn=lambda module, name: names.append(name) or True)
        assert [c.name for c in report.converted] == ["0", "3"] and names == ["0", "2", "3"]
        assert report.warnings == []
    own = nn.ModuleDict({"module": nn.Linear(64, 64)})
    assert [c.name for c in convert_module(own, "nvfp4").converted] == ["module"]


def test_one_layer_under_two_names_stays_one():
    shared = nn.Linear(64, 64)
    both = nn.ModuleDict({"a": shared, "b": shared, "other": nn.Linear(64, 64)})
    held = [both["a"]]
    convert_module(both, "nvfp4")
    assert both["a"] is both["b"] is held[0] and isinstance(held[0], nvfp4.torch.Linear)


def test_hooks_and_attributes_stay():
    layer, calls = nn.Linear(64, 64), []
    layer.my_tag = "kept"
    layer.register_forward_pre_hook(lambda *args: calls.append("before"))
    layer.register_forward_hook(lambda *args: calls.append("after"))
    layer.register_full_backward_hook(lambda *args: calls.append("backward"))
    layer.eval()
    convert_module(nn.Sequential(layer), "nvfp4")
    layer(torch.randn(32, 64, requires_grad=True)).sum().backward()
    assert calls == ["before", "after", "backward"] and layer.my_tag == "kept" and not layer.training


def test_subclasses_keep_what_is_theirs(tmp_path):
    whole = nn.Sequential(Named(64))
    twin = nvfp4.torch.Linear(64, 64)
    twin.load_state_dict(whole[0].state_dict())
    report = convert_module(whole, "nvfp4")
    assert [c.name for c in report.converted] == ["0"]
    layer, x = whole[0], torch.randn(32, 64)
    assert isinstance(layer, Named) and isinstance(layer, nvfp4.torch.Linear) and layer.described() == "mine 64"
    assert same(step(layer, x), step(twin, x))
    torch.save(whole, tmp_path / "model.pt")
    for again in (copy.deepcopy(whole), pickle.loads(pickle.dumps(whole)), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert again[0].described() == "mine 64" and same(step(again, x), step(layer, x))


def test_transposed_layers_of_transformers():
    torch.manual_seed(0)
    whole, twin, x = nn.Sequential(Conv1D(48, 64)), nvfp4.torch.Linear(64, 48), torch.randn(32, 64)
    twin.load_state_dict({"weight": whole[0].weight.t(), "bias": whole[0].bias})
    keys = list(whole.state_dict())
    assert [c.name for c in convert_module(whole, "nvfp4").converted] == ["0"]
    assert list(whole.state_dict()) == keys and isinstance(whole[0], Conv1D)
    (y, dx, dw, db), expected = step(whole, x), step(twin, x)
    assert same([y, dx, dw.t(), db], expected)
    assert same(step(copy.deepcopy(whole), x), step(whole, x))


def test_a_converted_model_goes_over_to_another_recipe():
    converted, x = model(), torch.randn(32, 64)
    convert_module(converted, "nvfp4")
    report = convert_module(converted, "mxfp8")
    fresh = convert_module(model(), "mxfp8").model
    assert [c.name for c in report.converted] == ["0", "2", "3"] and same(step(converted, x), step(fresh, x))
    report = convert_module(converted, "high_precision")
    assert report.converted == [] and set(reasons(report).values()) == {"the recipe leaves it in high precision"}
    assert same(step(converted, x), step(model(), x))
    made = nn.ModuleDict({"mlp": nvfp4.torch.LayerNormMLP(64, 96), "experts": nvfp4.torch.GroupedLinear(2, 64, 48)})
    rules = '[[rule]]\npath = "mlp.fc2"\nspec = "high-precision"\n[default]\npreset = "mxfp8"'
    report = convert_module(made, nvfp4.Recipe.from_toml(rules))
    assert [c.name for c in report.converted] == ["mlp", "experts"] and report.warnings == []
    specs = [made["mlp"].fc1_formats, made["mlp"].fc2_formats, *made["experts"].formats]
    assert [formats.weight.spec for formats in specs] == ["mxfp8(e4m3)", "high-precision", "mxfp8(e4m3)", "mxfp8(e4m3)"]


@pytest.mark.filterwarnings("ignore:.*could not be converted")
@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_encoder_layers_take_no_way_past_the_quantized_layers(monkeypatch):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    for whole, mask in ((layer, None), (nn.TransformerEncoder(layer, 2), torch.arange(16)[None] >= torch.tensor([[16], [9]]))):
        plain, x = copy.deepcopy(whole).eval(), torch.randn(2, 16, 64)
        convert_module(whole, "nvfp4")
        whole.eval()
        monkeypatch.undo()
        with torch.no_grad():
            unquantized = plain(x, src_key_padding_mask=mask)
        monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", None)
        expected = whole(x, src_key_padding_mask=mask).detach()
        with torch.no_grad():
            y = whole(x, src_key_padding_mask=mask)
            again = copy.deepcopy(whole)(x, src_key_padding_mask=mask)
        kept = slice(0, 9)  # what is masked may be anything
        assert torch.equal(y, again)
        error = (y - expected)[:, kept].norm() / expected[:, kept].norm()
        assert error < 0.02 < (unquantized - expected)[:, kept].norm() / expected[:, kept].norm(), error
