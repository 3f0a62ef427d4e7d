"""TransformerEngine's optimizers and its loss, against torch's."""

import pytest
import torch
from torch.nn import functional

import nvfp4.te as te
from nvfp4.te._masters import quantize_master_weights, replace_raw_data
from nvfp4.te.optimizers import FusedAdam, FusedSGD, multi_tensor_applier


def trained(make, steps=4, dtype=torch.float32):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(*shape).to(dtype)) for shape in ((8, 16), (3,))]
    optimizer = make(parameters)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
        optimizer.step()
        optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in parameters)
    return parameters, optimizer


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (lambda p: FusedAdam(p, lr=0.1, weight_decay=0.2), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2)),
        (
            lambda p: FusedAdam(p, lr=0.1, weight_decay=0.2, adam_w_mode=False),
            lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.2),
        ),
        (
            lambda p: FusedSGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        ),
        (
            lambda p: FusedSGD(p, lr=0.1, momentum=0.9, nesterov=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        ),
    ],
    ids=["AdamW", "Adam", "SGD", "Nesterov"],
)  # fmt: skip
def test_optimizers_are_torchs(ours, theirs):
    for found, expected in zip(trained(ours)[0], trained(theirs)[0]):
        torch.testing.assert_close(found, expected)


def test_masters_keep_what_a_small_type_loses():
    small, optimizer = trained(
        lambda p: FusedAdam(p, lr=1e-4, master_weights=True, exp_avg_dtype=torch.bfloat16),
        8,
        torch.bfloat16,
    )
    state = optimizer.state[small[0]]
    assert state["master_param"].dtype == torch.float32 and state["exp_avg"].dtype == torch.bfloat16
    assert torch.equal(state["master_param"].bfloat16(), small[0])
    again = FusedAdam(small, master_weights=True)
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again.get_unscaled_state(small[0], "master_param"), state["master_param"])
    assert (
        again.state[small[0]]["exp_avg"].dtype == torch.bfloat16
        and again.param_groups[0]["step"] == 8
    )


def test_weights_of_codes_stay_codes():
    with te.quantized_model_init(recipe=te.MXFP8BlockScaling(enable_2d_quantization=True)):
        layer = te.Linear(64, 64)
    before = layer.weight.dequantize().clone()
    optimizer = FusedAdam(layer.parameters(), lr=0.1, master_weights=True)
    with te.autocast(recipe=te.MXFP8BlockScaling(enable_2d_quantization=True)):
        layer(torch.randn(32, 64)).sum().backward()
    optimizer.step()
    assert type(layer.weight.data) is type(layer.weight) and not torch.equal(
        layer.weight.dequantize(), before
    )


@pytest.mark.parametrize(
    "recipe", [te.MXFP8BlockScaling(), te.NVFP4BlockScaling(), te.Float8CurrentScaling()]
)
def test_codes_need_masters(recipe):
    """Codes alone would forget changes that are smaller than their steps."""
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(64, 64)
    before = layer.weight.dequantize().clone()
    layer.weight.grad = torch.ones(64, 64)
    with pytest.raises(RuntimeError, match="FusedAdam without master_weights .*=True"):
        FusedAdam(layer.parameters(), lr=0.1).step()
    assert torch.equal(layer.weight.dequantize(), before)
    quantizer = te.Float8Quantizer(torch.ones(1), torch.zeros(1), te.DType.kFloat8E4M3)
    weight = torch.nn.Parameter(quantizer(torch.ones(64, 64)))
    weight.grad = torch.ones(64, 64)
    FusedAdam([weight], lr=0.5).step()
    assert torch.equal(weight.dequantize(), torch.full((64, 64), 0.5))


def test_what_optimizers_do_not_take_is_named():
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    with pytest.raises(NotImplementedError, match="capturable"):
        FusedAdam(parameters, capturable=True)
    with pytest.raises(NotImplementedError, match="exp_avg_dtype in FP8"):
        FusedAdam(parameters, exp_avg_dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="AMSGrad"):
        FusedAdam(parameters, amsgrad=True)
    with pytest.raises(ValueError, match="Invalid momentum value: -1"):
        FusedSGD(parameters, lr=0.1, momentum=-1)
    with pytest.raises(RuntimeError, match="list 1 is not as long"):
        multi_tensor_applier(lambda *_: None, torch.zeros(1), [[1], []])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduce", [False, True])
def test_the_loss_is_torchs(smoothing, reduce):
    torch.manual_seed(0)
    logits = torch.randn(4, 8, 50, requires_grad=True)
    target = torch.randint(50, (4, 8))
    target[0, :3] = -100
    loss = te.parallel_cross_entropy(logits, target, smoothing, reduce)
    expected = functional.cross_entropy(
        logits.flatten(0, 1),
        target.flatten(),
        label_smoothing=smoothing,
        reduction="mean" if reduce else "none",
    )
    torch.testing.assert_close(loss.flatten(), expected.flatten())
    weights = torch.rand_like(loss)
    (found,) = torch.autograd.grad((loss * weights).sum(), logits)
    (true,) = torch.autograd.grad((expected.reshape(loss.shape) * weights).sum(), logits)
    torch.testing.assert_close(found, true)


def test_workers_share_a_vocabulary(tmp_path):
    """Each of two processes has half of the logits."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [
        context.Process(target=_half, args=(rank, queue, f"file://{tmp_path}/store"))
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    halves = dict(queue.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join()
    logits, target = _example()
    expected = functional.cross_entropy(logits, target, label_smoothing=0.1, reduction="none")
    expected.sum().backward()
    for loss, _ in halves.values():
        torch.testing.assert_close(torch.tensor(loss), expected.detach())
    found = torch.cat([torch.tensor(halves[rank][1]) for rank in range(2)], dim=-1)
    torch.testing.assert_close(found, logits.grad)


_RECIPES = (
    te.MXFP8BlockScaling(), te.NVFP4BlockScaling(), te.Float8CurrentScaling(),
    te.Float8BlockScaling(),
)  # fmt: skip


def _weights():
    weights = []
    for recipe in _RECIPES:
        with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
            weights.append(te.Linear(64, 32, params_dtype=torch.bfloat16).weight)
    return weights, [torch.randn(64 * 32, generator=torch.Generator().manual_seed(2))] * 4


def test_weights_are_quantized_from_their_masters():
    weights, masters = _weights()
    quantize_master_weights(weights, masters, [0] * 4, None)
    for weight, master in zip(weights, masters):
        expected = weight._quantizer.copy()(master.bfloat16().reshape(32, 64))
        assert torch.equal(weight.dequantize(), expected.dequantize())
        assert weight.get_high_precision_init_val() is None
    before = weights[0].dequantize()
    quantize_master_weights(weights[:1], [None], [None], None)
    assert torch.equal(weights[0].dequantize(), before)
    for master, start, says in (
        (masters[0][5:], 5, r"master_weights\[0\]: a partial master shard, 2043 of 2048"),
        (masters[0], 1, r"start_offsets\[0\]: 2048 values from 1 on"),
    ):
        with pytest.raises(ValueError, match=says):
            quantize_master_weights(weights[:1], [master], [start], None)
    with pytest.raises(NotImplementedError, match="fsdp_shard_model_weights"):
        quantize_master_weights(weights[:1], masters[:1], [0], None, weights[:1])
    for weight in weights:
        values, codes = weight.dequantize(), weight.get_data_tensors(columnwise_data=False)
        buffer = torch.zeros_like(codes)
        replace_raw_data(weight, buffer)
        assert weight.get_data_tensors(columnwise_data=False) is buffer
        assert torch.equal(weight.dequantize(), values)
        with pytest.raises(ValueError, match="torch.uint8 and torch.float32"):
            replace_raw_data(weight, buffer.float())


def test_a_state_begins_before_a_step():
    weight = torch.nn.Parameter(torch.randn(8, 8).bfloat16())
    optimizer = te.optimizers.FusedAdam([weight], master_weights=True, exp_avg_dtype=torch.bfloat16)
    for _ in range(2):  # the second time it begins again
        optimizer.initialize_state(weight, False)
        assert {name: of.dtype for name, of in optimizer.state[weight].items()} == {
            "exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32, "master_param": torch.float32,
        }  # fmt: skip
        assert torch.equal(optimizer.state[weight]["master_param"], weight.detach().float())
        assert not optimizer.state[weight]["exp_avg"].any()
        assert optimizer.get_unscaled_state(weight, "exp_avg").dtype == torch.float32
        kept = optimizer.get_unscaled_state(weight, "exp_avg", skip_unscale=True)
        assert kept is optimizer.state[weight]["exp_avg"]
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    with pytest.raises(NotImplementedError, match="initialize_state: the argument store_param_remainders"):
        optimizer.initialize_state(weight, True)


def test_both_directions_need_all_of_a_master():
    current = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device=None)
    for source in ("original", "rowwise_dequantized"):
        quantizer = te.HybridQuantizer(
            rowwise_quantizer=current, columnwise_quantizer=current.copy(), columnwise_source=source
        )
        weight = quantizer(torch.randn(32, 64))
        before = weight.dequantize()
        with pytest.raises(ValueError, match=f"partial master shard, 2043 .*columnwise_source='{source}'.* full-master data"):
            quantize_master_weights([weight], [torch.randn(2043)], [5], None)
        assert torch.equal(weight.dequantize(), before)


def test_values_without_a_master_keep_their_codes():
    """In formats without a scale, or with one for all: it is that of the values that are there."""
    master = torch.randn(17, generator=torch.Generator().manual_seed(3))
    there = torch.zeros(32, dtype=torch.bool)
    there[5:22] = True
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    plain = te.IdentityQuantizer()(x)
    quantize_master_weights([plain], [master], [5], None)
    assert torch.equal(plain.dequantize().flatten()[there], master.bfloat16())
    assert torch.equal(plain.dequantize().flatten()[~there], x.flatten()[~there])
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device="cpu")
    weight = quantizer(x)
    weight._create_transpose()
    before = weight._data.clone()
    quantize_master_weights([weight], [master], [5], None)
    expected = quantizer(master.bfloat16().reshape(1, -1))
    assert torch.equal(weight._data.flatten()[there], expected._data.flatten())
    assert torch.equal(weight._data.flatten()[~there], before.flatten()[~there])
    assert torch.equal(weight._transpose, weight._data.t())
    assert torch.equal(weight._scale_inv, expected._scale_inv)


def test_workers_hold_parts_of_masters(tmp_path):
    """Each of two processes has a part, which may be nothing; both get the codes of all."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [
        context.Process(target=_part, args=(rank, queue, f"file://{tmp_path}/masters"))
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    found = [queue.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    weights, masters = _weights()
    quantize_master_weights(weights, masters, [0] * 4, None)
    expected = [weight.dequantize().tolist() for weight in weights]
    assert found == [expected, expected]


def _part(rank, queue, store):
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    weights, masters = _weights()
    cuts = (0, 700, 2048, 1024)
    parts = [master[:cut] if rank == 0 else master[cut:] for master, cut in zip(masters, cuts)]
    starts = [0 if rank == 0 else cut for cut in cuts]
    given = [part if part.numel() else None for part in parts]
    quantize_master_weights(weights, given, starts, torch.distributed.group.WORLD)
    queue.put([weight.dequantize().tolist() for weight in weights])
    torch.distributed.destroy_process_group()


def _example():
    torch.manual_seed(1)
    return torch.randn(6, 20, requires_grad=True), torch.randint(20, (6,))


def _half(rank, queue, store):
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    logits, target = _example()
    mine = logits.detach().chunk(2, -1)[rank].clone().requires_grad_()
    loss = te.parallel_cross_entropy(mine, target, 0.1, False, torch.distributed.group.WORLD)
    loss.sum().backward()
    queue.put((rank, (loss.tolist(), mine.grad.tolist())))
    torch.distributed.destroy_process_group()
