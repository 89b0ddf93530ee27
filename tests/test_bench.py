"""The benchmark: figures that follow from figures, checks that catch wrong kernels, errors that help."""

import dataclasses
import json
import re
import statistics
import subprocess
import sys
import time

import pytest
import torch
import torch.nn.functional as F

import pyckpt

from tests._bench import FIELDS, ROOT  # isort: skip
from bench import __main__ as cli
from bench import _check, _harness, _report, _run, ops

CPU = torch.device("cpu")
SHORT = _harness.Effort(seconds=0.0, least=2, sample_ms=0.1)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """A real run in a process of its own."""
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, "-m", "bench", "--quick", "--ops", "gelu_tanh", "dropout", "layer_norm"]
    command += ["--dtype", "float32", "bf16", "--shape", "96x128", "--layout", "contiguous", "sliced"]
    command += [
        "--threads",
        "1",
        "--json",
        str(folder / "new" / "out.json"),
        "--plot",
        str(folder / "out.png"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    values = json.loads((folder / "new" / "out.json").read_text())
    return values, done.stdout, (folder / "out.png").read_bytes()


def test_rows(result):
    rows = result[0]["rows"]
    throughput = [row for row in rows if row["kind"] == "throughput"]
    assert {(r["op"], r["dtype"], r["layout"], r["impl"]) for r in throughput} == {
        (op, dtype, layout, impl)
        for op in ("gelu_tanh", "dropout", "layer_norm")
        for dtype in ("fp32", "bf16")
        for layout in ("contiguous", "sliced")
        for impl in ("eager", "pyckpt")
    }
    assert {r["impl"] for r in rows if r["kind"] == "overhead"} == {"eager", "pyckpt"}
    for row in rows:
        assert row.keys() >= FIELDS
        assert row["status"] == "ok"
        assert row["shape"] == ("96x128" if row["kind"] == "throughput" else "8x8")
        assert row["forward_ms"] > 0
        assert row["backend"] == ("torch" if row["impl"] == "eager" else pyckpt.backends.select("cpu"))


def test_figures_follow_from_figures(result):
    rows = result[0]["rows"]
    eager = {_run._key(row): row for row in rows if row["impl"] == "eager"}
    for row in rows:
        assert row["ratio"] == pytest.approx(eager[_run._key(row)]["step_ms"] / row["step_ms"])
        assert row["gbps"] == pytest.approx(row["step_bytes"] / row["step_ms"] / 1e6)
        assert row["copy_gbps"] == pytest.approx(row["step_bytes"] / row["copy_ms"] / 1e6)
        size = 96 * 128 * (4 if row["dtype"] == "fp32" else 2) if row["kind"] == "throughput" else None
        if row["op"] == "gelu_tanh" and size:
            assert (row["forward_bytes"], row["step_bytes"]) == (2 * size, 5 * size)
            assert abs(row["saved_bytes"] - size) < 16384
            assert 2 * size <= row["peak_bytes"] <= 4 * size


def test_memory_was_warm(result):
    # A tensor of 96x128 in fp32 is 12 pages; fresh ones at every step would be several times as many.
    assert all(row["page_faults"] < 12 for row in result[0]["rows"])


def test_printed_and_drawn(result):
    values, output, png = result
    assert values["machine"]["torch_threads"] == 1
    assert values["versions"]["torch"] == torch.__version__
    assert "reuses memory" in values["settings"]["allocator"] or "default" in values["settings"]["allocator"]
    assert values["settings"]["allocator"] in output
    assert "ratio: eager's step" in output and "Cost of a call" in output
    assert png.startswith(b"\x89PNG") and len(png) > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--ops", "gelu_tan"],
            r"unknown op 'gelu_tan', did you mean 'gelu_tanh'\?.*Known: gelu_tanh, gelu_erf",
        ),
        (["--dtype", "int8"], "unknown dtype 'int8'.*Known: fp32, bf16, fp16, fp64"),
        (["--layout", "upside-down"], "unknown layout 'upside-down'.*contiguous, transposed, sliced"),
        (["--shape", "1024"], "bad shape '1024': write at least two positive sizes as in 4096x1024"),
        (["--shape", "0x4"], "bad shape '0x4'"),
        (["--device", "gpu"], "unknown device 'gpu': use cpu, cuda"),
        (["--device", "meta"], "'meta' is not supported"),
        (["--backend", "fortran"], "unknown backend 'fortran'"),
        (["--json", "/proc/no/such/file"], "/proc/no"),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert re.search(message, capsys.readouterr().err, re.DOTALL)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_absent_gpu(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--device", "cuda"])
    assert "sees no usable GPU" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ops.LAYOUTS)
@pytest.mark.parametrize("op", ops.SUBJECTS)
def test_every_subject_passes_its_check(op, layout):
    _run.verify(_run.Config(op, "fp32", (64, 48), layout), CPU, seed=0)


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


def test_wrong_kernel_stops_its_row(monkeypatch, capsys):
    def build(x):
        return dataclasses.replace(ops._softmax(x), pyckpt=lambda x: torch.softmax(x, 0))

    monkeypatch.setitem(ops.SUBJECTS, "softmax", ops.Subject(build))
    monkeypatch.setattr(_harness, "reuse_memory", lambda: "untouched, for the other tests' sake")
    assert cli.main(["--ops", "softmax", "--dtype", "fp32", "--shape", "32x48", "--quick"]) == 1
    output = capsys.readouterr().out
    assert "pyckpt error: CheckFailed: output: max error" in output
    row = _run.measure(_run.Config("softmax", "fp32", (32, 48)), CPU, SHORT, _run.Compiler(0), "cpu", 0)[-1]
    assert row["impl"] == "pyckpt" and row["step_ms"] is None and row["ratio"] is None


def test_reference_is_not_measured_by_accident(monkeypatch):
    reference_only = {"cpu": pyckpt.backends.Backend("cpu", "cpu", "built without a C++ compiler")}
    monkeypatch.setattr(pyckpt.backends, "available", lambda: reference_only)
    monkeypatch.setattr(pyckpt.backends, "select", lambda device_type: "reference")
    with pytest.raises(RuntimeError, match=r"built without a C.. compiler.*--backend reference"):
        cli.choose_backend(None, CPU)
    assert cli.choose_backend("reference", CPU) == "reference"


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


def test_shortfalls_are_named():
    row = {"op": "silu", "dtype": "fp32", "layout": "contiguous", "contended": False, "forward_ratio": 1.2}
    big = {
        **row,
        "shape": "64x1024",
        "kind": "throughput",
        "step_ms": 2.0,
        "ratio": 0.9,
        "median_ratio": 0.91,
    }
    small = {**big, "shape": "63x1024"}
    tiny = {**row, "shape": "8x8", "kind": "overhead", "ratio": 0.5, "median_ratio": 0.5}
    rows = [{**big, "impl": "pyckpt"}, {**small, "impl": "pyckpt"}]
    rows += [{**tiny, "impl": "eager", "step_ms": 0.030}, {**tiny, "impl": "pyckpt", "step_ms": 0.0501}]
    assert _run.shortfalls(rows) == [
        "silu fp32 64x1024 contiguous: step slower than eager, 0.91x",
        "silu fp32 8x8 contiguous: a call takes 50.1 us, the aim is 50.0",
    ]


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


def test_missing_matplotlib_is_explained(monkeypatch, capsys, tmp_path):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name)
    )
    with pytest.raises(SystemExit):
        cli.main(["--ops", "relu", "--plot", str(tmp_path / "out.png")])
    assert "drawing needs matplotlib: pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("rich", [True, False])
def test_table_shows_every_cell(monkeypatch, capsys, rich):
    if rich:
        pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: rich, raising=False)
    _report.print_table("A title", ("op", "step ms"), [("silu", "1.250"), ("[relu]", "10.5")])
    output = capsys.readouterr().out
    assert all(text in output for text in ("A title", "step ms", "silu", "1.250", "[relu]", "10.5"))


def test_terminal_table_fits_80_columns(monkeypatch, capsys, result):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    rows = [row for row in result[0]["rows"] if row["kind"] == "throughput"]
    _report.print_rows(rows)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    table = plain.split("fwd ms", 1)[1].splitlines()
    assert max(map(len, table)) <= 80
    for row in rows:
        assert any(f"{row['step_ms']:.3f}" in line and line.startswith(row["impl"]) for line in table)
