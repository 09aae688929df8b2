"""Find an adapter by its name."""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import ConfigError, DeviceError
from headrace.protocol.messages import Value
from headrace.workers.adapters.base import Adapter
from headrace.workers.adapters.classify import ClassifyAdapter
from headrace.workers.adapters.detect import DetectAdapter
from headrace.workers.adapters.options import Options
from headrace.workers.adapters.raw import TensorsAdapter
from headrace.workers.adapters.text_options import TextOptions
from headrace.workers.adapters.user_function import load_function

#: Adapters that need numpy alone.
_LIGHT: dict[str, Callable[[Options], Adapter]] = {
    "tensors": TensorsAdapter,
    "classify": ClassifyAdapter,
    "detect": DetectAdapter,
}

#: Names that need no colon. Anything else is ``package.module:function``.
ADAPTER_NAMES = (*_LIGHT, "text")


def load_adapter(name: str, options: dict[str, Value] | None = None) -> Adapter:
    """Return the adapter ``name`` with its options.

    Raises ConfigError for an unknown name, an unknown option or a bad value, and DeviceError when a package
    that the adapter needs is not installed.
    """
    read = Options(name, options or {})
    if name == "text":
        try:
            from headrace.workers.adapters.text import TextAdapter
        except ImportError as error:
            raise DeviceError(f"adapter text: {error}: pip install 'headrace[cpu]'") from error
        return TextAdapter(read)
    light = _LIGHT.get(name)
    if light is not None:
        return light(read)
    _check_function_name(name)
    return load_function(name, read)


def check_adapter(name: str, options: dict[str, Value]) -> None:
    """Raise ConfigError for what load_adapter() would refuse on every machine.

    Needs no OpenCV and runs no code of the user: a function is looked for where the workers are.
    """
    read = Options(name, options)
    if name == "text":
        TextOptions.read(read)
    elif name in _LIGHT:
        _LIGHT[name](read)
    else:
        _check_function_name(name)


def _check_function_name(name: str) -> None:
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ConfigError(
            f"adapter {name!r} is unknown: known are {', '.join(ADAPTER_NAMES)} or package.module:function"
        )
