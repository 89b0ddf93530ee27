"""torch.nn.MultiheadAttention through :func:`pyckpt.functional.attention`; reached as :class:`pyckpt.nn.MultiheadAttention`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .ops.attention import attention, attention_with_weights


class MultiheadAttention(nn.MultiheadAttention):
    """:class:`torch.nn.MultiheadAttention` whose attention weights are never stored, with dropout too.

    With ``need_weights=True`` (torch's default) they are computed by a second pass and returned; pass False where they are not
    used. A query that may see no key gives the output projection's bias where torch gives NaN, and weights of zero.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if not all(isinstance(x, Tensor) and not x.is_nested for x in (query, key, value)):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
                raise AssertionError(
                    f"only bool and floating types of {name} are supported, got {mask.dtype}"
                )
        batched = F._mha_shape_check(  # type: ignore[attr-defined]
            query, key, value, key_padding_mask, attn_mask, self.num_heads
        )
        self._check(query, key, value)
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        batch_first = self.batch_first
        if not batched:
            same_key, same_value = key is query, value is key
            query = query.unsqueeze(0)
            key = query if same_key else key.unsqueeze(0)
            value = key if same_value else value.unsqueeze(0)
            batch_first = True
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        q, k, v = (self._heads(x, batch_first) for x in self._project(query, key, value))
        batch, _, queries, width = q.shape
        keys = k.shape[2]
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal or attn_mask is None else self._mask(attn_mask, batch, queries, keys)
        padding = None
        if key_padding_mask is not None:
            assert key_padding_mask.shape == (batch, keys), (
                f"expected key_padding_mask of shape (batch, keys) = {(batch, keys)}, got {tuple(key_padding_mask.shape)}"
            )
            padding = key_padding_mask[:, None, None]
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([x, b.view(1, self.num_heads, 1, -1).expand(batch, -1, -1, -1).to(x.dtype)], 2)
                for x, b in ((k, self.bias_k), (v, self.bias_v))
            )
        if self.add_zero_attn:
            k, v = (torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.shape[3])], 2) for x in (k, v))
        mask = self._merged(mask, padding, k.shape[2] - keys, q.dtype)
        dropout_p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            out, weights = attention_with_weights(q, k, v, mask, dropout_p, 1 / math.sqrt(width))
        else:
            out = attention(q, k, v, mask, dropout_p, causal)
        merged = out.transpose(1, 2).reshape(batch, queries, self.embed_dim)
        result = F.linear(merged, self.out_proj.weight, self.out_proj.bias)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return result.squeeze(0), None if weights is None else weights.squeeze(0)
        if not batch_first:
            # In memory too. Here rather than before the projection, which then keeps a view of the attention's output.
            result = result.transpose(0, 1).flatten(0, 1).unflatten(0, (queries, batch))
        return result, weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """What torch asserts."""
        width = query.shape[-1]
        assert width == self.embed_dim, (
            f"was expecting embedding dimension of {self.embed_dim}, but got {width}"
        )
        if self._qkv_same_embed_dim:
            assert key.shape == value.shape, f"key shape {key.shape} does not match value shape {value.shape}"
        else:
            assert key.shape[:-1] == value.shape[:-1], (
                f"key's sequence and batch dims {key.shape[:-1]} do not match value's {value.shape[:-1]}"
            )

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """One product where query, key and value are one tensor, or key and value are."""
        bias, width = self.in_proj_bias, self.embed_dim
        if not self._qkv_same_embed_dim:
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            projections = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            return [
                F.linear(x, w, b) for x, w, b in zip((query, key, value), projections, biases, strict=True)
            ]
        weight = self.in_proj_weight
        if query is key and key is value:
            return list(F.linear(query, weight, bias).chunk(3, -1))
        first, rest = (width, 2 * width)
        bias_q, bias_kv = (None, None) if bias is None else bias.split([first, rest])
        weight_q, weight_kv = weight.split([first, rest])
        q = F.linear(query, weight_q, bias_q)
        if key is value:
            return [q, *F.linear(key, weight_kv, bias_kv).chunk(2, -1)]
        halves = (None, None) if bias_kv is None else bias_kv.chunk(2)
        pairs = zip((key, value), weight_kv.chunk(2), halves, strict=True)
        return [q, *(F.linear(x, w, b) for x, w, b in pairs)]

    def _heads(self, x: Tensor, batch_first: bool) -> Tensor:
        """(batch, heads, length, width) of a projection, without a copy."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        return x.transpose(1, 2) if batch_first else x.permute(1, 2, 0, 3)

    def _mask(self, mask: Tensor, batch: int, queries: int, keys: int) -> Tensor:
        """(batch, heads, queries, keys), or a 1 for the first two."""
        shape = (queries, keys) if mask.dim() == 2 else (batch * self.num_heads, queries, keys)
        if mask.shape != shape:
            raise RuntimeError(
                f"The shape of the {mask.dim()}D attn_mask is {mask.shape}, but should be {shape}."
            )
        return mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (batch, self.num_heads))

    @staticmethod
    def _merged(mask: Tensor | None, padding: Tensor | None, added: int, dtype: torch.dtype) -> Tensor | None:
        """One mask of the two (True = ignore, or additive) as :func:`attention` takes it (True = keep), and `added` more keys."""
        given = [m for m in (mask, padding) if m is not None]
        if not given:
            return None
        if all(m.dtype == torch.bool for m in given):
            merged = ~(given[0] if len(given) == 1 else given[0] | given[1])
            return F.pad(merged, (0, added), value=True) if added else merged
        additive = [
            torch.zeros_like(m, dtype=dtype).masked_fill(m, -math.inf)
            if m.dtype == torch.bool
            else m.to(torch.promote_types(m.dtype, dtype) if m.dtype == torch.float32 else dtype)
            for m in given
        ]
        merged = additive[0] if len(additive) == 1 else additive[0] + additive[1]
        return F.pad(merged, (0, added)) if added else merged
