"""Misuse raises torch's error type with a message that names the argument, its shape and a remedy; what torch accepts works."""

import re

import pytest
import torch
import torch.nn.functional as TF

import pyckpt.functional as F

C = 6


def _outcome(function, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return error


def _check_as_torch(ours, theirs, *mentions):
    """Same result, or the same error type and a message that mentions what a user needs."""
    if isinstance(theirs, Exception):
        assert isinstance(ours, Exception), f"accepted what torch refuses with {theirs!r}"
        assert type(ours) is type(theirs), f"{ours!r} instead of torch's {theirs!r}"
        for mention in mentions:
            assert re.search(mention, str(ours)), f"no {mention!r} in: {ours}"
        return
    if isinstance(ours, Exception):
        raise AssertionError(f"torch accepts this; raised {ours!r}") from ours
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        if ours.device.type == "cpu":
            torch.testing.assert_close(ours, theirs, equal_nan=True)


CALLS = {
    "gelu": (F.gelu, TF.gelu),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), lambda x: TF.gelu(x, approximate="tanh")),
    "silu": (F.silu, TF.silu),
    "silu_": (lambda x: F.silu(x, inplace=True), lambda x: TF.silu(x, inplace=True)),
    "relu": (F.relu, TF.relu),
    "relu_": (lambda x: F.relu(x, inplace=True), lambda x: TF.relu(x, inplace=True)),
    "layer_norm": (lambda x: F.layer_norm(x, (C,)), lambda x: TF.layer_norm(x, (C,))),
    "rms_norm": (lambda x: F.rms_norm(x, (C,)), lambda x: TF.rms_norm(x, (C,))),
    "softmax": (lambda x: F.softmax(x, -1), lambda x: TF.softmax(x, -1)),
    "softmax_dim": (lambda x: F.softmax(x, dim=0), lambda x: TF.softmax(x, dim=0)),
    "softmax_scaled": (lambda x: F.softmax(x, -1, scale=2.0), lambda x: TF.softmax(x * 2, -1)),
    "dropout": (F.dropout, TF.dropout),
    "dropout_": (lambda x: F.dropout(x, inplace=True), lambda x: TF.dropout(x, inplace=True)),
    "dropout_eval": (lambda x: F.dropout(x, training=False), lambda x: TF.dropout(x, training=False)),
}
calls = pytest.mark.parametrize("name", CALLS)

DTYPES = [
    torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    torch.quint8,
]  # fmt: skip


def _make(dtype):
    x = torch.linspace(-3, 3, 4 * C).reshape(4, C)
    if dtype == torch.quint8:
        return torch.quantize_per_tensor(x, 0.1, 10, dtype)
    return (x.abs() if dtype == torch.uint8 else x).to(dtype)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@calls
def test_dtypes_we_have_no_kernel_for(name, dtype):
    ours, theirs = (_outcome(call, _make(dtype)) for call in CALLS[name])
    family = name.rstrip("_").split("_")[0]
    if isinstance(theirs, torch.Tensor) and (
        theirs.is_quantized or (family == "dropout" and name != "dropout_eval")
    ):
        assert type(ours) is type(theirs) and ours.dtype == theirs.dtype and ours.shape == theirs.shape
        return
    if name == "softmax_scaled" and isinstance(theirs, torch.Tensor):
        return  # the composition promotes integers; ours asks for a dtype, as softmax does
    if name == "softmax_scaled":
        assert isinstance(ours, RuntimeError)
        return
    _check_as_torch(
        ours, theirs, family, r"\(4, 6\)", str(dtype).removeprefix("torch."), "convert|float|pass dtype"
    )


@pytest.mark.parametrize("value", [None, 1.5, [1.0, 2.0], "text"], ids=repr)
@calls
def test_not_a_tensor(name, value):
    ours, theirs = (_outcome(call, value) for call in CALLS[name])
    if name in ("softmax_scaled", "softmax", "softmax_dim") or "norm" in name:
        assert type(ours) in (TypeError, AttributeError), repr(
            ours
        )  # torch's varies: TypeError or AttributeError
        return
    _check_as_torch(ours, theirs, type(value).__name__)


def test_softmax_of_something_that_is_no_tensor():
    for kwargs in ({}, {"scale": 2.0}, {"mask": torch.ones(2)}, {"is_causal": True}, {"dim": 0}):
        with pytest.raises((TypeError, AttributeError), match="list"):
            F.softmax([1.0, 2.0], **kwargs)


# Norms


def _f(*shape, **kwargs):
    return torch.linspace(-2, 2, torch.Size(shape).numel(), **kwargs).reshape(shape)


NORM_SHAPES = [
    (C + 1,), (4,), (4, C + 1), (2, 4, C), (), [], (0,), (1,), C, None, "6", (6.0,), [[6]], (-1,), ("6",), (True,), (None,),
    torch.tensor([C]), torch.Size([C]), [4, C],
]  # fmt: skip


@pytest.mark.parametrize("where", ["plain", "grad", "meta", "func.grad"])
@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_normalized_shape(name, shape, where):
    """The same mistake reads the same wherever it is made."""
    x = _f(4, C).requires_grad_(where == "grad")
    x = x.to("meta") if where == "meta" else x
    results = []
    for library in (F, TF):
        function = getattr(library, name)
        if where == "func.grad":
            function = lambda x, s, f=function: torch.func.grad(lambda t: f(t, s).square().sum())(x)  # noqa: E731
        results.append(_outcome(function, x, shape))
    _check_as_torch(*results)
    # A wrong type is described by torch; a wrong size has to be shown beside the input's.
    if isinstance(results[1], RuntimeError) and where != "func.grad":
        for mention in (name, "normalized_shape", re.escape(str(list(shape))), r"\(4, 6\)", r"input\.shape"):
            assert re.search(mention, str(results[0])), f"no {mention!r} in: {results[0]}"
    elif isinstance(results[1], RuntimeError):
        assert "normalized_shape" in str(results[0]).split("\n")[0], results[0]


PARAMETERS = {
    "short": _f(C - 1),
    "long": _f(C + 1),
    "two dimensions": _f(1, C),
    "scalar": torch.tensor(1.0),
    "float64": _f(C).double(),
    "bfloat16": _f(C).bfloat16(),
    "integer": torch.ones(C, dtype=torch.int64),
    "boolean": torch.ones(C, dtype=torch.bool),
    "complex": _f(C).to(torch.complex64),
    "meta": _f(C).to("meta"),
    "list": [1.0] * C,
    "number": 1.0,
    "sparse": _f(C).to_sparse(),
}


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("what", PARAMETERS)
@pytest.mark.parametrize(
    "argument", ["layer_norm weight", "layer_norm bias", "layer_norm both", "rms_norm weight"]
)
@pytest.mark.filterwarnings("ignore")
def test_weight_and_bias(argument, what, x_dtype):
    name, which = argument.split()
    value = PARAMETERS[what]
    given = (
        {"weight": value, "bias": _f(C).to(x_dtype)}
        if which == "weight"
        else {"weight": _f(C).to(x_dtype), "bias": value}
    )
    if which == "both":
        given = {"weight": value, "bias": value}
    if name == "rms_norm":
        del given["bias"]
    x = _f(4, C).to(x_dtype)
    ours, theirs = (_outcome(getattr(library, name), x, (C,), **given) for library in (F, TF))
    first = "weight" if which == "both" else which
    mentions = [name, first]
    if isinstance(value, torch.Tensor) and what not in ("sparse",):
        mentions += [re.escape(str(tuple(value.shape))), str(value.dtype).removeprefix("torch.")]
    if what == "meta" and not isinstance(theirs, Exception):
        assert isinstance(ours, RuntimeError) or ours.is_meta
        return
    if isinstance(theirs, torch.Tensor) and x_dtype.itemsize == 2 and not isinstance(ours, Exception):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-2, atol=2e-2)
        return
    _check_as_torch(ours, theirs, *mentions)


def test_weight_and_bias_of_different_dtypes():
    for x, w, b in (
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.float32, torch.float64),
    ):
        ours, theirs = (
            _outcome(library.layer_norm, _f(4, C).to(x), (C,), _f(C).to(w), _f(C).to(b))
            for library in (F, TF)
        )
        _check_as_torch(ours, theirs, "layer_norm", "bias|weight", r"\(6,\)")


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("eps", [-1.0, -1e-12, float("-inf")], ids=str)
def test_negative_eps(name, eps):
    """torch gives NaN; we refuse, since nobody means it."""
    with pytest.raises(ValueError, match=rf"{name}: eps.*{eps}"):
        getattr(F, name)(_f(4, C), (C,), eps=eps)


@pytest.mark.parametrize(
    "eps", [0.0, 0, 1, float("nan"), float("inf"), None, "1", torch.tensor(1e-3), [1]], ids=str
)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_other_eps(name, eps):
    ours, theirs = (_outcome(getattr(library, name), _f(4, C), (C,), eps=eps) for library in (F, TF))
    _check_as_torch(ours, theirs)


# Probabilities, masks, dimensions, options


@pytest.mark.parametrize(
    "p", [-0.1, 1.1, 1 + 1e-12, float("nan"), float("inf"), "0.5", None, [0.5], 1j], ids=str
)
@pytest.mark.parametrize("training", [True, False])
def test_bad_probability(p, training):
    ours, theirs = (_outcome(library.dropout, _f(4, C), p, training) for library in (F, TF))
    if isinstance(theirs, Exception):
        _check_as_torch(ours, theirs, *(["probability", re.escape(str(p))] if isinstance(p, float) else []))
    elif training or p != p:  # torch lets NaN pass
        assert isinstance(ours, ValueError)
    if isinstance(p, float):
        with pytest.raises(ValueError, match=rf"dropout_p.*{re.escape(str(p))}"):
            F.softmax(_f(4, C), dropout_p=p)


@pytest.mark.parametrize("p", [0, 1, True, 0.0, 1.0, torch.tensor(0.0)], ids=str)
def test_odd_probability(p):
    ours, theirs = (_outcome(library.dropout, _f(4, C), p) for library in (F, TF))
    _check_as_torch(ours, theirs)


MASKS = {
    "wider": (torch.ones(C + 1), RuntimeError),
    "more dimensions": (torch.ones(1, 1, 4, C), RuntimeError),
    "more rows": (torch.ones(3, C, dtype=torch.bool), RuntimeError),
    "empty": (torch.ones(0), RuntimeError),
    "int64": (torch.ones(C, dtype=torch.int64), RuntimeError),
    "uint8": (torch.ones(C, dtype=torch.uint8), RuntimeError),
    "float64": (torch.ones(C, dtype=torch.float64), RuntimeError),
    "float16": (torch.ones(C, dtype=torch.float16), RuntimeError),
    "complex": (torch.ones(C, dtype=torch.complex64), RuntimeError),
    "meta": (torch.ones(C, device="meta"), RuntimeError),
    "list": ([True] * C, TypeError),
    "number": (1.0, TypeError),
    "sparse": (torch.ones(4, C).to_sparse(), RuntimeError),
}


@pytest.mark.parametrize("where", ["plain", "grad", "func.grad", "other dim"])
@pytest.mark.parametrize("what", MASKS)
def test_bad_mask(what, where):
    mask, kind = MASKS[what]
    x = _f(4, C).requires_grad_(where == "grad")
    dim = 0 if where == "other dim" else -1
    call = lambda x: F.softmax(x, dim, mask=mask)  # noqa: E731
    if where == "func.grad":
        call = torch.func.grad(lambda x: F.softmax(x, dim, mask=mask).sum())
    with pytest.raises(kind, match="mask") as caught:
        call(x)
    assert type(caught.value) is kind
    if isinstance(mask, torch.Tensor) and what != "sparse":
        text = str(caught.value)
        assert str(tuple(mask.shape)) in text and "(4, 6)" in text, text
        assert re.search(r"\.to\(|convert|unsqueeze|move", text), text


@pytest.mark.parametrize("shape", [(), (3,), (4, C), (2, 3, C)], ids=str)
@pytest.mark.parametrize("dim", [-5, -4, -2, -1, 0, 1, 3, 7, 1.0, "0", (0,)], ids=str)
@pytest.mark.parametrize(
    "kwargs", [{}, {"dtype": torch.float64}, {"scale": 1.5}], ids=["plain", "dtype", "scale"]
)
def test_softmax_dim(dim, shape, kwargs):
    x = _f(*shape)
    ours = _outcome(F.softmax, x, dim, **kwargs)
    theirs = _outcome(TF.softmax, x * kwargs.pop("scale", 1.0), dim, **kwargs)
    _check_as_torch(ours, theirs, *(["dim", re.escape(str(dim))] if type(dim) is int else []))


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.bool, torch.complex64, torch.bfloat16, torch.float8_e5m2, "float32", 3],
    ids=str,
)
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_softmax_dtype(dtype, scale):
    ours = _outcome(F.softmax, _f(4, C), -1, dtype, scale=scale)
    theirs = _outcome(TF.softmax, _f(4, C) * scale, -1, dtype=dtype)
    _check_as_torch(ours, theirs)


def test_softmax_of_integers_with_a_dtype():
    x = torch.arange(12).reshape(2, 6)
    torch.testing.assert_close(F.softmax(x, -1, torch.float32), TF.softmax(x, -1, dtype=torch.float32))
    torch.testing.assert_close(
        F.softmax(x, dtype=torch.float64, scale=0.5), TF.softmax(x * 0.5, -1, dtype=torch.float64)
    )


@pytest.mark.parametrize("value", ["erf", "Tanh", "", None, 1, True, [], b"tanh"], ids=repr)
def test_bad_approximate(value):
    for x in (_f(4, C), _f(4, C).requires_grad_(), _f(4, C).to("meta"), _f(4, C).double()):
        ours, theirs = (_outcome(library.gelu, x, approximate=value) for library in (F, TF))
        _check_as_torch(
            ours,
            theirs,
            *(["approximate", "none.*tanh", re.escape(repr(value))] if isinstance(value, str) else []),
        )


@pytest.mark.parametrize("alignment", ["topleft", "bottom-right", "", None, 1], ids=repr)
@pytest.mark.parametrize("is_causal", [True, False])
def test_bad_causal_alignment(alignment, is_causal):
    with pytest.raises(
        ValueError, match=rf"causal_alignment.*top_left.*bottom_right.*{re.escape(repr(alignment))}"
    ):
        F.softmax(_f(4, C), is_causal=is_causal, causal_alignment=alignment)


@pytest.mark.parametrize(
    ("shape", "dim"), [((), -1), ((C,), -1), ((C,), 0), ((4, C), 0), ((2, 4, C), 1)], ids=str
)
def test_causal_needs_queries_and_keys(shape, dim):
    with pytest.raises(ValueError, match=rf"is_causal.*{re.escape(str(shape))}"):
        F.softmax(_f(*shape), dim, is_causal=True)


@pytest.mark.parametrize("scale", [None, "2", [1.0], 1j], ids=str)
def test_bad_scale(scale):
    with pytest.raises(TypeError, match=r"scale|float"):
        F.softmax(_f(4, C), scale=scale)


@pytest.mark.parametrize("name", ["silu", "relu", "dropout"])
def test_inplace_on_a_leaf(name, backend):
    """The message must not send the user looking at dtypes."""
    results = [
        _outcome(getattr(library, name), _f(4, C).requires_grad_(), inplace=True) for library in (F, TF)
    ]
    _check_as_torch(*results, "leaf", "in-?place")
    assert "floating-point" not in str(results[0]), results[0]


@pytest.mark.parametrize(
    "wrong", [_f(4, C).double(), _f(4, C).bfloat16(), _f(4, 1), _f(C)], ids=["f64", "bf16", "4x1", "C"]
)
def test_raw_backward_with_a_gradient_that_does_not_fit(wrong, backend):
    """No backend broadcasts or promotes it."""
    x, statistics, seed = _f(4, C), torch.ones(3, 4), torch.zeros(1, dtype=torch.int64)
    ops, wrong = torch.ops.pyckpt, wrong.to(x.device)
    wanted = (True, False, False)
    q = x.view(1, 1, 4, C)
    heads = (q, q, q, None, None, None, None, None, 1.0, None, None, False, 0.0, 0.0, q, torch.zeros(1, 1, 4))
    for call in (
        lambda: ops.attention_bwd(wrong, *heads, [True] * 4),
        lambda: ops.gelu_bwd(wrong, x, "none"),
        lambda: ops.silu_bwd(wrong, x),
        lambda: ops.relu_bwd(wrong, x),
        lambda: ops.layer_norm_bwd(wrong, x, [C], None, statistics, 1e-5, False, wanted),
        lambda: ops.rms_norm_bwd(wrong, x, [C], None, statistics[:1], 1e-5, False, wanted),
        lambda: ops.softmax_bwd(wrong, x, False, 1.0),
        lambda: ops.softmax_dropout_bwd(wrong, x, None, 1.0, None, 0.5, seed, statistics[:2], 1.0),
    ):
        with pytest.raises(RuntimeError, match=r"grad.*does not fit"):
            call()
