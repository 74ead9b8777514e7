"""Modules that a server imports before it forks, so that programs find them without reading a file."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
import sysconfig
from collections.abc import Iterable


def _names(text: str) -> list[str]:
    return text.split()


# Every module here makes every fork a little slower, so only those that many programs use.
COMMON = _names("""
abc array ast atexit bisect calendar collections collections.abc contextlib copy csv
dataclasses datetime decimal enum fractions functools gc hashlib heapq inspect io itertools json linecache
math numbers operator os os.path pathlib pprint queue random re signal statistics string struct sys textwrap threading
time timeit traceback types typing unicodedata weakref
""")

# At level 1 no file can be opened, so nothing can be imported later: every module that a program could need.
EVERYTHING = _names("""
concurrent.futures.thread logging argparse asyncio base64 bz2 cmath codecs concurrent.futures contextvars ctypes difflib getpass glob graphlib hmac html
keyword locale multiprocessing pickle platform reprlib resource secrets select selectors shlex socket ssl stat
subprocess tempfile tokenize unittest uuid warnings zlib zoneinfo encodings.ascii encodings.idna encodings.latin_1
encodings.utf_16 encodings.utf_32 encodings.utf_8_sig binascii binhex bdb cmd code codeop colorsys compileall
configparser copyreg curses dbm dis email email.message email.parser email.policy email.mime.text encodings.aliases
encodings.cp1252 encodings.hex_codec encodings.rot_13 errno fileinput filecmp fnmatch ftplib getopt gettext gzip
html.entities html.parser http http.client http.cookies imaplib importlib.abc importlib.metadata importlib.resources
importlib.util ipaddress json.tool lzma mailbox mimetypes mmap modulefinder netrc opcode optparse pickletools plistlib
poplib posixpath profile pstats pyclbr quopri rlcompleter runpy sched shelve shutil smtplib sqlite3 sre_compile
stringprep symtable sysconfig tabnanny tarfile telnetlib tomllib trace tracemalloc turtle unittest.mock urllib
urllib.error urllib.parse urllib.request wave webbrowser wsgiref xml.dom.minidom xml.etree.ElementTree xml.sax
xmlrpc.client zipapp zipfile zipimport _strptime _pydecimal _pyio _bisect _heapq _random _statistics _struct _zoneinfo
concurrent.futures.process multiprocessing.pool
""")

NUMPY = _names("numpy numpy.linalg")
NUMPY_EVERYTHING = _names("numpy.fft numpy.polynomial numpy.random numpy.ma numpy.lib.stride_tricks")

# Libraries that extension modules of the standard library and numpy are linked with, on some system or other.
LIBRARIES = _names("""
[cm] crypt crypto db-* dl expat ffi gcc_s gdbm* gfortran* lzma mpdec* ncurses* nsl panel* pthread python3* quadmath*
readline rt sqlite3 ssl stdc++ tinfo* tirpc util uuid z bz2 zstd
""")


def preload(numpy_parent: str, everything: bool) -> None:
    """Import the common modules, with `everything` all likely ones, and numpy from `numpy_parent` ("" for none).

    The folder that holds numpy is taken off the import path again: programs must not import the packages beside it.
    """
    _import(COMMON)
    if everything:
        _import(EVERYTHING)
        encodings = pkgutil.iter_modules(importlib.import_module("encodings").__path__, "encodings.")
        _import(module.name for module in encodings if "mbcs" not in module.name)
    if numpy_parent:
        sys.path.append(numpy_parent)
        _import(NUMPY)
        if everything:
            _import(NUMPY_EVERYTHING)
        sys.path.remove(numpy_parent)
    importlib.util.find_spec("no_such_module")  # fills the import system's listings, which children inherit


def readable_paths(numpy_parent: str) -> list[str]:
    """Paths that a program may read: the standard library, shared libraries, numpy, time zones.

    Not the packages installed beside the standard library: gspo and its tests may be among them.
    """
    paths = [os.path.join(folder, name) for folder in listable_paths() for name in os.listdir(folder)]
    paths = [path for path in paths if os.path.basename(path) not in ("site-packages", "dist-packages", "test")]
    paths += [sysconfig.get_config_var("DESTSHARED") or "", *_shared_libraries()]
    paths += ["/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo", "/dev/urandom", "/dev/zero"]
    if numpy_parent:
        paths += [os.path.join(numpy_parent, name) for name in ("numpy", "numpy.libs")]
    return [path for path in dict.fromkeys(paths) if path]


def listable_paths() -> list[str]:
    """Folders whose names a program may list, as the import system does."""
    return list(dict.fromkeys([sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]))


def _shared_libraries() -> set[str]:
    """Files that modules of the standard library may load; few, as each rule makes every child a little slower."""
    folders = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", os.path.join(sys.base_prefix, "lib")]
    folders += glob.glob("/lib/*-linux-gnu*") + glob.glob("/usr/lib/*-linux-gnu*")
    wanted = re.compile("|".join(fnmatch.translate(f"lib{name}.so*") for name in LIBRARIES))
    found: set[str] = set()
    for folder in filter(os.path.isdir, folders):
        found |= {os.path.realpath(os.path.join(folder, n)) for n in os.listdir(folder) if wanted.match(n)}
    return found


def _import(names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
