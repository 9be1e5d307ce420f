"""``MergedLora``: LoRA adapters of PEFT, merged into full weights that leave the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

# PEFT's layers whose `get_delta_weight` returns the change of the wrapped layer's weight.
_LAYERS = "peft.tuners.lora.layer"


class MergedLora:
    """Names and values of the model with merged LoRA adapters. The model is not changed.

    Attributes:
        sources: names of the adapters' tensors in the model.
    """

    def __init__(self, model: nn.Module) -> None:
        """Find the adapters of ``model``.

        Raises:
            ModuleNotFoundError: PEFT is not installed.
            NotImplementedError: an adapter is not plain LoRA (it is DoRA or IA3, for example).
        """
        # Paths of PEFT's modules, which the merged model lacks (None), and of the modules that take
        # their place, with the place's path in the merged model. Paths are "" or end with ".".
        self._paths: dict[str, str | None] = {"": ""}
        # For the name of each weight in the merged model: the layers with active adapters. For the
        # name of each tensor of these adapters: the parts of its name in the layer.
        self._layers: dict[str, dict[Any, dict[str, list[str]]]] = defaultdict(dict)
        self._adapters: dict[str, Tensor] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            path = f"{name}." if name else ""
            part, shown = _taking_the_place_of(module, name), self.name_of(path)
            if part is None or shown is None:
                continue
            self._paths |= {path: None, f"{path}{part}.": shown}
            if part == "base_layer" and not module.disable_adapters:
                names = [name.split(".") for name, _ in module.named_parameters()]
                weight = shown + getattr(module, "parameter_name", "weight")
                self._layers[weight][module] = {
                    path + ".".join(parts): parts
                    for parts in names
                    if parts[0].startswith("lora_") and parts[1] in module.active_adapters
                }
        layers = [layer for some in self._layers.values() for layer in some.values()]
        self.sources = {name for layer in layers for name in layer}

    def name_of(self, text: str) -> str | None:
        """Translate a name in the model to the merged model; None if the merged model lacks it."""
        end = text.rfind(".") + 1
        while text[:end] not in self._paths:
            end = text.rfind(".", 0, end - 1) + 1
        shown = self._paths[text[:end]]
        return None if shown is None else shown + text[end:]

    def keep(self, items: Iterable[Any]) -> None:
        """Keep full copies of all adapters. ``items``: names and full tensors of ``sources``."""
        for name, tensor in items:
            full = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
            self._adapters.update(dict.fromkeys(name.names, full))

    def merge(self, names: Sequence[str], tensor: Tensor) -> Tensor:
        """Return the weight with these names plus its adapters, in fp32 or wider."""
        layers = {module: own for name in names for module, own in self._layers[name].items()}
        for module, own in layers.items():
            wide = torch.promote_types(tensor.dtype, torch.float32)
            tensor = self._with_adapters(module, own, tensor.to(wide))
        return tensor

    def _with_adapters(self, module: Any, own: dict[str, list[str]], weight: Tensor) -> Tensor:
        full: dict[str, dict[str, Any]] = defaultdict(dict)
        for name, (kind, adapter, *rest) in own.items():
            one = self._adapters[name].to(weight.device)
            full[kind][adapter] = SimpleNamespace(weight=one) if rest else one
        # A stand-in for the layer, with full adapters. PEFT rounds the change of the weight to the
        # dtype of `get_param()`.
        layer, children = object.__new__(type(module)), {**module._modules, **full}
        layer.__dict__ = {**module.__dict__, "_modules": children, "get_param": lambda: weight}
        adapters = dict.fromkeys(parts[1] for parts in own.values())
        return sum((layer.get_delta_weight(one) for one in adapters), weight)


def _taking_the_place_of(module: Any, path: str) -> str | None:
    """Return the submodule that takes the place of ``module`` in the merged model.

    None: ``module`` is no module of PEFT. Raises NotImplementedError if ``module`` has adapters
    that cannot be merged.
    """
    peft = import_module("peft")
    tuners, others = peft.tuners.tuners_utils, peft.utils.other
    models = peft.PeftModel | peft.PeftMixedModel
    if isinstance(module, models) and isinstance(module.base_model, tuners.BaseTuner):
        return "base_model"
    if isinstance(module, tuners.BaseTuner):
        return "model"
    if isinstance(module, others.ModulesToSaveWrapper):
        is_used = module.active_adapters and not module.disable_adapters
        return f"modules_to_save.{module.active_adapters[0]}" if is_used else "original_module"
    if not isinstance(module, models | tuners.BaseTunerLayer | others.AuxiliaryTrainingWrapper):
        return None
    kind, why, weight = type(module), None, getattr(module, "parameter_name", "weight")
    if kind.__module__ != _LAYERS or not hasattr(module.get_base_layer(), weight):
        why = f"is a {kind.__name__}, and only LoRA on plain layers and parameters can be merged"
    elif any(adapter in module.lora_variant for adapter in module.active_adapters):
        why = f"has the LoRA variant {type(next(iter(module.lora_variant.values()))).__name__}"
    elif any(module.lora_bias.values()):
        why = "has adapters with a bias (lora_bias=True)"
    elif module.merged_adapters:
        why = f"has merged adapters ({', '.join(module.merged_adapters)}): call unmerge_adapter()"
    if why is not None:
        raise NotImplementedError(
            f"merge_lora=True: {path!r} {why}. Read the tensors with merge_lora=False, and "
            "merge the adapters in the program that reads them."
        )
    return "base_layer"
