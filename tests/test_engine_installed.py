"""convert(model) puts the recompute engine on the model's forward; what happens to a model happens to the engine too."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pyckpt
from pyckpt import engine
from pyckpt.memory import saved_bytes
from tests._engine import assert_same, blocks, gradients

pytestmark = pytest.mark.usefixtures("unlearned")


@pytest.fixture
def x():
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


def model():
    return blocks(2, 64)


def kept(model, x):
    return saved_bytes(lambda: model(x).square().mean())


def test_one_line(x):
    plain, swapped, converted = model(), pyckpt.convert(model(), recompute=False), pyckpt.convert(model())
    assert_same(
        gradients(converted, lambda: converted(x).square().mean()),
        gradients(swapped, lambda: swapped(x).square().mean()),
    )
    assert pyckpt.report(converted).recompute and pyckpt.report(converted).to_dict()["recompute"] is True
    assert "recompute engine on" in str(pyckpt.report(converted))
    assert not pyckpt.report(swapped).recompute
    unit = 4 * x.numel()
    assert kept(plain, x) - kept(converted, x) > 2 * 4 * unit  # gelu's and the norm's output in each block


def test_twice_and_back(x):
    converted = pyckpt.convert(pyckpt.convert(model()))
    assert len(converted._forward_hooks) == len(converted._forward_pre_hooks) == 1
    pyckpt.convert(converted, recompute=False)
    assert not converted._forward_hooks and not converted._forward_pre_hooks
    assert not converted._forward_hooks_always_called
    pyckpt.convert(converted)
    pyckpt.revert(converted)
    assert not converted._forward_hooks and not pyckpt.report(converted).recompute


def test_users_hooks_stay(x):
    module, calls = model(), []
    module.register_forward_pre_hook(lambda m, a: calls.append("before") and None)
    handle = module.register_forward_hook(lambda m, a, o: calls.append("after") and None)
    pyckpt.convert(module)
    module(x)
    pyckpt.revert(module)
    module(x)
    assert calls == ["before", "after"] * 2
    handle.remove()


def copies():
    def through_torch_save(module):
        buffer = io.BytesIO()
        torch.save(module, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    return {
        "deepcopy": copy.deepcopy,
        "pickle": lambda module: pickle.loads(pickle.dumps(module)),
        "torch.save": through_torch_save,
        "deepcopy of a pickle": lambda module: copy.deepcopy(pickle.loads(pickle.dumps(module))),
    }


@pytest.mark.parametrize("how", copies())
def test_copies_have_it_too(how, x):
    original = pyckpt.convert(model())
    again = copies()[how](original)
    assert pyckpt.report(again).recompute
    assert abs(kept(again, x) - kept(original, x)) < 16 << 10
    assert_same(
        gradients(again, lambda: again(x).square().mean()),
        gradients(original, lambda: original(x).square().mean()),
    )
    pyckpt.revert(again)
    assert not pyckpt.report(again).recompute and pyckpt.report(original).recompute


def test_state_dict_names_and_repr_are_the_original_ones():
    plain, converted = model(), pyckpt.convert(model())
    assert list(plain.state_dict()) == list(converted.state_dict())
    assert [n for n, _ in plain.named_modules()] == [n for n, _ in converted.named_modules()]
    assert repr(pyckpt.revert(converted)) == repr(plain)


def test_data_parallel_replicas(x):
    """A replica's __dict__ is a shallow copy of the module's, as DataParallel makes it."""
    converted = pyckpt.convert(model())
    replica = converted._replicate_for_data_parallel()
    replica._modules = dict(converted._modules)
    assert pyckpt.report(replica).recompute
    replica(x).square().mean().backward()
    assert not engine.regions.stack
    wrapped = nn.DataParallel(converted)
    assert_same(
        gradients(wrapped, lambda: wrapped(x).square().mean()),
        gradients(converted, lambda: converted(x).square().mean()),
    )


def test_exceptions_end_the_region(x):
    class Fails(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    broken = pyckpt.convert(nn.Sequential(model(), Fails()))
    refused = pyckpt.convert(model())
    refused.register_forward_pre_hook(lambda m, a: 1 / 0, prepend=True)
    for module in (broken, refused):
        with pytest.raises(ZeroDivisionError):
            module(x)
        assert not engine.regions.stack
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_model_in_a_model_and_in_checkpoints(x):
    inner = pyckpt.convert(model())
    outer = pyckpt.convert(nn.Sequential(nn.Linear(64, 64), inner, nn.Linear(64, 64)))
    plain = pyckpt.convert(copy.deepcopy(outer), recompute=False)
    pyckpt.convert(plain[1], recompute=False)
    expected = gradients(plain, lambda: plain(x).square().mean())
    assert_same(gradients(outer, lambda: outer(x).square().mean()), expected)
    for reentrant in (False, True):
        y = lambda reentrant=reentrant: checkpoint(outer, x.clone().requires_grad_(), use_reentrant=reentrant)  # noqa: E731
        assert_same(gradients(outer, lambda y=y: y().square().mean()), expected)


def test_bare_layers_and_compiled_models_get_none(x):
    assert not pyckpt.report(pyckpt.convert(nn.LayerNorm(8))).recompute
    compiled = torch.compile(model(), backend="aot_eager")
    assert not pyckpt.report(pyckpt.convert(compiled)).recompute


def test_evaluation_costs_no_memory_and_leaves_no_region(x):
    converted = pyckpt.convert(model()).eval()
    with torch.no_grad():
        assert converted(x).grad_fn is None
    with torch.inference_mode():
        converted(x)
    assert not engine.regions.stack


def test_compiled_exported_and_traced_afterwards(x):
    converted = pyckpt.convert(model())
    expected = converted(x)
    with pytest.warns(UserWarning, match=r"does nothing inside torch\.compile"):
        compiled = torch.compile(converted, backend="aot_eager", fullgraph=True)(x)
    exported = torch.export.export(converted, (x,)).module()(x)
    for y in (compiled, exported):
        torch.testing.assert_close(y, expected)
