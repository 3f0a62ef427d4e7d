"""Gradients of weights that wait for ``backward_dw()``."""

import copy
import pickle

import pytest
import torch

import nvfp4.te as te

MODULES = {
    "Linear": lambda **given: te.Linear(64, 48, **given),
    "LayerNormLinear": lambda **given: te.LayerNormLinear(64, 48, **given),
    "LayerNormMLP": lambda **given: te.LayerNormMLP(64, 96, **given),
    "GroupedLinear": lambda **given: te.GroupedLinear(3, 64, 48, **given),
}
RECIPES = ["high_precision", "mxfp8", "current_scaling", "delayed_scaling", "nvfp4_1d_weight"]
RECIPES += ["high_precision_fwd_mxfp8_bwd"]


def made(name, **given):
    torch.manual_seed(0)
    return MODULES[name](**given)


def passed(module, seed, recipe="mxfp8", tokens=40):
    """A forward and a backward pass. Gives the input's gradient."""
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    torch.manual_seed(seed)  # for stochastic rounding
    more = ([24, 0, 16],) if isinstance(module, te.GroupedLinear) else ()
    with te.autocast(recipe=recipe):
        y = module(x, *more)
    y.sin().sum().backward()
    return x.grad


def weights(module):
    named = dict(module.named_parameters())
    return {name: of for name, of in named.items() if "weight" in name and "norm" not in name}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_gradients_wait_and_are_the_same(name, recipe):
    module, other = made(name, delay_wgrad_compute=True), made(name)
    assert module.need_backward_dw() and not other.need_backward_dw()
    dx = passed(module, 1, recipe)
    torch.testing.assert_close(dx, passed(other, 1, recipe), rtol=0, atol=0)
    assert all(weight.grad is None for weight in weights(module).values())
    module.backward_dw()
    other.backward_dw()  # does nothing
    for one, two in zip(module.parameters(), other.parameters()):
        torch.testing.assert_close(one.grad, two.grad, rtol=0, atol=0)


@pytest.mark.parametrize("name", MODULES)
def test_each_call_is_for_one_backward_pass(name):
    """The first first, and gradients are added."""
    module, hooked = made(name, delay_wgrad_compute=True), []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: hooked.append(1))
    alone = []
    for seed in (1, 2):
        other = made(name)
        passed(other, seed)
        alone.append([weight.grad for weight in weights(other).values()])
        passed(module, seed)
    module.backward_dw()
    found = list(weights(module).values())
    for weight, first in zip(found, alone[0]):
        torch.testing.assert_close(weight.grad, first, rtol=0, atol=0)
    module.backward_dw()
    for weight, first, second in zip(found, *alone):
        torch.testing.assert_close(weight.grad, first + second, rtol=0, atol=0)
    assert len(hooked) == 2
    with pytest.raises(RuntimeError, match=r"backward_dw\(\) has nothing to compute"):
        module.backward_dw()


def test_gradients_go_into_main_grad():
    module = made("Linear", delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    other = made("Linear")
    module.weight.main_grad = torch.zeros(48, 64)
    passed(module, 1)
    assert module.weight.main_grad.count_nonzero() == 0 and module.weight.skip_backward_post_hook
    module.backward_dw()
    passed(other, 1)
    torch.testing.assert_close(module.weight.main_grad, other.weight.grad, rtol=0, atol=0)
    assert module.weight.grad is None


def test_copies_have_nothing_to_compute():
    module = made("Linear", delay_wgrad_compute=True)
    passed(module, 1)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with pytest.raises(RuntimeError):
            other.backward_dw()
        passed(other, 1)
        other.backward_dw()
    module.backward_dw()
    torch.testing.assert_close(other.weight.grad, module.weight.grad, rtol=0, atol=0)


def test_a_frozen_weight_has_nothing_to_wait_for():
    module = made("LayerNormMLP", delay_wgrad_compute=True)
    module.fc2_weight.requires_grad_(False)
    passed(module, 1)
    module.backward_dw()
    assert module.fc1_weight.grad is not None and module.fc2_weight.grad is None


def test_compiled_modules_leave_the_graph_for_it():
    torch._dynamo.reset()
    module, other = made("Linear", delay_wgrad_compute=True), made("Linear")
    passed(torch.compile(module, backend="eager"), 1)
    module.backward_dw()
    passed(other, 1)
    torch.testing.assert_close(module.weight.grad, other.weight.grad, rtol=0, atol=0)


def test_weights_of_codes_wait_too():
    recipe, grads = te.MXFP8BlockScaling(), []
    for delayed in (True, False):
        torch.manual_seed(0)
        with te.quantized_model_init(recipe=recipe):
            module = te.Linear(64, 48, delay_wgrad_compute=delayed)
        passed(module, 1, recipe)
        assert (module.weight.grad is None) is delayed
        module.backward_dw()
        grads.append(module.weight.grad)
    torch.testing.assert_close(*grads, rtol=0, atol=0)
