"""The recompute engine: what a forward saves for backward is replaced by how to rebuild it.

Inside a region (:func:`recompute`) every tensor that autograd saves passes through :meth:`Region.pack`. Where the tensor is
the output of a node that has a rule (rules.py), the saver is given a recipe in its place (_records.py): a function, and the
records of what the producing node itself saved. The tensor dies with the forward; in backward the recipe is followed once, its
result shared by all savers, and let go when the last of them has run.

Rules are not trusted: at the first use of each kind (node, dtypes, layout, device) the recipe is followed at once, and its bits
compared with the tensor at hand.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy

from . import backends
from ._records import Outer, Recipe, RecomputeError, Source, is_freed, regions, unpack
from ._rules_torch import OWN_OUTPUT
from .ops._registry import is_sharded
from .rules import Output, Unavailable, is_users, rule_of, saved

__all__ = ["Policy", "RecomputeError", "recompute"]

#: Tensors of fewer elements are kept (unless a user has given the rule): a recipe takes about as much.
MIN_ELEMENTS = 256

#: Nodes in a row that may be run again to rebuild one tensor because they keep nothing themselves (rotary embeddings take 7).
MAX_DEPTH = 8

#: Versions that the tests are run with. Rules read attributes of autograd nodes that PyTorch does not document.
TESTED = ("2.13", "2.14")

#: (node, FLOPs of rebuilding, bytes of the tensor) -> save or recompute.
Policy = Callable[[Any, int, int], CheckpointPolicy]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)

# Whether recipes of a kind gave the bits of the tensor they replace.
_verdicts: dict[tuple[Any, ...], bool] = {}


class Region:
    """One activation of the engine in one thread."""

    def __init__(self, policy: str | Policy, verify: bool):
        self.policy = None if isinstance(policy, str) else policy
        self.verify = verify
        self.kept = self.rebuilt = 0  # tensors large enough to matter
        self.depth = 0
        # PyTorch calls the topmost pair of hooks only, so the region calls the pair below it; but not another region's.
        below = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.below = regions.stack[-1][1].below if below is not None and below[1] is unpack else below
        self.hooks = saved_tensors_hooks(self.pack, unpack)

    def pack(self, tensor: Tensor) -> Any:
        """The pack hook: a record in place of the tensor. It runs for all that autograd saves; most leave at the first tests."""
        node = tensor.grad_fn
        if node is not None:
            whole = tensor
            if tensor._base is not None:
                whole = tensor._base
                node = whole.grad_fn
            if (
                node is not None
                and (whole.numel() >= MIN_ELEMENTS or is_users(node))
                and (type(tensor) is Tensor or is_sharded(tensor))
            ):
                try:
                    recipe = self.recipe(tensor, whole, node)
                    self.rebuilt += 1
                    return recipe
                except Unavailable:
                    self.kept += 1
        return (tensor, tensor._version) if self.below is None else self.keep(tensor)

    def keep(self, tensor: Tensor) -> Any:
        """For the hooks below."""
        pack, unpack_below = self.below
        return Outer(tensor.shape, pack(tensor), unpack_below)

    def recipe(self, tensor: Tensor, whole: Tensor, node: Any) -> Recipe:
        """Raises Unavailable where the tensor has to be kept. It is all or a view of `whole`, which `node` made: views, and
        identities such as a full backward hook's, are seen through."""
        if whole.layout is not torch.strided or whole.is_quantized or whole.is_nested:
            raise Unavailable("not a dense tensor")
        geometry = None
        if whole is not tensor:
            if whole.dtype is not tensor.dtype:
                raise Unavailable("a view in another dtype")
            geometry = (tensor.shape, tensor.stride(), tensor.storage_offset() - whole.storage_offset())
        if whole._version:
            raise Unavailable("changed in place")
        number = whole.output_nr
        source = Source.find(node, number)
        if source is None or not source.saved:
            source = self._source(node, Output(whole.shape, whole.dtype, whole.device, number))
            if self.policy is not None:
                choice = self.policy(_computes(source).node, source.flops(), whole.nbytes)
                if choice in _SAVE:
                    raise Unavailable("the policy saves it")
            if type(whole) is not Tensor:
                _check_sharding(source, whole)
            self._check(source, whole)
            source.stride = whole.stride()
            source.saved = True
        return Recipe(source, tensor, geometry)

    def _source(self, node: Any, output: Output) -> Source:
        source = Source.find(node, output.number)
        if source is not None:
            return source
        rule = rule_of(node)
        if rule is None:
            raise Unavailable(
                "{} keeps its output itself" if node.name() in OWN_OUTPUT else "no rule for {}", node
            )
        if rule.matrix and self.policy is None:
            raise Unavailable("{} is a matrix product", node)
        function, operands = rule.capture(node, output, functools.partial(self._edge, node))
        for record in operands:
            if type(record) is tuple and record[0].is_leaf and is_freed(record[0]):
                raise Unavailable("it reads a parameter whose storage is freed")
        return Source(node, output, rule, function, operands)

    def _edge(self, reader: Any, index: int) -> Any:
        """The record of an input that its reader does not keep."""
        node, number = reader.next_functions[index]
        if node is None:
            raise Unavailable("{} does not keep an input, which is a constant", reader)
        name = type(node).__name__
        if name == "AccumulateGrad":
            return node.variable, node.variable._version
        if name in OWN_OUTPUT and number == 0:
            return saved(node, OWN_OUTPUT[name])
        meta = node._input_metadata[number]
        return Recipe(
            self._source(node, Output(tuple(meta.shape), meta.dtype, meta.device, number)), None, None
        )

    def _check(self, source: Source, whole: Tensor) -> None:
        """Raises Unavailable unless recipes of this kind are known, or now seen, to give the bits of the original."""
        rule = source.rule
        if self.below is not None and not source.readable_in_forward():
            # The choice has to be the same when a checkpoint replays this forward, whatever was learnt in between.
            if not rule.same_call:
                raise Unavailable("{} cannot be checked under other saved-tensor hooks", source.node)
            return
        if rule.sampled and not _samples_agree(source, whole):
            raise Unavailable("its input has changed since")
        kinds = tuple(map(_kind, source.operands))
        kind = (rule, whole.dtype, whole.shape[-1:], whole.is_contiguous(), whole.device, kinds)
        verdict = None if self.verify else _verdicts.get(kind)
        if verdict is None:
            verdict = _verdicts[kind] = _gives_same_bits(source, whole)
        if not verdict:
            raise Unavailable("its rule does not give the same bits here")


def _check_sharding(source: Source, whole: Any) -> None:
    """A DTensor is rebuilt where that needs no communication: by a rule of single elements, from operands laid out alike."""
    if not source.rule.elementwise:
        raise Unavailable("a DTensor that is no function of single elements")
    for tensor in (whole, *(record[0] for record in source.operands if type(record) is tuple)):
        if (
            not is_sharded(tensor)
            or tensor.placements != whole.placements
            or tensor.device_mesh != whole.device_mesh
        ):
            raise Unavailable("a DTensor made of differently placed ones")
        if any(placement.is_partial() for placement in tensor.placements):
            raise Unavailable("a DTensor that holds partial sums")
    if any(type(record) is Outer for record in source.operands):
        raise Unavailable("a DTensor under other saved-tensor hooks")
    for record in source.operands:
        if type(record) is Recipe:
            _check_sharding(record.source, whole)


def _computes(source: Source) -> Source:
    """The source itself, or what it is a view or copy of."""
    while source.rule.view and type(source.operands[0]) is Recipe:
        source = source.operands[0].source
    return source


def _kind(record: Any) -> Any:
    if type(record) is tuple:
        return record[0].dtype, record[0].is_contiguous()
    return record.source.rule if type(record) is Recipe else type(record)


def _samples_agree(source: Source, whole: Tensor) -> bool:
    (record,) = source.operands
    if type(record) is not tuple:
        return True
    index = (0,) * max(0, whole.dim() - 1) + (slice(16),) * min(1, whole.dim())
    with torch.no_grad():
        return _same_bits(source.function(record[0][index]), whole[index])


def _gives_same_bits(source: Source, whole: Tensor) -> bool:
    rule = source.rule
    try:
        rebuilt = source.get()
    except Exception as error:
        if rule.built_in:
            raise Unavailable(
                "its rule failed: " + str(error).replace("{", "{{").replace("}", "}}")
            ) from error
        raise RecomputeError(
            f"the recompute rule of {_place(source)} raised {type(error).__name__}: {error}. Correct the rule, or keep this "
            "node's output by a policy"
        ) from error
    made = f"{tuple(whole.shape)}, {whole.dtype}"
    if not isinstance(rebuilt, Tensor) or rebuilt.shape != whole.shape or rebuilt.dtype is not whole.dtype:
        found = (
            f"{tuple(rebuilt.shape)}, {rebuilt.dtype}"
            if isinstance(rebuilt, Tensor)
            else type(rebuilt).__name__
        )
        problem = f"returned {found} where the forward made {made}"
    elif _same_bits(rebuilt, whole):
        return True
    else:
        problem = f"does not give the bits that the forward made ({made})"
    if rule.built_in:
        _warn_once(
            f"pyckpt.recompute: the rule of {_place(source)} {problem}; such outputs on {whole.device} are kept instead, and "
            "pyckpt.explain(model, ...) lists them"
        )
        return False
    raise RecomputeError(
        f"the recompute rule of {_place(source)} {problem}. It must return the forward's output, computed by the same operations "
        "in the same order"
    )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN equals NaN here, and 0 equals -0. Of DTensors this process' parts."""
    if is_sharded(a) and is_sharded(b):
        return a.placements == b.placements and _same_bits(a.to_local(), b.to_local())  # type: ignore[attr-defined]
    return a.device == b.device and (torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all()))


def _place(source: Source) -> str:
    """Node and module, the latter from the stack of the forward that is running."""
    frame = sys._getframe()
    modules = []
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and frame.f_code.co_name == "forward":
            modules.append(owner)
        frame = frame.f_back  # type: ignore[assignment]
    name = source.node.name()
    if not modules:
        return name
    path = next((path for path, module in modules[-1].named_modules() if module is modules[0]), "")
    return f"{name} in {type(modules[0]).__name__}{f' ({path})' if path else ''}"


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=_user_level())


def _user_level() -> int:
    """Levels up to the first frame outside this package and PyTorch."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "pyckpt",
        "torch",
    ):
        level, frame = level + 1, frame.f_back
    return level


def _steps_aside() -> str:
    """Why the engine must not act here; empty if it may."""
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform encloses the region: put the region around the transform's caller, or do without"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace is recording"
    return _unsupported()


@functools.cache
def _unsupported() -> str:
    """What this version of PyTorch lacks; warns of versions that the tests are not run with."""
    if not hasattr(torch._C._autograd.SavedTensor, "data") or not hasattr(
        torch._C._autograd, "_top_saved_tensors_default_hooks"
    ):
        return f"PyTorch {torch.__version__} does not show what autograd nodes keep (tested: {', '.join(TESTED)})"
    if not torch.__version__.startswith(TESTED):
        _warn_once(
            f"pyckpt.recompute is not tested with PyTorch {torch.__version__} (but with {', '.join(TESTED)}). Each rule is "
            "checked at its first use all the same"
        )
    return ""


@torch.compiler.assume_constant_result
def _warn_of_compile() -> bool:
    _warn_once(
        "pyckpt.recompute does nothing inside torch.compile, whose partitioner decides itself what to recompute "
        "(torch._functorch.config.activation_memory_budget). A region around a compiled module works on what lies outside it"
    )
    return True


def enter(policy: str | Policy, verify: bool, owner: object, kind: type[Region] = Region) -> None:
    """Begins a region that :func:`leave` with the same owner ends."""
    if torch.compiler.is_compiling():
        _warn_of_compile()
        return
    if backends.disabled() or regions.suspended:
        return
    reason = _steps_aside()
    if reason:
        _warn_once(f"pyckpt.recompute does nothing here: {reason}")
        return
    region = kind(policy, verify)
    region.hooks.__enter__()
    regions.stack.append((owner, region))


def leave(owner: object, failed: bool = False) -> None:
    if torch.compiler.is_compiling() or not regions.stack or regions.stack[-1][0] is not owner:
        return
    _, region = regions.stack.pop()
    region.hooks.__exit__()
    if region.kept and not region.rebuilt and not failed:
        _warn_once(
            "pyckpt.recompute: nothing in this region could be recomputed; it costs time and saves nothing. "
            "pyckpt.explain(model, ...) tells why for each tensor"
        )


class recompute:
    """Context manager and decorator: forwards inside do not keep what backward can cheaply rebuild.

    ::

        with pyckpt.recompute():
            loss = model(input).loss
        loss.backward()

    Outputs and gradients are the same bits as without. Outputs of elementwise ops (activations, products, casts), norms, dropout
    of this package, embeddings and views of all of these are rebuilt inside backward, from what their own nodes keep; the model
    is not touched. Use it around several forwards, in several threads, nested, under or around ``torch.utils.checkpoint`` and
    ``save_on_cpu``: hooks that were active before are called for what is kept. Inside ``torch.compile``, ``torch.func``
    transforms and ``torch.jit.trace`` it does nothing, and warns once; a ``torch.func.grad`` *inside* a region is refused by
    PyTorch: leave the region for it.

    Args:
        policy: ``"pointwise"``: rebuild whatever needs no matrix product; or a function
            ``(node, flops, bytes) -> torch.utils.checkpoint.CheckpointPolicy`` asked for each tensor that can be rebuilt, matrix
            products and convolutions included.
        verify: compare the bits of every rebuilt tensor in forward already, instead of at the first use of each kind.

    Raises:
        ValueError: an unknown name of a policy.
        RecomputeError: in backward, where a tensor that a recipe reads was changed in place since; in forward, where a rule of
            :func:`register_rule` is wrong.

    With ``PYCKPT_DISABLE=1`` in the environment it does nothing.
    """

    def __init__(self, policy: str | Policy = "pointwise", *, verify: bool = False):
        if policy != "pointwise" and not callable(policy):
            raise ValueError(
                f"recompute: policy must be 'pointwise' or a function (node, flops, bytes) -> CheckpointPolicy, got {policy!r}"
            )
        self.policy, self.verify = policy, verify

    def __enter__(self) -> recompute:
        enter(self.policy, self.verify, self)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        leave(self, kind is not None)

    def __call__(self, function: FunctionT) -> FunctionT:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with recompute(self.policy, verify=self.verify):
                return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]
