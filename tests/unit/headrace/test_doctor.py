"""The doctor says what is amiss in words, and what to do."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import hr_models
import pytest
from click.testing import CliRunner

from headrace import config, doctor
from headrace.cli.doctor import command
from headrace.doctor import Finding, Gpu, Host, Verdict, examine
from headrace.doctor_memory import examine_memory
from headrace.protocol.messages import SizeClassSpec

GPU = Gpu("H200", "13.0", 91900, 100 * 2**30, 139 * 2**30)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A fit machine without a GPU."""
    _write(tmp_path, "proc/sys/net/core/rmem_max", "4194304")
    _write(tmp_path, "proc/sys/net/core/wmem_max", "4194304")
    _write(tmp_path, "sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n")
    versions = {"onnxruntime": "1.31.1"}
    return Host(tmp_path, Path("/dev/shm"), versions.get, None, "no CUDA device", 8, 65536, 2**30)


def _write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def _of(host: Host, check: str) -> Finding:
    return next(each for each in examine(host) if each.check == check)


def test_a_fit_machine_has_nothing_to_mend(host: Host) -> None:
    """Without a GPU there are notes, no warnings."""
    findings = examine(host)

    assert {each.verdict for each in findings} == {Verdict.OK, Verdict.NOTE}
    assert not [each.remedy for each in findings if each.remedy]


@pytest.mark.parametrize(
    "versions", [{}, {"onnxruntime": "1", "onnxruntime-gpu": "1"}], ids=["neither", "both"]
)
def test_not_exactly_one_runtime_stops_workers(host: Host, versions: dict[str, str]) -> None:
    """Both packages write to one folder; without any nothing runs."""
    found = _of(dataclasses.replace(host, installed=versions.get), "onnxruntime")

    assert found.verdict is Verdict.STOPS
    assert "pip install 'headrace[" in found.remedy


@pytest.mark.parametrize(
    ("change", "check", "words"),
    [
        ({"shm_free_bytes": 64 * 2**20}, "shared memory", "--shm-size"),
        ({"open_files": 1024}, "open files", "ulimit -n 4096"),
        ({"cpus": 1}, "threads", "allow 2 CPUs"),
        ({"gpu": dataclasses.replace(GPU, cudnn=0)}, "cudnn", "onnxruntime-gpu[cuda,cudnn]"),
        ({"gpu": dataclasses.replace(GPU, free_bytes=2**30)}, "gpu memory", "gpu_memory_mb"),
    ],
)
def test_what_is_short_is_a_warning_with_a_remedy(
    host: Host, change: dict[str, object], check: str, words: str
) -> None:
    """Each shortage names the command or key that mends it."""
    found = _of(dataclasses.replace(host, **change), check)  # type: ignore[arg-type]

    assert found.verdict is Verdict.WARNING
    assert words in found.remedy


def test_pure_python_is_noted_with_what_compiling_needs(host: Host) -> None:
    """It works, and costs a broker CPU."""
    found = _of(dataclasses.replace(host, is_compiled=False), "headrace")

    assert found.verdict is Verdict.NOTE
    assert "C compiler" in found.remedy


@pytest.mark.parametrize(
    ("version", "verdict"), [("580.65.06", Verdict.OK), ("535.104", Verdict.WARNING), ("?", Verdict.WARNING)]
)
def test_the_driver_must_know_cuda_13(host: Host, version: str, verdict: Verdict) -> None:
    """A driver without a device that torch can use is worth a warning as well."""
    _write(host.root, "proc/driver/nvidia/version", f"NVRM version: Kernel Module  {version}  Tue\n")

    assert _of(host, "driver").verdict is verdict
    assert _of(host, "cuda").verdict is Verdict.WARNING


def test_a_gpu_is_named_with_what_is_free(host: Host) -> None:
    """The versions are as people write them."""
    host = dataclasses.replace(host, gpu=GPU, no_gpu="")

    assert _of(host, "cuda").text == "H200 with CUDA 13.0"
    assert _of(host, "cudnn").text == "cuDNN 9.19.0"
    assert _of(host, "gpu memory").text.startswith("102400 of 142336 MiB")


def test_a_slow_clock_and_small_buffers_are_told(host: Host) -> None:
    """Small buffers are a note: TCP tunes itself by another limit."""
    _write(host.root, "sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet")
    _write(host.root, "proc/sys/net/core/rmem_max", "212992")

    assert _of(host, "clock").verdict is Verdict.WARNING
    assert _of(host, "socket buffers").verdict is Verdict.NOTE
    assert "net.core.rmem_max=2500000" in _of(host, "socket buffers").remedy


def test_what_cannot_be_read_is_a_note(host: Host, tmp_path: Path) -> None:
    """A machine that is not Linux has no /proc, /sys or /dev/shm."""
    bare = dataclasses.replace(host, root=tmp_path / "none", shm=None)

    for check in ("shared memory", "socket buffers", "clock", "driver"):
        assert _of(bare, check).verdict is Verdict.NOTE


@pytest.mark.parametrize(("versions", "code"), [({"onnxruntime": "1"}, 0), ({}, 1)])
def test_the_command_ends_with_1_when_something_stops_it(
    host: Host, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], code: int
) -> None:
    """Scripts read the exit code and the JSON; people read lines."""
    monkeypatch.setattr(doctor, "this_host", lambda: dataclasses.replace(host, installed=versions.get))
    runner = CliRunner()

    as_json = runner.invoke(command, ["--json"], standalone_mode=False)
    as_text = runner.invoke(command, [], standalone_mode=False)

    assert as_json.return_value == as_text.return_value == code
    assert json.loads(as_json.stdout)["ok"] is (code == 0)
    assert "onnxruntime:" in as_text.stdout


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("no CUDA device: no driver (docker run --gpus all)", "docker run --gpus all"),
        ("no CUDA device is visible", ""),
    ],
)
def test_why_there_is_no_cuda_comes_with_its_remedy(host: Host, reason: str, remedy: str) -> None:
    """A worker says both in one line; here they are two."""
    found = _of(dataclasses.replace(host, no_gpu=reason), "cuda")

    assert found.text == f"workers run on the CPU: {reason.partition(' (')[0]}"
    assert found.remedy == remedy


# -- what the models of a configuration would take -----------------------------------------------------


CLASSES = (SizeClassSpec("small", 32, 48, 4), SizeClassSpec("large", 64, 64, 4))


def _classes() -> str:
    return "".join(
        f'[[models.size_classes]]\nname = "{each.name}"\nheight = {each.height}\nwidth = {each.width}\n'
        "max_batch_size = 4\n"
        for each in CLASSES
    )


def _memory(folder: Path, worker: str = "", gpu: Gpu | None = None) -> list[Finding]:
    """Examine a configuration of one model with three buckets in each of two size classes."""
    hr_models.write(folder, hr_models.mean_color())
    text = f'[worker]\n{worker}\n[[models]]\nname = "m"\npath = "model.onnx"\n[models.image]\n{_classes()}'
    text += '[[models]]\nname = "e"\n[models.emulated]\nbase_ms = 1.0\nper_frame_ms = 1.0\n'
    (folder / "pool.toml").write_text(text)
    return examine_memory(config.load(str(folder / "pool.toml")), gpu)


def test_graph_memory_without_a_gpu_is_an_estimate_and_says_so(tmp_path: Path) -> None:
    """There is nothing to compare it with, so nothing is called fit."""
    without_file, of_model, of_all = _memory(tmp_path)

    assert {each.verdict for each in (without_file, of_model, of_all)} == {Verdict.NOTE}
    assert "it has no file" in without_file.text
    assert of_model.check == "graphs of m:1"
    assert "6 graphs with their buffers 193 MiB" in of_model.text
    assert "no GPU here to compare it with" in of_all.text
    assert all("estimated" in each.text for each in (of_model, of_all))


def test_graphs_that_a_limit_leaves_out_are_named(tmp_path: Path) -> None:
    """As the worker would choose them: of equal shares the larger buckets keep theirs."""
    _, of_model, _ = _memory(tmp_path, "gpu_memory_mb = 130")

    assert of_model.verdict is Verdict.WARNING
    assert "2 would run without a graph: small x2, small x1" in of_model.text
    assert "raise worker.gpu_memory_mb" in of_model.remedy


@pytest.mark.parametrize(("free_bytes", "verdict"), [(2**30, Verdict.OK), (2**27, Verdict.WARNING)])
def test_all_models_are_compared_with_what_is_free(tmp_path: Path, free_bytes: int, verdict: Verdict) -> None:
    """Together: each worker holds them all."""
    *_, of_all = _memory(tmp_path, gpu=dataclasses.replace(GPU, free_bytes=free_bytes))

    assert of_all.verdict is verdict
    assert f"{free_bytes // 2**20} MiB are free" in of_all.text
    assert bool(of_all.remedy) == (verdict is Verdict.WARNING)


def test_the_command_takes_a_configuration(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its models come after the machine; a file that is no configuration is refused as everywhere."""
    _memory(tmp_path)
    monkeypatch.setattr(doctor, "this_host", lambda: host)
    arguments = ["--config", str(tmp_path / "pool.toml"), "--json"]

    result = CliRunner().invoke(command, arguments, standalone_mode=False)

    checks = [each["check"] for each in json.loads(result.stdout)["findings"]]
    assert checks[-2:] == ["graphs of m:1", "memory of all models"]


def test_of_a_prepared_folder_the_file_for_a_gpu_is_estimated(tmp_path: Path) -> None:
    """FP16 there, FP32 elsewhere: results of nodes are half as large."""
    asked: list[str] = []
    hr_models.write(tmp_path, hr_models.mean_color())
    text = f'[[models]]\nname = "m"\npath = "model.onnx"\n[models.image]\n{_classes()}'
    (tmp_path / "pool.toml").write_text(text)
    loaded = config.load(str(tmp_path / "pool.toml"))

    class Watched:
        """The configuration, which notes for which engine files were asked."""

        config = loaded.config

        def model_files(self, index: int, engine: str = "cpu") -> dict[str, Path]:
            asked.append(engine)
            return loaded.model_files(index, engine)

    examine_memory(Watched(), None)  # type: ignore[arg-type]

    assert asked == ["cuda"]
