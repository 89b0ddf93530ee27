"""torch.nn's Transformer layers: norms, dropouts and the activation function are swapped, the fast path stays."""

import copy
import functools
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from _conversion import Widened, randn
from torch import nn
from torch.profiler import profile

import pyckpt

ACTIVATIONS = {
    "relu": "relu",
    "gelu": F.gelu,
    "torch.relu": torch.relu,
    "silu": F.silu,
    "tanh": functools.partial(F.gelu, approximate="tanh"),
}


def encoder(activation="gelu", dropout=0.0, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, activation, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False)


def decoder(activation="gelu", dropout=0.0):
    torch.manual_seed(0)
    return nn.TransformerDecoder(
        nn.TransformerDecoderLayer(8, 2, 16, dropout, activation, batch_first=True, norm_first=True), 2
    )


def outputs_and_gradients(model, *inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    output = model(*leaves)
    loss = (
        output * torch.linspace(0, 9, output.numel(), dtype=output.dtype).cos().reshape(output.shape)
    ).sum()
    return [output.detach(), *torch.autograd.grad(loss, [*leaves, *model.parameters()])]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("make", [encoder, decoder])
def test_outputs_and_gradients_agree(make, activation):
    model = make(ACTIVATIONS[activation]).double()
    inputs = [randn(2, 5, 8, dtype=torch.float64, seed=seed) for seed in range(1 if make is encoder else 2)]
    original = copy.deepcopy(model)
    before = [(type(m), dict(vars(m))) for m in model.modules()]
    with Widened():
        pyckpt.convert(model, verify=True)
    function = model.layers[0].activation
    function = function.func if isinstance(function, functools.partial) else function
    assert function in (pyckpt.functional.relu, pyckpt.functional.gelu, pyckpt.functional.silu)
    for got, want in zip(
        outputs_and_gradients(model, *inputs), outputs_and_gradients(original, *inputs), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    report = pyckpt.report(model)
    assert "-> pyckpt.functional." in report.swapped["layers.1.activation"] and not report.left
    converted = [(type(m), dict(vars(m))) for m in model.modules()]
    pyckpt.convert(model)
    assert [(type(m), dict(vars(m))) for m in model.modules()] == converted
    pyckpt.revert(model)
    assert [(type(m), dict(vars(m))) for m in model.modules()] == before


def called(model, x):  # output, names of the operators
    with torch.no_grad(), profile() as recorded:
        output = model(x)
    return output, {event.name for event in recorded.events()}


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_the_fast_path_of_evaluation_is_taken_as_before(activation):
    model, x = encoder(activation, dropout=0.5).eval(), randn(2, 5, 8)
    model.norm = None  # it is no part of the fast path
    want, names = called(model, x)
    assert "aten::_transformer_encoder_layer_fwd" in names
    got, names = called(pyckpt.convert(model), x)
    assert "aten::_transformer_encoder_layer_fwd" in names
    assert torch.equal(got, want)
    slow = model(x.requires_grad_())  # the same by the fused layers
    torch.testing.assert_close(slow, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), "torch.save"])
@pytest.mark.parametrize("activation", ["gelu", "tanh"])
def test_copies(how, activation):
    model, x = pyckpt.convert(encoder(ACTIVATIONS[activation])), randn(2, 5, 8)
    if how == "torch.save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        clone = torch.load(file, weights_only=False)
    else:
        clone = how(model)
    assert torch.equal(clone(x), model(x))
    pyckpt.revert(clone)
    assert all(not type(m).__module__.startswith("pyckpt") for m in clone.modules())
    restored = clone.layers[0].activation
    assert (restored.func if activation == "tanh" else restored) is F.gelu
    torch.testing.assert_close(clone(x), model(x), rtol=1e-5, atol=1e-5)


def test_what_is_left():
    own = encoder(lambda x: F.gelu(x))
    function = own.layers[0].activation
    pyckpt.convert(own)
    assert own.layers[0].activation is function

    class Mine(nn.TransformerEncoderLayer):
        def forward(self, x):
            return self.activation(x)

    mine = pyckpt.convert(Mine(8, 2))
    assert mine.activation is F.relu
    assert "only torch's Transformer layers'" in pyckpt.report(mine).left["activation"]

    patched = nn.TransformerEncoderLayer(8, 2)
    patched.forward = lambda x: x
    assert pyckpt.convert(patched).activation is F.relu

    changed = pyckpt.convert(nn.TransformerEncoderLayer(8, 2))
    changed.activation = F.silu
    with pytest.warns(UserWarning, match="was given another activation"):
        pyckpt.revert(changed)
    assert changed.activation is F.silu


def test_a_module_as_activation_is_swapped_as_a_module():
    model = pyckpt.convert(encoder(nn.GELU()))
    assert type(model.layers[0].activation) is pyckpt.nn.GELU and model.layers[0].activation_relu_or_gelu == 2


def test_dropout_of_the_layers_is_ours():
    model = pyckpt.convert(encoder(dropout=0.5))
    assert all(type(m) is pyckpt.nn.Dropout for m in model.modules() if isinstance(m, nn.Dropout))
    x = randn(2, 5, 8)
    torch.manual_seed(1)
    first = model(x)
    torch.manual_seed(1)
    assert torch.equal(model(x), first) and not torch.equal(model(x), first)
