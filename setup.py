"""Build the compiled modules; everything else is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).resolve().parent))

from native.build import BuildNative, extensions

setup(ext_modules=extensions(), cmdclass={"build_ext": BuildNative})
