"""The recompute engine: what a forward saves for backward is replaced by how to rebuild it.

Inside a region (:func:`recompute`) every tensor that autograd saves passes through :meth:`Region.pack`. Where the tensor is
the output of a node that has a rule (rules.py), the saver is given a recipe in its place (_records.py): a function, and the
records of what the producing node itself saved. The tensor dies with the forward; in backward the recipe is followed once, its
result shared by all savers, and let go when the last of them has run.

Rules are not trusted: at the first use of each kind (node, dtypes, layout, device) and at each place of a region the recipe is
followed at once, and its bits compared with the tensor at hand.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy

from . import _rules_matrix, _rules_torch, backends  # noqa: F401  # their rules
from ._checks import check_bits, check_sharding, warn_once
from ._levels import check_policy, check_products, hold, products_of, reads_of
from ._records import (
    Leaf,
    Outer,
    Recipe,
    RecomputeError,
    Source,
    is_freed,
    leaf_versions,
    regions,
    unpack,
    watchers,
)
from ._support import may_save_its_output, steps_aside, warn_of_compile
from .ops._registry import is_sharded
from .rules import OWN_OUTPUT, USERS, Output, Unavailable, is_users, rule_of, saved

__all__ = ["Policy", "RecomputeError", "recompute"]

#: Tensors of fewer elements are kept (unless a user has given the rule): a recipe takes about as much.
MIN_ELEMENTS = 256

#: Nodes in a row that may be run again to rebuild one tensor because they keep nothing themselves (rotary embeddings take 7).
MAX_EDGES = 12

#: Rebuilt tensors in a row, each from the one before (as in a recurrent network): the next is kept.
MAX_CHAIN = 32

#: (node, FLOPs of rebuilding, bytes of the tensor) -> save or recompute.
Policy = Callable[[Any, int, int], CheckpointPolicy]

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_SAVE = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class Region:
    """One activation of the engine in one thread."""

    def __init__(self, policy: str | Policy, verify: bool):
        self.policy = None if isinstance(policy, str) else policy
        self.verify = verify
        self.kept = self.rebuilt = 0  # tensors large enough to matter
        self.depth = 0
        self.ended = False
        self.frame: tuple[int, CodeType] | None = None
        # Leaves that an edge leads to are read when their reader's output is saved, which may be after an optimizer's step. Those
        # whose version has not changed since the region began, and before the reader ran, are as the reader saw them.
        self.start = torch._C._autograd._get_sequence_nr()
        self.versions = leaf_versions()
        self.since: dict[int, int] = {}  # where not from the start
        # PyTorch calls the topmost pair of hooks only, so the region calls the pair below it; but not another region's.
        below: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.below = below[0].__self__.below if below is not None and below[1] is unpack else below
        self.products = products_of(policy, self.below)
        self.hooks: Any = saved_tensors_hooks(self.pack, unpack)  # a cycle, until they are taken off

    def pack(self, tensor: Tensor) -> Any:
        """The pack hook: a record in place of the tensor. It runs for all that autograd saves; most leave at the first tests."""
        node = tensor.grad_fn
        if node is None:
            return (tensor, tensor._version) if self.below is None else self.keep(tensor)
        base = tensor._base
        whole = tensor if base is None else base
        if (whole.numel() >= MIN_ELEMENTS or USERS) and (base is None or base.grad_fn is not None):
            recipe = self._attempt(tensor, whole)
            if recipe is not None:
                return recipe
        if self.below is not None:
            return self.keep(tensor)
        if may_save_its_output(type(node)) or (base is not None and base._version):
            # A node that held its own output would be a cycle that no collector sees: an alias without history does as well.
            # (Of a view, a change in place may have been another node's.)
            return tensor.detach(), tensor._version
        return tensor, tensor._version

    def _attempt(self, tensor: Tensor, whole: Tensor) -> Recipe | None:
        """None where the tensor is kept."""
        try:
            recipe = self._recipe_if_worth(tensor, whole)
        except Unavailable:
            self.kept += 1
            for watcher in watchers:
                watcher.fell_back(tensor.nbytes)
            return None
        if recipe is not None:
            self.rebuilt += 1
            if self.products == "mlp" and recipe.source.products and _computes(recipe.source).rule.matrix:
                hold(recipe, (whole, whole._version) if self.below is None else self.keep(whole))
        return recipe

    def _recipe_if_worth(self, tensor: Tensor, whole: Tensor) -> Recipe | None:
        """None where a recipe is not worth its while; raises Unavailable where there is none."""
        node = whole.grad_fn
        if (
            node is None
            or self.ended
            or (whole.numel() < MIN_ELEMENTS and not is_users(node))
            or not (type(tensor) is Tensor or is_sharded(tensor))
        ):
            return None
        return self.recipe(tensor, whole, node)

    def keep(self, tensor: Tensor) -> Any:
        """For the hooks below."""
        pack, unpack_below = self.below
        shape = () if tensor.is_nested else tensor.shape  # the former has none, and no rule reads it
        return Outer(shape, pack(tensor), unpack_below)

    def recipe(self, tensor: Tensor, whole: Tensor, node: Any) -> Recipe:
        """Raises Unavailable where the tensor has to be kept. It is all or a view of `whole`, which `node` made: views, and
        identities such as a full backward hook's, are seen through."""
        if whole.layout is not torch.strided or whole.is_quantized or whole.is_nested or whole.is_meta:
            raise Unavailable("not a dense tensor with data")
        geometry = None
        if whole is not tensor:
            if whole.dtype is not tensor.dtype or tensor.is_conj() or tensor.is_neg():
                raise Unavailable("a view that reads its base in another way")
            geometry = (tensor.shape, tensor.stride(), tensor.storage_offset() - whole.storage_offset())
        if whole._version:
            raise Unavailable("changed in place")
        number = whole.output_nr
        source = Source.find(node, number)
        if source is None or not source.saved:
            source = self._source(node, Output(whole.shape, whole.dtype, whole.device, number), True)
            if self.policy is not None:
                choice = self.policy(_computes(source).node, source.flops(), whole.nbytes)
                if choice in _SAVE:
                    raise Unavailable("the policy saves it")
            if type(whole) is not Tensor:
                check_sharding(source, whole)
            self._check(source, whole)
            source.stride = whole.stride()
            source.saved = True
        # Hooks below may permit a change after the save, as those that copy do.
        return Recipe(source, whole if self.below is None else None, geometry)

    def can_rebuild(self, tensor: Tensor) -> bool:
        """Whether the region would rebuild this tensor, were it saved now."""
        whole = tensor if tensor._base is None else tensor._base
        try:
            return tensor.grad_fn is not None and self._recipe_if_worth(tensor, whole) is not None
        except Unavailable:
            return False

    def _source(self, node: Any, output: Output, direct: bool) -> Source:
        """`direct`: what is asked for is saved, as it is or seen through views; else it is on the way to what is saved."""
        source = Source.find(node, output.number)
        if source is not None:
            return source
        rule = rule_of(node)
        if rule is None:
            raise Unavailable(
                "{} keeps its output itself" if node.name() in OWN_OUTPUT else "no rule for {}", node
            )
        if rule.matrix and self.policy is None and not (self.products and rule.linear):
            raise Unavailable("{} is a matrix product", node)
        if rule.matrix and self.products and node._sequence_nr() < self.start:
            raise Unavailable("{} is a matrix product of another region", node)
        try:
            function, operands = rule.capture(
                node, output, functools.partial(self._edge, node, direct and rule.view)
            )
        except Unavailable:
            raise
        except Exception as error:  # of what a node keeps, which no version of PyTorch documents
            warn_once(
                f"pyckpt.recompute: the rule of {rule.name} does not fit PyTorch {torch.__version__} ({error})"
            )
            raise Unavailable("its rule does not fit this version of PyTorch") from None
        for record in operands:
            if type(record) is tuple and record[0].is_leaf and is_freed(record[0]):
                raise Unavailable("it reads a parameter whose storage is freed")
        source = Source(node, output, rule, function, operands)
        if source.chain > MAX_CHAIN:
            raise Unavailable("too many steps from what is kept")
        if self.products:
            if rule.pointwise:
                reads_of(source)
            if source.products:
                check_products(self.products, source, direct)
        return source

    def _edge(self, reader: Any, direct: bool, index: int) -> Any:
        """The record of an input that its reader does not keep."""
        node, number = reader.next_functions[index]
        if node is None:
            raise Unavailable("{} does not keep an input, which is a constant", reader)
        name = type(node).__name__
        if name == "AccumulateGrad":
            return self._leaf(node.variable, reader)
        if name in OWN_OUTPUT and number == 0:
            return saved(node, OWN_OUTPUT[name])
        if self.depth >= MAX_EDGES:
            raise Unavailable("too many steps from what is kept")
        meta = node._input_metadata[number]
        self.depth += 1
        try:
            source = self._source(node, Output(tuple(meta.shape), meta.dtype, meta.device, number), direct)
        finally:
            self.depth -= 1
        return Recipe(source, None, None)

    def _leaf(self, leaf: Tensor, reader: Any) -> Leaf:
        if is_freed(leaf):
            raise Unavailable("it reads a parameter whose storage is freed")
        key, version = id(leaf), leaf._version
        ran_since = reader._sequence_nr() >= self.since.get(key, self.start)
        as_read = ran_since and self.versions.get(key) == version
        if not as_read:
            self.versions[key], self.since[key] = version, torch._C._autograd._get_sequence_nr()
        return Leaf(leaf, as_read)

    def _check(self, source: Source, whole: Tensor) -> None:
        """Raises Unavailable unless recipes of this kind are known, or now seen, to give the bits of the original."""
        if source.outer:
            if self.below is None or source.outer != {self.below[1]}:
                # Of a checkpoint that has ended, say: to rebuild from it would replay it early, beside the one under way.
                raise Unavailable("{} ran under other saved-tensor hooks", source.node)
            # The choice has to be the same when a checkpoint replays this forward, whatever was learnt in between.
            if source.needs_check:
                raise Unavailable("{} cannot be checked under other saved-tensor hooks", source.node)
            return
        check_bits(source, whole, self.verify)


def _computes(source: Source) -> Source:
    """The source itself, or what it is a view or copy of."""
    while source.rule.view and type(source.operands[0]) is Recipe:
        source = source.operands[0].source
    return source


def enter(
    policy: str | Policy,
    verify: bool,
    owner: object,
    kind: type[Region] = Region,
    frame: FrameType | None = None,
) -> None:
    """Begins a region that :func:`leave` with the same owner ends; or, if it is never called, the end of `frame`."""
    if torch.compiler.is_compiling():
        warn_of_compile()
        return
    if regions.stack:
        _end_interrupted(frame)
    if not regions.stack:
        regions.place = 0
    if backends.disabled() or regions.suspended:
        return
    reason = steps_aside()
    if reason:
        warn_once(f"pyckpt.recompute does nothing here: {reason}")
        return
    region = kind(policy, verify)
    region.frame = None if frame is None else (id(frame), frame.f_code)
    region.hooks.__enter__()
    regions.stack.append((owner, region))


def leave(owner: object, failed: bool = False) -> None:
    if torch.compiler.is_compiling():
        return
    for key, region in reversed(regions.stack):
        if key is owner and not region.ended:
            break
    else:
        return
    region.ended = True
    _unwind()
    if region.kept and not region.rebuilt and not failed:
        warn_once(
            "pyckpt.recompute: nothing in this region could be recomputed; it costs time and saves nothing. "
            "pyckpt.explain(model, ...) tells why for each tensor"
        )


def _unwind() -> None:
    """Takes the hooks of ended regions off. One that others (a generator's, say) were begun in waits for them, idle."""
    while regions.stack and regions.stack[-1][1].ended:
        _, region = regions.stack.pop()
        region.hooks.__exit__()
        region.hooks = None


def _end_interrupted(begins: FrameType | None) -> None:
    """Ends regions on a model's forward that a KeyboardInterrupt has left: forward hooks run for an Exception only. The frame
    that begins one now (in the memory of a frame that is gone, it may be) has none yet."""
    waiting = [region for _, region in regions.stack if region.frame is not None and not region.ended]
    if not waiting:
        return
    running = set()
    frame = sys._getframe() if begins is None else begins.f_back
    while frame is not None:
        running.add((id(frame), frame.f_code))
        frame = frame.f_back
    for region in waiting:
        region.ended = region.frame not in running
    _unwind()


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
        policy: ``"pointwise"``: rebuild whatever needs no matrix product. ``"mlp"``: also products that only pointwise
            operations read (a Transformer's first MLP layer; gate and up), for about a tenth more work. ``"linear"``: those of
            every linear layer (queries, keys and values too), for about a fifth. At both, no product is rebuilt from another
            one, nor for a residual sum, nor one that ran before the region began; and inside ``torch.utils.checkpoint``, which
            runs them again itself, they are as ``"pointwise"``. Or a function ``(node, flops, bytes) -> CheckpointPolicy`` (of
            ``torch.utils.checkpoint``) asked for each tensor that can be rebuilt, matrix products and convolutions included.
        verify: compare the bits of every rebuilt tensor in forward already, instead of those in the first forward and now and
            then. That finds what autograd is not told of: an activation changed through ``.data``, numpy or, after it was used,
            under ``no_grad``, in some steps only.

    Raises:
        ValueError: an unknown name of a policy.
        RecomputeError: in backward, where a tensor that a recipe reads was changed in place since; in forward, where a rule of
            :func:`register_rule` is wrong.

    With ``PYCKPT_DISABLE=1`` in the environment it does nothing.
    """

    def __init__(self, policy: str | Policy = "pointwise", *, verify: bool = False):
        check_policy("recompute", policy)
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
