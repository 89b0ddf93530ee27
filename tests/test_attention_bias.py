"""The gradient of an additive mask, summed inside the C++ pass along whatever the mask is broadcast over."""

import itertools

import pytest
import torch

from pyckpt import backends
from pyckpt.ops import _attention_blocks
from tests import _attention as attention
from tests._attention import Feature

PATTERNS = list(
    itertools.product((False, True), repeat=4)
)  # of the batch, heads, queries and keys: which is 1


def _feature(q, k, pattern, options, dtype):
    generator = torch.Generator().manual_seed(0)
    sizes = [1 if one else n for n, one in zip((*q.shape[:3], k.shape[2]), pattern, strict=True)]
    mask = torch.randn(sizes, generator=generator).to(dtype)
    keep = None
    if not pattern[3]:
        mask[..., ::5] = -torch.inf
        keep = mask != -torch.inf
    if options.get("is_causal"):
        causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        keep = causal if keep is None else keep & causal
    return Feature(options, mask=mask.requires_grad_(), keep=keep, add=mask.detach().double())


@pytest.mark.parametrize("score_bytes", [2048, 2**21])
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: "".join("n1"[one] for one in p))
def test_every_broadcast(pattern, score_bytes, native, monkeypatch):
    """As near to the truth as eager is, whatever a block holds: parts of a head, several heads, several batch entries. The same
    bits with any number of threads."""
    monkeypatch.setattr(_attention_blocks, "SCORE_BYTES", score_bytes)
    monkeypatch.setattr(_attention_blocks, "SIDE_BY_SIDE", 0)
    threads = torch.get_num_threads()
    for options in ({}, {"is_causal": True, "softcap": 3.0}, {"dropout_p": 0.2}):
        for dtype, of_mask in (
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.float32),
            (torch.float64, torch.float64),
        ):
            tensors = attention.make((3, 4, 2, 33, 31, 16, 16), dtype)
            feature = _feature(*tensors[:2], pattern, options, of_mask)
            results = []
            with backends.use("cpu"):
                for count in (1, 3):
                    torch.set_num_threads(count)
                    results.append(attention.ours(*tensors, feature))
                torch.set_num_threads(threads)
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), (options, dtype)
            dmask, exact = (
                results[0][4],
                torch.from_numpy(attention.exact(*tensors, feature)[4].astype("float64")),
            )
            assert dmask.shape == exact.shape and dmask.dtype == of_mask
            # What is summed, without its signs: sums along keys cancel.
            scale = tensors[3].double().abs().max() * tensors[2].double().abs().max() * 16
            size = 3 * 4 * 33 * 31 / exact.numel()
            error = torch.finfo(dtype).eps * float(scale) * max(1.0, size**0.5)
            torch.testing.assert_close(dmask.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=error)
