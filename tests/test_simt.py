"""The emulator that runs csrc/cuda on the CPU: its samples are right in every order, and each of its detectors detects."""

import re
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests import simt
from tests.simt.build import build, cuda_headers

SAMPLES = Path(simt.__file__).parent / "samples"
ORDERS = [("forward", 0), ("reverse", 0), ("random", 1), ("random", 2)]
THREADS = 64  # of the bugs' kernels


def compiled(flavour, **options):
    kernels, host = sorted(SAMPLES.glob("*.cu")), [SAMPLES / "bindings.cpp"]
    try:
        return simt.load_file(
            build(flavour, kernels=kernels, host=host, **{"name": "pyckpt_samples", **options})
        )
    except simt.Missing as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def check():
    return compiled("check")


@pytest.fixture(scope="module", params=simt.FLAVOURS)
def samples(request):
    return compiled(request.param)


def layer_norm(module, x, threads=128):
    y = torch.empty_like(x)
    with simt.tensors(module, inputs=[x], outputs=[y]):
        module.layer_norm(x.data_ptr(), y.data_ptr(), *x.shape, 1e-5, threads)
    return y


def column_sums(module, x):
    sums = torch.empty(x.shape[1])
    with simt.tensors(module, inputs=[x], outputs=[sums]):
        module.column_sums(x.data_ptr(), sums.data_ptr(), *x.shape)
    return sums


def matmul(module, a, b):
    c = torch.empty(len(a), len(b))
    with simt.tensors(module, inputs=[a, b], outputs=[c]):
        module.matmul(
            a.dtype == torch.bfloat16, a.data_ptr(), b.data_ptr(), c.data_ptr(), len(a), len(b), a.shape[1]
        )
    return c


def test_reductions(samples):
    for rows, columns in ((5, 1000), (1, 1), (3, 129)):
        x = torch.randn(rows, columns)
        exact = F.layer_norm(x.double(), (columns,)).float()
        results = []
        for order in ORDERS:
            with simt.order(samples, *order):
                results.append((layer_norm(samples, x), column_sums(samples, x)))
        for y, sums in results:
            assert torch.equal(y, results[0][0]) and torch.equal(sums, results[0][1])
        torch.testing.assert_close(results[0][0], exact, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(results[0][1], x.double().sum(0).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tensor_cores(samples, dtype):
    """Products of small integers are exact, so that a wrong lane or half of a fragment shows."""
    for m, n, k in ((32, 16, 16), (50, 41, 64), (1, 1, 16)):
        a, b = (torch.randint(-8, 9, (rows, k)).to(dtype) for rows in (m, n))
        for order in ORDERS:
            with simt.order(samples, *order):
                assert torch.equal(matmul(samples, a, b), a.float() @ b.float().T)


def bug(module, name, planted, order=("forward", 0)):
    x, y = torch.randn(THREADS), torch.empty(THREADS)
    with simt.order(module, *order):
        if name == "race_despite_atomic":
            y.zero_()
            with simt.tensors(module, inputs=[x], updated=[y]):
                module.run(name, planted, x.data_ptr(), y.data_ptr(), THREADS)
        else:
            with simt.tensors(module, inputs=[x], outputs=[y]):
                module.run(name, planted, x.data_ptr(), y.data_ptr(), THREADS)
    return x, y


# What a report of the checking build begins with, in some order of threads, and a line of the kernel's source that it names.
# A shared array read too early has no value yet, if its writer runs later.
BUGS = {
    "missing_barrier": ("race", "values[n - 1 - threadIdx.x]"),
    "missing_barrier_before_reuse": ("race", "values[threadIdx.x] = x[threadIdx.x]"),
    "missing_warp_barrier": ("race", "values[threadIdx.x ^ 1]"),
    "divergent_barrier": ("divergence", "__syncthreads()"),
    "barrier_after_some_ended": ("divergence", "__syncthreads()"),
    "divergent_shuffle": ("divergence", "__shfl_xor_sync"),
    "shuffle_from_outside": ("divergence", "__shfl_xor_sync"),
    "global_past_end": ("out of bounds", "x[n]"),
    "global_before_start": ("out of bounds", "y[i] = x[threadIdx.x]"),
    "static_shared_past_end": ("out of bounds", "sum += values[i]"),
    "dynamic_shared_past_end": ("out of bounds", "sum += values[i]"),
    "takes_more_than_launched": ("out of bounds", "shared.take<float>"),
    "array_index": ("out of bounds", "values[i] = x[threadIdx.x]"),
    "uninitialised_shared": ("uninitialised", "y[threadIdx.x] = values[threadIdx.x]"),
    "uninitialised_global": ("uninitialised", "y[threadIdx.x] += x[threadIdx.x]"),
    "misaligned_vector": ("misaligned", "const float4 v"),
    "deadlock": ("deadlock", "__sync"),
    "race_between_blocks": ("race", "y[threadIdx.x] = x[threadIdx.x]"),
    "race_despite_atomic": ("race", "y[3] = y[0] + y[1]"),
    "writes_to_input": ("read-only", "const_cast<float*>(x)[threadIdx.x]"),
    "asynchronous_copy": ("async", "y[threadIdx.x] = values[threadIdx.x]"),
    "misaligned_ldmatrix": ("misaligned", "ldmatrix_x4"),
    "index_overflow": ("overflow", "stride * 4"),
    "others_local_memory": ("local", "*address[0]"),
    "traps": ("trap", "__trap()"),
}


def named_lines(text):
    """The source lines that a report names."""
    places = re.findall(r"(\S+\.(?:cu|h)):(\d+)", text)
    return [Path(file).read_text().splitlines()[int(line) - 1] for file, line in places]


@pytest.mark.parametrize("name", BUGS)
def test_detects(check, name):
    kind, source = BUGS[name]
    reports = []
    for order in ORDERS:
        with pytest.raises(check.Fault) as caught:
            bug(check, name, True, order)
        reports.append(str(caught.value))
    text = "\n".join(reports)
    assert f"[{kind}] block (" in text
    assert any(source in line for line in named_lines(text)), text


def test_every_bug_has_a_test(check):
    assert list(BUGS) == check.names


@pytest.mark.parametrize("name", BUGS)
def test_without_the_bug_nothing_is_reported(check, name):
    for order in ORDERS:
        x, y = bug(check, name, False, order)
        if name in ("misaligned_ldmatrix", "index_overflow") or list(BUGS).index(name) >= list(BUGS).index(
            "global_past_end"
        ):
            expected = x
        else:
            expected = x.flip(0)
        if name == "race_despite_atomic":
            expected = torch.zeros(THREADS)
            expected[:4] = torch.stack([x[-1], x[-2], torch.tensor(2.0), x[-1] + x[-2]])
        assert torch.equal(y, expected)


FAST = [
    "divergent_barrier",
    "barrier_after_some_ended",
    "divergent_shuffle",
    "shuffle_from_outside",
    "deadlock",
    "traps",
]


@pytest.mark.parametrize("name", FAST)
def test_fast_build_detects_what_needs_no_shadow_memory(name):
    fast = compiled("fast")
    with pytest.raises(fast.Fault, match=re.escape(BUGS[name][0])):
        bug(fast, name, True)


@pytest.mark.parametrize("name", ["missing_barrier", "missing_warp_barrier"])
def test_orders_of_threads_show_missing_barriers(name):
    """Without any checks: in some order the result is wrong. What nobody has written is NaN."""
    fast = compiled("fast")
    assert not all(torch.equal(y, x.flip(0)) for x, y in (bug(fast, name, True, order) for order in ORDERS))


def test_memory_that_nobody_named(check):
    x, y = torch.randn(4, 32), torch.empty(4, 32)
    with pytest.raises(check.Fault, match=r"\[out of bounds\].*reads 4 bytes outside of every tensor"):
        check.layer_norm(x.data_ptr(), y.data_ptr(), 4, 32, 1e-5, 32)
    # Rows of a view: what lies between belongs to nobody.
    with (
        simt.tensors(check, inputs=[x[:3]], outputs=[y]),
        pytest.raises(check.Fault, match=r"\[out of bounds\].*input 0\[384\] of 384"),
    ):
        check.layer_norm(x.data_ptr(), y.data_ptr(), 4, 32, 1e-5, 32)
    assert torch.equal(layer_norm(check, x, 32), layer_norm(check, x, 32))  # a fault leaves nothing behind


REFUSED = {
    "threads": (RuntimeError, "cudaErrorInvalidConfiguration"),
    "no threads": (RuntimeError, "cudaErrorInvalidConfiguration"),
    "shared memory": (RuntimeError, "more shared memory than a block can have"),
    "device": (RuntimeError, "cudaErrorInvalidDevice"),
    "grid": (ValueError, "a CUDA grid cannot have 2147483648 x 1 x 1 blocks"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_launches_that_cuda_refuses(samples, how):
    kind, message = REFUSED[how]
    with pytest.raises(kind, match=message):
        samples.refused(how)
    samples.refused("empty grid")
    samples.refused("nothing is wrong")


def test_launches_from_several_threads(samples):
    """One at a time, each with its own shared arrays."""
    if samples.simt.checks:
        pytest.skip("which memory may be used is known for the module, not for each thread")
    x = torch.randn(16, 500)
    expected, results = layer_norm(samples, x), []
    workers = [
        threading.Thread(target=lambda: results.extend(layer_norm(samples, x) for _ in range(5)))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 20 and all(torch.equal(y, expected) for y in results)


def test_checks_on_another_thread(check):
    x, caught = torch.randn(4, 64), []

    def work():
        layer_norm(check, x)
        try:
            bug(check, "static_shared_past_end", True)
        except check.Fault as fault:
            caught.append(str(fault))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert "out of bounds" in caught[0] and "zeros[256] of 256" in caught[0]


def test_addresses_beyond_32_bits(check):
    """Tensors of more than 2^31 elements are seen whole; only touched pages cost memory."""
    rows, columns = 3, 64
    x = torch.empty((rows - 1) * 2**30 + columns).as_strided((rows, columns), (2**30, 1))
    for row in x:
        row.normal_()
    y = torch.empty(rows, columns)
    with simt.tensors(check, inputs=[x], outputs=[y]):
        for i in range(rows):
            check.layer_norm(x[i].data_ptr(), y[i].data_ptr(), 1, columns, 1e-5, 32)
    torch.testing.assert_close(y, F.layer_norm(x, (columns,)), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_contexts_of_any_processor():
    """The switch of stacks by the C library, for processors without one of their own here."""
    module = compiled("fast", name="pyckpt_ucontext", defines="-DSIMT_UCONTEXT")
    x = torch.randn(5, 200)
    assert torch.equal(layer_norm(module, x), layer_norm(compiled("fast"), x))
    for name in FAST:
        with pytest.raises(module.Fault, match=re.escape(BUGS[name][0])):
            bug(module, name, True)


def test_missing_headers_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(sys.modules[build.__module__], "TOOLKIT", tmp_path)
    with pytest.raises(simt.Missing, match=r"no CUDA headers: set CUDA_HOME.*nvidia-cuda-crt"):
        cuda_headers()


def test_a_compile_error_is_shown(tmp_path):
    compiled("fast")
    broken = tmp_path / "broken.cu"
    broken.write_text('#include "simt.h"\n__global__ void k() { __shared__ float x[4]; }\n')
    with pytest.raises(RuntimeError, match=r"SIMT_SHARED or SIMT_DYNAMIC_SHARED(.|\n)*broken\.cu:2"):
        build("fast", name="pyckpt_broken", kernels=[broken], host=[SAMPLES / "bindings.cpp"])


def test_kernels_of_the_package_build():
    """The command of the Makefile and of CI."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simt", "fast"],
        cwd=SAMPLES.parents[2],
        capture_output=True,
        text=True,
        timeout=900,
    )
    if "Missing" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert not done.returncode, done.stderr
    assert Path(done.stdout.split()[-1]).exists()
