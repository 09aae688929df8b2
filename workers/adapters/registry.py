"""Find an adapter by its name."""

from __future__ import annotations

from headrace.errors import ConfigError, DeviceError
from headrace.protocol.messages import Value
from headrace.workers.adapters.base import Adapter
from headrace.workers.adapters.classify import ClassifyAdapter
from headrace.workers.adapters.detect import DetectAdapter
from headrace.workers.adapters.options import Options
from headrace.workers.adapters.raw import TensorsAdapter
from headrace.workers.adapters.user_function import load_function

#: Names that need no colon. Anything else is ``package.module:function``.
ADAPTER_NAMES = ("tensors", "classify", "detect", "text")


def load_adapter(name: str, options: dict[str, Value] | None = None) -> Adapter:
    """Return the adapter ``name`` with its options.

    Raises ConfigError for an unknown name, an unknown option or a bad value, and DeviceError when a package
    that the adapter needs is not installed.
    """
    read = Options(name, options or {})
    match name:
        case "tensors":
            return TensorsAdapter(read)
        case "classify":
            return ClassifyAdapter(read)
        case "detect":
            return DetectAdapter(read)
        case "text":
            try:
                from headrace.workers.adapters.text import TextAdapter
            except ImportError as error:
                raise DeviceError(f"adapter text: {error}: pip install 'headrace[cpu]'") from error
            return TextAdapter(read)
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ConfigError(
            f"adapter {name!r} is unknown: known are {', '.join(ADAPTER_NAMES)} or package.module:function"
        )
    return load_function(name, read)
