"""csrc/cuda under the emulator's checks: nothing to report and the same bits in every order of threads, every barrier needed."""

import functools
import re

import pytest
import torch

from pyckpt import backends, doctor
from tests import simt
from tests.simt.build import KERNELS

ORDERS = [("forward", 0), ("reverse", 0), ("random", 1), ("random", 2)]
NAME = "cuda_checked"
CASES = {case.name: case for case in doctor.CASES}
# Rows kept in registers by a few threads and by many, by vectors and one by one; rows too long for that; few and many rows.
SHAPES = [(3, 64), (70, 331), (2, 1030), (1, 5000)]
# Barriers that may be left out, by the code before them, with the reason why the program stays right.
NOT_NEEDED = {}


@functools.cache
def installed():
    return simt.install(NAME, "check")


@pytest.fixture(scope="module")
def checked():
    try:
        return installed()
    except simt.Missing as reason:
        pytest.skip(str(reason))


def step(case, shape, dtype):
    """Output, gradients, and the output as rebuilt from what is kept."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(dtype)]
    tensors += [torch.randn(shape[-1], generator=generator).to(dtype) for _ in range(case.parameters)]
    grad = torch.randn(shape, generator=generator).to(dtype)
    (y, *gradients), again = doctor._run(case, NAME, tensors, grad)
    return [y, again, *gradients]


def same(these, those):
    return all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_order_gives_the_same_bits(checked, name, shape, dtype):
    if not CASES[name].served_on(NAME):
        pytest.skip(f"no CUDA kernel for {name} yet")
    results = []
    for order in ORDERS[1:3] if shape[1] > 2000 else ORDERS:
        with simt.order(checked, *order):
            results.append(step(CASES[name], shape, dtype))
    assert all(same(result, results[0]) for result in results)
    assert torch.equal(results[0][0], results[0][1]), "the recompute differs"


def barriers():
    """Where csrc/cuda has barriers: {(file, line): the line before}."""
    found = {}
    for path in sorted([*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh")]):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            if re.search(r"\b__sync(threads|warp)\(", line.partition("//")[0]):
                found[str(path), number] = lines[number - 2].strip()
    return found


def workload():
    names = ("layer_norm", "rms_norm", "softmax", "softmax, dropout")
    return [
        tensor for name in names for shape in SHAPES for tensor in step(CASES[name], shape, torch.float32)
    ]


@pytest.fixture(scope="module")
def expected(checked):
    checked.simt.passed()
    results = workload()
    return results, checked.simt.passed()


def test_workload_passes_every_barrier(expected):
    assert set(barriers()) <= set(expected[1])


@pytest.mark.parametrize(("file", "line"), barriers(), ids=lambda v: str(v).rpartition("/")[2])
def test_every_barrier_is_needed(checked, expected, file, line):
    """Without it, the checks object or a result is wrong, in every order of threads."""
    before = barriers()[file, line]
    if before in NOT_NEEDED:
        pytest.skip(NOT_NEEDED[before])
    for order in ORDERS[:3]:
        checked.simt.leave_out(file, line)
        try:
            with simt.order(checked, *order):
                unnoticed = same(workload(), expected[0])
        except checked.Fault as fault:
            unnoticed = False
            assert re.match(r"\[(race|uninitialised)\]", str(fault))
        finally:
            checked.simt.leave_out("", 0)
        assert not unnoticed, f"nothing changes without the barrier after `{before}`"


def test_faults_reach_the_user(checked):
    """A report is a Python exception from the op, and leaves the backend usable."""
    x = torch.randn(4, 64)
    checked.simt.leave_out(*next(iter(barriers())))
    try:
        with (
            backends.use(NAME),
            pytest.raises(checked.Fault, match=r"block \(0,0,0\) thread .* at .*\.cuh?:\d+"),
        ):
            workload()
    finally:
        checked.simt.leave_out("", 0)
    with backends.use(NAME):
        torch.testing.assert_close(CASES["softmax"].call(x), x.softmax(-1))
