"""Several forwards and backwards of one step, and losses of parameters; not in the table."""

import copy
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatshard import ShardedWrapper, declare_elementwise
from flatshard.wrap import CustomPolicy
from tests.idioms.graphs import penalty_of
from tests.idioms.optimizers import averaged
from tests.idioms.side import ROWS, Side, add, failing, idiom
from tests.idioms.together import Net
from tests.models import Composed, Mlp

Backward = Callable[[Side, Any, int], Any]
_BASIC = "full grad_op no_shard"


def _passes(title: str, steps: int = 3, **settings: Any) -> Callable[[Backward], Backward]:
    """Enter an idiom that trains a small model: the decorated function runs a step's backwards."""

    def enter(backward: Backward) -> Backward:
        def script(side: Side) -> Any:
            model, optimizer = side.begin(Mlp())
            results = []
            for step in range(steps):
                results.append(backward(side, model, step))
                side.step(optimizer)
            return [*results, model]

        add(backward.__name__, "passes", title, script, **settings)
        return backward

    return enter


@_passes(
    "a gradient penalty with a backward of its own, after another one", by_hand=True, ways=_BASIC
)
def penalty_after_a_backward(side: Side, model: Any, step: int) -> None:
    x = side.draw(step, ROWS, 7)
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
    model(x).mean().backward()
    (slope.norm(dim=1) - 1).pow(2).mean().backward()
    if side.implementation == "by hand":  # it sees only backwards from the model's output
        model.average()


@_passes("each forward and each backward in a new thread, one after another")
def passes_in_threads(side: Side, model: Any, step: int) -> Tensor:
    def forward() -> Tensor:
        loss: Tensor = model(side.draw(step, ROWS, 7)).pow(2).mean()
        return loss

    with ThreadPoolExecutor(1) as one:
        loss = one.submit(forward).result()
    with ThreadPoolExecutor(1) as another:
        another.submit(loss.backward).result()
    return loss.detach()


def _two_heads() -> nn.Module:
    """Two outputs from one trunk."""

    def forward(net: Any, x: Tensor) -> list[Tensor]:
        x = torch.tanh(net.trunk(x))
        return [head(x) for head in net.heads]

    heads = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])
    return Composed(forward, trunk=nn.Linear(7, 5), heads=heads)


@idiom("a backward from one output: the other head's gradient stays None", by_hand=True)
def one_head_at_a_time(side: Side) -> Any:
    model, optimizer = side.begin(_two_heads())
    for step in range(4):
        model(side.draw(step, ROWS, 7))[step % 2].pow(2).mean().backward()
        assert all(p.grad is None for p in side.inner(model).heads[1 - step % 2].parameters())
        side.step(optimizer)
    return model


@_passes("three backwards of one graph, with forwards between", by_hand=True)
def retained_graph(side: Side, model: Any, step: int) -> None:
    loss = side.loss(model, step)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        side.loss(model, 70)
    other = side.loss(model, 50 + step)
    loss.backward(retain_graph=True)
    loss.backward()
    other.backward()


@idiom("two forwards through batch norm take rank 0's statistics", by_hand=True, ways="full")
def batch_norm_twice(side: Side) -> Any:
    net = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model = side.wrap(net, nn.Linear, nn.BatchNorm1d)
    return side.fit(model, loss_of=lambda m, s: side.loss(m, s) + side.loss(m, 10 + s))


@idiom("the adaptive weight of VQGAN: gradients of one layer, which is not sharded", ways="full")
def gradient_of_one_layer(side: Side) -> Any:
    net = nn.Sequential(nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 3))
    layer = net[2]
    if side.is_flatshard:
        sharded = side.shard(copy.deepcopy(net))
        loss = side.loss(sharded, 0)
        with pytest.raises(RuntimeError, match="CustomPolicy"):
            torch.autograd.grad(loss, sharded[2].weight)
        policy = CustomPolicy(lambda m: {"sharding_strategy": "NO_SHARD"} if m is layer else False)
        model = side.shard(net, auto_wrap_policy=policy)
    else:
        model = side.wrap(net)
    weight = side.inner(model)[2].weight

    def loss_of(m: nn.Module, step: int) -> Tensor:
        output = m(side.draw(step, ROWS, 7))
        losses = output.square().mean(), output.abs().mean()
        first, second = (torch.autograd.grad(a, weight, retain_graph=True)[0] for a in losses)
        return losses[0] + (first.norm() / second.norm()) * losses[1]

    return side.fit(model, loss_of=loss_of)


@idiom("clipping in a hook of the step", ways="full")
def clipping_in_step_hook(side: Side) -> Any:
    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.01)

    model, optimizer = side.begin(Mlp())
    optimizer.register_step_pre_hook(clip)
    return side.fit(model, optimizer)


@_passes("two forwards, then their backwards in the other order", by_hand=True)
def backwards_in_the_other_order(side: Side, model: Any, step: int) -> None:
    first, second = side.loss(model, step), side.loss(model, 10 + step)
    second.backward()
    first.backward()


@_passes("gathers and reductions draw no random numbers")
def random_numbers(side: Side, model: Any, step: int) -> Tensor:
    loss = side.loss(model, step)
    torch.manual_seed(1)
    loss.backward()
    with torch.no_grad():
        side.loss(model, 70)
    return torch.rand(3)


def _energy() -> nn.Module:
    """Returns an energy and, from a backward inside its forward, the forces."""

    def forward(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = net.head(torch.tanh(net.body(x + net.shift)))
            (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=net.training)
        return energy * net.shift.sum().exp(), -slope + net.shift

    shift = nn.Parameter(torch.zeros(7))
    return Composed(forward, body=Net(7, 5), head=nn.Linear(5, 1), shift=shift)


@idiom("a force field learns from energies and forces, and is evaluated")
def forces(side: Side) -> Any:
    model, optimizer = side.begin(_energy(), Net, nn.Linear)
    outputs: list[Tensor] = []
    for step in range(3):
        model.train()
        energy, force = model(side.draw(step, ROWS, 7))
        wanted = side.draw(50 + step, ROWS, 1), side.draw(60 + step, ROWS, 7)
        (F.mse_loss(energy, wanted[0]) + F.mse_loss(force, wanted[1])).backward()
        side.step(optimizer)
        model.eval()
        with torch.no_grad():
            outputs += model(torch.ones(2, 7))
    return [model, *outputs]


# Of a flat parameter, a norm or mean would be that of the rank's part of the unit, and the rank's
# weight that of its part.
NORMS: list[Callable[[Tensor], Tensor]] = [
    lambda p: p.pow(2).sum(),
    torch.norm,
    lambda p: p.norm(1),
    lambda p: torch.linalg.vector_norm(p, 3),
    lambda p: (p * p).mean(),
]


@_passes("norms as penalties, weighted differently by each rank", len(NORMS))
def norm_penalties(side: Side, model: Any, step: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the parameters are all-gathered for norms
        penalty = sum(NORMS[step](p) for p in model.parameters())
    (side.loss(model, step) + [0.01, 0.03][side.rank % 2] * penalty).backward()


@_passes("a penalty in a backward of its own: before, after and without the loss's", by_hand=True)
def penalty_by_itself(side: Side, model: Any, step: int) -> None:
    if step != 1:
        penalty_of(model).backward()
    if step != 2:
        side.loss(model, step).backward()
    if step == 1:
        penalty_of(model).backward()


@idiom("gradients detached in place and zeroed, as in fairseq", ways="full no_shard")
def gradients_detached(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    for step in range(3):
        side.loss(model, step).backward()
        optimizer.step()
        for param in model.parameters():
            param.grad.detach_()
            param.grad.zero_()
    return model


@_passes("parameters edited between two forwards of an evaluation, and copied into")
def edited_between_forwards(side: Side, model: Any, step: int) -> list[Tensor]:
    outputs = []
    with torch.no_grad():
        for _ in range(2):
            outputs.append(side.loss(model, 70))
            for param in model.parameters():
                values = torch.linspace(-0.5, 0.5, param.numel()).view(param.shape)
                param.copy_(values) if step == 1 else param.mul_(0.5)
    side.loss(model, step).backward()
    return outputs


@idiom("what is trained changes", by_hand=True, ways="full grad_op no_shard op hybrid-op")
def frozen_and_thawed(side: Side) -> Any:
    changes: list[Callable[[Any], object]] = [
        lambda net: [part.requires_grad_(False) for part in (net.fc2, net.fc3.bias)],
        lambda net: net.fc2.weight.requires_grad_(True),
        lambda net: [net.fc2.requires_grad_(True), net.fc1.weight.requires_grad_(False)],
        lambda net: net.requires_grad_(True),
        lambda net: [net.requires_grad_(False), net.fc1.bias.requires_grad_(True)],
        lambda net: None,
    ]
    model, optimizer = side.begin(Mlp())
    with_gradient: list[Any] = []
    for step, change in enumerate(changes):
        change(side.inner(model))
        side.loss(model, step).backward()
        with_gradient.append([param.grad is not None for param in model.parameters()])
        side.step(optimizer)
    return [*with_gradient, model]


class Reordered(Mlp):
    """Its middle layers run in the order of the list ``order``, and not all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.fc1(x))
        for index in self.order:
            x = torch.tanh(self.middle[index](x))
        return self.fc3(torch.tanh(self.fc2(x)))


@idiom("layers in an order that changes with each step", unused=True, ways="full")
def changing_order(side: Side) -> Any:
    model, optimizer = side.begin(Reordered())
    losses = []
    for step in range(6):
        side.inner(model).order = [(step + i) % 3 for i in range(3)][: 2 + step % 2]
        losses += side.fit(model, optimizer, steps=1, first=step)[:1]
    return [*losses, model]


# ---------------------------------------------------------------- averages in state dicts


def _one_by_one(average: nn.Module, model: nn.Module) -> None:
    """timm's ``ModelEma``."""
    values = model.state_dict()
    for name, mine in average.state_dict().items():
        mine.copy_(mine * 0.9 + 0.1 * values[name].detach())


def _lists(average: nn.Module, model: nn.Module) -> None:
    """timm's ``ModelEmaV3``."""
    mine, theirs = list(average.state_dict().values()), list(model.state_dict().values())
    torch._foreach_lerp_(mine, theirs, weight=0.1)


def _kept(average: nn.Module, model: nn.Module) -> Any:
    """One state dict is kept, and more are written before the next use."""
    if not hasattr(average, "kept"):
        average.kept = [average.state_dict()]
    for mine, theirs in zip(average.kept[0].values(), model.state_dict().values(), strict=True):
        mine.mul_(0.5).add_(theirs)
        mine.view(-1)[:1].zero_()
    for mine in average.state_dict().values():
        mine.sub_(0.25)
    average.kept = [average.state_dict()]


for _update in (_one_by_one, _lists, _kept):
    _title = f"an average in the tensors of state dicts: {_update.__name__[1:]}"
    add(f"average{_update.__name__}", "passes", _title, partial(averaged, _update), ways=_BASIC)


# ---------------------------------------------------------------- buffers


class Statistics(nn.Module):
    """Assigns a buffer anew in each forward, edits another one, and computes with both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("own", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.mean = self.mean * 0.9 + 0.1 * x.detach().mean(0)
        self.steps += x.detach().abs().max()
        self.own = self.own + self.steps
        return (x - self.mean) * self.steps


@idiom("buffers are broadcast before the same forwards")
def buffers_broadcast(side: Side) -> Any:
    net = nn.Sequential(Statistics(), nn.Tanh(), Statistics(), nn.BatchNorm1d(4))
    net[2]._ddp_params_and_buffers_to_ignore = ["own"]
    net._ddp_params_and_buffers_to_ignore = ["2.own"]
    model = side.wrap(net, Statistics)
    events = (
        "train train no_sync no_sync train train eval eval train replaced train new again train"
    )
    results: list[Any] = []
    for number, event in enumerate(events.split()):
        model.train(event != "eval")
        first, x = side.inner(model)[0], side.draw(number, 5, 4)
        if event == "replaced":
            first.mean = torch.full((4,), float(side.rank))
        elif event == "new":
            first.register_buffer("late", torch.full((2,), float(side.rank)))
        elif event == "eval":
            with torch.no_grad():
                results.append(model(x))
        else:
            call = partial(checkpoint, model, use_reentrant=False)
            with side.no_sync(model) if event == "no_sync" else nullcontext():
                results.append(call(x) if event == "again" else model(x))
                results[-1].square().sum().backward()
        buffers = {name: one.clone() for name, one in side.inner(model).named_buffers()}
        results += [buffers, model.will_sync_module_buffers()]
    return results


# ---------------------------------------------------------------- hooks and conversions


@idiom("hooks of gradients, kept by `double()`, some removed later", by_hand=True)
def hooks_removed(side: Side) -> Any:
    def halve(param: Tensor) -> None:
        calls.append(param.shape)
        param.grad.mul_(0.5)

    net, calls, seen = Mlp().float(), [], []
    net.fc1.weight.register_hook(lambda grad: 2 * grad)
    gone = [net.fc2.weight.register_hook(lambda grad: 5 * grad)]
    gone += [p.register_post_accumulate_grad_hook(halve) for p in net.fc1.parameters()]
    model = side.wrap(net)
    inner = side.inner(model)
    inner.fc2.weight.register_hook(lambda grad: seen.append(grad.shape))
    gone.append(inner.fc3.weight.register_hook(lambda grad: 3 * grad))
    gone += [p.register_post_accumulate_grad_hook(halve) for p in inner.fc2.parameters()]
    model.double()
    optimizer = side.sgd(model)
    side.fit(model, optimizer, steps=2)
    for handle in gone:
        handle.remove()
    side.fit(model, optimizer, steps=2, first=2)
    assert seen == [torch.Size([4, 5])] * 4
    return [model, len(calls)]


@idiom("a hook removed after a backward that failed", by_hand=True)
def hook_removed_after_failure(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    calls: list[int] = []
    inner = side.inner(model)
    handle = inner.fc1.weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    side.loss(model, 0).backward()
    before = [param.grad for param in model.parameters()]
    with failing(inner.fc2, in_backward=True):
        side.loss(model, 1).backward()
    if side.is_flatshard:  # the unwrapped model has gradients of a part of the failed backward
        assert all(param.grad is one for param, one in zip(model.parameters(), before, strict=True))
    handle.remove()
    optimizer.zero_grad()
    side.learn(model, optimizer, 2)
    return [model, len(calls)]


@idiom("`double()` after wrapping, with the optimizer of before", by_hand=True)
def converted_optimizer_kept(side: Side) -> Any:
    model, optimizer = side.begin(Mlp().float())
    assert model.double() is model
    return side.fit(model, optimizer)


def _stepped_before(side: Side, make: Callable[[nn.Module], torch.optim.Optimizer]) -> Any:
    net = Mlp()
    optimizer = make(net)
    for step in range(2):
        net(side.draw(step, ROWS, 7, of=0)).square().mean().backward()
        side.step(optimizer)
    return side.fit(side.wrap(net), optimizer)


@idiom("`SGD` that has stepped before the model is wrapped")
def sgd_stepped_before(side: Side) -> Any:
    return _stepped_before(side, lambda net: side.sgd(net))


@idiom("`AdamW` that has stepped before the model is wrapped")
def adamw_stepped_before(side: Side) -> Any:
    return _stepped_before(side, lambda net: torch.optim.AdamW(net.parameters(), lr=0.01))


class Normed(nn.Module):
    """Weights that hooks compute before each forward, and a frozen integer parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Parameter(torch.arange(3), requires_grad=False)  # first in its group
        self.first = nn.utils.weight_norm(nn.Linear(7, 6))
        self.second = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 6), dim=None), nn.Tanh())
        # DINO's last layer: no bias comes first, whose swap would drop the weight's graph.
        self.third = nn.utils.weight_norm(nn.Linear(6, 6, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(torch.tanh(self.first(x))))[:, self.columns]


@idiom("`weight_norm` by hooks, of layers with and without a bias", ways="full no_shard")
def weight_norm_everywhere(side: Side) -> Any:
    return side.fit(side.wrap(Normed()))


@idiom("tied parameters found by their addresses")
def grouped_by_address(side: Side) -> Any:
    model = side.wrap(Mlp())
    found = {param.data_ptr(): param for param in model.parameters()}  # many ranges are empty
    optimizer = torch.optim.SGD(found.values(), lr=0.1)
    return [len(found), *side.fit(model, optimizer)]


@idiom("`register_multi_grad_hook` of parameters: one call for each backward")
def multi_grad_hook(side: Side) -> Any:
    model, calls = side.wrap(Mlp()), []
    register = torch.autograd.graph.register_multi_grad_hook
    register(list(model.parameters()), lambda grads: calls.append(len(grads)))
    return [*side.fit(model), calls]


@idiom("hooks on the nodes that accumulate gradients, found by `p.expand_as(p)`")
def accumulation_nodes(side: Side) -> Any:
    model, calls = side.wrap(Mlp()), []
    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]
    for node in nodes:
        node.register_hook(lambda *_: calls.append(1))
    return [*side.fit(model), calls]


class _OnSphere(nn.Parameter):
    pass


@idiom("parameters of a class, which the optimizer's groups are chosen by")
def parameter_subclass(side: Side) -> Any:
    net = Mlp()
    net.fc2.weight = _OnSphere(net.fc2.weight.detach())
    model = side.wrap(net)
    groups: dict[bool, list[Tensor]] = {False: [], True: []}
    for param in model.parameters():
        groups[isinstance(param, _OnSphere)].append(param)
    fast = {"params": groups[True], "lr": 0.5}
    optimizer = torch.optim.SGD([{"params": groups[False]}, fast], lr=0.1)
    return side.fit(model, optimizer)


class _Around(torch.optim.Optimizer):
    """Changes gradients and lets another optimizer step, as SAM and Lookahead do."""

    def __init__(self, base: torch.optim.Optimizer, is_whole: bool, shares: bool) -> None:
        super().__init__(base.param_groups, base.defaults)
        self.base_optimizer, self.is_whole = base, is_whole
        if shares:
            self.param_groups, self.state = base.param_groups, base.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if self.is_whole and param.ndim == 2:
                    param.grad.div_(torch.linalg.svdvals(param.grad)[0])
        return self.base_optimizer.step(closure)


def _around_adam(is_whole: bool, shares: bool) -> Callable[[Side], Any]:
    def script(side: Side) -> Any:
        model, losses = side.wrap(Mlp()), []
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(6):
            # Adam steps by itself, then inside another optimizer, which is made for this step.
            one = adam if step % 3 == 0 else _Around(adam, is_whole, shares)
            losses += side.fit(model, one, steps=1, first=step)[:-1]
        return [*losses, model]

    return script


for _name, _is_whole, _shares in (
    ("around_adam", False, False),
    ("around_adam_with_its_state", False, True),
    ("around_adam_whole", True, False),
    ("around_adam_whole_with_its_state", True, True),
):
    _title = "an optimizer around Adam, made anew in each step"
    add(_name, "passes", _title, _around_adam(_is_whole, _shares), ways="full hybrid-op")


class _OwnAdam(torch.optim.Optimizer):
    """Adam, written with a loop over the parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
            state["step"] += 1
            first, second, step = state["exp_avg"], state["exp_avg_sq"], state["step"].item()
            first.lerp_(param.grad, 0.1)
            second.mul_(0.999).addcmul_(param.grad, param.grad, value=0.001)
            scale = (second / (1 - 0.999**step)).sqrt().add_(1e-8)
            param.addcdiv_(first / (1 - 0.9**step), scale, value=-0.01)


def _taken_over(side: Side, take: Callable[[Any, Any], object]) -> Any:
    """Train with Adam, then with another optimizer, to which `take` gives Adam's state."""
    model = side.wrap(Mlp())
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = side.fit(model, adam)[:-1]
    own = _OwnAdam(model.parameters())
    take(own, adam)
    return [*losses, *side.fit(model, own, first=4)]


@idiom("an own optimizer that takes over Adam's state", ways="full hybrid-op")
def state_taken_over(side: Side) -> Any:
    return _taken_over(side, lambda own, adam: setattr(own, "state", adam.state))


@idiom("an own optimizer that copies Adam's state of each parameter", ways="full no_shard")
def state_copied(side: Side) -> Any:
    def take(own: Any, adam: Any) -> None:
        own.state.update({param: dict(state) for param, state in adam.state.items()})

    return _taken_over(side, take)


@idiom("two optimizers take turns with one state", ways="full hybrid-op")
def state_shared(side: Side) -> Any:
    model = side.wrap(Mlp())
    both = [torch.optim.Adam(model.parameters(), lr=lr) for lr in (0.01, 0.02)]
    side.learn(model, both[0], 0)
    both[1].state.update(both[0].state)
    return [side.fit(model, both[step % 2], steps=1, first=step) for step in range(1, 5)]


@idiom("Adam's state edited in place, of some or all parameters", ways="full hybrid-op")
def state_edited(side: Side) -> Any:
    model = side.wrap(Mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = side.fit(model, optimizer)[:-1]
    for param in side.inner(model).fc2.parameters():
        for value in optimizer.state[param].values():
            value.zero_()
    losses += side.fit(model, optimizer, first=4)[:-1]
    for param in model.parameters():
        optimizer.state[param]["step"] += 1
    counts = [optimizer.state[param]["step"].item() for param in model.parameters()]
    return [counts, *losses, *side.fit(model, optimizer, first=8)]


@idiom("gradients kept in a list, or assigned from one", ways="full no_shard hybrid-op")
def gradients_in_a_list(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    params, grads, norms = list(model.parameters()), [], []
    for step in range(4):
        with side.no_sync(model):
            side.loss(model, step).backward()
        grads = grads or [param.grad for param in params]
        side.loss(model, 10 + step).backward()
        norms += [grad.norm() for grad in grads]
        optimizer.step()
        torch._foreach_zero_(grads)
        if step == 1:
            grads = [torch.full(param.shape, 0.1) for param in params]
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
    side.loss(model, 20).backward()
    model.zero_grad()
    return [*grads, *norms, model]


def _set_to_views(model: nn.Module, flat: Tensor) -> None:
    """Make the gradients views of one tensor."""
    params = list(model.parameters())
    for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.grad = part.view_as(param)


@idiom("gradients as views of one tensor, which the program reads and zeroes")
def gradients_in_one_tensor(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    flat = torch.zeros(sum(param.numel() for param in model.parameters()))
    _set_to_views(model, flat)
    for step in range(3):
        flat.zero_()
        side.loss(model, step).backward()
        flat.div_(flat.norm())
        optimizer.step()
    return [flat, model]


@idiom("gradients set to views of a tensor that is gone, and zeroed", ways="full no_shard")
def gradients_set_to_views(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    numel = sum(param.numel() for param in model.parameters())
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        side.loss(model, step).backward()
        _set_to_views(model, torch.linspace(0, 1, numel))
        optimizer.step()
    return model


@idiom("Adam's state kept in a list, read and edited between steps", ways="full hybrid-op")
def optimizer_state_in_a_list(side: Side) -> Any:
    model = side.wrap(Mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    side.learn(model, optimizer, 0)
    means = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
    side.learn(model, optimizer, 1)
    results = [mean.sum().item() for mean in means]
    torch._foreach_mul_(means, 0.5)
    side.learn(model, optimizer, 2)
    return [*results, *means, model]


class _ReadsStates(torch.optim.AdamW):
    """Reads the state of all parameters in its step, as `torch.compile` does to trace the step."""

    counts: tuple[float, ...] = ()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.counts += tuple(state["step"].item() for state in self.state.values())
        super().step(closure)


@idiom("an optimizer that reads all states in its step", ways="full hybrid-op")
def states_read_in_step(side: Side) -> Any:
    if side.is_flatshard:
        declare_elementwise(_ReadsStates)
    model = side.wrap(Mlp())
    optimizer = _ReadsStates(model.parameters(), lr=0.01, foreach=True)
    return [*side.fit(model, optimizer), max(optimizer.counts)]


@idiom("a layer that saves its weight in half precision", ways="full grad_op")
def saved_in_half(side: Side) -> Any:
    class Half(nn.Linear):
        def _save_to_state_dict(self, state: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(state, prefix, keep_vars)
            state[prefix + "weight"] = state[prefix + "weight"].half()

    return side.wrap(nn.Sequential(Half(7, 5), nn.Linear(5, 3)), Half)


@idiom("a tensor assigned to `p.grad.data`, written and read later", ways="full grad_op no_shard")
def tensors_as_data_of_gradients(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    results = []
    for step in range(3):
        results.append(side.loss(model, step))
        results[-1].backward()
        assigned = []
        for number, param in enumerate(model.parameters()):
            assigned.append(torch.full(tuple(param.shape), 0.01 * number))
            param.grad.data = assigned[-1]
        for tensor in assigned:
            tensor.mul_(2)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        results.append([tensor.clone() for tensor in assigned])
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        results.append([tensor.sum() for tensor in assigned])
    return [*results, model]


@idiom("freezing under `summon_full_params`", unused=True, ways="full grad_op no_shard")
def frozen_while_summoned(side: Side) -> Any:
    model, optimizer = side.begin(Mlp())
    results = []
    for step, trains in enumerate((True, False, False, True)):
        with ShardedWrapper.summon_full_params(model) if side.is_flatshard else nullcontext():
            side.inner(model).fc2.requires_grad_(trains)
        side.learn(model, optimizer, step)
        results.append([param.requires_grad for param in model.parameters()])
    return [*results, model]
