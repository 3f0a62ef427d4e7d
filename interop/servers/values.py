"""The values of vLLM's parameters, and whether they are those of a model that is not quantized."""

import torch

from loader import unfilled

CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def spread(scales, shape):
    """Each scale, for every value of its tile."""
    for axis in (-2, -1):
        tile = -(-shape[axis] // scales.shape[axis])
        scales = scales.repeat_interleave(tile, axis).narrow(axis, 0, shape[axis])
    return scales


def one(scales, experts):
    """One scale per matrix, of those that were joined into it: they have to be equal."""
    rows = scales.float().reshape(experts, -1)
    assert (rows == rows[:, :1]).all(), f"scales of joined weights differ: {rows[0].tolist()}"
    return rows[:, 0]


def of_rows(scales, codes):
    """The scale of every row. FP8 per tensor keeps one for each matrix that was joined; vLLM requantizes to the largest afterwards."""
    rows, scales = codes.shape[-2], scales.float().reshape(*codes.shape[:-2], -1)
    count = scales.shape[-1]
    if count in (1, rows):
        return scales.unsqueeze(-1)
    widths = torch.tensor(getattr(codes, "joined", [rows // count] * count))
    return scales.repeat_interleave(widths, -1).unsqueeze(-1)


def decoded(parameters, name):
    """The values of the matrix, or the experts' matrices, `name`."""
    find = lambda *endings: next((parameters[name + e] for e in endings if name + e in parameters), None)
    codes, scales, whole = find("", "_packed"), find("_scale", "_scale_inv"), find("_scale_2", "_global_scale")
    experts = codes.shape[0] if codes.ndim == 3 else 1
    if codes.dtype == torch.uint8:
        values = CODES[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    else:
        values = codes.float()
    if scales.dtype == torch.uint8:  # E8M0, of MXFP8 and MXFP4
        scales = torch.exp2(scales.float() - 127)
    scales = scales.float()
    if whole is not None:
        whole = one(whole, experts).view(-1, 1, 1) if codes.ndim == 3 else one(whole, 1)
        scales = scales / whole if name + "_global_scale" in parameters else scales * whole
    elif scales.ndim < codes.ndim:
        scales = of_rows(scales, codes)
    return values * spread(scales, values.shape)


# vLLM makes these for NVFP4 weights without activation scales too, and drops them.
OF_INPUTS = ("input_scale", "input_global_scale")


def is_dropped(name, parameters):
    """Whether a parameter is an activation scale that no product of NVFP4 weights alone takes."""
    weight = parameters.get(name.removesuffix("input_scale") + "weight")
    return name.endswith(OF_INPUTS) and (weight is None or weight.dtype != torch.float8_e4m3fn)


def compare(quantized, plain, activations):
    """What vLLM read from a checkpoint beside what it read from the same, decoded to BF16: problems, and the number of quantized matrices."""
    used = {name: value for name, value in quantized.items() if activations or not is_dropped(name, quantized)}
    problems = [f"{name} is not filled" for name, parameter in used.items() if unfilled(parameter)]
    count = 0
    for name, expected in plain.items():
        found = quantized.get(name)
        if found is not None and found.dtype == expected.dtype:
            same = found.shape == expected.shape and torch.equal(found, expected)
        else:
            count += 1
            try:
                # The decoded file is BF16, whatever type vLLM gives its parameters.
                same = torch.equal(decoded(quantized, name).to(torch.bfloat16).to(expected.dtype), expected)
            except Exception as error:
                problems.append(f"{name}: {type(error).__name__} {error}")
                continue
        if not same:
            problems.append(f"{name} has other values")
    return problems, count
