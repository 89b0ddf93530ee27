"""Fused kernels of other packages, where they are installed: functions that take the inputs of a case of :mod:`bench.ops`.

None is needed, and none of them decides about a result: what is missing, fails or is too far off is left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Peer = Callable[..., Tensor]
LAYER_NORM_EPS, RMS_NORM_EPS = 1e-5, 1e-6  # those of bench.ops


def _liger() -> dict[str, Peer]:
    from liger_kernel.transformers import functional as liger

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return liger.liger_rms_norm(
            x, weight, RMS_NORM_EPS, in_place=False
        )  # in place it overwrites the incoming gradient

    return {
        "rms_norm": rms_norm,
        "layer_norm": lambda x, weight, bias: liger.liger_layer_norm(x, weight, bias, LAYER_NORM_EPS),
        "softmax": lambda x: liger.liger_softmax(x),
    }


def _flash_attn() -> dict[str, Peer]:
    from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn

    return {
        "rms_norm": lambda x, weight: rms_norm_fn(x, weight, None, eps=RMS_NORM_EPS),
        "layer_norm": lambda x, weight, bias: layer_norm_fn(x, weight, bias, eps=LAYER_NORM_EPS),
    }


def _quack() -> dict[str, Peer]:
    import quack

    return {
        "rms_norm": lambda x, weight: quack.rmsnorm(x, weight, eps=RMS_NORM_EPS),
        "softmax": lambda x: quack.softmax(x),
    }


def _apex() -> dict[str, Peer]:
    from apex.normalization import fused_layer_norm as apex

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return apex.fused_layer_norm_affine(x, weight, bias, x.shape[-1:], LAYER_NORM_EPS)

    return {
        "rms_norm": lambda x, w: apex.fused_rms_norm_affine(x, w, x.shape[-1:], RMS_NORM_EPS),
        "layer_norm": layer_norm,
    }


PACKAGES: dict[str, Callable[[], dict[str, Peer]]] = {
    "liger": _liger,
    "flash_attn": _flash_attn,
    "quack": _quack,
    "apex": _apex,
}


def find() -> tuple[dict[str, dict[str, Peer]], dict[str, str]]:
    """{package: {op: function}} of those that can be imported, and why the others cannot."""
    found: dict[str, dict[str, Peer]] = {}
    reasons: dict[str, str] = {}
    for name, load in PACKAGES.items():
        try:
            found[name] = load()
        except Exception as error:  # an import of a GPU package can fail in any way
            reasons[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found, reasons


def of(op: str, found: dict[str, dict[str, Any]]) -> dict[str, Peer]:
    """The functions that compute `op`, by package."""
    return {name: ops[op] for name, ops in found.items() if op in ops}
