"""torchao's ``NVFP4Tensor`` and our tensors over each other's bytes, and torchao's rounding modes."""

import enum
import subprocess
import sys

import pytest
import torch
from test_docs import ROOT, blocks
from torchao.prototype.mx_formats import nvfp4_tensor as theirs

import nvfp4
import nvfp4.torch
from nvfp4.torch import from_torchao, quantize_torchao, to_torchao

SHAPES = [(1, 16), (5, 48), (200, 320), (256, 64), (2, 4, 64), (3, 128, 64)]


def matrix(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def scale_of(x):
    return theirs.per_tensor_amax_to_scale(x.abs().max())


def same(a, b):
    """Whether two of torchao's tensors have the same bytes and settings."""
    scales = [(t.per_tensor_scale, t.act_per_tensor_scale) for t in (a, b)]
    return (
        type(a)._same_metadata(a, b)
        and torch.equal(a.qdata, b.qdata)
        and torch.equal(a.scale.view(torch.uint8), b.scale.view(torch.uint8))
        and all((x is None and y is None) or torch.equal(x, y) for x, y in zip(*scales))
    )


@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("shape", SHAPES)
def test_ours_as_theirs_and_back_is_no_copy_and_decodes_to_the_same_bits(shape, layout):
    x = matrix(*shape, dtype=torch.bfloat16)
    q = nvfp4.quantize(x, profile="torchao", layout=layout)
    if shape == (2, 4, 64) and layout == "swizzled":
        with pytest.raises(
            ValueError,
            match=r'q: .*matrices of 4 rows share swizzled tiles.*use q.with_layout\("linear"\)',
        ):
            to_torchao(q)
        return
    made = to_torchao(q)
    lent = q.row._parts()
    assert [made.qdata.data_ptr(), made.scale.data_ptr(), made.per_tensor_scale.data_ptr()] == [
        a.data_ptr() for a in lent
    ]
    assert (made.shape, made.dtype, made.is_swizzled_scales) == (
        x.shape,
        torch.bfloat16,
        layout == "swizzled",
    )
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(made.dequantize(dtype), q.dequantize(dtype))
    assert from_torchao(made) == q
    del q
    assert from_torchao(made) == nvfp4.quantize(x, profile="torchao", layout=layout), (
        "it keeps the memory alive"
    )


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_theirs_as_ours_decodes_to_the_same_bits_and_goes_back(shape, swizzled):
    if shape == (2, 4, 64):
        swizzled = False  # torchao makes no swizzled scales of this shape
    x = matrix(*shape)
    for scale in (None, scale_of(x)):
        given = theirs.NVFP4Tensor.to_nvfp4(
            x,
            per_tensor_scale=scale,
            act_per_tensor_scale=torch.tensor(0.25),
            is_swizzled_scales=swizzled,
            act_quant_kwargs=theirs.QuantizeTensorToNVFP4Kwargs(is_swizzled_scales=True),
        )
        q = from_torchao(given)
        assert q.shape == shape and q.row.unit == "multiplier"
        assert torch.equal(q.dequantize(), given.dequantize())
        back = to_torchao(q, like=given)
        if scale is None:  # it is 1 here, and None there
            assert back.per_tensor_scale == 1
            back.per_tensor_scale = None
        assert same(back, given) and torch.equal(back.dequantize(), given.dequantize())


def test_products_with_ours_are_products_with_theirs():
    weight, x = matrix(96, 64), matrix(8, 64)
    given = theirs.NVFP4Tensor.to_nvfp4(
        weight, per_tensor_scale=scale_of(weight), is_swizzled_scales=True
    )
    y = nvfp4.matmul(x, from_torchao(given))
    torch.testing.assert_close(y, torch.nn.functional.linear(x, given), rtol=1e-5, atol=1e-5)
    exact = x.double() @ given.dequantize().double().t()
    assert (y - exact).abs().max() <= 1e-6 * exact.abs().max()


def test_what_other_profiles_store_is_rounded_once_more():
    x = matrix(256, 512)
    rules = [
        {"profile": "modelopt"},
        {"profile": "llm-compressor"},
        {"scale_rule": "4over6-mse-strict-256"},
        {},
    ]
    for settings in rules:
        q = nvfp4.quantize(x, directions="both", **settings)
        made = to_torchao(q)
        ours, decoded = q.dequantize(), made.dequantize(torch.float32)
        assert torch.equal(made.qdata, q.codes) and torch.equal(
            made.scale.view(torch.uint8), q.scales
        )
        assert torch.equal(from_torchao(made).dequantize(), decoded)
        if settings.get("profile") == "modelopt":
            assert torch.equal(ours, decoded)
        assert ((ours - decoded).abs() <= 2**-22 * ours.abs()).all()
        if q.row.unit == "amax":
            bound = 256 if settings else 448
            assert torch.equal(made.per_tensor_scale.reshape(1), q.amax / (6 * bound))


@pytest.mark.parametrize(
    "settings, shape, message",
    [
        (
            {"global_scale": "row-scaled"},
            (32, 64),
            'a 32-bit scale for each row; quantize with global_scale="per-tensor"',
        ),
        (
            {"directions": "column"},
            (32, 64),
            'the column direction alone; quantize with directions="row" or "both"',
        ),
        ({"spec": "mxfp8"}, (32, 64), "it is mxfp8.*; quantize it as nvfp4"),
        ({}, (32, 40), "a last dimension that is a multiple of 16, this has 40; pad it with zeros"),
        ({}, (64,), "2 or 3 dimensions, this has 1; reshape it before"),
        ({}, (2, 2, 2, 64), "2 or 3 dimensions, this has 4; reshape it before"),
    ],
)
def test_what_torchao_cannot_hold_is_refused(settings, shape, message):
    with pytest.raises(ValueError, match=f"q: .*{message}"):
        to_torchao(nvfp4.quantize(matrix(*shape), **settings))


def test_other_things_are_refused_by_their_names():
    x = matrix(2, 32, 64)
    scales = torch.stack([scale_of(expert) for expert in x]).reshape(2, 1, 1)
    experts = theirs.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scales)
    with pytest.raises(
        ValueError, match=r"tensor: it has 2 scales, one per expert; .*from_torchao\(tensor\[0\]\)"
    ):
        from_torchao(experts)
    assert torch.equal(from_torchao(experts[1]).dequantize(), experts.dequantize()[1])
    few = theirs.NVFP4Tensor(
        experts.qdata, torch.zeros(2, 32, 16), 16, torch.float32, is_swizzled_scales=True
    )
    with pytest.raises(
        ValueError,
        match=r"tensor: .*each matrix of 32 rows; .*one by one, from_torchao\(tensor\[0\]\)",
    ):
        from_torchao(few)
    with pytest.raises(ValueError, match="tensor: it is a transposed view; give the tensor itself"):
        from_torchao(experts[1].t())
    with pytest.raises(TypeError, match="tensor: expected a torchao NVFP4Tensor, got torch.Tensor"):
        from_torchao(x)
    with pytest.raises(TypeError, match="q: expected an nvfp4.QuantTensor, got torch.Tensor"):
        to_torchao(x)
    with pytest.raises(TypeError, match="like: expected a torchao NVFP4Tensor, got torch.Tensor"):
        to_torchao(nvfp4.quantize(x), like=x)


def test_conversion_of_a_model_leaves_what_torchao_has_quantized():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    scale = scale_of(model[0].weight)
    weight = theirs.NVFP4Tensor.to_nvfp4(
        model[0].weight.detach(), per_tensor_scale=scale, is_swizzled_scales=True
    )
    model[0].weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.warns(
        UserWarning, match="could not be converted: 0: Linear, its weight is quantized already"
    ):
        report = nvfp4.torch.convert_module(model, "nvfp4")
    assert [layer.name for layer in report.converted] == ["1"]
    reason = (
        "its weight is quantized already, as torchao's NVFP4Tensor; "
        "convert the model before torchao does"
    )
    assert [layer.reason for layer in report.left] == [reason]
    model(torch.randn(16, 64)).sum().backward()


def test_torchao_need_not_be_there():
    program = (
        "import sys, torch; sys.modules['torchao'] = None\n"
        "import nvfp4, nvfp4.torch\n"
        "try: nvfp4.torch.to_torchao(nvfp4.quantize(torch.ones(16, 16)))\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(
        "this needs torchao with prototype.mx_formats: pip install torchao"
    )


class Mode(enum.Enum):
    """As torchao's enum has them."""

    RN = 0
    RS = 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != (2, 4, 64)])
def test_rn_has_the_bytes_of_torchao(shape, swizzled, dtype):
    x = matrix(*shape, dtype=dtype)
    kwargs = theirs.QuantizeTensorToNVFP4Kwargs(is_swizzled_scales=True)
    for scale in (None, scale_of(x), scale_of(3 * x), scale_of(x / 3)):
        expected = theirs.NVFP4Tensor.to_nvfp4(
            x, 16, scale, torch.tensor(0.5), swizzled, False, kwargs
        )
        for mode in ("rn", Mode.RN):
            assert same(
                quantize_torchao(
                    x, 16, scale, torch.tensor(0.5), swizzled, False, kwargs, rounding_mode=mode
                ),
                expected,
            )


def test_every_scale_that_torchao_makes_of_an_amax_is_kept():
    amaxes = (10 ** (20 * torch.rand(400, generator=torch.Generator().manual_seed(1)) - 10)).float()
    x = torch.ones(1, 16)
    for scale in theirs.per_tensor_amax_to_scale(amaxes):
        assert quantize_torchao(x, per_tensor_scale=scale).per_tensor_scale == scale
    other = torch.tensor(1.7).nextafter(torch.tensor(2.0))  # no float32 divided by 2688 is this one
    assert abs(quantize_torchao(x, per_tensor_scale=other).per_tensor_scale / other - 1) <= 2**-23


GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def steps(low, high, rows=64):
    """A column of a matrix for each k: what is k/256 on the way from one code to the next. The
    block's scale is 1, because its last element is 6.
    """
    x = torch.full((256, rows, 16), 6.0)
    x[:, :, :15] = (low + (high - low) * torch.arange(256) / 256)[:, None, None]
    return x


def ups(x, low, high, seed, offset):
    """Which elements became the upper code, for each k, with the same random bytes for all k."""
    drawn = [
        quantize_torchao(of_k, rounding_mode="rs", seed=seed, offset=offset).dequantize()[:, :15]
        for of_k in x
    ]
    decoded = torch.stack(drawn)
    assert ((decoded == low) | (decoded == high)).all()
    return decoded == high


def test_rs_goes_up_for_exactly_k_of_256_random_bytes_in_every_step_also_below_1():
    seed, offset = 7, 3
    first = ups(steps(2.0, 3.0), 2.0, 3.0, seed, offset)
    bytes_drawn = first.sum(0)  # k goes up where byte + k reaches 256
    assert bytes_drawn.unique().numel() > 230
    k = torch.arange(256)[:, None, None]
    for low, high in zip(GRID[:-1], GRID[1:]):
        up = ups(steps(low, high), low, high, seed, offset)
        assert torch.equal(up, bytes_drawn + k >= 256), (low, high)
        up = ups(-steps(low, high), -low, -high, seed, offset)
        assert torch.equal(up, bytes_drawn + k >= 256), (-low, -high)


def test_rs_has_no_bias_below_1():
    x = steps(0.0, 1.0, rows=2048)[::2]  # k/256 of 0.5 from 0 on, and from 0.5 on
    for offset, of_k in enumerate(x):
        sample = quantize_torchao(of_k, rounding_mode="rs", seed=11, offset=offset).dequantize()[
            :, :15
        ]
        value = of_k[0, 0]
        low = 0.0 if value < 0.5 else 0.5
        p = float((value - low) / 0.5)
        deviation = 0.5 * (p * (1 - p) / sample.numel()) ** 0.5
        assert abs(float(sample.mean() - value)) <= 5 * deviation, value


def test_rs_depends_on_seed_and_offset_alone():
    x = matrix(64, 64)

    def drawn(seed, offset, mode="rs"):
        return quantize_torchao(
            x, per_tensor_scale=scale_of(x), rounding_mode=mode, seed=seed, offset=offset
        )

    first = drawn(1, 2)
    assert (
        same(first, drawn(1, 2))
        and same(first, drawn(1, torch.tensor([2])))
        and same(first, drawn(1, 2, Mode.RS))
    )
    assert not torch.equal(first.qdata, drawn(1, 3).qdata) and not torch.equal(
        first.qdata, drawn(2, 2).qdata
    )
    q = nvfp4.quantize(x, profile="torchao", rounding="stochastic", seed=1, offset=2)
    assert same(first, to_torchao(q, dtype=torch.float32))


def test_the_codes_of_a_seed_and_an_offset_are_these():
    x = ((torch.arange(4096) - 2048).reshape(64, 64) / 512).t().contiguous()
    codes = quantize_torchao(
        x, per_tensor_scale=scale_of(x), rounding_mode="rs", seed=1, offset=2
    ).qdata
    counts = torch.bincount(torch.cat([codes & 15, codes >> 4]).flatten().long(), minlength=16)
    assert counts.tolist() == [
        43,
        79,
        83,
        92,
        116,
        345,
        761,
        529,
        41,
        85,
        79,
        85,
        127,
        313,
        801,
        517,
    ]


@pytest.mark.parametrize(
    "given, message",
    [
        ({"rounding_mode": "rz"}, "unknown rounding_mode 'rz'; there are 'rn', 'rs'"),
        ({"rounding_mode": "rs"}, "give a seed, and an offset that no other call has"),
        ({"seed": 1}, "leave out seed and offset, or use 'rs'"),
        ({"block_size": 32}, "block_size: NVFP4 has blocks of 16, got 32"),
        ({"data_hp": torch.ones(4, 40)}, "data_hp: .*multiple of 16, this has 40; pad it"),
        ({"per_tensor_scale": torch.ones(2, 1, 1)}, "per_tensor_scale: expected one number, got 2"),
        (
            {"data_hp": torch.ones(16, 16, dtype=torch.float64)},
            "data_hp: expected a tensor of float32.*got torch.float64",
        ),
        (
            {"data_hp": [1.0]},
            "data_hp: expected a tensor of float32, bfloat16 or float16, got builtins.list",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        quantize_torchao(**{"data_hp": torch.ones(16, 16), **given})


def test_the_example_of_the_guide_runs():
    (block,) = (block for block in blocks("docs/python.md") if "torchao" in block)
    exec(compile(block, "docs/python.md", "exec"), {})


def test_the_example_swaps_a_model_over_and_back():
    program = [sys.executable, str(ROOT / "examples/python/torchao_swap.py")]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    *lines, last = done.stdout.splitlines()
    assert len(lines) == 7 and all(line.endswith("  equal") for line in lines), done.stdout
    assert last.startswith("the model with nvfp4.matmul: ")
