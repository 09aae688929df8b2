"""The configuration: layers, bounds and errors that name source, key, value and remedy."""

from __future__ import annotations

import dataclasses
import tracemalloc
from pathlib import Path

import pytest

from headrace import config, config_docs, config_settings
from headrace.broker.settings import ClassPolicy, CoreSettings
from headrace.broker.shell_settings import ShellSettings
from headrace.config_schema import MIN_MESSAGE_BYTES, Config
from headrace.errors import ConfigError
from headrace.protocol.messages import Limits
from headrace.protocol.peers import MAX_BATCH_SIZE
from headrace.workers.worker_settings import WorkerSettings

MODEL = """
[[models]]
name = "m"
path = "m.onnx"
[models.image]
[[models.size_classes]]
height = 32
width = 64
"""


def load(text: str = "", **variables: str) -> config.LoadedConfig:
    return config.load("f.toml", text=text, environment={f"HEADRACE_{k}": v for k, v in variables.items()})


def refusal(text: str = "", **variables: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, **variables)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[broker]\nprt = 1", ["f.toml: broker.prt = 1", "unknown key", "did you mean port?"]),
        ("[broker]\nqqq = 1", ["broker.qqq", "known here: host, port"]),
        ("[brokers]\nport = 1", ["brokers", "did you mean broker?"]),
        ("[broker]\nport = -1", ["broker.port = -1", "at least 0"]),
        ("[broker]\nport = 70000", ["broker.port = 70000", "at most 65531"]),
        ('[broker]\nport = "5555"', ['broker.port = "5555"', "whole number, without quotes"]),
        ("[broker]\nport = 5555.0", ["broker.port", "whole number"]),
        ("[broker]\nport = true", ["broker.port = true", "whole number"]),
        ('[broker]\ninsecure = "yes"', ["broker.insecure", "true or false"]),
        ("[broker]\nhost = 5", ["broker.host = 5", "text in quotes"]),
        ('[broker]\nhost = ""', ["broker.host", "must not be empty"]),
        ("broker = 3", ["broker = 3", "[section]"]),
        ("[models]\nname = 'a'", ["models", "[[name]]"]),
        ("[queues]\npolicy = 'greedy'", ["queues.policy", "'adaptive', 'deferred' or 'window'"]),
        ("[queues]\nageing_share = 1.0", ["queues.ageing_share", "less than 1"]),
        ("[queues]\nageing_share = 0", ["queues.ageing_share", "more than 0"]),
        ("[queues]\nageing_share = nan", ["queues.ageing_share", "finite"]),
        ("[queues]\nmax_queue_delay_ms = inf", ["queues.max_queue_delay_ms", "finite"]),
        ("[queues]\nmax_queue_delay_ms = -1", ["queues.max_queue_delay_ms", "at least 0"]),
        ("[queues]\nmax_queue_delay_ms = '5'", ["queues.max_queue_delay_ms", "must be a number"]),
        ("[queues]\nobjective_ms = 0", ["queues.objective_ms", "more than 0"]),
        ("[queues]\npromote = 1", ["queues.promote", "true or false"]),
        ("[limits]\nmax_message_bytes = 100", ["limits.max_message_bytes = 100", "at least 65536"]),
        ("[limits]\nmax_frame_bytes = 999999999", ["max_frame_bytes", "larger than max_message_bytes"]),
        (
            "[limits]\nmax_frame_bytes = 65536\nmax_message_bytes = 1048576",
            ["max_header_bytes = 1048576 together", "no batch could be sent"],
        ),
        (MODEL.replace("[models.image]", "adapter = 'txt'"), ["models[0]: adapter 'txt' is unknown"]),
        (
            MODEL.replace("[models.image]", "adapter = 'text'\nadapter_options.tresh = 1"),
            ["models[0]: adapter text: unknown option tresh", "known options are thresh"],
        ),
        (
            MODEL.replace("[models.image]", "adapter = 'detect'\nadapter_options.layout = 'v9'"),
            ["models[0]: adapter detect: layout = 'v9'", "one of auto, v5, v8, nms"],
        ),
        ("[[models]]\npath = 'x'", ["models[0].name", "is missing", "Name under which"]),
        ("[[models]]\nname = 'a'", ["models[0]", "neither path nor emulated"]),
        ("[[models]]\nname = 'a b'\npath = 'x'", ["models[0].name", "letters, digits"]),
        (MODEL + MODEL, ["models", "entries 0 and 1 are both m:1"]),
        (MODEL + "[[models.size_classes]]\nheight=32\nwidth=64", ["entries 0 and 1 are both named '32x64'"]),
        (MODEL + "max_batch_size = 0", ["models[0].size_classes[0].max_batch_size = 0", "at least 1"]),
        (MODEL + "max_batch_size = -1", ["max_batch_size = -1", "at least 1"]),
        (MODEL + "max_batch_size = 1000000", ["max_batch_size = 1000000", "at most 4096"]),
        (MODEL + "max_batch_size = 257", ["models[0]: size class 32x64: max_batch_size = 257", "raise the"]),
        (MODEL + "max_batch_sise = 1", ["max_batch_sise", "did you mean max_batch_size?"]),
        (MODEL + "max_queue_delay_ms = 3600001", ["max_queue_delay_ms = 3600001", "at most 3600000"]),
        (MODEL + "fit = 'stretch'", ["fit", "'exact', 'pad' or 'letterbox'"]),
        (MODEL + "[admission]\ndefault_model = 'n'", ["admission.default_model = 'n'", "use one of m, m:1"]),
        (MODEL.replace("[models.image]", "[models.image]\nmean=[0.5]"), ["mean has 1 numbers"]),
        (MODEL.replace("[models.image]", "[models.image]\nstd=[1.0,1.0,0.0]"), ["std holds a 0"]),
        (MODEL.replace("[models.image]", "[models.image]\ncolor='gray'"), ["gray has 1"]),
        (MODEL.replace("[models.image]", ""), ["no image table"]),
        ("[[models]]\nname='a'\n[models.image]\n[models.emulated]\nbase_ms=1\nper_frame_ms=1", ["no graph"]),
        ("port = ", ["f.toml", "not valid TOML"]),
        ("{oops", ["f.toml", "not valid JSON"]),
        ("[broker]\nport=1\n[queues]\nageing_ms=0\n[log]\nlevel='x'", ["1 more after this one"]),
    ],
)
def test_a_bad_value_is_refused_in_one_line(text: str, words: list[str]) -> None:
    """The line names the file, the key, the value and what would be right (BAT-11, ZMQ-14)."""
    message = refusal(text)

    for word in words:
        assert word in message


@pytest.mark.parametrize("size", [1, 256, MAX_BATCH_SIZE])
def test_any_batch_size_that_a_message_holds_is_taken_and_costs_nothing(size: int) -> None:
    """BAT-11: a limit of 1 works and a large one allocates nothing up front."""
    text = MODEL + f"max_batch_size = {size}\n[limits]\nmax_frames_per_message = {max(256, size)}"
    tracemalloc.start()
    try:
        loaded = load(text)
        core = config_settings.to_core_settings(loaded.config)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert core.models[0].spec.size_classes[0].max_batch_size == size
    assert peak_bytes < 4_000_000


@pytest.mark.parametrize("delay_ms", [0, 0.0, 3_600_000])
def test_waits_from_nothing_to_an_hour_are_taken(delay_ms: float) -> None:
    """BAT-11: both ends of the range work."""
    loaded = load(MODEL + f"max_queue_delay_ms = {delay_ms}")

    policy = config_settings.to_core_settings(loaded.config).models[0].policies["32x64"]
    assert policy.max_queue_delay_ms == delay_ms


def test_auto_survives_a_dump() -> None:
    """A configuration handed to another process still says "auto"."""
    loaded = load(MODEL + 'max_queue_delay_ms = "auto"')

    again = config.load("f.json", text=config.dump(loaded.config), environment={})

    assert again.config == loaded.config
    assert again.config.models[0].size_classes[0].max_queue_delay_ms == "auto"


def test_later_layers_override_earlier_ones_key_by_key() -> None:
    """Defaults, then file, then environment, then flags; what a layer leaves out stays."""
    loaded = config.load(
        "f.toml",
        text="[broker]\nport = 1000\nhttp_port = 1001\ngrace_ms = 1002",
        environment={"HEADRACE_BROKER__HTTP_PORT": "2001", "HEADRACE_BROKER__GRACE_MS": "2002"},
        flags={"broker.grace_ms": 3002, "broker.host": None},
    )

    broker = loaded.config.broker
    assert (broker.port, broker.http_port, broker.grace_ms, broker.host) == (1000, 2001, 3002, "127.0.0.1")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("BROKER__PORT", "5600", 5600),
        ("BROKER__HOST", "::1", "::1"),
        ("BROKER__HOST", "10.0.0.1", "10.0.0.1"),
        ("BROKER__INSECURE", "true", True),
        ("LOG__LEVEL", "debug", "debug"),
        ("WORKER__COUNT", "3", 3),
        ("QUEUES__MAX_QUEUE_DELAY_MS", "2.5", 2.5),
        ("QUEUES__MAX_QUEUE_DELAY_MS", "auto", "auto"),
        ("QUEUES__MAX_QUEUE_DELAY_MS", '"auto"', "auto"),
        ("ADMISSION__DEFAULT_TIMEOUT_MS", "100", 100),
    ],
)
def test_environment_values_are_read_by_the_type_of_their_key(
    name: str, value: str, expected: object
) -> None:
    """Text keys take the text as it is, others the TOML value."""
    loaded = load(**{name: value})

    section, key = name.lower().split("__")
    assert getattr(getattr(loaded.config, section), key) == expected


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("BROKER__PROT", "1", ["HEADRACE_BROKER__PROT", "did you mean HEADRACE_BROKER__PORT?"]),
        ("BROKER__PORT", "many", ["HEADRACE_BROKER__PORT", 'broker.port = "many"', "whole number"]),
        ("LOG__LEVEL", "loud", ["HEADRACE_LOG__LEVEL", "must be one of"]),
        ("MODELS__0__NAME", "m", ["HEADRACE_MODELS__0__NAME", "set in a file only"]),
        ("ZZZZZZ", "1", ["HEADRACE_ZZZZZZ", "docs/configuration.md"]),
    ],
)
def test_a_bad_variable_is_refused_by_its_own_name(name: str, value: str, words: list[str]) -> None:
    """A misspelt override is an error, never silence, and a bad value is blamed on the variable."""
    message = refusal("[broker]\nport = 1", **{name: value})

    assert "f.toml" not in message
    for word in words:
        assert word in message


def test_variables_that_are_no_keys_are_let_through() -> None:
    """HEADRACE_CACHE and its like are documented and allowed; foreign variables are none of our business."""
    environment = dict.fromkeys(config.OTHER_VARIABLES, "1") | {"PATH": "/bin", "HEAD": "1"}

    assert config.load(environment=environment).config == Config()


def test_flags_are_blamed_as_the_command_line() -> None:
    """The file is not named for a value that came from a flag."""
    with pytest.raises(ConfigError, match=r"command line: broker.port = -5: must be at least 0"):
        config.load("f.toml", text="", environment={}, flags={"broker.port": -5})


def test_policies_are_inherited_from_class_to_model_to_queues() -> None:
    """The nearest one that is set holds."""
    text = """
[queues]
policy = "window"
max_queue_delay_ms = 7
max_queue_size = 10
[[models]]
name = "m"
path = "m.onnx"
max_queue_size = 20
objective_ms = 40.0
[models.image]
[[models.size_classes]]
name = "own"
height = 1
width = 1
policy = "adaptive"
max_queue_delay_ms = "auto"
max_queue_size = 30
promote = true
[[models.size_classes]]
name = "none"
height = 2
width = 2
"""

    policies = config_settings.to_core_settings(load(text).config).models[0].policies

    assert policies == {
        "": ClassPolicy("window", 7, 20, 40),
        "own": ClassPolicy("adaptive", "auto", 30, 40, promote=True),
        "none": ClassPolicy("window", 7, 20, 40),
    }


def test_every_core_and_shell_setting_can_be_set(tmp_path: Path) -> None:
    """No field keeps its default because the configuration forgot it."""
    (tmp_path / "m.onnx").write_bytes(b"x")
    text = _with_other_values(MODEL)
    path = tmp_path / "f.toml"
    path.write_text(text)

    shell = config_settings.to_shell_settings(config.load(str(path), environment={}))

    default_shell = ShellSettings(CoreSettings(()))
    worker = config_settings.to_worker_settings(
        config.load(str(path), environment={}).config, worker_id="w", parent_pid=1
    )
    pairs = ((shell, default_shell), (shell.core, default_shell.core), (worker, WorkerSettings()))
    for settings, default in pairs:
        unset = [
            item.name
            for item in dataclasses.fields(settings)
            if getattr(settings, item.name) == getattr(default, item.name)
        ]
        assert unset == []
    unset = [f.name for f in dataclasses.fields(Limits) if getattr(shell.core.limits, f.name) == f.default]
    assert unset == []


def _with_other_values(models: str) -> str:
    """Return a file in which every plain key differs from its default."""
    lines = []
    for section, schema in config.sections().items():
        lines.append(f"[{section}]")
        for name, info in schema.model_fields.items():
            value = info.default
            match value:
                case bool():
                    other = str(not value).lower() if name != "http" else "true"
                case int():
                    other = str(value + 1)
                case float():
                    other = str(value + 0.25)
                case None:
                    other = "5"
                case _:
                    other = {
                        "policy": '"window"',
                        "device": '"cpu"',
                        "level": '"debug"',
                        "format": '"json"',
                        "folder": '""',
                        "reload_folders": '["."]',
                    }.get(name, f'"{name}"')
                    if name == "default_model":
                        other = '"m"'
            lines.append(f"{name} = {other}")
    return "\n".join(lines) + models


def test_model_files_are_found_relative_to_the_file(tmp_path: Path) -> None:
    """The folder of the configuration counts, not the current one; external weights lie beside the graph."""
    (tmp_path / "models").mkdir()
    for name in ("m.onnx", "m.data"):
        (tmp_path / "models" / name).write_bytes(b"x")
    path = tmp_path / "f.toml"
    path.write_text('[[models]]\nname = "m"\npath = "models/m.onnx"\nextra_files = ["m.data"]')

    shell = config_settings.to_shell_settings(config.load(str(path), environment={}))

    model = shell.local_models[0]
    assert model.path == tmp_path / "models" / "m.onnx"
    assert model.extra_files == (tmp_path / "models" / "m.data",)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('path = "none.onnx"', ["models[0].path = 'none.onnx'", "does not exist"]),
        ('path = "."', ["not a prepared folder", "headrace prepare"]),
        (
            'path = "package:nothing_of_that_name/m.onnx"',
            ["not installed", "pip install nothing_of_that_name"],
        ),
        ('path = "package:structlog"', ["must read package:NAME/path"]),
        ('path = "package:structlog/../x.onnx"', ["must read package:NAME/path"]),
        ('path = "package:structlog/none.onnx"', ["none.onnx does not exist"]),
        ('path = "m.onnx"\nextra_files = ["../w"]', ["extra_files[0] = '../w'", "inside the model's folder"]),
        ('path = "m.onnx"\nextra_files = ["w"]', ["extra_files[0] = 'w'", "does not exist"]),
    ],
)
def test_a_missing_model_file_is_named_with_its_key(tmp_path: Path, lines: str, words: list[str]) -> None:
    """The line names the configuration file, the key and the path that was tried."""
    (tmp_path / "m.onnx").write_bytes(b"x")
    path = tmp_path / "f.toml"
    path.write_text(f'[[models]]\nname = "m"\n{lines}')

    with pytest.raises(ConfigError) as caught:
        config_settings.to_shell_settings(config.load(str(path), environment={}))

    for word in [str(path), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("since = 2026-01-01", ["models[0]: workers can't be told of it", "date"]),
        ("n = 18446744073709551616", ["models[0]: workers can't be told of it"]),
        (f"x = {'[' * 20}{']' * 20}", ["models[0]: workers can't be told of it", "max_depth"]),
        (f"x = '{'x' * 1_048_577}'", ["models[0]: workers can't be told of it", "max_header_bytes"]),
    ],
    ids=["date", "beyond 64 bits", "deep", "large"],
)
def test_options_that_no_worker_could_be_told_are_refused(options: str, words: list[str]) -> None:
    """The options of a user's function are anything TOML has; the wire has less."""
    loaded = load(
        "[[models]]\nname = 'm'\nadapter = 'module:function'\nemulated = {base_ms = 1, per_frame_ms = 1}\n"
        f"adapter_options.{options}"
    )

    with pytest.raises(ConfigError) as caught:
        config_settings.to_shell_settings(loaded)

    for word in words:
        assert word in str(caught.value)


def test_a_packaged_model_is_found_without_importing_its_package() -> None:
    """``package:`` reads where a package lies; its code is not run."""
    loaded = load('[[models]]\nname = "m"\npath = "package:headrace/py.typed"')

    path = loaded.model_path(0)
    assert path is not None
    assert path.name == "py.typed"


def test_a_broker_without_models_is_refused_with_the_way_out() -> None:
    """A broker that could serve nothing does not start."""
    with pytest.raises(ConfigError, match="headrace up --model"):
        config_settings.to_shell_settings(load())


@pytest.mark.parametrize("name", ["video", "offline", "edge", "demo"])
def test_presets_are_valid(name: str) -> None:
    """Each preset that is shipped loads by its bare name."""
    assert config.load(config.find_config(name), environment={}).config != Config()


def test_an_unknown_preset_is_answered_with_the_known_ones() -> None:
    """A bare name that is neither a file nor a preset."""
    with pytest.raises(ConfigError, match="use one of demo, edge, offline, video"):
        config.find_config("vidoe")


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"x" * (config.MAX_CONFIG_BYTES + 1)], ids=["binary", "big"]
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: bytes) -> None:
    """A model given as --config by mistake costs one line, not a gigabyte."""
    path = tmp_path / "model.onnx"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"model\.onnx: is"):
        config.load(str(path), environment={})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The operating system's reason is given."""
    with pytest.raises(ConfigError, match="No such file"):
        config.load(str(tmp_path / "none.toml"), environment={})


def test_a_configuration_survives_its_own_dump() -> None:
    """What a supervisor hands to its children is what it read itself."""
    original = config.load(str(config.preset("demo")), environment={}).with_absolute_paths()

    assert config.load("dump", text=config.dump(original), environment={}).config == original


def test_every_key_has_a_unit_and_a_reason() -> None:
    """docs/configuration.md has no empty cell where a reader looks first."""
    rows = [line for line in config_docs.render().splitlines() if line.startswith("| `")]

    assert len(rows) > len(config_docs.every_key())
    for row in rows:
        if row.count("|") == 6:
            _, _name, default, unit, _range, meaning, _ = row.split("|")
            assert default.strip()
            assert unit.strip()
            assert len(meaning.strip()) > 10


def test_the_two_minima_of_a_message_are_one() -> None:
    """Schema and shell agree on what ZeroMQ's handshake needs."""
    from headrace.broker import shell_settings

    assert shell_settings.MIN_MESSAGE_BYTES == MIN_MESSAGE_BYTES
