"""Compare what a module computes before and after a swap, on random input."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ._targets import Target, describe
from ._targets.recording import Unrounded


class ConversionError(RuntimeError):
    """``convert(model, verify=True)`` found a module whose fused counterpart computes something else."""


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def place_of(module: nn.Module) -> tuple[torch.device, torch.dtype] | None:
    """Device and dtype of the module's first floating-point tensor."""
    tensors = (t for t in (*module.parameters(), *module.buffers()) if t.dtype in _FLOATS)
    return next(((t.device, t.dtype) for t in tensors), None)


def verify_swap(
    path: str, module: nn.Module, target: Target, place: tuple[torch.device, torch.dtype]
) -> None:
    """Compare old and new class on copies of ``module``; raise :class:`ConversionError` if they differ.

    Twice: in float64 on the CPU, casts to float32 left out, where another function cannot hide behind rounding;
    and in the module's dtype on its device, where the new class may be as far from the float64 values as the old
    one, plus a tenth and four units in the last place.
    """
    what = f"pyckpt.convert: {path} ({describe(type(module))} -> {describe(target.cls)})"
    name = ""  # of the attribute that is replaced, where it is not the class
    if target.cls is type(module):
        (name,) = target.attributes
        what = f"pyckpt.convert: {path}.{name}"
    device, dtype = place_of(module) or place
    device = torch.device("cpu") if device.type == "meta" else device
    generator = torch.Generator("cpu").manual_seed(0)  # the user's random numbers stay as they are
    random = functools.partial(torch.randn, generator=generator, dtype=torch.float64, device="cpu")
    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
            warnings.simplefilter("ignore")  # nn.Softmax() without dim
            old = _twin(module, functools.partial(_values, random=random, device=device))
            x = random(_example_shape(module, target)).mul_(3.0).to(dtype).to(device)
            runs = []
            for before, example in ((_twin(old, _exact), _exact(x)), (old, x)):
                after = _twin(before, lambda tensor: tensor)
                vars(after).update(target.attributes)
                after.__class__ = target.cls
                runs += [_run(_function(m, name), example) for m in (before, after)]
    except Exception as error:
        raise ConversionError(
            f"{what} could not be verified: {type(error).__name__}: {error}. The model is unchanged. "
            "Convert it before sharding or wrapping it, or convert without verify."
        ) from error
    for result, truth, same, theirs, ours in zip(("output", "gradient"), *runs, strict=True):
        if (theirs.shape, theirs.dtype) != (ours.shape, ours.dtype):
            raise ConversionError(
                f"{what}: the {result} has shape {tuple(ours.shape)} and dtype {ours.dtype}, the original's "
                f"{tuple(theirs.shape)} and {theirs.dtype}. The model is unchanged; please report this."
            )
        finite = truth.isfinite()
        if not finite.any():
            continue
        scale = float(truth[finite].abs().max())
        errors = (float((_exact(t) - truth)[finite].abs().max()) for t in (same, theirs, ours))
        error64, error_theirs, error_ours = errors
        allowed = max(1.1 * error_theirs + 4.0 * torch.finfo(dtype).eps * scale, 1e-12 * scale)
        if not (error64 <= 1e-7 * scale and error_ours <= allowed):
            raise ConversionError(
                f"{what}: on input of shape {tuple(x.shape)} the {result} is off by {error64:.1e} in float64, "
                f"and by {error_ours:.1e} in {dtype} on {device}, where rounding explains {allowed:.1e}. "
                "The model is unchanged; please report this."
            )


def _function(module: nn.Module, name: str) -> Callable[[Tensor], Tensor]:
    """What is compared: the attribute `name`, or the forward as a function of one tensor."""
    if name:
        return vars(module)[name]
    if not isinstance(module, nn.MultiheadAttention):
        return module.forward

    def attend(x: Tensor) -> Tensor:
        key, value = (
            torch.cat([x] * (1 + n // x.shape[-1]), -1)[..., :n] for n in (module.kdim, module.vdim)
        )
        return module.forward(x, key, value, need_weights=False)[0]

    return attend


def _example_shape(module: nn.Module, target: Target) -> tuple[int, ...]:
    recipe = target.attributes.get("_pyckpt_norm")
    if recipe is not None:
        size = recipe.shape or (33,)
        return (4, *size, *(2,) * ((recipe.rank or 4) - 2)) if recipe.channels_first else (4, *size)
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return (4, *module.normalized_shape)
    if isinstance(module, nn.MultiheadAttention):
        return (4, 3, module.embed_dim)
    if isinstance(module, nn.Softmax) and module.dim is not None:
        return (3,) * max(2, module.dim + 1, -module.dim)
    return (4, 33)


def _twin(module: nn.Module, values: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy in evaluation mode, each tensor (weight_norm's plain ones too) replaced by ``values`` of it."""
    twin = type(module).__new__(type(module))
    state: dict[str, Any] = {
        name: values(v) if isinstance(v, Tensor) else v for name, v in vars(module).items()
    }
    for group in ("_parameters", "_buffers"):
        state[group] = {name: None if t is None else values(t) for name, t in state[group].items()}
    if isinstance(module, nn.MultiheadAttention):  # the one that computes with a submodule's parameters
        state["_modules"] = {name: _twin(child, values) for name, child in module._modules.items() if child}
    vars(twin).update(state, training=False)
    return twin


def _values(tensor: Tensor, random: Callable[..., Tensor], device: torch.device) -> Tensor:
    """The tensor's own values; random ones near 1 where it has none here (on the meta device, sharded)."""
    if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):
        return (1.0 + 0.1 * random(tensor.shape)).to(tensor.dtype).to(device)
    return tensor.detach().clone()


def _exact(tensor: Tensor) -> Tensor:
    tensor = tensor.cpu()  # first: not every device has float64
    return tensor.double() if tensor.is_floating_point() else tensor


def _run(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Result, and the gradient of a weighted sum of it with respect to the input."""
    with torch.autocast(x.device.type, enabled=False), Unrounded():
        leaf = x.detach().clone().requires_grad_()
        y = function(leaf * 1.0)  # not a leaf: it may work in place
        weights = (
            torch.linspace(0.0, 7.0, y.numel(), dtype=torch.float64, device="cpu").cos().reshape(y.shape)
        )
        (gradient,) = torch.autograd.grad(y, leaf, weights.to(y.dtype).to(y.device))
    return y.detach(), gradient
