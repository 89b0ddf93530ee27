"""Results are checked before they are timed: a fast wrong kernel is not a result.

The rule, for the output and for every gradient: ``max|y - y64| <= 1.1 max|eager - y64| + one ulp of
max|y64|`` in the dtype, y64 being eager PyTorch's own expression evaluated in float64 on the same (already
rounded) inputs. float64 itself has no wider oracle here: there the difference to eager may reach 64 ulp of
max|y64|, the rounding of sums of thousands of terms taken in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_FLOAT64_ULPS = 64
_SIGMAS = 6.0
_MASK_SEED = 20260101


class CheckFailed(Exception):
    """A result is further from the float64 oracle than the rule allows."""


def ulp(value: float, dtype: torch.dtype) -> float:
    """Distance between `value` and the next larger number of `dtype` (the smallest subnormal at 0)."""
    info = torch.finfo(dtype)
    if value < info.tiny:
        return float(info.tiny) * float(info.eps)
    return float(info.eps) * 2.0 ** math.floor(math.log2(value))


def grads(
    fn: Callable[..., Tensor], inputs: Sequence[Tensor], grad_output: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Output of `fn` and its gradients with respect to `inputs`."""
    output = fn(*inputs)
    return output, torch.autograd.grad(output, list(inputs), grad_output.to(output.dtype))


@dataclass(frozen=True)
class Error:
    """Largest distances from the oracle, ours and eager's, and one ulp of the oracle's largest value."""

    name: str
    got: float
    eager: float
    ulp: float


def _error(name: str, got: Tensor, eager: Tensor, oracle: Tensor) -> Error:
    if got.shape != eager.shape or got.dtype != eager.dtype:
        raise CheckFailed(
            f"{name}: {tuple(got.shape)} {got.dtype} where eager gives {tuple(eager.shape)} {eager.dtype}"
        )
    if oracle.numel() == 0:
        return Error(name, 0.0, 0.0, 0.0)
    got, eager, oracle = got.detach(), eager.detach(), oracle.detach()
    one = ulp(float(oracle.abs().max()), got.dtype)
    if got.dtype == torch.float64:
        one *= _FLOAT64_ULPS
    return Error(
        name, float((got.double() - oracle).abs().max()), float((eager.double() - oracle).abs().max()), one
    )


def errors(
    fn: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    grad_output: Tensor,
) -> list[Error]:
    """Errors of `fn` and of `reference` (eager, deterministic): the output's and every gradient's.

    Raises:
        CheckFailed: a shape or dtype differs from eager's.
    """
    got, got_grads = grads(fn, inputs, grad_output)
    eager, eager_grads = grads(reference, inputs, grad_output)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    oracle, oracle_grads = grads(reference, wide, grad_output.double())
    found = [_error("output", got, eager, oracle)]
    for index, triple in enumerate(zip(got_grads, eager_grads, oracle_grads, strict=True)):
        found.append(_error(f"gradient of input {index}", *triple))
    return found


def judge(found: Sequence[Error], slack: float = 1.0) -> None:
    """Apply the rule, to the largest errors where several draws of the inputs are given.

    `slack` widens the rule for a peer that is only there to be timed.

    Raises:
        CheckFailed: naming the result, its error and the error allowed.
    """
    for name in dict.fromkeys(error.name for error in found):
        draws = [error for error in found if error.name == name]
        limit = slack * (1.1 * max(error.eager for error in draws) + max(error.ulp for error in draws))
        for error in draws:
            if not error.got <= limit:  # a NaN must fail
                raise CheckFailed(f"{name}: max error {error.got:.3g} against float64, allowed {limit:.3g}")


def errors_random(
    fn: Callable[..., Tensor],
    with_mask: Callable[[Tensor], Callable[..., Tensor]],
    inputs: Sequence[Tensor],
    grad_output: Tensor,
    drop: float,
    shows_mask: Callable[[Callable[..., Tensor]], Tensor] | None = None,
) -> list[Error]:
    """`errors` for an op that drops elements at random.

    The mask is read off the output (dropped means zero), or off what `shows_mask` makes of an implementation; its share of kept
    elements is tested against the binomial distribution at 6 sigma, and output and gradients must be those of the expression
    ``with_mask(mask)`` with that very mask, so a backward that draws another mask fails.

    Raises:
        CheckFailed: the mask is not what it should be.
    """

    def same_mask(*tensors: Tensor) -> Tensor:
        torch.manual_seed(_MASK_SEED)
        return fn(*tensors)

    shows_mask = shows_mask or (lambda function: function(*inputs))
    output = shows_mask(same_mask)
    everything = shows_mask(with_mask(torch.ones_like(output, dtype=torch.bool)))
    possible = everything != 0
    mask = (output != 0) & possible
    total, kept = int(possible.sum()), int(mask.sum())
    sigma = math.sqrt(total * drop * (1 - drop))
    if abs(kept - total * (1 - drop)) > _SIGMAS * sigma:
        raise CheckFailed(
            f"mask: kept {kept} of {total} elements, expected a share of {1 - drop:g} within 6 sigma"
        )
    if total and not torch.equal(output == 0, ~mask):
        raise CheckFailed("mask: an element that the mask excludes is not zero")
    return errors(same_mask, with_mask(mask), inputs, grad_output)


def relative_difference(found: Sequence[Tensor], eager: Sequence[Tensor]) -> float:
    """The largest difference from eager in any gradient, relative to the largest value of that gradient."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, eager, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def too_far(
    found: Sequence[Tensor],
    eager: Sequence[Tensor],
    exact: Sequence[Tensor],
    dtype: torch.dtype,
    slack: float,
) -> str:
    """Which gradient is further from float64 than ``slack * (1.1 * eager's distance + eps)``; empty if none.

    Distances are norms of the difference, relative to the norm in float64; `eps` is that of `dtype`, in which
    the stack computes.
    """
    for index, (a, b, c) in enumerate(zip(found, eager, exact, strict=True)):
        whole = float(c.norm())
        got, theirs = (float((t.double() - c).norm()) / whole for t in (a, b))
        limit = slack * (1.1 * theirs + torch.finfo(dtype).eps)
        if not got <= limit:  # a NaN must fail
            return f"gradient {index} is {got:.3g} from float64 in norm, allowed {limit:.3g}"
    return ""
