"""Modules, parameters and buffers ignored by ``ShardedWrapper``, by the user's choice.

A tensor is ignored in all modules that hold it, or in none. So if an ignored module shares a
parameter with another module (tied weights), the parameter is ignored in both modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Ignored:
    """Modules and tensors that are not sharded, moved, compared between ranks or synchronised."""

    # Ignored modules, with all descendants. All tensors of these modules are ignored.
    modules: frozenset[nn.Module] = frozenset()
    # Ignored parameters and buffers of modules that are not ignored, by attribute, because a
    # conversion (`.to()`, for example) may replace the tensors.
    places: frozenset[tuple[nn.Module, str]] = frozenset()
    # Names, in the unwrapped model, of the modules and tensors that the user chose.
    names: tuple[str, ...] = ()
    # Whether all modules and parameters that the user chose are outside of the wrapped module.
    is_elsewhere: bool = False

    def tensors(self) -> Iterator[Tensor]:
        """Yield the ignored parameters and buffers, as the modules hold them now."""
        for module in self.modules:
            yield from module.parameters(recurse=False)
            yield from module.buffers(recurse=False)
        for module, attribute in self.places:
            tensor = module._parameters.get(attribute, module._buffers.get(attribute))
            if tensor is not None:
                yield tensor

    def ids(self) -> set[int]:
        return {id(tensor) for tensor in self.tensors()}

    def within(self, modules: Iterable[nn.Module]) -> Ignored:
        """Return the ignored modules and tensors that lie inside of ``modules``, without names."""
        inside = {inner for module in modules for inner in module.modules()}
        return Ignored(
            self.modules & inside,
            frozenset((inner, attribute) for inner, attribute in self.places if inner in inside),
        )


NOTHING = Ignored()


def places_in(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield name, module, attribute and tensor of each parameter and buffer in each module.

    A tensor that several modules hold is yielded several times.
    """
    for path, inner in module.named_modules():
        for attribute, tensor in [*inner._parameters.items(), *inner._buffers.items()]:
            if tensor is not None:
                yield f"{path}.{attribute}" if path else attribute, inner, attribute, tensor
