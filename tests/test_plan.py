"""Plans: predictions against what is then measured, and what a plan does to a model."""

import copy
import json
import statistics
import time

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import pyckpt
from pyckpt import memory
from pyckpt.checkpointing import BudgetError, Plan, Prediction, _measure, planning
from pyckpt.checkpointing._blocks import candidates
from pyckpt.checkpointing.plans import fingerprint
from tests._engine import assert_same, blocks, gradients
from tests.test_segments import Transformer

BATCH, SEQUENCE, WIDTH, DEPTH = 2, 128, 64, 5


class Model(nn.Module):
    """An embedding, blocks in a ModuleList or in a Sequential, a head."""

    def __init__(self, sequential=False, depth=DEPTH, width=WIDTH):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(50, width), nn.Linear(width, 50)
        made = [Transformer(width) for _ in range(depth)]
        self.layers = nn.Sequential(*made) if sequential else nn.ModuleList(made)

    def forward(self, ids):
        x = self.embedding(ids)
        if isinstance(self.layers, nn.Sequential):
            x = self.layers(x)
        else:
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


def loss_of(output):
    return output.square().mean()


@pytest.fixture
def ids():
    try:
        memory.allocated_bytes()
    except RuntimeError as error:
        pytest.skip(str(error))
    return torch.randint(50, (BATCH, SEQUENCE))


def make(sequential=False, **kwargs):
    return pyckpt.convert(Model(sequential, **kwargs), recompute=False)


def planned(model, ids, **kwargs):
    return pyckpt.plan(model, ids, **{"loss": loss_of, "rounds": 1, **kwargs})


def flops(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def choices(plan):
    return [choice for _, choice in plan.steps]


# What each costs by its matrix products, so that tests do not hang on a clock.
_TIMES = {
    "none": 101,
    "pointwise": 100,
    "mlp": 108,
    "linear": 114,
    "checkpoint": 125,
    "offload": 150,
    "replay": 33,
}


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(
        _measure, "in_turn", lambda calls, rounds, device: {c: _TIMES.get(c, 50) * 10**6 for c in calls}
    )


@pytest.mark.usefixtures("one_thread", "clock")
@pytest.mark.parametrize("sequential", [False, True])
def test_predictions_and_budgets(ids, sequential):
    model = make(sequential)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    plain = [g.clone() for g in gradients(model, lambda: loss_of(model(ids)))]
    step = lambda: loss_of(model(ids)).backward()  # noqa: E731
    eager_peak, used = memory.peak_bytes(step), set()
    for budget in (1.0, 0.5, 0.4, 0.33):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        plan = planned(model, ids, budget=budget)
        assert plan.eager.peak == pytest.approx(eager_peak, rel=0.05)
        plan.apply(model)
        saved = memory.saved_bytes(lambda: loss_of(model(ids)))
        assert plan.predicted.saved == pytest.approx(saved, rel=0.05)
        peak = memory.peak_bytes(step)
        assert plan.predicted.peak == pytest.approx(peak, rel=0.12)
        assert peak <= 1.02 * plan.budget
        assert_same(gradients(model, lambda: loss_of(model(ids))), plain)
        used |= set(choices(plan))
        plan.revert()
    assert {"pointwise", "linear", "checkpoint"} <= used
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.usefixtures("one_thread", "clock")
def test_segments_in_a_sequential(ids):
    """A chain of blocks that keep little, with little to spend: several blocks become one checkpoint."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(12)))
    x = torch.randn(2048, 64, requires_grad=True)
    with pytest.raises(BudgetError, match="smallest budget that can be met is") as caught:
        pyckpt.plan(model, x, budget=1000, rounds=1)
    plan = pyckpt.plan(model, x, budget=int(1.01 * caught.value.smallest), rounds=1)
    lengths = [len(group) for group, choice in plan.steps if choice == "segment"]
    assert lengths and max(lengths) >= 2
    expected = gradients(model, lambda: model(x).square().mean())
    saved = memory.saved_bytes(lambda: model(x).square().mean())
    plan.apply(model)
    again = copy.deepcopy(model)
    for m in (model, again):
        assert_same(gradients(m, lambda m=m: m(x).square().mean()), expected)
        assert memory.saved_bytes(lambda m=m: m(x).square().mean()) < 0.7 * saved
    plan.revert()
    assert type(model) is nn.Sequential
    assert memory.saved_bytes(lambda: model(x).square().mean()) == pytest.approx(saved, rel=0.01)


@pytest.mark.usefixtures("one_thread", "clock")
def test_scopes_and_forms_of_a_budget(ids):
    model = make(depth=3)
    activations = planned(model, ids, budget=1.0, choices=["none"])
    total = planned(model, ids, budget=1.0, choices=["none"], scope="total")
    held = sum(p.nbytes for p in model.parameters())
    assert total.eager.peak > activations.eager.peak
    for p in model.parameters():
        p.grad = None

    def step():
        loss_of(model(ids)).backward()
        for p in model.parameters():
            p.grad = None

    assert total.eager.peak == pytest.approx(memory.peak_bytes(step), rel=0.15)
    assert total.eager.peak <= activations.eager.peak + held
    for text, expected in (
        ("1GiB", 2**30),
        ("500 MB", 5 * 10**8),
        (10**8, 10**8),
        ("2048", 2048),
        ("0.25", 25),
        (0.25, 25),
        (1, 1),
    ):
        assert planning.budget_bytes(text, 100) == expected
    for wrong in ("many", 0, -1.0, True, "8TiBB", "1..2GiB"):
        with pytest.raises(ValueError, match="budget must be"):
            planned(model, ids, budget=wrong)


@pytest.mark.usefixtures("one_thread", "clock")
def test_saved_plans(ids, tmp_path):
    model = make()
    plan = planned(model, ids, budget=0.45)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and again.matches(make(), ids)
    assert not again.matches(make(), ids[:1]) and not again.matches(make(depth=2), ids)
    for other in (make(depth=2), make(width=32), nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="made for another model"):
            again.apply(other)
    again.apply(model)
    with pytest.raises(ValueError, match="applied already"):
        again.apply(model)
    with pytest.raises(ValueError, match="recomputes already"):
        planned(model, ids, budget=0.5)
    again.revert()
    (tmp_path / "plan.json").write_text(json.dumps({"version": 2}))
    with pytest.raises(ValueError, match="no plan that this version"):
        Plan.load(tmp_path / "plan.json")
    text = str(plan)
    assert "layers.0" in text and "kept MiB" in text and "budget" in text
    pytest.importorskip("matplotlib")
    plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def pairs(count):
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(count)))


@pytest.mark.usefixtures("one_thread", "clock", "counted")
@pytest.mark.parametrize("choice", ["checkpoint", "offload", "linear", "segment"])
def test_what_recomputes_already_is_left(choice, tmp_path):
    """By the plan itself, which a copy of it does not remember, or by the user's own; and what fails changes nothing."""
    model, x = pairs(4), torch.randn(64, 32, requires_grad=True)
    classes = [type(m) for m in model.modules()]
    expected = gradients(model, lambda: model(x).square().mean())
    plan = pyckpt.plan(model, x, budget="1GiB", choices=[choice], rounds=1)
    plan.save(tmp_path / "plan.json")
    copied = Plan.load(tmp_path / "plan.json")

    def assert_unchanged():
        assert_same(gradients(model, lambda: model(x).square().mean()), expected)
        assert [type(m) for m in model.modules()] == classes
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())

    plan.apply(model)
    applied = [type(m) for m in model.modules()]
    for again in (copied.apply, lambda m: pyckpt.plan(m, x, budget=1.0)):
        with pytest.raises(ValueError, match="recomputes already"):
            again(model)
    assert [type(m) for m in model.modules()] == applied
    plan.revert()
    assert_unchanged()
    for own in (model[1], model):
        pyckpt.checkpoint_wrapper(own)
        with pytest.raises(ValueError, match="recomputes already"):
            copied.apply(model)
        pyckpt.checkpointing.unwrap(own)
        assert_unchanged()


@pytest.mark.parametrize("choice", ["checkpoint", "offload", "segment"])
def test_a_plan_is_applied_whole_or_not_at_all(choice):
    model = pairs(4)
    steps = [
        (["0.0"], "linear"),
        (["0.1"], "offload"),
        (["2", "3"] if choice == "segment" else ["3"], choice),
    ]
    nothing = Prediction(0, 0, 0.0)
    made_for = fingerprint(model, [path for group, _ in steps for path in group])
    plan = Plan(0, "activations", steps, nothing, nothing, [], [], {"model": made_for, "sample": ""})
    unwrappable = model if choice == "segment" else model[3]
    unwrappable.forward = type(unwrappable).forward.__get__(unwrappable)
    with pytest.raises(TypeError, match="is not its class's"):
        plan.apply(model)
    assert {type(m) for m in model.modules()} == {nn.Sequential, nn.Linear}
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    del unwrappable.forward
    plan.apply(model)
    plan.revert()
    assert {type(m) for m in model.modules()} == {nn.Sequential, nn.Linear}


@pytest.mark.usefixtures("one_thread", "clock")
def test_modes_of_training(ids):
    """A block costs what its mode makes of it; a plan fits the model in either."""
    model = make(depth=2)
    for layer in model.layers:
        layer.mlp[1] = nn.Dropout(0.5)
    model.layers[1].mlp[1].eval()
    plan = planned(model, ids, budget=1.0, choices=["none"])
    assert plan.predicted.saved == pytest.approx(memory.saved_bytes(lambda: loss_of(model(ids))), rel=0.05)
    assert plan.matches(model.eval(), ids)
    plan.apply(model)
    plan.revert()


@pytest.mark.usefixtures("one_thread", "clock")
def test_nothing_of_the_model_changes(ids):
    model = make(depth=2)
    model.register_buffer("seen", torch.zeros(1))
    model.register_forward_pre_hook(lambda module, args: module.seen.add_(1) and None)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    calls = []
    model.layers[0].mlp[0].weight.register_post_accumulate_grad_hook(calls.append)
    rng = torch.get_rng_state()
    planned(model, ids, budget=1.0)
    assert torch.equal(torch.get_rng_state(), rng) and not calls
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert not model._forward_hooks and not any(m._forward_hooks for m in model.modules())


@pytest.mark.usefixtures("one_thread", "clock")
def test_choices(ids):
    model = make(depth=3)
    only = planned(model, ids, budget=1.0, choices=["linear", "checkpoint"])
    assert choices(only) == ["linear"] * 3
    offload = planned(model, ids, budget=1.0, choices=["offload"])
    expected = gradients(model, lambda: loss_of(model(ids)))
    offload.apply(model)
    assert_same(gradients(model, lambda: loss_of(model(ids))), expected)
    again = copy.deepcopy(model)
    assert_same(gradients(again, lambda: loss_of(again(ids))), expected)
    offload.revert()
    by_path = planned(model, ids, budget=1.0, blocks=["layers.1"])
    assert by_path.steps == [(["layers.1"], "pointwise")]
    assert planned(model, ids, budget=1.0, blocks=[model.layers[1]]).steps == by_path.steps
    for kwargs, message in (
        ({"choices": ["everything"]}, "choices must be of"),
        ({"choices": []}, "choices must be of"),
        ({"scope": "all"}, "scope must be"),
        ({"blocks": ["nowhere"]}, "blocks must be modules"),
        ({"blocks": [nn.Linear(2, 2)]}, "blocks must be modules"),
        ({"on": "cuda"}, "the model is on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            planned(model, ids, budget=1.0, **kwargs)
    with pytest.raises(ValueError, match=r"found no nn\.ModuleList"):
        pyckpt.plan(nn.Linear(2, 2), torch.ones(1, 2), budget=1.0)
    for unserved in (model, make(sequential=True, depth=1)):  # a ModuleList, a block without another
        with pytest.raises(ValueError, match=r'"segment" needs blocks called by an nn\.Sequential'):
            planned(unserved, ids, budget=1.0, blocks=list(unserved.layers), choices=["segment"])
    shared = nn.Sequential(*[blocks(1)] * 2)
    with pytest.raises(ValueError, match="must call each block once"):
        pyckpt.plan(shared, torch.randn(8, 32), budget=1.0, blocks=["0"])


@pytest.mark.usefixtures("one_thread", "clock")
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_hugging_face(ids, name):
    """Tuples, keyword arguments, norms behind the residual sum: what one block leaves to the next is counted."""
    transformers = pytest.importorskip("transformers")
    common = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 50}
    if name == "bert":
        config = transformers.BertConfig(
            **common, intermediate_size=256, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0
        )
        model, kwargs = transformers.BertForMaskedLM(config), {}
    else:
        config = transformers.LlamaConfig(**common, intermediate_size=176, num_key_value_heads=2)
        model, kwargs = transformers.LlamaForCausalLM(config), {"use_cache": False}
    model = pyckpt.convert(model.train(), recompute=False)
    assert len(candidates(model)) == 4
    batch = {"input_ids": ids, "labels": ids, **kwargs}

    def run():
        torch.manual_seed(1)
        return gradients(model, lambda: model(**batch).loss)

    expected = run()
    for budget in (1.0, 0.6):
        plan = pyckpt.plan(model, **batch, budget=budget, rounds=1)
        plan.apply(model)
        assert_same(run(), expected)
        saved = memory.saved_bytes(lambda: model(**batch).loss)
        assert plan.predicted.saved == pytest.approx(saved, rel=0.05)
        plan.revert()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.usefixtures("one_thread")
def test_predicted_time(ids, monkeypatch):
    """By the processor's time, which other processes disturb little, and the median of ratios: a shared machine's speed may
    change by more than what is allowed between measuring for a plan and running it."""
    monkeypatch.setattr(time, "perf_counter_ns", time.process_time_ns)
    model = make(width=256)
    ids = torch.randint(50, (2, 256))
    step = lambda: loss_of(model(ids)).backward()  # noqa: E731

    for budget in (1.0, 0.4):
        ratios = []
        for _ in range(5):
            plan = planned(model, ids, budget=budget, rounds=3)
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            plan.apply(model)
            (taken,) = _measure.in_turn({"step": step}, 3, torch.device("cpu")).values()
            plan.revert()
            ratios.append(plan.predicted.milliseconds / (taken / 1e6))
        assert statistics.median(ratios) == pytest.approx(1, rel=0.1), ratios


def test_blocks_are_found():
    model = nn.ModuleDict(
        {
            "encoder": nn.ModuleList(blocks(3)),
            "mixed": nn.Sequential(nn.Linear(2, 2), nn.GELU()),
            "plain": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]),
            "deep": nn.Sequential(nn.Linear(2, 2), nn.Sequential(*blocks(2))),
        }
    )
    assert candidates(model) == ["encoder.0", "encoder.1", "encoder.2", "deep.1.0", "deep.1.1"]
