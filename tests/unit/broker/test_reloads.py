"""Reloading a model in the core: what is sent to workers, what each failure leaves, and the ways back."""

from __future__ import annotations

import hr_core as hr
import pytest

from headrace.broker import actions as act
from headrace.broker import events
from headrace.broker.reload_state import MAX_COMPARED_FRAMES, Reload, ReloadOrder
from headrace.broker.reloads import Reloads
from headrace.protocol.messages import (
    ClassProfile,
    Compare,
    Compared,
    Load,
    Loaded,
    ModelFile,
    ModelProfile,
    ModelSpec,
    NotLoaded,
    Ready,
    SizeClassSpec,
    TensorSpec,
    Unload,
)

FILES = (ModelFile("net.onnx", "0f" * 32, 5),)
NEW = "2"
KEY = ("mean", NEW)


class Reloading(hr.CoreDriver):
    """A core with its default model, and short words for what happens in a reload."""

    def order(self, number: int = 1, *, frames_count: int = 0, version: str = NEW, **changes: object) -> None:
        order = ReloadOrder(number, "mean", "/m/new.onnx", version, frames_count, **changes)  # type: ignore[arg-type]
        self.send(events.ReloadAsked(order))
        self.send(events.ModelFilesRead(number, FILES))

    def profile(self, version: str = NEW) -> ModelProfile:
        return hr.profile(hr.make_spec(version=version))

    def loaded(self, peer: bytes = b"w1", version: str = NEW) -> list[act.Action]:
        self.send(events.ModelLoaded(peer, Loaded(self.profile(version))))
        return self.tick()

    def compared(self, frames: int = 4, peer: bytes = b"w1", version: str = NEW, **figures: object) -> None:
        self.send(events.BatchCompared(peer, Compared(1, version, frames, **figures)))  # type: ignore[arg-type]

    def switch(self, number: int = 1, *peers: bytes, version: str = NEW) -> list[act.Action]:
        """Reload without a comparison, up to the switch."""
        self.order(number, version=version)
        self.tick()
        done: list[act.Action] = []
        for peer in peers or (b"w1",):
            done = self.loaded(peer, version)
        return done

    @property
    def model(self) -> dict[str, object]:
        return self.core.status(self.now_ns)["models"][0]  # type: ignore[index, return-value]

    @property
    def reload(self) -> dict[str, object]:
        return self.model["reload"]  # type: ignore[return-value]

    @property
    def phase(self) -> object:
        return self.reload["phase"]


@pytest.fixture
def driver():
    driver = Reloading()
    driver.join_worker()
    driver.tick()
    yield driver
    driver.core.check_invariants()


def orders(actions: list[act.Action]) -> list[object]:
    """What workers were told, in order."""
    return [action.message for action in hr.only(actions, act.SendToWorker)]


def told(actions: list[act.Action], name: str) -> list[dict[str, object]]:
    return [dict(action.values) for action in hr.only(actions, act.Report) if action.name == name]


def versions(actions: list[act.Action]) -> list[str]:
    return [sent.batch.version for sent in hr.batches(actions)]


# -- the way there -----------------------------------------------------------------------------------


def test_workers_load_it_and_batches_then_go_with_it(driver):
    """Until all have it the old version serves; what is in flight ends on the old one, and says so."""
    driver.push(hr.frame(seq=0))
    before = driver.tick()
    driver.order()

    asked = driver.tick()
    driver.push(*[hr.frame(seq=seq) for seq in range(1, 5)])
    meanwhile = driver.tick()
    switched = driver.loaded()
    driver.push(*[hr.frame(seq=seq) for seq in range(5, 9)])
    driver.done(hr.batches(before)[0])
    after = driver.tick()

    assert [message.model for message in orders(asked)] == [
        ModelSpec("mean", NEW, FILES, hr.make_spec().image, (hr.SMALL, hr.LARGE))
    ]
    assert versions(before) + versions(meanwhile) == ["1", "1"]
    assert told(switched, "model switched") == [{"model": "mean:1", "version": NEW, "old": "1"}]
    assert versions(after) == [NEW]
    assert driver.phase == "switching"
    driver.done(hr.batches(meanwhile)[0])
    driver.tick()
    driver.done(hr.batches(after)[0])
    driver.tick()
    assert driver.phase == "live"
    assert [one.version for one in hr.outcomes(driver.actions)] == ["1"] * 5 + [NEW] * 4
    assert (driver.model["live_version"], driver.model["kept_version"]) == (NEW, "1")


def test_a_version_without_a_name_is_named_after_its_files(driver):
    """The same files have the same version, whoever asks for them."""
    driver.order(version="")

    (load,) = orders(driver.tick())

    assert load.model.version.startswith("1-")
    assert len(load.model.version) == 2 + 8


def test_workers_of_one_host_load_one_after_the_other(driver):
    """Loading takes processors from serving: not from all workers of a machine at once."""
    driver.join_worker(b"w2")
    driver.order()

    first = hr.only(driver.tick(), act.SendToWorker)
    second = hr.only(driver.loaded(b"w1"), act.SendToWorker)

    assert [action.peer for action in first] == [b"w1"]
    assert [action.peer for action in second] == [b"w2"]
    assert driver.phase == "loading"
    driver.loaded(b"w2")
    assert driver.model["live_version"] == NEW


def test_batches_are_compared_now_and_then(driver):
    """A sampled batch is announced right before it is sent; the next one not before 50 ms."""
    driver.order(frames_count=8)
    driver.tick()
    driver.loaded()

    sent = []
    for seq in range(3):
        driver.push(hr.frame(seq=seq))
        sent += driver.tick()
        driver.wait(30)

    kinds = [
        type(getattr(action, "message", action)) for action in sent if not isinstance(action, act.Report)
    ]
    (compare,) = orders(sent)
    assert kinds[:2] == [Compare, act.SendBatch]
    assert compare == Compare(hr.batches(sent)[0].batch.batch, NEW)


@pytest.mark.parametrize(
    ("limits", "figures", "phase"),
    [
        ({}, {"max_abs": 9.0, "agreed": 0}, "live"),
        ({"max_difference": 0.5}, {"max_abs": 0.5}, "live"),
        ({"max_difference": 0.5}, {"max_abs": 0.6}, "failed"),
        ({"max_difference": 0.5, "is_forced": True}, {"max_abs": 0.6}, "live"),
        ({"min_agreement": 0.75}, {"agreed": 3}, "live"),
        ({"min_agreement": 0.8}, {"agreed": 3}, "failed"),
        ({}, {"non_finite": 1}, "failed"),
        ({"is_forced": True}, {"non_finite": 1}, "live"),
    ],
)
def test_the_figures_decide_what_they_were_asked_to(driver, limits, figures, phase):
    """Without a tolerance they are reported only, but a NaN where there was none is never let through."""
    driver.order(frames_count=4, **limits)
    driver.tick()
    driver.loaded()

    driver.compared(4, **figures)
    driver.tick()

    assert driver.phase == phase
    assert driver.reload["frames"] == 4
    assert driver.reload["code"] == ("reload_differs" if phase == "failed" else "")


def test_only_workers_that_have_it_compare(driver):
    """One that came while others compare loads it first, and the switch waits for it."""
    driver.order(frames_count=4)
    driver.tick()
    driver.loaded()
    driver.join_worker(b"w2", per_batch_ms=1.0)
    driver.tick()

    driver.push(hr.frame(seq=0))
    sent = driver.tick()
    driver.compared(4)
    driver.tick()
    waiting = driver.phase
    driver.loaded(b"w2")

    assert [batch.peer for batch in hr.batches(sent)] == [b"w2"]
    assert orders(sent) == []
    assert (waiting, driver.phase) == ("comparing", "switching")


def test_another_configured_version_is_left_alone():
    """Two versions side by side in the configuration are two models: a reload is of one of them."""
    driver = Reloading(hr.make_settings(hr.make_spec(version="1"), hr.make_spec(version="3")))
    driver.join_worker()
    driver.tick()
    driver.send(events.ReloadAsked(ReloadOrder(1, "mean:1", version=NEW, frames_count=0)))
    driver.send(events.ModelFilesRead(1, FILES))
    driver.tick()
    driver.loaded()

    driver.push(hr.frame(seq=0, model="mean:1"))
    sent = driver.tick()
    driver.done(hr.batches(sent)[0])
    driver.push(hr.frame("b", seq=0, model="mean"))

    assert versions(sent + driver.tick()) == [NEW, "3"]
    driver.core.check_invariants()


def test_what_was_not_compared_does_not_count(driver):
    """A batch that could not be compared, and one of another reload, leave the figures alone."""
    driver.order(frames_count=4)
    driver.compared(4)
    driver.tick()
    driver.loaded()

    driver.compared(0)
    driver.compared(4, version="7")
    driver.tick()

    assert (driver.phase, driver.reload["frames"], driver.reload["agreement"]) == ("comparing", 0, 1.0)


# -- what goes wrong ---------------------------------------------------------------------------------


def fail_to_load(driver: Reloading) -> None:
    driver.send(events.ModelNotLoaded(b"w1", NotLoaded(*KEY, "load_failed", "no batch axis")))


def lose_the_worker(driver: Reloading) -> None:
    driver.send(events.PeerUnreachable(b"w1"))


def run_out_of_time(driver: Reloading) -> None:
    driver.hear(b"w1")
    driver.now_ns += 2_000 * hr.MS
    driver.hear(b"w1")


def give_up(driver: Reloading) -> None:
    driver.send(events.RollbackAsked("mean"))


def describe_less(driver: Reloading) -> None:
    whole = driver.profile()
    driver.send(events.ModelLoaded(b"w1", Loaded(ModelProfile(*KEY, whole.classes[:1], ()))))


def describe_wrongly(driver: Reloading) -> None:
    driver.send(events.ModelLoaded(b"w1", Loaded(ModelProfile(*KEY, (), ()))))


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (fail_to_load, "load_failed", "worker w1 could not load it (load_failed): no batch axis"),
        (lose_the_worker, "worker_lost", "worker w1 was lost after it was asked to load it"),
        (run_out_of_time, "reload_timeout", "0 of 1 workers had loaded it in 2 s"),
        (give_up, "reload_refused", "it was given up, as asked"),
        (describe_less, "reload_refused", "does not run size class large"),
        (describe_wrongly, "reload_refused", "0 size classes described"),
    ],
)
def test_a_failure_while_loading_leaves_the_old_version(driver, fault, code, words):
    """Whatever goes wrong, the reload ends with its reason and the old version serves on."""
    driver.order(timeout_ms=2_000)
    driver.tick()

    fault(driver)
    driver.tick()

    assert (driver.phase, driver.reload["code"]) == ("failed", code)
    assert words in driver.reload["message"]
    assert (driver.model["live_version"], driver.model["kept_version"]) == ("1", "")


def test_a_failure_while_comparing_unloads_it_again(driver):
    """Its memory is freed, samples are no longer taken."""
    driver.order(frames_count=4)
    driver.tick()
    driver.loaded()

    driver.compared(0, error="it broke")
    unloaded = driver.tick()
    driver.push(hr.frame(seq=0))
    after = driver.tick()

    assert (driver.phase, driver.reload["code"]) == ("failed", "load_failed")
    assert orders(unloaded) == [Unload(*KEY)]
    assert orders(after) == []
    assert versions(after) == ["1"]


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (0, "the files were not read in 1 s"),
        (1, "0 of 0 workers had loaded"),
        (2, "0 of 4 frames were compared"),
    ],
)
def test_the_time_that_ran_out_says_what_was_missing(steps, words):
    """Nobody waits for ever, and everybody learns what for."""
    driver = Reloading()
    driver.send(events.ReloadAsked(ReloadOrder(1, "mean", version=NEW, frames_count=4, timeout_ms=1_000)))
    if steps:
        driver.send(events.ModelFilesRead(1, FILES))
    if steps == 2:
        driver.join_worker()
        driver.tick()
        driver.loaded()
    driver.tick()
    driver.hear(b"w1")

    driver.wait(1_000)

    assert driver.reload["code"] == "reload_timeout"
    assert words in driver.reload["message"]


def test_files_that_cannot_be_read_end_it(driver):
    """The broker's own words reach whoever asked; answers for other reloads change nothing."""
    driver.send(events.ReloadAsked(ReloadOrder(3, "mean")))

    driver.send(events.ModelFilesUnreadable(2, "not mine"))
    driver.send(events.ModelFilesRead(2, FILES))
    driver.send(events.ModelFilesUnreadable(3, "new.onnx can't be opened"))

    assert (driver.phase, driver.reload["message"]) == ("failed", "new.onnx can't be opened")


def test_a_version_that_is_served_is_refused(driver):
    """Two things under one name could not be told apart."""
    driver.order(version="1")

    assert (driver.phase, driver.reload["code"]) == ("failed", "reload_refused")


def test_a_version_still_in_flight_is_refused(driver):
    """It may come back when its last batch is done."""
    driver.push(hr.frame(seq=0))
    (sent,) = hr.batches(driver.tick())
    driver.switch()
    driver.send(events.CommitAsked("mean"))
    driver.tick()

    driver.order(2, version="1")

    assert driver.reload["code"] == "reload_busy"
    driver.done(sent)
    assert orders(driver.tick()) == [Unload("mean", "1")]


def test_files_read_twice_count_once(driver):
    """The second reading is nobody's."""
    driver.order()
    driver.send(events.ModelFilesRead(1, FILES))

    assert len(orders(driver.tick())) == 1


# -- ways back ---------------------------------------------------------------------------------------


def test_a_rollback_is_one_step(driver):
    """From the next batch on the old version serves; the new one goes when its last batch is done."""
    driver.switch()
    driver.push(hr.frame(seq=0))
    (sent,) = hr.batches(driver.tick())

    driver.send(events.RollbackAsked("mean"))
    driver.push(*[hr.frame(seq=seq) for seq in range(1, 5)])
    back = driver.tick()
    driver.done(sent)
    end = driver.tick()

    assert versions(back) == ["1"]
    assert orders(back) == []
    assert orders(end) == [Unload(*KEY)]
    assert driver.phase == "rolled_back"
    assert (driver.model["live_version"], driver.model["kept_version"]) == ("1", "")


def test_a_commit_lets_the_old_version_go(driver):
    """There is no way back after it."""
    driver.switch()

    driver.send(events.CommitAsked("mean"))
    unloaded = driver.tick()
    driver.send(events.RollbackAsked("mean"))

    assert orders(unloaded) == [Unload("mean", "1")]
    assert (driver.phase, driver.model["live_version"]) == ("committed", NEW)


def test_the_next_reload_lets_the_kept_version_go(driver):
    """One version beside the one that serves: memory has a bound."""
    driver.switch()
    driver.tick()

    again = driver.switch(2, version="3")

    assert driver.model["kept_version"] == NEW
    assert orders(again) == []
    assert Unload("mean", "1") in orders(driver.actions)


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (events.ReloadAsked(ReloadOrder(9, "nobody")), "not_found"),
        (events.RollbackAsked("nobody"), "not_found"),
        (events.RollbackAsked("mean"), "not_found"),
        (events.CommitAsked("mean"), "not_found"),
    ],
)
def test_what_cannot_be_done_is_refused(driver, event, code):
    """The question tells why, and the event itself changes nothing."""
    refusal = driver.core.reloads.find_refusal(event)

    done = driver.send(event)

    assert refusal is not None
    assert refusal[0] == code
    assert done == []
    assert driver.reload is None


def test_an_order_during_a_reload_is_refused(driver):
    """One at a time; giving it up is possible, committing it not yet."""
    driver.order()
    reloads: Reloads = driver.core.reloads

    refused = [
        reloads.find_refusal(event)
        for event in (events.ReloadAsked(ReloadOrder(2, "")), events.CommitAsked("mean"))
    ]
    driver.send(events.ReloadAsked(ReloadOrder(2, "")))
    driver.send(events.CommitAsked("mean"))

    assert [one[0] for one in refused] == ["reload_busy", "reload_busy"]
    assert reloads.find_refusal(events.RollbackAsked("mean")) is None
    assert reloads.find_refusal(events.ModelFilesUnreadable(1, "")) is None
    assert driver.reload["number"] == 1


# -- workers that come and go ------------------------------------------------------------------------


def test_a_worker_that_joins_after_the_switch_loads_both(driver):
    """It can take part in a rollback at once."""
    driver.switch()

    (setup,) = hr.only(driver.send(events.WorkerArrived(b"w2", hr.hello("w2"))), act.SetUpWorker)

    assert [spec.version for spec in setup.models] == [NEW, "1"]


def test_a_worker_set_up_before_the_switch_gets_no_batch_until_it_has_the_new_version(driver):
    """It came READY with the old version alone: it is asked to load the new one first."""
    driver.send(events.WorkerArrived(b"w2", hr.hello("w2")))
    driver.switch()
    ready = Ready("w2", 1, 2, (driver.profile("1"),))

    driver.send(events.WorkerReady(b"w2", ready))
    asked = driver.tick()
    before = driver.model["workers"]
    driver.loaded(b"w2")

    assert [type(order) for order in orders(asked)] == [Load]
    assert (before, driver.model["workers"]) == (1, 2)


def test_a_worker_that_cannot_load_what_serves_is_left_out(driver):
    """It is asked once; the others serve."""
    driver.send(events.WorkerArrived(b"w2", hr.hello("w2")))
    driver.switch()
    driver.send(events.WorkerReady(b"w2", Ready("w2", 1, 2, (driver.profile("1"),))))
    driver.tick()

    driver.send(events.ModelNotLoaded(b"w2", NotLoaded(*KEY, "load_failed", "no memory")))
    after = driver.tick()
    driver.send(events.ModelNotLoaded(b"w2", NotLoaded(*KEY, "load_failed", "no memory")))

    assert orders(after) == []
    assert len(told(driver.actions, "version not served by a worker")) == 1
    assert driver.model["workers"] == 1


def test_a_failed_try_can_be_repeated(driver):
    """A later reload to the same version asks the worker again."""
    driver.order()
    driver.tick()
    fail_to_load(driver)
    driver.tick()

    driver.order(2)
    asked = driver.tick()

    assert [type(order) for order in orders(asked)] == [Load]


def test_a_worker_that_leaves_is_no_failure(driver):
    """Only one that is lost may have been killed by the new version."""
    driver.join_worker(b"w2")
    driver.order()
    driver.tick()

    driver.send(events.WorkerLeft(b"w1"))
    driver.tick()
    driver.loaded(b"w2")

    assert driver.model["live_version"] == NEW


def test_a_worker_that_leaves_gets_no_batch_for_what_it_loads_at_last(driver):
    """It has said goodbye and finishes what it holds; the others decide."""
    driver.push(hr.frame(seq=0))
    (sent,) = hr.batches(driver.tick())
    driver.join_worker(b"w2")
    driver.order()
    driver.tick()
    driver.send(events.WorkerLeft(b"w1"))

    driver.loaded(b"w1")
    driver.loaded(b"w2")
    driver.push(hr.frame(seq=1))

    assert [batch.peer for batch in hr.batches(driver.tick())] == [b"w2"]
    driver.done(sent)


def test_a_version_that_comes_too_late_is_unloaded(driver):
    """The reload was given up meanwhile; a second word of the same changes nothing."""
    driver.order()
    driver.tick()
    give_up(driver)
    driver.tick()

    late = driver.send(events.ModelLoaded(b"w1", Loaded(driver.profile())))
    known = driver.send(events.ModelLoaded(b"w1", Loaded(driver.profile("1"))))

    assert orders(late) == [Unload(*KEY)]
    assert known == []


def test_a_worker_ready_with_what_was_let_go_unloads_it(driver):
    """Its set-up named a version that is history when it comes READY."""
    driver.switch()
    driver.send(events.WorkerArrived(b"w2", hr.hello("w2")))
    driver.send(events.CommitAsked("mean"))
    driver.tick()

    driver.send(events.WorkerReady(b"w2", Ready("w2", 1, 2, (driver.profile(), driver.profile("1")))))

    assert orders(driver.tick()) == [Unload("mean", "1")]


@pytest.mark.parametrize(
    "event",
    [
        events.ModelLoaded(b"w9", Loaded(hr.profile(hr.make_spec()))),
        events.ModelNotLoaded(b"w9", NotLoaded(*KEY, "load_failed", "")),
        events.BatchCompared(b"w9", Compared(1, NEW)),
    ],
)
def test_an_unknown_worker_is_asked_to_introduce_itself(driver, event):
    """As with every other word of it."""
    (refusal,) = hr.only(driver.send(event), act.RefusePeer)

    assert refusal.code == "unknown_peer"


def test_other_inputs_of_tensors_are_refused():
    """What frames bring must be what the new version takes."""
    spec = ModelSpec("sum", "1")
    driver = Reloading(hr.make_settings(spec))
    tensor = SizeClassSpec("tensor", 0, 0)
    classes = (ClassProfile(tensor, ((1, 1.0),)),)
    old = ModelProfile("sum", "1", classes, (TensorSpec("x", "float32", (4,)),))
    driver.join_worker(profiles=[old])
    driver.tick()
    driver.send(events.ReloadAsked(ReloadOrder(1, "sum", version=NEW, frames_count=0)))
    driver.send(events.ModelFilesRead(1, FILES))
    driver.tick()

    new = ModelProfile("sum", NEW, classes, (TensorSpec("x", "float32", (5,)),))
    driver.send(events.ModelLoaded(b"w1", Loaded(new)))

    assert driver.reload["code"] == "reload_refused"
    assert "takes other inputs: x float32 [5], not x float32 [4]" in driver.reload["message"]


#: A reload that the core knows nothing of.
STRAY = Reload(ReloadOrder(9, "m"), 0, "1")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda core: setattr(core.models.classes[0], "live_version", "7"), "live is 1"),
        (
            lambda core: setattr(core.models.classes[0], "sampled_by", Reload(ReloadOrder(9, "m"), 0, "1")),
            "samples are taken",
        ),
        (lambda core: core.models.all()[0].retired.append(core.models.all()[0].live), "two places"),
        (lambda core: core.workers.by_id["w1"].profiles.clear(), "on an unloaded 1"),
    ],
)
def test_a_contradiction_is_noticed(spoil, words):
    """The invariants can fail."""
    driver = Reloading()
    driver.join_worker()
    driver.push(hr.frame(seq=0))
    driver.tick()
    driver.core.reloads.check_invariants()

    spoil(driver.core)

    with pytest.raises(AssertionError, match=words):
        driver.core.reloads.check_invariants()


def test_reloaded_versions_are_forgotten_beyond_a_bound(driver):
    """The table of names does not grow with the number of reloads."""
    for number in range(1, 80):
        driver.order(number, version=f"v{number}")
        give_up(driver)
        driver.tick()

    assert driver.core.models.get("mean", "v1") is None
    assert driver.core.models.get("mean", "v79") is not None
    assert MAX_COMPARED_FRAMES > 1_000
