"""What attention's arguments may be, and what it says of others."""

import fractions

import numpy as np
import pytest
import torch

import pyckpt.functional as F
from tests import _attention as attention


@pytest.mark.parametrize(
    ("error", "match", "change"),
    [
        (ValueError, "dropout_p", {"dropout_p": 1.5}),
        (ValueError, "softcap", {"softcap": -1.0}),
        (ValueError, "causal_alignment", {"causal_alignment": "middle"}),
        (ValueError, "window", {"window": (-2, 0)}),
        (TypeError, "window", {"window": (1, 2, 3)}),
        (TypeError, "scale", {"scale": "0.5"}),
        (TypeError, "scale", {"scale": torch.tensor([0.5])}),
        (TypeError, "scale", {"scale": torch.tensor(0.5, requires_grad=True)}),
        (TypeError, "dropout_p", {"dropout_p": None}),
        (TypeError, "is_causal", {"is_causal": 1}),
        (TypeError, "is_causal", {"is_causal": torch.tensor(True)}),
        (TypeError, "enable_gqa", {"enable_gqa": None}),
        (IndexError, "enable_gqa", {"query": torch.zeros(3, 8), "enable_gqa": True}),
        (RuntimeError, "attn_mask of shape .*broadcast", {"attn_mask": torch.ones(7, dtype=torch.bool)}),
        (RuntimeError, "attn_mask .*boolean", {"attn_mask": torch.ones(3, 5, dtype=torch.int64)}),
        (RuntimeError, "key of shape .*dtype of query", {"key": torch.zeros(2, 4, 5, 8, dtype=torch.float64)}),
        (RuntimeError, "key of shape .*width", {"key": torch.zeros(2, 4, 5, 6)}),
        (RuntimeError, "value of shape .*as many keys", {"value": torch.zeros(2, 4, 6, 8)}),
        (RuntimeError, "enable_gqa", {"key": torch.zeros(2, 2, 5, 8), "value": torch.zeros(2, 2, 5, 8)}),
        (RuntimeError, "multiple", {"key": torch.zeros(2, 3, 5, 8), "value": torch.zeros(2, 3, 5, 8), "enable_gqa": True}),
        (RuntimeError, "alibi_slopes", {"alibi_slopes": torch.zeros(3)}),
        (RuntimeError, "alibi_slopes of shape .*batch, heads", {"alibi_slopes": torch.zeros(3, 4)}),
        (RuntimeError, "no gradient", {"alibi_slopes": torch.zeros(4, requires_grad=True)}),
        (TypeError, "cu_seqlens", {"cu_seqlens": torch.zeros(2)}),
        (RuntimeError, "begin with 0", {"cu_seqlens": torch.tensor([1, 3])}),
        (RuntimeError, "never fall", {"cu_seqlens": torch.tensor([0, 3, 2])}),
        (RuntimeError, "end at 3", {"cu_seqlens": torch.tensor([0, 4])}),
        (RuntimeError, "end at 5", {"cu_seqlens": (torch.tensor([0, 3]), torch.tensor([0, 6]))}),
        (RuntimeError, "same sequences", {"cu_seqlens": (torch.tensor([0, 1, 2, 3]), torch.tensor([0, 2, 3]))}),
        (RuntimeError, "together", {"cu_seqlens": (torch.tensor([0, 3]), None)}),
        (RuntimeError, "together", {"cu_seqlens": (None, torch.tensor([0, 3]))}),
        (TypeError, "cu_seqlens .*pair", {"cu_seqlens": (torch.tensor([0, 3]),) * 3}),
        (TypeError, "cu_seqlens .*pair", {"cu_seqlens": [torch.tensor([0, 3])]}),
        (TypeError, "cu_seqlens .*int32", {"cu_seqlens": [0, 3]}),
    ],
)  # fmt: skip
def test_misuse(error, match, change, backend):
    arguments = {
        "query": torch.zeros(2, 4, 3, 8),
        "key": torch.zeros(2, 4, 5, 8),
        "value": torch.zeros(2, 4, 5, 8),
    }
    with pytest.raises(error, match=match):
        F.attention(**arguments | change)


@pytest.mark.parametrize("grouped", [False, True])
def test_no_heads(grouped, backend):
    q = torch.randn(2, 0, 3, 4, requires_grad=True)
    out = F.attention(q, q, q, enable_gqa=grouped)
    assert out.shape == q.shape and torch.autograd.grad(out.sum(), q)[0].shape == q.shape


@pytest.mark.parametrize(
    "make", [torch.tensor, np.float32, np.float64, fractions.Fraction], ids=lambda make: make.__name__
)
def test_numbers_that_are_no_floats(make, backend):
    """What torch takes for one; a Fraction too."""
    q, k, v, _ = attention.make((1, 2, 2, 3, 4, 4, 4), torch.float32)
    expected = F.attention(q, k, v, dropout_p=0.5, scale=0.25, softcap=2.0)
    torch.manual_seed(0)
    q, k, v, _ = attention.make((1, 2, 2, 3, 4, 4, 4), torch.float32)
    assert torch.equal(
        F.attention(q, k, v, dropout_p=make(0.5), scale=make(0.25), softcap=make(2.0)), expected
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(2, 4, 9, 21), (2, 4, 9, 1), (1, 1, 1, 21)], ids=str)
def test_a_float32_bias_is_not_rounded(sizes, dtype, backend, one_thread):
    """Adding 1000 to all of it changes nothing then; 1000 of the operands' dtype would hold nothing else. Its gradient has its
    dtype."""
    q, k, v, grad = attention.make((2, 4, 2, 9, 21, 16, 16), dtype)
    bias = torch.randn(sizes)
    results = []
    for shift in (0, 1000):
        leaf = (bias + shift).requires_grad_()
        out = F.attention(q, k, v, leaf, enable_gqa=True)
        results.append((out, *torch.autograd.grad(out, leaf, grad)))
    (expected, expected_dbias), (out, dbias) = results
    assert out.dtype == dtype and dbias.dtype == torch.float32 and dbias.shape == bias.shape
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, rtol=eps, atol=eps)
    scale = (grad.float() @ v.float().repeat_interleave(2, 1).mT).abs().max().item()
    torch.testing.assert_close(dbias, expected_dbias, rtol=eps, atol=eps * scale)
