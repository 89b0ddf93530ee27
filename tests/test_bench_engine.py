"""The engine's benchmark: bytes that theory gives, wrong gradients caught, every peer there or its absence explained."""

import dataclasses
import json
import sys
import types

import pytest
import torch
from torch import nn

from bench import __main__ as cli
from bench import _check, _harness, _hooks, _run, _stack, engine
from bench._stack import Sizes, Stack, Way
from tests._bench import FIELDS

CPU = torch.device("cpu")
SHORT = _harness.Effort(seconds=0.0, least=2, sample_ms=0.1, patience=1.0, warmup=1)
OURS = ("eager", "engine", "converted", "pyckpt", "pyckpt mlp", "pyckpt linear", "plan 0.6", "checkpoint")
#: Large enough for autograd's nodes, a few hundred bytes each, to be small beside the tensors.
SIZES = Sizes(batch=2, sequence=128, hidden=128, heads=4, layers=2)
TINY = engine.Settings(
    sizes=Sizes(batch=1, sequence=8, hidden=16, heads=2, layers=1),
    precisions=("fp32",),
    ways=(*OURS, "liger"),
    effort=SHORT,
    compile_seconds=0.0,
    hook_rounds=3,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def measure(precision, **settings):
    settings = dataclasses.replace(TINY, **settings)
    rows = engine.measure(settings, precision, CPU, _run.Compiler(settings.compile_seconds))
    return {row["impl"]: row for row in rows}


@pytest.mark.parametrize("precision", _stack.PRECISIONS)
def test_rows(precision):
    rows = measure(precision, sizes=SIZES, ways=OURS)
    assert list(rows) == list(OURS)
    for impl, row in rows.items():
        assert row.keys() >= FIELDS
        assert row["status"] == "ok" and row["dtype"] == precision and row["shape"] == "2x128x128"
        assert row["ratio"] == pytest.approx(rows["eager"]["step_ms"] / row["step_ms"])
        assert row["forward_ms"] > 0 and row["peak_bytes"] > 0
        assert row["backend"] == ("torch" if impl in ("eager", "engine", "checkpoint") else "pyckpt")
        same = {"pyckpt": "converted", "plan": "converted", "converted": None, "eager": None}.get(
            impl.split()[0], "eager"
        )
        assert row["same_bits_as"] == same
    assert rows["engine"]["difference"] == rows["checkpoint"]["difference"] == 0.0
    assert 0 < rows["pyckpt"]["difference"] == rows["converted"]["difference"] < 0.05
    json.dumps(rows)
    kept = {impl: row["sbh"] for impl, row in rows.items()}
    if precision == "fp32":
        # A block keeps 32 in eager, 20 recomputed and 2 checkpointed; statistics, nodes and records come on top.
        least = {"eager": 32, "converted": 32, "engine": 20, "pyckpt": 20, "checkpoint": 2}
        least |= {"pyckpt mlp": 12, "pyckpt linear": 6}
        for impl, value in least.items():
            assert value <= kept[impl] <= value + 0.8, impl
    elif precision == "amp":  # weights' copies are cast again
        assert kept["pyckpt"] < 0.55 * kept["eager"]
    assert kept["pyckpt"] < 0.7 * kept["converted"]
    assert kept["plan 0.6"] < 0.7 * kept["eager"]
    assert rows["engine"]["peak_bytes"] < rows["eager"]["peak_bytes"]


@pytest.mark.parametrize(
    ("impl", "factor", "message"),
    [
        ("engine", 1 + 2**-23, "error: gradients are not the bits of 'eager'"),
        ("converted", 1.01, "error: gradient 0 is 0.01 from float64 in norm"),
        ("converted", float("nan"), "error: gradient 0 is nan from float64"),
    ],
)
def test_wrong_gradients_are_caught(monkeypatch, capsys, impl, factor, message):
    def build(name, model, x, amp, real=_stack.build):
        way = real(name, model, x, amp)
        return Way(way.model, lambda x: way.call(x) * factor, amp) if name == impl else way

    monkeypatch.setattr(engine, "build", build)
    result = engine.run(dataclasses.replace(TINY, ways=("eager", impl, "checkpoint")), CPU)
    rows = {row["impl"]: row for row in result["rows"]}
    assert rows[impl]["status"].startswith(message)
    assert rows[impl]["step_ms"] is None and rows["checkpoint"]["step_ms"] is not None
    assert engine.failed(result)
    engine.print_result(result)
    assert message in capsys.readouterr().out


def test_distance_is_judged_by_the_norm():
    exact = [torch.full((4,), 1.0, dtype=torch.float64)]
    eager = [torch.full((4,), 1 + 2.0**-20)]
    limit = 1.1 * 2.0**-20 + torch.finfo(torch.float32).eps
    for error, wrong in ((0.99 * limit, False), (1.02 * limit, True)):
        found = [exact[0] + error]
        assert bool(_check.too_far(found, eager, exact, torch.float32, 1.0)) == wrong
    assert not _check.too_far(found, eager, exact, torch.float32, 8.0)
    assert _check.relative_difference([torch.tensor([1.0, 3.0])], [torch.tensor([1.0, 4.0])]) == 0.25


def test_budget_is_set_for_the_compiler_only(monkeypatch):
    import torch._functorch.config as functorch
    import torch._inductor.compile_fx as inductor

    seen = []

    def record(graph, inputs):
        seen.append(functorch.activation_memory_budget)
        return graph

    monkeypatch.setattr(inductor, "compile_fx", record)
    before = functorch.activation_memory_budget
    model = nn.Linear(2, 2)
    for budget in _stack.BUDGETS:  # the same code: each must be compiled anew
        torch.compile(model, backend=_stack.at_budget(budget))(torch.randn(1, 2))
    assert seen == list(_stack.BUDGETS)
    assert functorch.activation_memory_budget == before
    torch.compiler.reset()


@pytest.mark.slow
def test_compiled_at_a_lower_budget_keeps_less():
    rows = measure("fp32", sizes=SIZES, ways=("eager", "compile 1.0", "compile 0.4"), compile_seconds=300.0)
    assert all(row["status"] == "ok" for row in rows.values())
    assert rows["compile 0.4"]["sbh"] < 0.8 * rows["compile 1.0"]["sbh"] < rows["eager"]["sbh"]
    assert 0 < rows["compile 1.0"]["difference"] < 1e-4


def test_compile_without_budget_says_so():
    row = measure("fp32", ways=("eager", "compile 0.8"))["compile 0.8"]
    assert row["status"].startswith("skipped: the budget for compilation") and row["step_ms"] is None


def test_liger_is_explained_or_swapped_in(monkeypatch):
    model = Stack(TINY.sizes)
    monkeypatch.setattr(_stack.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install liger-kernel"):
        _stack.build("liger", model, torch.zeros(1), False)
    monkeypatch.setattr(_stack.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(RuntimeError, match="need a GPU"):
        _stack.build("liger", model, torch.zeros(1), False)

    class LigerLayerNorm(nn.LayerNorm):  # the interface of Liger's
        def __init__(self, hidden_size, eps=1e-6, bias=False):
            super().__init__(hidden_size, eps)

    package = types.ModuleType("liger_kernel")
    package.transformers = types.ModuleType("liger_kernel.transformers")
    package.transformers.LigerLayerNorm = LigerLayerNorm
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package.transformers)
    nn.init.normal_(model.blocks[0].ln_1.weight)
    way = _stack.build("liger", model, types.SimpleNamespace(device=torch.device("cuda")), False)
    assert sum(isinstance(m, LigerLayerNorm) for m in way.model.modules()) == 2
    x = torch.randn(1, 8, 16, requires_grad=True)
    assert torch.equal(way.forward(x), model(x))
    assert not any(isinstance(m, LigerLayerNorm) for m in model.modules())


def test_hooks(capsys):
    torch.set_num_threads(2)
    rows = _hooks.measure(rounds=5)
    assert torch.get_num_threads() == 2
    assert [row["bytes"] for row in rows] == [512, 2048]
    for row in rows:
        # Linear: input and weight; GELU: input; LayerNorm: input, weight, two statistics, bias... of each of 8.
        assert row["saved_tensors"] >= 7 * _hooks.DEPTH - 1
        for way in ("identity", "engine"):
            added = (row["step_us"][way] - row["step_us"]["none"]) / row["saved_tensors"]
            assert row[f"{way}_step_us"] == pytest.approx(added)
        assert row["engine_forward_us"] > 0
    _hooks.print_result(rows)
    assert "aim: engine at most 2.5 us a saved tensor" in capsys.readouterr().out


def test_command(monkeypatch, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(_harness, "reuse_memory", lambda: "untouched, for the other tests' sake")
    monkeypatch.setattr(engine, "_QUICK_EFFORT", SHORT)
    monkeypatch.setattr(_hooks, "measure", lambda rounds, real=_hooks.measure: real(3))
    arguments = ["--quick", "--sequence", "8", "--hidden", "16", "--heads", "2", "--dtype", "bf16"]
    arguments += [
        "--impl",
        "pyckpt",
        "liger",
        "--json",
        str(tmp_path / "e.json"),
        "--plot",
        str(tmp_path / "e.png"),
    ]
    assert engine.main(arguments) == 0
    output = capsys.readouterr().out
    assert "GPT-2-like stack, 2x8x16, 2 heads, 2 layers" in output and "skipped: liger_kernel" in output
    values = json.loads((tmp_path / "e.json").read_text())
    assert [row["impl"] for row in values["engine"]["rows"]] == ["eager", "converted", "pyckpt", "liger"]
    assert values["versions"]["torch"] == torch.__version__
    assert (tmp_path / "e.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hidden", "100", "--heads", "12"], "--hidden 100 is not divisible by --heads 12"),
        (["--layers", "0"], "sizes must be positive"),
        (["--device", "meta"], "'meta' is not supported"),
        (["--impl", "magic"], "no way 'magic': they are 'eager', "),
        (["--impl", "plan 0.0"], "no way 'plan 0.0'"),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        engine.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def record_subjects(ran):
    """In place of all measuring: what would have been measured beside the ops."""

    def measure_all(args, backend, subjects):
        ran.append(subjects)
        return {"rows": [], **{key: {"rows": []} for key in subjects}}

    return measure_all


@pytest.mark.parametrize(
    ("arguments", "quick"),
    [
        ([], True),
        (["--engine"], False),
        (["--engine", "--quick"], True),
        (["--ops", "relu", "--engine"], False),
    ],
)
def test_part_of_the_benchmark(monkeypatch, arguments, quick):
    ran = []
    monkeypatch.setattr(engine.Settings, "of", lambda **given: given)
    monkeypatch.setattr(cli, "measure_all", record_subjects(ran))
    assert cli.main([*arguments, "--no-job"]) == 0
    assert ran == [{"engine": (engine, {"quick": quick, "seed": 0})}]


@pytest.mark.parametrize("arguments", [["--quick"], ["--ops", "relu"], ["--no-engine"]])
def test_left_out_of_the_benchmark(monkeypatch, arguments):
    ran = []
    monkeypatch.setattr(cli, "measure_all", record_subjects(ran))
    assert cli.main([*arguments, "--no-job"]) == 0
    assert ran == [{}]
