"""Optimizers, schedulers, clipping, scaling, averages of weights."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.idioms.side import ROWS, Side, add, idiom
from tests.models import Mlp

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "Adagrad": {"lr": 0.1},
    "Adadelta": {"lr": 1.0},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "ASGD": {"lr": 0.1, "t0": 1},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.01},
    "Adafactor": {"lr": 0.1},
}


def _optimizer(name: str, side: Side) -> Any:
    model = side.wrap(Mlp())
    return side.fit(model, getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name]))


for _name in OPTIMIZERS:
    add(f"optimizer_{_name.lower()}", "optimizers", f"`{_name}`", partial(_optimizer, _name))


@idiom("`Muon`")
def optimizer_muon(side: Side) -> Any:
    up, down = nn.Linear(7, 5, bias=False), nn.Linear(5, 3, bias=False)
    model = side.wrap(nn.Sequential(up, nn.Tanh(), down))
    return side.fit(model, torch.optim.Muon(model.parameters(), lr=0.1))


@idiom("`LBFGS`, `optimizer.step(closure)`")
def optimizer_lbfgs(side: Side) -> Any:
    model, losses = side.wrap(Mlp()), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for step in range(3):
        optimizer.step(side.closure(model, step, losses, optimizer))
    return [*losses, model]


@idiom("`SGD`, `optimizer.step(closure)`")
def closure_of_sgd(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    closures = [side.closure(model, step, [], optimizer) for step in range(4)]
    return [*(optimizer.step(closure).detach() for closure in closures), model]


@idiom("`step(closure)` after `no_sync`, as Lightning does")
def closure_after_no_sync(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    results = []
    for step in range(0, 6, 2):
        with side.no_sync(model):
            side.loss(model, step).backward()
        results.append(optimizer.step(side.closure(model, step + 1, [])).detach())
        optimizer.zero_grad()
    return [*results, model]


def _looking() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3))


@idiom("`Embedding(sparse=True)` and `SGD`")
def sparse_embedding(side: Side) -> Any:
    model = side.wrap(_looking(), nn.Embedding, nn.Linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return side.fit(model, optimizer, lambda m, s: m(side.tokens(s, ROWS, 3)).square().mean())


@idiom("`Embedding(sparse=True)` and `SparseAdam`")
def optimizer_sparseadam(side: Side) -> Any:
    model = side.wrap(_looking(), nn.Embedding, nn.Linear)
    inner = side.inner(model)
    sparse = torch.optim.SparseAdam(list(inner[0].parameters()), lr=0.1)
    dense = torch.optim.SGD(inner[1].parameters(), lr=0.1)
    return side.fit(
        model,
        dense,
        lambda m, s: m(side.tokens(s, ROWS, 3)).square().mean(),
        edit=lambda _: side.step(sparse),
    )


# ---------------------------------------------------------------- schedulers

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=4),
}


@idiom("all schedulers of `torch.optim.lr_scheduler`")
def schedulers(side: Side) -> Any:
    known = {name for name in lr_scheduler.__all__ if name != "LRScheduler"}
    assert known <= set(SCHEDULERS), known - set(SCHEDULERS)
    results: list[Any] = []
    for make in SCHEDULERS.values():
        torch.manual_seed(3)
        model = side.wrap(Mlp())
        optimizer = side.sgd(model)
        scheduler = make(optimizer)
        for step in range(4):
            side.learn(model, optimizer, step)
            plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([1.0] if plateau else []))
        results += [optimizer.param_groups[0]["lr"], side.loss(model, 9).detach()]
    return results


@idiom("weights averaged by `swa_utils`: `SWALR`, `AveragedModel`, `update_bn`")
def swa(side: Side) -> Any:
    net = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model = side.wrap(net)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = side.sgd(model)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)
    losses = []
    for step in range(4):
        losses += side.fit(model, optimizer, steps=1, first=step)[:1]
        average.update_parameters(model)
        scheduler.step()
    batches = [side.draw(step, ROWS, 7, of=0) for step in range(3)]
    torch.optim.swa_utils.update_bn(batches, average)
    average.eval()
    with torch.no_grad():
        losses.append(average(batches[0]))
    return losses


@idiom("`swa_utils.AveragedModel` with `get_ema_multi_avg_fn`")
def ema_averaged_model(side: Side) -> Any:
    model = side.wrap(Mlp())
    multi_avg_fn = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=multi_avg_fn)
    optimizer = side.sgd(model)
    results = []
    for step in range(4):
        results += side.fit(model, optimizer, steps=1, first=step)[:1]
        average.update_parameters(model)
        with torch.no_grad():
            results.append(average(side.draw(9, ROWS, 7)))
    return results


def averaged(update: Callable[[nn.Module, nn.Module], object], side: Side) -> list[Any]:
    """Train beside a copy of the model, whose weights ``update`` averages with the model's."""
    model, optimizer = side.begin(Mlp())
    average = copy.deepcopy(model).requires_grad_(False)
    for step in range(4):
        side.learn(model, optimizer, step)
        with torch.no_grad():
            update(average, model)
    with torch.no_grad():
        output = average(side.draw(9, ROWS, 7))
    return [output, *average.state_dict().values()]


@idiom("an average by `deepcopy` and `lerp_` over `parameters()`")
def ema_by_hand(side: Side) -> Any:
    @torch.enable_grad()
    def update(average: nn.Module, model: nn.Module) -> None:
        for mean, param in zip(average.parameters(), model.parameters(), strict=True):
            mean.data.lerp_(param.data, 0.5)

    return averaged(update, side)


@idiom("an average written into `state_dict()` tensors", ways="full grad_op no_shard")
def ema_of_state_dict(side: Side) -> Any:
    def update(average: nn.Module, model: nn.Module) -> None:
        """timm's ``ModelEmaV2``, with an average that is not frozen."""
        average.requires_grad_()
        states = average.state_dict().values(), model.state_dict().values()
        for mean, value in zip(*states, strict=True):
            mean.copy_(0.5 * mean + 0.5 * value)

    return averaged(update, side)


# ---------------------------------------------------------------- gradients


@idiom("`torch.nn.utils.clip_grad_norm_`")
def clip_grad_norm(side: Side) -> Any:
    norms: list[Tensor] = []

    def clip(model: nn.Module) -> None:
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))

    return [*side.fit(side.wrap(Mlp()), edit=clip), *norms]


@idiom("`torch.nn.utils.clip_grad_value_`")
def clip_grad_value(side: Side) -> Any:
    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)

    return side.fit(side.wrap(Mlp()), edit=clip)


@idiom("`torch.amp.GradScaler`, with an overflow on one rank")
def grad_scaler(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    results = []
    for step in range(6):
        overflow = step == 2 and side.rank == 1
        loss = side.loss(model, step)
        scaler.scale(loss * (float("inf") if overflow else 1.0)).backward()
        if step % 2 == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        results += [loss.detach(), scaler.get_scale()]
    return results


@idiom("weight decay for `p.ndim >= 2`")
def weight_decay_by_ndim(side: Side) -> Any:
    model = side.wrap(Mlp())
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return side.fit(model, torch.optim.AdamW(groups, lr=0.01))


@idiom("groups by name, `named_parameters()`")
def groups_by_name(side: Side) -> Any:
    model = side.wrap(Mlp())
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if "fc1" in name], "lr": 0.5},
        {"params": [p for name, p in named if "fc1" not in name], "lr": 0.01},
    ]
    return side.fit(model, torch.optim.SGD(groups))


@idiom("optimizer made before wrapping")
def optimizer_before_wrapping(side: Side) -> Any:
    net = Mlp()
    optimizer = side.sgd(net)
    return side.fit(side.wrap(net), optimizer)


@idiom("`add_param_group` and `requires_grad_` in the middle of training")
def unfreezing(side: Side) -> Any:
    net = Mlp()
    net.fc1.requires_grad_(False)
    model, optimizer = side.begin(net)
    losses = side.fit(model, optimizer, steps=2)[:-1]
    side.inner(model).fc1.requires_grad_(True)
    optimizer.add_param_group({"params": list(side.inner(model).fc1.parameters())})
    # DistributedDataParallel has to be made again to see it.
    if side.implementation == "ddp":
        model = side.wrap(side.inner(model))
    return losses + side.fit(model, optimizer, steps=2, first=2)


@idiom("`zero_grad(set_to_none=False)`, `model.zero_grad()`")
def zero_grad(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    for step in range(4):
        side.loss(model, step).backward()
        optimizer.step()
        if step % 2:
            optimizer.zero_grad(set_to_none=False)
        else:
            model.zero_grad()
    return [side.loss(model, 9), model]


@idiom("a step by hand: `p -= lr * p.grad`")
def step_by_hand(side: Side) -> Any:
    model = side.wrap(Mlp())
    for step in range(3):
        side.loss(model, step).backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
                param.grad = None
    return [side.loss(model, 9), model]


@idiom("gradients read, scaled, replaced: `p.grad.norm()`, `.mul_`, `p.grad = ...`")
def edited_gradients(side: Side) -> Any:
    norms: list[Tensor] = []

    def edit(model: nn.Module) -> None:
        for param in model.parameters():
            norms.append(param.grad.norm())
            param.grad.mul_(0.5)
            param.grad = param.grad + 0.01 * param.detach()

    return [*side.fit(side.wrap(Mlp()), edit=edit), *norms]


class _Own(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group["lr"])


@idiom("an optimizer of the user's, element-wise")
def own_optimizer(side: Side) -> Any:
    class Lion(_Own):
        def update(self, p: Tensor, lr: float) -> None:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            p.add_((mean * 0.9 + p.grad * 0.1).sign(), alpha=-lr)
            mean.lerp_(p.grad, 0.01)

    model = side.wrap(Mlp())
    return side.fit(model, Lion(model.parameters()))


@idiom("an optimizer of the user's that needs norms: LAMB")
def own_optimizer_with_norms(side: Side) -> Any:
    class Lamb(_Own):
        def update(self, p: Tensor, lr: float) -> None:
            p.add_(p.grad * (p.norm() / (p.grad.norm() + 1e-6)), alpha=-lr)

    model = side.wrap(Mlp())
    return side.fit(model, Lamb(model.parameters()))


@idiom("an optimizer for each parameter, in its post-accumulate hook", by_hand=True)
def optimizer_in_backward(side: Side) -> Any:
    model = side.wrap(Mlp())
    if side.implementation == "by hand":  # it averages after backward
        return side.fit(model, steps=3)[:-1]

    for param in model.parameters():
        optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)
        param.register_post_accumulate_grad_hook(lambda _, one=optimizer: side.step(one))
    return [side.closure(model, step, [])().detach() for step in range(3)]
