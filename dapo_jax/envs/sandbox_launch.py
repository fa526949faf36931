"""Puts a program into user, pid, mount, network, IPC, UTS and cgroup namespaces of its own.

Run as a file by a fresh interpreter; imports nothing of the package. Three processes: this one
waits; its child is process 1 inside, makes the root file system, ends everything at the time limit
and keeps its capabilities, so that nothing inside may trace it; its child drops them and becomes
the program. When process 1 ends, the kernel kills all that is left inside.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

NAMESPACES = (0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000)
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_SETATTR, AT_RECURSIVE = 442, 0x8000  # one number on every architecture
READ_ONLY = 1 | 2 | 4  # MOUNT_ATTR_RDONLY, NOSUID, NODEV
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
CAPABILITIES = 64  # more than there are
NOBODY = 65534
INSIDE = 1000  # the number inside of NOBODY
ROOT = "/tmp"  # noqa: S108 (where the new root is mounted, inside a mount namespace of its own)
DEVICES = ("/dev/null", "/dev/urandom")

LIBC = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> int:
    """A C function; OSError that names it if it fails."""
    given = [a.encode() if isinstance(a, str) else a for a in arguments]
    result = getattr(LIBC, name)(*given)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def _enter() -> bool:
    """New namespaces; whether a second user, nobody outside, exists inside.

    For root's processes the kernel enforces no RLIMIT_NPROC, hence the second user. Only a process
    that stayed outside may map it: a fork made before.
    """
    user, group, both = os.geteuid(), os.getegid(), os.geteuid() == 0
    entered, told = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(told)
        os.read(entered, 1)
        os._exit(_exit_status(_map_users, f"/proc/{os.getppid()}", user, group, both))
    _call("unshare", sum(NAMESPACES))
    os.close(entered)
    os.close(told)
    if os.waitpid(helper, 0)[1]:
        raise OSError("the users of the namespace could not be mapped")
    return both


def _exit_status(function: Any, *arguments: Any) -> int:
    try:
        function(*arguments)
        return 0
    except OSError as error:
        print(f"sandbox: {error}", file=sys.stderr, flush=True)
        return 1


def _map_users(process: str, user: int, group: int, both: bool) -> None:
    if not both:  # else the groups are dropped later
        _write(f"{process}/setgroups", "deny")
    more = f"\n{INSIDE} {NOBODY} 1" if both else ""
    _write(f"{process}/uid_map", f"0 {user} 1{more}")
    _write(f"{process}/gid_map", f"0 {group} 1{more}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _build_root(visible: list[str], disk_mb: int) -> None:
    """A tmpfs root with read-only views of `visible`, an empty /tmp and nothing else."""
    _call("mount", None, "/", None, MS_REC | MS_PRIVATE, None)
    held = {path: os.open(path, os.O_PATH) for path in (*visible, *DEVICES)
            if not os.path.islink(path)}
    links = {path: os.readlink(path) for path in visible if os.path.islink(path)}
    _call("mount", "tmpfs", ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path, target in links.items():
        _parents(path)
        os.symlink(target, ROOT + path)
    for path, descriptor in held.items():
        _bind(path, descriptor)
    os.mkdir(f"{ROOT}/tmp")
    os.chdir(ROOT)
    _call("mount", "tmpfs", f"{ROOT}/tmp", "tmpfs", MS_NOSUID | MS_NODEV,
          f"size={disk_mb}m,nr_inodes=1024,mode=1777")
    _call("pivot_root", ".", ".")
    _call("umount2", ".", MNT_DETACH)
    os.chdir("/")
    _read_only("/", recursive=False)


def _parents(path: str) -> None:
    os.makedirs(os.path.dirname(ROOT + path), exist_ok=True)


def _bind(path: str, descriptor: int) -> None:
    # Through the descriptor: a path below ROOT is hidden by now.
    _parents(path)
    if os.path.isdir(f"/proc/self/fd/{descriptor}"):
        os.makedirs(ROOT + path, exist_ok=True)
    else:
        os.close(os.open(ROOT + path, os.O_CREAT | os.O_WRONLY, 0o644))
    _call("mount", f"/proc/self/fd/{descriptor}", ROOT + path, None, MS_BIND | MS_REC, None)
    os.close(descriptor)
    if path not in DEVICES:
        _read_only(ROOT + path, recursive=True)


def _read_only(path: str, *, recursive: bool) -> None:
    # Not a remount: that would have to repeat the flags that this namespace may not take away.
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
    _call("syscall", ctypes.c_long(MOUNT_SETATTR), ctypes.c_int(-100), path,
          ctypes.c_uint(AT_RECURSIVE if recursive else 0), attributes, ctypes.c_size_t(32))


def _drop(second: bool) -> None:
    """No capability is left, and none can be had again."""
    for capability in range(CAPABILITIES):
        with contextlib.suppress(OSError):  # the kernel knows fewer
            _call("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
    if second:
        os.setgroups([])
        os.setresgid(INSIDE, INSIDE, INSIDE)
        os.setresuid(INSIDE, INSIDE, INSIDE)
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _first_process(spec: Mapping[str, Any], second: bool) -> None:
    """Process 1 inside: never returns."""
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(124))
    signal.setitimer(signal.ITIMER_REAL, spec["seconds"])
    _write("/proc/sys/user/max_user_namespaces", "0")  # of this user namespace
    _build_root(spec["visible"], spec["disk_mb"])
    child = os.fork()
    if child == 0:
        _drop(second)
        os.execve(spec["program"][0], spec["program"], {})
    while True:
        process, status = os.wait()
        if process == child:
            os._exit(os.waitstatus_to_exitcode(status) & 255)


def _run(spec: Mapping[str, Any]) -> None:
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    second = _enter()
    child = os.fork()
    if child == 0:
        os._exit(_exit_status(_first_process, spec, second) and 125)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(status & 255)


if __name__ == "__main__":
    # 125: the namespaces could not be made.
    os._exit(_exit_status(_run, json.loads(sys.argv[1])) and 125)
