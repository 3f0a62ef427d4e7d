"""Types of the extension."""

from os import PathLike
from typing import Any, Callable, Dict, List, Literal, Mapping, Optional, Sequence, Tuple, Union, final

# A numpy array, a torch tensor, or anything else with `__dlpack__`.
_Array = Any
# "float32", the default, "bfloat16" or "float16", or numpy's or torch's name for it.
_Dtype = Any
_Path = Union[str, PathLike[str]]
# "row", "column" or "both".
_Directions = str
_Accumulator = str
# "row" or "column".
_Side = str
# "rows", "cols" or "one", a step, and the multiple that steps are rounded up to.
_Extent = Tuple[str, int, int]
_Dialect = Literal["plain", "modelopt", "compressed-tensors", "torchao", "comfyui"]
_Modules = Sequence[Union[Tuple[str, str], Tuple[str, str, int]]]

__all__ = [
    "ConversionError",
    "Delayed",
    "Direction",
    "Generator",
    "Plan",
    "QuantTensor",
    "Quantizer",
    "Recipe",
    "Role",
    "_Lent",
    "__version__",
    "_block_alignment",
    "_dequantize_block",
    "_extents",
    "_hadamard_matrix",
    "_hadamard_signs",
    "_linear",
    "_linear_backward",
    "_linear_blocks",
    "_linear_codes",
    "_linear_groups",
    "_linear_groups_backward",
    "_prepare_block",
    "_quantize_blocks",
    "command",
    "convert",
    "cuda",
    "layout",
    "load",
    "matmul",
    "save",
    "verify",
]

__version__: str
cuda: bool
_block_alignment: int
_hadamard_signs: int

class ConversionError(ValueError):
    problems: List[str]

@final
class Generator:
    def __new__(cls, seed: int) -> Generator: ...
    def draw(self) -> Tuple[int, int]: ...
    @property
    def consumed(self) -> int: ...
    @property
    def state(self) -> Tuple[int, int, int, int]: ...
    @staticmethod
    def from_state(state: Tuple[int, int, int, int]) -> Generator: ...
    def split(self, workers: int) -> List[Generator]: ...

@final
class Quantizer:
    def __eq__(self, other: object, /) -> bool: ...
    def __new__(cls,
        *,
        tile: Literal["1x16", "16x16"] = "1x16",
        global_scale: Literal["per-tensor", "row-scaled"] = "per-tensor",
        scale_rule: str = "six",
        rounding: Literal["nearest", "stochastic"] = "nearest",
        transform: Union[None, Literal["none", "hadamard"], int] = None,
        directions: _Directions = "row",
        specials: Literal["kernel", "reference"] = "kernel",
        profile: Literal["transformer-engine", "modelopt", "llm-compressor", "torchao"] = "transformer-engine",
        layout: Literal["linear", "swizzled"] = "linear",
        finite: Literal["keep", "refuse"] = "keep",
        spec: Optional[str] = None,
    ) -> Quantizer: ...
    def quantize(
        self,
        x: _Array,
        *,
        seed: Optional[int] = None,
        offset: Union[None, int, _Array] = None,
        generator: Optional[Generator] = None,
        amax: Union[None, float, Sequence[float], _Array] = None,
        column_amax: Union[None, float, Sequence[float], _Array] = None,
        scale: Union[None, float, _Array] = None,
        column_scale: Union[None, float, _Array] = None,
        watch: Optional[_Array] = None,
    ) -> QuantTensor: ...
    def observe(
        self,
        x: _Array,
        *,
        seed: Optional[int] = None,
        offset: Union[None, int, _Array] = None,
        generator: Optional[Generator] = None,
        amax: Union[None, float, Sequence[float], _Array] = None,
        column_amax: Union[None, float, Sequence[float], _Array] = None,
        scale: Union[None, float, _Array] = None,
        column_scale: Union[None, float, _Array] = None,
        watch: Optional[_Array] = None,
    ) -> Tuple[QuantTensor, Optional[_Array], Optional[_Array]]: ...
    def __call__(self, x: _Array) -> QuantTensor: ...
    def __getnewargs_ex__(self) -> Tuple[Tuple[()], Dict[str, str]]: ...
    @property
    def directions(self) -> _Directions: ...
    @property
    def rounding(self) -> Literal["nearest", "stochastic"]: ...
    @property
    def finite(self) -> Literal["keep", "refuse"]: ...
    @property
    def spec(self) -> str: ...

@final
class Delayed:
    def __eq__(self, other: object, /) -> bool: ...
    def __new__(cls, spec: str) -> Delayed: ...
    @staticmethod
    def parts(spec: str) -> Dict[str, str]: ...
    @property
    def history(self) -> int: ...
    @property
    def reduction(self) -> Literal["max", "local"]: ...
    def update(self, history: Sequence[float], scale: float, amax: float) -> Tuple[List[float], float]: ...
    def update_(self, history: _Array, scale: _Array, amax: _Array) -> None: ...
    def __getnewargs__(self) -> Tuple[str]: ...

@final
class Direction:
    @property
    def shape(self) -> Tuple[int, int]: ...
    @property
    def format(self) -> str: ...
    @property
    def side(self) -> _Side: ...
    @property
    def codes(self) -> _Array: ...
    @property
    def typed_codes(self) -> _Array: ...
    @property
    def scales(self) -> _Array: ...
    @property
    def typed_scales(self) -> _Array: ...
    @property
    def swizzled_scales(self) -> _Array: ...
    @property
    def global_scale(self) -> _Array: ...
    @property
    def unit(self) -> Literal["amax", "multiplier", "divisor"]: ...
    @property
    def amax(self) -> _Array: ...
    @property
    def values(self) -> _Array: ...
    @property
    def rotation(self) -> Optional[int]: ...
    @property
    def layout(self) -> Literal["linear", "swizzled"]: ...
    @property
    def parts(self) -> List[_Array]: ...
    def _parts(self) -> List[_Array]: ...
    def dequantize(self, dtype: _Dtype = ...) -> _Array: ...

@final
class QuantTensor:
    @staticmethod
    def from_parts(
        spec: str,
        shape: Sequence[int],
        *,
        row: Optional[Sequence[_Array]] = None,
        column: Optional[Sequence[_Array]] = None,
    ) -> QuantTensor: ...
    def to_bytes(self) -> bytes: ...
    @staticmethod
    def from_bytes(data: bytes) -> QuantTensor: ...
    def __copy__(self) -> QuantTensor: ...
    def __deepcopy__(self, _memo: Any, /) -> QuantTensor: ...
    @property
    def shape(self) -> Tuple[int, ...]: ...
    @property
    def row(self) -> Optional[Direction]: ...
    @property
    def column(self) -> Optional[Direction]: ...
    @property
    def codes(self) -> _Array: ...
    @property
    def scales(self) -> _Array: ...
    @property
    def amax(self) -> _Array: ...
    @property
    def nbytes(self) -> int: ...
    def as_numpy(self) -> QuantTensor: ...
    def as_torch(self) -> QuantTensor: ...
    def cpu(self) -> QuantTensor: ...
    def __eq__(self, other: object, /) -> bool: ...
    def dequantize(self, dtype: _Dtype = ..., *, side: _Side = "row") -> _Array: ...
    def matmul(
        self,
        other: Union[QuantTensor, Direction],
        *,
        bias: Optional[_Array] = None,
        dtype: _Dtype = ...,
        accumulator: _Accumulator = "precise",
    ) -> _Array: ...
    def with_layout(self, layout: Literal["linear", "swizzled"]) -> QuantTensor: ...
    def keep(self, directions: _Directions) -> QuantTensor: ...
    def slice_rows(self, start: int, end: int) -> QuantTensor: ...

@final
class Role:
    @property
    def path(self) -> str: ...
    @property
    def slot(self) -> str: ...
    @property
    def expert(self) -> Optional[int]: ...
    @property
    def module(self) -> Literal["linear", "grouped", "attention", "extension"]: ...
    @property
    def pass_(self) -> Literal["forward", "backward"]: ...
    @property
    def direction(self) -> Literal["forward", "backward"]: ...
    @property
    def legacy(self) -> Tuple[str, str, str]: ...

@final
class Recipe:
    def __eq__(self, other: object, /) -> bool: ...
    def __deepcopy__(self, _memo: Any, /) -> Recipe: ...
    def __new__(cls, name: str) -> Recipe: ...
    @staticmethod
    def presets() -> List[str]: ...
    @staticmethod
    def from_toml(text: str) -> Recipe: ...
    @staticmethod
    def from_file(path: _Path) -> Recipe: ...
    @staticmethod
    def from_env() -> Recipe: ...
    @staticmethod
    def from_function(key: str, function: Callable[[Role], str]) -> Recipe: ...
    def with_backward(self, backward: str) -> Recipe: ...
    def with_finite(self, finite: Literal["keep", "refuse"]) -> Recipe: ...
    def with_accumulators(
        self,
        *,
        fprop: Optional[_Accumulator] = None,
        dgrad: Optional[_Accumulator] = None,
        wgrad: Optional[_Accumulator] = None,
    ) -> Recipe: ...
    @property
    def finite(self) -> Literal["keep", "refuse"]: ...
    @property
    def name(self) -> str: ...
    def spec(self, path: str, slot: str, *, expert: Optional[int] = None) -> str: ...
    def spec_of(self, role: Role) -> str: ...

@final
class Plan:
    def __eq__(self, other: object, /) -> bool: ...
    def __new__(cls, recipe: Recipe, modules: _Modules, *, purpose: Literal["training", "inference"] = "training"
    ) -> Plan: ...
    @staticmethod
    def from_config(recipe: Recipe, config: str) -> Plan: ...
    def spec(self, path: str, slot: str, *, expert: Optional[int] = None) -> str: ...
    def quantizer(self, path: str, slot: str, *, expert: Optional[int] = None) -> Quantizer: ...
    @property
    def entries(self) -> List[Tuple[str, str, str]]: ...
    @property
    def finite(self) -> Literal["keep", "refuse"]: ...
    @property
    def accumulators(self) -> Tuple[_Accumulator, _Accumulator, _Accumulator]: ...
    @property
    def warnings(self) -> List[str]: ...
    def alignment(self, path: str) -> Optional[int]: ...
    @property
    def fingerprint(self) -> int: ...

@final
class _Lent:
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: Optional[Tuple[int, int]] = None,
        dl_device: Optional[Tuple[int, int]] = None,
        copy: Optional[bool] = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> Tuple[int, int]: ...

def matmul(
    a: Union[QuantTensor, Direction, _Array],
    b: Union[QuantTensor, Direction],
    *,
    bias: Union[None, Sequence[float], _Array] = None,
    alpha: float = 1.0,
    c: Optional[_Array] = None,
    beta: float = 1.0,
    dtype: _Dtype = ...,
    accumulator: _Accumulator = "precise",
) -> _Array: ...
def layout(
    spec: str, directions: _Directions, shape: Sequence[int], dtype: _Dtype
) -> Tuple[List[Tuple[str, List[int]]], List[Tuple[str, List[int]]]]: ...
def _extents(
    spec: str, directions: _Directions, dtype: _Dtype
) -> Tuple[List[Tuple[str, List[_Extent]]], List[Tuple[str, List[_Extent]]]]: ...
def _linear(
    x: _Array, weight: _Array, bias: Optional[_Array], formats: str, scales: Sequence[Optional[_Array]], watched: str
) -> List[Any]: ...
def _linear_backward(
    dy: _Array,
    x: _Array,
    weight: _Array,
    formats: str,
    in_features: int,
    dx: Any,
    dw: Any,
    seed: int,
    offset: Optional[_Array],
    scales: Sequence[Optional[_Array]],
    watched: str,
) -> List[Any]: ...
def _linear_blocks(
    formats: str, tokens: int, in_features: int, out_features: int
) -> Tuple[Optional[int], Optional[int], Optional[int]]: ...
def _linear_codes(
    x: _Array,
    weight: _Array,
    prepared: Optional[_Array],
    bias: Optional[_Array],
    formats: str,
    out_features: int,
    amax: Optional[_Array],
    scales: Sequence[Optional[_Array]],
    watched: str,
) -> List[Any]: ...
def _linear_groups(
    x: _Array,
    weights: _Array,
    codes: bool,
    bias: Optional[_Array],
    formats: str,
    sizes: Sequence[int],
    out_features: int,
) -> List[Any]: ...
def _linear_groups_backward(
    dy: _Array,
    x: _Array,
    weights: _Array,
    formats: str,
    sizes: Sequence[int],
    in_features: int,
    dx: Any,
    dw: Any,
    seed: int,
    offset: Optional[_Array],
) -> List[Any]: ...
def _quantize_blocks(x: _Array, spec: str, directions: _Directions) -> List[Any]: ...
def _dequantize_block(block: _Array, spec: str, rows: int, cols: int, dtype: Any) -> Any: ...
def _hadamard_matrix(signs: int) -> List[List[float]]: ...
def _prepare_block(block: _Array, spec: str, rows: int, cols: int) -> Optional[Any]: ...
def save(path: _Path, tensors: Mapping[str, QuantTensor]) -> None: ...
def load(path: _Path) -> Dict[str, QuantTensor]: ...
def convert(
    source: _Path,
    target: _Path,
    *,
    to: Literal["modelopt", "compressed-tensors", "deepseek-v4", "gguf", "comfyui"] = "modelopt",
    skip: Sequence[str] = ...,
    only: Sequence[str] = ...,
    preset: str = "all",
    scale: Literal[
        "max", "mse", "4over6", "modelopt-mse", "modelopt-4over6", "imatrix", "local-hessian"
    ] = "max",
    profile: Optional[str] = None,
    acts: Union[None, float, Mapping[str, float], _Path] = None,
    fuse: Union[Literal["auto", "off"], Sequence[Sequence[str]]] = "auto",
    fix_scales: bool = False,
    max_shard: int = 5_000_000_000,
    threads: Optional[int] = None,
    memory: int = 2_000_000_000,
    existing: Literal["refuse", "resume", "replace"] = "refuse",
    from_: Optional[_Dialect] = None,
    no_default_skips: bool = False,
    kv: Literal["none", "fp8", "fp8-cast", "nvfp4-cast"] = "none",
    device: str = "cpu",
    keep_shards: bool = False,
    any_architecture: bool = False,
    progress: Optional[Callable[[str, int, int], object]] = None,
    rules: Optional[str] = None,
    stats: Optional[_Path] = None,
    round: Literal["nearest", "gptq"] = "nearest",
    gptq_order: Literal["natural", "static"] = "natural",
    gptq_damping: float = 0.01,
) -> Dict[str, Any]: ...
def verify(
    path: _Path,
    *,
    client: Optional[Literal["vllm", "sglang", "tensorrt-llm", "llama.cpp", "transformers", "comfyui"]] = None,
    from_: Optional[_Dialect] = None,
) -> List[str]: ...
def command(words: Sequence[str], *, program: bool = False) -> int: ...
