"""``headrace export``: what a name stands for, and that only a proven file is put in place.

The names are resolved with stand-ins for torch and torchvision; what torch itself does is tested where it is
installed.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import pytest
from click.testing import CliRunner, Result

from headrace import cli, config, export_sources
from headrace.errors import ConfigError, HeadraceError, ModelError
from headrace.exit_codes import ExitCode, exit_code_of
from headrace.export_sources import MissingForExportError, Wishes, find_source

HAS_TORCH = all(importlib.util.find_spec(name) for name in ("torch", "onnxscript"))
needs_torch = pytest.mark.skipif(
    not HAS_TORCH, reason="needs torch and onnxscript: pip install 'headrace[cpu,export]'"
)


# -- without torch ---------------------------------------------------------------------------------------


class FakeTensor:
    def __init__(self, *shape: int) -> None:
        self.shape = shape
        self.ndim = len(shape)


class FakeModule:
    def __init__(self, loaded: object = None) -> None:
        self.state: object = loaded
        self.is_evaluated = False

    def eval(self) -> FakeModule:
        self.is_evaluated = True
        return self

    def cpu(self) -> FakeModule:
        return self

    def load_state_dict(self, state: object) -> None:
        if state == "of another model":
            raise RuntimeError("Missing key(s)")
        self.state = state


class ImageClassification:
    """The preset of torchvision by that name, as far as it is read."""

    crop_size = (232,)
    mean = (0.5, 0.4, 0.3)
    std = (0.2, 0.2, 0.2)


class FakeWeights:
    """An enumeration of torchvision's weights."""

    def __init__(self, *names: str) -> None:
        self.entries = [SimpleNamespace(name=name, transforms=ImageClassification) for name in names]
        for entry in self.entries:
            entry.__dict__["value"] = entry.name
        if self.entries:
            self.DEFAULT = self.entries[-1]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.entries)


@dataclass
class Torchvision:
    """torchvision.models with two models. ``asked`` holds the options of the last one made."""

    is_offline: bool = False
    asked: dict[str, Any] | None = None

    def list_models(self) -> list[str]:
        return ["resnet18", "resnet50", "detector"]

    def get_model_weights(self, name: str) -> FakeWeights:
        return FakeWeights() if name == "detector" else FakeWeights("V1", "V2")

    def get_model_builder(self, name: str) -> Any:
        if name == "detector":
            return lambda *, weights=None, weights_backbone=None: None
        return lambda *, weights=None: None

    def get_model(self, name: str, **options: Any) -> FakeModule:
        self.asked = options
        if self.is_offline and options["weights"] is not None:
            raise URLError("Name or service not known")
        return FakeModule()


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> Torchvision:
    """Stand-ins for torch and torchvision are installed."""

    def load(file: Path, **_: Any) -> str:
        content = file.read_text()
        if content == "no tensors":
            raise ValueError("weights_only")
        return content

    models = Torchvision()
    torch = SimpleNamespace(
        zeros=FakeTensor, Tensor=FakeTensor, nn=SimpleNamespace(Module=FakeModule), load=load
    )
    monkeypatch.setattr(export_sources, "import_torch", lambda: torch)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=models))
    return models


def test_a_name_of_torchvision_comes_with_its_newest_weights_and_their_size(torchvision: Torchvision) -> None:
    """What the weights were trained with is known, and so is told."""
    source = find_source("torchvision:resnet50", Wishes())

    assert torchvision.asked is not None
    assert torchvision.asked["weights"].name == "V2"
    assert source.module.is_evaluated
    assert source.example[0].shape == (2, 3, 232, 232)
    assert (source.mean, source.std) == ((0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
    assert source.is_classifier


@pytest.mark.parametrize("name", ["v1", "V1"])
def test_weights_may_be_named(torchvision: Torchvision, name: str) -> None:
    """As torchvision writes them, or in small letters."""
    find_source("torchvision:resnet50", Wishes(weights=name))

    assert torchvision.asked is not None
    assert torchvision.asked["weights"].name == "V1"


def test_random_weights_fetch_nothing(torchvision: Torchvision) -> None:
    """Not even those of the network inside a detector; height and width are the user's."""
    torchvision.is_offline = True

    source = find_source("torchvision:detector", Wishes(height=64, width=96, weights="none"))

    assert torchvision.asked == {"weights": None, "weights_backbone": None}
    assert source.example[0].shape == (2, 3, 64, 96)
    assert source.weights == "random"


def test_a_state_dict_of_ones_own_is_loaded(torchvision: Torchvision, tmp_path: Path) -> None:
    """A file wins over a name."""
    file = tmp_path / "mine.pth"
    file.write_text("tensors")

    source = find_source("torchvision:resnet50", Wishes(weights=str(file)))

    assert (source.module.state, source.weights) == ("tensors", str(file))


@pytest.mark.parametrize("content", ["no tensors", "of another model"])
def test_a_state_dict_that_does_not_fit_is_refused(
    torchvision: Torchvision, tmp_path: Path, content: str
) -> None:
    """In our own words: torch's advise to run the code in the file."""
    file = tmp_path / "mine.pth"
    file.write_text(content)

    with pytest.raises(ModelError, match=r"mine\.pth: not a") as caught:
        find_source("torchvision:resnet50", Wishes(weights=str(file)))
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "wishes", "words"),
    [
        ("resnet50", Wishes(), "write torchvision:resnet50"),
        (":x", Wishes(), "names no model"),
        ("torchvision:resnet5", Wishes(), "did you mean resnet50"),
        ("torchvision:zzzz", Wishes(), "it has 3, such as resnet18"),
        ("torchvision:resnet50", Wishes(weights="V9"), "torchvision has V1, V2"),
        ("torchvision:detector", Wishes(weights="V9"), "torchvision has none"),
        ("torchvision:detector", Wishes(), "no weights for detector: use --weights none"),
        ("torchvision:resnet50", Wishes(channels=1), "--channels 1"),
        ("my_export_models:made", Wishes(weights="V1"), "loads its"),
        ("my_export_models:made", Wishes(), "give --height and --width"),
        ("my_export_models:with_example", Wishes(height=8), "--height: .* already says the shape"),
        ("my_export_models:number", Wishes(), "has no function number"),
        ("my_export_broken:made", Wishes(), "can't be imported here: RuntimeError: no"),
        ("my_export_missing:made", Wishes(), "can't be imported here: ModuleNotFoundError"),
    ],
)
def test_a_name_that_can_not_be_met_says_what_would(
    torchvision: Torchvision, user_modules: None, spec: str, wishes: Wishes, words: str
) -> None:
    """One line that ends in the remedy; exit code 78."""
    with pytest.raises(ConfigError, match=words):
        find_source(spec, wishes)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fails", "my_export_models:fails failed: ValueError: no file"),
        ("gives_text", "gave a str: it must return a torch.nn.Module"),
        ("no_tensor", "an example input is a str"),
        ("no_rows", r"an example input is \[0, 3\]"),
        ("uneven", "the same number of rows"),
    ],
)
def test_a_function_that_gives_no_model_is_refused(
    torchvision: Torchvision, user_modules: None, name: str, words: str
) -> None:
    """What it gave is named; exit code 65."""
    with pytest.raises(ModelError, match=words):
        find_source(f"my_export_models:{name}", Wishes())


def test_a_function_is_found_where_the_user_stands(torchvision: Torchvision, user_modules: None) -> None:
    """With an example of its own, or as an image of the size that was asked for."""
    made = find_source("my_export_models:made", Wishes(height=8, width=9, channels=1))
    with_example = find_source("my_export_models:with_example", Wishes())

    assert made.example[0].shape == (2, 1, 8, 9)
    assert [tensor.shape for tensor in with_example.example] == [(1, 3), (1, 5)]


@pytest.fixture
def user_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with modules of a user's, in which the command is given."""
    (tmp_path / "my_export_models.py").write_text(
        textwrap.dedent("""
            import torch_stand_in as torch
            number = 3
            def made(): return torch.Module()
            def with_example(): return torch.Module(), (torch.Tensor(1, 3), torch.Tensor(1, 5))
            def fails(): raise ValueError("no file")
            def gives_text(): return "model"
            def no_tensor(): return torch.Module(), "tensor"
            def no_rows(): return torch.Module(), torch.Tensor(0, 3)
            def uneven(): return torch.Module(), [torch.Tensor(1, 3), torch.Tensor(2, 3)]
        """)
    )
    (tmp_path / "my_export_broken.py").write_text("raise RuntimeError('no')")
    monkeypatch.setitem(sys.modules, "torch_stand_in", SimpleNamespace(Module=FakeModule, Tensor=FakeTensor))
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in ("my_export_models", "my_export_broken"):
        sys.modules.pop(name, None)


def test_weights_that_can_not_be_downloaded_name_two_remedies(torchvision: Torchvision) -> None:
    """A machine without a way out is no bug."""
    torchvision.is_offline = True

    with pytest.raises(MissingForExportError, match="--weights FILE, or --weights none") as caught:
        find_source("torchvision:resnet50", Wishes())
    assert exit_code_of(caught.value) == ExitCode.UNAVAILABLE


def test_without_torchvision_its_models_are_not_there(
    torchvision: Torchvision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch alone serves functions of one's own."""
    monkeypatch.setitem(sys.modules, "torchvision", None)

    with pytest.raises(
        MissingForExportError, match=r"needs torchvision .*pip install 'headrace\[cpu,export\]'"
    ):
        find_source("torchvision:resnet50", Wishes())


@pytest.mark.parametrize("package", ["torch", "onnxscript", "onnx", "onnxruntime"])
def test_a_missing_package_is_one_line_with_its_remedy(
    package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 69, as for a device that is not there; no traceback."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else object())

    code = cli.run(["export", "torchvision:resnet50", "--out", str(tmp_path / "x.onnx")])

    (line,) = capfd.readouterr().err.strip().splitlines()
    assert code == ExitCode.UNAVAILABLE
    assert f"needs {package}, which is not installed: pip install 'headrace[cpu,export]'" in line


def test_a_folder_that_is_not_there_is_a_wrong_command_line(tmp_path: Path) -> None:
    """Said before torch is loaded."""
    assert cli.run(["export", "a:b", "--out", str(tmp_path / "none" / "x.onnx")]) == ExitCode.USAGE


# -- with torch ------------------------------------------------------------------------------------------

MODELS = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 10)
    def forward(self, images):
        return self.last(self.norm(self.conv(images)).relu().mean((2, 3)))

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 4)
    def forward(self, image, words):
        return {"colour": image.mean((2, 3)), "meaning": self.words(words).sum(1)}

class Of(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.function = forward
    def forward(self, x):
        return self.function(x)

def small(): return Small().train()
def two(): return Two(), (torch.zeros(1, 3, 8, 8), torch.tensor([[1, 2, 6]]))
def colour(): return Of(lambda x: x.mean((2, 3)))
def pair(): return Of(lambda x: (x + 1, x.sum((1, 2, 3))))
def whole(): return Of(lambda x: x.mean())
def nothing(): return Of(lambda x: [x, None])
def two_rows(): return Of(lambda x: x.reshape(2, 3, 64).sum(2))
def branches(): return Of(lambda x: x if x.sum() > 0 else -x)
def one_size(): return Of(lambda x: x.flatten(1) @ torch.ones(192, 4))
"""


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run the command in a folder with these models; gives its result and the file."""
    (tmp_path / "export_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "out" / "x.onnx"
    file.parent.mkdir()
    path = list(sys.path)

    def run(name: str, *options: str) -> tuple[Result, Path]:
        arguments = ["export", f"export_models:{name}", "--out", str(file), *options]
        return CliRunner().invoke(cli.cli, arguments, standalone_mode=False), file

    yield run
    sys.path[:] = path
    sys.modules.pop("export_models", None)


SIZE = ("--height", "8", "--width", "8")


@needs_torch
def test_a_model_is_written_with_an_open_batch_axis(exported: Any) -> None:
    """Proven on two inputs, in evaluation mode, with nothing of this machine's paths in the file."""
    result, file = exported("small", *SIZE, "--json")

    found = json.loads(result.stdout)
    assert found["inputs"] == [{"name": "images", "dtype": "float32", "shape": [-1, 3, 8, 8]}]
    assert found["outputs"][0]["shape"] == [-1, 10]
    assert found["outputs"][0]["max_rel_difference"] < 1e-5
    assert found["bytes"] == file.stat().st_size
    assert b"export_models" not in file.read_bytes()
    assert [each.name for each in file.parent.iterdir()] == ["x.onnx"]


@needs_torch
def test_inputs_and_outputs_keep_their_names(exported: Any) -> None:
    """Arguments of forward, keys of its dict; a tuple's are numbered. Indexes stay those of the example."""
    two = json.loads(exported("two", "--json")[0].stdout)
    pair = json.loads(exported("pair", *SIZE, "--json")[0].stdout)

    assert [(each["name"], each["shape"]) for each in two["inputs"]] == [
        ("image", [-1, 3, 8, 8]),
        ("words", [-1, 3]),
    ]
    assert [each["name"] for each in two["outputs"]] == ["colour", "meaning"]
    assert [each["name"] for each in pair["outputs"]] == ["output_0", "output_1"]


@needs_torch
def test_the_size_may_stay_open_too(exported: Any) -> None:
    """For several size classes; the table that is printed has the first."""
    result, file = exported("small", *SIZE, "--open-size", "--opset", "20")
    (model,) = config.load("printed.toml", text=result.stdout, environment={}).config.models

    assert "takes images: float32 [any, 3, any, any]" in result.stdout
    assert "opset 20" in result.stdout
    assert (model.name, model.path) == ("x", str(file))
    assert [(each.height, each.width) for each in model.size_classes] == [(8, 8)]


@needs_torch
def test_an_output_of_the_whole_batch_is_told(exported: Any) -> None:
    """BAT-13: such a model is served with batches of one."""
    result, _ = exported("whole", *SIZE)

    assert "# note: output output has no row for each frame" in result.stdout


@needs_torch
@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("nothing", (), "not a list of NoneType, Tensor"),
        ("two_rows", (), "the batch axis of input x can't be left open"),
        ("branches", (), "torch can't export it with an open batch axis"),
        ("one_size", ("--open-size",), "open|size"),
        ("small", ("--opset", "64"), "64"),
    ],
)
def test_what_can_not_be_exported_is_refused_and_leaves_the_old_file(
    exported: Any, name: str, options: tuple[str, ...], words: str
) -> None:
    """Exit code 65, one line; no half of a file."""
    exported("colour", *SIZE)
    before = (Path("out") / "x.onnx").read_bytes()

    result, file = exported(name, *SIZE, *options)

    assert isinstance(result.exception, HeadraceError)
    assert exit_code_of(result.exception) == ExitCode.MODEL
    assert result.exception.args[0].startswith(("export_models", "model "))
    assert any(word in str(result.exception) for word in words.split("|"))
    assert file.read_bytes() == before
    assert [each.name for each in file.parent.iterdir()] == ["x.onnx"]


@needs_torch
def test_a_file_that_answers_otherwise_than_torch_is_not_kept(
    exported: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof can fail: a graph that was changed behind the exporter's back does."""
    from headrace import torch_export

    def spoil(model: Any) -> None:
        for node in model.graph:
            if node.op_type == "ReduceMean":
                node.op_type = "ReduceMax"

    monkeypatch.setattr(torch_export, "_forget_origins", spoil)

    result, file = exported("colour", *SIZE)

    assert isinstance(result.exception, ModelError)
    assert "output output of the file is not torch's" in str(result.exception)
    assert not file.exists()
