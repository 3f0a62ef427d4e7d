"""What only a GPU can show: torch's tensors there, in and out on a side stream, with the CPU's bits; graphs; and what Python costs.

    python interop/python/gpu.py

needs torch 2.10 or newer with CUDA and a wheel of this package with the feature `cuda` (see README.md beside this file). Prints a line per
check and ends with an error if one fails.
"""

import copy
import multiprocessing
import pickle
import statistics
import threading
import time
from pathlib import Path

import torch

import nvfp4
import nvfp4.torch

import gpu_te

MODES = [
    {},
    {"directions": "both", "transform": "hadamard"},
    {"tile": "16x16", "directions": "both"},
    {"global_scale": "row-scaled"},
    {"scale_rule": "4over6-mse-strict-256"},
    {"layout": "swizzled"},
    {"rounding": "stochastic", "directions": "both", "transform": "hadamard"},
    {"profile": "modelopt"},
]
SPECS = ["mxfp8", "fp8", "fp8-block", "fp8-block(128x128)", "mxfp8 / nvfp4(hadamard)"]


def check(name, ok):
    print(f"{'ok' if ok else 'FAILED':<7} {name}", flush=True)
    if not ok:
        raise SystemExit(1)


def bits():
    """Same bytes as the CPU, made on a side stream from memory that this stream filled."""
    side = torch.cuda.Stream()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        host = torch.randn(256, 1024, generator=torch.Generator().manual_seed(1)).to(dtype)
        with torch.cuda.stream(side):
            x = host.cuda(non_blocking=True)
            for mode in MODES:
                drawn = {"seed": 5, "offset": 12} if mode.get("rounding") == "stochastic" else {}
                q = nvfp4.quantize(x, **mode, **drawn)
                expected = nvfp4.quantize(host, **mode, **drawn)
                check(f"{dtype} {mode or 'defaults'}", q == expected and q.codes.is_cuda)
            for spec in SPECS:
                quantizer = nvfp4.Quantizer(spec=spec, directions="both")
                check(f"{dtype} {spec}", quantizer.quantize(x) == quantizer.quantize(host))
            for view in (x.t(), x[:, 64:128], x.reshape(4, 64, 1024)[:, ::2], x[:0]):
                q = nvfp4.quantize(view)
                check(f"{dtype} strides {tuple(view.shape)}", q == nvfp4.quantize(view.cpu()))
            q = nvfp4.quantize(x)
            check(f"{dtype} decoded", torch.equal(q.dequantize(dtype).cpu(), nvfp4.quantize(host).dequantize(dtype)))
            own = q.row._parts()
            parts = nvfp4.QuantTensor.from_parts("nvfp4", q.shape, row=own)
            check(f"{dtype} from parts", parts == q and parts.row._parts()[0].data_ptr() == own[0].data_ptr())
            q.codes.zero_(), q.row.parts[1].zero_()
            check(f"{dtype} does not change with its arrays", q == nvfp4.quantize(x))
            amax = x.float().abs().max().reshape(1)
            check(f"{dtype} amax given on the GPU", nvfp4.quantize(x, amax=amax) == q)
    side.synchronize()


def products():
    """Sums on a GPU are within `nvfp4_spec::gemm::bound` of the exact ones: (K + 8)·2⁻²² of the sum of magnitudes.

    Tensor cores need K·2⁻²² of that. The rest, 32 roundings, is more than decoding does here (3 for each operand) and scales do there (4).
    """
    a, b = torch.randn(128, 512).bfloat16(), torch.randn(256, 512).bfloat16()
    for left, name in ((nvfp4.quantize(a), "nvfp4"), (a, "bf16")):
        values = (left.dequantize() if name == "nvfp4" else left).double()
        weights = nvfp4.quantize(b).dequantize().double()
        exact, bound = values @ weights.t(), (values.abs() @ weights.abs().t()) * (512 + 8) * 2**-22
        right = nvfp4.quantize(b.cuda())
        y = nvfp4.matmul(nvfp4.quantize(a.cuda()) if name == "nvfp4" else a.cuda(), right).cpu()
        check(f"{name} × nvfp4", bool(((y - exact).abs() <= bound).all()))


def accumulators():
    """Sums of FP8 on a GPU are within `nvfp4_spec::gemm::Accumulator::bound` of the exact ones, with a bias in the type of the result."""
    k = 512
    a, b, bias = torch.randn(128, k).bfloat16(), torch.randn(256, k).bfloat16(), torch.randn(256).bfloat16()
    sums = {"precise": (k + 8) * 2**-22}
    sums["split"] = 136 * 2**-13 + (k / 128 + 8) * 2**-22
    sums["fast"] = 34 * 2**-13 * k / 32 + (k / 128 + 8) * 2**-22
    for left, right in (("fp8", "fp8"), ("fp8(e5m2)", "fp8"), ("fp8-block", "fp8-block(128x128)"), ("mxfp8", "mxfp8")):
        one, other = nvfp4.Quantizer(spec=left).quantize(a), nvfp4.Quantizer(spec=right).quantize(b)
        values, weights = one.dequantize().double(), other.dequantize().double()
        exact, magnitude = values @ weights.t() + bias.double(), values.abs() @ weights.abs().t()
        there = nvfp4.Quantizer(spec=left).quantize(a.cuda()), nvfp4.Quantizer(spec=right).quantize(b.cuda())
        for name, bound in sums.items():
            y = nvfp4.matmul(*there, bias=bias.cuda(), dtype=torch.bfloat16, accumulator=name).cpu().double()
            # Decoding and scales are rounded to float32, the result to bfloat16.
            allowed = magnitude * (bound + 32 * 2**-24) + exact.abs() * 2**-8
            check(f"{left} × {right}, {name}", bool(((y - exact).abs() <= allowed).all()))


RECIPES = Path(__file__).resolve().parents[2] / "crates" / "cli" / "recipes"


def recipes():
    """Every preset, and every recipe file."""
    files = [(path.name, nvfp4.Recipe.from_file(path)) for path in sorted(RECIPES.glob("*.toml"))]
    assert files, f"no recipes in {RECIPES}"
    return [(name, nvfp4.Recipe(name)) for name in nvfp4.Recipe.presets()] + files


def gradients(module, x, dy):
    """One step: output and gradients, from the same random numbers each time."""
    torch.cuda.manual_seed(7)
    for parameter in module.parameters():
        parameter.grad = None
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(dy)
    return [y.detach(), x.grad] + [parameter.grad for parameter in module.parameters()]


def linear(recipe, inputs=256, outputs=128):
    return nvfp4.torch.Linear(inputs, outputs, recipe=recipe, device="cuda", dtype=torch.bfloat16)


def tokens(count, features):
    return torch.randn(count, features, device="cuda", dtype=torch.bfloat16)


def modules():
    """Every recipe trains a step, as it is and compiled, with the same numbers."""
    for name, recipe in recipes():
        module, x, dy = linear(recipe), tokens(128, 256), tokens(128, 128)
        eager = gradients(module, x, dy)
        check(f"a step of {name}", all(bool(made.isfinite().all()) for made in eager))
        torch._dynamo.reset()
        compiled = gradients(torch.compile(module, backend="aot_eager", fullgraph=True), x, dy)
        check(f"a compiled step of {name}", all(torch.equal(a, b) for a, b in zip(eager, compiled)))


def passes():
    """A pass in one operation has the bits of an operation for each tensor and each product, for any number of tokens, strides and a GPU's flags."""
    for name, recipe in recipes():
        whole = linear(recipe)
        if not whole.formats.trained:
            continue
        parts = copy.deepcopy(whole)
        parts.formats = parts.formats._replace(trained="", frozen="", evaluated="")
        parts._products = parts.products()
        for x in (tokens(128, 256), tokens(256, 128).t(), tokens(5, 256), tokens(0, 256), tokens(64, 256).reshape(2, 32, 256)):
            dy = tokens(x.shape[:-1].numel(), 128).reshape(*x.shape[:-1], 128)
            for given in (dy, dy[..., :1].expand(dy.shape)):
                same = all(torch.equal(a, b) for a, b in zip(gradients(whole, x, given), gradients(parts, x, given)))
                check(f"a pass of {name} is its parts, {tuple(x.shape)} with strides {given.stride()}", same)
            with torch.no_grad():
                check(f"an evaluation of {name}", torch.equal(whole(x), parts(x)))
        module, x, dy = linear(recipe), tokens(128, 256), tokens(128, 128)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor.cpu(), lambda tensor: tensor.cuda()):
            moved = gradients(module, x, dy)
        check(f"what {name} keeps may be moved to the host and back", len(kept) >= 2 and all(torch.equal(a, b) for a, b in zip(moved, gradients(module, x, dy))))


def captured(module, x, dy, stream):
    """A graph of a step, what it makes, and what it reads, which must stay."""
    x, dy = x.detach().clone().requires_grad_(), dy.clone()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            module(x).backward(dy)
    torch.cuda.current_stream().wait_stream(stream)
    x.grad = None
    for parameter in module.parameters():
        parameter.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = module(x)
        y.backward(dy)
    return graph, [y.detach(), x.grad] + [parameter.grad for parameter in module.parameters()], (x, dy)


def replay(graph, made):
    for tensor in made[1:]:
        tensor.zero_()
    torch.cuda.manual_seed(7)
    graph.replay()
    torch.cuda.current_stream().synchronize()


def graphs_of_modules():
    """A captured step replays to the numbers of an eager one, also after larger work on the stream of the capture."""
    stream, large = torch.cuda.Stream(), linear("nvfp4", 4096, 8192)
    for name, recipe in recipes():
        module, x, dy = linear(recipe), tokens(128, 256), tokens(128, 128)
        graph, made, read = captured(module, x, dy, stream)
        expected = [tensor.clone() for tensor in gradients(module, x, dy)]
        for round in range(3):
            with torch.cuda.stream(stream):
                large(tokens(4096 << round, 4096)).sum().backward()
            stream.synchronize()
            with torch.cuda.stream(stream):
                replay(graph, made)
            check(f"replay {round} of {name}", all(torch.equal(a, b) for a, b in zip(made, expected)))
        del read


def values():
    """Products of many tokens read values that quantization writes instead of codes: an eager step, one from kept codes, a compiled one
    and a captured one, whose bias gradient is summed beside the rest, have the same bits. Outputs are those of the decoded operands.
    """
    for inputs, outputs in ((1024, 512), (512, 1024)):
        module, x, dy = linear("nvfp4", inputs, outputs), tokens(2048, inputs), tokens(2048, outputs)
        first = gradients(module, x, dy)
        same = lambda made: all(torch.equal(a, b) for a, b in zip(first, made))
        check(f"{inputs} to {outputs} from kept codes", same(gradients(module, x, dy)))
        torch._dynamo.reset()
        check(f"{inputs} to {outputs} compiled", same(gradients(torch.compile(module, backend="aot_eager", fullgraph=True), x, dy)))
        stream = torch.cuda.Stream()
        graph, made, read = captured(module, x, dy, stream)
        for _ in range(3):
            with torch.cuda.stream(stream):
                replay(graph, made)
            check(f"{inputs} to {outputs} replayed", same(made))
        del read
        left, right = (nvfp4.quantize(t.detach(), tile=tile).dequantize(torch.float32).double() for t, tile in ((x, "1x16"), (module.weight, "16x16")))
        exact, magnitude = left @ right.t() + module.bias, left.abs() @ right.abs().t()
        check(f"{inputs} to {outputs} within the bound", bool(((first[0] - exact).abs() <= magnitude * 2**-14 + exact.abs() * 2**-8 + 2**-8).all()))


def experts():
    """Experts in one launch multiply what they multiply one after the other: the results differ by the order of sums, and by
    their rounding. Codes that are kept, a capture and a step from moved tensors change no bit; a changed weight is seen.
    """
    nearest = nvfp4.Recipe.from_toml('[default]\npreset = "nvfp4"\n[nvfp4]\ngradients = "nearest"')
    # How far two orders of a sum may be apart, in bits of its magnitudes: stricter than the bounds, which are 2·(K + 8)·2⁻²² = 2⁻¹² for
    # binary32 and 2⁻⁵ for FP8's accumulators; a `fast` one was measured to lose 2⁻¹¹, two of them lose 2⁻¹⁰.
    for name, recipe, bits in (("nvfp4", nearest, 14), ("mxfp8", "mxfp8", 14), ("current_scaling", "current_scaling", 9), ("float8_block_scaling", "float8_block_scaling", 9)):
        torch.manual_seed(3)
        settings = {"device": "cuda", "dtype": torch.bfloat16}
        module = nvfp4.torch.GroupedLinear(4, 256, 384, recipe=recipe, **settings)
        splits, x, dy = [70, 0, 300, 33], tokens(403, 256), tokens(403, 384)
        run = lambda t: module(t, splits)
        run.parameters = module.parameters
        apart = copy.deepcopy(module)
        apart.formats_by_codes = lambda weights: None  # one after the other
        by_itself = lambda t: apart(t, splits)
        by_itself.parameters = apart.parameters
        for how, of, together in (("together", run, True), ("apart", by_itself, False)):
            # A view lies between the result and what made it.
            made_by = type(of(x).grad_fn.next_functions[0][0]).__name__
            check(f"experts of {name} are computed {how}", ("Together" in made_by) == together)
        made, expected = gradients(run, x, dy), gradients(by_itself, x, dy)
        weights = [getattr(module, f"weight{expert}").detach().abs().double() for expert in range(4)]
        parts = list(zip(x.abs().double().split(splits), dy.abs().double().split(splits), weights))
        magnitudes = [torch.cat([a @ w.t() for a, _, w in parts]), torch.cat([b @ w for _, b, w in parts])]
        for a, b, w in parts:
            magnitudes += [b.t() @ a, torch.zeros((), device="cuda")]  # the gradient of a bias is torch's own sum
        for number, (a, b, magnitude) in enumerate(zip(made, expected, magnitudes)):
            close = (a.double() - b.double()).abs() <= magnitude * 2.0**-bits + b.double().abs() * 2**-7
            check(f"experts of {name} together, tensor {number}", a.shape == b.shape and bool(close.all()))
        check(f"an expert of {name} without tokens has no gradient", not made[4].any())
        with torch.no_grad():
            check(f"experts of {name} evaluated", torch.equal(run(x), made[0]))
            shifted = torch.empty(x.numel() + 1, **settings)[1:].view_as(x).copy_(x)
            check(f"experts of {name} from memory that begins anywhere", torch.equal(run(shifted), made[0]))
        kept = gradients(run, x, dy)
        check(f"experts of {name} from kept codes", all(torch.equal(a, b) for a, b in zip(made, kept)))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.cuda()):
            moved = gradients(run, x, dy)
        check(f"what experts of {name} keep may be moved", all(torch.equal(a, b) for a, b in zip(made, moved)))
        stream = torch.cuda.Stream()
        graph, replayed, read = captured(run, x, dy, stream)
        with torch.cuda.stream(stream):
            replay(graph, replayed)
        check(f"experts of {name} replayed", all(torch.equal(a, b) for a, b in zip(made, replayed)))
        del graph, read
        with torch.no_grad():
            module.weight2.mul_(2)
        check(f"a changed expert of {name} is seen", not torch.equal(run(x)[70:370], made[0][70:370]))
        main = copy.deepcopy(module)
        main.fuse_wgrad_accumulation = True
        for expert in range(4):
            weight = getattr(main, f"weight{expert}")
            weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
        main(x, splits).backward(dy)
        after = gradients(run, x, dy)
        sums = [getattr(main, f"weight{expert}").main_grad - 1 for expert in range(4)]
        check(f"gradients of experts of {name} go to main_grad", all(torch.allclose(a, b.float(), rtol=2**-7, atol=2**-7 * b.abs().max().item() + 1e-6) for a, b in zip(sums, after[2::2])))
    # Of one seed the draws are the same, of another they are not, and the mean is that of the nearest.
    module = nvfp4.torch.GroupedLinear(2, 128, 128, bias=False, device="cuda", dtype=torch.bfloat16)
    x, dy, run = tokens(256, 128), tokens(256, 128), lambda t: module(t, [100, 156])
    run.parameters = module.parameters
    first, second = gradients(run, x, dy), gradients(run, x, dy)
    check("experts draw by the seed", all(torch.equal(a, b) for a, b in zip(first, second)))
    torch.cuda.manual_seed(8)
    read = x.clone().requires_grad_()
    run(read).backward(dy)
    check("and afresh by another", not torch.equal(read.grad, first[1]))


def threads(rounds=200):
    """Two threads, each with a stream, a captured step and eager steps of changing size between its replays."""
    failures, jobs, kept = [], [], []
    for _ in range(2):
        stream, module = torch.cuda.Stream(), linear(nvfp4.Recipe.from_file(RECIPES / "nvfp4-no-stochastic.toml"))
        graph, made, read = captured(module, tokens(256, 256), tokens(256, 128), stream)
        jobs.append((stream, module, read[0].detach(), graph, made))
        kept.append(read)
    torch.cuda.synchronize()

    def work(stream, module, x, graph, made):
        with torch.cuda.stream(stream):
            graph.replay()
            stream.synchronize()
            expected = [tensor.clone() for tensor in made]
            for round in range(rounds):
                with torch.no_grad():
                    module(x.repeat(1 + round % 5, 1))
                for tensor in made[1:]:
                    tensor.zero_()
                graph.replay()
                stream.synchronize()
                if not all(torch.equal(a, b) for a, b in zip(made, expected)):
                    failures.append(round)

    workers = [threading.Thread(target=work, args=job) for job in jobs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    check(f"two threads replay and compute side by side ({len(failures)} wrong rounds)", not failures)


def kept_weights():
    """Codes of a weight serve until it changes, on the stream that made them; a graph reads the weight of its replay."""
    for name, recipe in recipes():
        module, x, dy = linear(recipe), tokens(128, 256), tokens(128, 128)
        first = gradients(module, x, dy)
        check(f"{name} from kept codes", all(torch.equal(a, b) for a, b in zip(first, gradients(module, x, dy))))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            y = module(x)
        side.synchronize()
        check(f"{name} on another stream", torch.equal(y, first[0]))
        with torch.no_grad():
            few, again = module(x[:3]).double(), module(x[:3]).double()
            # Either is within the bound of `products` of one sum, and rounded to bfloat16. No factor is larger than its
            # tensor's amax, but by the rounding of a block's scale, a sixteenth.
            largest = [tensor.abs().max().double() * 17 / 16 for tensor in (x, module.weight)]
            allowed = 2 * (256 + 8) * 2**-22 * 256 * largest[0] * largest[1] + 2**-8 * few.abs()
            check(f"{name} prepared for few tokens", bool(((again - few).abs() <= allowed).all()))
    stream, module, x = torch.cuda.Stream(), linear("nvfp4"), tokens(128, 256)
    graph, made, read = captured(module, x, tokens(128, 128), stream)
    with torch.no_grad():
        module.weight.mul_(2), module.bias.mul_(2)
    with torch.cuda.stream(stream):
        replay(graph, made)
        check("a replay quantizes the weight of now", torch.equal(made[0], module(read[0]).detach()))
    module = linear("nvfp4")
    step = torch.cuda.make_graphed_callables(module, (x.clone().requires_grad_(),))
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        y = step(x.clone().requires_grad_())
        expected = nvfp4.torch.Linear.forward(module, x)
        check("a graphed callable follows the optimizer", torch.equal(y, expected))
        y.square().sum().backward()
        optimizer.step()


def graphs_of_te():
    """``te.make_graphed_callables``."""
    gpu_te.checks(check)


def training_graph():
    """A whole training step, optimizer included, is captured; each replay draws afresh and moves the scales of delayed scaling on."""
    for name in ("nvfp4", "delayed_scaling", "mxfp8"):
        runs = []
        for graphed in (False, True):
            torch.manual_seed(3)
            model = torch.nn.Sequential(linear(name), torch.nn.GELU(), linear(name, 128, 256))
            optimizer = torch.optim.Adam(model.parameters(), 1e-3, capturable=True)
            x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(1))

            def step():
                optimizer.zero_grad(set_to_none=False)
                loss = (model(x) - x).float().square().mean()
                loss.backward()
                optimizer.step()
                nvfp4.torch.update_scales(model)
                return loss.detach()

            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    step()
            stream.synchronize()
            run = step
            if graphed:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    loss = step()

                def run():
                    graph.replay()
                    return loss.clone()

            torch.cuda.manual_seed(11)
            with torch.cuda.stream(stream):
                losses = [run() for _ in range(6)]
            stream.synchronize()
            runs.append(torch.stack(losses))
        check(f"six replayed steps of {name} are six eager ones: {runs[1].tolist()}", torch.equal(*runs))
        check("which are not the same step", len(set(runs[1].tolist())) == 6)


def codes():
    """Parameters of codes on a GPU: the CPU's bytes, the numbers of plain weights, and products of few tokens in a graph."""
    specs = ["nvfp4", "nvfp4(16x16)", "nvfp4(row-scaled)", "nvfp4(modelopt)", "fp8", "mxfp8", "fp8-block", "fp8-block(128x128)"]
    for spec in specs:
        host = torch.randn(256, 512).bfloat16()
        here, there = (nvfp4.torch.QuantizedTensor.quantize(x, spec) for x in (host, host.cuda()))
        for name in ("row", "column"):
            check(f"{spec}, block of the {name} direction", torch.equal(getattr(here, name), getattr(there, name).cpu()))
        check(f"{spec}, values", torch.equal(here.dequantize(), there.dequantize().cpu()))
        check(f"{spec}, moved", torch.equal(here.cuda().dequantize(), there.dequantize()) and here.cuda().is_cuda)
        layer = torch.nn.Linear(512, 256, device="cuda", dtype=torch.bfloat16)
        layer.weight = torch.nn.Parameter(there)
        for count in (1, 3, 64, 300):
            x = tokens(count, 512)
            exact = x.double() @ there.dequantize().double().t() + layer.bias.double()
            magnitude = x.double().abs() @ there.dequantize().double().abs().t() + layer.bias.double().abs()
            with torch.no_grad():
                y = layer(x).double()
            # Decoding to bfloat16 rounds the weights of formats with a scale in float32 once.
            check(f"{spec}, {count} tokens", bool(((y - exact).abs() <= magnitude * 2**-8 + exact.abs() * 2**-8).all()))
    for name, recipe in recipes():
        plain = linear(recipe)
        if not plain.formats.trained or plain.formats.weight.delayed:
            continue
        of_codes = nvfp4.torch.quantize_parameters(copy.deepcopy(plain))
        x, dy = tokens(128, 256), tokens(128, 128)
        check(f"{name} from codes", all(torch.equal(a, b) for a, b in zip(gradients(plain, x, dy), gradients(of_codes, x, dy))))
    layer = torch.nn.Linear(1024, 1024, bias=False, device="cuda", dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(nvfp4.torch.QuantizedTensor.quantize(layer.weight, "nvfp4", "row"), requires_grad=False)
    x = tokens(1, 1024)
    with torch.no_grad():
        expected = layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
    check("a token through frozen codes in a graph", torch.equal(y, expected) and layer.weight._prepared is not None)


def memory():
    """torch's allocator knows every byte: what a product needs while it runs is in its peak, and nothing else is taken from the GPU."""
    weight, x = nvfp4.quantize(tokens(32768, 8192)), nvfp4.quantize(tokens(512, 8192))
    nvfp4.matmul(x, weight, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    nvfp4.matmul(x, weight, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    scratch = torch.cuda.max_memory_allocated() - before
    check(f"scratch of {scratch >> 20} MiB is in torch's peak", scratch > 32768 * 8192 // 2)
    check("nothing stays", torch.cuda.memory_allocated() == before)
    check("nothing else is taken", free - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved() == 0)


class Foreign:
    """An array of a library that is not torch, on the GPU."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **_):
        return self.tensor.__dlpack__()

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def foreign():
    """Other libraries' streams are not waited for, so their arrays are refused."""
    try:
        nvfp4.quantize(Foreign(tokens(16, 32)))
        check("an array of another library is refused", False)
    except TypeError as error:
        check(f"an array of another library is refused: {error}", "torch.from_dlpack" in str(error))


def watched():
    """The first number that is not finite is found without waiting, also in a view between whose rows are other numbers."""
    quantizer = nvfp4.Quantizer()
    for bad, kind in ((float("inf"), 0), (float("-inf"), 1), (float("nan"), 2)):
        x = tokens(64, 512)
        x[5, 7] = x[9, 1] = bad
        for view, index in ((x, 5 * 512 + 7), (x[:, :256], 5 * 256 + 7), (x[:, 256:], None)):
            found = torch.full((1,), -1, dtype=torch.int64, device="cuda")
            quantizer.quantize(view, watch=found)
            expected = -1 if index is None else 4 * index + kind
            check(f"{bad} in {tuple(view.shape)}", found.item() == expected)


def delayed():
    """Scales of earlier steps are read on the GPU, and what they are made from is found there."""
    host = torch.randn(256, 512)
    x = host.cuda()
    for spec in ("fp8-delayed", "fp8-delayed / mxfp8", "mxfp8 / fp8-delayed"):
        quantizer = nvfp4.Quantizer(spec=spec, directions="both")
        name = "column_scale" if spec.startswith("mxfp8") else "scale"
        q, *amaxes = quantizer.observe(x, **{name: torch.tensor([3.7], device="cuda")})
        expected, *others = quantizer.observe(host, **{name: torch.tensor([3.7])})
        same = [(a is None and b is None) or (a.is_cuda and torch.equal(a.cpu(), b)) for a, b in zip(amaxes, others)]
        check(f"{spec} with a scale on the GPU", q == expected and all(same))
    gpu = nvfp4.torch.Linear(512, 128, recipe="delayed_scaling", device="cuda")
    cpu = nvfp4.torch.Linear(512, 128, recipe="delayed_scaling")
    cpu.load_state_dict(gpu.state_dict())
    for module, tokens in ((gpu, x), (cpu, host)):
        module(tokens).backward(tokens[:, :128])
        nvfp4.torch.update_scales(module)
    state = gpu.state_dict()
    check("the state after a step", all(torch.equal(state[name].cpu(), buffer) for name, buffer in cpu.named_buffers()))


def copies():
    """A deep copy stays on the GPU, a pickle arrives in the host's memory."""
    for spec in SPECS + ["nvfp4(hadamard)", "nvfp4(row-scaled)"]:
        q = nvfp4.Quantizer(spec=spec, directions="both").quantize(torch.randn(256, 512, device="cuda"))
        twin, pickled = copy.deepcopy(q), pickle.loads(pickle.dumps(q))
        check(f"{spec} copied", twin == q and twin.codes.is_cuda and twin.row._parts()[0].data_ptr() != q.row._parts()[0].data_ptr())
        check(f"{spec} pickled", pickled == q and not pickled.codes.is_cuda)


def graphs():
    """A captured graph draws afresh at each replay, from an offset in the GPU's memory."""
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    quantizer = nvfp4.Quantizer(rounding="stochastic")
    offset = torch.zeros(1, dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        quantizer.quantize(x, seed=3, offset=offset)  # kernels are loaded before a capture
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        q = quantizer.quantize(x, seed=3, offset=offset)
        codes = q.codes
        offset.add_(2)
    for replay in range(3):
        graph.replay()
        torch.cuda.synchronize()
        expected = quantizer.quantize(x.cpu(), seed=3, offset=2 * replay)
        check(f"replay {replay} draws at offset {2 * replay}", torch.equal(codes.cpu(), expected.codes))


def _forked(queue):
    try:
        nvfp4.quantize(torch.ones(16, 16, device="cuda"))
        queue.put("no exception")
    except Exception as error:  # noqa: BLE001
        queue.put(f"{type(error).__name__}: {error}")


def refused():
    """A recipe that refuses NaN and infinities names the tensor, once per step, and says nothing when there are none."""
    for name in ("nvfp4", "mxfp8", "current_scaling", "delayed_scaling"):
        module = linear(nvfp4.Recipe(name).with_finite("refuse"))
        x, dy = tokens(128, 256), tokens(128, 128)
        gradients(module, x, dy)
        nvfp4.torch.check_finite(module)
        for slot, bad in (("input", x), ("weight", module.weight.data), ("grad_output", dy)):
            kept, bad[3, 5] = bad[3, 5].clone(), float("nan")
            nvfp4.torch.weights_changed(module)  # torch does not count what is written through .data
            gradients(module, x, dy)
            bad[3, 5] = kept
            nvfp4.torch.weights_changed(module)
            try:
                nvfp4.torch.check_finite(module)
                check(f"{name}: NaN in {slot} is named", False)
            except ValueError as error:
                check(f"{name}: {error}", f"{slot} (NaN at {3 * bad.shape[1] + 5})" in str(error))
            nvfp4.torch.check_finite(module)


def bad_input():
    """Mixed devices, and a process that was forked after CUDA began."""
    gpu, cpu = nvfp4.quantize(torch.ones(16, 32, device="cuda")), nvfp4.quantize(torch.ones(16, 32))
    for a, b in ((gpu, cpu), (cpu, gpu), (torch.ones(16, 32), gpu)):
        try:
            nvfp4.matmul(a, b)
            check("operands on two devices are refused", False)
        except ValueError as error:
            check(f"operands on two devices are refused: {error}", "move them to one device" in str(error))
    for arguments in ({"offset": torch.zeros(1, device="cuda")}, {"offset": torch.zeros(2, dtype=torch.int64, device="cuda")}):
        try:
            nvfp4.quantize(torch.ones(16, 32, device="cuda"), rounding="stochastic", seed=1, **arguments)
            check("a wrong offset is refused", False)
        except TypeError as error:
            check(f"a wrong offset is refused: {error}", "int64" in str(error))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_forked, args=(queue,))
    child.start()
    answer = queue.get(timeout=60)
    child.join()
    check(f"after a fork: {answer.splitlines()[0]}", child.exitcode == 0 and answer != "no exception")


def overhead():
    """What a call costs over its kernels, at 16384 × 6144."""
    x = torch.randn(16384, 6144, device="cuda", dtype=torch.bfloat16)
    quantizer = nvfp4.Quantizer()
    for _ in range(20):
        quantizer.quantize(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = quantizer.quantize(x)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def device_time(work, times=100):
        start.record()
        for _ in range(times):
            work()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * start.elapsed_time(end) / times

    kernel = statistics.median(device_time(graph.replay) for _ in range(9))
    calls = statistics.median(device_time(lambda: quantizer.quantize(x)) for _ in range(9))
    alone = []
    for _ in range(200):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        quantizer.quantize(x)
        alone.append(1e6 * (time.perf_counter() - begin))
    del kept
    print(f"kernels of quantize, replayed: {kernel:.1f} µs")
    print(f"quantize, call after call:     {calls:.1f} µs, {calls - kernel:+.1f} µs over the kernels (goal: at most 15)")
    print(f"a call until it returns:       {statistics.median(alone):.1f} µs of the CPU's time")
    check("overhead of at most 15 µs", calls - kernel <= 15)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here, and these checks are of nothing else")
    print(f"nvfp4 {nvfp4.__version__}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
    parts = (bits, products, accumulators, delayed, copies, graphs, modules, passes, graphs_of_modules, values, experts, threads, kept_weights, graphs_of_te, training_graph, codes, memory, foreign, watched, refused, bad_input, overhead)
    for part in parts:
        part()
    print("all checks passed")
