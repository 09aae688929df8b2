"""What a worker has loaded, and is told to load, unload and compare: in the session, action by action."""

from __future__ import annotations

import pytest

from headrace.protocol.messages import (
    ClassProfile,
    Compare,
    Compared,
    Endpoints,
    Limits,
    Load,
    Loaded,
    Message,
    ModelFile,
    ModelProfile,
    ModelSpec,
    NotLoaded,
    Ready,
    Setup,
    SizeClassSpec,
    Unload,
    WorkerHello,
)
from headrace.workers import worker_events as ev
from headrace.workers.worker_events import Action, Event
from headrace.workers.worker_session import SessionSettings, State, WorkerSession

ENDPOINTS = Endpoints(7, "f", "i", "r", "tcp://b:5558", "tcp://b:5559", "", "h")
OLD, NEW = ModelSpec("m", "1"), ModelSpec("m", "2")


def profile(spec: ModelSpec) -> ModelProfile:
    return ModelProfile(spec.name, spec.version, (ClassProfile(SizeClassSpec("c", 8, 8), ((1, 1.0),)),), ())


class World:
    """A session; reports are left out of what it does."""

    def __init__(self, *models: ModelSpec, engine: str = "cpu") -> None:
        self.session = WorkerSession(
            WorkerHello("w1", 42, "h", "cpu", engine, "1.0", 1), SessionSettings(), lambda: 1.0
        )
        self.feed(ev.Started())
        self.meet(*models)
        if models:
            self.feed(ev.ModelsFetched(models, {}))
            self.feed(ev.ModelsLoaded(models, tuple(map(profile, models))))

    def feed(self, event: Event) -> list[Action]:
        actions = self.session.handle(event, 0)
        self.session.check_invariants()
        return [action for action in actions if not isinstance(action, ev.Report)]

    def receive(self, message: Message) -> list[Action]:
        return self.feed(ev.MessageReceived(message))

    def meet(self, *models: ModelSpec, boot: int = 7) -> list[Action]:
        """A broker is found and says what it wants."""
        self.feed(ev.BrokerFound(ENDPOINTS))
        return self.receive(Setup(boot, 100, Limits(), models, ENDPOINTS))

    def lose(self) -> None:
        """The connection goes, and the wait until the next try with it."""
        self.feed(ev.LinkLost("cut"))
        self.session.handle(ev.Tick(), 10**12)


def ready(*specs: ModelSpec) -> ev.Send:
    return ev.Send(Ready("w1", 42, 2, tuple(map(profile, specs))))


def test_a_model_is_loaded_beside_and_told_of():
    """The session goes on serving meanwhile."""
    world = World(OLD)

    assert world.receive(Load(NEW)) == [ev.LoadBeside(NEW, "tcp://b:5559")]
    assert world.session.state is State.SERVING
    assert world.feed(ev.BesideLoaded(NEW, profile(NEW))) == [ev.Send(Loaded(profile(NEW)))]


def test_what_is_loaded_already_is_told_at_once():
    """A broker that asks twice gets the same answer."""
    world = World(OLD)
    world.receive(Load(NEW))
    world.feed(ev.BesideLoaded(NEW, profile(NEW)))

    assert world.receive(Load(NEW)) == [ev.Send(Loaded(profile(NEW)))]


def test_a_failure_is_told_and_changes_nothing():
    """It may be tried again."""
    world = World(OLD)
    world.receive(Load(NEW))

    told = world.feed(ev.BesideFailed(NEW, "load_failed", "no batch axis"))

    assert told == [ev.Send(NotLoaded("m", "2", "load_failed", "no batch axis"))]
    assert world.receive(Load(NEW)) == [ev.LoadBeside(NEW, "tcp://b:5559")]


@pytest.mark.parametrize("spec", [ModelSpec("m", "3"), ModelSpec("m", "1", (ModelFile("x", "0f" * 32, 1),))])
def test_one_at_a_time_and_one_thing_under_one_name(spec):
    """A second load, or other files under a known name, is refused."""
    world = World(OLD)
    world.receive(Load(NEW))

    (told,) = world.receive(Load(spec))

    assert isinstance(told, ev.Send)
    assert isinstance(told.message, NotLoaded)
    assert told.message.code == "reload_busy"


def test_a_gpu_gets_its_own_files():
    """As with the models of its set-up."""
    gpu_file = ModelFile("fp16.onnx", "1f" * 32, 1)
    both = ModelSpec("m", "2", (ModelFile("fp32.onnx", "0f" * 32, 1),), gpu_files=(gpu_file,))

    (action,) = World(OLD, engine="cuda").receive(Load(both))

    assert isinstance(action, ev.LoadBeside)
    assert action.spec.files == (gpu_file,)


def test_unload_and_compare_are_passed_on():
    """What is not there needs no unloading."""
    world = World(OLD)

    assert world.receive(Compare(5, "2")) == [ev.CompareBatch(5, "2")]
    assert world.receive(Unload("m", "1")) == [ev.UnloadModel("m", "1")]
    assert world.receive(Unload("m", "1")) == []
    assert world.feed(ev.BatchCompared(Compared(5, "2", 1))) == [ev.Send(Compared(5, "2", 1))]


def test_orders_of_a_broker_that_it_does_not_serve_count_for_nothing():
    """They belong to a connection that is over."""
    world = World()
    world.session.state = State.DRAINING

    assert world.receive(Load(NEW)) == []


def test_a_broker_met_again_finds_what_it_wants_loaded():
    """Nothing is loaded twice; what it does not want any more goes."""
    world = World(OLD)
    world.receive(Load(NEW))
    world.feed(ev.BesideLoaded(NEW, profile(NEW)))
    world.lose()

    found = world.meet(OLD)

    assert found == [ev.UseLimits(Limits()), ev.UnloadModel("m", "2"), ready(OLD)]


def test_a_broker_that_wants_both_has_them_at_once():
    """After a switch the set-up names the version that serves and the one that is kept."""
    world = World(OLD)
    world.receive(Load(NEW))
    world.feed(ev.BesideLoaded(NEW, profile(NEW)))
    world.lose()

    assert world.meet(NEW, OLD) == [ev.UseLimits(Limits()), ready(NEW, OLD)]


def test_a_set_up_waits_for_a_model_under_way():
    """Loading from anew would take away what the other thread hands over to."""
    world = World(OLD)
    world.receive(Load(NEW))
    world.lose()
    third = ModelSpec("m", "3")

    first = world.meet(third)
    then = world.feed(ev.BesideLoaded(NEW, profile(NEW)))

    assert first == [ev.UseLimits(Limits())]
    assert then == [ev.FetchModels((third,), "tcp://b:5559")]


def test_what_finishes_without_a_broker_is_told_nobody():
    """It asks again when it is back."""
    world = World(OLD)
    world.receive(Load(NEW))
    world.lose()

    assert world.feed(ev.BesideLoaded(NEW, profile(NEW))) == []
    world.meet(OLD)
    assert world.receive(Load(NEW)) == [ev.LoadBeside(NEW, "tcp://b:5559")]
