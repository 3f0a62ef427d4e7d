"""NVFP4 in numpy, written from docs/numerics.md alone: what the package is held against. Slow and plain; 1×16 blocks, rows of a multiple of 16."""

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


def swizzle(scales):
    """Whole tiles of 128 × 4, zeros where there is no scale (numerics §8)."""
    rows, cols = scales.shape
    padded = np.zeros((-(-rows // 128) * 128, -(-cols // 4) * 4), np.uint8)
    padded[:rows, :cols] = scales
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(padded.shape)


def quantize(x, scope="per-tensor", rule="six"):
    """Codes, scale bytes and amaxes of a matrix. `rule` is 'six' or '4over6-METRIC-ERROR-BOUND'."""
    with np.errstate(all="ignore"):
        x = x.astype(F)
        rows = x.shape[0]
        bound = F(448) if rule == "six" else F(rule.rsplit("-")[-1])
        amax = np.abs(x).max(axis=1) if scope == "row-scaled" else np.abs(x).max().reshape(1)
        enc = np.minimum(F(6) * bound / amax, MAX)
        enc = np.where((amax == 0) | (enc == 0), F(1), enc).astype(F)
        per_block = lambda v: np.broadcast_to(v.reshape(-1, 1, 1), (rows, 1, 1)).astype(F)  # noqa: E731
        blocks = x.reshape(rows, -1, 16)
        scales, codes = choose(blocks, per_block(enc), per_block(amax), rule, bound)
        return pack(codes.reshape(x.shape)), scales.reshape(rows, -1), amax


def encode(blocks, scales, enc):
    dec = F(1) / enc
    inv = np.minimum(F(1) / (e4m3_value(scales) * dec), MAX)
    return e2m1(blocks * inv)


def choose(blocks, enc, amax, rule, bound):
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    if rule == "six":
        scales = e4m3(np.minimum(largest * (enc * F(F(1) / F(6))), MAX))
        return scales, encode(blocks, scales, enc)
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
