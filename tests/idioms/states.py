"""State dicts, copies, conversions."""

import copy
import io
import pickle
from typing import Any

import torch
from torch import nn

from tests.idioms.side import ORACLES, ROWS, Side, idiom
from tests.models import Mlp


@idiom("`load_state_dict` of an unwrapped model's state")
def load_plain_state(side: Side) -> Any:
    torch.manual_seed(11)
    state = Mlp().state_dict()
    model = side.wrap(Mlp())
    side.load(model, state)
    return side.fit(model)


@idiom("a full state dict goes to an unwrapped model")
def full_state(side: Side) -> Any:
    model = side.wrap(Mlp())
    side.fit(model)
    plain = Mlp()
    plain.load_state_dict(side.state(model))
    return plain(side.draw(9, ROWS, 7))


@idiom("`torch.save(model.state_dict())` on all ranks, loaded and trained on")
def saved_and_loaded(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    side.fit(model, optimizer)
    file = io.BytesIO()
    torch.save(side.state(model), file)
    file.seek(0)
    other = side.wrap(Mlp())
    side.load(other, torch.load(file))
    return side.fit(other, first=4)


@idiom("the weights of the best step kept by `deepcopy(state_dict())`, and loaded again")
def best_weights(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    losses = side.fit(model, optimizer, steps=2)[:-1]
    best = copy.deepcopy(model.state_dict())
    losses += side.fit(model, optimizer, steps=2, first=2)[:-1]
    model.load_state_dict(best)
    return [*losses, side.loss(model, 9)]


@idiom("`state_dict()` on rank 0 alone")
def state_on_rank_0(side: Side) -> Any:
    model = side.wrap(Mlp())
    losses = side.fit(model)[:-1]
    if side.rank == 0:
        losses.append(side.state(model))
    return losses + side.fit(model, first=4)


@idiom("the optimizer's state of an unwrapped model, loaded")
def load_plain_optimizer(side: Side) -> Any:
    plain = Mlp()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(2):
        plain(side.draw(step, ROWS, 7, of=0)).square().mean().backward()
        side.step(optimizer)
    state = optimizer.state_dict()
    net = Mlp()
    net.load_state_dict(plain.state_dict())
    model = side.wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    side.load_optimizer(model, optimizer, state)
    return side.fit(model, optimizer)


@idiom("`optimizer.state_dict()`, copied or not, loaded twice, and edited, in one run", ways="full")
def optimizer_round_trip(side: Side) -> Any:
    losses: list[Any] = []

    def drop_a_gradient(model: nn.Module) -> None:
        [*model.parameters()][1].grad = None

    for copied in (copy.copy, copy.deepcopy):
        model = side.wrap(Mlp())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses += side.fit(model, optimizer)[:-1]
        state = copied(optimizer.state_dict())
        other = torch.optim.AdamW(model.parameters(), lr=0.05)
        for step in range(3):  # load_state_dict() does not copy: a step changes `state`
            losses += side.fit(model, optimizer, steps=1, first=4, edit=drop_a_gradient)[:-1]
            other.load_state_dict(state)
            losses += side.fit(model, other, steps=2, first=5)[:-1]
            state["state"][step]["step"] += 3
    return losses


@idiom("`copy.deepcopy(model)`, both trained on")
def deepcopy(side: Side) -> Any:
    model = side.wrap(Mlp())
    first = side.fit(model)
    other = copy.deepcopy(model)
    return [*first[:-1], *side.fit(model, first=4), *side.fit(other, first=8)]


@idiom("`pickle.dumps(model)`")
def pickled(side: Side) -> Any:
    model = side.wrap(Mlp())
    side.fit(model)
    # DistributedDataParallel's groups cannot be pickled: the module inside.
    kept = side.inner(model) if side.implementation in ORACLES else model
    return pickle.loads(pickle.dumps(kept))(side.draw(9, ROWS, 7))


@idiom("`model.float()` after wrapping", by_hand=True)
def converted(side: Side) -> Any:
    net = Mlp()
    model = side.wrap(net).float()
    return side.fit(
        model, loss_of=lambda m, step: m(side.draw(step, ROWS, 7).float()).square().mean()
    )


@idiom("`model.module.double()` and `.cpu()`, which change nothing")
def converted_inner(side: Side) -> Any:
    model = side.wrap(Mlp())
    side.inner(model).double().cpu()
    return side.fit(model)


@idiom("`train()`, `eval()`, `modules()`, `named_parameters()`, `get_submodule()`")
def walked(side: Side) -> Any:
    model = side.wrap(nn.Sequential(nn.Linear(7, 5), nn.Dropout(0.5), nn.Linear(5, 3)))
    model.eval()
    losses = side.fit(model)[:-1]
    names = [name for name, _ in side.inner(model).named_parameters()]
    sizes = [list(p.shape) for p in side.inner(model).parameters()]
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    return [*losses, names, sizes, len(linear), side.inner(model).get_submodule("0").in_features]


@idiom("a model wrapped, dropped, and wrapped again")
def wrapped_again(side: Side) -> Any:
    results = []
    for _ in range(3):
        torch.manual_seed(3)
        model = side.wrap(Mlp())
        results += side.fit(model)[:-1]
        del model
    return results
