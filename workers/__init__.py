"""headrace.workers: see docs/architecture.md."""

import os

# The folder stands at the top of the repository but is imported under the headrace root only: a bare
# `import workers` would make a second copy of every class in it.
if __name__ != "headrace.workers":
    raise ImportError(f"import this package as headrace.workers, not as {__name__}")

# From version 1.29 on, ONNX Runtime's Linux builds report their use to their maker, with names and hashes of
# the models, unless this is set before they are loaded (disable_telemetry_events() comes too late: the device
# id and the store of events exist by then). Here, because nothing in headrace loads ONNX Runtime without this
# package. Whoever wants it sets ORT_DISABLE_TELEMETRY=0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
