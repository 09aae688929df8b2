"""The compiled build: which modules mypyc turns into C extensions, and how (docs/adr/0015-compiled.md).

Used by setup.py alone; not part of the package.
"""
