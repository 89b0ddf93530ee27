"""Fixtures: the backends of this machine, the instruction sets of its processor, reproducible random numbers."""

import fcntl
import functools
import gc
import os
import platform
from pathlib import Path

# Threads that wait shall sleep, not spin: beside anything else that runs, spinning costs several times the work. Before torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

from pyckpt import _checks, backends
from pyckpt.memory import allocated_bytes
from pyckpt.ops._registry import Unserved
from tests import _interpreter, simt

BACKENDS = ["reference", "cpu", "cuda", "triton", "cuda_emulated", "triton_interpreted"]
ISAS = ["x86-64-v2", "x86-64-v3", "x86-64-v4"] if platform.machine() in ("x86_64", "AMD64") else ["baseline"]

_interpreter.register()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A test marked `alone` waits until the other processes of pytest-xdist have ended theirs, and they wait for it.

    Two locks, on files that are there: whoever waits for a test to end holds the first, so that none begins.
    """
    alone = item.get_closest_marker("alone") is not None
    with open(Path(__file__).with_name("__init__.py")) as begin, open(__file__) as work:
        fcntl.flock(begin, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(work, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(begin, fcntl.LOCK_UN)
        return (yield)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _few_objects():
    """What measures memory collects garbage, often: it shall go over the test's own objects, not over all that stands."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def counted():
    """Skips where the allocator cannot be counted, as under AddressSanitizer."""
    try:
        allocated_bytes("cpu")
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture
def one_thread():
    """Threads that wait for each other crawl on a machine that is busy with other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def unlearned(monkeypatch):
    """The recompute engine as in a new process: nothing checked yet, no warning given."""
    monkeypatch.setattr(_checks, "uses", {})
    monkeypatch.setattr(_checks, "warned", set())


@functools.cache
def _install_emulated():
    """csrc/cuda as a backend for CPU tensors, built on first use; PYCKPT_TEST_SIMT=check: watching every access."""
    try:
        simt.install("cuda_emulated", os.environ.get("PYCKPT_TEST_SIMT", "fast"))
    except simt.Missing as missing:
        backends.register("cuda_emulated", "cpu", f"cannot be built here: {missing}")


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Runs the test on each backend, whose device is then where torch makes tensors; skips with the reason where one is not
    available."""
    if request.param == "cuda_emulated":
        _install_emulated()
    state = backends.available()[request.param]
    if not state.available:
        pytest.skip(f"backend {request.param}: {state.unavailable}")
    with backends.use(request.param):
        if state.device_type in (None, "cpu"):
            yield request.param
        else:
            with torch.device(state.device_type):
                yield request.param


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Kernels that are made for some calls only: a test that asks them for another is skipped, with what is in the way."""
    try:
        return (yield)
    except Exception as error:
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, Unserved):  # opcheck raises its own error from it
            reason = reason.__cause__
        if reason is None:
            raise
        pytest.skip(str(reason))


@pytest.fixture
def native():
    """The extension; skips where the package was built without one."""
    if backends.native is None:
        pytest.skip(backends.available()["cpu"].unavailable)
    return backends.native


@pytest.fixture(params=ISAS)
def isa(request, native):
    """Runs the test on the CPU backend with each instruction set that this machine has."""
    if request.param not in native.supported_isas():
        pytest.skip(f"this processor has no {request.param}")
    before = native.isa()
    native.use_isa(request.param)
    with backends.use("cpu"):
        yield request.param
    native.use_isa(before)
