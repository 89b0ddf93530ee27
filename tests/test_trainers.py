"""Training loops of other libraries around converted models: the same losses and weights with the engine as without."""

import contextlib

import pytest
import torch
from torch import nn

import pyckpt
from pyckpt import engine

transformers = pytest.importorskip("transformers")

STEPS = 4
ROWS, TOKENS, VOCABULARY = 4, 48, 96


def make_model(name="gpt2", **options):
    torch.manual_seed(0)
    common = {"vocab_size": VOCABULARY, **options}
    config = {
        "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=3, n_head=2, n_positions=TOKENS, **common),
        "llama": lambda: transformers.LlamaConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2, **common
        ),
    }[name]()
    config.use_cache = False
    return transformers.AutoModelForCausalLM.from_config(config)


def rows(count=STEPS * ROWS * 2):
    ids = torch.randint(VOCABULARY, (count, TOKENS), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


@contextlib.contextmanager
def counted():
    """The number of tensors that regions rebuild, as a list of one number."""
    total = [0]
    original = engine.leave

    def leave(owner, failed=False):
        region = next((r for key, r in reversed(engine.regions.stack) if key is owner), None)
        original(owner, failed)
        total[0] += region.rebuilt if region is not None else 0

    from pyckpt import _installation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_installation, "leave", leave)
        yield total


def hf_trainer(model, directory, **options):
    arguments = transformers.TrainingArguments(
        output_dir=str(directory),
        per_device_train_batch_size=ROWS,
        max_steps=STEPS,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        seed=3,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{"save_strategy": "no", **options},
    )
    return transformers.Trainer(model=model, args=arguments, train_dataset=rows())


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def same(runs):
    (first, weights), *others = runs
    for losses_of, weights_of in others:
        assert losses_of == first
        assert all(torch.equal(a, b) for a, b in zip(weights, weights_of, strict=True))


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ],
    ids=lambda o: "-".join(o) or "plain",
)
def test_hugging_face_trainer(name, options, tmp_path):
    pytest.importorskip("accelerate")
    runs = []
    for on in (False, True):
        model = pyckpt.convert(make_model(name), recompute=on)
        trainer = hf_trainer(model, tmp_path, **options)
        with counted() as rebuilt:
            trainer.train()
        assert bool(rebuilt[0]) is on
        assert len(losses(trainer)) == STEPS
        runs.append((losses(trainer), weights_of(model)))
    same(runs)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("before", [True, False])
def test_gradient_checkpointing_enabled_before_or_after_conversion(before, use_reentrant, tmp_path):
    pytest.importorskip("accelerate")
    runs = []
    for recompute in (False, True):
        model = make_model()
        enable = lambda m=model: m.gradient_checkpointing_enable({"use_reentrant": use_reentrant})  # noqa: E731
        if before:
            enable()
        pyckpt.convert(model, recompute=recompute)
        if not before:
            enable()
        assert model.is_gradient_checkpointing
        trainer = hf_trainer(model, tmp_path)
        trainer.train()
        runs.append((losses(trainer), weights_of(model)))
    same(runs)


def test_checkpoints_of_the_trainer_resume_in_either_form(tmp_path):
    pytest.importorskip("accelerate")
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # whose masks are not torch's
    trainer = hf_trainer(
        pyckpt.convert(make_model(**no_dropout)), tmp_path, save_strategy="steps", save_steps=2
    )
    trainer.train()
    whole = losses(trainer)
    for convert in (True, False):
        model = make_model(**no_dropout)
        if convert:
            pyckpt.convert(model)
        again = hf_trainer(model, tmp_path / "again")
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        resumed = losses(again)[-2:]
        if convert:
            assert resumed == whole[-2:]
        else:  # other kernels
            torch.testing.assert_close(torch.tensor(resumed), torch.tensor(whole[-2:]), rtol=1e-4, atol=0)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), trainer.model.parameters(), strict=True))


def test_accelerate(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    runs = []
    for on in (False, True):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
        model = pyckpt.convert(make_model(), recompute=on)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(rows(), batch_size=ROWS)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        history = []
        torch.manual_seed(5)
        with counted() as rebuilt:
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                history.append(loss.item())
        assert bool(rebuilt[0]) is on
        runs.append((history, weights_of(accelerator.unwrap_model(model))))
    same(runs)


def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, on):
            super().__init__()
            self.model = pyckpt.convert(make_model(), recompute=on)
            self.history = []

        def training_step(self, batch, index):
            loss = self.model(**batch).loss
            self.history.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    runs = []
    for on in (False, True):
        module = Module(on)
        trainer = lightning.Trainer(
            max_steps=STEPS,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accumulate_grad_batches=2,
            default_root_dir=tmp_path,
        )
        torch.manual_seed(5)
        with counted() as rebuilt:
            trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=ROWS))
        assert bool(rebuilt[0]) is on
        runs.append((module.history, weights_of(module)))
    same(runs)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_lora(name, before):
    """Frozen weights are neither saved for their own sake nor changed; adapters train as without the engine."""
    peft = pytest.importorskip("peft")
    targets = {"gpt2": ["c_attn", "c_fc", "c_proj"], "llama": ["q_proj", "v_proj", "up_proj", "down_proj"]}[
        name
    ]
    adapt = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.1, task_type="CAUSAL_LM")
    runs = []
    for on in (False, True):
        model = make_model(name)
        if before:
            pyckpt.convert(model, recompute=on)
        torch.manual_seed(2)
        model = peft.get_peft_model(model, adapt)
        if not before:
            pyckpt.convert(model, recompute=on)
        runs.append(adapters_trained(model, on))
    same(runs)


def adapters_trained(model, on):
    """The losses and the weights, after frozen ones were found to be what they were."""
    frozen = [p.clone() for p in model.parameters() if not p.requires_grad]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    history = []
    torch.manual_seed(5)
    with counted() as rebuilt:
        for batch in torch.utils.data.DataLoader(rows(), batch_size=ROWS):
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
    assert bool(rebuilt[0]) is on
    assert history[-1] != history[0]
    same([([], frozen), ([], [p for p in model.parameters() if not p.requires_grad])])
    return history, weights_of(model)


def test_qlora():
    """LoRA over bitsandbytes' 4-bit layers: what their Function saves is left alone, and nothing of a weight is kept unpacked."""
    peft, bnb = pytest.importorskip("peft"), pytest.importorskip("bitsandbytes")
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    adapt = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.1, task_type="CAUSAL_LM")
    runs, kept = [], []
    batch = next(iter(torch.utils.data.DataLoader(rows(), batch_size=ROWS)))
    for on in (False, True):
        model = make_model("llama")
        for path, linear in [(n, m) for n, m in model.named_modules() if n.endswith(tuple(targets))]:
            packed = bnb.nn.Linear4bit(
                linear.in_features,
                linear.out_features,
                bias=False,
                compute_dtype=torch.float32,
                quant_type="nf4",
            )
            packed.load_state_dict({"weight": linear.weight.detach()})
            model.set_submodule(path, packed.to("cpu"))
        model.is_loaded_in_4bit = True  # as from_pretrained with a BitsAndBytesConfig sets it
        torch.manual_seed(2)
        model = pyckpt.convert(peft.get_peft_model(model, adapt), recompute=on)
        runs.append(adapters_trained(model, on))
        kept.append(pyckpt.memory.saved_bytes(lambda model=model: model(**batch).loss))
    same(runs)
    assert kept[1] < 0.75 * kept[0], kept


def test_linear_probing_keeps_nothing_of_the_frozen_body():
    model = pyckpt.convert(
        nn.Sequential(*(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    )
    model.requires_grad_(False)
    head = nn.Linear(64, 8)
    x = torch.randn(512, 64)

    def forward():
        return head(model(x)).square().mean()

    # The head's input, and what the loss keeps: the head's output.
    assert pyckpt.memory.saved_bytes(forward, warmup=1) < x.nbytes + 2 * 512 * 8 * 4 + 4096
