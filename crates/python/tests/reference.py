"""NVFP4 in numpy, written from docs/numerics.md alone: what the package is held against. Slow and plain; 1×16 blocks, rows of a multiple of 16.

Every operation on float32 arrays is one rounding, as `fl` is there. What float64 computes below is exact, and each place says why.
"""

import ml_dtypes
import numpy as np

F = np.float32
MAX = np.finfo(F).max
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F)


def e4m3(x):
    """Bytes of the nearest E4M3 numbers, saturating (numerics §1.2)."""
    return np.minimum(x, F(448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def e4m3_value(codes):
    return codes.view(ml_dtypes.float8_e4m3fn).astype(F)


def e2m1(y):
    """Codes of the nearest E2M1 numbers, ties to even; −0 keeps its sign and NaN is 6 (numerics §1.1, §1.4)."""
    a = np.abs(y)
    code = sum(
        (passed.astype(np.uint8) for passed in (a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5)),
        np.zeros(y.shape, np.uint8),
    )
    return np.where(np.isnan(y), 7, code | (np.signbit(y).astype(np.uint8) << 3)).astype(np.uint8)


def e2m1_value(codes):
    return np.where(codes & 8, -VALUES[codes & 7], VALUES[codes & 7]).astype(F)


def pack(codes):
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack(packed):
    return np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)


def swizzle(scales):
    """Whole tiles of 128 × 4, zeros where there is no scale (numerics §8)."""
    rows, cols = scales.shape
    padded = np.zeros((-(-rows // 128) * 128, -(-cols // 4) * 4), np.uint8)
    padded[:rows, :cols] = scales
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(padded.shape)


def quantize(x, scope="per-tensor", rule="six", draw=None):
    """Codes, scale bytes and amaxes of a matrix. `rule` is 'six' or '4over6-METRIC-ERROR-BOUND'; `draw` is the seed and the offset of
    stochastic rounding."""
    with np.errstate(all="ignore"):
        x = x.astype(F)
        rows = x.shape[0]
        bound = F(448) if rule == "six" else F(rule.rsplit("-")[-1])
        amax = np.abs(x).max(axis=1) if scope == "row-scaled" else np.abs(x).max().reshape(1)
        enc = np.minimum(F(6) * bound / amax, MAX)
        enc = np.where((amax == 0) | (enc == 0), F(1), enc).astype(F)
        per_block = lambda v: np.broadcast_to(v.reshape(-1, 1, 1), (rows, 1, 1)).astype(F)  # noqa: E731
        blocks = x.reshape(rows, -1, 16)
        scales, codes = choose(blocks, per_block(enc), per_block(amax), rule, bound, draw)
        return pack(codes.reshape(x.shape)), scales.reshape(rows, -1), amax


def encode(blocks, scales, enc, draw=None):
    dec = F(1) / enc
    inv = np.minimum(F(1) / (e4m3_value(scales) * dec), MAX)
    if draw is None:
        return e2m1(blocks * inv)
    drawn = random_bytes(np.arange(blocks.shape[0] * blocks.shape[1]), *draw)
    return e2m1_drawn(blocks * inv, drawn.reshape(blocks.shape))


def choose(blocks, enc, amax, rule, bound, draw):
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    if rule == "six":
        scales = e4m3(np.minimum(largest * (enc * F(F(1) / F(6))), MAX))
        return scales, encode(blocks, scales, enc, draw)
    _, metric, path, _ = rule.split("-")
    base = largest / F(6) * enc
    candidates = []
    for factor in (F(1), F(1.5)):
        scales = e4m3(base * factor if factor != 1 else base)
        codes = encode(blocks, scales, enc)
        candidates.append((scales, codes, error(blocks, scales, codes, enc, amax, metric, path, bound)))
    (six, six_codes, six_error), (four, four_codes, four_error) = candidates
    take = four_error < six_error
    return np.where(take, four, six), np.where(take, four_codes, six_codes)


def error(blocks, scales, codes, enc, amax, metric, path, bound):
    product = e2m1_value(codes) * e4m3_value(scales)
    if path == "strict":
        e = product * amax / (F(6) * bound) - blocks
    else:
        e = product - blocks * enc
    total = np.zeros(e.shape[:2], F)
    for i in range(16):
        term = np.abs(e[:, :, i]) if metric == "mae" else e[:, :, i] * e[:, :, i]
        total = total + term
    return total[:, :, None]


def philox(counter, key):
    """Ten rounds over counters of four 32-bit words, an array each, and a key of two words (numerics §7.1)."""
    low = np.uint64(0xFFFFFFFF)
    c = [np.asarray(word, np.uint64) for word in counter]
    k = [np.uint64(word) for word in key]
    for _ in range(10):
        p, q = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [q >> np.uint64(32) ^ c[1] ^ k[0], q & low, p >> np.uint64(32) ^ c[3] ^ k[1], p & low]
        k = [k[0] + np.uint64(0x9E3779B9) & low, k[1] + np.uint64(0xBB67AE85) & low]
    return c


def random_bytes(blocks, seed, offset):
    """The 16 random bytes of each block, by its index (numerics §0)."""
    halves = lambda number: (np.asarray(number, np.uint64) & np.uint64(0xFFFFFFFF), np.asarray(number, np.uint64) >> np.uint64(32))  # noqa: E731
    at = [np.broadcast_to(half, np.shape(blocks)) for half in halves(offset)]
    words = philox([*halves(blocks), *at], halves(seed))
    return np.stack(words, -1).astype("<u4").view(np.uint8)


def e2m1_drawn(y, r):
    """Codes of E2M1 numbers that the random bytes `r` decide (numerics §7.3, §1.4).

    The sum is exact in float64 where it matters: the drawn part is a multiple of 2⁻⁹ below 2, and a magnitude so small that float64 rounds
    the sum is far from any tie of float32. So its conversion is the one rounding of the fused operation.
    """
    step = lambda a: np.where(a >= 4, 2.0, np.where(a >= 2, 1.0, 0.5))  # noqa: E731
    a = np.abs(y).astype(np.float64)
    t = (a + r / 256 * step(a)).astype(F).astype(np.float64)
    value = np.minimum(np.floor(t / step(t)) * step(t), 6)
    code = np.searchsorted(VALUES, np.where(np.isnan(y), 6, value)).astype(np.uint8)
    return np.where(np.isnan(y), 7, code | (np.signbit(y).astype(np.uint8) << 3)).astype(np.uint8)


def hadamard(x):
    """The transform of numerics §6.1 along rows, with the fixed signs, in float64: exact for numbers of few bits."""
    i = np.arange(16)
    parity = np.array([[bin(a & b).count("1") & 1 for a in i] for b in i])
    signs = 1 - 2 * ((0xD7E8 >> i & 1) ^ parity)
    return (x.astype(np.float64).reshape(len(x), -1, 16) @ (signs.T / 4)).reshape(x.shape)


def decode(codes, scales, stored, unit="amax"):
    """What packed codes decode to: `fl(q · f)`. `unit` says what the stored 32-bit scale is, and so how it makes `f` (numerics §8)."""
    scale, stored = np.repeat(e4m3_value(scales), 16, axis=1), stored.reshape(-1, 1)
    factor = {
        "amax": lambda: scale * stored * (F(1) / F(2688)),
        "multiplier": lambda: scale * stored,
        "divisor": lambda: scale / stored,
    }[unit]()
    return e2m1_value(unpack(codes)) * factor


def terms(direction):
    """The values of a direction's codes times its block scales, without its 32-bit scale: multiples of 2⁻¹⁰ up to 2688, so exact."""
    codes, scales = np.asarray(direction.codes), np.asarray(direction.scales)
    return e2m1_value(unpack(codes)).astype(np.float64) * np.repeat(e4m3_value(scales), 16, axis=1)


def product(a, b):
    """a · bᵀ of two directions with one amax each (numerics §0 and §9).

    Products of terms are multiples of 2⁻²⁰ below 2²³, so that a sum of K < 2¹⁰ of them has at most 53 bits: float64 adds them exactly, in
    any order, and its conversion is the only rounding before the scales.
    """
    assert a.shape[1] < 2**10
    total = (terms(a) @ terms(b).T).astype(F)
    return np.asarray(a.amax) * np.asarray(b.amax) / F(2688 * 2688) * total


def within(y, x, b):
    """Whether `y` is x · bᵀ for an array of float32 and a direction with one amax, as far as its arithmetic goes.

    Such a product is a sum in float32 in any order, at most (K + 8)·2⁻²² of the products' magnitudes away from the exact one
    (`nvfp4_spec::gemm::bound` derives it), times `fl(amax / 2688)`, which rounds once more. Here products are exact in float64 (24 + 12
    bits), and adding K of them in any order loses at most K·2⁻⁵³ of their magnitudes.
    """
    k, scale = x.shape[1], float((np.asarray(b.amax) / F(2688))[0])
    exact, magnitude = x.astype(np.float64) @ terms(b).T, np.abs(x).astype(np.float64) @ np.abs(terms(b)).T
    allowed = ((k + 8) * 2.0**-22 + k * 2.0**-53) * magnitude
    return np.abs(y / scale - exact) <= allowed + 2.0**-24 * (np.abs(exact) + allowed) + 2.0**-52 * np.abs(exact)
