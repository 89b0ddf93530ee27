"""timm's modules with a ``fused_attn`` switch, converted: the same function, and no weights stored."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import pyckpt
from pyckpt import backends
from pyckpt.memory import saved_bytes

timm = pytest.importorskip(
    "timm",
    reason="timm does not import: its torchvision fits one version of torch only",
    exc_type=ImportError,
)
from pyckpt.integrations import timm as integration  # noqa: E402

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5}
# How to make each with dropout p of the weights; and whether its mask is learned.
MODELS = {
    "vit": (lambda p: timm.models.VisionTransformer(**SMALL, attn_drop_rate=p), False),
    "vit with normalised q and k": (lambda p: timm.models.VisionTransformer(**SMALL, attn_drop_rate=p, qk_norm=True), False),
    "vit with biases of relative positions": (
        lambda p: timm.models.VisionTransformerRelPos(**SMALL, attn_drop_rate=p, rel_pos_type="bias"), True
    ),
    "beit": (lambda p: timm.models.Beit(**SMALL, attn_drop_rate=p, use_rel_pos_bias=True), True),
    "eva": (lambda p: timm.models.Eva(**SMALL, attn_drop_rate=p, use_rot_pos_emb=True), False),
    "swin": (
        lambda p: timm.models.SwinTransformer(
            img_size=32, patch_size=2, window_size=4, embed_dim=16, depths=(2,), num_heads=(2,), num_classes=5, attn_drop_rate=p
        ), True,
    ),
    "maxxvit": (
        lambda p: timm.create_model("maxvit_rmlp_pico_rw_256", img_size=64, num_classes=5) if p == 0 else None, True
    ),
    "twins": (
        lambda p: timm.models.Twins(
            img_size=32, embed_dims=(16,), num_heads=(2,), mlp_ratios=(2,), depths=(2,), sr_ratios=(2,), wss=(2,), num_classes=5,
            attn_drop_rate=p,
        ), False,
    ),
    "nest": (
        lambda p: timm.models.Nest(
            img_size=32, patch_size=4, num_levels=2, embed_dims=(16, 16), num_heads=(2, 2), depths=(1, 1), num_classes=5,
            attn_drop_rate=p,
        ), False,
    ),
}  # fmt: skip


def _made(name, p=0.0, fused=None):
    torch.manual_seed(0)
    model = MODELS[name][0](p)
    if model is None:
        pytest.skip("takes no dropout of weights")
    for parameter in model.parameters():  # biases of relative positions and scales of layers begin at 0
        parameter.data += 0.1 * torch.randn_like(parameter)
    for module in model.modules():
        if fused is not None and hasattr(module, "fused_attn"):
            module.fused_attn = fused
    return model


def _image(model):
    side = 64 if isinstance(model, timm.models.MaxxVit) else 32
    return torch.randn(2, 3, side, side)


def _results(model, x):
    loss = model(x).square().sum()
    return [loss, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]


@pytest.fixture
def counted(monkeypatch):
    """How often pyckpt's attention was called, and how often torch's."""
    calls = {"pyckpt": 0, "torch": 0}
    ours, theirs = integration.attention, F.scaled_dot_product_attention

    def count(name, function):
        def counting(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return counting

    monkeypatch.setattr(integration, "attention", count("pyckpt", ours))
    monkeypatch.setattr(integration.F, "scaled_dot_product_attention", count("torch", theirs))
    return calls


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_same_function(name, fused, counted):
    """In float64, in evaluation, whichever branch the original takes; our kernels only where a mask is learned."""
    original = _made(name, fused=fused).double().eval()
    converted = pyckpt.convert(copy.deepcopy(original), verify=True)
    x = _image(original).double()
    want, got = _results(original, x), _results(converted, x)
    scale = max(float(t.abs().max()) for t in want[1:] if t is not None)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11 * scale)
    switches = [where for where in pyckpt.report(converted).swapped if where.endswith("fused_attn")]
    assert switches
    learned = MODELS[name][1]
    assert (counted["pyckpt"] > 0) == learned
    types, state = [type(m) for m in original.modules()], {p: m.fused_attn for p, m in _switches(original)}
    pyckpt.revert(converted)
    assert [type(m) for m in converted.modules()] == types
    assert {p: m.fused_attn for p, m in _switches(converted)} == state


def _switches(model):
    return [(path, module) for path, module in model.named_modules() if hasattr(module, "fused_attn")]


@pytest.mark.parametrize("name", MODELS)
def test_dropout(name, counted):
    """Our attention serves it in training, from one seed always the same; in evaluation there is none."""
    model = pyckpt.convert(_made(name, 0.5)).train()
    x = _image(model)

    def draw():
        torch.manual_seed(3)
        return _results(model, x)

    first, second = draw(), draw()
    assert counted["pyckpt"] and not counted["torch"]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True) if a is not None)
    torch.manual_seed(4)
    assert not torch.equal(_results(model, x)[0], first[0])
    counted["pyckpt"] = 0
    with torch.no_grad():
        model.eval()(x)
    assert not counted["pyckpt"]


def test_mean_under_dropout():
    """The output of an attention module is linear in the weights: its mean over masks is the output without."""
    module = pyckpt.convert(timm.layers.Attention(32, 2, attn_drop=0.3).double(), recompute=False)
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    with torch.no_grad():
        draws = torch.stack([module(x) for _ in range(3000)])
        exact = module.eval()(x)
    error = (draws.mean(0) - exact).abs() / (draws.std(0) / len(draws) ** 0.5)
    assert error.max() < 6


@pytest.mark.parametrize(("name", "p", "share"), [("vit", 0.1, 0.5), ("swin", 0.0, 0.75), ("beit", 0.0, 0.5)])
def test_bytes(name, p, share):
    """The weights and their mask are gone: of a block with 257 tokens, and of windows."""
    options = {**SMALL, "img_size": 128, "attn_drop_rate": p}
    make = {
        "vit": lambda: timm.models.VisionTransformer(**options),
        "beit": lambda: timm.models.Beit(**options, use_rel_pos_bias=True),
        "swin": lambda: timm.models.SwinTransformer(
            img_size=64,
            patch_size=2,
            window_size=16,
            embed_dim=16,
            depths=(1,),
            num_heads=(4,),
            attn_drop_rate=p,
        ),
    }[name]
    model = make()
    x = torch.randn(4, 3, 64 if name == "swin" else 128, 64 if name == "swin" else 128)
    before = saved_bytes(lambda: model(x), warmup=1)
    pyckpt.convert(model)
    assert saved_bytes(lambda: model(x), warmup=1) < share * before


def test_object_stays_usable():
    """deepcopy, pickle and a state_dict work as before, and a copy is converted too."""
    model = pyckpt.convert(_made("swin")).eval()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.load_state_dict(model.state_dict())
        assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
        x = _image(model)
        assert torch.equal(twin(x), model(x))
        pyckpt.revert(twin)
        assert all(
            type(m).forward is type(o).forward
            for m, o in zip(twin.modules(), _made("swin").modules(), strict=True)
        )
    assert isinstance(model.layers[0].blocks[0].attn, timm.models.swin_transformer.WindowAttention)


def test_traced_by_fx():
    module = pyckpt.convert(timm.layers.Attention(32, 2).eval(), recompute=False)
    x = torch.randn(2, 9, 32)
    traced = torch.fx.symbolic_trace(module, concrete_args={"attn_mask": None, "is_causal": False})
    torch.testing.assert_close(traced(x), module(x))


def test_left_alone():
    """Where attention has no kernels, where a forward was patched in, and where nothing calls torch's function."""
    for change in ("no kernels", "forward", "nothing fused"):
        module = timm.layers.Attention(32, 2)
        if change == "forward":
            module.forward = lambda x: x
        if change == "nothing fused":
            module = timm.models.volo.OutlookAttention(32, 2)
            module.fused_attn = False
        cls = type(module)
        with backends.use("reference" if change == "no kernels" else "cpu"):
            pyckpt.convert(module)
        assert type(module) is cls, change


def test_changed_after_conversion():
    module = pyckpt.convert(timm.layers.Attention(32, 2))
    changed = type("Changed", (type(module),), {})
    module.__class__ = changed
    with pytest.warns(UserWarning, match=r"\(the model itself\) was converted, then became a .*Changed"):
        pyckpt.revert(module)
    assert type(module) is changed
