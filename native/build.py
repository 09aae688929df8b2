"""The build command that compiles with mypyc where it can, and leaves plain Python where it can't."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext

from native.modules import FOLDERS, ROOT, compiled_sources, imported_path
from native.sources import write_out_inits

#: Set to 1, it builds plain Python.
PURE_VARIABLE = "HEADRACE_PURE"

#: -O1 instead of -O3 makes the compiler twice as fast and the core not measurably slower.
OPTIMISATION = "1"

_PROBE = "#include <Python.h>\nint headrace_probe(void) { return PY_VERSION_HEX != 0; }\n"


def extensions() -> list[Extension]:
    """Return a stand-in for the compiled modules, nothing for a build that is to be plain Python.

    An editable install is: what is edited must be what runs. mypyc runs later, in the build command, because
    setup.py is also read for questions that need no compiling.
    """
    if os.environ.get(PURE_VARIABLE) == "1":
        _say(f"{PURE_VARIABLE}=1")
        return []
    if {"editable_wheel", "develop"} & set(sys.argv):
        return []
    if {"bdist_wheel", "build", "build_ext", "install"} & set(sys.argv) and not _has_compiler():
        _say("there is no C compiler that finds Python.h")
        return []
    return [Extension("headrace.native", [])]


class BuildNative(build_ext):
    """Compiles the modules of ``native.modules``. Whatever fails, the build ends as plain Python."""

    def run(self) -> None:
        """Compile all or nothing."""
        try:
            with tempfile.TemporaryDirectory() as folder:
                self._compile(Path(folder))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is; mypyc calls sys.exit()
            _say(f"compiling failed ({type(error).__name__}: {error})")
            self.extensions = self.distribution.ext_modules = []

    def _compile(self, folder: Path) -> None:
        from mypyc.build import mypycify

        paths = stage(folder)
        target = Path(self.build_temp, "c").absolute()
        built = target.parent / "native"  # apart, so that a failure leaves nothing behind
        shutil.rmtree(built, ignore_errors=True)
        options = ["--config-file=", "--follow-imports=silent", "--ignore-missing-imports"]
        with contextlib.chdir(folder):  # the paths as given are those of tracebacks
            modules = mypycify(
                [*options, *paths],
                opt_level=OPTIMISATION,
                debug_level="0",
                target_dir=str(target),
                group_name="headrace",
            )
        self.distribution.ext_modules = modules
        command = build_ext(self.distribution)
        command.build_temp, command.build_lib = self.build_temp, str(built)
        command.ensure_finalized()
        command.run()
        shutil.copytree(built, self.build_lib, dirs_exist_ok=True)


def stage(folder: Path) -> list[str]:
    """Lay the packages out as they are imported, prepared for the compiler; return the paths to compile."""
    for source, package in FOLDERS.items():
        target = folder / package.replace(".", "/")
        shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    paths = []
    for source in compiled_sources():
        path = imported_path(source)
        text = (ROOT / source).read_text(encoding="utf-8")
        (folder / path).write_text(write_out_inits(text), encoding="utf-8")
        paths.append(path)
    return paths


def _has_compiler() -> bool:
    """True when a C file with Python.h in it can be compiled."""
    from setuptools._distutils import ccompiler, sysconfig

    with tempfile.TemporaryDirectory() as folder, _silence():
        source = Path(folder, "probe.c")
        source.write_text(_PROBE, encoding="utf-8")
        try:
            compiler = ccompiler.new_compiler()
            sysconfig.customize_compiler(compiler)
            include = [sysconfig.get_python_inc(), sysconfig.get_python_inc(plat_specific=True)]
            compiler.compile([str(source)], output_dir=folder, include_dirs=include)
        except Exception:  # noqa: BLE001 - no compiler, no linker, no header: each has its own
            return False
    return True


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep what the compiler says of the probe out of the build's output."""
    with Path(os.devnull).open("wb") as nowhere:
        kept = os.dup(2)
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _say(reason: str) -> None:
    print(f"headrace is built as plain Python: {reason}", file=sys.stderr)  # noqa: T201 - a build's output
