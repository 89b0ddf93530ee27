"""The callbacks for the Trainer of Hugging Face and for Lightning, and the levels under accelerate and LoRA: the same losses to
the last bit as without the engine."""

import copy

import pytest
import torch
from torch import nn

import pyckpt
from pyckpt._installation import installed
from pyckpt._records import watchers
from tests._engine import assert_same, blocks

pytestmark = pytest.mark.usefixtures("unlearned", "one_thread")


def losses_of(history):
    return [entry["loss"] for entry in history if "loss" in entry]


def bert(transformers, **kwargs):
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=50,
        max_position_embeddings=64, attention_probs_dropout_prob=0.0, **kwargs,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BertForMaskedLM(config)


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = torch.arange(index, index + 16) % 50
        return {"input_ids": ids, "labels": ids}


@pytest.fixture
def train(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def run(prepare, model=None, **options):
        """The trainer after three steps, `prepare` called before."""
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=4, logging_steps=1, report_to=[], save_strategy="no",
            use_cpu=True, seed=3, disable_tqdm=True, dataloader_pin_memory=False, **options,
        )  # fmt: skip
        trainer = transformers.Trainer(model or bert(transformers), arguments, train_dataset=Tokens())
        callback = prepare(trainer)
        trainer.train()
        return trainer, callback

    return run


def converted_only(trainer):
    pyckpt.convert(trainer.model, recompute=False)


def attached(policy="pointwise", **options):
    from pyckpt.integrations.trainer import attach

    return lambda trainer: attach(trainer, policy, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_checkpointing": True}, {"gradient_accumulation_steps": 2}, {"bf16": True}],
    ids=["plain", "gradient checkpointing", "accumulation", "bf16"],
)
def test_hugging_face_trainer(train, options):
    plain, _ = train(converted_only, **options)
    ours, callback = train(attached(), **options)
    assert losses_of(ours.state.log_history) == losses_of(plain.state.log_history)
    assert_same(list(ours.model.state_dict().values()), list(plain.model.state_dict().values()))
    entries = [entry for entry in ours.state.log_history if "loss" in entry]
    assert len(entries) == 3 and all(entry["pyckpt/recomputed"] > 0 for entry in entries)
    assert callback.monitor.total.recomputed == sum(entry["pyckpt/recomputed"] for entry in entries)
    assert pyckpt.report(ours.model).recompute


def test_callback_of_a_trainer(train, tmp_path):
    """Given as any other callback; loggers in front of which it is put get the values."""
    import transformers

    from pyckpt.integrations.trainer import RecomputeCallback, attach

    seen = []

    class Logger(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    ours, _ = train(lambda trainer: trainer.add_callback(RecomputeCallback("linear", keep=False)))
    assert not pyckpt.report(ours.model).swapped and not pyckpt.report(ours.model).recompute
    assert ours.state.log_history[0]["pyckpt/recomputed"] > 0

    def prepare(trainer):
        trainer.add_callback(Logger)
        return attach(trainer)

    train(prepare)
    assert seen[0]["pyckpt/recomputed"] > 0


@pytest.mark.parametrize("order", ["before", "after"])
def test_gradient_checkpointing_before_or_after_convert(order):
    transformers = pytest.importorskip("transformers")
    plain = pyckpt.convert(bert(transformers, hidden_dropout_prob=0.0), recompute=False).train()
    model = copy.deepcopy(plain)
    if order == "before":
        model.gradient_checkpointing_enable()
    pyckpt.convert(model)
    if order == "after":
        model.gradient_checkpointing_enable()
    batch = {name: t[None] for name, t in Tokens()[0].items()}
    for m in (plain, model):
        m(**batch).loss.backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_lora(train):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")

    def model():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=50
        )
        base = transformers.LlamaForCausalLM(config)
        return peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))

    plain, _ = train(converted_only, model())
    for policy in ("pointwise", "linear"):
        ours, callback = train(attached(policy), model())
        assert losses_of(ours.state.log_history) == losses_of(plain.state.log_history)
        assert callback.monitor.total.recomputed > 0


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")

    def run(on):
        torch.manual_seed(0)
        model = pyckpt.convert(nn.Sequential(blocks(2), nn.Linear(32, 1)), recompute=on)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        data = torch.utils.data.DataLoader(torch.randn(16, 32, generator=torch.Generator().manual_seed(0)), 4)
        model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
        for batch in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        return list(accelerator.unwrap_model(model).state_dict().values())

    expected = run(False)
    for policy in (True, "mlp", "linear"):
        assert_same(run(policy), expected)


@pytest.fixture
def fit(tmp_path):
    """Fits a LightningModule that trains the blocks `make()`, which `call(blocks, batch)` runs."""
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self, make, call):
            super().__init__()
            torch.manual_seed(0)
            self.model, self.call = make(), call

        def training_step(self, batch, index):
            return self.call(self.model, batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    def run(callbacks, prepare=lambda module: None, make=whole, call=nn.Module.__call__):
        lightning.seed_everything(0, verbose=False)
        module = Module(make, call)
        prepare(module)
        trainer = lightning.Trainer(
            max_steps=3, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks, log_every_n_steps=1,
            default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(torch.randn(12, 32), 4))
        return trainer, module

    return run


def whole():
    return nn.Sequential(blocks(2), nn.Linear(32, 1))


def test_lightning(fit):
    from pyckpt.integrations.lightning import RecomputeCallback

    _, plain = fit([], lambda module: pyckpt.convert(module.model, recompute=False))
    callback = RecomputeCallback("linear")
    trainer, ours = fit([callback])
    assert_same(list(ours.state_dict().values()), list(plain.state_dict().values()))
    assert callback.monitor.total.recomputed > 0 and pyckpt.report(ours.model).recompute
    assert trainer.logged_metrics["pyckpt/recomputed"] > 0
    _, undone = fit([RecomputeCallback(keep=False, monitor=False)])
    assert not pyckpt.report(undone.model).swapped


def test_lightning_with_blocks_in_containers(fit):
    """Regions are around what is called; a container is not."""
    from pyckpt.integrations.lightning import RecomputeCallback

    def make():
        return nn.ModuleDict({"body": nn.ModuleList(blocks(2)), "head": nn.Linear(32, 1)})

    def call(parts, x):
        for block in parts["body"]:
            x = block(x)
        return parts["head"](x)

    callback = RecomputeCallback()
    _, module = fit([callback], make=make, call=call)
    assert callback.monitor.total.recomputed > 0
    assert all(pyckpt.report(block).recompute for block in module.model["body"])
    assert installed(module.model) is None and installed(module.model["body"]) is None
    assert pyckpt.report(module.model).recompute
    _, undone = fit([RecomputeCallback(keep=False)], make=make, call=call)
    assert not any(pyckpt.report(block).recompute for block in undone.model["body"])
    assert not pyckpt.report(undone.model).swapped


@pytest.mark.parametrize("when", ["setup", "training"])
def test_lightning_passes_errors_on(fit, when):
    """Also those of other callbacks, before the monitor has started."""
    from lightning.pytorch import Callback

    from pyckpt.integrations.lightning import RecomputeCallback

    class Fails(Callback):
        def setup(self, trainer, pl_module, stage):
            if when == "setup":
                raise ZeroDivisionError

        def on_train_batch_start(self, *_):
            raise ZeroDivisionError

    callback = RecomputeCallback()
    with pytest.raises(ZeroDivisionError):
        fit([callback, Fails()])
    assert callback.monitor not in watchers
