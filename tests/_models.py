"""Tiny random models of the libraries that conversion meets, and inputs for them."""

import torch

from bench import _architectures as architectures

TRANSFORMERS, IMAGE_MODELS = architectures.TRANSFORMERS, architectures.IMAGE_MODELS
TINY = architectures.Size(
    width=32, layers=2, heads=2, kv_heads=1, inner=48, gated_inner=48, vocabulary=40, words=7, pixels=16, patch=8,
    picture=64,
)  # fmt: skip


def trained(model, inputs):
    """In float64 and evaluation mode, with weights of norms other than 1 and biases other than 0."""
    for parameter in model.double().eval().parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model, {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def image_model(library, name):
    """The model, and keyword arguments to call it with."""
    return trained(*architectures.image_model(library, name, TINY))


def transformers_model(name, draw=0):
    """An AutoModel, and keyword arguments to call it with. Draws differ in what `trained` adds."""
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model, inputs, _ = architectures.transformers_model(name, TINY, **how)
    torch.manual_seed(draw)
    return trained(model, inputs)
