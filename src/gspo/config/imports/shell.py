"""verl's shell scripts: variables are expanded and the arguments of its program collected, without running anything.

Understood are assignments, arrays, `${NAME:-default}`, `$((…))` and quotes. A value that comes from a command, from
arguments or from an unset variable is not known. Branches are not followed: the last assignment counts.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from gspo.config.imports.found import Found
from gspo.config.loading.settings import Layer, Origin, Setting
from gspo.config.loading.sources import OVERRIDE, parse_value

ASSIGNMENT = re.compile(r"\s*(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
PROGRAM = re.compile(r"(?:^|[\s/.])main_\w+(?:\.py)?(?=\s|$)")
EXPANSION = re.compile(
    r"\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)|\$\((?P<command>[^()]*(?:\([^()]*\)[^()]*)*)\)|`(?P<old>[^`]*)`"
    r"|\$\{(?P<name>\w+)(?:\[(?:@|\*)\])?(?:(?P<sign>:?[-=+])(?P<default>(?:[^{}]|\{[^{}]*\})*))?\}|\$(?P<plain>\w+|@)"
)
UNKNOWN = "\x00"
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def read_shell(path: Path) -> Found:
    """The arguments that a script gives to verl's program."""
    found, variables = Found(system="verl"), {"HOME": "~", "PWD": "."}
    for number, line in _logical_lines(path.read_text(encoding="utf-8")):
        match = ASSIGNMENT.fullmatch(line)
        if match and not PROGRAM.search(line):
            _assign(variables, match[1], bool(match[2]), match[3])
        elif PROGRAM.search(line):
            _take_arguments(found, expand(line, variables), f"{path.name}:{number}")
    return found


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their continuations joined, and arrays from bracket to bracket; comments are left out."""
    pending, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        start = start if pending else number
        pending += re.sub(r"\s#\s.*$", "", line)
        is_open = re.match(r"\s*(?:export\s+)?\w+\+?=\(", pending) and pending.count("(") > pending.count(")")
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
        elif is_open:
            pending += "\n"
        else:
            if pending.strip():
                yield start, pending
            pending = ""
    if pending.strip():
        yield start, pending


def _assign(variables: dict[str, str], name: str, adds: bool, text: str) -> None:
    value = text.strip()
    if value.startswith("(") and value.endswith(")"):
        value = expand(value[1:-1], variables)  # kept quoted, as words
    else:
        try:
            value = " ".join(shlex.split(expand(value, variables)))
        except ValueError:
            value = UNKNOWN
    variables[name] = f"{variables.get(name, '')} {value}" if adds else value


def expand(text: str, variables: dict[str, str]) -> str:
    """The text with variables filled in, outside single quotes; what is not known becomes UNKNOWN."""

    def replace(match: re.Match[str]) -> str:
        if match["sum"] is not None:
            return _compute(expand(match["sum"], variables), variables)
        if match["command"] is not None or match["old"] is not None:
            return UNKNOWN
        name = match["name"] or match["plain"]
        if name in variables:
            return variables[name]
        if match["default"] is not None and "+" not in match["sign"]:
            return expand(match["default"], variables)
        return "" if name == "@" else UNKNOWN

    text = re.sub(r'"(\$\{\w+\[[@*]\]\})"', r"\1", text)  # an array is its words, each with its own quotes
    parts = re.split(r"""("(?:\\.|[^"\\])*"|'[^']*')""", text)  # odd ones are quoted
    return "".join(p if i % 2 and p.startswith("'") else EXPANSION.sub(replace, p) for i, p in enumerate(parts))


def _compute(text: str, variables: dict[str, str]) -> str:
    """The value of a whole-number expression of the shell."""
    words = re.sub(r"[A-Za-z_]\w*", lambda m: variables.get(m[0], UNKNOWN), text)
    try:
        return str(_number(ast.parse(words.replace("/", "//").strip(), mode="eval").body))
    except (SyntaxError, ValueError, TypeError, KeyError, ZeroDivisionError):
        return UNKNOWN


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        kind = ast.Div if isinstance(node.op, ast.FloorDiv) else type(node.op)
        return OPERATORS[kind](_number(node.left), _number(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    raise ValueError("not a number")


def _take_arguments(found: Found, line: str, where: str) -> None:
    try:
        words = shlex.split(line)
    except ValueError:
        found.unknown.append(f"{where}: the command cannot be read")
        return
    for word in words:
        match = OVERRIDE.fullmatch(word)
        if match is None or "." not in match[1]:
            continue
        if UNKNOWN in word:
            found.unknown.append(f"{where}: {match[1]}: its value is known only when the script runs")
            continue
        try:
            setting = Setting(match[1], parse_value(match[2]), Origin(Layer.FILE, where), match[2])
        except ValueError:
            setting = Setting(match[1], match[2], Origin(Layer.FILE, where), match[2])
        found.settings.append(setting)
