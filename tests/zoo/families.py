"""`MODELS`: small models of timm, torchvision and transformers by name, each with its inputs.

The packages are imported where a model of theirs is made or listed.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 2
WORDS = 12

# Of one rank in one step: positional arguments and keywords of the model's forward.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Model:
    """How to make a model, and what its forward takes; both draw from torch's generator."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    learning_rate: float = 1e-2


def images(size: int = 64, channels: int = 3) -> Inputs:
    return (torch.rand(ROWS, channels, size, size),), {}


# ---------------------------------------------------------------- timm


def _timm() -> dict[str, Model]:
    import timm

    def make(name: str) -> nn.Module:
        return timm.create_model(name, num_classes=10)

    large, names = functools.partial(images, 160), timm.list_models("test_*")
    found = {f"timm/{name}": Model(functools.partial(make, name), large) for name in names}
    small = {"img_size": 56, "embed_dim": 48, "depth": 2, "num_classes": 10}
    eva = functools.partial(timm.create_model, "eva02_tiny_patch14_336", **small)
    return {**found, "timm/eva02": Model(eva, functools.partial(images, 56))}


# ---------------------------------------------------------------- torchvision

CLASSIFICATION = (
    *("convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "mnasnet0_5"),
    *("mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18"),
    *("resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "swin_v2_t"),
)
SEGMENTATION = ("deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large")
VIDEO = ("mc3_18", "r2plus1d_18", "r3d_18")
DETECTION = (
    *("fasterrcnn_mobilenet_v3_large_320_fpn", "fcos_resnet50_fpn", "keypointrcnn_resnet50_fpn"),
    *("maskrcnn_resnet50_fpn", "retinanet_resnet50_fpn", "ssd300_vgg16"),
    "ssdlite320_mobilenet_v3_large",
)


def _torchvision() -> dict[str, Model]:
    import torchvision

    vision = torchvision.models

    def make(name: str, **keywords: Any) -> nn.Module:
        return vision.get_model(name, weights=None, weights_backbone=None, **keywords)

    def classifier(name: str, **keywords: Any) -> nn.Module:
        return vision.get_model(name, weights=None, num_classes=10, **keywords)

    found = {name: Model(functools.partial(classifier, name), images) for name in CLASSIFICATION}
    for name, has_aux in (("googlenet", True), ("inception_v3", False)):
        made = functools.partial(classifier, name, aux_logits=has_aux, init_weights=True)
        found[name] = Model(made, functools.partial(images, 96))
    found["alexnet"] = Model(functools.partial(_narrow, vision.AlexNet, dropout=0.0), images)
    found["vgg11_bn"] = Model(functools.partial(_vgg, vision), images)
    small = {"num_layers": 2, "num_heads": 2, "hidden_dim": 32, "mlp_dim": 64, "num_classes": 10}
    vit = functools.partial(vision.VisionTransformer, image_size=64, patch_size=16, **small)
    blocks = {"stem_channels": 16, "block_channels": [16, 32], "block_layers": [1, 1]}
    heads = {"head_dim": 8, "num_classes": 10, "stochastic_depth_prob": 0.0, "partition_size": 2}
    maxvit = functools.partial(vision.MaxVit, input_size=(64, 64), **blocks, **heads)
    found |= {"vit": Model(vit, images), "maxvit": Model(maxvit, images)}
    for name in SEGMENTATION:
        found[name] = Model(functools.partial(make, name, num_classes=5), images)
    for name in VIDEO:
        found[name] = Model(functools.partial(classifier, name), _clip)
    found["raft_small"] = Model(functools.partial(make_flow, vision), _pairs)
    for name in DETECTION:
        own: dict[str, int] = {"num_keypoints": 3} if name.startswith("keypoint") else {}
        if "resnet50" in name:
            own |= {"min_size": 96, "max_size": 128}  # to which it resizes
        made = functools.partial(make, name, num_classes=4, **own)
        # The losses of these are large at first, and would soon be NaN.
        learning_rate = 1e-5 if name.startswith(("keypoint", "mask", "ssd300")) else 1e-2
        found[name] = Model(made, functools.partial(_boxes, name), learning_rate)
    return {f"torchvision/{name}": model for name, model in found.items()}


def _narrow(kind: Any, **keywords: Any) -> nn.Module:
    """A model whose wide layers, which hold nearly all of it, are narrow."""
    model = kind(num_classes=10, **keywords)
    last = model.features(torch.zeros(1, 3, 64, 64)).shape[1]
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Sequential(nn.Linear(last, 32), nn.ReLU(), nn.Linear(32, 10))
    return model


def _vgg(vision: Any) -> nn.Module:
    return _narrow(lambda **_: vision.vgg11_bn(weights=None))


def make_flow(vision: Any) -> nn.Module:
    return vision.optical_flow.raft_small(weights=None)


def _pairs() -> Inputs:
    first = torch.rand(ROWS, 3, 128, 128) * 2 - 1
    return (first, first.roll(2, -1)), {"num_flow_updates": 2}


def _clip() -> Inputs:
    return (torch.rand(ROWS, 3, 4, 32, 32),), {}


def _boxes(name: str) -> Inputs:
    pictures = [torch.rand(3, 96, 96) for _ in range(ROWS)]
    targets: list[dict[str, Tensor]] = []
    for _ in pictures:
        corner = torch.rand(2, 2) * 30 + 5
        target = {"boxes": torch.cat([corner, corner + 30], 1), "labels": torch.randint(1, 4, (2,))}
        if name.startswith("mask"):
            target["masks"] = torch.randint(0, 2, (2, 96, 96), dtype=torch.uint8)
        if name.startswith("keypoint"):
            target["labels"] = torch.ones(2, dtype=torch.int64)
            places = corner[:, None].expand(2, 3, 2)
            target["keypoints"] = torch.cat([places, torch.ones(2, 3, 1)], 2)
        targets.append(target)
    return (pictures, targets), {}


# ---------------------------------------------------------------- transformers

# Sizes of configurations, under all the names that they have; those that one has are set.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "d_embed"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), 64),
    **dict.fromkeys(("decoder_intermediate_size", "max_target_positions"), 64),
    **dict.fromkeys(("max_encoder_position_embeddings", "max_decoder_position_embeddings"), 64),
    **dict.fromkeys(("embedding_size", "decoder_hidden_size", "image_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    "decoder_num_attention_heads": 4,
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
    "patch_size": 8,
    "max_source_positions": 20,
}
HEADS = {"num_key_value_heads": 2, "head_dim": 8}
SPEECH = {
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "layerdrop": 0.0,
    "mask_time_length": 2,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 32, **HEADS}

WITH_HEADS = "Llama Mistral Qwen2 Qwen3 Gemma Gemma2 Phi Phi3 StableLm Olmo2 Cohere Granite"
DECODERS_AS_USUAL = "GPTNeoX Bloom Falcon"
WITH_EXPERTS = "Mixtral Qwen3Moe Olmoe GptOss"
ENCODERS_AS_USUAL = "Bert Electra Albert DistilBert MPNet ModernBert FNet SqueezeBert"

# By model class: what else its configuration says. The class of the configuration has its name.
DECODERS: dict[str, dict[str, Any]] = {
    **{f"{name}ForCausalLM": HEADS for name in WITH_HEADS.split()},
    **{f"{name}ForCausalLM": {} for name in DECODERS_AS_USUAL.split()},
    **{f"{name}ForCausalLM": EXPERTS for name in WITH_EXPERTS.split()},
    "GPT2LMHeadModel": {},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "OPTForCausalLM": {"word_embed_proj_dim": 32},
    "BertLMHeadModel": {"is_decoder": True},
    # Mixture of experts.
    "Qwen2MoeForCausalLM": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64, "moe_top_k": 2},
        "max_seq_len": 64,
    },
    # State space and recurrence.
    "MambaForCausalLM": {"state_size": 4},
    "Mamba2ForCausalLM": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2},
    "FalconMambaForCausalLM": {"state_size": 4},
    "RecurrentGemmaForCausalLM": {
        **HEADS,
        "lru_width": 32,
        "attention_window_size": 8,
        "num_hidden_layers": 3,  # the third one attends
    },
    "RwkvForCausalLM": {"attention_hidden_size": 32, "context_length": 16},
}
ENCODERS: dict[str, dict[str, Any]] = {
    **{f"{name}ForMaskedLM": {} for name in ENCODERS_AS_USUAL.split()},
    "RobertaForMaskedLM": {"max_position_embeddings": 80},
    "DebertaV2ForMaskedLM": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "MobileBertForMaskedLM": {"intra_bottleneck_size": 32, "true_hidden_size": 32},
    "NystromformerForMaskedLM": {"num_landmarks": 4, "segment_means_seq_len": 12},
    "BigBirdForMaskedLM": {"attention_type": "original_full"},
    "IBertForMaskedLM": {"max_position_embeddings": 80},
}
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "T5ForConditionalGeneration": {"d_kv": 8},
    "BartForConditionalGeneration": {},
    "PegasusForConditionalGeneration": {},
    "MarianMTModel": {"decoder_vocab_size": 64},
    "M2M100ForConditionalGeneration": {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    "LEDForConditionalGeneration": {"attention_window": 4},
}
VISION: dict[str, dict[str, Any]] = {
    **{f"{name}ForImageClassification": {} for name in ("ViT", "DeiT", "Beit", "Dinov2")},
    "ViTMAEForPreTraining": {"decoder_num_hidden_layers": 1},
    "SwinForImageClassification": {
        "num_heads": [2, 2],
        "num_attention_heads": [2, 2],
        **dict.fromkeys(("embed_dim", "hidden_size"), 16),
        "depths": [1, 1],
        "window_size": 2,
        "patch_size": 4,
    },
    "ConvNextForImageClassification": {"depths": [1, 1], "hidden_sizes": [16, 32], "num_stages": 2},
    "ResNetForImageClassification": {
        "depths": [1, 1],
        "hidden_sizes": [16, 32],
        "embedding_size": 16,
        "layer_type": "basic",
    },
    "SegformerForSemanticSegmentation": {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [2, 1],
        "hidden_sizes": [16, 32],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
    },
}
AUDIO: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("Wav2Vec2Model", "HubertModel", "WavLMModel"), SPEECH),
    "ASTForAudioClassification": {"max_length": 24, "num_mel_bins": 16, "patch_size": 8},
    "WhisperForConditionalGeneration": {"num_mel_bins": 16},
}


def _transformers() -> dict[str, Model]:
    found = {}
    for table, inputs in (
        (DECODERS, "input_ids"),
        (ENCODERS, "input_ids"),
        (ENCODER_DECODERS, "input_ids decoder_input_ids"),
        (VISION, "pixel_values"),
        (AUDIO, ""),
    ):
        for name, keywords in table.items():
            made = functools.partial(_from_config, name, keywords)
            draw = functools.partial(_given, inputs) if inputs else functools.partial(_sound, name)
            found[name] = Model(made, draw)
    both = "input_ids pixel_values"
    clip = functools.partial(_two_towers, "CLIP", projection_dim=16)
    vilt = functools.partial(_from_config, "ViltModel", {})
    for name, made, inputs, images in (
        ("CLIPModel", clip, both, 0),
        ("SiglipModel", functools.partial(_two_towers, "Siglip"), both, 0),
        ("ViltModel", vilt, f"{both} pixel_mask", 0),
        ("LlavaForConditionalGeneration", _llava, both, 16),
        ("Blip2ForConditionalGeneration", _blip2, both, 4),
        ("VisionEncoderDecoderModel", _captions, "pixel_values decoder_input_ids", 0),
    ):
        found[name] = Model(made, functools.partial(_given, inputs, images))
    return {f"transformers/{name}": model for name, model in found.items()}


def config_of(name: str, keywords: dict[str, Any]) -> Any:
    """A small configuration, of the class `name`."""
    import transformers

    kind = getattr(transformers, name)
    usual = kind()
    given = {key: value for key, value in SMALL.items() if hasattr(usual, key)}
    floats = [key for key, value in usual.to_dict().items() if isinstance(value, float)]
    drops = {key: 0.0 for key in floats if "drop" in key}
    return kind(**{**given, **drops, **keywords})


def _from_config(name: str, keywords: dict[str, Any]) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    return kind(config_of(kind.config_class.__name__, keywords))


def _two_towers(kind: str, **keywords: Any) -> nn.Module:
    import transformers

    text, vision = (config_of(f"{kind}{p}Config", {}).to_dict() for p in ("Text", "Vision"))
    towers = {"text_config": text, "vision_config": vision}
    config = getattr(transformers, f"{kind}Config")(**towers, **keywords)
    return getattr(transformers, f"{kind}Model")(config)


def _llava() -> nn.Module:
    import transformers

    vision, text = config_of("CLIPVisionConfig", {}), config_of("LlamaConfig", HEADS)
    towers = {"vision_config": vision, "text_config": text}
    config = transformers.LlavaConfig(image_token_index=63, vision_feature_layer=-1, **towers)
    return transformers.LlavaForConditionalGeneration(config)


def _blip2() -> nn.Module:
    import transformers

    config = transformers.Blip2Config(
        vision_config=config_of("Blip2VisionConfig", {}).to_dict(),
        qformer_config=config_of("Blip2QFormerConfig", {"encoder_hidden_size": 32}).to_dict(),
        text_config=config_of("OPTConfig", {"word_embed_proj_dim": 32}).to_dict(),
        num_query_tokens=4,
        image_token_index=63,
    )
    return transformers.Blip2ForConditionalGeneration(config)


def _captions() -> nn.Module:
    import transformers

    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        config_of("ViTConfig", {}), config_of("GPT2Config", {"add_cross_attention": True})
    )
    return transformers.VisionEncoderDecoderModel(config=config)


def _ids() -> Tensor:
    return torch.randint(2, 60, (ROWS, WORDS))


DRAWN: dict[str, Callable[[], Tensor]] = {
    **dict.fromkeys(("input_ids", "decoder_input_ids"), _ids),
    "pixel_values": lambda: torch.rand(ROWS, 3, 32, 32),
    "pixel_mask": lambda: torch.ones(ROWS, 32, 32, dtype=torch.int64),
}


def _given(names: str, images: int = 0) -> Inputs:
    """These keywords, in this order; so many tokens that stand for an image are before the text."""
    given = {name: DRAWN[name]() for name in names.split()}
    if images:
        marks = torch.full((ROWS, images), 63)
        given["input_ids"] = torch.cat([marks, given["input_ids"]], 1)
    return (), given


def _sound(name: str) -> Inputs:
    if name.startswith("Whisper"):
        return (), {"input_features": torch.randn(ROWS, 16, 40), "decoder_input_ids": _ids()}
    if name.startswith("AST"):
        return (), {"input_values": torch.randn(ROWS, 24, 16)}
    return (), {"input_values": torch.randn(ROWS, 400)}


FAMILIES = {"timm": _timm, "torchvision": _torchvision, "transformers": _transformers}


@functools.cache
def models_of(family: str) -> dict[str, Model]:
    return FAMILIES[family]()


def find(name: str) -> Model:
    return models_of(name.partition("/")[0])[name]
