"""The layers inside PyTorch's other machinery: torch.func, forward-mode AD, saved-tensor hooks, checkpoint, threads."""

import gc
import threading
import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tests._layers import (
    COLUMNS,
    EXACT,
    LAYERS,
    RANDOM,
    assert_close,
    assert_equal,
    by_name,
    gradients,
    perturb,
)

exact = pytest.mark.parametrize("layer", **by_name(EXACT))
every = pytest.mark.parametrize("layer", **by_name(LAYERS))
costly = pytest.mark.parametrize("layer", **by_name(EXACT, costly=True))
random = pytest.mark.parametrize("layer", **by_name(RANDOM))


def _input(dtype=torch.float32, rows=(2, 5)):
    return torch.randn(*rows, COLUMNS, dtype=torch.float64).to(dtype)


def _call(module):
    """module as a function of its parameters and x."""
    return lambda parameters, x: torch.func.functional_call(module, parameters, (x,))


def _loss(module):
    call = _call(module)
    return lambda parameters, x: (call(parameters, x) ** 2 * torch.arange(COLUMNS)).sum()


# torch.func


@exact
def test_func_grad_and_functional_call(layer):
    ours, theirs = layer.pair()
    x = _input()
    results = []
    for module in (ours, theirs):
        parameters = {k: v.detach() for k, v in module.named_parameters()}
        g = torch.func.grad(_loss(module), argnums=(0, 1))(parameters, x)
        results.append([*g[0].values(), g[1]])
    assert_close(*results)


@costly
def test_vmap_and_per_sample_gradients(layer):
    ours, theirs = layer.pair()
    x = _input()
    results = []
    for module in (ours, theirs):
        parameters = {k: v.detach() for k, v in module.named_parameters()}
        y = torch.func.vmap(_call(module), in_dims=(None, 0))(parameters, x)
        last = torch.func.vmap(_call(module), in_dims=(None, 1), out_dims=1)(parameters, x.unsqueeze(0))
        per = torch.func.vmap(torch.func.grad(_loss(module)), in_dims=(None, 0))(parameters, x)
        results.append([y, last, *per.values()])
    assert_close(*results)


@costly
@pytest.mark.parametrize("transform", ["jacrev", "jacfwd", pytest.param("hessian", marks=pytest.mark.slow)])
def test_jacobians(layer, transform):
    ours, theirs = layer.pair()
    x = _input(torch.float64, rows=(2,))
    apply = getattr(torch.func, transform)
    assert_close([apply(ours.double())(x)], [apply(theirs.double())(x)])


@exact
def test_forward_mode(layer):
    ours, theirs = layer.pair()
    x, t = _input(), _input()
    for module in (ours, theirs):
        module.requires_grad_(False)
    assert_close(torch.func.jvp(ours, (x,), (t,)), torch.func.jvp(theirs, (x,), (t,)))
    results = []
    for module in (ours, theirs):
        with forward_ad.dual_level():
            results.append(forward_ad.unpack_dual(module(forward_ad.make_dual(x, t))))
    assert results[0].tangent is not None
    assert_close(results[0], results[1])


@exact
def test_forward_mode_over_a_recorded_graph(layer, backend):
    """A backward in the direction of grad_output's tangent: right, or refused where torch refuses; never dropped."""
    x = _input(torch.float64, rows=(5,)).requires_grad_()
    grad, tangent = torch.randn(2, 5, COLUMNS, dtype=torch.float64)
    results = []
    for module in layer.pair():
        y = module.double()(x)
        with forward_ad.dual_level():
            try:
                (g,) = torch.autograd.grad(y, x, forward_ad.make_dual(grad, tangent))
                results.append(forward_ad.unpack_dual(g))
            except NotImplementedError:  # torch has no such formula for some of its own
                results.append(None)
    if results[0] is None:
        assert results[1] is None
        return
    assert results[0].tangent is not None, "the tangent was dropped in silence"
    expected = torch.autograd.grad(layer.pair()[1].double()(x), x, tangent)
    assert_close([results[0].tangent], expected)


@every
def test_batched_gradients(layer, backend):
    """is_grads_batched runs our backward under vmap, though forward ran outside."""
    module = perturb(layer.ours())
    x = _input(rows=(5,)).requires_grad_()
    y = module(x)
    leaves = [x, *module.parameters()]
    grads = torch.randn(3, *y.shape)
    batched = torch.autograd.grad(y, leaves, grads, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(y, leaves, g, retain_graph=True) for g in grads]
    assert_close(batched, [torch.stack(g) for g in zip(*one_by_one, strict=True)])


@costly
def test_vectorized_jacobian(layer):
    x = _input(torch.float64, rows=(2,))
    ours, theirs = (m.double() for m in layer.pair())
    jacobian = torch.autograd.functional.jacobian
    for strategy in ("reverse-mode", "forward-mode"):
        assert_close([jacobian(ours, x, vectorize=True, strategy=strategy)], [jacobian(theirs, x)])


@random
@pytest.mark.parametrize("randomness", ["same", "different", "error"])
def test_vmap_of_dropout(layer, randomness):
    module = layer.ours()
    x = torch.ones(3, 5, COLUMNS)
    if randomness == "error":
        with pytest.raises(RuntimeError, match="random"):
            torch.func.vmap(module)(x)
        return
    y = torch.func.vmap(module, randomness=randomness)(x)
    same = [torch.equal(y[0] == 0, y[i] == 0) for i in (1, 2)]
    assert all(same) if randomness == "same" else not any(same)
    assert (y[:, :, :] == 0).any() and (y != 0).any()


# Double backward, batches of threads, graphs that are freed


@exact
def test_double_backward(layer, backend):
    """Every second derivative against float64 torch: in x, the parameters and grad_output."""
    results = []
    for module in layer.pair():
        module.double()
        torch.manual_seed(2)
        x, grad = _input(torch.float64).requires_grad_(), _input(torch.float64).requires_grad_()
        leaves = [x, *module.parameters()]
        y = module(x)
        first = torch.autograd.grad(y, leaves, grad, create_graph=True)
        loss = sum((g**2 * torch.linspace(0.5, 2, g.numel()).reshape(g.shape)).sum() for g in first)
        second = torch.autograd.grad(
            loss, [*leaves, grad], allow_unused=True, materialize_grads=True, retain_graph=True
        )
        results.append([*first, *second])
    assert_close(*results, rtol=1e-9, atol=1e-11)


@random
def test_double_backward_of_dropout(layer, backend):
    """A random layer is a fixed function once the seed is drawn: its second derivative is that of y = f(x; mask)."""
    module = layer.ours().double()
    x = _input(torch.float64, rows=(1,)).requires_grad_()

    def f(x, grad):
        torch.manual_seed(5)
        return torch.autograd.grad(module(x), x, grad, create_graph=True)[0]

    assert torch.autograd.gradcheck(f, (x, torch.randn_like(x).requires_grad_()))


@every
def test_gradients_in_several_threads(layer):
    module = perturb(layer.ours())
    inputs = [_input() for _ in range(4)]
    grads = [torch.randn_like(x) for x in inputs]
    nodes = [(x.requires_grad_(), module(x), g) for x, g in zip(inputs, grads, strict=True)]
    expected = [torch.autograd.grad(y, x, g, retain_graph=True)[0] for x, y, g in nodes]
    errors = []

    def work(i):
        try:
            x, y, g = nodes[i]
            for _ in range(20):
                assert torch.equal(torch.autograd.grad(y, x, g, retain_graph=True)[0], expected[i])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


@every
def test_graph_is_freed_without_the_garbage_collector(layer, backend):
    module = perturb(layer.ours())
    gc.disable()
    try:
        for backward in (False, True):
            x = _input().requires_grad_()
            h = x * 2
            y = module(h)
            dead = [weakref.ref(h), weakref.ref(y)]
            if backward:
                y.sum().backward()
            del x, h, y
            assert [r() for r in dead] == [None, None]
    finally:
        gc.enable()


# Hooks and checkpoint


@every
def test_saved_tensors_hooks(layer, backend):
    """Saved tensors go through the hooks, and come back as the hook gives them: another object, another layout."""
    module = perturb(layer.ours())
    x = _input()
    plain = gradients(module, x)
    packed = []

    def strided(t):
        return torch.stack([t, torch.full_like(t, 1)], -1)[..., 0]

    hooks = {
        "clone": (lambda t: packed.append(t) or t.clone(), lambda t: t),
        "strided": (strided, lambda t: t),
        "numpy": (
            lambda t: t.detach().cpu().numpy(),
            lambda a: torch.from_numpy(a.copy()).to(torch.get_default_device()),
        ),
        "transposed": (lambda t: t, lambda t: t.mT.contiguous().mT if t.dim() > 1 else t),
    }
    for name, (pack, unpack) in hooks.items():
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            assert_close(gradients(module, x), plain, name, rtol=1e-6, atol=1e-6)
    if layer.name != "dropout":
        assert packed, "nothing was saved through the hooks"
    with torch.autograd.graph.save_on_cpu():
        assert_equal(gradients(module, x), plain, "save_on_cpu")


@every
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "nested", "mixed"])
def test_torch_checkpoint(layer, kind, backend):
    """Recomputed with the same random numbers: gradients are the unchecked run's, bit by bit."""
    module = perturb(layer.ours())

    def block(x):
        return module(module(torch.sin(x)) * 3)

    wrapped = {
        "reentrant": lambda x: checkpoint(block, x, use_reentrant=True),
        "not reentrant": lambda x: checkpoint(block, x, use_reentrant=False),
        "nested": lambda x: checkpoint(
            lambda x: checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False),
            x,
            use_reentrant=False,
        ),
        "mixed": lambda x: checkpoint(
            lambda x: checkpoint(block, block(x), use_reentrant=False), x, use_reentrant=True
        ),
    }[kind]
    plain = (lambda x: block(block(x))) if kind in ("nested", "mixed") else block
    results = []
    for function in (plain, wrapped):
        module.zero_grad()
        x = torch.linspace(-2, 2, 10 * COLUMNS).reshape(2, 5, COLUMNS).requires_grad_()
        torch.manual_seed(3)
        y = function(x)
        torch.manual_seed(99)  # backward must not depend on the state it finds
        y.backward(torch.linspace(-1, 2, y.numel()).reshape(y.shape))
        results.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
    assert_equal(*results)


@exact
def test_overwritten_saved_tensor_is_noticed(layer, backend):
    """As in torch: writing to what backward needs raises, and what it does not need may be written to."""
    for target in ("x", "y"):
        outcome = []
        for module in layer.pair():
            x = _input().requires_grad_()
            h = x * 1
            y = module(h)
            with torch.no_grad():
                (h if target == "x" else y).add_(1)
            try:
                y.sum().backward()
                outcome.append("ran")
            except RuntimeError as error:
                outcome.append("modified by an inplace operation" in str(error))
        assert outcome[0] in (True, outcome[1]), f"{target}: {outcome}"
