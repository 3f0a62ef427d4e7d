"""Quantizers and quantized tensors under TransformerEngine's names."""

from __future__ import annotations

from typing import Any, List, Optional

import torch
from torch import Tensor

import nvfp4

from ._format import DType
from ._signature import supports


class Quantizer:
    """What all quantizers have: the directions of the next tensor, and a spec."""

    def __init__(self, *, rowwise: bool, columnwise: bool):
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    def spec(self) -> str:
        """The format in recipe syntax."""
        raise NotImplementedError(f"{type(self).__name__} has no format: use a class that derives from Quantizer")

    def set_usage(self, *, rowwise: Optional[bool] = None, columnwise: Optional[bool] = None) -> None:
        """Chooses the directions of the next tensor."""
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def copy(self) -> Any:
        """Another one with the same settings."""
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    @property
    def directions(self) -> str:
        """The directions that are chosen, as ``nvfp4.Quantizer`` names them."""
        usage = (self.rowwise_usage, self.columnwise_usage)
        if usage == (False, False):
            raise ValueError("neither direction is used: set_usage(rowwise=True), columnwise=True or both")
        return {(True, True): "both", (True, False): "row", (False, True): "column"}[usage]

    def __call__(self, tensor: Tensor) -> Any:
        return self.quantize(tensor)

    def quantize(self, tensor: Tensor) -> Any:
        """Quantizes a tensor in the directions that are chosen."""
        return nvfp4.Quantizer(spec=self.spec(), directions=self.directions).quantize(tensor)


class IdentityQuantizer(Quantizer):
    """Leaves a tensor as it is: what a factory returns for a tensor in high precision."""

    @supports("rowwise", "columnwise")
    def __init__(self, *, dtype: Optional[torch.dtype] = None, rowwise: bool = True, columnwise: bool = True):
        super().__init__(rowwise=rowwise, columnwise=columnwise)

    def spec(self) -> str:
        return "high-precision"


class NVFP4Quantizer(Quantizer):
    """Quantizes to NVFP4, with TransformerEngine's arguments.

    Stochastic rounding takes its offsets from torch's generator, so that it follows
    ``torch.manual_seed``.
    """

    def __init__(
        self,
        fp4_dtype: Any = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group=None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ):
        if not nvfp4_use_4over6 and nvfp4_e4m3_max != 448:
            raise ValueError(f"nvfp4_e4m3_max={nvfp4_e4m3_max} needs nvfp4_use_4over6=True; without it the largest scale is 448")
        if with_rht and not with_post_rht_amax:
            raise ValueError("with_rht needs with_post_rht_amax=True: the scale of rotated values comes from their own amax")
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = fp4_dtype
        self.with_amax_reduction, self.amax_reduction_group = with_amax_reduction, amax_reduction_group
        self.with_rht, self.with_post_rht_amax = with_rht, with_post_rht_amax
        self.with_2d_quantization, self.stochastic_rounding = with_2d_quantization, stochastic_rounding
        self.with_random_sign_mask, self.row_scaled_nvfp4 = with_random_sign_mask, row_scaled_nvfp4
        self.nvfp4_use_4over6, self.nvfp4_e4m3_max = nvfp4_use_4over6, nvfp4_e4m3_max
        self.nvfp4_4over6_err_mode = nvfp4_4over6_err_mode
        self.spec()  # an illegal combination fails here

    def spec(self) -> str:
        words = ["16x16"] if self.with_2d_quantization else []
        words += ["row-scaled"] if self.row_scaled_nvfp4 else []
        if self.nvfp4_use_4over6:
            words.append(f"4over6-{self.nvfp4_4over6_err_mode.lower()}-strict-{self.nvfp4_e4m3_max}")
        words += ["stochastic"] if self.stochastic_rounding else []
        if self.with_rht:
            words.append("hadamard" if self.with_random_sign_mask else "hadamard=0x0000")
        text = f"nvfp4({', '.join(words)})" if words else "nvfp4"
        return nvfp4.Quantizer(spec=text, directions="both").spec

    def quantize(self, tensor: Tensor, *, seed: int = 0, offset=None) -> "NVFP4Tensor":
        """Quantizes a tensor.

        Stochastic rounding draws at ``offset``, or where torch's generator says.
        """
        quantizer = nvfp4.Quantizer(spec=self.spec(), directions=self.directions)
        randomness = {}
        if self.stochastic_rounding:
            offset = torch.randint(2**62, (1,), device=tensor.device) if offset is None else offset
            randomness = {"seed": seed, "offset": offset}
        q = quantizer.quantize(tensor, **randomness)
        if self.with_amax_reduction:
            q = quantizer.quantize(tensor, **randomness, **self._reduced(q))
        return NVFP4Tensor(q, tensor.dtype, self)

    def _reduced(self, q: nvfp4.QuantTensor) -> dict:
        """The amaxes that all workers agree on.

        Row-scaled ones are left out: rows are tokens, and every worker has its own.
        """
        amaxes = {}
        for name, direction in (("amax", q.row), ("column_amax", q.column)):
            if direction is not None and not (self.row_scaled_nvfp4 and name == "amax"):
                amaxes[name] = direction.amax
                torch.distributed.all_reduce(
                    amaxes[name], torch.distributed.ReduceOp.MAX, group=self.amax_reduction_group
                )
        return amaxes


class NVFP4Tensor:
    """A quantized tensor under TransformerEngine's attribute names.

    Data are bytes of two codes, [..., K/2] and transposed [K, M/2]; scales are E4M3 bytes, padded
    with zeros to multiples of 128 rows and 4 columns, not swizzled; amaxes are float32. A direction
    that is not there is None. These arrays are the tensor: what is written into them is what is
    decoded.
    """

    def __init__(self, q: nvfp4.QuantTensor, dtype: torch.dtype, quantizer: NVFP4Quantizer):
        q = q.as_torch()
        self.shape, self.dtype, self._quantizer, self._spec = torch.Size(q.shape), dtype, quantizer, quantizer.spec()
        self._rowwise_data = self._rowwise_scale_inv = self._amax_rowwise = None
        self._columnwise_data = self._columnwise_scale_inv = self._amax_columnwise = None
        if q.row is not None:
            codes, scales, self._amax_rowwise = q.row._parts()
            self._rowwise_data = codes.reshape(*self.shape[:-1], codes.shape[-1])
            self._rowwise_scale_inv = _padded(scales)
        if q.column is not None:
            self._columnwise_data, scales, self._amax_columnwise = q.column._parts()
            self._columnwise_scale_inv = _padded(scales)

    @property
    def quantized(self) -> nvfp4.QuantTensor:
        """The arrays as a tensor of this package."""
        row = _unpadded(self._rowwise_data, self._rowwise_scale_inv, self._amax_rowwise)
        column = _unpadded(self._columnwise_data, self._columnwise_scale_inv, self._amax_columnwise)
        return nvfp4.QuantTensor.from_parts(self._spec, self.shape, row=row, column=column)

    def dequantize(self, *, dtype: Optional[torch.dtype] = None) -> Tensor:
        """The decoded values of the row direction, in the type that was quantized unless another is
        asked for.
        """
        return self.quantized.dequantize(dtype or self.dtype)

    def get_metadata(self) -> dict:
        """The arrays by TransformerEngine's names."""
        names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
        arrays = {name: getattr(self, f"_{name}") for name in names}
        return {**arrays, "amax_rowwise": self._amax_rowwise, "amax_columnwise": self._amax_columnwise}

    def __repr__(self) -> str:
        return f"NVFP4Tensor({self.quantized!r}, dtype={self.dtype})"


def _padded(scales: Tensor) -> Tensor:
    rows, cols = scales.shape
    return torch.nn.functional.pad(scales, (0, -cols % 4, 0, -rows % 128))


def _unpadded(data: Optional[Tensor], scales: Optional[Tensor], amax: Optional[Tensor]) -> Optional[List[Tensor]]:
    """The arrays of a direction as ``QuantTensor.from_parts`` takes them."""
    if data is None or scales is None or amax is None:
        return None
    codes = data.reshape(-1, data.shape[-1]) if data.dim() > 1 else data.reshape(1, -1)
    return [codes, scales[: codes.shape[0], : -(-codes.shape[1] // 8)].contiguous(), amax]
