"""pyckpt.nn and pyckpt.functional stand in for torch.nn and torch.nn.functional: everything but the arithmetic."""

import copy
import importlib
import inspect
import io
import pickle
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as TF
from torch import nn

import pyckpt
import pyckpt.functional as F
import pyckpt.nn as fused

NAMES = ["GELU", "SiLU", "ReLU", "LayerNorm", "RMSNorm", "Dropout", "Softmax"]
named = pytest.mark.parametrize("name", NAMES)

CONSTRUCTORS = [
    ("GELU", (), {}),
    ("GELU", ("tanh",), {}),
    ("SiLU", (), {"inplace": True}),
    ("ReLU", (), {}),
    ("ReLU", (True,), {}),
    ("LayerNorm", (8,), {}),
    ("LayerNorm", ([4, 8], 1e-6), {"bias": False}),
    ("LayerNorm", (8, 1e-5, False), {}),
    ("LayerNorm", (torch.Size([8]),), {"dtype": torch.bfloat16, "device": "meta"}),
    ("RMSNorm", (8,), {}),
    ("RMSNorm", ((4, 8), 1e-6), {}),
    ("RMSNorm", (8,), {"elementwise_affine": False, "eps": 1e-3}),
    ("Dropout", (), {}),
    ("Dropout", (0.1, True), {}),
    ("Softmax", (), {}),
    ("Softmax", (-1,), {}),
]
constructed = pytest.mark.parametrize(("name", "args", "kwargs"), CONSTRUCTORS)


def _pair(name, args, kwargs):
    return getattr(fused, name)(*args, **kwargs), getattr(nn, name)(*args, **kwargs)


# Classes


@named
def test_same_signatures(name):
    ours, theirs = getattr(fused, name), getattr(nn, name)
    assert issubclass(ours, theirs) and ours.__name__ == name
    assert inspect.signature(ours) == inspect.signature(theirs)
    parameters = [inspect.signature(c.forward).parameters.values() for c in (ours, theirs)]
    assert [(p.name, p.kind, p.default) for p in parameters[0]] == [
        (p.name, p.kind, p.default) for p in parameters[1]
    ]
    assert set(vars(ours)) - {"__module__", "__doc__", "__firstlineno__", "__static_attributes__"} == {
        "forward"
    }


@constructed
def test_same_repr_attributes_and_state(name, args, kwargs):
    ours, theirs = _pair(name, args, kwargs)
    assert repr(ours) == repr(theirs)
    assert ours.extra_repr() == theirs.extra_repr()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert sorted(vars(ours)) == sorted(vars(theirs))
    for key, value in theirs.state_dict().items():
        assert ours.state_dict()[key].dtype == value.dtype and ours.state_dict()[key].device == value.device
    constants = [getattr(m, "__constants__", None) for m in (ours, theirs)]
    assert constants[0] == constants[1]


@pytest.mark.parametrize(
    ("name", "args"),
    [("Dropout", (1.5,)), ("Dropout", (-0.1,)), ("LayerNorm", ()), ("GELU", ("tanh", 3)), ("RMSNorm", ())],
)
def test_same_constructor_errors(name, args):
    errors = []
    for library in (fused, nn):
        with pytest.raises((TypeError, ValueError)) as caught:
            getattr(library, name)(*args)
        errors.append(caught.type)
    assert errors[0] == errors[1]


@constructed
def test_state_dict_moves_both_ways(name, args, kwargs):
    if kwargs.get("device") == "meta":
        pytest.skip("nothing to move")
    ours, theirs = _pair(name, args, kwargs)
    with torch.no_grad():
        for p in ours.parameters():
            p.normal_()
    theirs.load_state_dict(ours.state_dict())
    again = getattr(fused, name)(*args, **kwargs)
    again.load_state_dict(theirs.state_dict())
    stream = io.BytesIO()
    torch.save(ours.state_dict(), stream)
    stream.seek(0)
    again.load_state_dict(torch.load(stream, weights_only=True))
    for key, value in ours.state_dict().items():
        assert torch.equal(again.state_dict()[key], value)


@constructed
def test_deepcopy_and_pickle(name, args, kwargs):
    ours = getattr(fused, name)(*args, **kwargs).eval()
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(twin) is getattr(fused, name) and repr(twin) == repr(ours) and not twin.training
        for key, value in ours.state_dict().items():
            moved = twin.state_dict()[key]
            assert value.is_meta or (torch.equal(moved, value) and moved.data_ptr() != value.data_ptr())


def test_outputs_and_graphs_pickle_and_copy_as_torchs():
    leaf = torch.randn(3, 8, requires_grad=True)
    y = fused.GELU()(leaf)
    assert torch.equal(pickle.loads(pickle.dumps(y.detach())), y)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(y)


@constructed
def test_to_moves_dtype_and_device(name, args, kwargs):
    for module in _pair(name, args, kwargs):
        assert module.to(torch.float64) is module
        assert all(p.dtype == torch.float64 for p in module.parameters())
        assert all(p.is_meta for p in module.to("meta").parameters())


def test_train_and_eval():
    layer = fused.Dropout(0.5)
    x = torch.ones(200)
    assert (layer(x) == 0).any()
    layer.eval()
    assert layer(x) is x
    layer.train()
    assert (layer(x) == 0).any()
    layer.p = 0.0
    assert torch.equal(layer(x), x)
    layer.p = 1.0
    assert not layer(x).any()


@named
def test_hooks(name):
    args = {"LayerNorm": (8,), "RMSNorm": (8,), "Softmax": (-1,)}.get(name, ())
    layer = getattr(fused, name)(*args)
    calls = []
    layer.register_forward_pre_hook(lambda m, a: calls.append("pre") or (a[0] * 2,))
    layer.register_forward_hook(lambda m, a, y: calls.append("post") or y * 3)
    layer.register_full_backward_pre_hook(lambda m, g: calls.append("backward pre") or (g[0] * 2,))
    layer.register_full_backward_hook(lambda m, gi, go: calls.append("backward") or (gi[0] * 5,))
    x = torch.randn(4, 8, requires_grad=True)
    torch.manual_seed(1)
    y = layer(x)
    (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert calls == ["pre", "post", "backward pre", "backward"]
    plain = getattr(fused, name)(*args)
    leaf = x.detach().clone().requires_grad_()
    torch.manual_seed(1)
    z = plain(leaf * 2)
    torch.testing.assert_close(y, z * 3)
    # the output hook's factor 3, doubled by the backward pre-hook; then 5 on the gradient of what forward received
    (e,) = torch.autograd.grad(z, leaf, torch.full_like(z, 6.0))
    torch.testing.assert_close(g, e * 5)


@named
def test_parametrizations_and_pruning(name):
    """Tools that replace parameters by computed tensors."""
    if name not in ("LayerNorm", "RMSNorm"):
        pytest.skip("has no parameters")
    layer = getattr(fused, name)(8)

    class Double(nn.Module):
        def forward(self, w):
            return w * 2

    nn.utils.parametrize.register_parametrization(layer, "weight", Double())
    x = torch.randn(3, 8)
    torch.testing.assert_close(
        layer(x), getattr(TF, {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}[name])(x, (8,)) * 2
    )
    layer(x).sum().backward()
    assert layer.parametrizations.weight.original.grad is not None


# inplace=True


@pytest.mark.parametrize("name", ["SiLU", "ReLU", "Dropout"])
def test_inplace(name, backend):
    """Same object back, version counter and gradients as torch's; a leaf is refused and left as it was."""
    args = {"inplace": True} | ({"p": 0.5} if name == "Dropout" else {})
    results = []
    for library in (fused, nn):
        layer = getattr(library, name)(**args)
        leaf = torch.linspace(-2, 2, 24).reshape(4, 6).requires_grad_()
        h = leaf * 2
        before = h._version
        y = layer(h)
        assert y is h
        (g,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
        plain = torch.linspace(-2, 2, 24)
        assert layer(plain) is plain
        view = (leaf * 2).view(2, 12)
        base = view._base
        layer(view[0])
        (v,) = torch.autograd.grad(base.sum(), leaf)
        kept = leaf.detach().clone()
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad") as caught:
            layer(leaf)
        assert torch.equal(leaf.detach(), kept), (
            f"{library.__name__}: the leaf was overwritten before the error"
        )
        with pytest.raises(RuntimeError):
            layer(torch.zeros(1, 6).expand(4, 6))
        with torch.no_grad():
            assert layer(leaf) is leaf
        results.append((h._version - before, g, v, type(caught.value)))
    assert results[0][0] == results[1][0] and results[0][3] is results[1][3]
    if name != "Dropout":
        torch.testing.assert_close(results[0][1:3], results[1][1:3])
    else:
        assert set(results[0][1].unique().tolist()) <= {0.0, 4.0}
        assert (results[0][2][2:] == 2).all() and set(results[0][2][:2].unique().tolist()) <= {0.0, 4.0}


@pytest.mark.parametrize("name", ["silu", "relu", "dropout"])
def test_inplace_on_what_another_backward_needs(name, backend):
    """Writing over a tensor that was saved for backward is noticed."""
    x = torch.randn(4, 6, requires_grad=True)
    h = x.exp()  # saves its output
    getattr(F, name)(h, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h.sum().backward()


def test_inplace_under_transforms():
    for function in (F.relu, F.silu):
        g = torch.func.grad(lambda t, f=function: f(t * 2, inplace=True).sum())(torch.randn(5))
        assert g.shape == (5,)
    with torch.inference_mode():
        x = torch.randn(5)
        assert F.dropout(x, 0.5, inplace=True) is x


# Names of torch.nn that are not ours


def test_every_name_of_torch_is_forwarded():
    for ours, theirs in ((fused, nn), (F, TF)):
        mine = set(ours.__all__)
        for name in dir(theirs):
            if not name.startswith("__") and name not in mine:
                assert getattr(ours, name) is getattr(theirs, name), name
        assert set(dir(ours)) >= {n for n in dir(theirs) if not n.startswith("_")}
    from pyckpt.nn import Conv2d, Linear, Parameter

    assert (Linear, Conv2d, Parameter) == (nn.Linear, nn.Conv2d, nn.Parameter)
    assert fused.functional is F and pyckpt.functional is F
    assert fused.functional.conv2d is TF.conv2d
    assert fused.init is nn.init and fused.utils.clip_grad_norm_ is nn.utils.clip_grad_norm_


@pytest.mark.parametrize("module", [fused, F], ids=["nn", "functional"])
def test_unknown_name(module):
    with pytest.raises(AttributeError, match=rf"module '{module.__name__}'.*no attribute 'Gelu7'"):
        module.Gelu7  # noqa: B018
    with pytest.raises(ImportError):
        exec(f"from {module.__name__} import Gelu7")
    assert not hasattr(module, "Gelu7")


def test_module_identity_is_not_forwarded():
    """A module that hands out torch's __path__ lets the import system load second copies of torch's own files."""
    assert not hasattr(fused, "__path__") or all("torch" not in p for p in fused.__path__)
    assert fused.__file__.endswith(("pyckpt/nn.py", "pyckpt/nn/__init__.py"))
    assert fused.__spec__.name == "pyckpt.nn"


STATEMENTS = {
    "import pyckpt.nn.functional as F": "F is pyckpt.functional and F.conv2d is torch.nn.functional.conv2d",
    "from pyckpt.nn import functional as F": "F is pyckpt.functional",
    "import pyckpt.nn as nn": "nn.functional is pyckpt.functional",
    "from pyckpt.nn.utils import clip_grad_norm_": "clip_grad_norm_ is torch.nn.utils.clip_grad_norm_",
    "from pyckpt.nn.parameter import Parameter": "Parameter is torch.nn.Parameter",
    "from pyckpt.nn.modules import Linear": "Linear is torch.nn.Linear",
    "from pyckpt.nn import init": "init is torch.nn.init",
    "from pyckpt.nn import *": "Linear is torch.nn.Linear and GELU is pyckpt.nn.GELU",
}


FIRST = (
    "import pyckpt.nn.functional as F",
    "from pyckpt.nn.modules import Linear",
    "from pyckpt.nn import *",
)


@pytest.mark.parametrize(
    "statement", [pytest.param(s, marks=() if s in FIRST else pytest.mark.slow) for s in STATEMENTS]
)
def test_imports_that_work_for_torch(statement):
    """`torch.nn` replaced by `pyckpt.nn` in an import line; in a fresh process, since imports leave traces."""
    code = f"import torch, pyckpt\nimport pyckpt.nn\n{statement}\nassert {STATEMENTS[statement]}\n"
    code += "import pyckpt.nn\nassert pyckpt.nn.functional is pyckpt.functional"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-800:]


def test_public_names():
    for name in pyckpt.__all__:
        assert hasattr(pyckpt, name), name
    assert importlib.import_module("pyckpt.nn") is fused
    assert set(fused.__all__) >= set(NAMES) and sorted(F.__all__) == sorted(set(F.__all__))
    for name in F.__all__:
        assert inspect.getdoc(getattr(F, name)), f"{name} has no documentation"


@pytest.mark.parametrize("name", ["silu", "relu", "layer_norm", "rms_norm", "dropout"])
def test_functional_signatures(name):
    ours, theirs = inspect.signature(getattr(F, name)), inspect.signature(getattr(TF, name))
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in theirs.parameters.values()
    ]


def test_functional_softmax_accepts_torchs_calls():
    x = torch.randn(2, 3, 4)
    for args, kwargs in (
        ((x, 1), {}),
        ((x,), {"dim": 0}),
        ((x, -1), {"dtype": torch.float64}),
        ((x, 1), {"_stacklevel": 5}),
    ):
        torch.testing.assert_close(F.softmax(*args, **kwargs), TF.softmax(*args, **kwargs))


@pytest.mark.parametrize("shape", [(), (5,), (2, 5), (2, 3, 5), (2, 2, 3, 5)], ids=str)
def test_softmax_without_dim(shape):
    """torch's deprecated choice of the dimension, with its warning."""
    x = torch.randn(shape)
    results = []
    for layer in (fused.Softmax(), nn.Softmax()):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            results.append((layer(x), [str(w.message) for w in seen]))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] and results[0][1]


def test_modules_are_freed():
    layer = fused.LayerNorm(8)
    gone = weakref.ref(layer)
    y = layer(torch.randn(2, 8, requires_grad=True))
    del layer
    assert gone() is None
    y.sum().backward()
