"""Which modules :func:`pyckpt.convert` may swap, and the proof that a swap changes nothing.

The torch.nn layers are known by their exact type. Activation and norm classes of other libraries (Hugging Face
has hundreds) are known by what they compute, never by name or import path: their code is read (source.py), the
forward is run under observation (recording.py), and what it computes is compared with the fused function, values
and derivatives, in float64 (activations.py, norms.py). Whatever fails is left alone, with the reason.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import activation as torch_activations
from torch.nn.utils.parametrize import is_parametrized

from .. import functional as fused_functions
from ..ops.attention import has_kernels
from .activations import EXACT, prove_activation
from .base import FUSED_CLASSES, TORCH_CLASSES, Proof, Target, Unprovable, describe
from .norms import prove_norm
from .recording import ELEMENTWISE, NORMALISING, STATISTICS
from .subject import Subject

__all__ = ["FUSED_CLASSES", "Target", "classify", "describe"]


def classify(module: nn.Module, *, float64: bool = False) -> Target | str | None:
    """Decide about one module: a :class:`Target` to swap to, a reason to leave it, or None: not our concern.

    ``float64`` says that the model holds float64 parameters: activation classes whose constants are only
    accurate to float32 are then left, since there the difference would be seen.
    """
    cls = type(module)
    if cls in TORCH_CLASSES:
        return instance_obstacle(module) or Target(TORCH_CLASSES[cls])
    if cls in _TRANSFORMER_LAYERS:
        return _transformer_layer(module)
    if isinstance(module, torch.jit.ScriptModule):
        name = str(getattr(module, "original_name", cls.__name__))
        return "TorchScript module: its forward is compiled already" if _expected(name, module) else None
    family = isinstance(module, _FAMILIES)
    if family and (reason := instance_obstacle(module) or _why_not_torch(module)):
        return reason
    if cls.__module__.startswith("torch.nn.modules."):  # nn.Linear, nn.Identity, containers...
        return None
    verdict = _prove(module)
    if isinstance(verdict, Proof):
        if not float64 or verdict.error <= EXACT:
            return verdict.target
        new = describe(verdict.target.cls)
        verdict = f"equals {new} only to {verdict.error:.0e}, and the model has float64 parameters"
    if family:
        return f"a subclass of {describe(_base(cls))}: {verdict}"
    return verdict if _expected(cls.__name__, module) else None


# ---- torch.nn's own classes --------------------------------------------------------------------------------

_FAMILIES: tuple[type[nn.Module], ...] = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
    nn.modules.batchnorm._NormBase,  # batch and instance norms
    nn.modules.dropout._DropoutNd,
    *(getattr(nn, name) for name in torch_activations.__all__ if name != "MultiheadAttention"),
)


def instance_obstacle(module: nn.Module) -> str:
    """Why this instance, though of a class we serve, must stay as it is; empty if there is no reason."""
    cls = type(module)
    if "forward" in vars(module):
        return "has a forward of its own, set on the instance (accelerate, Liger and others do so)"
    forward, served = cls.forward, cls in TORCH_CLASSES or cls in _TRANSFORMER_LAYERS
    if served and (forward.__module__, forward.__qualname__) != (cls.__module__, f"{cls.__name__}.forward"):
        return f"{describe(cls)}.forward has been replaced by {forward.__module__}.{forward.__qualname__}"
    if is_parametrized(module):
        return "parametrized (torch.nn.utils.parametrize): its class was made for this instance"
    if any(c.__name__ == "FSDPModule" for c in cls.__mro__):
        return f"{cls.__name__} was made by fully_shard: convert before sharding"
    if getattr(module, "qconfig", None) is not None:
        return "prepared for quantization (qconfig): torch.ao looks it up by its class"
    if any(p is not None and nn.parameter.is_lazy(p) for p in module._parameters.values()):
        return "not initialised yet: run one forward, then convert"
    if isinstance(module, nn.MultiheadAttention):
        device = module.out_proj.weight.device
        if not has_kernels(device):
            return f"attention has no kernels on {device.type} here, and torch's own may keep less there"
    return ""


def _why_not_torch(module: nn.Module) -> str:
    """Why an instance of torch's norm, activation, dropout and softmax families cannot be; empty if it may be proven."""
    cls = type(module)
    if cls.__module__.startswith("torch.nn.modules."):
        return f"no fused counterpart of {describe(cls)}"
    if re.match(r"torch\.(ao\.)?(nn\.)?(intrinsic|qat|quantiz)", cls.__module__) or cls.__module__.startswith(
        "torch.ao."
    ):
        return f"quantized or prepared for quantization ({describe(cls)})"
    base = _base(cls)
    if base in _PROVABLE:
        return ""
    if cls.forward is getattr(base, "forward", None):
        return f"{describe(cls)} is a subclass of {describe(base)}; only {describe(base)} itself is swapped"
    return f"{describe(cls)}, a subclass of {describe(base)}, has a forward of its own"


def _base(cls: type[nn.Module]) -> type[nn.Module]:
    """The first class that is torch's or our own."""
    return next(c for c in cls.__mro__ if c in FUSED_CLASSES or c.__module__.startswith("torch.nn.modules."))


_PROVABLE = (nn.LayerNorm, nn.RMSNorm, nn.GELU, nn.SiLU, nn.ReLU)  # subclasses of these


_NAMES = re.compile(
    r"norm(?!al)|gelu|relu|silu|swish|mish|dropout|drop_?path|softmax|softplus|activation", re.IGNORECASE
)


def _expected(name: str, module: nn.Module) -> bool:
    """Would a reader of the report look for this one? By name; modules with children are blocks."""
    return set(module._modules.keys()) <= {"parametrizations"} and bool(
        _NAMES.search(name) or re.search(r"(^|[a-z_])Act($|[A-Z_\d])", name)
    )


# ---- functions held as attributes --------------------------------------------------------------------------

_FUSED_FUNCTIONS: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    F.gelu: fused_functions.gelu,
    F.silu: fused_functions.silu,
    F.relu: fused_functions.relu,
    torch.relu: fused_functions.relu,
}


_TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def _transformer_layer(module: nn.Module) -> Target | None:
    """The function that torch's Transformer layers apply between their Linears.

    Their fast path in evaluation goes by ``activation_relu_or_gelu``, which the constructor has set, and by the
    parameters of their norms: both stay.
    """
    activation = vars(module).get("activation")
    options: functools.partial[Tensor] | None = (
        activation if isinstance(activation, functools.partial) else None
    )
    function = _FUSED_FUNCTIONS.get(activation if options is None else options.func)  # type: ignore[arg-type]
    if function is None or instance_obstacle(module):
        return None
    if options is not None:
        function = functools.partial(function, *options.args, **options.keywords)
    return Target(type(module), {"activation": function})


# ---- classes of other libraries ----------------------------------------------------------------------------

_LARGEST = 1 << 17  # elements of a norm's weight; more would make probing slow

# Proofs and refusals, by class, then by forward and options. Weak: classes made in a notebook can die.
_verdicts: weakref.WeakKeyDictionary[type, dict[Hashable, Proof | str]] = weakref.WeakKeyDictionary()


def _prove(module: nn.Module) -> Proof | str:
    """The proof that ``module`` computes one of our functions on any input, or why there is none."""
    cls = type(module)
    try:
        if obstacle := instance_obstacle(module):
            raise Unprovable(obstacle)
        if module._modules:
            raise Unprovable(f"{describe(cls)} has submodules: no plain activation or norm")
        subject = Subject(module)
        if len(subject.shapes) > 2 or any(math.prod(shape) > _LARGEST for shape in subject.shapes.values()):
            raise Unprovable(f"{describe(cls)} has more parameters than the weight and bias of a norm")
    except Unprovable as reason:
        return str(reason)
    known = _verdicts.setdefault(cls, {})
    if subject.key not in known:
        # In a thread of its own, since a verdict lasts: what surrounds us (autocast, inference mode, function and
        # dispatch modes, torch.func, hooks on saved tensors, torch.compile at work) is all kept by thread.
        with ThreadPoolExecutor(1) as thread, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of dtypes and sizes that no model has
            try:
                known[subject.key] = thread.submit(_prove_subject, subject).result()
            except Unprovable as reason:
                known[subject.key] = str(reason)
            except Exception as error:  # not cached: the cause may be a passing one
                return f"{describe(cls)} could not be probed ({type(error).__name__})"
    return known[subject.key]


def _prove_subject(subject: Subject) -> Proof:
    subject.check_class()
    norm = (
        bool(subject.shapes)
        or issubclass(subject.cls, (nn.LayerNorm, nn.RMSNorm))
        or _takes_statistics(subject)
    )
    proof = prove_norm(subject) if norm else prove_activation(subject)
    base, new = _base(subject.cls), proof.target.cls
    if not issubclass(new, base):
        raise Unprovable(f"{subject.name} computes what {describe(new)} does, yet is a {describe(base)}")
    return proof


def _takes_statistics(subject: Subject) -> bool:
    shape = subject.options.get("normalized_shape")
    x = torch.ones(2, 3, *(shape if isinstance(shape, tuple) else (4,)), dtype=torch.float64, device="cpu")
    _, record = subject.run(subject.make(), x, ELEMENTWISE | NORMALISING, exact=True)
    return any(call[0] in _STATISTICS for call in record.calls)


_STATISTICS = {function.__name__ for function in STATISTICS}
