"""Extensions watch, vote and leave; a unit's phase moves as its table says."""

from flatshard.engine import unit
from flatshard.engine.events import StepExtension
from flatshard.engine.run_state import RunState
from flatshard.options.extras import EXTRAS, default_extra
from tests.harness import on_ranks
from tests.models import CASES

NAMES = list(EXTRAS)


class _Listener(StepExtension):
    """Hears one event, and then no more."""

    watches = True

    def __init__(self, name: str, state: RunState) -> None:
        self.name, self.state, self.heard = name, state, 0

    def enter_forward(self, unit: unit.Unit, recomputes: bool) -> None:
        self.heard += 1
        self.state.drop(self)


class _Voter(StepExtension):
    """Acts at two moments, and votes."""

    def __init__(self, name: str, vote: int, acts: list[str]) -> None:
        self.name, self.acts = name, acts
        self.vote, self.maxima = vote, [-1]

    def begin_forward(self, of_root: bool) -> None:
        self.acts.append(f"{self.name} begins a forward {of_root}")

    def end_backward(self, has_gradients: bool) -> None:
        self.acts.append(f"{self.name} ends a backward {has_gradients}")

    def votes(self) -> bytes:
        return bytes([self.vote, 7])

    def tally(self, maxima: bytes) -> None:
        self.maxima = list(maxima)


@on_ranks(2)
def test_an_extension_leaves_in_an_event(rank: int, world_size: int) -> None:
    case = CASES["mlp"]
    model = case.wrap(case.model())
    state = model._sharded_unit.context
    listeners = [_Listener(name, state) for name in NAMES[:2]]
    for one in listeners:
        state.extend(one)
    assert state.extension(NAMES[0]) is listeners[0]
    for _ in range(2):
        model(case.batch(rank, 2)[0])
    assert [one.heard for one in listeners] == [1, 1]
    assert state.extension(NAMES[0]) is None


@on_ranks(2)
def test_votes_of_all_ranks(rank: int, world_size: int) -> None:
    case = CASES["mlp"]
    model = case.wrap(case.model())
    acts: list[str] = []
    context = model._sharded_unit.context
    second, first = _Voter(NAMES[1], rank, acts), _Voter(NAMES[0], 3 * (1 - rank), acts)
    context.extend(second)
    context.extend(first)
    assert context.extension(NAMES[0]) is first
    for one in (model, model.module):  # the second one is not called as the root
        one(case.batch(rank, 2)[0]).sum().backward()
    assert (second.maxima, first.maxima) == ([1, 7], [3, 7])
    context.drop(first)
    context.drop(second)
    model(case.batch(rank, 2)[0]).sum().backward()
    begin, end = "begins a forward True", "ends a backward True"
    once = [f"{name} {what}" for what in (begin, end) for name in NAMES[:2]]
    assert acts == [*once, *once]


def test_watchers_come_last() -> None:
    """A watcher may raise its warning as an error: no rank may wait for this rank then."""
    found: list[type[StepExtension]] = []
    for name in EXTRAS:
        module = default_extra(name)
        kinds = [one for one in vars(module).values() if isinstance(one, type)]
        found += [
            one
            for one in kinds
            if issubclass(one, StepExtension) and one.__module__ == module.__name__
        ]
    acting = [one for one in found if not one.watches and "end_backward" in vars(one)]
    watching = [one for one in found if one.watches]
    assert acting
    assert watching
    assert max(map(found.index, acting)) < min(map(found.index, watching))
