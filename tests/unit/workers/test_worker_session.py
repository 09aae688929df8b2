"""The worker's conversation with the broker: exact actions for each fact, in each state."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from headrace.errors import Code
from headrace.exit_codes import ExitCode
from headrace.protocol.messages import (
    Batch,
    Cancel,
    ClassProfile,
    Discover,
    Done,
    Endpoints,
    Failed,
    Frame,
    Goodbye,
    Heartbeat,
    Limits,
    Message,
    ModelProfile,
    ModelSpec,
    Ready,
    Refused,
    Setup,
    SizeClassSpec,
    Telemetry,
    WorkerHello,
)
from headrace.workers import worker_events as ev
from headrace.workers.worker_events import Action, Event
from headrace.workers.worker_session import MS, SessionSettings, State, WorkerSession

ENDPOINTS = Endpoints(7, "f", "i", "r", "tcp://b:5558", "tcp://b:5559", "", "h")
HELLO = WorkerHello("w1", 42, "h", "cpu", "cpu", "1.0", 1)
MODELS = (ModelSpec("m", "1"),)
PROFILES = (ModelProfile("m", "1", (ClassProfile(SizeClassSpec("c", 8, 8), ((1, 1.0),)),), ()),)
SETUP = Setup(boot=7, heartbeat_ms=100, limits=Limits(), models=MODELS, endpoints=ENDPOINTS)
READY = Ready("w1", 42, 2, PROFILES)


class World:
    """A session and its clock. Every event ends in check_invariants()."""

    def __init__(self, **settings: object) -> None:
        self.now_ns = 1_000_000 * MS
        self.session = WorkerSession(HELLO, replace(SessionSettings(), **settings), lambda: 1.0)  # type: ignore[arg-type]

    def feed(self, event: Event) -> list[Action]:
        actions = self.session.handle(event, self.now_ns)
        self.session.check_invariants()
        return actions

    def receive(self, message: Message) -> list[Action]:
        return self.feed(ev.MessageReceived(message))

    def wait(self, ms: float) -> list[Action]:
        self.now_ns += int(ms * MS)
        return self.feed(ev.Tick())

    def hello(self) -> World:
        self.feed(ev.Started())
        self.feed(ev.BrokerFound(ENDPOINTS))
        return self

    def preparing(self) -> World:
        self.hello().receive(SETUP)
        return self

    def serving(self) -> World:
        self.preparing().feed(ev.ModelsFetched(MODELS, {}))
        self.feed(ev.ModelsLoaded(MODELS, PROFILES))
        assert self.session.state is State.SERVING
        return self

    def serving_with(self, *batches: int) -> World:
        self.serving()
        for number in batches:
            self.receive(batch(number))
        return self


def batch(number: int) -> Batch:
    return Batch(number, "m", "1", "c", (Frame("s", b"x", 1, (1,)),))


def done(number: int) -> ev.BatchFinished:
    return ev.BatchFinished(Done(number, ()))


def report(actions: list[Action]) -> tuple[str, ...]:
    return tuple(action.name for action in actions if isinstance(action, ev.Report))


def acts(actions: list[Action]) -> list[Action]:
    """Leave out the reports, which are for people."""
    return [action for action in actions if not isinstance(action, ev.Report)]


# -- from start to READY --------------------------------------------------------------------------------


def test_it_discovers_says_hello_fetches_loads_and_is_ready() -> None:
    """The whole way, action by action."""
    world = World()

    assert world.feed(ev.Started()) == [ev.FindBroker(5_000)]
    assert world.feed(ev.BrokerFound(ENDPOINTS)) == [ev.Connect("tcp://b:5558"), ev.Send(HELLO)]
    assert world.receive(SETUP) == [ev.UseLimits(Limits()), ev.FetchModels(MODELS, "tcp://b:5559")]
    assert world.feed(ev.ModelsFetched(MODELS, {"a": "/a"})) == [ev.LoadModels(MODELS, {"a": "/a"})]
    assert acts(world.feed(ev.ModelsLoaded(MODELS, PROFILES))) == [ev.Send(READY)]
    assert world.session.state is State.SERVING


def test_a_broker_that_is_not_there_is_looked_for_again_with_a_bounded_back_off() -> None:
    """100 ms, doubled up to 5 s; the last wait is no longer than the bound."""
    world = World()
    world.feed(ev.Started())
    waits = []
    for _ in range(9):
        world.feed(ev.BrokerNotFound("nobody"))
        due_ns = world.session.next_wakeup_ns()
        assert due_ns is not None
        waits.append((due_ns - world.now_ns) // MS)
        world.now_ns = due_ns
        assert world.feed(ev.Tick()) == [ev.FindBroker(5_000)]

    assert waits == [100, 200, 400, 800, 1600, 3200, 5000, 5000, 5000]


def test_figures_are_told_to_a_broker_that_knows_the_worker() -> None:
    """Without one they are left out: the next follow in seconds."""
    world = World()
    figures = ev.FiguresTaken({"gpu_busy_ratio": 0.5})

    assert world.feed(figures) == []
    assert world.hello().feed(figures) == []
    world.preparing()

    assert world.feed(figures) == [ev.Send(Telemetry(HELLO.worker, {"gpu_busy_ratio": 0.5}))]


def test_jitter_spreads_the_back_off_over_half_of_it() -> None:
    session = WorkerSession(HELLO, SessionSettings(), lambda: 0.0)
    session.handle(ev.Started(), 0)

    session.handle(ev.BrokerNotFound("nobody"), 0)

    assert session.next_wakeup_ns() == 50 * MS


def test_it_gives_up_when_told_to() -> None:
    """Without ``give_up_ms`` it waits for ever; with it, it ends and says for how long."""
    world = World(give_up_ms=1_000)
    world.feed(ev.Started())
    world.now_ns += 1_000 * MS

    assert world.feed(ev.BrokerNotFound("nobody")) == [
        ev.Exit(ExitCode.UNAVAILABLE, "no broker for 1000 ms: nobody")
    ]


def test_no_answer_to_hello_starts_over() -> None:
    world = World().hello()

    assert world.wait(9_999) == []
    assert acts(world.wait(1)) == [ev.Disconnect()]
    assert world.session.state is State.WAITING


def test_a_failed_fetch_starts_over_and_a_failed_load_ends_the_process() -> None:
    world = World().preparing()

    assert acts(world.feed(ev.FetchFailed(MODELS, "gone"))) == [ev.Disconnect()]
    assert world.feed(ev.LoadFailed(65, "IR version 99")) == [ev.Exit(65, "IR version 99")]


def test_a_model_that_cannot_be_served_is_told_to_the_broker() -> None:
    world = World().preparing()
    world.feed(ev.ModelsFetched(MODELS, {}))

    assert world.feed(ev.LoadFailed(65, "opset 99")) == [
        ev.Send(Goodbye("opset 99")),
        ev.Exit(65, "opset 99"),
    ]


# -- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refused", "code", "words"),
    [
        (Refused(Code.ID_IN_USE, "by pid 9"), ExitCode.CONFIG, ("w1", "in use", "by pid 9")),
        (Refused(Code.VERSION_MISMATCH, "speaks 2"), ExitCode.UNAVAILABLE, ("version 1", "1.0", "speaks 2")),
        (Refused(Code.BAD_READY, "slots is 0"), ExitCode.INTERNAL, ("READY", "slots is 0")),
        (Refused(Code.WORKER_STUCK, "batch 7"), ExitCode.DEVICE_LOST, ("told off", "batch 7")),
    ],
    ids=["id in use", "version mismatch", "bad ready", "stuck"],
)
def test_a_refusal_that_no_retry_mends_ends_the_process(
    refused: Refused, code: ExitCode, words: tuple[str, ...]
) -> None:
    """The exit code is not 0 and the reason names both sides."""
    (action,) = World().hello().receive(refused)

    assert isinstance(action, ev.Exit)
    assert action.code == code
    assert all(word in action.reason for word in words)


def test_a_message_of_another_protocol_version_ends_the_process() -> None:
    (action,) = World().hello().feed(ev.MessageUnreadable(Code.BAD_VERSION, "got 2"))

    assert isinstance(action, ev.Exit)
    assert "version 1" in action.reason
    assert "got 2" in action.reason


def test_any_other_unreadable_message_is_reported_and_survived() -> None:
    world = World().serving()

    actions = world.feed(ev.MessageUnreadable(Code.BAD_MSGPACK, "no map"))

    assert report(actions) == ("unreadable message",)
    assert world.session.state is State.SERVING


def test_unknown_peer_makes_it_introduce_itself_again_once() -> None:
    """A broker that lost track of us gets the same instance; a late refusal does not start a loop."""
    world = World().serving()

    assert world.receive(Refused(Code.UNKNOWN_PEER, "who?")) == [ev.Send(HELLO)]
    assert world.receive(Refused(Code.UNKNOWN_PEER, "who?")) == []
    assert acts(world.receive(SETUP)) == [ev.UseLimits(Limits()), ev.Send(READY)]


@pytest.mark.parametrize("code", [Code.TOO_MANY_WORKERS, Code.DRAINING])
def test_a_broker_that_can_take_no_worker_now_is_asked_later(code: Code) -> None:
    assert acts(World().hello().receive(Refused(code, "later"))) == [ev.Disconnect()]


# -- batches ------------------------------------------------------------------------------------------


def test_batches_are_run_and_answered() -> None:
    world = World().serving()

    assert world.receive(batch(1)) == [ev.RunBatch(batch(1))]
    assert world.feed(done(1)) == [ev.Send(Done(1, ()))]


def test_a_batch_beyond_the_slots_fails_at_once() -> None:
    """The broker never does this; if it does, the answer names the bound."""
    world = World().serving_with(1, 2)

    (action,) = world.receive(batch(3))

    assert action == ev.Send(Failed(3, Code.QUEUE_FULL, "this worker granted 2 slots"))


def test_a_batch_that_comes_twice_is_run_once() -> None:
    world = World().serving_with(1)

    assert acts(world.receive(batch(1))) == []


def test_a_batch_before_ready_fails_at_once() -> None:
    (action,) = World().preparing().receive(batch(1))

    assert isinstance(action, ev.Send)
    assert isinstance(action.message, Failed)


def test_cancel_drops_a_batch_that_is_here_and_ignores_others() -> None:
    """The pipeline decides whether it is too late; its answer frees the slot either way."""
    world = World().serving_with(1)

    assert world.receive(Cancel(1)) == [ev.DropBatch(1)]
    assert world.receive(Cancel(2)) == []
    cancelled = Failed(1, Code.CANCELLED, "")
    assert world.feed(ev.BatchFinished(cancelled)) == [ev.Send(cancelled)]


def test_a_cancelled_batch_gives_its_slot_back_at_once() -> None:
    """The broker counts it as gone. Behind a device that hangs they pile up to a bound."""
    world = World().serving_with(1, 2)
    world.receive(Cancel(1))

    assert world.receive(batch(3)) == [ev.RunBatch(batch(3))]
    for number in (2, 3):
        world.receive(Cancel(number))
    (action,) = world.receive(batch(4))

    assert isinstance(action, ev.Send)
    assert isinstance(action.message, Failed)


# -- losing and finding the broker again ------------------------------------------------------------------


def test_results_of_the_same_boot_are_sent_after_the_reconnect() -> None:
    """Held back until Setup tells who is there; READY only when nothing is left inside."""
    world = World().serving_with(1, 2)
    assert acts(world.feed(ev.LinkLost("cut"))) == [ev.Disconnect()]
    assert world.feed(done(1)) == []
    world.wait(100)
    assert world.feed(ev.BrokerFound(ENDPOINTS)) == [ev.Connect("tcp://b:5558"), ev.Send(HELLO)]

    assert world.receive(SETUP) == [ev.UseLimits(Limits()), ev.Send(Done(1, ()))]
    assert acts(world.feed(done(2))) == [ev.Send(Done(2, ())), ev.Send(READY)]


def test_a_new_boot_gets_nothing_of_the_old_ones_batches() -> None:
    """Another broker numbers batches anew: an old DONE would be taken for one of its own."""
    world = World().serving_with(1, 2)
    world.feed(ev.LinkLost("cut"))
    world.feed(done(1))
    world.wait(100)
    world.feed(ev.BrokerFound(ENDPOINTS))

    assert world.receive(replace(SETUP, boot=8)) == [ev.DropBatch(2), ev.UseLimits(Limits())]
    assert acts(world.feed(done(2))) == [ev.Send(READY)]
    assert world.receive(batch(2)) == [ev.RunBatch(batch(2))]


def test_other_models_are_loaded_only_when_the_pipeline_is_empty() -> None:
    world = World().serving_with(1)
    world.feed(ev.LinkLost("cut"))
    world.wait(100)
    world.feed(ev.BrokerFound(ENDPOINTS))
    others = (ModelSpec("n", "1"),)

    assert world.receive(replace(SETUP, models=others)) == [ev.UseLimits(Limits())]
    assert acts(world.feed(done(1))) == [ev.Send(Done(1, ())), ev.FetchModels(others, "tcp://b:5559")]


def test_a_reconnect_while_loading_does_not_load_twice() -> None:
    world = World().preparing()
    world.feed(ev.ModelsFetched(MODELS, {}))
    world.feed(ev.LinkLost("cut"))
    world.wait(100)
    world.feed(ev.BrokerFound(ENDPOINTS))

    assert world.receive(SETUP) == [ev.UseLimits(Limits())]
    assert acts(world.feed(ev.ModelsLoaded(MODELS, PROFILES))) == [ev.Send(READY)]


def test_silence_of_three_heartbeats_ends_the_connection() -> None:
    """Any message counts as a heartbeat."""
    world = World().serving()
    world.wait(100)
    world.receive(Heartbeat())
    for _ in range(2):
        world.wait(100)
    assert world.session.next_wakeup_ns() is not None

    actions = world.wait(100)

    assert acts(actions) == [ev.Disconnect()]
    assert world.session.state is State.WAITING


def test_a_worker_that_was_stopped_itself_does_not_blame_the_broker() -> None:
    """After SIGSTOP and SIGCONT the broker's messages are still on their way: one more interval for them."""
    world = World().serving()

    assert acts(world.wait(5_000)) == [ev.Send(Heartbeat())]
    assert world.session.state is State.SERVING
    assert acts(world.wait(100)) == [ev.Disconnect()]


# -- heartbeats ---------------------------------------------------------------------------------------


def test_a_heartbeat_is_sent_when_nothing_else_was_for_an_interval() -> None:
    world = World().serving()

    assert world.wait(99) == []
    assert world.wait(1) == [ev.Send(Heartbeat())]


def test_a_probe_is_answered_at_once_with_its_number() -> None:
    """ZMQ-07: also right after another message; and its answer counts as a heartbeat. A plain one is not
    answered."""
    world = World().serving()
    world.wait(60)

    assert world.receive(Heartbeat()) == []
    assert world.receive(Heartbeat(7)) == [ev.Send(Heartbeat(7))]
    assert world.receive(Heartbeat(8)) == [ev.Send(Heartbeat(8))]
    assert world.wait(99) == []


def test_a_probe_before_the_set_up_is_not_for_this_worker() -> None:
    """The broker probes workers that it knows."""
    assert World().hello().receive(Heartbeat(7)) == []


def test_a_claim_that_another_one_overtook_is_made_again() -> None:
    """Two processes claim one id: the one that lives comes back, after a moment and on a new connection."""
    world = World().hello()

    actions = world.receive(Refused(Code.ID_CLAIMED, "another process claims worker id w1 too"))

    assert acts(actions) == [ev.Disconnect()]
    assert world.session.state is State.WAITING


# -- leaving ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.DISCOVERING, State.WAITING, State.HELLO])
def test_prc_11_a_stop_without_a_broker_ends_at_once(state: State) -> None:
    """PRC-11: nothing is inside, nobody to tell."""
    world = World()
    world.feed(ev.Started())
    if state is not State.DISCOVERING:
        world.feed(ev.BrokerFound(ENDPOINTS))
    if state is State.WAITING:
        world.feed(ev.LinkLost("cut"))
    assert world.session.state is state

    assert world.feed(ev.StopRequested()) == [ev.Exit(ExitCode.OK, "stopped")]


def test_prc_03_a_stop_finishes_what_is_inside_and_waits_for_the_brokers_word() -> None:
    """PRC-03: goodbye, DONE, a barrier behind it, and exit 0 once the broker has taken all of it."""
    world = World().serving_with(1)

    assert world.feed(ev.StopRequested()) == [ev.Send(Goodbye("stopping"))]
    assert world.feed(done(1)) == [ev.Send(Done(1, ())), ev.Send(Discover())]
    assert world.receive(ENDPOINTS) == [ev.Exit(ExitCode.OK, "stopped")]


def test_a_batch_that_crossed_our_goodbye_is_run_before_we_leave() -> None:
    world = World().serving()
    assert world.feed(ev.StopRequested()) == [ev.Send(Goodbye("stopping")), ev.Send(Discover())]

    assert world.receive(batch(1)) == [ev.RunBatch(batch(1))]
    assert world.receive(ENDPOINTS) == []
    assert world.feed(done(1)) == [ev.Send(Done(1, ())), ev.Send(Discover())]
    assert world.receive(ENDPOINTS) == [ev.Exit(ExitCode.OK, "stopped")]


def test_a_broker_that_does_not_confirm_is_not_waited_for_long() -> None:
    world = World(barrier_ms=50).serving()
    world.feed(ev.StopRequested())

    (action,) = world.wait(50)

    assert isinstance(action, ev.Exit)
    assert action.code == ExitCode.OK


def test_a_batch_that_does_not_end_within_the_grace_is_handed_back() -> None:
    world = World(grace_ms=200).serving_with(1)
    world.feed(ev.StopRequested())
    world.wait(100)
    world.receive(Heartbeat())

    handed_back, left = world.wait(100)

    assert isinstance(handed_back, ev.Send)
    assert isinstance(handed_back.message, Failed)
    assert (handed_back.message.batch, handed_back.message.code) == (1, Code.SHUTDOWN)
    assert left == ev.Exit(ExitCode.FAILED, "grace ended with 1 batches unfinished")


def test_a_connection_lost_while_leaving_ends_it() -> None:
    (action,) = _draining_with_a_batch().feed(ev.LinkLost("cut"))

    assert isinstance(action, ev.Exit)
    assert "1 batches unfinished" in action.reason


def _draining_with_a_batch() -> World:
    world = World().serving_with(1)
    world.feed(ev.StopRequested())
    return world


def test_prc_09_after_a_device_failure_nothing_is_sent() -> None:
    """PRC-09: the exit has a code of its own, and results that come after it are lost on purpose."""
    world = World().serving_with(1, 2)

    assert world.feed(ev.EngineFailed(ExitCode.DEVICE_LOST, "CUDA error 700")) == [
        ev.Exit(ExitCode.DEVICE_LOST, "CUDA error 700")
    ]
    assert world.feed(done(1)) == []
    assert world.feed(ev.Tick()) == []
    assert world.session.next_wakeup_ns() is None


@pytest.mark.parametrize("message", [SETUP, READY, Goodbye("bye"), ENDPOINTS], ids=lambda m: type(m).__name__)
def test_a_message_out_of_place_changes_nothing(message: Message) -> None:
    world = World().serving()

    assert acts(world.receive(message)) == []
    assert world.session.state is State.SERVING


@pytest.mark.parametrize(
    ("event", "names"),
    [
        (ev.BrokerFound(ENDPOINTS), ()),
        (ev.BrokerNotFound("late"), ()),
        (ev.MessageReceived(Refused(Code.DRAINING, "stopping")), ()),
        (ev.MessageReceived(Refused(Code.BAD_FIELD, "batch")), ("refused by the broker",)),
        (ev.BatchFinished(Done(99, ())), ()),
    ],
    ids=["found late", "not found late", "draining", "another refusal", "unknown batch"],
)
def test_a_fact_that_comes_too_late_changes_nothing(event: Event, names: tuple[str, ...]) -> None:
    world = World().serving()

    actions = world.feed(event)

    assert acts(actions) == []
    assert report(actions) == names
    assert world.session.state is State.SERVING


def test_a_second_stop_and_a_lost_link_that_was_lost_before_change_nothing() -> None:
    world = World().serving_with(1)
    world.feed(ev.StopRequested())
    assert world.feed(ev.StopRequested()) == []

    waiting = World().hello()
    waiting.feed(ev.LinkLost("cut"))
    assert waiting.feed(ev.LinkLost("cut again")) == []
    assert waiting.wait(1) == []


# -- random walks -------------------------------------------------------------------------------------


class Walk:
    """A broker that dies and comes back, a network that cuts and a pipeline that is late, drawn from a seed.

    Checked at each step: nothing is sent without a connection; each batch is answered at most once, to the
    boot that sent it; READY only with an empty pipeline; the session's own invariants.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World()
        self.boot = 1
        self.is_up = True
        self.is_linked = False
        self.is_known = False  # the session has had a Setup on this connection
        self.inside: dict[int, int] = {}  # batch -> boot that sent it
        self.answered: set[tuple[int, int]] = set()
        self.busy: ev.FetchModels | ev.LoadModels | None = None
        self.last_batch = 0
        self.is_ready = False
        self.take(self.world.feed(ev.Started()))

    def feed(self, event: Event) -> None:
        self.take(self.world.feed(event))

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ev.Connect():
                    self.is_linked, self.is_known, self.is_ready = True, False, False
                case ev.Disconnect():
                    self.is_linked = self.is_known = self.is_ready = False
                case ev.Send(message):
                    assert self.is_linked, message
                    self.sent(message)
                case ev.RunBatch(each):
                    assert each.batch not in self.inside
                    self.inside[each.batch] = self.boot
                case ev.FetchModels() | ev.LoadModels():
                    assert self.busy is None
                    assert not self.inside
                    self.busy = action
                case ev.Exit():
                    raise AssertionError(action)

    def sent(self, message: Message) -> None:
        if isinstance(message, Done | Failed):
            assert self.is_known
            assert (self.boot, message.batch) not in self.answered
            self.answered.add((self.boot, message.batch))
        if isinstance(message, Ready):
            assert not self.inside
            self.is_ready = True

    def step(self) -> None:
        rng = self.rng
        match rng.randrange(10):
            case 0 | 1 if self.world.session.state is State.DISCOVERING:
                self.feed(ev.BrokerFound(ENDPOINTS) if self.is_up else ev.BrokerNotFound("down"))
            case 2 if self.is_up and self.is_linked and self.world.session.state is State.HELLO:
                self.is_known = True
                self.feed(ev.MessageReceived(replace(SETUP, boot=self.boot)))
            case 3 | 4 if self.is_up and self.is_ready and len(self.inside) < 2:
                # Numbers repeat across boots, as a new broker counts anew.
                self.last_batch += 1
                self.feed(ev.MessageReceived(batch(self.last_batch)))
            case 5 if self.inside:
                number = rng.choice(list(self.inside))
                del self.inside[number]
                self.feed(ev.BatchFinished(Done(number, ())))
            case 6 if self.inside and self.is_known:
                self.feed(ev.MessageReceived(Cancel(rng.choice(list(self.inside)))))
            case 7 if self.busy is not None:
                self.end_preparation()
            case 8:
                self.disturb()
            case _:
                self.take(self.world.wait(rng.choice((1, 50, 120))))
                if self.is_up and self.is_known:
                    self.feed(ev.MessageReceived(Heartbeat()))

    def end_preparation(self) -> None:
        busy, self.busy = self.busy, None
        if isinstance(busy, ev.LoadModels):
            self.feed(ev.ModelsLoaded(busy.models, PROFILES))
        elif busy is not None:
            is_failed = self.rng.random() < 0.2
            self.feed(ev.FetchFailed(MODELS, "cut") if is_failed else ev.ModelsFetched(MODELS, {}))

    def disturb(self) -> None:
        if self.rng.random() < 0.7:
            if self.is_linked:
                self.feed(ev.LinkLost("cut"))
            return
        self.is_up = not self.is_up
        if self.is_up:
            self.boot, self.last_batch = self.boot + 1, 0
        elif self.is_linked:
            self.feed(ev.LinkLost("broker gone"))

    def heal(self) -> None:
        """No more faults: the worker must come to serve."""
        self.is_up = True
        for _ in range(200):
            if self.is_ready:
                return
            state = self.world.session.state
            if self.inside:
                number = next(iter(self.inside))
                del self.inside[number]
                self.feed(ev.BatchFinished(Done(number, ())))
            elif self.busy is not None:
                self.end_preparation()
            elif state is State.DISCOVERING:
                self.feed(ev.BrokerFound(ENDPOINTS))
            elif state is State.HELLO:
                self.is_known = True
                self.feed(ev.MessageReceived(replace(SETUP, boot=self.boot)))
            else:
                self.take(self.world.wait(100))
        raise AssertionError(f"not ready after healing: {self.world.session.state}")


@pytest.mark.parametrize("seed", range(150))
def test_a_random_walk_keeps_every_promise_and_ends_ready(seed: int) -> None:
    """Safety at each step, liveness once the faults stop."""
    walk = Walk(seed)
    for _ in range(300):
        walk.step()

    walk.heal()
