"""Whole models of transformers, timm and torchvision, tiny and random: converted, they compute the same."""

import collections
import copy
import importlib
import pathlib
import re

import pytest
import torch
from _conversion import FUSED, Widened, assert_equivalent, run
from _models import IMAGE_MODELS, TRANSFORMERS, image_model, transformers_model

import pyckpt
from bench.coverage import became

# transformers.activations.ACT2CLS -> (what it becomes, approximate); every other one is left
ACTIVATIONS = {
    "gelu": ("GELU", "none"),
    "gelu_python": ("GELU", "none"),
    "gelu_new": ("GELU", "tanh"),
    "gelu_fast": ("GELU", "tanh"),
    "gelu_accurate": ("GELU", "tanh"),
    "gelu_pytorch_tanh": ("GELU", "tanh"),
    "gelu_python_tanh": ("GELU", "tanh"),
    "quick_gelu": ("GELU", "sigmoid"),
    "silu": ("SiLU", None),
    "swish": ("SiLU", None),
    "relu": ("ReLU", None),
}


def test_activations_of_transformers():
    activations = pytest.importorskip("transformers.activations")
    assert {"gelu", "gelu_new", "silu", "quick_gelu", "relu2"} <= set(activations.ACT2CLS)
    for name in activations.ACT2CLS:
        module = activations.ACT2FN[name]
        original, before = copy.deepcopy(module), type(module)
        pyckpt.convert(module, verify=True)
        cls, approximate = ACTIVATIONS.get(name, (None, None))
        assert type(module) is (FUSED[cls] if cls else before), name
        if cls is None:
            expected = before.__name__ not in ("LinearActivation", "SqrtSoftplusActivation")
            assert "" in pyckpt.report(module).left or not expected, name
            continue
        assert getattr(module, "approximate", None) == approximate, name
        x = torch.linspace(-9, 9, 901, dtype=torch.float64)
        for got, want in zip(run(module, x), run(original, x), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=2e-11, msg=name)
        assert_equivalent(module, original, 3 * torch.randn(40, 8))


# The activation, dropout and norm modules that conversion swaps, by what they become, and the classes that it leaves.
BERT = ({"GELU": 2, "LayerNorm": 5, "Dropout": 7}, {"Tanh"})
LLAMA = ({"SiLU": 2, "ConvertedNorm": 5}, set())
EXPECTED = {
    "bert": BERT,
    "roberta": BERT,
    "distilbert": ({"GELU": 2, "LayerNorm": 5, "Dropout": 5}, set()),
    "modernbert": ({"GELU": 2, "LayerNorm": 5, "Dropout": 3}, set()),
    "deberta-v2": ({"GELU": 2, "LayerNorm": 5, "Dropout": 9}, set()),
    "gpt2": ({"GELU": 2, "LayerNorm": 5, "Dropout": 7}, set()),
    "gpt_neox": ({"GELU": 2, "LayerNorm": 5, "Dropout": 5}, set()),
    "opt": ({"ReLU": 2, "LayerNorm": 5}, set()),
    "falcon": ({"GELU": 2, "LayerNorm": 5}, set()),
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen3": ({"SiLU": 2, "ConvertedNorm": 9}, set()),
    "gemma3_text": ({"GELU": 2, "ConvertedNorm": 13}, set()),
    "phi3": ({"SiLU": 2, "ConvertedNorm": 5, "Dropout": 4}, set()),
    "mixtral": ({"SiLU": 2, "ConvertedNorm": 5}, set()),
    "t5": ({"ReLU": 4, "ConvertedNorm": 12, "Dropout": 16}, set()),
    "whisper": ({"GELU": 4, "LayerNorm": 12}, set()),
    "clip": ({"LayerNorm": 11, "GELU": 4}, set()),
    "vit": ({"GELU": 2, "LayerNorm": 5, "Dropout": 3}, {"Tanh"}),
    "dinov2": ({"GELU": 2, "LayerNorm": 5, "Dropout": 1}, set()),
    "swin": ({"GELU": 2, "LayerNorm": 7, "Dropout": 3}, {"SwinDropPath"}),
    "convnext": ({"GELU": 2, "LayerNorm": 3, "ConvertedLayerNorm": 2}, set()),
    "segformer": ({"GELU": 2, "LayerNorm": 9, "Dropout": 4}, {"SegformerDropPath"}),
    "timm/vit": ({"Dropout": 26, "LayerNorm": 13, "GELU": 6}, set()),
    "timm/convnext": ({"ConvertedLayerNorm": 5, "LayerNorm": 9, "GELU": 9, "Dropout": 19}, set()),
    "timm/swin": ({"LayerNorm": 7, "Dropout": 9, "Softmax": 2, "GELU": 2}, {"DropPath"}),
    "timm/mixer": ({"LayerNorm": 5, "GELU": 4, "Dropout": 9}, set()),
    "timm/efficientnet": ({"SiLU": 11}, {"Sigmoid", "BatchNormAct2d"}),
    "timm/efficientnet_ln": ({"SiLU": 11}, {"Sigmoid", "LayerNormAct2d"}),
    "timm/resnet": ({"ReLU": 12}, {"BatchNorm2d"}),
    "torchvision/vit": ({"Dropout": 7, "LayerNorm": 5, "GELU": 2, "MultiheadAttention": 2}, set()),
    "torchvision/convnext": ({"ConvertedLayerNorm": 3, "LayerNorm": 2, "GELU": 2}, set()),
    "torchvision/swin": ({"LayerNorm": 7, "GELU": 2, "Dropout": 4}, set()),
    "torchvision/resnet": ({"ReLU": 5}, {"BatchNorm2d"}),
}


def outputs_and_gradients(model, inputs):
    output = model(**inputs)
    output = output if isinstance(output, torch.Tensor) else output[0]
    weights = torch.linspace(0, 9, output.numel(), dtype=torch.float64).cos().reshape(output.shape)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(output, parameters, weights.to(output), allow_unused=True)
    return [output.detach(), *(g for g in gradients if g is not None)]


def assert_converted(model, inputs, swapped, left):
    """In float64 the converted model agrees to rounding; what was swapped and left is as expected, and told."""
    original, types = copy.deepcopy(model), [type(m) for m in model.modules()]
    pyckpt.convert(model, verify=True)
    report = pyckpt.report(model)
    swaps = collections.Counter(map(became, report.swapped.values()))
    swaps.pop("attention", None)  # tests/test_attention_*.py
    assert swaps == swapped
    assert {type(model.get_submodule(path)).__name__ for path in report.left} == left
    assert all(len(reason) > 20 for reason in report.left.values())
    for path, module in model.named_modules():
        if not module._modules and re.search(
            r"norm|gelu|silu|relu|dropout", type(module).__name__, re.IGNORECASE
        ):
            assert path in report.swapped.keys() | report.left.keys() or shared(model, path, report), path
    with Widened():
        got, want = outputs_and_gradients(model, inputs), outputs_and_gradients(original, inputs)
    peak = max(
        float(t.abs().max()) for t in want[1:]
    )  # some gradients, as of a key's bias, are zero but for rounding
    for a, b, scale in zip(got, want, [float(want[0].abs().max()), *[peak] * len(want)], strict=False):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * scale)
    pyckpt.revert(model)
    assert [type(m) for m in model.modules()] == types


def shared(model, path, report):
    return any(model.get_submodule(other) is model.get_submodule(path) for other in report.swapped)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name):
    pytest.importorskip("transformers")
    model, inputs = transformers_model(name)
    swapped, left = EXPECTED[name]
    if name == "falcon" and (dropouts := sum(type(m) is torch.nn.Dropout for m in model.modules())):
        swapped = {**swapped, "Dropout": dropouts}  # before transformers 5.25; since then a function
    assert_converted(model, inputs, swapped, left)


@pytest.mark.parametrize(
    ("library", "name"), [(library, name) for library, models in IMAGE_MODELS.items() for name in models]
)
def test_image_models(library, name):
    reason = f"{library} does not import: torchvision fits one version of torch only"
    pytest.importorskip(library, reason=reason, exc_type=ImportError)
    assert_converted(*image_model(library, name), *EXPECTED[f"{library}/{name}"])


@pytest.mark.slow
def test_every_norm_class_of_transformers():
    """Those that can be made from a width alone: nearly all are converted, in mixed dtypes too; the others say why."""
    transformers = pytest.importorskip("transformers")
    models = pathlib.Path(transformers.__file__).parent / "models"
    converted, left = 0, {}
    for file in sorted(models.rglob("modeling_*.py")):
        names = re.findall(r"^class (\w*(?:RM[Ss]Norm|LayerNorm(?:2d)?))\(", file.read_text(), re.MULTILINE)
        if not names:
            continue
        module = importlib.import_module(
            ".".join(["transformers.models", *file.relative_to(models).with_suffix("").parts])
        )
        for cls in (getattr(module, name) for name in names):
            try:
                norm = cls(16)  # the width, or where there is no weight, eps
            except (TypeError, AttributeError):
                continue  # wants a configuration
            if next(norm.children(), None) is not None:
                continue
            for parameter in norm.parameters():
                parameter.data = 1 + 0.3 * torch.randn(16)
            original = copy.deepcopy(norm)
            pyckpt.convert(norm)
            if type(norm) is type(original):
                left[cls.__name__] = pyckpt.report(norm).left[""]
                continue
            converted += 1
            x = torch.randn(3, 16, 5, 16)  # 16 channels first or last
            for dtype in (torch.float32, torch.bfloat16):
                try:
                    want = original(x.to(dtype))
                except RuntimeError:
                    continue
                with Widened():
                    exact = copy.deepcopy(original).double()(x.to(dtype).double())
                got, ulps = norm(x.to(dtype)), 4 * torch.finfo(dtype).eps * float(exact.abs().max())
                assert got.dtype == want.dtype and got.shape == want.shape, cls
                assert (got - exact).abs().max() <= 1.1 * (want - exact).abs().max() + ulps, cls
    assert converted > 200 and len(left) < 10, left
    assert all(len(reason) > 20 for reason in left.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_no_worse_than_before(dtype):
    """Llama, Gemma and T5 in 16 bits: as near to exact arithmetic as the originals. Over several draws, for one alone decides
    by rounding."""
    pytest.importorskip("transformers")
    for name in ("llama", "gemma3_text", "t5"):
        ours, theirs = [], []
        for draw in range(4):
            model, inputs = transformers_model(name, draw)
            with Widened():
                exact = outputs_and_gradients(model, inputs)
            original = copy.deepcopy(model).to(dtype)
            converted = pyckpt.convert(copy.deepcopy(original))
            for one, errors in ((converted, ours), (original, theirs)):
                got = outputs_and_gradients(one, inputs)
                assert all(t.dtype == dtype for t in got)
                errors += [
                    float((a - b).norm() / (b.norm() + 1e-30)) for a, b in zip(got, exact, strict=True)
                ]
        assert sum(ours) <= 1.1 * sum(theirs), (name, sum(ours), sum(theirs))
