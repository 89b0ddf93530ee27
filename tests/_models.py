"""Tiny random models of the libraries that conversion meets, and inputs for them."""

import functools

import torch

HIDDEN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
WORDS = {"vocab_size": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = HIDDEN | WORDS | {"num_key_value_heads": 1, "use_cache": False}
IMAGES = {"image_size": 16, "patch_size": 8}

# model type -> (configuration, kind of input)
TRANSFORMERS = {
    "bert": (HIDDEN | WORDS, "words"),
    "roberta": (HIDDEN | WORDS, "words"),
    "distilbert": (WORDS | {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48}, "words"),
    "modernbert": (HIDDEN | WORDS | {"cls_token_id": 1, "sep_token_id": 2}, "words"),
    "deberta-v2": (HIDDEN | WORDS | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, "words"),
    "gpt2": (WORDS | {"n_embd": 32, "n_layer": 2, "n_head": 2}, "words"),
    "gpt_neox": (HIDDEN | WORDS, "words"),
    "opt": (HIDDEN | WORDS | {"ffn_dim": 48, "word_embed_proj_dim": 32}, "words"),
    "falcon": (HIDDEN | WORDS, "words"),
    "llama": (GROUPED, "words"),
    "mistral": (GROUPED, "words"),
    "qwen3": (GROUPED | {"head_dim": 16}, "words"),
    "gemma3_text": (GROUPED | {"head_dim": 16}, "words"),
    "phi3": (GROUPED, "words"),
    "mixtral": (GROUPED | {"num_local_experts": 2}, "words"),
    "t5": (WORDS | {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}, "two sentences"),
    "whisper": (
        WORDS
        | {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
        | {"decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8}
        | {"max_source_positions": 10, "max_target_positions": 10, "decoder_start_token_id": 1},
        "sound",
    ),
    "clip": (
        {"text_config": HIDDEN | WORDS, "vision_config": HIDDEN | IMAGES, "projection_dim": 16},
        "words and image",
    ),
    "vit": (HIDDEN | IMAGES, "image"),
    "dinov2": (HIDDEN | IMAGES, "image"),
    "swin": (
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        },
        "image",
    ),
    "convnext": ({"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}, "image"),
    "segformer": (
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32]}
        | {"patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]},
        "image",
    ),
}

SWIN = {"embed_dim": 16, "depths": (1, 1), "num_heads": (2, 2), "num_classes": 5}

# name -> (constructor given the library, what conversion swaps by what it becomes, classes that it leaves)
TIMM = {
    "vit": (
        lambda timm: timm.create_model("test_vit"),
        {"Dropout": 26, "LayerNorm": 13, "GELU": 6},
        set(),
    ),
    "convnext": (
        lambda timm: timm.create_model("test_convnext"),
        {"ConvertedLayerNorm": 5, "LayerNorm": 9, "GELU": 9, "Dropout": 19},
        set(),
    ),
    "swin": (
        lambda timm: timm.models.SwinTransformer(img_size=64, window_size=4, **SWIN),
        {"LayerNorm": 7, "Dropout": 9, "Softmax": 2, "GELU": 2},
        {"DropPath"},
    ),
    "mixer": (
        lambda timm: timm.models.MlpMixer(img_size=64, embed_dim=32, num_blocks=2, num_classes=5),
        {"LayerNorm": 5, "GELU": 4, "Dropout": 9},
        set(),
    ),
    "efficientnet": (
        lambda timm: timm.create_model("test_efficientnet"),
        {"SiLU": 11},
        {"Sigmoid", "BatchNormAct2d"},
    ),
    "efficientnet_ln": (
        lambda timm: timm.create_model("test_efficientnet_ln"),
        {"SiLU": 11},
        {"Sigmoid", "LayerNormAct2d"},
    ),
    "resnet": (lambda timm: timm.create_model("test_resnet"), {"ReLU": 12}, {"BatchNorm2d"}),
}
SIZES = {"image_size": 64, "patch_size": 32, "num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 48}
TORCHVISION = {
    "vit": (
        lambda torchvision: torchvision.models.VisionTransformer(num_classes=5, **SIZES),
        {"Dropout": 7, "LayerNorm": 5, "GELU": 2},
        set(),
    ),
    "convnext": (
        lambda torchvision: torchvision.models.ConvNeXt(
            [torchvision.models.convnext.CNBlockConfig(*c, 1) for c in ((8, 16), (16, None))], num_classes=5
        ),
        {"ConvertedLayerNorm": 3, "LayerNorm": 2, "GELU": 2},
        set(),
    ),
    "swin": (
        lambda torchvision: torchvision.models.SwinTransformer(
            [4, 4], 16, [1, 1], [2, 2], [4, 4], stochastic_depth_prob=0.0, num_classes=5
        ),
        {"LayerNorm": 7, "GELU": 2, "Dropout": 4},
        set(),
    ),
    "resnet": (
        lambda torchvision: torchvision.models.ResNet(
            torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=5
        ),
        {"ReLU": 5},
        {"BatchNorm2d"},
    ),
}


def trained(model):
    """In float64 and evaluation mode, with weights of norms other than 1 and biases other than 0."""
    for parameter in model.double().eval().parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def images_model(library, make):
    """The model, and images for it."""
    torch.manual_seed(0)
    return trained(make(library)), torch.randn(2, 3, 64, 64, dtype=torch.float64)


def transformers_model(name):
    """An evaluation-mode AutoModel in float64, and keyword arguments to call it with."""
    import transformers

    settings, kind = TRANSFORMERS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **settings)
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = trained(transformers.AutoModel.from_config(config, **how))
    words = torch.randint(3, 40, (2, 7))
    image = functools.partial(torch.randn, 2, 3, 16, 16, dtype=torch.float64)
    return model, {
        "words": lambda: {"input_ids": words},
        "two sentences": lambda: {"input_ids": words, "decoder_input_ids": words},
        "sound": lambda: {
            "input_features": torch.randn(2, 8, 20, dtype=torch.float64), "decoder_input_ids": words
        },
        "words and image": lambda: {"input_ids": words, "pixel_values": image()},
        "image": lambda: {"pixel_values": image()},
    }[kind]()  # fmt: skip
