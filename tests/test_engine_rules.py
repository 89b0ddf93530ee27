"""Every rule of the recompute engine: the rebuilt tensor has the bits and the layout of the original."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import pyckpt.functional as ours
from pyckpt import recompute
from pyckpt.rules import RULES
from tests._engine import Watched, assert_same, region
from tests._oracle import DTYPES

C = 16


def vector(low, high, dtype):
    return torch.linspace(low, high, C, dtype=dtype).requires_grad_()


def affine(x):
    return vector(0.5, 2, x.dtype), vector(-1, 1, x.dtype)


def batch_norm(x, training):
    statistics = torch.zeros(C, dtype=x.dtype), torch.ones(C, dtype=x.dtype)
    return F.batch_norm(x.flatten(0, -2), *statistics, *affine(x), training).view(x.shape)


def halves(x):
    return F.gelu(x).chunk(2, -1)


# name -> (nodes whose rules it needs, function). The function gets the output of a matrix product, which has to be kept.
UNARY = {
    "gelu": ("Gelu", F.gelu),
    "gelu_tanh": ("Gelu", lambda x: F.gelu(x, approximate="tanh")),
    "silu": ("Silu", F.silu),
    "mish": ("Mish", F.mish),
    "softplus": ("Softplus", lambda x: F.softplus(x, 2.0, 1.0)),
    "logsigmoid": ("LogSigmoid", F.logsigmoid),
    "elu": ("Elu", lambda x: F.elu(x, 0.7)),
    "selu": ("Elu", F.selu),
    "celu": ("Celu", lambda x: F.celu(x, 0.5)),
    "leaky_relu": ("LeakyRelu", lambda x: F.leaky_relu(x, 0.2)),
    "prelu": ("PreluKernel", lambda x: F.prelu(x, torch.full((1,), 0.2, dtype=x.dtype).requires_grad_())),
    "hardswish": ("Hardswish", F.hardswish),
    "hardsigmoid": ("Hardsigmoid", F.hardsigmoid),
    "relu6": ("Hardtanh", F.relu6),
    "hardtanh": ("Hardtanh", lambda x: F.hardtanh(x, -0.3, 0.4)),
    "hardshrink": ("Hardshrink", F.hardshrink),
    "softshrink": ("Softshrink", F.softshrink),
    "clamp": ("Clamp", lambda x: x.clamp(-0.5, 0.7)),
    "clamp_min": ("Clamp", lambda x: x.clamp(min=0.1)),
    "abs": ("Abs", torch.abs),
    "sin": ("Sin", torch.sin),
    "cos": ("Cos", torch.cos),
    "erf": ("Erf", torch.erf),
    "log": ("Abs Log", lambda x: x.abs().log()),
    "log1p": ("Abs Log1P", lambda x: x.abs().log1p()),
    "square": ("Pow", torch.square),
    "cube": ("Pow", lambda x: x**3),
    "max_pool2d": ("MaxPool2DWithIndices", lambda x: F.max_pool2d(x, 3, 1, 1)),
    "glu": ("Cat Glu", lambda x: F.glu(torch.cat([x, x], -1))),
}
COMPOSED = {
    "product": ("Mul Sin", lambda x: x * x.sin()),
    "scaled": ("Mul Gelu", lambda x: F.gelu(x) * 2.5),
    "by_numbers": (
        "Mul Div",
        lambda x: torch.ops.aten.div.Scalar(torch.ops.aten.mul.Scalar(x.sin(), 2.5), 3),
    ),
    "quotient": ("Div", lambda x: x / (x * x + 1)),
    "divided": ("Div Gelu", lambda x: F.gelu(x) / 3),
    "minimum": ("Minimum", lambda x: torch.minimum(x, x.sin())),
    "maximum": ("Maximum", lambda x: torch.maximum(x, x.sin())),
    "sum": ("Add", lambda x: torch.add(x.sin(), x.cos(), alpha=2)),
    "difference": ("Sub", lambda x: x.sin() - x.cos()),
    "sigmoid_gate": ("Mul", lambda x: x * torch.sigmoid(x)),
    "tanh_gate": ("Mul", lambda x: torch.tanh(x) * x),
    "softcap": ("Mul", lambda x: torch.tanh(x / 5) * 5),
    "swiglu": ("Mul Silu", lambda x: F.silu(x) * (x + 1)),
    "casts": (
        "ToCopy Gelu",
        lambda x: F.gelu(x).double().to(x.dtype) if x.dtype != torch.double else F.gelu(x).float().double(),
    ),
    "transposed_copy": ("Clone Transpose UnsafeView", lambda x: F.gelu(x).transpose(0, 1).reshape(x.shape)),
    "rotated": ("Cat Neg Split", lambda x: torch.cat([-halves(x)[1], halves(x)[0]], -1)),
    "rotated_pairs": (
        "Stack Neg Slice",
        lambda x: torch.stack([-F.gelu(x)[..., 1::2], F.gelu(x)[..., ::2]], -1).flatten(-2) * x,
    ),
    "gated_halves": ("Split Mul", lambda x: torch.cat([halves(x)[0] * x[..., : C // 2]] * 2, -1)),
    "views": (
        "Permute Slice Select Unsqueeze Expand Squeeze View Alias",
        lambda x: (
            F.gelu(x)
            .permute(2, 0, 1)[:, 1:-1:2]
            .unsqueeze(1)
            .expand(-1, 2, -1, -1)
            .select(-3, 1)
            .view_as(x.new_empty(16, 3, 40))
            .mul(2)
            .flatten()[: 2 * C * 40]
            .reshape(2, 40, C)
        ),
    ),
    "indexed": (
        "Index",
        lambda x: (
            F.gelu(x)[:, torch.arange(40).flip(0)][torch.arange(8) % 3, :, torch.arange(8)].view(8, 40, 1) * x
        ),
    ),
    "masked": ("Index", lambda x: F.gelu(x)[torch.arange(8) % 2 == 0].repeat_interleave(2, 0) * x),
    "summed": ("Sum", lambda x: F.gelu(x).sum((0, -1), keepdim=True) * x),
    "summed_last": ("Sum", lambda x: torch.cat([F.gelu(x)] * 2, -1).view(8, 40, 2, C).sum(-2) * x),
    "unbound": ("Unbind", lambda x: torch.cat([t * 2 for t in F.gelu(x).unbind(0)])),
    "split_sizes": ("SplitWithSizes", lambda x: torch.cat([t * 2 for t in F.gelu(x).split([4, 12], -1)], -1)),
    "transposed": ("T", lambda x: (F.gelu(x.flatten(0, 1)).t() * 2).t()),
    "layer_norm": ("NativeLayerNorm", lambda x: F.layer_norm(x, (C,), *affine(x))),
    "layer_norm_weight": ("NativeLayerNorm", lambda x: F.layer_norm(x, (C,), affine(x)[0])),
    "layer_norm_plain": ("NativeLayerNorm", lambda x: F.layer_norm(x, x.shape[1:])),
    "rms_norm": ("Mul ToCopy", lambda x: F.rms_norm(x, (C,), vector(0.5, 2, x.dtype))),
    "batch_norm": ("NativeBatchNorm", lambda x: batch_norm(x, True)),
    "batch_norm_frozen": ("NativeBatchNorm", lambda x: batch_norm(x, False)),
    "group_norm": (
        "NativeGroupNorm",
        lambda x: F.group_norm(x.transpose(1, 2), 4, *affine(x)).transpose(1, 2),
    ),
    "our_gelu": ("", ours.gelu),
    "our_silu": ("", ours.silu),
    "our_relu": ("", lambda x: ours.relu(x.sin())),
    "our_layer_norm": ("", lambda x: ours.layer_norm(x, (C,), *affine(x))),
    "our_rms_norm": ("", lambda x: ours.rms_norm(x, (C,), affine(x)[0])),
    "our_dropout": ("", lambda x: ours.dropout(ours.gelu(x), 0.3)),
    "our_softmax": ("", lambda x: ours.softmax(x, dropout_p=0.2)),
}
CASES = {**UNARY, **COMPOSED}
# PyTorch's CPU kernels save these norms' statistics rounded to 16 bits, from which nobody gets the output back.
SIXTEEN_BITS = ("layer_norm", "layer_norm_weight", "layer_norm_plain", "group_norm")
EMBEDDING_AND_MATRICES = {"Embedding", "Mm", "Bmm", "Addmm", "Baddbmm", "Convolution"}
VARIANTS = {"ReshapeAlias"}  # other names of views, which no public function makes here
ELSEWHERE = {"BackwardHookFunction", "_FromTorchTensor"}  # below, and in test_distributed.py


pytestmark = pytest.mark.usefixtures("unlearned")


def test_every_rule_is_tested():
    tested = (
        {name for nodes, _ in CASES.values() for name in nodes.split()}
        | EMBEDDING_AND_MATRICES
        | VARIANTS
        | ELSEWHERE
    )
    assert {name.rpartition("Backward")[0] for name in RULES} == tested


def run(function, dtype, on):
    torch.manual_seed(0)
    x = torch.randn(8, 40, C, dtype=torch.float64).to(dtype)
    first, second = (
        torch.randn(C, C, dtype=torch.float64).mul(0.1).to(dtype).requires_grad_() for _ in range(2)
    )
    with Watched() if on else region(False) as watched:
        y = function(x @ first)
        loss = (y @ second).double().square().sum()
    return torch.autograd.grad(loss, [first, second]), watched


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", CASES)
def test_rule(name, dtype):
    _, function = CASES[name]
    expected, _ = run(function, dtype, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*nothing in this region")
        actual, watched = run(function, dtype, True)
    assert all(g.isfinite().all() for g in expected)
    assert_same(actual, expected)
    if dtype in (torch.bfloat16, torch.float16) and any("16 bits" in reason for reason in watched.reasons):
        assert name in SIXTEEN_BITS
    else:
        assert watched.rebuilt
        # What is kept is what matrix products made.
        expected_reasons = ("matrix product", "does not keep an input", "keeps its output")
        assert all(any(e in reason for e in expected_reasons) for reason in watched.reasons), watched.reasons


@pytest.mark.parametrize("sparse", [False, True])
def test_embedding(sparse):
    torch.manual_seed(0)
    table = torch.randn(50, C, requires_grad=True)
    weight = torch.randn(C, C, requires_grad=True)
    indices = torch.randint(50, (8, 40))

    def grads(on):
        with Watched() if on else region(False) as watched:
            loss = (F.embedding(indices, table, padding_idx=3, sparse=sparse) @ weight).square().sum()
        a, b = torch.autograd.grad(loss, [table, weight])
        return [a.to_dense(), b], watched

    expected, _ = grads(False)
    actual, watched = grads(True)
    assert_same(actual, expected)
    assert watched.rebuilt == 1


def save_nothing(node, flops, size):
    return torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE


MATRICES = {
    "mm": (lambda x, w, b: x.flatten(0, 1) @ w, 2 * 320 * C * C),
    "linear": (F.linear, 2 * 320 * C * C),
    "linear_no_bias": (lambda x, w, b: F.linear(x, w), 2 * 320 * C * C),
    "bmm": (lambda x, w, b: torch.bmm(x, x.transpose(1, 2)), 2 * 8 * 40 * 40 * C),
    "baddbmm": (lambda x, w, b: torch.baddbmm(b.sin(), x, x.transpose(1, 2)[..., :C]), 2 * 8 * 40 * C * C),
    "conv1d": (
        lambda x, w, b: F.conv1d(x.transpose(1, 2), w.unsqueeze(-1).expand(-1, -1, 3), b, padding=1),
        2 * 320 * C * C * 3,
    ),
    "conv_transpose": (
        lambda x, w, b: F.conv_transpose1d(x.transpose(1, 2), w.unsqueeze(-1), b),
        2 * 320 * C * C,
    ),
}


@pytest.mark.parametrize("name", MATRICES)
def test_matrix_rules_are_for_policies_that_ask(name):
    function, expected_flops = MATRICES[name]
    asked = {}

    def policy(node, flops, size):
        asked[node.name()] = flops, size
        return save_nothing(node, flops, size)

    def grads(choice):
        torch.manual_seed(0)
        x = torch.randn(8, 40, C).requires_grad_()
        w, b = torch.randn(C, C).requires_grad_(), torch.randn(C).requires_grad_()
        with Watched(policy=choice) if choice else region(False) as watched:
            y = function(x.sin(), w, b)
            loss = y.sin().square().sum()
        return torch.autograd.grad(loss, [x, w, b], allow_unused=True, materialize_grads=True), watched

    expected, _ = grads(None)
    actual, watched = grads(policy)
    assert_same(actual, expected)
    (node,) = (
        n for n in asked if any(n.startswith(m) for m in ("Mm", "Addmm", "Bmm", "Baddbmm", "Convolution"))
    )
    assert asked[node][0] >= expected_flops and asked[node][0] <= 1.1 * expected_flops
    kept, watched = grads("pointwise")
    assert_same(kept, expected)
    assert any("matrix product" in reason for reason in watched.reasons)


def test_policy_chooses():
    """It is told the bytes and the operations, and what it saves is saved."""
    seen = []

    def policy(node, flops, size):
        seen.append((node.name(), flops, size))
        save = node.name() == "SinBackward0"
        kinds = torch.utils.checkpoint.CheckpointPolicy
        return kinds.PREFER_SAVE if save else kinds.PREFER_RECOMPUTE

    x = torch.randn(64, 64, requires_grad=True)
    with Watched(policy=policy) as watched:
        y = F.gelu(x).sin().exp().sum()
    y.backward()
    assert ("GeluBackward0", 20 * 64 * 64, 4 * 64 * 64) in seen
    assert watched.rebuilt == 1 and watched.reasons == ["ExpBackward0 keeps its output itself"]


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "mixed", "sliced"])
def test_layouts(layout):
    """The rebuilt tensor has the strides of the original, so that views of it read what they read then."""

    def grads(on):
        torch.manual_seed(0)
        x = torch.randn(4, 8, 6, 10, requires_grad=True)
        conv = torch.nn.Conv2d(8, 8, 3)
        with Watched() if on else region(False) as watched:
            a = {
                "transposed": lambda: F.gelu(x.transpose(0, 1) * 1.5).transpose(0, 1),
                "channels_last": lambda: F.gelu((x * 1.5).contiguous(memory_format=torch.channels_last)),
                "mixed": lambda: (x * 1.5).transpose(-1, -2) * (x.transpose(-1, -2) * 2.0).contiguous(),
                "sliced": lambda: F.silu(x * 1.5)[:, :, ::2, 1:9],
            }[layout]()
            loss = conv(a).square().sum()
        return [*torch.autograd.grad(loss, [x, *conv.parameters()])], watched

    expected, _ = grads(False)
    actual, watched = grads(True)
    assert_same(actual, expected)
    assert watched.rebuilt


def test_batch_norm_running_statistics_may_move_on():
    """An evaluation forward, then a training one that moves the buffers, then the first one's backward."""
    torch.manual_seed(0)
    norm, conv = torch.nn.BatchNorm1d(C), torch.nn.Conv1d(C, C, 3)
    x = torch.randn(8, C, 40, requires_grad=True)
    norm.eval()
    with torch.no_grad():
        y = norm(x)
    with recompute():
        loss = conv(norm(x)).square().sum()
    norm.running_mean.data.add_(1)
    (actual,) = torch.autograd.grad(loss, [conv.weight])
    expected_loss = conv(y).square().sum()
    (expected,) = torch.autograd.grad(expected_loss, [conv.weight])
    assert_same([actual], [expected])


def test_own_outputs_are_kept_once():
    """A consumer that saves what its producer keeps anyway shares the storage: nothing to rebuild."""
    x = torch.randn(64, 64, requires_grad=True)
    weight = torch.randn(64, 64, requires_grad=True)
    for function in (torch.sigmoid, torch.tanh, torch.exp, lambda t: t.softmax(-1)):
        with Watched() as watched:
            y = function(x)
            z = y @ weight
        assert z.grad_fn._saved_self.data_ptr() == y.data_ptr()
        assert watched.rebuilt == 0


def test_nodes_without_rule_say_so():
    assert "CumsumBackward0" not in RULES
    x = torch.randn(64, 64, requires_grad=True)
    with Watched() as watched:
        (x.cumsum(0) @ x).sum()
    assert "no rule for CumsumBackward0" in watched.reasons


def test_inputs_are_found_behind_full_backward_hooks():
    """The hook's node stands between a module and what reads it; a sum keeps nothing and leads there."""
    weight = torch.randn(64, 64)
    gradients = []
    for on in (False, True):
        activation = torch.nn.GELU()
        activation.register_full_backward_hook(lambda *_: None)
        x = torch.linspace(-3, 3, 64 * 64).reshape(64, 64).requires_grad_()
        leaf = weight.clone().requires_grad_()
        with Watched() if on else region(False) as watched:
            loss = ((activation(x) + x) @ leaf).square().sum()
        gradients.append(torch.autograd.grad(loss, [x, leaf]))
        assert not on or watched.rebuilt == 1
    assert_same(*gradients)
