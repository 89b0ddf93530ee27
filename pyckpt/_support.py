"""Where the recompute engine may act, and what PyTorch's autograd nodes are known to do."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ._checks import warn_once

#: Versions that the tests are run with. Rules read attributes of autograd nodes that PyTorch does not document.
TESTED = ("2.13", "2.14")

# Names that PyTorch's nodes keep inputs under; whatever else they keep may be their own output.
# fmt: off
_INPUTS = frozenset({
    "self", "other", "input", "weight", "bias", "mat1", "mat2", "batch1", "batch2", "tensor1",
    "tensor2", "query", "key", "value", "attn_mask", "exponent", "condition", "mask", "indices", "index",
    "target", "running_mean", "running_var", "src", "vec", "source", "grad_output",
})
# fmt: on


@functools.cache
def may_save_its_output(kind: Any) -> bool:
    names = {name.removeprefix("_raw_saved_") for name in dir(kind) if name.startswith("_raw_saved_")}
    return not names <= _INPUTS


def steps_aside() -> str:
    """Why the engine must not act here; empty if it may."""
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform encloses the region: put the region around the transform's caller, or do without"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace is recording"
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        return "make_fx is recording"
    refusal = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    if refusal is not None:
        return f"saved-tensor hooks are disabled ({refusal})"
    return _unsupported()


@functools.cache
def _unsupported() -> str:
    """What this version of PyTorch lacks; warns of versions that the tests are not run with."""
    if not hasattr(torch._C._autograd.SavedTensor, "data") or not hasattr(
        torch._C._autograd, "_top_saved_tensors_default_hooks"
    ):
        return f"PyTorch {torch.__version__} does not show what autograd nodes keep (tested: {', '.join(TESTED)})"
    if not torch.__version__.startswith(TESTED):
        warn_once(
            f"pyckpt.recompute is not tested with PyTorch {torch.__version__} (but with {', '.join(TESTED)}). Each rule is "
            "checked at its first use all the same"
        )
    return ""


def warn_of_compile() -> bool:
    warn_once(
        "pyckpt.recompute does nothing inside torch.compile, whose partitioner decides itself what to recompute "
        "(torch._functorch.config.activation_memory_budget). A region around a compiled module works on what lies outside it"
    )
    return True


# As torch.compiler.assume_constant_result does, which imports all of Dynamo: the compiler calls it and keeps the result.
warn_of_compile._dynamo_marked_constant = True  # type: ignore[attr-defined]
