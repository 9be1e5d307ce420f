"""Programs that walk through the modules of a model and edit them; not in the table."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.idioms.side import ROWS, Side, add, idiom
from tests.models import Mlp


def _walk(module: nn.Module, edit: Callable[[nn.Module], object]) -> None:
    for _, child in module.named_children():
        _walk(child, edit)
    edit(module)


@idiom("a recursion over `children()` that edits, hooks and counts linear layers", ways="full")
def walked_by_children(side: Side) -> Any:
    model, calls = side.wrap(Mlp()), []

    def edit(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *_: calls.append(module.out_features))
            with torch.no_grad():
                module.weight.mul_(0.5)
                for param in module.parameters(recurse=False):
                    param.add_(0.01)

    _walk(model, edit)
    return [*side.fit(model), calls]


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    for child in module._modules.values():
        if child is not None:
            yield from _leaves(child) if len(list(child.children())) else [child]


@idiom("a recursion over `_modules` that edits modules without children", ways="full")
def walked_by_leaves(side: Side) -> Any:
    model = side.wrap(nn.Sequential(nn.Linear(7, 5), nn.Sequential(nn.Linear(5, 3), nn.Tanh())))
    leaves = [*_leaves(side.inner(model))]
    for leaf in leaves:
        leaf.register_forward_hook(lambda *inputs: inputs[-1] * 2)
    return [len(leaves), *side.fit(model)]


class _Stays(nn.Linear):
    """Stays in evaluation mode, as batch norms of detection models do."""

    def train(self, mode: bool = True) -> "_Stays":
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if self.training else 3)


@idiom("a layer that overrides `train()`", ways="full")
def train_overridden(side: Side) -> Any:
    model = side.wrap(nn.Sequential(_Stays(7, 5), nn.Dropout(0.5), nn.Linear(5, 3)))
    modes = []
    for mode in (False, True):
        model.train(mode)
        modes.append([module.training for module in side.inner(model)])
    side.inner(model)[1].eval()
    return [*side.fit(model), modes]


class _Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@idiom("`layer.__class__ = Other`, after wrapping", ways="full")
def class_assigned(side: Side) -> Any:
    model = side.wrap(Mlp())
    side.inner(model).fc2.__class__ = _Twice
    return [isinstance(side.inner(model).fc2, _Twice), *side.fit(model)]


@idiom("layers found among `modules()`, and as keys of dicts", ways="full")
def looked_up(side: Side) -> Any:
    model = side.wrap(Mlp())
    layers = [*side.inner(model).children()]
    names = {module: name for name, module in side.inner(model).named_modules()}
    found = [layer in set(model.modules()) and layer in list(model.modules()) for layer in layers]
    return [found, [names[layer] for layer in layers], len({*layers, *side.inner(model).modules()})]


@idiom("a walk over `children()` by exact type; layers compared by identity", ways="full")
def walked_by_type(side: Side) -> Any:
    model, found = side.wrap(nn.Sequential(Mlp(), nn.Tanh(), nn.Linear(3, 3))), []

    def edit(module: nn.Module) -> None:
        if type(module) is nn.Linear:
            found.append(module)
            with torch.no_grad():
                module.weight.mul_(0.5)

    _walk(model, edit)
    same = [layer in [side.inner(model)[2], side.inner(model)[0].fc2] for layer in found]
    return [same, side.inner(model)[2] is [*side.inner(model).children()][2], *side.fit(model)]


@idiom("items of a sharded `nn.Sequential` assigned, deleted and looked for", ways="full")
def items_of_sequential(side: Side) -> Any:
    layers = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Tanh(), nn.Linear(5, 3))
    model = side.wrap(nn.Sequential(layers, nn.Tanh()), nn.Sequential)
    inner = side.inner(model)[0]
    inner[1] = nn.GELU()
    del inner[2]
    return [inner[1] in inner, *side.fit(model)]


@idiom("layers without parameters replaced after wrapping", ways="full")
def activation_replaced(side: Side) -> Any:
    model = side.wrap(nn.Sequential(nn.Linear(7, 5), nn.Sequential(nn.ReLU(), nn.Linear(5, 3))))

    def replace(module: nn.Module) -> None:
        for name, child in module.named_children():
            replace(child)
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.GELU())

    replace(model)
    return side.fit(model)


def _made_of(make: Callable[[nn.Module, Tensor], Any]) -> Callable[[Side], Any]:
    def script(side: Side) -> Any:
        model, x = side.wrap(Mlp()), side.draw(9, ROWS, 7)
        side.fit(model)
        with torch.no_grad():
            return make(side.inner(model).eval(), x)(x)

    return script


add("traced", "walks", "`torch.jit.trace(model.module, x)`", _made_of(torch.jit.trace))
add(
    "exported",
    "walks",
    "`torch.export`",
    _made_of(lambda m, x: torch.export.export(m, (x,)).module()),
)
add("copied_shallowly", "walks", "`copy.copy(model.module)`", _made_of(lambda m, _: copy.copy(m)))


@idiom("`prune` after wrapping")
def pruned_afterwards(side: Side) -> Any:
    model = side.wrap(Mlp())
    prune.l1_unstructured(side.inner(model).fc2, "weight", amount=0.5)
    return side.fit(model)
