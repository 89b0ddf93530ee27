"""What attention keeps for backward, what it needs meanwhile, and what surrounds it: the recompute engine, compilers, threads."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import pyckpt
import pyckpt.functional as F
from pyckpt import recompute
from pyckpt.memory import saved_bytes
from pyckpt.ops import _attention_blocks
from tests import _attention as attention
from tests._attention import FEATURES

SHAPE = (2, 8, 2, 512, 512, 64, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"dropout_p": 0.1}, {"softcap": 5.0}, {"window": 64}, {"attn_mask": True}],
    ids=str,
)
def test_saved_bytes(options, dtype, native, counted, one_thread):
    """q, k, v (which the caller owns here), the output and one float32 a query: with every option."""
    q, k, v, _ = attention.make(SHAPE, dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if options.get("attn_mask"):
        options = {"attn_mask": torch.randn(1, 8, 1, 512).to(dtype).requires_grad_()}
    saved = saved_bytes(lambda: F.attention(*leaves, enable_gqa=True, **options))
    contract = q.nbytes + 4 * q.shape[0] * q.shape[1] * q.shape[2]
    assert contract <= saved + 1024 and saved <= contract + 16384, (saved, contract)


@pytest.mark.slow
def test_long_sequences_need_little_memory(native, one_thread):
    """s = 8192, 4 heads, width 64: the scores alone would be 1 GiB. The tensors that a step leaves behind are not counted."""
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc here to tell the peak")
    script = (
        "import re, torch, pyckpt.functional as F\n"
        "torch.set_num_threads(1)\n"
        "def peak():\n"
        "    return 1024 * int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])\n"
        "step = lambda q, k, v, g: torch.autograd.grad(F.attention(q, k, v), (q, k, v), g)\n"
        "make = lambda s: [torch.randn(1, 4, s, 64).requires_grad_() for _ in range(4)]\n"
        "step(*make(256))\n"  # libraries loaded
        "tensors = make(8192)\n"
        "before = peak()\n"
        "kept = step(*tensors)\n"
        "print(peak() - before - sum(g.nbytes for g in kept))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600
    )
    assert 0 < int(done.stdout) < 100e6, done.stdout


@pytest.mark.parametrize(
    "name", ["no mask", "causal, bottom right", "bias (1, heads, q, k), gradient", "all together"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_inputs_same_bits(name, dtype, backend):
    """Call after call; on the CPU with any number of threads."""
    interpreted = backend == "triton_interpreted"
    shape = (1, 2, 1, 34, 40, 16, 16) if interpreted else (2, 4, 2, 130, 150, 32, 32)
    tensors = attention.make(shape, dtype)
    feature = FEATURES[name](*tensors[:2])
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 2)[2 * interpreted :]:
            torch.set_num_threads(count)
            results.append(attention.ours(*tensors, feature))
    finally:
        torch.set_num_threads(threads)
    # Two of two threads but on the CPU, where their number does not matter; nor does it to the interpreter.
    kept = results if backend == "cpu" or interpreted else [results[1], results[3]]
    for other in kept[1:]:
        for a, b in zip(kept[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", FEATURES)
def test_chunks_side_by_side(name, native, monkeypatch):
    """Many chunks on several threads give the bits of one thread, gradients of shared biases too; in inference mode as well."""
    monkeypatch.setattr(_attention_blocks, "SCORE_BYTES", 2048)
    monkeypatch.setattr(_attention_blocks, "SIDE_BY_SIDE", 0)
    tensors = attention.make((3, 4, 2, 33, 31, 16, 16), torch.float32)
    feature = FEATURES[name](*tensors[:2])
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(attention.ours(*tensors, feature))
            with torch.inference_mode():
                torch.manual_seed(attention.SEED)
                out = F.attention(*tensors[:3], feature.mask, enable_gqa=True, **feature.options)
            assert torch.equal(out, results[-1][0])
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_an_error_on_a_thread_is_raised(native):
    def fail():
        raise KeyError("from a thread")

    with pytest.raises(KeyError, match="from a thread"):
        native.in_parallel(fail, 3)


def test_inputs_and_gradients_are_left_alone(backend):
    q, k, v, grad = attention.make((2, 4, 2, 6, 7, 8, 8), torch.float32)
    for name in FEATURES:
        feature = FEATURES[name](q, k)
        given = [q, k, v, grad, *([] if feature.mask is None else [feature.mask.detach()])]
        before = [x.clone() for x in given]
        attention.ours(q, k, v, grad, feature)
        for a, b in zip(before, given, strict=True):
            assert torch.equal(a, b)


class Attention(nn.Module):
    """Of a Qwen 3: norms on queries and keys, rotary embedding, fewer key heads, written out for all heads or not."""

    def __init__(self, width=128, heads=8, kv_heads=2, length=128, *, repeat=False, norm=True):
        super().__init__()
        self.heads, self.kv_heads, self.head, self.repeat = heads, kv_heads, width // heads, repeat
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.q_norm, self.k_norm = (pyckpt.nn.RMSNorm(self.head) if norm else nn.Identity() for _ in range(2))
        angle = torch.arange(length)[:, None] * 10000 ** -(torch.arange(0, self.head, 2) / self.head)
        self.cos, self.sin = angle.repeat(1, 2).cos(), angle.repeat(1, 2).sin()

    def rotary(self, x):
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            p(x).view(batch, length, -1, self.head).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.rotary(self.q_norm(q)), self.rotary(self.k_norm(k))
        if self.repeat:
            shape = (batch, self.kv_heads, self.heads // self.kv_heads, length, self.head)
            k, v = (t[:, :, None].expand(shape).reshape(batch, self.heads, length, self.head) for t in (k, v))
        out = F.attention(q, k, v, is_causal=True, enable_gqa=not self.repeat)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def _gradients(module, x, region):
    module.zero_grad()
    with region:
        y = module(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_engine_sees_through(norm, repeat, native, counted, one_thread):
    """Units of x, which the caller owns: q 1, k and v 1/4 each, output 1. With norms on q and k it is the norms' inputs that are
    kept, and normalised, rotated and repeated queries and keys are rebuilt from those."""
    module, x = Attention(repeat=repeat, norm=norm), torch.randn(8, 128, 128, requires_grad=True)

    def inside():
        with recompute():
            return module(x)

    inside().sum().backward()  # rules checked
    plain, recomputed = (saved_bytes(f) / x.nbytes for f in (lambda: module(x), inside))
    expected = {
        (False, False): (2.5, 2.5),
        (True, False): (2.5 + 1.25, 2.5),
        (False, True): (4.0, 4.0),  # nobody keeps what the repeated ones were made from
        (True, True): (4.0 + 1.25, 1 + 0.25 + 1 + 1),
    }[norm, repeat]
    # and logsumexp, statistics: a float for each 16 numbers
    assert expected[0] <= plain <= expected[0] + 0.2, plain
    assert expected[1] <= recomputed <= expected[1] + 0.2, recomputed
    for a, b in zip(
        _gradients(module, x, contextlib.nullcontext()), _gradients(module, x, recompute()), strict=True
    ):
        assert torch.equal(a, b)


def test_in_a_region(backend):
    """Where kernels write through pointers no version tells that the output is new: the node that saves it has not ended."""
    q, k, v, grad = attention.make((1, 2, 2, 32, 32, 16, 16), torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    plain = torch.autograd.grad(F.attention(*leaves), leaves, grad)
    with recompute():
        out = F.attention(*leaves)
    for a, b in zip(torch.autograd.grad(out, leaves, grad), plain, strict=True):
        assert torch.equal(a, b)


def test_output_is_kept_once(native, counted, one_thread):
    """The output projection saves the merged heads: a view of what the attention keeps."""
    q, k, v, _ = attention.make((2, 8, 8, 128, 128, 32, 32), torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    weight = torch.randn(256, 256, requires_grad=True)
    alone = saved_bytes(lambda: F.attention(*leaves))
    projected = saved_bytes(lambda: F.attention(*leaves).transpose(1, 2).flatten(2) @ weight)
    assert projected - alone <= 16384


@pytest.mark.parametrize("name", ["no mask", "boolean mask", "packed sequences", "all together"])
def test_compiles_to_one_opaque_op(name, backend):
    """Without a graph break, with the same masks of dropout; a compiled model keeps no probabilities either."""
    q, k, v, grad = attention.make((2, 4, 2, 9, 21, 8, 8), torch.float32)
    feature = FEATURES[name](q, k)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q, k, v, mask):
        return F.attention(q, k, v, mask, enable_gqa=True, **feature.options)

    results = []
    for function in (call, call._torchdynamo_orig_callable):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        torch.manual_seed(1)
        mask = None if feature.mask is None else feature.mask.detach()
        out = function(*leaves, mask)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_exports_as_plain_operations():
    class Module(nn.Module):
        def forward(self, q, k, v):
            return F.attention(q, k, v, is_causal=True)

    q, k, v, _ = attention.make((2, 2, 2, 5, 5, 8, 8), torch.float32)
    program = torch.export.export(Module(), (q, k, v))
    assert not any("pyckpt" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(q, k, v), F.attention(q, k, v, is_causal=True))


def test_function_transforms(backend):
    q, k, v, grad = attention.make((3, 2, 2, 5, 5, 8, 8), torch.float64)

    def loss(q, k, v, g):
        return (F.attention(q, k, v, is_causal=True, softcap=2.0) * g).sum()

    expected = torch.func.grad(loss, (0, 1, 2))(q, k, v, grad)
    each = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(q, k, v, grad)
    feature = attention.Feature({"is_causal": True, "softcap": 2.0})
    _, *ours = attention.ours(q, k, v, grad, feature)
    for a, b, c in zip(expected, each, ours, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c)
    _, tangent = torch.func.jvp(lambda q: F.attention(q, k, v), (q,), (torch.ones_like(q),))
    assert tangent.shape == q.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_as_torch(dtype, backend):
    q, k, v, _ = attention.make((2, 2, 2, 5, 5, 8, 8), torch.float32)
    bias = torch.randn(5, 5)
    with torch.autocast(q.device.type, dtype):
        ours = F.attention(q, k, v, bias)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)
    assert ours.dtype == theirs.dtype == dtype
    assert torch.equal(ours, F.attention(*(x.to(dtype) for x in (q, k, v, bias))))


def test_nothing_is_saved_without_gradients(backend):
    q, k, v, _ = attention.make((2, 2, 2, 5, 5, 8, 8), torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x), torch.no_grad():
        out = F.attention(q.requires_grad_(), k, v, dropout_p=0.1)
    assert not saved and not out.requires_grad


def test_eval_between_forward_and_backward_and_several_graphs(backend):
    """Backwards in another order than forwards, each by what its own forward kept."""
    q, k, v, grad = attention.make((1, 2, 2, 6, 6, 8, 8), torch.float32)
    leaves = [[x.clone().requires_grad_() for x in (q, k, v)] for _ in range(3)]
    outputs = [F.attention(*x, dropout_p=0.1 * i) for i, x in enumerate(leaves)]
    late = [torch.autograd.grad(outputs[i], leaves[i], grad) for i in (2, 0, 1)]
    torch.testing.assert_close(late[1], torch.autograd.grad(F.attention(*leaves[0]), leaves[0], grad))
