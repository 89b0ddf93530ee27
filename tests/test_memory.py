"""The accounting must see what is really alive, and must refuse to answer where it cannot."""

import ctypes
import gc
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

import pyckpt
from pyckpt import memory

N = 1 << 20  # elements: 4 MiB in fp32, far above the tolerance
SIZE = 4 * N

try:
    memory.allocated_bytes()
except RuntimeError as error:
    pytest.skip(f"no memory counter here: {error}", allow_module_level=True)


@pytest.fixture
def x():
    return torch.randn(1024, 1024, requires_grad=True)


@pytest.fixture
def fresh_check():
    """The self check runs again, in the test and after it."""
    memory._check_counter.cache_clear()
    memory._mallinfo2.cache_clear()
    yield
    memory._check_counter.cache_clear()
    memory._mallinfo2.cache_clear()


def test_allocated_bytes_follows_a_tensor():
    before = memory.allocated_bytes()
    tensor = torch.empty(32 << 20, dtype=torch.uint8)
    assert abs(memory.allocated_bytes() - before - tensor.nbytes) < 64 << 10
    del tensor
    assert abs(memory.allocated_bytes() - before) < 64 << 10


def test_blind_counter_is_refused(monkeypatch, fresh_check):
    monkeypatch.setattr(memory, "_count", lambda device: 123_456)
    with pytest.raises(RuntimeError, match=r"cannot be trusted.*67,108,864.*LD_PRELOAD"):
        memory.saved_bytes(lambda: None)


def test_missing_counter_is_explained(monkeypatch, fresh_check):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    with pytest.raises(RuntimeError, match=r"no mallinfo2.*glibc 2\.33"):
        memory.allocated_bytes()


def test_unsupported_device():
    with pytest.raises(RuntimeError, match=r"'meta'.*only cpu and cuda"):
        memory.allocated_bytes("meta")
    with pytest.raises(RuntimeError, match=r"'meta'.*only cpu and cuda"):
        memory.peak_bytes(lambda: None, device="meta")


FOREIGN_ALLOCATOR = r"""
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/mman.h>
/* Torch asks for aligned blocks; those of a mebibyte or more come from mmap, behind malloc's back. */
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);
static char *low, *high;
int posix_memalign(void **out, size_t alignment, size_t size) {
    if (size < 1 << 20) { *out = __libc_memalign(alignment, size); return *out ? 0 : 12; }
    char *block = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) return 12;
    if (!low || block < low) low = block;
    if (block + size > high) high = block + size;
    *out = block;
    return 0;
}
void free(void *block) {
    if (low && (char *)block >= low && (char *)block < high) return;
    __libc_free(block);
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_preloaded_allocator_is_noticed(tmp_path):
    source, library = tmp_path / "foreign.c", tmp_path / "foreign.so"
    source.write_text(FOREIGN_ALLOCATOR)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    code = "from pyckpt import memory\ntry: memory.allocated_bytes()\nexcept RuntimeError as e: print(e)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"LD_PRELOAD": str(library), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the memory counter of cpu cannot be trusted")


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        pytest.param(F.gelu, SIZE, id="input kept, output not"),
        pytest.param(lambda x: F.softmax(x, -1), SIZE, id="output kept, input not"),
        pytest.param(lambda x: x + 1.0, 0, id="nothing"),
        pytest.param(lambda x: F.gelu(x[:1]), SIZE, id="a view keeps its storage"),
        pytest.param(lambda x: F.gelu(x) + F.silu(x), SIZE, id="shared storage once"),
        pytest.param(lambda x: x.sin().sin(), 2 * SIZE, id="two nodes"),
        pytest.param(lambda x: {"loss": [F.gelu(x).sum()]}, SIZE, id="nested output"),
    ],
)
def test_saved_bytes(x, op, expected):
    memory.assert_saved_bytes(lambda: op(x.clone()), expected)


def test_saved_bytes_of_what_was_alive_before(x):
    memory.assert_saved_bytes(lambda: F.gelu(x), 0)


def test_saved_bytes_of_outputs_in_a_dataclass(x):
    @dataclass
    class Output:
        hidden: torch.Tensor
        label: str = "none"

    memory.assert_saved_bytes(lambda: Output(F.gelu(x.clone())), SIZE)


class Hoard(torch.autograd.Function):
    """Keeps a tensor where no saved-tensor hook can see it."""

    @staticmethod
    def forward(ctx, x):
        ctx.hidden = x * 2
        return x + 1

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_saved_bytes_sees_what_hooks_do_not(x):
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        Hoard.apply(x.clone())
    assert packed == []
    memory.assert_saved_bytes(lambda: Hoard.apply(x.clone()), SIZE)


@pytest.mark.parametrize("wrong", [0, SIZE - (64 << 10), 2 * SIZE])
def test_assert_saved_bytes_fails(x, wrong):
    with pytest.raises(AssertionError, match=rf"keeps 4,19\d,\d+ bytes for backward, expected {wrong:,} "):
        memory.assert_saved_bytes(lambda: F.gelu(x.clone()), wrong)


def test_assert_saved_bytes_tolerance(x):
    memory.assert_saved_bytes(lambda: F.gelu(x.clone()), SIZE - 4096, tolerance=8192)
    with pytest.raises(AssertionError):
        memory.assert_saved_bytes(lambda: F.gelu(x.clone()), SIZE - 65536, tolerance=8192)


def test_output_without_graph_is_refused(x):
    with pytest.raises(RuntimeError, match="no tensor with a gradient graph"):
        memory.saved_bytes(lambda: F.gelu(x.detach()))


def test_pyckpt_dropout_keeps_no_mask(x):
    memory.assert_saved_bytes(lambda: F.dropout(x.clone(), 0.5), SIZE)  # torch: the mask, in x's dtype
    memory.assert_saved_bytes(lambda: pyckpt.functional.dropout(x.clone(), 0.5), 0)


@pytest.mark.parametrize("enabled", [True, False])
def test_collector_is_left_as_it_was(x, enabled):
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        memory.saved_bytes(lambda: F.gelu(x.clone()))
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_peak_bytes_is_exact():
    def fn():
        a = torch.empty(1 << 20, dtype=torch.uint8)
        b = torch.empty(2 << 20, dtype=torch.uint8)
        del a
        c = torch.empty(1 << 19, dtype=torch.uint8)  # the peak, 3 MiB, is over
        return b, c

    assert memory.peak_bytes(fn) == 3 << 20


def test_peak_bytes_of_a_step(x):
    def step():
        torch.autograd.grad(F.gelu(x.clone()).sum(), x)

    # Input, output (or gradient of the output, expanded from a scalar) and gradient of the input.
    assert 2 * SIZE < memory.peak_bytes(step) <= 3 * SIZE + 1024


def test_peak_bytes_is_quiet():
    code = "import torch; from pyckpt import memory; [memory.peak_bytes(lambda: torch.ones(999)) for _ in range(2)]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "profiler" not in done.stdout + done.stderr


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.usefixtures("counted")
def test_copies_of_weights_under_autocast(differentiable):
    """Autograd keeps one for the input's gradient; else autocast alone does, which a measurement inside it shall not see."""
    weight = torch.randn(1024, 1024, requires_grad=True)
    x = torch.randn(8, 1024, dtype=torch.bfloat16, requires_grad=differentiable)

    def autocast():
        return torch.autocast("cpu", torch.bfloat16)

    def alone():
        with autocast():
            return F.linear(x, weight)

    copy = 2 * weight.numel()
    expected = copy if differentiable else 0
    memory.assert_saved_bytes(alone, expected)
    with autocast():
        memory.assert_saved_bytes(lambda: F.linear(x, weight), expected)
        memory.assert_saved_bytes(alone, expected)
        # The product takes scratch memory of its own where the processor has instructions for bfloat16.
        cast = weight.detach().bfloat16()
        product = memory.peak_bytes(lambda: F.linear(x, cast))
        assert copy <= memory.peak_bytes(lambda: F.linear(x, weight)) < copy + product + (64 << 10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_counters():
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    memory.assert_saved_bytes(lambda: F.gelu(x.clone()), SIZE, device="cuda", tolerance=512)
    assert (
        memory.peak_bytes(lambda: torch.empty(1 << 20, dtype=torch.uint8, device="cuda"), device="cuda")
        == 1 << 20
    )
