"""Random models of transformers, timm and torchvision, of the real architectures at any size, and inputs for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["IMAGE_MODELS", "TRANSFORMERS", "Size", "image_model", "transformers_model"]


@dataclass(frozen=True)
class Size:
    """Of a model and its input.

    Attributes:
        width: features of a token; models whose resolution falls start with a quarter of it.
        layers: blocks of a transformer (of each tower, where it has two); models whose resolution falls have two in any case.
        heads, kv_heads: of attention.
        inner, gated_inner: features inside an MLP, without and with a gate.
        vocabulary, words, batch: words are those of one sentence.
        pixels, patch: sides of the images of transformers' models and of their patches.
        picture: side of the images of timm's and torchvision's.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    gated_inner: int
    vocabulary: int
    words: int
    pixels: int
    patch: int
    picture: int
    batch: int = 2

    @property
    def patches(self) -> int:
        return (self.pixels // self.patch) ** 2


# What forward is given -> how many layers of `width` features a token run in all, times their tokens; None where resolution and
# width change on the way.
INPUTS: dict[str, Callable[[Size], int | None]] = {
    "words": lambda s: s.layers * s.words,
    "two sentences": lambda s: 2 * s.layers * s.words,
    "sound": lambda s: 2 * s.layers * s.words,
    "words and image": lambda s: s.layers * (s.words + s.patches + 1),
    "image": lambda s: s.layers * (s.patches + 1),
    "image, in stages": lambda s: None,
}


def _transformers(s: Size) -> dict[str, tuple[dict[str, Any], str]]:
    """Model type -> (configuration, kind of input)."""
    hidden = {"hidden_size": s.width, "num_hidden_layers": s.layers, "num_attention_heads": s.heads}
    words = {"vocab_size": s.vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    words |= {"use_cache": False}
    plain, images = (
        hidden | {"intermediate_size": s.inner},
        {"image_size": s.pixels, "patch_size": s.patch},
    )
    gated = hidden | words | {"intermediate_size": s.gated_inner, "num_key_value_heads": s.kv_heads}
    head = {"head_dim": s.width // s.heads}
    stem, narrow = s.patch // 4, (s.width // 4, s.width // 2)
    return {
        "bert": (plain | words, "words"),
        "roberta": (plain | words, "words"),
        "distilbert": (
            words | {"dim": s.width, "n_layers": s.layers, "n_heads": s.heads, "hidden_dim": s.inner},
            "words",
        ),
        "modernbert": (
            hidden | words | {"intermediate_size": s.gated_inner, "cls_token_id": 1, "sep_token_id": 2},
            "words",
        ),
        "deberta-v2": (plain | words | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, "words"),
        "gpt2": (words | {"n_embd": s.width, "n_layer": s.layers, "n_head": s.heads}, "words"),
        "gpt_neox": (plain | words, "words"),
        "opt": (hidden | words | {"ffn_dim": s.inner, "word_embed_proj_dim": s.width}, "words"),
        # As the 40B and 180B models: one key and value for all heads (7B) is another path of attention in each version of torch.
        "falcon": (
            hidden | words | {"new_decoder_architecture": True, "num_kv_heads": s.kv_heads},
            "words",
        ),
        "llama": (gated, "words"),
        "mistral": (gated, "words"),
        "qwen3": (gated | head, "words"),
        "gemma3_text": (gated | head, "words"),
        "phi3": (gated, "words"),
        "mixtral": (gated | {"num_local_experts": 2}, "words"),
        "t5": (
            words
            | {"d_model": s.width, "d_kv": s.width // s.heads, "d_ff": s.inner}
            | {"num_layers": s.layers, "num_heads": s.heads},
            "two sentences",
        ),
        "whisper": (
            words
            | {"d_model": s.width, "encoder_layers": s.layers, "decoder_layers": s.layers}
            | {"encoder_attention_heads": s.heads, "decoder_attention_heads": s.heads, "num_mel_bins": 8}
            | {"encoder_ffn_dim": s.inner, "decoder_ffn_dim": s.inner, "decoder_start_token_id": 1}
            | {"max_source_positions": s.words, "max_target_positions": s.words},
            "sound",
        ),
        "clip": (
            {"text_config": plain | words | {"max_position_embeddings": s.words}}
            | {"vision_config": plain | images, "projection_dim": s.width},
            "words and image",
        ),
        "vit": (plain | images, "image"),
        "dinov2": (plain | images, "image"),
        "swin": (
            {"image_size": s.pixels, "patch_size": stem, "embed_dim": s.width // 4, "depths": [1, 1]}
            | {"num_heads": [2, 2], "window_size": 4},
            "image, in stages",
        ),
        "convnext": (
            {"hidden_sizes": list(narrow), "depths": [1, 1], "num_stages": 2, "patch_size": stem},
            "image, in stages",
        ),
        "segformer": (
            {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": list(narrow)}
            | {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]},
            "image, in stages",
        ),
    }


#: Names of transformers' model types.
TRANSFORMERS = tuple(_transformers(Size(32, 2, 2, 1, 48, 48, 40, 7, 16, 8, 64)))


def _torchvision_vit(torchvision: Any, s: Size) -> nn.Module:
    sizes = {"image_size": s.picture, "patch_size": 32, "num_layers": s.layers, "num_heads": s.heads}
    return torchvision.models.VisionTransformer(**sizes, hidden_dim=s.width, mlp_dim=s.inner, num_classes=5)


def _torchvision_convnext(torchvision: Any, s: Size) -> nn.Module:
    stages = ((s.width // 4, s.width // 2), (s.width // 2, None))
    config = torchvision.models.convnext.CNBlockConfig
    return torchvision.models.ConvNeXt([config(*stage, 1) for stage in stages], num_classes=5)


# library -> name -> its model, given the library
IMAGE_MODELS: dict[str, dict[str, Callable[[Any, Size], nn.Module]]] = {
    "timm": {
        "vit": lambda timm, s: timm.create_model("test_vit"),
        "convnext": lambda timm, s: timm.create_model("test_convnext"),
        "swin": lambda timm, s: timm.models.SwinTransformer(
            img_size=s.picture, window_size=4, embed_dim=s.width // 2, depths=(1, 1), num_heads=(2, 2), num_classes=5
        ),
        "mixer": lambda timm, s: timm.models.MlpMixer(
            img_size=s.picture, embed_dim=s.width, num_blocks=s.layers, num_classes=5
        ),
        "efficientnet": lambda timm, s: timm.create_model("test_efficientnet"),
        "efficientnet_ln": lambda timm, s: timm.create_model("test_efficientnet_ln"),
        "resnet": lambda timm, s: timm.create_model("test_resnet"),
    },
    "torchvision": {
        "vit": _torchvision_vit,
        "convnext": _torchvision_convnext,
        "swin": lambda torchvision, s: torchvision.models.SwinTransformer(
            [4, 4], s.width // 2, [1, 1], [2, 2], [4, 4], stochastic_depth_prob=0.0, num_classes=5
        ),
        "resnet": lambda torchvision, s: torchvision.models.ResNet(
            torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=5
        ),
    },
}  # fmt: skip


def image_model(library: str, name: str, size: Size) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model of timm or torchvision, and keyword arguments to call it with. The same at each call.

    Raises:
        ImportError: the library does not import (torchvision fits one version of torch only).
    """
    module = importlib.import_module(library)
    torch.manual_seed(0)
    model = IMAGE_MODELS[library][name](module, size)
    return model, {"x": torch.randn(size.batch, 3, size.picture, size.picture)}


def transformers_model(
    name: str, size: Size, *, dropout: bool = True, **options: Any
) -> tuple[nn.Module, dict[str, torch.Tensor], int | None]:
    """An AutoModel, keyword arguments to call it with, and its tokens x layers (see INPUTS). The same at each call.

    Args:
        name: one of TRANSFORMERS.
        size: of the model and the input.
        dropout: False: every probability of dropout in the configuration is set to 0.
        options: of ``AutoModel.from_config``.

    Raises:
        ImportError: transformers does not import.
    """
    import transformers

    settings, kind = _transformers(size)[name]
    config = transformers.AutoConfig.for_model(name, **settings)
    if not dropout:
        _no_dropout(config)
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, **options)
    words = torch.randint(3, size.vocabulary, (size.batch, size.words))
    sides = size.batch, 3, size.pixels, size.pixels
    inputs = {
        "words": lambda: {"input_ids": words},
        "two sentences": lambda: {"input_ids": words, "decoder_input_ids": words},
        "sound": lambda: {
            "input_features": torch.randn(size.batch, 8, 2 * size.words), "decoder_input_ids": words
        },
        "words and image": lambda: {"input_ids": words, "pixel_values": torch.randn(sides)},
        "image": lambda: {"pixel_values": torch.randn(sides)},
        "image, in stages": lambda: {"pixel_values": torch.randn(sides)},
    }[kind]()  # fmt: skip
    return model, inputs, INPUTS[kind](size)


def _no_dropout(config: Any) -> None:
    for key, value in vars(config).items():
        if isinstance(value, float) and any(part in key for part in ("drop", "pdrop")):
            setattr(config, key, 0.0)
        elif hasattr(value, "to_dict"):
            _no_dropout(value)
