"""``MergedLora``: LoRA adapters of PEFT, merged into full weights that leave the model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

# PEFT's layers whose `get_delta_weight` returns the change of the wrapped layer's weight.
_LAYERS = "peft.tuners.lora.layer"
# For each tensor of an adapter: the module that holds it, such as "lora_A", and the adapter.
_Names = dict[str, tuple[str, str]]


class MergedLora:
    """Names and values of the model with merged LoRA adapters. The model is not changed."""

    def __init__(self, model: nn.Module) -> None:
        """Find the adapters of ``model``.

        Raises:
            ModuleNotFoundError: PEFT is not installed.
            NotImplementedError: an adapter is not plain LoRA (it is DoRA or IA3, for example).
        """
        peft = import_module("peft")
        tuners, others = peft.tuners.tuners_utils, peft.utils.other
        self._hidden: set[str] = set()  # paths whose last part is absent from merged names
        self._dropped: set[str] = set()  # paths of modules that the merged model lacks
        # For the name of each weight with adapters in the model: the layers that hold the adapters,
        # each with the names of the adapters' tensors.
        self._layers: dict[str, list[tuple[Any, _Names]]] = {}
        self._adapters: dict[str, Tensor] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            dot = f"{path}." if path else ""
            if isinstance(module, peft.PeftModel):
                self._hidden |= {f"{dot}base_model", f"{dot}base_model.model"}
            elif isinstance(module, others.ModulesToSaveWrapper):
                used = f"{dot}original_module"
                if module.active_adapters and not module.disable_adapters:
                    used = f"{dot}modules_to_save.{module.active_adapters[0]}"
                self._hidden |= {used, f"{dot}modules_to_save"}
                copies = {f"{dot}modules_to_save.{name}" for name in module.modules_to_save}
                self._dropped |= {f"{dot}original_module", *copies} - {used}
            elif isinstance(module, tuners.BaseTunerLayer | others.AuxiliaryTrainingWrapper):
                _check(path, module)
                self._hidden.add(f"{dot}base_layer")
                self._dropped |= {dot + name for name in module._modules} - {f"{dot}base_layer"}
                if not module.disable_adapters:
                    layers = self._layers.setdefault(_weight_name(dot, module), [])
                    layers.append((module, _tensors(dot, module)))

    def name_of(self, text: str) -> str | None:
        """Translate a name in the model to the merged model; None if the merged model lacks it."""
        kept, path = [], ""
        for part in text.split("."):
            path = f"{path}.{part}" if path else part
            if path in self._dropped:
                return None
            if path not in self._hidden:
                kept.append(part)
        return ".".join(kept)

    def read(self, full_tensors: Callable[..., Iterator[Any]]) -> None:
        """Keep full copies of all adapters. Collective.

        ``full_tensors``: reads tensors of the model, given their ``names``.
        """
        names = {name for some in self._layers.values() for _, own in some for name in own}
        for name, tensor in full_tensors(names=names) if names else ():
            full = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
            self._adapters.update(dict.fromkeys(name.names, full))

    def merge(self, names: Sequence[str], tensor: Tensor) -> Tensor:
        """Return the weight with these names in the model plus its adapters, in fp32 or wider."""
        for module, own in (layer for name in names for layer in self._layers.get(name, ())):
            tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            stand_in = self._with_full_adapters(module, own, tensor)
            for adapter in dict.fromkeys(adapter for _, adapter in own.values()):
                tensor = tensor + stand_in.get_delta_weight(adapter)
        return tensor

    def _with_full_adapters(self, module: Any, own: _Names, weight: Tensor) -> Any:
        """Return a stand-in for ``module`` that has full adapters, for ``get_delta_weight``."""
        full: dict[str, dict[str, Any]] = defaultdict(dict)
        for name, (kind, adapter) in own.items():
            tensor = self._adapters[name].to(weight.device)
            full[kind][adapter] = tensor if "embedding" in kind else SimpleNamespace(weight=tensor)
        found = object.__new__(type(module))
        # PEFT rounds the result to the dtype of `get_param()`.
        children = {**module._modules, **full}
        found.__dict__ = {**module.__dict__, "_modules": children, "get_param": lambda: weight}
        return found


def _check(path: str, module: Any) -> None:
    """Raise NotImplementedError if the adapters of ``module`` cannot be merged."""
    kind, why = type(module), None
    if kind.__module__ != _LAYERS or not hasattr(module.get_base_layer(), _attribute(module)):
        why = f"is a {kind.__name__}, and only LoRA on plain layers and parameters can be merged"
    elif any(adapter in module.lora_variant for adapter in module.active_adapters):
        why = f"has the LoRA variant {type(next(iter(module.lora_variant.values()))).__name__}"
    elif any(module.lora_bias.values()):
        why = "has adapters with a bias (lora_bias=True)"
    elif module.merged_adapters:
        why = f"has merged adapters ({', '.join(module.merged_adapters)}): call unmerge_adapter()"
    if why is not None:
        raise NotImplementedError(
            f"merge_lora=True: {path!r} {why}. Read the tensors with merge_lora=False, and merge "
            "the adapters in the program that reads them."
        )


def _attribute(module: Any) -> str:
    """Return the attribute of the base layer that holds the weight with adapters."""
    return getattr(module, "parameter_name", "weight")  # type: ignore[no-any-return]


def _weight_name(path: str, module: Any) -> str:
    """Return the name of the weight that an adapter changes."""
    attribute = _attribute(module)
    while hasattr(module, "base_layer"):
        path, module = f"{path}base_layer.", module.base_layer
    return path + attribute


def _tensors(path: str, module: Any) -> _Names:
    """Return the names of the tensors of active adapters, each with its dict and adapter."""
    return {
        f"{path}{kind}.{adapter}" + ("" if "embedding" in kind else ".weight"): (kind, adapter)
        for kind in ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
        for adapter in module.active_adapters
        if adapter in module._modules.get(kind, ())
    }
