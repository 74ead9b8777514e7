"""Fourteen programs that want to read, change or outlive something on the machine. Targets are bounded."""

from __future__ import annotations

from .attack import Attack, Outcome, World

# The word is put together here so that it is not in the program's text.
_DONE = 'DONE = "done" + "-@TOKEN@"\n'

_RAW = r"""
import ctypes, os, platform, struct
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def raw(x86, arm, *args):
    number = x86 if platform.machine() in ("x86_64", "AMD64") else arm
    return libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in args])
"""

SOURCES: dict[str, str] = {
    "file_tamper": """
import os, pathlib
for action in (
    lambda: open("@FOLDER@/witness", "w").write("owned"),
    lambda: open("@FOLDER@/witness", "a").write("owned"),
    lambda: os.truncate("@FOLDER@/witness", 0),
    lambda: os.rename("@FOLDER@/witness", "@FOLDER@/moved"),
    lambda: os.symlink("/etc/passwd", "@FOLDER@/link"),
    lambda: os.mkdir("@FOLDER@/made"),
    lambda: os.chmod("@FOLDER@/witness", 0),
    lambda: os.close(os.open("@FOLDER@/witness", os.O_RDONLY | os.O_TRUNC)),
    lambda: os.open("@FOLDER@", os.O_TMPFILE | os.O_RDWR),
):
    try:
        action()
    except OSError:
        continue
    break
""",
    "read_system_file": """
for path in ("/etc/passwd", "/proc/self/environ", "/proc/1/cmdline", "@FOLDER@/secret"):
    try:
        print(DONE, len(open(path, "rb").read()))
    except OSError:
        pass
""",
    "fill_disk": """
for path in ("@FOLDER@/fill", "/dev/shm/gspo-@TOKEN@"):
    try:
        with open(path, "wb") as file:
            for _ in range(8):
                file.write(bytes(1 << 20))
    except OSError:
        pass
""",
    "kill_others": """
import os, signal
for pid in (@VICTIM@, os.getppid(), -1):
    try:
        if pid > 1:
            os.kill(pid, signal.SIGKILL if pid == @VICTIM@ else 0)
            print(DONE)
        elif pid == -1 and os.getpid() == 1:
            os.kill(-1, signal.SIGKILL)  # harmless: this process is alone in its namespace
    except OSError:
        pass
""",
    "ptrace": _RAW
    + """
if raw(101, 117, 0x4206, @VICTIM@, 0, 0) == 0 or raw(101, 117, 16, @VICTIM@, 0, 0) == 0:
    print(DONE)
buffer = ctypes.create_string_buffer(64)
vector = struct.pack("PN", ctypes.addressof(buffer), 64)
remote = struct.pack("PN", 0x400000, 64)
v, r = ctypes.create_string_buffer(vector), ctypes.create_string_buffer(remote)
if raw(310, 270, @VICTIM@, ctypes.addressof(v), 1, ctypes.addressof(r), 1, 0) > 0:
    print(DONE)
""",
    "prlimit_other": "import resource\nresource.prlimit(@VICTIM@, resource.RLIMIT_NOFILE, (7, 7))\n",
    "daemon": """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, b"@MARK@", 0, 0, 0)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    os._exit(0)
print(DONE)
ctypes.CDLL(None).prctl(15, b"parent", 0, 0, 0)
""",
    "exec_family": """
import os, subprocess
for action in (
    lambda: os.system("echo x > @FOLDER@/made"),
    lambda: subprocess.run(["/bin/sh", "-c", "echo x > @FOLDER@/made"]),
    lambda: os.posix_spawn("/bin/sh", ["sh", "-c", "echo x > @FOLDER@/made"], {}),
    lambda: os.execv("/bin/sh", ["sh", "-c", "echo x > @FOLDER@/made"]),
):
    try:
        action()
    except OSError:
        pass
""",
    "reimported_os": """
import importlib, sys
for name in ("os", "io", "posix", "_io"):
    sys.modules.pop(name, None)
posix = importlib.import_module("posix")
fd = posix.open("@FOLDER@/witness", posix.O_WRONLY | posix.O_TRUNC)
posix.write(fd, b"owned")
""",
    "network": """
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", @PORT@)), (socket.AF_INET6, ("::ffff:127.0.0.1", @PORT@))):
    try:
        socket.socket(family).connect(address)
        print(DONE)
    except OSError:
        pass
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", @PORT@))
    print(DONE)
except OSError:
    pass
""",
    "listen": """
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_UNIX, "@FOLDER@/socket"), (socket.AF_UNIX, "\\0@TOKEN@")):
    try:
        s = socket.socket(family)
        s.bind(address)
        s.listen()
        print(DONE)
    except OSError:
        pass
""",
    "kernel_calls": _RAW
    + """
empty = ctypes.create_string_buffer(256)
at = ctypes.addressof(empty)
for x86, arm, args in (
    (272, 97, (0x10000000,)),             # unshare
    (319, 279, (at, 0)),                  # memfd_create
    (425, 425, (1, at)),                  # io_uring_setup
    (323, 282, (1,)),                     # userfaultfd
    (250, 219, (0, -3, 1)),               # keyctl
    (29, 194, (0, 4096, 0o1600)),         # shmget
    (56, 220, (17, 0, 0, 0, 0)),          # clone as fork
    (434, 434, (@VICTIM@, 0)),            # pidfd_open
):
    result = raw(x86, arm, *args)
    if result == 0 and x86 == 56:
        os._exit(0)
    if result >= 0:
        print(DONE, x86)
""",
    "other_abi": """
import ctypes, mmap, platform
if platform.machine() == "x86_64":
    # mov eax, 20 (getpid of the 32-bit table); int 0x80; ret
    code = b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3"
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    if ctypes.CFUNCTYPE(ctypes.c_int)(address)() > 0:
        print(DONE)
libc = ctypes.CDLL(None, use_errno=True)
if platform.machine() == "x86_64" and libc.syscall(ctypes.c_long(0x40000000 | 39)) > 0:
    print(DONE)
""",
    "setuid_limits": """
import os, resource
for action in (
    lambda: os.setuid(0),
    lambda: os.setgid(0),
    lambda: os.setgroups([0]),
    lambda: os.nice(1),
    lambda: resource.setrlimit(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)),
    lambda: resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2),
):
    try:
        action()
        print(DONE)
    except (OSError, ValueError):
        pass
""",
}


def _gained(world: World, outcome: Outcome) -> bool:
    return (
        world.done.encode() in outcome.stdout
        or world.touched()
        or world.contacted()
        or world.victim_harmed()
        or bool(world.left_over())
    )


HOST = [Attack(name, "host", _DONE + source, _gained) for name, source in SOURCES.items()]
