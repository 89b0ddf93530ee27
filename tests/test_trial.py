"""Guarded roll-outs and monitors: what they report, and that a model is put back exactly."""

import copy
import json
import logging
import random

import pytest
import torch
from torch import nn

import pyckpt
from pyckpt import Monitor, memory, recompute, trial
from tests._engine import assert_same, blocks, gradients

pytestmark = pytest.mark.usefixtures("unlearned", "one_thread")

EASY = {"max_slowdown": 1e3, "max_memory": 1.0, "max_loss_gap": 1e-4, "quiet": True}


@pytest.fixture
def batches():
    try:
        memory.allocated_bytes()
    except RuntimeError as error:
        pytest.skip(str(error))
    return [torch.randn(256, 64) for _ in range(3)]


def step(model, batch):
    return model(batch).square().mean()


def state(model):
    return [t.clone() for t in (*model.parameters(), *model.buffers())]


def make():
    return nn.Sequential(blocks(3, 64), nn.BatchNorm1d(64))


def test_a_change_that_holds_stays(batches, capsys):
    model = make()
    before, rng = state(model), torch.get_rng_state()
    result = trial(model, iter(batches), step, **{**EASY, "max_memory": 0.9, "quiet": False})
    assert result.kept and not result.missed and pyckpt.report(model).recompute
    assert_same(state(model), before)
    assert torch.equal(torch.get_rng_state(), rng) and all(p.grad is None for p in model.parameters())
    assert result.memory < 0.9 * result.memory_without and result.loss_gap < 1e-5
    assert len(result.losses) == len(result.seconds_without) == 3
    out = capsys.readouterr().out
    assert "with and without in turn" in out and "the change stays" in out and "MISSED" not in out
    json.dumps(result.to_dict())


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ({"max_slowdown": 0.0}, "slowdown"),
        ({"max_memory": 0.1}, "memory"),
        ({"max_loss_gap": -1.0}, "loss_gap"),
    ],
)
def test_a_missed_target_restores_the_model(batches, target, name):
    model = make()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    plain, grads = copy.deepcopy(model), [p.grad.clone() for p in model.parameters()]
    result = trial(model, batches, step, **{**EASY, **target})
    assert not result.kept and result.missed == (name,)
    assert "MISSED" in str(result) and "the model is restored" in str(result)
    assert_same(state(model), state(plain))
    assert_same([p.grad for p in model.parameters()], grads)
    assert repr(model) == repr(plain) and not model._forward_hooks and not model._forward_pre_hooks
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]


def test_both_sides_train(batches):
    """From the same state, with random numbers, an optimizer and backward of the step's own: the same losses where nothing
    but memory changes."""
    model = pyckpt.convert(nn.Sequential(blocks(2, 64), pyckpt.nn.Dropout(0.1)), recompute=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []

    def whole(model, batch):
        optimizer.zero_grad()
        loss = step(model, batch) * (1 + random.random())
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
        return loss

    whole(model, batches[0])
    before, moments = state(model), copy.deepcopy(optimizer.state_dict())
    result = trial(
        model,
        batches,
        whole,
        change=lambda m: pyckpt.convert(m, recompute="linear"),
        undo=lambda m: pyckpt.convert(m, recompute=False),
        optimizer=optimizer,
        **{**EASY, "max_loss_gap": 0.0},
    )
    assert result.kept and result.losses == result.losses_without and len(set(result.losses)) == 3
    assert_same(state(model), before)
    after = optimizer.state_dict()
    for key, values in moments["state"].items():
        assert_same([values["exp_avg"]], [after["state"][key]["exp_avg"]])
    # What training would have done without the trial.
    for p in model.parameters():
        p.grad = None
    expected = []
    for batch in batches:
        expected.append(whole(model, batch).item())
    assert expected == result.losses


def test_a_plan_on_trial(batches):
    model = pyckpt.convert(blocks(3, 64), recompute=False)
    plan = pyckpt.plan(model, batches[0], budget=0.8, rounds=1)
    assert trial(model, batches, step, change=plan, **{**EASY, "max_loss_gap": 0.0}).kept
    with pytest.raises(ValueError, match="applied already"):
        plan.apply(model)
    plan.revert()
    missed = trial(model, batches, step, change=plan, **{**EASY, "max_memory": 1000})
    assert not missed.kept and missed.targets["memory"] == 1000
    plan.apply(model)


def test_errors_restore_the_model(batches):
    model = make()
    plain = copy.deepcopy(model)

    def fails(model, batch):
        if pyckpt.report(model).recompute:
            raise ZeroDivisionError
        return step(model, batch)

    with pytest.raises(ZeroDivisionError):
        trial(model, batches, fails, **EASY)
    assert_same(state(model), state(plain))
    assert not pyckpt.report(model).recompute
    with pytest.raises(ValueError, match="at least one batch"):
        trial(model, [], step, **EASY)
    with pytest.raises(ValueError, match="needs `undo`"):
        trial(model, batches, step, change=pyckpt.convert, **EASY)
    with pytest.raises(ValueError, match="converted already"):
        trial(pyckpt.convert(model), batches, step, **EASY)


def test_a_loss_that_is_not_a_number_misses(batches):
    calls = []

    def step(model, batch):
        calls.append(1)
        return model(batch).mean() * (float("nan") if pyckpt.report(model).recompute else 1.0)

    assert trial(make(), batches, step, **EASY).missed == ("loss_gap",)


# Monitor


def test_monitor(caplog):
    model, x = blocks(2), torch.randn(64, 32)
    written = []
    with Monitor(write=lambda values, step: written.append((step, values))) as monitor:
        for number in range(2):
            with recompute():
                loss = model(x).square().mean()
            assert monitor.counts.recomputed == 0  # forward rebuilds nothing but for checks
            loss.backward()
            # GELU's output and the norm's in each block.
            assert monitor.counts.recomputed == 4
            assert monitor.counts.recomputed_bytes == 2 * 64 * (32 + 128) * 4
            assert monitor.counts.seconds > 0 and monitor.counts.kept >= 2
            with caplog.at_level(logging.INFO, "pyckpt"):
                values = monitor.log(number)
            assert values["pyckpt/recomputed"] == 4 and monitor.counts.recomputed == 0
    assert monitor.total.recomputed == 8 and [n for n, _ in written] == [0, 1]
    assert "step 1: pyckpt/recomputed 4" in caplog.text
    with recompute():
        loss = model(x).square().mean()
    loss.backward()
    assert monitor.total.recomputed == 8


def test_a_question_is_not_counted():
    """ReLU asks whether its input could be rebuilt, to choose what it saves: its output here, which the next layer saves too."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), pyckpt.nn.ReLU(), nn.Conv2d(8, 8, 3))
    with Monitor() as monitor, recompute():
        model(torch.randn(2, 3, 32, 32))
    assert monitor.counts.kept == 2


def test_monitor_changes_no_gradient():
    model, x = blocks(2), torch.randn(64, 32)
    expected = gradients(model, lambda: model(x).square().mean())
    monitor = Monitor().start()

    def run():
        with recompute("linear"):
            return model(x).square().mean()

    assert_same(gradients(model, run), expected)
    monitor.stop()
    assert monitor.total.recomputed > 4


def test_monitor_starts_and_stops_once():
    """However often it is told to: as by a Trainer that trains again after a run that broke off."""
    model, monitor = blocks(1), Monitor()
    monitor.stop()
    assert monitor.start() is monitor.start()

    def run():
        with recompute():
            loss = model(torch.randn(64, 32)).square().mean()
        loss.backward()

    run()
    assert monitor.total.recomputed == 2  # GELU's output and the norm's
    monitor.stop()
    monitor.stop()
    run()
    assert monitor.total.recomputed == 2
