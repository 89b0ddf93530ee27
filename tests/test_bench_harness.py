"""What the benchmark measures with: checks that catch wrong kernels, timing in turn, memory that is reused."""

import statistics
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F

from tests._bench import CPU, ROOT, _check, _harness, ops


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(F.gelu(x), x, grad)[0] * (1 + 1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: F.gelu(x) + 1e-5, "output: max error"),
        (lambda x: F.gelu(x).double(), "output: .*float64 where eager gives"),
        (lambda x: torch.full_like(x, torch.nan) * x, "output: max error nan"),
        (WrongGradient.apply, "gradient of input 0: max error"),
    ],
)
def test_check_catches(wrong, message):
    torch.manual_seed(0)
    x = torch.randn(64, 64, requires_grad=True)
    _check.judge(_check.errors(F.gelu, F.gelu, [x], torch.randn(64, 64)))
    with pytest.raises(_check.CheckFailed, match=message):
        _check.judge(_check.errors(wrong, F.gelu, [x], torch.randn(64, 64)))


class OtherMaskInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * (torch.rand_like(x) > ops.DROP) / (1 - ops.DROP)

    @staticmethod
    def backward(ctx, grad):
        return grad * (torch.rand_like(grad) > ops.DROP) / (1 - ops.DROP)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (OtherMaskInBackward.apply, "gradient of input 0"),
        (lambda x: F.dropout(x, 0.2), "mask: kept .* expected a share of 0.9"),
        (lambda x: x * (torch.rand_like(x) > ops.DROP), "output: max error"),
        (lambda x: x * 1.0, "mask: kept 65536 of 65536"),
    ],
)
def test_random_check_catches(wrong, message):
    torch.manual_seed(0)
    case = ops.SUBJECTS["dropout"].case((256, 256), torch.float32, CPU, "contiguous")
    grad = torch.randn(256, 256)
    found = _check.errors_random(
        lambda x: F.dropout(x, ops.DROP), case.with_mask, case.inputs, grad, ops.DROP
    )
    _check.judge(found)
    with pytest.raises(_check.CheckFailed, match=message):
        _check.judge(_check.errors_random(wrong, case.with_mask, case.inputs, grad, ops.DROP))


def test_one_lucky_draw_of_eager_does_not_condemn():
    lucky = _check.Error("output", got=3.0, eager=0.5, ulp=1.0)
    usual = _check.Error("output", got=2.5, eager=2.6, ulp=1.0)
    with pytest.raises(_check.CheckFailed, match=r"max error 3 against float64, allowed 1\.55"):
        _check.judge([lucky])
    _check.judge([lucky, usual])
    with pytest.raises(_check.CheckFailed):
        _check.judge([usual, _check.Error("output", got=float("nan"), eager=2.0, ulp=1.0)])


def test_time_in_turn():
    order = []

    def call(name, seconds):
        order.append(name)
        time.sleep(seconds)

    calls = {"slow": lambda: call("slow", 0.02), "fast": lambda: call("fast", 0.005)}
    samples, _ = _harness.time_in_turn(calls, _harness.Effort(seconds=0, least=4, sample_ms=0.1), CPU)
    assert order[8:16] == ["slow", "fast", "fast", "slow", "slow", "fast", "fast", "slow"]  # after warm-up
    slow, fast = samples["slow"], samples["fast"]
    assert len(slow.values) >= 4
    assert 20 <= slow.least <= slow.median
    assert 1.5 < slow.least / fast.least < 5
    assert slow.ratio_of_medians(fast) == pytest.approx(slow.median / fast.median)


def test_disturbed_samples_do_not_count():
    taken = _harness.Samples(
        [1.0, 9.0, 1.1, 9.0, 1.2, 1.0, 9.0, 9.0, 9.0], [False, True, False, True, False, False, *[True] * 3]
    )
    assert not taken.sound and taken.median == 9.0
    other = _harness.Samples([v / 2 for v in taken.values], list(taken.disturbed))
    for samples, value in ((taken, 1.1), (other, 0.55)):
        samples.values.append(value)
        samples.disturbed.append(False)
    assert taken.sound and taken.median == 1.1
    assert taken.ratio_of_medians(other) == taken.median_of_ratios(other) == 2.0


@pytest.mark.skipif(_harness._waited_ms() == 0.0, reason="no scheduler statistics")
def test_waiting_for_a_processor_is_noticed(one_thread):
    cpu = min(_harness.os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{cpu}])\nwhile True: pass"
    before = _harness.os.sched_getaffinity(0)
    burner = subprocess.Popen([sys.executable, "-c", code])
    try:
        time.sleep(0.3)
        _harness.os.sched_setaffinity(0, [cpu])  # this thread shares one processor with the other process
        samples = _harness.Samples()
        for _ in range(10):
            _harness._sample(lambda: sum(range(500_000)), 1, CPU, samples)
    finally:
        _harness.os.sched_setaffinity(0, before)
        burner.kill()
        burner.wait()
    assert sum(samples.disturbed) >= 5
    assert min(samples.values) < statistics.median(samples.values)


@pytest.mark.skipif(_harness._busy_seconds() is None, reason="no /proc/stat")
def test_contention_is_noticed():
    code = "import time; end = time.time() + 1.5\nwhile time.time() < end: pass"
    burner = subprocess.Popen([sys.executable, "-c", code])
    time.sleep(0.3)
    contention = _harness.Contention()
    contention.start()
    time.sleep(0.8)
    contention.stop()
    burner.wait()
    assert contention.share > 0.6 / torch.get_num_threads() / 2
    if len(_harness.os.sched_getaffinity(0)) <= 4:
        assert contention.contended


REUSE = """
import resource, sys
sys.path.insert(0, sys.argv[1])
import torch
from bench import _harness
if sys.argv[2] == "reuse":
    assert "reuses" in _harness.reuse_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(64 << 20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(), faults()
print(sorted(faults() for _ in range(15))[7])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_memory_is_reused():
    def faults(setting):
        command = [sys.executable, "-c", REUSE, str(ROOT), setting]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert faults("default") > 100  # 64 MiB of fresh pages, or of huge ones
    assert faults("reuse") < 20
