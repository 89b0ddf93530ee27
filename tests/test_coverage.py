"""The table of real architectures: that its check finds what is wrong, and that the page says what the figures say."""

import json
import sys
from pathlib import Path

import pytest
import torch

import pyckpt

ROOT = Path(__file__).resolve().parents[1]
if Path(pyckpt.__file__).resolve().parents[1] != ROOT:
    pytest.skip(
        "the benchmark belongs to the checkout, not to the installed package", allow_module_level=True
    )
sys.path.insert(0, str(ROOT))

from bench import coverage  # noqa: E402

BERT = "transformers/bert"


@pytest.fixture(scope="module")
def recorded():
    return json.loads((coverage.DOCS / "coverage.json").read_text())


@pytest.fixture(scope="module")
def bert():
    pytest.importorskip("transformers")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield coverage.measure(BERT)
    torch.set_num_threads(threads)


def test_page_follows_from_figures(recorded):
    assert (coverage.DOCS / "coverage.md").read_text() == coverage.render(recorded)


def test_all_are_recorded_without_problem(recorded):
    rows = {row["name"]: row for row in recorded["rows"]}
    assert rows.keys() == set(coverage.NAMES) and len(rows) >= 20
    for row in rows.values():
        assert coverage.problems(row, row) == []
    assert rows[BERT]["engine"] < 0.65 * rows[BERT]["eager"]


def test_measured_as_recorded(recorded, bert):
    (row,) = (row for row in recorded["rows"] if row["name"] == BERT)
    assert coverage.problems(bert, row) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"same_gradients": False}, "gradients with and without the engine differ"),
        ({"engine": 1.04}, "engine keeps .* bytes, docs"),
        ({"eager": 0.96}, "eager keeps"),
        ({"converted": 10.0}, "more than eager"),
        ({"swapped": {}}, "swapped"),
    ],
)
def test_check_finds(bert, change, message):
    wrong = bert | {k: int(v * bert[k]) if type(v) is float else v for k, v in change.items()}
    with pytest.raises(AssertionError, match=message):
        assert not coverage.problems(wrong, bert), "; ".join(coverage.problems(wrong, bert))
    assert any("write it anew" in problem for problem in coverage.problems(bert, None))


def test_different_gradients_are_seen(monkeypatch, bert):
    """An engine that rebuilds something else: the row says so."""
    from pyckpt._records import Source

    original = Source.get
    monkeypatch.setattr(Source, "get", lambda self, memo=None: original(self, memo) * (1 + 1e-6))
    monkeypatch.setattr("pyckpt._checks.rebuilds_the_bits", lambda source, whole: True)
    monkeypatch.setattr("pyckpt._checks.uses", {})
    row = coverage.measure(BERT)
    assert not row["same_gradients"] and row["engine"] == pytest.approx(bert["engine"], rel=0.03)


def test_command_line(monkeypatch, capsys, tmp_path, recorded):
    with pytest.raises(SystemExit):
        coverage.main(["--only", BERT])
    assert "--only goes with --check" in capsys.readouterr().err

    def measure(name):
        if name == "timm/vit":
            raise ImportError("No module named 'timm'")
        return next(row for row in recorded["rows"] if row["name"] == name)

    monkeypatch.setattr(coverage, "measure", measure)
    assert coverage.check([BERT, "timm/vit"])
    printed = capsys.readouterr().out
    assert f"{BERT}: eager" in printed and "1 architectures checked, 0 with problems, 1 skipped" in printed
    assert "skipped timm/vit: No module named 'timm'" in printed
    assert not coverage.check(["timm/vit"])
    monkeypatch.setattr(coverage, "DOCS", tmp_path)
    rows = [row | {"engine": 2 * row["engine"]} for row in recorded["rows"]]
    (tmp_path / "coverage.json").write_text(json.dumps({"rows": rows}))
    assert not coverage.check([BERT])
