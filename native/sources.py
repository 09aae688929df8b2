"""What the compiler is given: our sources, with the ``__init__`` of the hot dataclasses written out.

mypyc leaves the ``__init__`` that ``dataclass`` makes to the interpreter, and objects that are made once per
frame were half of what the compiled core cost (12.5 us a frame, 8.5 with this). So a dataclass which is
frozen for the type checker only, or not at all, gets the same ``__init__`` as text. Frozen ones stay as they
are: an assignment to them must raise.

Every statement stays on its line, so that a traceback names the lines of the file in the repository.
"""

from __future__ import annotations

import ast

_IMPORT = "; from dataclasses import dataclass as _native_dataclass"


def write_out_inits(text: str) -> str:
    """Return the source with the ``__init__`` of its mutable and per-frame dataclasses written out.

    Raises ValueError for a field or decorator of such a class that takes more than one line.
    """
    lines = text.splitlines()
    is_import_needed = False
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and (options := _options(node)) is not None:
            is_import_needed |= _write_out(node, options, lines)
    if is_import_needed:
        row = next(row for row, line in enumerate(lines) if line.startswith("from __future__ import"))
        lines[row] += _IMPORT
    return "\n".join(lines) + "\n"


def _options(node: ast.ClassDef) -> dict[str, object] | None:
    """Return the options of a dataclass whose ``__init__`` is to be written out, None for any other class."""
    if len(node.decorator_list) != 1 or node.bases:
        return None
    call = node.decorator_list[0]
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return None
    options: dict[str, object] = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    is_frozen = bool(options.get("frozen"))
    if call.func.id not in {"dataclass", "per_frame"} or (call.func.id == "dataclass" and is_frozen):
        return None
    names = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
    has_factory = any("field(" in ast.unparse(each.value) for each in _fields(node) if each.value is not None)
    if names & {"__init__", "__post_init__"} or has_factory or not _fields(node):
        return None
    return options


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [each for each in node.body if isinstance(each, ast.AnnAssign)]


def _write_out(node: ast.ClassDef, options: dict[str, object], lines: list[str]) -> bool:
    """Change the lines of one class. Returns whether it is still a dataclass."""
    parameters, assignments = ["self"], []
    for each in (fields := _fields(node)):
        name, annotation = ast.unparse(each.target), ast.unparse(each.annotation)
        default = "" if each.value is None else f" = {ast.unparse(each.value)}"
        parameters.append(f"{name}: {annotation}{default}")
        assignments.append(f"self.{name} = {name}")
        # A default in the class body would be assigned to each new object first.
        lines[_only_row(each)] = f"    {name}: {annotation}"
    init = f"    def __init__({', '.join(parameters)}) -> None: {'; '.join(assignments)}"
    row = fields[-1].lineno
    while row < len(lines) and lines[row].strip():
        row += 1
    lines[row : row + 1] = [init]  # in place of the empty line behind the fields
    # Equality, hash and repr still come from dataclass(); what is compared by identity needs none of them.
    is_dataclass = options.get("eq", True) is True
    decorator = f"@_native_dataclass(init=False, unsafe_hash={bool(options.get('frozen'))})"
    lines[_only_row(node.decorator_list[0])] = decorator if is_dataclass else ""
    return is_dataclass


def _only_row(node: ast.stmt | ast.expr) -> int:
    if node.end_lineno != node.lineno:
        raise ValueError(f"line {node.lineno}: {ast.unparse(node)} takes more than one line")
    return node.lineno - 1
