"""Read the configuration: defaults, then a TOML file, then the environment, then command-line flags.

Each later source overrides the earlier ones key by key. Environment variables are named
``HEADRACE_<SECTION>__<KEY>`` (``HEADRACE_BROKER__PORT=5600``); any other ``HEADRACE_`` name that is not
in OTHER_VARIABLES is refused, because a misspelt override that is silently ignored costs an afternoon.
Every refusal is a ConfigError of one line: where the value came from, the key, the value, and what
would be right. The schema itself is in ``headrace.config_schema``.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from headrace.config_models import ModelSection, SizeClassSection
from headrace.config_queues import QueuesSection
from headrace.config_schema import Config
from headrace.errors import ConfigError, ModelError
from headrace.prepared import read_manifest

ENVIRONMENT_PREFIX = "HEADRACE_"

#: HEADRACE_ variables that are no configuration keys, and what they are for.
OTHER_VARIABLES: dict[str, str] = {
    "HEADRACE_CACHE": "folder of model files fetched from a broker",
    "HEADRACE_CONFIG": "configuration file used when --config is not given",
    "HEADRACE_DEBUG": "1 = show the traceback of an error",
    "HEADRACE_PURE": "1 = an installation from source is built as plain Python; read at no other time",
}

PACKAGE_PREFIX = "package:"

#: A configuration names models and sizes; one of a megabyte is a wrong file (a model, a video).
MAX_CONFIG_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A checked configuration and where it came from. Relative model paths count from ``folder``."""

    config: Config
    source: str
    folder: Path

    def model_path(self, index: int) -> Path | None:
        """Return the absolute path of an ONNX file or prepared folder, None for a model that is emulated.

        Raises ConfigError when the file, or the package that ships it, is not there.
        """
        text = self.config.models[index].path
        if not text:
            return None
        where = f"{self.source}: models[{index}].path = {text!r}"
        prepared = self._prepared(index)
        if prepared is not None:
            return prepared
        path = _package_path(text, where) if text.startswith(PACKAGE_PREFIX) else self.folder / text
        return _existing_file(path.expanduser(), where)

    def model_files(self, index: int, engine: str = "cpu") -> dict[str, Path]:
        """Return all files of a model: the name that the graph uses -> absolute path, graph first.

        Of a prepared folder, those that workers of ``engine`` run. Raises ConfigError when one is not there,
        leaves the model's folder, or has another length than the manifest says.
        """
        graph = self.model_path(index)
        if graph is None:
            return {}
        if graph.is_dir():
            return _prepared_files(graph, self.config.models[index], engine, self.source)
        files = {graph.name: graph}
        for number, name in enumerate(self.config.models[index].extra_files):
            where = f"{self.source}: models[{index}].extra_files[{number}] = {name!r}"
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ConfigError(f"{where}: must be a path inside the model's folder {graph.parent}")
            files[Path(name).as_posix()] = _existing_file(graph.parent / name, where)
        return files

    def fp32_files(self, index: int) -> dict[str, Path]:
        """Return the FP32 file of a prepared folder, with its weights, when batches are to be compared with
        it; as ``model_files``."""
        model, folder = self.config.models[index], self._prepared(index)
        if folder is None or not model.fp32_sample_share:
            return {}
        full = model.model_copy(update={"precision": "fp32"})
        return _prepared_files(folder, full, "cpu", self.source)

    def _prepared(self, index: int) -> Path | None:
        return _prepared_folder(self.config.models[index], self.folder)

    def journal_path(self) -> Path | None:
        """Return the absolute path of the broker's journal, None when there is to be none."""
        text = self.config.broker.journal
        return (self.folder / Path(text).expanduser()).absolute() if text else None

    def reload_folders(self) -> tuple[Path, ...]:
        """Return the absolute paths of the folders that models may be reloaded from."""
        named = self.config.broker.reload_folders
        return tuple((self.folder / Path(text).expanduser()).absolute() for text in named)

    def with_absolute_paths(self) -> Config:
        """Return the configuration with every path to models and journal absolute: usable from any folder."""
        models = tuple(
            model.model_copy(update={"path": str(self.model_path(index) or "")})
            for index, model in enumerate(self.config.models)
        )
        folders = tuple(map(str, self.reload_folders()))
        broker = self.config.broker.model_copy(
            update={"journal": str(self.journal_path() or ""), "reload_folders": folders}
        )
        return self.config.model_copy(update={"models": models, "broker": broker})


def load(
    path: str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
    text: str | None = None,
) -> LoadedConfig:
    """Read and check a configuration.

    ``path`` names a TOML file (None: defaults alone), or says where ``text`` came from when that is
    given. ``environment`` defaults to the process's. ``flags`` maps dotted keys ("broker.port") to values
    from the command line; None values are left out.

    Raises ConfigError.
    """
    source = path or "defaults"
    raw = _parse(text, source) if text is not None else _read_file(path) if path else {}
    folder = Path(path).resolve().parent if path and text is None else Path.cwd()
    layers = _Layers(raw, source)
    for name, dotted, value in _environment_overrides(os.environ if environment is None else environment):
        layers.override(dotted, value, f"environment variable {name}")
    for dotted, value in (flags or {}).items():
        if value is not None:
            layers.override(dotted, value, "command line")
    try:
        config = Config.model_validate(layers.raw)
    except ValidationError as error:
        raise ConfigError(_describe(error, layers)) from None
    return LoadedConfig(_with_manifests(config, source, folder), source, folder)


def dump(config: Config) -> str:
    """Return a configuration as one line of JSON, which load() reads back (JSON starts with a brace).

    What was set stays, default or not: the manifest of a prepared folder fills in the rest."""
    values = config.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    return json.dumps({section: value for section, value in values.items() if value}, ensure_ascii=False)


def preset(name: str) -> Path:
    """Return the path of a preset that headrace ships, for instance "video".

    Raises ConfigError naming the presets when there is none of that name.
    """
    spec = importlib.util.find_spec("headrace.configs")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        candidate = Path(folder) / f"{name}.toml"
        if candidate.is_file():
            return candidate
    known = sorted(path.stem for folder in folders for path in Path(folder).glob("*.toml"))
    raise ConfigError(f"no preset named {name!r}: use one of {', '.join(known)}, or the path of a TOML file")


def find_config(name: str) -> str:
    """Return the file that ``--config`` means: a path, or the bare name of a preset."""
    if name == "-" or Path(name).exists() or os.sep in name or name.endswith(".toml"):
        return name
    return str(preset(name))


#: Keys of [queues] that a model and a size class may set for themselves.
CLASS_KEYS = ("policy", "max_queue_delay_ms", "max_queue_size", "objective_ms", "promote")


def class_policy(
    queues: QueuesSection, model: ModelSection, size_class: SizeClassSection | None
) -> dict[str, Any]:
    """Return the values of CLASS_KEYS: the size class's own, else the model's, else those of [queues]."""
    owners = [owner for owner in (size_class, model) if owner is not None]

    def first(name: str) -> Any:
        return next(
            (value for owner in owners if (value := getattr(owner, name)) is not None), getattr(queues, name)
        )

    return {name: first(name) for name in CLASS_KEYS}


# ---------------------------------------------------------------------------------------------------
# Sources
# ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Layers:
    """Raw values, and who set each overridden key, so that an error names the right culprit."""

    raw: dict[str, Any]
    source: str
    origins: dict[str, str] = field(default_factory=dict)

    def override(self, dotted: str, value: object, origin: str) -> None:
        section, _, name = dotted.partition(".")
        table = self.raw.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{self.source}: {section} = {table!r}: must be a table, written [{section}]")
        table[name] = value
        self.origins[dotted] = origin

    def origin(self, dotted: str) -> str:
        return self.origins.get(dotted, self.source)


def _read_file(path: str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{path}: can't be read ({error.strerror}): give --config an existing file"
        ) from None
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_CONFIG_BYTES} bytes, so not a configuration file")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text: a configuration is a TOML file") from None
    return _parse(text, path)


def _parse(text: str, source: str) -> dict[str, Any]:
    """Read TOML, or the JSON that dump() writes (no TOML document starts with a brace)."""
    try:
        raw = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: is not valid TOML: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{source}: is not valid JSON: {error}") from None
    return dict(raw)


def _environment_overrides(environment: Mapping[str, str]) -> Iterator[tuple[str, str, object]]:
    """Yield (variable, dotted key, value) of each override, in the order of their names."""
    known = {
        variable_name(section, name): (section, name)
        for section, model in sections().items()
        for name in model.model_fields
    }
    for variable in sorted(environment):
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable not in known:
            bare = [name.removeprefix(ENVIRONMENT_PREFIX) for name in [*known, *OTHER_VARIABLES]]
            hint = _did_you_mean(variable.removeprefix(ENVIRONMENT_PREFIX), bare, ENVIRONMENT_PREFIX)
            if variable.startswith("HEADRACE_MODELS__"):
                hint = "models are set in a file only"
            raise ConfigError(
                f"environment variable {variable}: no such key; {hint or 'see docs/configuration.md'}"
            )
        section, name = known[variable]
        yield variable, f"{section}.{name}", _environment_value(section, name, environment[variable])


def _environment_value(section: str, name: str, text: str) -> object:
    """Return the value as TOML would read it; text for a key that is text; else the text as it stands,
    which the schema then refuses by its type."""
    annotation = sections()[section].model_fields[name].annotation
    if annotation is str or all(isinstance(choice, str) for choice in get_args(annotation) or (None,)):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def sections() -> dict[str, type[BaseModel]]:
    """Return the sections that hold plain keys (all but models), in file order."""
    return {
        name: info.annotation
        for name, info in Config.model_fields.items()
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
    }


def variable_name(section: str, name: str) -> str:
    """Return the environment variable that overrides a key."""
    return f"{ENVIRONMENT_PREFIX}{section}__{name}".upper()


def _package_path(text: str, where: str) -> Path:
    """Return the path of a file inside an installed package, found without importing the package."""
    package, _, inside = text.removeprefix(PACKAGE_PREFIX).partition("/")
    if not package.isidentifier() or not inside or ".." in Path(inside).parts:
        raise ConfigError(f"{where}: must read package:NAME/path/of/file.onnx")
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise ConfigError(
            f"{where}: the Python package {package} is not installed: run pip install {package}"
        )
    return next(
        (path for folder in folders if (path := Path(folder) / inside).exists()), Path(folders[0]) / inside
    )


def _prepared_folder(model: ModelSection, folder: Path) -> Path | None:
    path = (folder / model.path).expanduser() if model.may_be_folder else None
    return path.resolve() if path is not None and path.is_dir() else None


def _with_manifests(config: Config, source: str, folder: Path) -> Config:
    """Fill in what the manifests of prepared folders know."""

    def filled(index: int, model: ModelSection) -> ModelSection:
        prepared = _prepared_folder(model, folder)
        if prepared is None:
            return model
        try:
            return read_manifest(prepared).section(model)
        except (ModelError, ConfigError) as error:
            raise ConfigError(f"{source}: models[{index}].path = {model.path!r}: {error}") from None

    models = tuple(filled(index, model) for index, model in enumerate(config.models))
    return config.model_copy(update={"models": models})


def _prepared_files(folder: Path, model: ModelSection, engine: str, source: str) -> dict[str, Path]:
    manifest = read_manifest(folder)
    try:
        variant = manifest.variants[manifest.choose(model.precision, engine)]
    except ConfigError as error:
        raise ConfigError(f"{source}: model {model.name}: {error}") from None
    files = {}
    for entry in variant.files:
        where = f"{source}: model {model.name}: {folder}: {entry.name}"
        path = files[entry.name] = _existing_file(folder / entry.name, where)
        if path.stat().st_size != entry.nbytes:
            raise ConfigError(
                f"{where}: {path.stat().st_size} bytes, the manifest says {entry.nbytes}: the file was"
                f" changed; `headrace prepare --check {folder}` says more"
            )
    return files


def _existing_file(path: Path, where: str) -> Path:
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(
            f"{where}: {path} {problem}: name an ONNX file (relative to the configuration file)"
        )
    return path.resolve()


# ---------------------------------------------------------------------------------------------------
# Errors in words
# ---------------------------------------------------------------------------------------------------


def _describe(error: ValidationError, layers: _Layers) -> str:
    """Word the first error as one line; say how many more there are. Unknown keys come first, because
    a misspelt key usually explains the "missing" one beside it."""
    errors = sorted(error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden")
    first = errors[0]
    keys = _dotted(first["loc"])
    value = first["input"]
    shown = "" if isinstance(value, dict) or first["type"] == "missing" else f" = {_shorten(value)}"
    where = f"{layers.origin(keys)}: {keys}{shown}" if keys else layers.source
    more = f" ({len(errors) - 1} more after this one)" if len(errors) > 1 else ""
    return f"{where}: {_reason(dict(first), layers)}{more}"


def _reason(error: dict[str, Any], layers: _Layers) -> str:
    context = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            known = _keys_beside(error["loc"])
            hint = _did_you_mean(str(error["loc"][-1]), known)
            return f"unknown key; {hint or 'known here: ' + ', '.join(known)}"
        case "missing":
            return f"is missing: {_help_of(error['loc']) or 'it has no default'}"
        case "greater_than_equal":
            return f"must be at least {context['ge']}"
        case "less_than_equal":
            return f"must be at most {context['le']}"
        case "greater_than":
            return f"must be more than {context['gt']}"
        case "less_than":
            return f"must be less than {context['lt']}"
        case "literal_error":
            return f"must be one of {context['expected']}"
        case "value_error":
            return str(context["error"])
        case "string_pattern_mismatch":
            return "may hold letters, digits and ._- only and starts with a letter or digit"
        case "string_too_short":
            return "must not be empty"
        case kind:
            return _TYPE_REASONS.get(kind, str(error["msg"]).lower())


_TYPE_REASONS = {
    "int_type": "must be a whole number, without quotes",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number, without quotes",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false, without quotes",
    "string_type": "must be text in quotes",
    "dict_type": "must be a table",
    "model_type": "must be a table, written [section]",
    "tuple_type": "must be a list; tables in one are written [[name]]",
}


def _dotted(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _keys_beside(location: tuple[int | str, ...]) -> list[str]:
    """Return the keys that the schema has in the table of ``location``'s last part."""
    model: type[BaseModel] | None = Config
    for part in location[:-1]:
        if isinstance(part, str) and model is not None:
            info = model.model_fields.get(part)
            model = table_of(info.annotation) if info else None
    return list(model.model_fields) if model else []


def _help_of(location: tuple[int | str, ...]) -> str:
    model: type[BaseModel] | None = Config
    text = ""
    for part in location:
        if isinstance(part, str) and model is not None:
            info = model.model_fields.get(part)
            text = (info.description if info else "") or ""
            model = table_of(info.annotation) if info else None
    return text


def table_of(annotation: Any) -> type[BaseModel] | None:
    """Return the schema class inside an annotation such as ``tuple[ModelSection, ...]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((table for item in get_args(annotation) if (table := table_of(item))), None)


def _did_you_mean(wrong: str, known: list[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(wrong, known, n=1)
    return f"did you mean {prefix}{close[0]}?" if close else ""


def _shorten(value: object, limit: int = 60) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= limit else text[: limit - 3] + "..."
