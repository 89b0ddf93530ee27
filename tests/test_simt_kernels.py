"""csrc/cuda under the emulator's checks: nothing to report and the same bits in every order of threads, every barrier and every
wait for an asynchronous copy needed."""

import functools
import re
from pathlib import Path

import pytest
import torch

from pyckpt import backends, doctor
from tests import _attention as attention
from tests import simt
from tests.simt.build import KERNELS

ORDERS = [("forward", 0), ("reverse", 0), ("random", 1), ("random", 2)]
NAME = "cuda_checked"
CASES = {case.name: case for case in doctor.CASES if not case.name.startswith("attention")}
# Rows kept in registers by a few threads and by many, by vectors and one by one; rows too long for that; few and many rows.
SHAPES = [(3, 64), (70, 331), (2, 1030), (1, 5000)]
# (batch, heads, kv heads, queries, keys, width, v width): three tiles of keys; queries of two blocks; two heads for one of keys.
ATTENTION = {
    "causal, bottom right": [(1, 1, 1, 20, 131, 64, 64), (1, 2, 1, 20, 67, 128, 128)],
    "dropout": [(1, 2, 1, 34, 70, 64, 64), (1, 1, 1, 131, 36, 128, 128)],
    "no mask": [(1, 2, 1, 5, 3, 64, 64)],
}
# Barriers and waits that may be left out, by the code before them, with the reason why the program stays right.
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
    results = []
    for order in ORDERS[1:3] if shape[1] > 2000 else ORDERS:
        with simt.order(checked, *order):
            results.append(step(CASES[name], shape, dtype))
    assert all(same(result, results[0]) for result in results)
    assert torch.equal(results[0][0], results[0][1]), "the recompute differs"


def attention_step(name, shape, dtype):
    torch.manual_seed(0)
    tensors = attention.make(shape, dtype)
    with backends.use(NAME):
        return attention.ours(*tensors, attention.FEATURES[name](*tensors[:2]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "shape"), [(n, s) for n, shapes in ATTENTION.items() for s in shapes], ids=str
)
def test_attention_in_every_order(checked, name, shape, dtype):
    results = []
    for order in ORDERS:
        with simt.order(checked, *order):
            results.append(attention_step(name, shape, dtype))
    assert all(same(result, results[0]) for result in results)


def barriers():
    """Where csrc/cuda has barriers, and waits for asynchronous copies: {(file, line): the line before}."""
    found = {}
    for path in sorted([*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh")]):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            if (
                re.search(r"\b(__sync(threads|warp)\(|cp_async_wait<\d>\(\))", line.partition("//")[0])
                and path.name != "ptx.h"
            ):
                found[str(path), number] = lines[number - 2].strip()
    return found


def rows():
    names = ("layer_norm", "rms_norm", "softmax", "softmax, dropout")
    return [
        tensor for name in names for shape in SHAPES for tensor in step(CASES[name], shape, torch.float32)
    ]


def tiles():
    calls = [(name, shapes[0]) for name, shapes in ATTENTION.items()]
    return [tensor for name, shape in calls for tensor in attention_step(name, shape, torch.bfloat16)]


def workload_of(file):
    return tiles if "attention" in Path(file).name else rows


@pytest.fixture(scope="module")
def expected(checked):
    """{workload: its results}, and the barriers that they pass."""
    checked.simt.passed()
    results = {workload: workload() for workload in (rows, tiles)}
    return results, checked.simt.passed()


def test_workload_passes_every_barrier(expected):
    assert set(barriers()) <= set(expected[1])
    assert sum("cp_async_wait" in Path(f).read_text().splitlines()[line - 1] for f, line in barriers()) == 3


@pytest.mark.parametrize(("file", "line"), barriers(), ids=lambda v: str(v).rpartition("/")[2])
def test_every_barrier_is_needed(checked, expected, file, line):
    """Without it, the checks object or a result is wrong, in every order of threads."""
    before, workload = barriers()[file, line], workload_of(file)
    if before in NOT_NEEDED:
        pytest.skip(NOT_NEEDED[before])
    for order in ORDERS[:3]:
        checked.simt.leave_out(file, line)
        try:
            with simt.order(checked, *order):
                unnoticed = same(workload(), expected[0][workload])
        except checked.Fault as fault:
            unnoticed = False
            assert re.match(r"\[(race|uninitialised|async)\]", str(fault))
        finally:
            checked.simt.leave_out("", 0)
        assert not unnoticed, f"nothing changes without the barrier after `{before}`"


def test_faults_reach_the_user(checked):
    """A report is a Python exception from the op, and leaves the backend usable."""
    x = torch.randn(4, 64)
    checked.simt.leave_out(*next(place for place in barriers() if workload_of(place[0]) is rows))
    try:
        with (
            backends.use(NAME),
            pytest.raises(checked.Fault, match=r"block \(0,0,0\) thread .* at .*\.cuh?:\d+"),
        ):
            rows()
    finally:
        checked.simt.leave_out("", 0)
    with backends.use(NAME):
        torch.testing.assert_close(CASES["softmax"].call(x), x.softmax(-1))
