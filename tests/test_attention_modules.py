"""Drop-ins: nn.MultiheadAttention, torch's Transformer layers, Hugging Face's attention."""

import copy
import itertools
import pickle
import random

import pytest
import torch
from torch import nn

import pyckpt
from pyckpt import backends
from pyckpt.memory import saved_bytes

MASKS = ("none", "causal", "additive", "per head")
PADDINGS = ("none", "boolean", "additive")
VARIANTS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias, other key and value widths": {"bias": False, "kdim": 10, "vdim": 24},
    "bias_kv": {"add_bias_kv": True, "batch_first": True},
    "zero attention": {"add_zero_attn": True},
    "all": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 8, "vdim": 8, "batch_first": True},
}


def _inputs(options, same, batched, batch=3):
    queries, keys = 5, 5 if same else 7
    sizes = ((queries, 16), (keys, options.get("kdim", 16)), (keys, options.get("vdim", 16)))
    tensors = [torch.randn(batch, *size) for size in sizes]
    if same:
        tensors = [tensors[0]] * 3
    if not batched:
        return [x[0] for x in tensors]
    return tensors if options.get("batch_first") else [x.transpose(0, 1) for x in tensors]


def _masks(mask, padding, queries, keys):
    attn_mask = {
        "causal": torch.ones(queries, keys, dtype=torch.bool).triu(1),
        "additive": torch.randn(queries, keys),
        "per head": (torch.rand(3 * 4, queries, keys) > 0.7).index_fill(-1, torch.tensor([0]), False),
    }.get(mask)
    hidden = torch.zeros(3, keys, dtype=torch.bool)
    hidden[1, 3:] = True
    key_padding = {"boolean": hidden, "additive": torch.zeros(3, keys).masked_fill(hidden, -1e4)}.get(padding)
    return {"attn_mask": attn_mask, "key_padding_mask": key_padding}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_multihead_attention_as_torch(options, backend, one_thread):
    """Outputs, weights and every gradient; for each kind of mask, padding, batch, and of what is asked for."""
    theirs = nn.MultiheadAttention(16, 4, **options)
    ours = pyckpt.nn.MultiheadAttention(16, 4, **options)
    ours.load_state_dict(theirs.state_dict())
    assert repr(ours) == repr(theirs)
    cases = [
        (same, mask, padding, need_weights, average, batched)
        for same, mask, padding, need_weights, average, batched in itertools.product(
            (True, False), MASKS, PADDINGS, (True, False), (True, False), (True, False)
        )
        if not (same and "kdim" in options) and (batched or (padding == "none" and mask != "per head"))
    ]
    if backend == "triton_interpreted":  # a second each
        cases = random.Random(0).sample(cases, 16)
    for same, mask, padding, need_weights, average, batched in cases:
        tensors = _inputs(options, same, batched)
        call = _masks(mask, padding, 5, 5 if same else 7)
        call |= {"need_weights": need_weights, "average_attn_weights": average}
        call["is_causal"] = mask == "causal" and not need_weights
        results = []
        for module in (ours, theirs):
            query = tensors[0].clone().requires_grad_()
            out, weights = module(*((query,) * 3 if same else (query, *tensors[1:])), **call)
            assert (weights is not None) == need_weights
            loss = out.sin().sum() + (weights.sin().sum() if need_weights else 0)
            gradients = torch.autograd.grad(loss, (query, *module.parameters()))
            results.append((out, weights, *gradients))
        for a, b in zip(*results, strict=True):
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [3, 1])
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_strides_as_torch(options, batch, backend, one_thread):
    """Of outputs and weights. Where torch transposes a batch that comes first, ours lies as its shape says: no view fails."""
    theirs, ours = (library.MultiheadAttention(16, 4, **options) for library in (nn, pyckpt.nn))
    for same, batched, need_weights, average in itertools.product((True, False), repeat=4):
        if (same and "kdim" in options) or (not batched and batch == 1):
            continue
        tensors = _inputs(options, same, batched, batch)
        call = {"need_weights": need_weights, "average_attn_weights": average}
        (out, weights), (expected, their_weights) = (m(*tensors, **call) for m in (ours, theirs))
        if options.get("batch_first"):
            expected = torch.empty(expected.shape)
        assert out.stride() == expected.stride()
        if need_weights:
            assert weights.stride() == their_weights.stride()


def test_weights_are_those_that_the_output_is_made_with(backend):
    """Dropout's too."""
    module = pyckpt.nn.MultiheadAttention(16, 2, dropout=0.4, batch_first=True)
    x = torch.randn(2, 6, 16)
    out, weights = module(x, x, x, average_attn_weights=False)
    v = nn.functional.linear(x, module.in_proj_weight[32:], module.in_proj_bias[32:])
    v = v.unflatten(-1, (2, 8)).transpose(1, 2)
    torch.testing.assert_close(module.out_proj((weights @ v).transpose(1, 2).flatten(2)), out)
    assert (weights == 0).any()
    module.eval()
    assert (module(x, x, x)[1] > 0).all()


def test_a_query_that_sees_nothing(backend):
    module = pyckpt.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(1, 3, 16, requires_grad=True)
    hidden = torch.tensor([[False] * 3, [True] * 3, [False] * 3])
    out, weights = module(x, x, x, attn_mask=hidden)
    torch.testing.assert_close(out[0, 1], module.out_proj.bias)
    out.sum().backward()
    assert (weights[0, 1] == 0).all() and x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (RuntimeError, "is_causal", {"is_causal": True}),
        (AssertionError, "embedding dimension", {"query": torch.zeros(2, 3, 8)}),
        (AssertionError, "bool and floating", {"attn_mask": torch.zeros(2, 2, dtype=torch.int64)}),
        (AssertionError, "bool and floating", {"attn_mask": torch.zeros(2, 2, dtype=torch.uint8), "is_causal": True}),
        (AssertionError, "bool and floating", {"key_padding_mask": torch.zeros(3, 2, dtype=torch.int64)}),
        (AssertionError, "key_padd", {"key_padding_mask": torch.zeros(2, 3, dtype=torch.bool)}),
        (AssertionError, "key_padd", {"key_padding_mask": torch.zeros(1, 2, dtype=torch.bool)}),
        (RuntimeError, "2D attn_mask", {"attn_mask": torch.zeros(1, 2)}),
        (RuntimeError, "2D attn_mask", {"attn_mask": torch.zeros(2, 1, dtype=torch.bool)}),
        (RuntimeError, "3D attn_mask", {"attn_mask": torch.zeros(3, 2, 2)}),
        (RuntimeError, "3D attn_mask", {"attn_mask": torch.zeros(6, 1, 4)}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_misuse(need_weights, error, match, call):
    x = torch.randn(2, 3, 16)
    arguments = {"query": x, "key": x, "value": x, "need_weights": need_weights} | call
    for module in (nn.MultiheadAttention(16, 2), pyckpt.nn.MultiheadAttention(16, 2)):
        with pytest.raises(error, match=match):
            module(**arguments)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("need_weights", [True, False])
def test_float32_masks_of_a_16_bit_module_are_not_rounded(need_weights, padding, backend):
    """As in torch, where weights are not asked for (it refuses them otherwise)."""
    module = pyckpt.nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.bfloat16)
    x, mask = torch.randn(2, 5, 16, dtype=torch.bfloat16), torch.randn(5, 5)
    hidden = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padding else None
    out, expected = (
        module(x, x, x, key_padding_mask=hidden, attn_mask=mask + shift, need_weights=need_weights)[0]
        for shift in (1000, 0)
    )
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(out, expected, rtol=eps, atol=eps)


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_out_of_range(need_weights):
    x = torch.randn(2, 3, 16)
    with pytest.raises(ValueError, match="dropout"):
        pyckpt.nn.MultiheadAttention(16, 2, dropout=1.5)(x, x, x, need_weights=need_weights)


@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_keeps_no_weights(batch_first, native, counted, one_thread):
    """x (the caller's), q, k, v and the output, whether weights are returned (and dropped by the caller) or not."""
    x = torch.randn(4, 256, 64) if batch_first else torch.randn(256, 4, 64)
    x.requires_grad_()
    module = pyckpt.nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=batch_first)
    for need_weights in (False, True):
        saved = saved_bytes(lambda need=need_weights: module(x, x, x, need_weights=need)[0])
        assert 4 * x.nbytes <= saved <= 4.2 * x.nbytes, saved / x.nbytes


@pytest.mark.parametrize("layer", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_layers(layer, batch_first):
    model = layer(32, 4, 64, dropout=0.0, batch_first=batch_first)
    original = copy.deepcopy(model)
    pyckpt.convert(model, verify=True)
    assert type(model.self_attn) is pyckpt.nn.MultiheadAttention
    x = torch.randn(3, 3, 32)
    arguments = (x, x.flip(0)) if layer is nn.TransformerDecoderLayer else (x,)
    for training in (True, False):
        a, b = (m.train(training)(*arguments) for m in (model, original))
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(model(*arguments), b)
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(again(*arguments), b)
    pyckpt.revert(model)
    assert type(model.self_attn) is nn.MultiheadAttention


# ---- Hugging Face --------------------------------------------------------------------------------------------


def _hugging_face(name, **options):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    sizes["num_attention_heads"] = 4
    implementation = options.pop("attn_implementation", "sdpa")
    kinds = {
        "bert": ("Bert", "Model", sizes),
        "llama": ("Llama", "ForCausalLM", sizes | {"num_key_value_heads": 2}),
        "gemma2": ("Gemma2", "ForCausalLM", sizes | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}),
        "gpt2": ("GPT2", "LMHeadModel", {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4}),
        "t5": ("T5", "ForConditionalGeneration",
               {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    }  # fmt: skip
    family, head, arguments = kinds[name]
    config = getattr(transformers, f"{family}Config")(**arguments | options)
    return getattr(transformers, f"{family}{head}")._from_config(config, attn_implementation=implementation)


def _tokens(name):
    ids, seen = torch.randint(3, 60, (2, 11)), torch.ones(2, 11, dtype=torch.long)
    seen[1, 7:] = 0
    arguments = {"input_ids": ids, "attention_mask": seen}
    return arguments | ({"decoder_input_ids": ids} if name == "t5" else {}), seen.bool()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("bert", "sdpa"),
        ("bert", "eager"),
        ("llama", "eager"),
        ("gemma2", "eager"),
        ("gpt2", "sdpa"),
        ("t5", "sdpa"),
    ],
)
def test_hugging_face_models(name, before, one_thread):
    """Padding, windows, softcaps, position biases (with their gradient), key heads, returned weights."""
    model = _hugging_face(name, attn_implementation=before).eval()
    arguments, seen = _tokens(name)

    def run(**more):
        model.zero_grad()
        output = model(**arguments, **more)
        output[0][seen].square().sum().backward()
        return output, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected, gradients = run()
    pyckpt.convert(model)
    assert model.config._attn_implementation == "pyckpt"
    assert any(row == f"{before} -> pyckpt" for row in pyckpt.report(model).swapped.values())
    actual, ours = run()
    torch.testing.assert_close(actual[0][seen], expected[0][seen])
    for a, b in zip(ours, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    if name != "t5":
        weights = run(output_attentions=True)[0].attentions
        assert len(weights) == 2 and all(w.shape == (2, 4, 11, 11) for w in weights)
        torch.testing.assert_close(weights[0].sum(-1)[seen[:, None].expand(2, 4, 11)], torch.ones(4 * 18))
    pyckpt.revert(model)
    assert model.config._attn_implementation == before
    assert torch.equal(model(**arguments)[0], expected[0])


def test_models_that_store_no_weights_are_left():
    model = _hugging_face("llama")
    pyckpt.convert(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("ignore")
def test_attention_implementation_by_name(one_thread):
    pytest.importorskip("transformers")
    import pyckpt.integrations.transformers  # noqa: F401

    model = _hugging_face("llama").eval()
    arguments, seen = _tokens("llama")
    expected = model(**arguments)[0]
    model.set_attn_implementation("pyckpt")
    torch.testing.assert_close(model(**arguments)[0][seen], expected[seen])


@pytest.mark.filterwarnings("ignore")
def test_bert_block_with_dropout(native, counted, one_thread):
    """Attention and hidden dropout 0.1: 21 sbh a layer or less, where PyTorch keeps 60 and more."""
    pytest.importorskip("transformers")
    width, batch, length = 128, 4, 256
    unit = width * batch * length * 4 / 2

    def layer_bytes(convert):
        kept = []
        for layers in (1, 3):
            model = _hugging_face(
                "bert", hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
                num_attention_heads=2, max_position_embeddings=length,
            ).train()  # fmt: skip
            if convert:
                pyckpt.convert(model)
            ids = torch.randint(60, (batch, length))
            model(ids)[0].sum().backward()
            kept.append(saved_bytes(lambda model=model, ids=ids: model(ids)[0]))
        return (kept[1] - kept[0]) / 2 / unit

    eager, ours = layer_bytes(False), layer_bytes(True)
    assert eager >= 60, eager
    assert ours <= 21, ours


def test_left_alone_where_attention_has_no_kernels():
    """As on a GPU without Triton: plain PyTorch in place of torch's flash kernels would be no gain."""
    layer = nn.TransformerEncoderLayer(32, 4, 64)
    model = _hugging_face("bert", attn_implementation="eager")
    with backends.use("reference"):
        pyckpt.convert(layer)
        pyckpt.convert(model)
        assert "no kernels on cpu" in pyckpt.report(layer).left["self_attn"]
    assert type(layer.self_attn) is nn.MultiheadAttention
    assert model.config._attn_implementation == "eager"
