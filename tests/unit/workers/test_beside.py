"""A model beside those that serve: loaded while batches run, compared, unloaded; nothing else notices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import hr_models
import numpy as np
import pytest
from hr_engine import SPEC, TIMEOUT_S, GatedEngine, Running
from hr_worker import batch_of, raw_frame

from headrace.errors import ModelError
from headrace.protocol.messages import Batch, Compared, Done, Failed, ImageInput, ModelSpec, SizeClassSpec
from headrace.workers import worker_events as ev
from headrace.workers.cpu_engine import CpuEngine
from headrace.workers.engine import ModelKey

SMALL = SizeClassSpec("small", 8, 8, 4)


def spec_of(folder: Path, model: object, version: str, **fields: object) -> tuple[ModelSpec, dict[str, str]]:
    (folder / version).mkdir()
    fields = {"image": ImageInput(), "size_classes": (SMALL,), **fields}
    spec, files = hr_models.save(folder / version, model, version=version, **fields)  # type: ignore[arg-type]
    return spec, dict.fromkeys([spec.files[0].sha256], *files.values())


class Serving(Running):
    """The mean of each channel at version 1, by the CPU engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        spec, files = spec_of(folder, hr_models.mean_color(), "1")
        super().__init__(lambda: CpuEngine(profile_budget_ms=50), spec, files=files)

    def load(self, model: object, version: str, **fields: object) -> object:
        """Load one more model; return what is told of it."""
        spec, files = spec_of(self.folder, model, version, **fields)
        self.pipeline.load_beside(spec, files)
        return self.events.get(timeout=TIMEOUT_S)

    def compared(self) -> Compared:
        event = self.events.get(timeout=TIMEOUT_S)
        assert isinstance(event, ev.BatchCompared), event
        return event.message


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path) as running:
        yield running


def numbered(number: int, *values: int, version: str = "1") -> Batch:
    frames = batch_of(*(raw_frame(np.full((8, 8, 3), value, np.uint8)) for value in values)).frames
    return Batch(number, "m", version, "small", frames)


def reds(message: Done | Failed) -> list[float]:
    assert isinstance(message, Done), message
    return [float(np.frombuffer(result.payloads[0], "<f4")[0]) for result in message.results]


def test_each_version_answers_for_itself(serving):
    """Batches name the version that they are for; the first one stays as it is."""
    told = serving.load(hr_models.mean_color_plus(0.5), "2")
    serving.run(numbered(1, 10), numbered(2, 10, 20, version="2"))

    answers = [serving.result(), serving.result()]

    assert isinstance(told, ev.BesideLoaded)
    assert (told.profile.version, [one.size_class.name for one in told.profile.classes]) == ("2", ["small"])
    assert sorted(map(reds, answers)) == [[10.0], [10.5, 20.5]]


def test_batches_run_while_a_model_is_loaded():
    """Loading waits for nobody, and nobody for loading."""
    is_loading, may_go_on = threading.Event(), threading.Event()

    class Slow(GatedEngine):
        def load(self, spec: ModelSpec, files: dict[str, str]) -> None:
            if spec.version == "2":
                is_loading.set()
                assert may_go_on.wait(TIMEOUT_S)

    with Running(Slow) as running:
        running.pipeline.load_beside(ModelSpec("m", "2", size_classes=SPEC.size_classes), {})
        assert is_loading.wait(TIMEOUT_S)

        running.run(numbered(1, 7))

        assert reds(running.done()) == [7.0]
        may_go_on.set()
        assert isinstance(running.events.get(timeout=TIMEOUT_S), ev.BesideLoaded)


def test_a_model_that_fails_its_self_test_is_not_served(serving):
    """The reason is told; the version that serves goes on."""
    told = serving.load(hr_models.row_mixing(), "2")
    serving.run(numbered(1, 10), numbered(2, 10, version="2"))

    answers = [serving.result(), serving.result()]

    assert isinstance(told, ev.BesideFailed)
    assert told.code == "load_failed"
    assert "depends on the other frames of its batch" in told.reason
    assert [answer.code for answer in answers if isinstance(answer, Failed)] == ["unknown_model"]


def test_an_unexpected_failure_is_told_without_a_librarys_words():
    """Whatever a library raises is the fate of the new model alone."""

    class Broken(GatedEngine):
        def load(self, spec: ModelSpec, files: dict[str, str]) -> None:
            if spec.version == "2":
                raise KeyError("inner words")

    with Running(Broken) as running:
        running.pipeline.load_beside(ModelSpec("m", "2"), {})
        told = running.events.get(timeout=TIMEOUT_S)

    assert told == ev.BesideFailed(ModelSpec("m", "2"), "load_failed", "loading it failed: KeyError")


def test_a_device_that_cannot_be_made_twice_is_told():
    """Making the second engine may fail as well."""
    made: list[GatedEngine] = []

    def make() -> GatedEngine:
        if made:
            raise ModelError("no memory for a second one")
        made.append(GatedEngine())
        return made[0]

    with Running(make) as running:
        running.pipeline.load_beside(ModelSpec("m", "2"), {})
        told = running.events.get(timeout=TIMEOUT_S)

    assert told.reason == "no memory for a second one"


def test_an_engine_that_cannot_load_beside_says_so():
    """A reload of it is refused, and it serves on."""

    class Alone(GatedEngine):
        name = "cuda"
        loads_beside = False

    with Running(Alone) as running:
        running.pipeline.load_beside(ModelSpec("m", "2"), {})
        told = running.events.get(timeout=TIMEOUT_S)
        running.run(numbered(1, 7))
        answer = running.done()

    assert told.code == "reload_refused"
    assert reds(answer) == [7.0]


def test_an_unloaded_model_is_gone(serving):
    """Beside the others, or one of those that were there from the start."""
    serving.load(hr_models.mean_color_plus(0.5), "2")

    serving.pipeline.unload(ModelKey("m", "1"))
    serving.run(numbered(1, 10))
    first = serving.result()
    serving.run(numbered(2, 10, version="2"))
    second = serving.result()
    serving.pipeline.unload(ModelKey("m", "2"))
    serving.run(numbered(3, 10, version="2"))
    third = serving.result()

    assert (first.code, reds(second), third.code) == ("unknown_model", [10.5], "unknown_model")


def test_loading_anew_lets_everything_go(serving, tmp_path):
    """As after a restart of the broker."""
    serving.load(hr_models.mean_color_plus(0.5), "2")
    spec, files = spec_of(tmp_path, hr_models.mean_color(), "3")

    serving.pipeline.load((spec,), files)
    assert isinstance(serving.events.get(timeout=TIMEOUT_S), ev.ModelsLoaded)
    serving.run(numbered(1, 10, version="2"))

    assert serving.result().code == "unknown_model"


# -- comparing ---------------------------------------------------------------------------------------


def test_a_marked_batch_is_answered_and_then_compared(serving):
    """The answer is the old version's; the difference is known exactly."""
    serving.load(hr_models.mean_color_plus(0.5), "2")

    serving.pipeline.compare(1, "2")
    serving.run(numbered(1, 10, 20, 30))

    assert reds(serving.done()) == [10.0, 20.0, 30.0]
    compared = serving.compared()
    assert (compared.batch, compared.version, compared.frames, compared.agreed) == (1, "2", 3, 3)
    assert compared.max_abs == pytest.approx(0.5)
    assert compared.max_rel == pytest.approx(0.5 / 30)


def test_only_marked_batches_are_compared(serving):
    """The next one is not."""
    serving.load(hr_models.mean_color_plus(0.5), "2")
    serving.pipeline.compare(1, "2")
    serving.run(numbered(1, 10))
    serving.done()
    serving.compared()

    serving.run(numbered(2, 10))
    serving.run(numbered(3, 10))

    assert [serving.done().batch, serving.done().batch] == [2, 3]


@pytest.mark.parametrize("version", ["1", "9"])
def test_a_version_that_is_not_beside_is_not_compared(serving, version):
    """It is told that nothing was compared."""
    serving.pipeline.compare(1, version)
    serving.run(numbered(1, 10))

    serving.done()
    assert serving.compared() == Compared(1, version)


def test_a_smaller_batch_size_compares_what_fits(serving):
    """The other version may hold fewer frames."""
    serving.load(hr_models.mean_color_plus(0.5), "2", size_classes=(SizeClassSpec("small", 8, 8, 2),))
    serving.pipeline.compare(1, "2")

    serving.run(numbered(1, 10, 20, 30))

    serving.done()
    assert serving.compared().frames == 2


def test_a_fixed_batch_is_padded(serving):
    """As batches are that are served."""
    serving.load(hr_models.mean_color(batch=4), "2")
    serving.pipeline.compare(1, "2")

    serving.run(numbered(1, 10, 20, 30))

    serving.done()
    assert serving.compared() == Compared(1, "2", 3, 3)


def test_another_size_of_a_class_cannot_be_compared(serving):
    """Its inputs are others; the broker refuses such a version before."""
    serving.load(hr_models.mean_color(), "2", size_classes=(SizeClassSpec("small", 16, 16, 4),))
    serving.pipeline.compare(1, "2")

    serving.run(numbered(1, 10))

    serving.done()
    assert "its inputs are" in serving.compared().error


def test_other_outputs_are_an_error(serving):
    """Whoever reads the results would not know what to do with them."""
    serving.load(hr_models.pixels(), "2")
    serving.pipeline.compare(1, "2")

    serving.run(numbered(1, 10))

    serving.done()
    assert "has shape" in serving.compared().error


def test_a_failed_batch_is_not_compared():
    """It has no outputs to compare with."""
    with Running(lambda: GatedEngine(fate={1: "error"})) as running:
        running.pipeline.load_beside(ModelSpec("m", "2", size_classes=SPEC.size_classes), {})
        running.events.get(timeout=TIMEOUT_S)
        running.pipeline.compare(1, "2")

        running.run(numbered(1, 10))

        assert isinstance(running.result(), Failed)
        assert running.events.get(timeout=TIMEOUT_S) == ev.BatchCompared(Compared(1, "2"))


@pytest.mark.parametrize(("fate", "words"), [("error", "its run failed"), ("raise", "it was refused")])
def test_a_version_that_fails_on_a_live_batch_says_so(fate, words):
    """The batch has had its answer."""
    engines = [GatedEngine(), GatedEngine(fate={1: fate})]
    with Running(lambda: engines.pop(0)) as running:
        running.pipeline.load_beside(ModelSpec("m", "2", size_classes=SPEC.size_classes), {})
        running.events.get(timeout=TIMEOUT_S)
        running.pipeline.compare(1, "2")

        running.run(numbered(1, 10))

        assert reds(running.done()) == [10.0]
        assert words in running.events.get(timeout=TIMEOUT_S).message.error


def test_marks_of_batches_that_never_come_have_a_bound(serving):
    """A connection may be lost between the mark and the batch."""
    for number in range(1_000):
        serving.pipeline.compare(number, "2")

    serving.run(numbered(999, 10))

    serving.done()
    assert serving.compared() == Compared(999, "2")
