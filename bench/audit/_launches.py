"""The Triton kernels' launches, recorded instead of made: what each launcher chooses for a shape, as source to compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyckpt.triton_kernels import (
    _common,
    activation,
    attention,
    attention_backward,
    dropout,
    norm,
    norm_long,
    softmax,
)

MODULES = (_common, activation, dropout, norm, norm_long)  # those that have `launch`
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


@dataclass
class Launch:
    """One launch of a kernel. `constants` are by parameter name; `types` are Triton's names; `aligned` are the indices of
    parameters divisible by 16."""

    kernel: Any
    types: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    aligned: tuple[int, ...] = ()
    warps: int = 4
    stages: int | None = None  # None: Triton's default

    @property
    def key(self) -> tuple[Any, ...]:
        return self.kernel.__module__, self.kernel.__name__, str(self)

    def __str__(self) -> str:
        return f"{self.types} {self.constants} {self.aligned} {self.warps} {self.stages}"


def specialise(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any], aligned: bool) -> Launch:
    """What Triton's JIT compiles for these arguments: integers of 1 become constants, and divisibility by 16 is noted, of
    addresses where `aligned`."""
    launch = Launch(kernel, warps=options.pop("num_warps"), stages=options.pop("num_stages", None))
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | options
    noted = []
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        fixed = parameter.is_constexpr or value is None
        if fixed or (type(value) is int and value == 1 and not parameter.do_not_specialize):
            launch.types[parameter.name] = "constexpr"
            launch.constants[parameter.name] = value
            continue
        if isinstance(value, Tensor):
            launch.types[parameter.name] = "*" + TYPES[value.dtype]
            divisible = aligned
        else:
            launch.types[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            divisible = value % 16 == 0 and not parameter.do_not_specialize
        if divisible and not parameter.do_not_specialize_on_alignment:
            noted.append(index)
    launch.aligned = tuple(noted)
    return launch


def recorded(call: Callable[[], None], aligned: bool) -> list[Launch]:
    """The launches that `call` makes."""
    found: list[Launch] = []

    def record(kernel: Any, programs: Any, x: Tensor, *arguments: Any, **options: Any) -> None:
        found.append(specialise(kernel, arguments, options, aligned))

    originals = [module.launch for module in MODULES]
    try:
        for module in MODULES:
            module.launch = record
        call()
    finally:
        for module, original in zip(MODULES, originals, strict=True):
            module.launch = original
    return found


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class Subject:
    """Calls of one launcher: `call(rows, columns, dtype)`; `contiguous` ones have to move 16 bytes an access when aligned."""

    name: str
    call: Callable[[int, int, torch.dtype], None]
    contiguous: bool = True


def _activation(op: int, backward: bool, strided: bool) -> Subject:
    name = (
        f"{('gelu', 'gelu_tanh', 'silu', 'relu', 'gelu_sigmoid')[op]} {'backward' if backward else 'forward'}"
    )

    def call(rows: int, columns: int, dtype: torch.dtype) -> None:
        tensors = [empty(rows, columns, dtype=dtype) for _ in range(3 if backward else 2)]
        view = [2, rows, columns] + [5 * rows * columns, 3 * columns, 3] * len(tensors) if strided else []
        (activation.backward if backward else activation.forward)(op, *tensors, view)

    return Subject(f"{name}{', strided' if strided else ''}", call, not strided)


def _dropout(strided: bool) -> Subject:
    def call(rows: int, columns: int, dtype: torch.dtype) -> None:
        x, seed = empty(rows, columns, dtype=dtype), empty(1, dtype=torch.int64)
        view = [2, rows, columns] + [5 * rows * columns, 3 * columns, 3] * 2 if strided else []
        dropout.forward(x, torch.empty_like(x), seed, 0.1, view)

    return Subject(f"dropout{', strided' if strided else ''}", call, not strided)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _norm(kind: int, mode: str, weight: bool, bias: bool, single: bool = False) -> Subject:
    """`single`: parameters in float32 beside 16 bits. mode: forward, recompute, or of backward what it wants."""
    name = f"{('layer_norm', 'rms_norm')[kind]} {mode}"
    name += (
        {(0, 0): ", plain", (1, 0): ", weight", (0, 1): ", bias", (1, 1): ""}[weight, bias]
        if mode[0] in "fr"
        else ""
    )
    name += ", plain" if mode[0] == "b" and not weight else ""
    name += ", float32 parameters" if single else ""

    def call(rows: int, columns: int, dtype: torch.dtype) -> None:
        x = empty(rows, columns, dtype=dtype)
        parameter = empty(columns, dtype=torch.float32 if single else dtype)
        w, b = parameter if weight else None, parameter if bias else None
        statistics = empty(3 - 2 * kind, rows, dtype=_wide(dtype))
        view = 1, columns, 0
        if mode in ("forward", "recompute"):
            norm.forward(kind, x, view, w, b, 1e-5, x, statistics, mode == "recompute")
        else:
            dx = x if "dx" in mode else None
            dweight = parameter if "parameters" in mode else None
            dbias = parameter if "parameters" in mode and kind == norm.LAYER else None
            norm.backward(kind, x, view, x, view, w, 1e-5, statistics, dx, dweight, dbias)

    return Subject(name, call)


def _softmax(mode: str, mask: str, causal: bool, drop: bool) -> Subject:
    parts = [f"softmax {mode}", mask and f"{mask} mask", causal and "causal", drop and "dropout"]

    def call(rows: int, columns: int, dtype: torch.dtype) -> None:
        x, statistics = empty(rows, columns, dtype=dtype), empty(2, rows, dtype=_wide(dtype))
        strides, sizes = (0, columns * (rows // 16), columns), (4, rows // 16)
        if not (mask or causal):
            strides, sizes = (columns, 0, 0), (1, 1)
        given = empty(columns, dtype=torch.uint8 if mask == "boolean" else dtype) if mask else None
        scores = softmax.Scores(
            x, sizes, strides, given, (0, 0, columns) if mask else (0, 0, 0), int(bool(mask)), 0.5,
            0 if causal else None, 0.1 if drop else 0.0, empty(1, dtype=torch.int64) if drop else None,
        )  # fmt: skip
        if mode in ("forward", "recompute"):
            softmax.forward(scores, x, statistics, mode == "recompute")
        elif drop:
            softmax.dropout_backward(scores, x, strides, x, statistics, 0.5)
        else:
            softmax.backward(scores, x, x, x, bool(mask or causal), 0.5)

    return Subject(", ".join(part for part in parts if part), call, not mask)


# Of attention, the options of one call each: those that need different code.
ATTENTION = {
    "plain": {},
    "causal": {"right": 0},
    "window, grouped, packed, ALiBi": {"left": 128, "right": 0, "kv_heads": 4, "packed": True, "alibi": True},
    "boolean mask, dropout": {"mask": "boolean", "dropout_p": 0.1},
    "bias with gradient, softcap": {"mask": "additive", "softcap": 30.0},
    "float32 bias with gradient": {"mask": "additive", "mask_dtype": torch.float32},
}
ATTENTION_KERNELS = ("forward", "backward by keys", "backward by queries", "backward, statistics")


def _attention(kernel: str, what: str) -> Subject:
    """Of heads `columns` wide."""

    def call(rows: int, columns: int, dtype: torch.dtype) -> None:
        chosen: dict[str, Any] = ATTENTION[what]
        heads, wide = 16, _wide(dtype)
        q = empty(2, heads, rows, columns, dtype=dtype)
        k = empty(2, chosen.get("kv_heads", heads), rows, columns, dtype=dtype)
        numbers = empty(2, heads, rows, dtype=wide)
        mask = None
        if kind := chosen.get("mask"):
            sizes = (2, 1, 1, rows) if kind == "boolean" else (1, heads, rows, rows)
            mask_dtype = torch.uint8 if kind == "boolean" else chosen.get("mask_dtype", dtype)
            mask = empty(*sizes, dtype=mask_dtype).expand(2, heads, rows, rows)
        bounds = empty(3, rows, dtype=torch.int32) if "packed" in chosen else None
        given = attention.Call(
            q, k, k, mask, empty(2, heads, dtype=wide) if "alibi" in chosen else None, bounds, bounds,
            empty(1, dtype=torch.int64) if "dropout_p" in chosen else None, 0.125, chosen.get("left"), chosen.get("right"),
            0, chosen.get("softcap", 0.0), chosen.get("dropout_p", 0.0),
        )  # fmt: skip
        out = empty(2, rows, heads, columns, dtype=dtype).transpose(1, 2)
        total = numbers if dtype.itemsize > 2 else None
        if kernel == "forward":
            attention.forward(given, out, numbers)
        elif kernel == "backward by keys":
            attention_backward.key_gradients(given, out, numbers, numbers, total, k, k)
        elif kernel == "backward by queries":
            dbias = mask if chosen.get("mask") == "additive" else None
            attention_backward.query_gradients(given, out, numbers, numbers, total, q, dbias, False, False)
        elif total is None:
            attention_backward.row_products(out, out, numbers)
        else:
            attention_backward.statistics(given, out, numbers, numbers, total)

    return Subject(f"attention {kernel}, {what}", call, False)


def subjects() -> Iterator[Subject]:
    """Every launcher with every option it has."""
    for op, backward, strided in itertools.product(range(5), (False, True), (False, True)):
        yield _activation(op, backward, strided)
    yield from (_dropout(strided) for strided in (False, True))
    for kind in (norm.LAYER, norm.RMS):
        for mode in ("forward", "recompute"):
            for weight, bias in ((True, True), (True, False), (False, True), (False, False)):
                if kind == norm.LAYER or not bias:
                    yield _norm(kind, mode, weight, bias)
            yield _norm(kind, mode, True, kind == norm.LAYER, single=True)
        for mode in ("backward, dx and parameters", "backward, dx", "backward, parameters"):
            yield _norm(kind, mode, True, False)
            yield _norm(kind, mode, False, False)
            yield _norm(kind, mode, True, False, single=True)
    for mask, causal, drop in itertools.product(("", "boolean", "additive"), (False, True), (False, True)):
        yield _softmax("forward", mask, causal, drop)
        if drop:
            yield _softmax("recompute", mask, causal, drop)
            yield _softmax("backward", mask, causal, drop)
    yield _softmax("backward", "", False, False)
    yield _softmax("backward", "boolean", False, False)
    yield from (_attention(kernel, what) for kernel in ATTENTION_KERNELS for what in ATTENTION)
