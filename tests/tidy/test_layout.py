"""The repository's own rules: packages, imports, sizes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hr_repo import PACKAGE_FOLDERS, ROOT, imported_modules, product_files, source_files

from headrace.config import OTHER_VARIABLES

#: Longest module and function (STYLE: a module is about 300 lines, 500 at most; a function fits a screen).
MAX_MODULE_LINES = 500
MAX_FUNCTION_LINES = 60

#: The broker's core: events and now_ns in, actions out.
CORE_MODULES = [
    "actions.py",
    "admission.py",
    "batching.py",
    "core.py",
    "costs.py",
    "dispatch.py",
    "events.py",
    "inflight.py",
    "outcomes.py",
    "queues.py",
    "records.py",
    "settings.py",
    "size_class.py",
]
#: Modules in broker/ that may touch sockets, clocks, files and logs. Every other one belongs to the core.
SHELL_MODULES = {
    "__init__.py",
    "arenas.py",
    "binding.py",
    "control.py",
    "http.py",
    "inbound.py",
    "journal.py",
    "journal_body.py",
    "journal_file.py",
    "metrics.py",
    "model_store.py",
    "monitors.py",
    "outbound.py",
    "port_owner.py",
    "process.py",
    "reload_desk.py",
    "shell.py",
    "snapshot.py",
    "sockets.py",
}
IMPURE = {
    "asyncio",
    "datetime",
    "logging",
    "os",
    "random",
    "secrets",
    "selectors",
    "socket",
    "structlog",
    "threading",
    "time",
    "torch",
    "zmq",
}
HEAVY = {"torch", "onnxruntime", "onnx"}


def core_files() -> list[Path]:
    return [path for path in source_files("broker") if path.name not in SHELL_MODULES]


def violations(files: list[Path], forbidden: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        for line, name in imported_modules(path)
        if name.split(".")[0] in forbidden or any(name == f or name.startswith(f + ".") for f in forbidden)
    ]


def test_the_named_core_modules_exist() -> None:
    """The core list is not empty by accident."""
    assert {path.name for path in core_files()} >= set(CORE_MODULES)


@pytest.mark.parametrize(
    ("files", "forbidden"),
    [
        (core_files, IMPURE | {"headrace.workers", "headrace.clients", "headrace.cli"}),
        (
            lambda: source_files("headrace/protocol"),
            IMPURE | {"headrace.broker", "headrace.workers", "headrace.clients", "headrace.cli"},
        ),
        (
            lambda: source_files("clients"),
            HEAVY | {"headrace.broker", "headrace.workers", "headrace.cli", "prometheus_client"},
        ),
        (lambda: source_files("broker"), HEAVY | {"headrace.workers", "headrace.clients", "headrace.cli"}),
        (lambda: source_files("workers"), {"headrace.broker", "headrace.cli"}),
        (product_files, {"pickle", "marshal", "shelve", "broker", "workers", "clients", "configs"}),
        (lambda: source_files("headrace/planner"), IMPURE | {"headrace.cli"}),
        (lambda: [p for p in source_files("clients") if p.name.endswith("_session.py")], IMPURE),
        (lambda: [p for p in source_files("workers") if p.name.endswith("_session.py")], IMPURE),
    ],
    ids=[
        "core-is-pure",
        "protocol-is-pure",
        "clients-are-light",
        "broker-is-light",
        "workers-know-no-broker",
        "no-pickle-no-bare-roots",
        "planner-is-pure",
        "client-sessions-are-pure",
        "worker-sessions-are-pure",
    ],
)
def test_forbidden_imports(files: object, forbidden: set[str]) -> None:
    """protocol <- cores <- shells <- cli; the cores touch no clock, socket or environment."""
    found = files()  # type: ignore[operator]

    assert found
    assert violations(found, forbidden) == []


def test_importing_headrace_loads_nothing_heavy() -> None:
    """A producer script pays for pyzmq, msgpack and numpy alone."""
    code = (
        "import sys, headrace; headrace.Producer; headrace.Subscriber; headrace.Client;"
        "print([m for m in ('torch','onnxruntime','onnx','cv2','av','click','pydantic') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.strip() == "[]"


def test_the_coverage_report_leaves_out_the_shells_alone() -> None:
    """Every module of the core and the protocol is held to 100 % of its branches."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]

    assert set(tools["coverage"]["report"]["omit"]) == {f"*/broker/{name}" for name in SHELL_MODULES}


def test_package_list_equals_folders() -> None:
    """A new folder with code is shipped, or this fails."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = set()
    for folder, package in PACKAGE_FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join((package, *inner)))

    assert listed == found


def test_every_folder_with_code_is_a_package() -> None:
    """A module in a folder without __init__.py would be left out of the wheel."""
    bare = [p for p in product_files() if not (p.parent / "__init__.py").exists()]

    assert bare == []


@pytest.mark.parametrize("folder", ["broker", "workers", "clients", "configs"])
def test_bare_import_of_a_mapped_folder_is_refused(folder: str) -> None:
    """Two copies of one class in a process would compare unequal: the guard forbids the second way in."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 1
    assert f"import this package as headrace.{folder}" in done.stderr


def test_modules_are_not_too_long() -> None:
    """A module does one thing."""
    long = {
        str(p.relative_to(ROOT)): n
        for p in product_files()
        if (n := len(p.read_text().splitlines())) > MAX_MODULE_LINES
    }

    assert long == {}


def test_functions_fit_a_screen() -> None:
    """A function longer than a screen hides its shape."""
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name} {node.end_lineno - node.lineno + 1}"
        for path in product_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]

    assert long == []


def test_no_set_is_iterated_in_the_core() -> None:
    """The order of a set depends on PYTHONHASHSEED: the core uses dicts and lists where order shows."""
    found = []
    for path in core_files():
        for node in ast.walk(ast.parse(path.read_text())):
            iterated = [node.iter] if isinstance(node, ast.For | ast.comprehension) else []
            found += [
                f"{path.name}:{it.lineno}"
                for it in iterated
                if isinstance(it, ast.Set)
                or (
                    isinstance(it, ast.Call)
                    and isinstance(it.func, ast.Name)
                    and it.func.id in {"set", "frozenset"}
                )
            ]

    assert found == []


def test_every_variable_of_ours_that_is_read_is_one_that_commands_take() -> None:
    """Commands refuse unknown HEADRACE_ variables: one that only a test reads would break each of its
    subprocesses."""
    reads = re.compile(r"""(?:environ\[|environ\.get\(|getenv\()\s*["'](HEADRACE_\w+)""")
    files = product_files() + source_files("tests") + source_files("benchmarks")
    found = {name for path in files for name in reads.findall(path.read_text())}

    assert found >= {"HEADRACE_CACHE", "HEADRACE_DEBUG"}
    assert found <= set(OTHER_VARIABLES)
