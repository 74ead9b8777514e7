"""Files from strangers: read within limits on kind, size, expansion, depth and aliases, else refused by name.

A run folder, a checkpoint or a config may come from anyone. Nothing here runs code of a file, follows it to a device or
a pipe, or lets a small file use much memory or time.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml

MiB = 1 << 20
MAX_DOCUMENT = 16 * MiB  # a JSON document that is read as a whole
MAX_YAML = 1 * MiB
MAX_LINE = 32 * MiB  # one record of a JSON-lines file
MAX_EXPANDED = 1024 * MiB  # of one gzip file
MAX_RATIO = 200  # of a gzip file to its size; JSON of numbers and text has 3 to 60
FREE_EXPANSION = 16 * MiB  # below which the ratio does not matter
MAX_DEPTH = 64  # of nested lists and mappings
MAX_ITEMS = 4_000_000  # values of one JSON text
MAX_NODES = 20_000  # values of one YAML text, with its aliases expanded
MAX_PLAIN = 20_000  # characters of a YAML value without quotes, which may be a number
CHUNK = 1 << 16
LONG = 32  # values of a list from which it is faster to look at all types first

_NESTED = frozenset({dict, list})
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Unreadable(ValueError):
    """A file that is not read: it is of another kind, too large, too deep or damaged. `reason` says which."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = Path(path), reason


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading, or raise Unreadable. FileNotFoundError when there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)  # a pipe does not block
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise Unreadable(path, f"cannot be opened ({error.strerror})") from None
    except ValueError as error:  # a name with a null character
        raise Unreadable(path, f"cannot be opened ({error})") from None
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise Unreadable(path, f"is {_KINDS.get(stat.S_IFMT(mode), 'not a plain file')}, expected a plain file")
    return os.fdopen(fd, "rb")


def read_bytes(path: Path, limit: int = MAX_DOCUMENT) -> bytes:
    """The content of a plain file of at most `limit` bytes."""
    with open_plain(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise Unreadable(path, f"is larger than {_size(limit)}")
    return data


def read_text(path: Path, limit: int = MAX_DOCUMENT) -> str:
    """The text of a plain file; what is not UTF-8 is replaced."""
    return read_bytes(path, limit).decode("utf-8", "replace")


def read_json(path: Path, limit: int = MAX_DOCUMENT) -> Any:
    """The value of a JSON file."""
    return parse_json(read_text(path, limit), path)


def parse_json(text: str, path: Path | str, **options: Any) -> Any:
    """The value of JSON text within MAX_ITEMS and MAX_DEPTH; `options` are those of json.loads."""
    if text.count(",") + text.count("[") + text.count("{") > MAX_ITEMS:
        raise Unreadable(path, f"has more than {MAX_ITEMS:,} values")
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise Unreadable(path, f"is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise Unreadable(path, f"is not JSON ({error})") from None
    if not is_shallow(value):
        raise Unreadable(path, f"is nested deeper than {MAX_DEPTH} levels")
    return value


def is_shallow(value: Any, levels: int = MAX_DEPTH) -> bool:
    """Whether a value of JSON has at most this many levels. Long lists of plain values cost one pass in C."""
    if type(value) not in _NESTED:
        return True
    if levels == 0:
        return False
    inner = value.values() if type(value) is dict else value
    if len(inner) > LONG and _NESTED.isdisjoint(map(type, inner)):
        return True
    for item in inner:
        if type(item) in _NESTED and (item or levels == 1) and not is_shallow(item, levels - 1):
            return False
    return True


def read_yaml(path: Path) -> Any:
    """The value of a YAML file with plain types only."""
    text = read_text(path, MAX_YAML)
    check_yaml(text, path)
    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise Unreadable(path, f"cannot be read as YAML: {' '.join(str(error).split())}") from None


def check_yaml(text: str, path: Path | str) -> None:
    """Refuse YAML text over the limits, before a loader builds it: loaders recurse, and expand aliases.

    Parses events only, which needs no recursion, and stops at the first one over a limit.
    """
    if len(text) > MAX_YAML:
        raise Unreadable(path, f"is larger than {_size(MAX_YAML)}")
    open_nodes: list[tuple[str | None, int]] = []  # anchor of each open collection, and the count when it began
    sizes: dict[str, int] = {}  # nodes below an anchor, aliases expanded
    count = 0
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            anchor = getattr(event, "anchor", None)
            if isinstance(event, yaml.AliasEvent):
                if any(anchor == name for name, _ in open_nodes):
                    raise Unreadable(path, f"has an alias *{anchor} inside its own anchor")
                count += sizes.get(anchor or "", 1)
            elif isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((anchor, count))
                count += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                name, before = open_nodes.pop()
                if name is not None:
                    sizes[name] = count - before
            elif isinstance(event, yaml.ScalarEvent):
                count += 1
                if anchor is not None:
                    sizes[anchor] = 1
                if not event.style and len(event.value) > MAX_PLAIN:
                    raise Unreadable(path, f"has a value of over {MAX_PLAIN:,} characters without quotes")
            if len(open_nodes) > MAX_DEPTH:
                raise Unreadable(path, f"is nested deeper than {MAX_DEPTH} levels")
            if count > MAX_NODES:
                raise Unreadable(path, f"has more than {MAX_NODES:,} values (aliases expanded)")
    except (yaml.YAMLError, UnicodeError) as error:
        raise Unreadable(path, f"cannot be read as YAML: {' '.join(str(error).split())}") from None


def lines(file: BinaryIO, path: Path, limit: int = MAX_LINE) -> Iterator[bytes]:
    """The lines of an open file with their ends. The last one may be half written."""
    while line := file.readline(limit + 1):
        if len(line) > limit:
            raise Unreadable(path, f"has a line of over {_size(limit)}")
        yield line


def gzip_chunks(path: Path) -> Iterator[bytes]:
    """The content of a gzip file in pieces. Unreadable when it is damaged, cut short, or expands too far."""
    with open_plain(path) as file:
        limit = min(MAX_EXPANDED, max(FREE_EXPANSION, MAX_RATIO * os.fstat(file.fileno()).st_size))
        total, decoder, started = 0, zlib.decompressobj(wbits=31), False
        data = b""
        while data := data or file.read(CHUNK):
            started = True
            try:
                piece = decoder.decompress(data, MiB)
            except zlib.error as error:
                raise Unreadable(path, f"is damaged ({error})") from None
            total += len(piece)
            if total > limit:
                raise Unreadable(path, f"expands to more than {_size(limit)}")
            yield piece
            data = decoder.unconsumed_tail
            if decoder.eof:  # files may be joined
                data = decoder.unused_data.lstrip(b"\0")
                decoder, started = zlib.decompressobj(wbits=31), False
        if started:
            raise Unreadable(path, "is cut short")


def gzip_lines(path: Path, limit: int = MAX_LINE) -> Iterator[bytes]:
    """The lines of a gzip file, as far as it can be read; then Unreadable when it is damaged."""
    rest = bytearray()
    for piece in gzip_chunks(path):
        *whole, end = piece.split(b"\n")
        for line in whole:
            yield bytes(rest) + line if rest else line
            rest.clear()
        rest += end
        if len(rest) > limit:
            raise Unreadable(path, f"has a line of over {_size(limit)}")
    if rest:
        yield bytes(rest)


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= MiB else f"{num_bytes} bytes"
