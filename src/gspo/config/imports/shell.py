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
ARRAY = re.compile(r"\s*(?:(?:export|local|readonly)\s+)?\w+\+?=\(")
PROGRAM = re.compile(r"(?:^|[\s/.])main_\w+(?:\.py)?(?=\s|$)")
PARAMETER = re.compile(r"(\w+|@)(?:\[[@*]\])?(?:(:?[-=+])(.*))?", re.DOTALL)
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
        is_open = ARRAY.match(pending) and pending.count("(") > pending.count(")")
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
    value, before = text.strip(), variables.get(name, "") if adds else ""
    if value.startswith("(") and value.endswith(")"):
        before += " " * adds
        value = expand(value[1:-1], variables)  # kept quoted, as words
    else:
        try:
            value = " ".join(shlex.split(expand(value, variables)))
        except ValueError:
            value = UNKNOWN
    variables[name] = before + value


def expand(text: str, variables: dict[str, str]) -> str:
    """The text with variables filled in, outside single quotes; what is not known becomes UNKNOWN."""
    text = re.sub(r'"(\$\{\w+\[[@*]\]\})"', r"\1", text)  # an array is its words, each with its own quotes
    out, at, quoted = "", 0, False
    while at < len(text):
        end = at + 1
        if text[at] == "'" and not quoted:
            end = text.find("'", at + 1) + 1 or len(text)
        elif text[at] == "\\":
            end = at + 2
        elif text[at] == "`":
            end = text.find("`", at + 1) + 1 or len(text)
            out, at = out + UNKNOWN, end
            continue
        elif text[at] == "$":
            value, end = _substitute(text, at, variables)
            out, at = out + value, end
            continue
        quoted ^= text[at] == '"'
        out, at = out + text[at:end], end
    return out


def _substitute(text: str, at: int, variables: dict[str, str]) -> tuple[str, int]:
    """The value of the `$…` that starts at `at`, and where it ends."""
    if text.startswith("$((", at):
        end = _closing(text, at + 1)
        return _compute(expand(text[at + 3 : end - 2], variables), variables), end
    if text.startswith("$(", at):
        return UNKNOWN, _closing(text, at + 1)
    if text.startswith("${", at):
        end = _closing(text, at + 1)
        return _parameter(text[at + 2 : end - 1], variables), end
    plain = re.match(r"\w+|@", text[at + 1 :])
    return (_parameter(plain[0], variables), at + 1 + len(plain[0])) if plain else ("$", at + 1)


def _parameter(inner: str, variables: dict[str, str]) -> str:
    """The value of `NAME`, `NAME[@]`, `NAME:-default` and the like; UNKNOWN for other forms."""
    match = PARAMETER.fullmatch(inner)
    if match is None:
        return UNKNOWN
    name, sign, default = match.groups()
    if name in variables and "+" not in (sign or ""):
        return variables[name]
    if default is not None and ("+" in sign) == (name in variables):
        return expand(default, variables)
    return "" if name == "@" or sign else UNKNOWN


def _closing(text: str, at: int) -> int:
    """The index after the bracket that closes the one at `at`."""
    opening = text[at]
    closing, depth = {"(": ")", "{": "}"}[opening], 0
    for index in range(at, len(text)):
        depth += (text[index] == opening) - (text[index] == closing)
        if depth == 0:
            return index + 1
    return len(text)


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
