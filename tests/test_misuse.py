"""Arguments that make no sense: an error of torch's type that names the argument, before anything has run or changed."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import pyckpt
import pyckpt.functional as F
from pyckpt import memory
from pyckpt.checkpointing import Plan
from pyckpt.checkpointing.planning import budget_bytes


def chain(length=4):
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(length)))


X = torch.ones(3, 8)


def plan(**options):
    return pyckpt.plan(chain(), X, **{"budget": 1.0, **options})


def trial(step=lambda model, batch: model(batch).sum(), **options):
    targets = {"max_slowdown": 9.0, "max_memory": 2**30, "max_loss_gap": 1.0}
    return pyckpt.trial(chain(), [X], step, **{**targets, **options})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: F.layer_norm(X, 8), TypeError, "normalized_shape must be a sequence of ints, got 8"),
        (lambda: F.rms_norm(X, 8), TypeError, "normalized_shape must be a sequence of ints, got 8"),
        (lambda: F.layer_norm(X, (8,), eps="a"), TypeError, "eps must be a float, got 'a'"),
        (lambda: plan(rounds=0), ValueError, "rounds must be a number from 1 on, got 0"),
        (lambda: plan(blocks=3), TypeError, "blocks must be a list of modules or their paths, got int"),
        (lambda: plan(blocks="0"), TypeError, "blocks must be a list of modules or their paths, got str"),
        (lambda: plan(loss=3), TypeError, "loss must be a function of the model's result, got int"),
        (lambda: plan(budget=2.0), ValueError, "a fraction in"),
        (lambda: plan(budget="120%"), ValueError, "a fraction in"),
        (lambda: plan(budget=float("inf")), ValueError, "a fraction in"),
        (lambda: trial(max_memory="z"), ValueError, "a budget must be bytes"),
        (lambda: trial(lambda model, batch: None), TypeError, "must return the loss.* it returned NoneType"),
        (lambda: trial(lambda model, batch: 1.0), TypeError, "must return the loss.* it returned float"),
        (lambda: trial(lambda model, batch: model(batch)), TypeError, r"it returned .* shape \(3, 8\)"),
        (lambda: pyckpt.explain(lambda x: x, X), TypeError, "expected a torch.nn.Module, got function"),
        (lambda: pyckpt.explain(chain().to("meta"), X.to("meta")), ValueError, "on the meta device"),
        (lambda: pyckpt.checkpoint_sequential(chain(), X, segment=2), TypeError, "is `segments`"),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("library", ["trainer", "lightning"])
def test_callbacks_refuse_an_unknown_policy(library):
    pytest.importorskip({"trainer": "transformers", "lightning": "pytorch_lightning"}[library])
    callbacks = pytest.importorskip(f"pyckpt.integrations.{library}")
    with pytest.raises(ValueError, match="RecomputeCallback: policy must be one of"):
        callbacks.RecomputeCallback("foo")


def test_a_step_may_return_a_number_where_it_has_run_backward():
    def step(model, batch):
        loss = model(batch).sum()
        loss.backward()
        return loss.item()

    assert len(trial(step, quiet=True).losses) == 1


@pytest.mark.parametrize("text", ["", "{", '{"version": 1}', "[]"])
def test_a_file_that_is_no_plan(text, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match=r"plan\.json holds no plan that this version"):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_is_for_as_many_blocks_as_it_was_made_for():
    found = plan(rounds=1)
    found.apply(chain()), found.revert()
    for other in (chain(3), chain(5)):
        assert not found.matches(other, X)
        with pytest.raises(ValueError, match="made for another model"):
            found.apply(other)


def test_fractions_as_text():
    assert budget_bytes("60%", 1000) == budget_bytes(" 60 % ", 1000) == budget_bytes(0.6, 1000) == 600


def test_a_profiler_that_is_active_is_not_disturbed():
    with torch.profiler.profile() as profiler:
        torch.ones(3).add_(1)
        with pytest.raises(RuntimeError, match="another profiler is active"):
            memory.peak_bytes(lambda: torch.ones(9))
    assert any(event.key == "aten::add_" for event in profiler.key_averages())
    assert memory.peak_bytes(lambda: torch.ones(9)) == 36


def test_doctor_into_a_closed_pipe():
    command = f"{sys.executable} -m pyckpt doctor | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout and not done.stderr
