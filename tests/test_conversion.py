"""convert and revert: layers are swapped, everything else about the model stays, and it all comes back."""

import copy
import io
import os
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from _conversion import (
    FUSED,
    SWAPPED_IN_BLOCK,
    Block,
    ElsewhereGelu,
    assert_equivalent,
    fused_paths,
    mixed_model,
    randn,
    run,
    state_of,
)
from torch import nn

import pyckpt

# ---- torch.nn's types --------------------------------------------------------------------------------------

LAYERS = [
    (lambda: nn.GELU(), (4, 12)),
    (lambda: nn.GELU(approximate="tanh"), (4, 12)),
    (lambda: nn.SiLU(), (4, 12)),
    (lambda: nn.SiLU(inplace=True), (4, 12)),
    (lambda: nn.ReLU(), (4, 12)),
    (lambda: nn.ReLU(inplace=True), (4, 12)),
    (lambda: nn.LayerNorm(12, eps=0.5), (4, 12)),
    (lambda: nn.LayerNorm((3, 4), bias=False), (5, 3, 4)),
    (lambda: nn.LayerNorm(12, elementwise_affine=False), (4, 12)),
    (lambda: nn.RMSNorm(12, eps=0.25), (4, 12)),
    (lambda: nn.RMSNorm((3, 4)), (5, 3, 4)),
    (lambda: nn.Dropout(0.0), (4, 12)),
    (lambda: nn.Dropout(0.7).eval(), (4, 12)),
    (lambda: nn.Softmax(dim=1), (3, 4, 5)),
    (lambda: nn.Softmax(dim=-1), (3, 4, 5)),
]


@pytest.mark.parametrize(("make", "shape"), LAYERS, ids=[repr(make()) for make, _ in LAYERS])
def test_exact_types_are_swapped_with_their_options(make, shape):
    layer = make()
    for index, parameter in enumerate(layer.parameters()):
        parameter.data = 1 + 0.3 * randn(*parameter.shape, seed=index)
    original = copy.deepcopy(layer)
    assert pyckpt.convert(layer) is layer
    assert type(layer) is FUSED[type(original).__name__]
    assert repr(layer) == repr(original)
    assert list(layer.state_dict()) == list(original.state_dict())
    assert_equivalent(layer, original, 2 * randn(*shape))
    if getattr(layer, "inplace", False):
        x = randn(*shape)
        assert layer(x).data_ptr() == x.data_ptr()


def test_the_fused_forward_is_what_runs(monkeypatch):
    calls = []
    for name, cls in FUSED.items():

        def spy(self, input, name=name, forward=cls.forward):
            calls.append(name)
            return forward(self, input)

        monkeypatch.setattr(cls, "forward", spy)
    model = Block()
    model(randn(3, 12))
    assert calls == []
    pyckpt.convert(model)(randn(3, 12))
    assert set(calls) == set(FUSED)


def test_only_the_classes_change():
    model = Block()
    model.norm1.weight.requires_grad_(False)
    model.norm2.double()
    model.register_buffer("table", randn(3))
    model.eval()
    model.norm2.train()
    handle = model.act.register_forward_hook(lambda *args: None)
    before, keys = state_of(model), list(model.state_dict())
    assert pyckpt.convert(model, recompute=False) is model
    assert fused_paths(model) == SWAPPED_IN_BLOCK
    assert state_of(model) == before
    assert list(model.state_dict()) == keys
    assert "_pyckpt" not in repr(model)
    handle.remove()
    assert not model.act._forward_hooks


def test_outputs_and_gradients_of_a_whole_model_agree():
    model = Block()
    original = copy.deepcopy(model)
    assert_equivalent(pyckpt.convert(model), original, randn(5, 12))


def test_an_optimizer_made_before_goes_on_as_without_conversion():
    def train(convert):
        model = Block()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(6):
            if convert and step == 3:
                pyckpt.convert(model)
            optimizer.zero_grad()
            loss = (model(randn(8, 12, seed=step)) - 1).square().mean()
            loss.backward()
            optimizer.step()
        return model, loss.item()

    (plain, want), (converted, got) = train(False), train(True)
    assert got == pytest.approx(want, rel=1e-5)
    start = Block()
    for name, parameter in converted.named_parameters():
        assert not torch.equal(parameter, start.get_parameter(name)), f"{name} no longer learns"
        torch.testing.assert_close(parameter, plain.get_parameter(name), rtol=0, atol=1e-5)


def test_hooks_fire_once_per_call_and_may_replace_the_output():
    def calls_of(convert):
        model, calls = Block(), []
        model.norm1.register_forward_hook(lambda m, i, o: calls.append("forward"))
        model.act.register_forward_pre_hook(lambda m, i: calls.append("pre"))
        model.norm2.register_full_backward_hook(lambda m, gi, go: calls.append("backward"))
        model.silu.register_forward_hook(lambda m, i, o: 2.0 * o)
        if convert:
            pyckpt.convert(model)
            assert calls == [], "conversion ran a hook"
        return run(model, randn(4, 12)), calls

    (want, want_calls), (got, got_calls) = calls_of(False), calls_of(True)
    assert got_calls == want_calls and sorted(got_calls) == ["backward", "forward", "pre"]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_shared_modules_stay_shared_and_are_reported_once():
    act = nn.GELU()
    model = nn.Sequential(nn.Linear(4, 4), act, nn.Sequential(nn.Linear(4, 4), act))
    pyckpt.convert(model)
    assert model[1] is act and model[2][1] is act and type(act) is pyckpt.nn.GELU
    assert pyckpt.report(model).swapped == {"1": "nn.GELU -> pyckpt.nn.GELU"}
    pyckpt.revert(model)
    assert type(act) is nn.GELU


def test_converting_twice_is_converting_once():
    model = Block()
    before = {path: type(module) for path, module in model.named_modules()}
    pyckpt.convert(model)
    once = [(type(module), dict(vars(module))) for module in model.modules()]
    pyckpt.convert(model)
    assert [(type(module), dict(vars(module))) for module in model.modules()] == once
    pyckpt.revert(model)
    assert {path: type(module) for path, module in model.named_modules()} == before


def test_meta_modules_and_default_devices():
    with torch.device("meta"):
        model = pyckpt.convert(Block(), verify=True)
    assert fused_paths(model) == SWAPPED_IN_BLOCK
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu").load_state_dict(Block().state_dict())
    assert_equivalent(model, Block(), randn(3, 12))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_conversion_under_no_grad_and_inference_mode(context):
    with context():
        model = pyckpt.convert(nn.Sequential(nn.LayerNorm(8), ElsewhereGelu()), verify=True)
    assert fused_paths(model) == {"0", "1"}


# ---- revert, copies ----------------------------------------------------------------------------------------


def test_revert_restores_types_attributes_and_bits():
    model = mixed_model()
    x = randn(5, 12)
    types, attributes = [type(m) for m in model.modules()], [dict(vars(m)) for m in model.modules()]
    want = run(model, x)
    pyckpt.convert(model)
    assert [type(m) for m in model.modules()] != types
    assert "act" not in vars(model[4])
    assert pyckpt.revert(model) is model
    assert [type(m) for m in model.modules()] == types
    assert [dict(vars(m)) for m in model.modules()] == attributes
    assert all(torch.equal(a, b) for a, b in zip(run(model, x), want, strict=True))
    assert type(model[5]) is pyckpt.nn.LayerNorm, "the model was built with this one"
    assert model[4].act.__self__ is model[4]


def test_revert_leaves_what_was_changed_since():
    layer = pyckpt.convert(nn.LayerNorm(4))
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus())
    with pytest.warns(UserWarning, match=r"\(the model itself\) was converted, then became a"):
        pyckpt.revert(layer)
    assert isinstance(layer, pyckpt.nn.LayerNorm)
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    assert type(pyckpt.revert(layer)) is nn.LayerNorm
    act = pyckpt.convert(ElsewhereGelu())
    act.forward = act.forward
    with pytest.warns(UserWarning, match="forward of its own"):
        pyckpt.revert(act)
    assert type(act) is pyckpt.nn.GELU
    del act.forward
    assert type(pyckpt.revert(act)) is ElsewhereGelu


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def replica(model):
    """As DataParallel copies modules: the class and a shallow copy of the __dict__, children replaced."""
    new = model._replicate_for_data_parallel()
    new._parameters = dict(model._parameters)
    new._modules = {name: replica(child) for name, child in model._modules.items()}
    return new


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_torch_save, replica]
)
def test_copies_of_a_converted_model_work_and_can_be_reverted(duplicate):
    model = mixed_model()
    x, before = randn(5, 12), [type(m) for m in model.modules()]
    pyckpt.convert(model)
    after, keys = [type(m) for m in model.modules()], list(model.state_dict())
    clone = duplicate(model)
    assert [type(m) for m in clone.modules()] == after
    assert torch.equal(clone(x), model(x))
    if duplicate is not replica:
        assert list(clone.state_dict()) == keys
    pyckpt.revert(clone)
    assert [type(m) for m in clone.modules()] == before
    torch.testing.assert_close(clone(x), model(x), rtol=1e-5, atol=1e-5)
    if duplicate is not replica:
        assert clone[4].act.__self__ is clone[4]
    assert [type(m) for m in model.modules()] == after, "reverting the copy changed the original"
    model(x)


def test_a_converted_state_dict_loads_anywhere():
    model, plain = pyckpt.convert(Block()), Block()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    plain.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(plain(randn(3, 12)), model(randn(3, 12)), rtol=1e-5, atol=1e-5)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True), strict=True)


# ---- compiled models, misuse, kill switch ------------------------------------------------------------------


def test_a_compiled_model_is_converted_inside_its_wrapper():
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = Block()
    compiled = torch.compile(model, backend=backend)
    x = randn(4, 12)
    want = compiled(x)
    graphs = len(seen)
    assert pyckpt.convert(compiled) is compiled
    assert fused_paths(model) == SWAPPED_IN_BLOCK
    assert set(pyckpt.report(compiled).swapped) == SWAPPED_IN_BLOCK
    torch.testing.assert_close(compiled(x), want, rtol=1e-5, atol=1e-5)
    assert len(seen) > graphs, "the old code was run: nothing was compiled anew"
    pyckpt.revert(compiled)
    assert fused_paths(model) == set()
    assert torch.equal(compiled(x), want)
    torch._dynamo.reset()


def test_a_module_compiled_in_place():
    torch._dynamo.reset()
    act = ElsewhereGelu()
    act.compile(backend="eager")
    want = act(randn(9))
    assert type(pyckpt.convert(act)) is pyckpt.nn.GELU
    torch.testing.assert_close(act(randn(9)), want, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize("function", [pyckpt.convert, pyckpt.revert, pyckpt.report])
@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (nn.GELU, "the class GELU; pass an instance: "),
        ([nn.GELU()], "a list; pass the models one by one"),
        ({"weight": torch.ones(1)}, "type dict; pass the model itself"),
        (F.gelu, "builtin_function_or_method"),
        (None, "NoneType"),
    ],
)
def test_what_is_not_a_module_is_refused(function, argument, words):
    with pytest.raises(TypeError, match=words) as caught:
        function(argument)
    assert f"pyckpt.{function.__name__}" in str(caught.value) and "torch.nn.Module" in str(caught.value)


def test_kill_switch_and_imports():
    """In a process of its own: with PYCKPT_DISABLE convert does nothing, says so once, imports little."""
    script = """
    import os, sys, warnings
    import torch, pyckpt
    from torch import nn
    os.environ["PYCKPT_DISABLE"] = "1"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model = nn.Sequential(nn.GELU(), nn.LayerNorm(3))
            assert pyckpt.convert(model, verify=True) is model
            assert [type(m) for m in model] == [nn.GELU, nn.LayerNorm]
    assert len(caught) == 1 and "PYCKPT_DISABLE" in str(caught[0].message), caught
    assert caught[0].filename == "<string>", caught[0].filename
    os.environ["PYCKPT_DISABLE"] = "0"
    assert type(pyckpt.convert(model)[0]) is pyckpt.nn.GELU
    os.environ["PYCKPT_DISABLE"] = "1"
    assert type(pyckpt.revert(model)[0]) is nn.GELU
    assert not {"transformers", "torch._dynamo"} & set(sys.modules)
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYCKPT_DISABLE"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=environment, timeout=120)
