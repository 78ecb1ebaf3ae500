"""Gives up privileges: the user, the capabilities, and the way back to either.

Capabilities belong to threads: call these before the process starts its first thread.
"""

from __future__ import annotations

import ctypes
import difflib
import errno
import logging
import os
import pwd
from collections.abc import Collection

from lockd.errors import HostError, LockdError, refusal

log = logging.getLogger(__name__)

_NAMES = (  # in the order of their numbers, from linux/capability.h
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE"
    " NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO"
    " SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME"
    " SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG"
    " WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"
)
NUMBERS = {f"CAP_{name}": number for number, name in enumerate(_NAMES.split())}

_PR_SET_PDEATHSIG = 1
_PR_SET_KEEPCAPS = 8
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Words(ctypes.Structure):
    _fields_ = [
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    ]


_libc = ctypes.CDLL(None, use_errno=True)


def capabilities() -> set[str]:
    """What this thread is permitted, whether it is in effect now or not."""
    _, permitted = _get()
    return _named(permitted)


def drop_all(user: str | None = None) -> None:
    """Become `user` (if one is given) with no capability left, and none to be had again."""
    account = _account(user) if user is not None else None
    no_new_privileges()
    _cut_bounding_set(keep=0)
    if account is not None:
        _become(account)
    _prctl("clear the ambient capabilities", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    _set(0, 0)


def keep_only(caps: set[str], user: str | None = None, dormant: Collection[str] = ()) -> None:
    """Keep `caps`, in effect, and drop every other capability for good; become `user` if one is given.

    Those that are `dormant` are kept as well, but are in effect only in what root executes.
    """
    effective = sum(1 << _number(name) for name in caps)
    keep = effective | sum(1 << _number(name) for name in {*dormant} - caps)
    account = _account(user) if user is not None else None
    _, permitted = _get()
    if missing := _named(keep & ~permitted):
        raise HostError(
            f"privileges: cannot keep {', '.join(sorted(missing))}: this process does not have it;"
            " rule: start lockd as root, or with these in AmbientCapabilities= of its unit"
        )
    _cut_bounding_set(keep)
    if account is not None:
        _prctl("keep capabilities as another user", _PR_SET_KEEPCAPS, 1)
        _become(account)
        _prctl("keep none as yet another user", _PR_SET_KEEPCAPS, 0)
    _prctl("clear the ambient capabilities", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    _set(effective, keep)


def unprivileged_user(wanted: str) -> str | None:
    """Whom a process that is root's is to become: this user if there is one, else nobody. None for others,
    which may not become anybody."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam(wanted).pw_name
    except KeyError:
        return "nobody"


def no_new_privileges() -> None:
    """No program that this process executes can have more privileges than it."""
    _prctl("set no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent(signal_number: int) -> None:
    """Get this signal when the parent ends; changing the user afterwards would undo it."""
    _prctl("ask for a signal at the parent's end", _PR_SET_PDEATHSIG, signal_number)


def _number(name: str) -> int:
    if name in NUMBERS:
        return NUMBERS[name]
    near = difflib.get_close_matches(name, NUMBERS, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    raise ValueError(f'privileges: no capability is called "{name}"{hint}')


def _named(bits: int) -> set[str]:
    names = {number: name for name, number in NUMBERS.items()}
    return {names.get(n, f"CAP_{n}") for n in range(bits.bit_length()) if bits >> n & 1}


def _account(user: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(user)
    except KeyError:
        raise HostError(f'privileges: no user "{user}" on this host; rule: the user must exist') from None


def _become(account: pwd.struct_passwd) -> None:
    try:
        os.setgroups([])
        os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
        os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
    except PermissionError as error:
        raise HostError(
            f"privileges: cannot become user {account.pw_name} (uid {account.pw_uid}):"
            f" {error.strerror}; rule: this needs CAP_SETUID and CAP_SETGID"
        ) from None


def _cut_bounding_set(keep: int) -> None:
    effective, _ = _get()
    if not effective >> NUMBERS["CAP_SETPCAP"] & 1:
        # Nobody else may; without file capabilities or root, the set gives nothing anyway.
        log.debug("the bounding set of capabilities stays as it is: no CAP_SETPCAP")
        return
    number = 0
    while (held := _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0)) >= 0:  # -1 after the last one
        if held and not keep >> number & 1:
            _prctl(f"drop capability {number} for good", _PR_CAPBSET_DROP, number)
        number += 1


def _get() -> tuple[int, int]:
    """The effective and the permitted set, as bits."""
    words = (_Words * 2)()
    header = _Header(_CAPABILITY_VERSION_3, 0)
    if _libc.capget(ctypes.byref(header), words) != 0:
        raise _failed("read the capabilities")
    low, high = words
    return low.effective | high.effective << 32, low.permitted | high.permitted << 32


def _set(effective: int, permitted: int) -> None:
    """Make these bits the sets; nothing is inherited."""
    low, high = (
        _Words(effective >> shift & 0xFFFFFFFF, permitted >> shift & 0xFFFFFFFF, 0) for shift in (0, 32)
    )
    words = (_Words * 2)(low, high)
    header = _Header(_CAPABILITY_VERSION_3, 0)
    if _libc.capset(ctypes.byref(header), words) != 0:
        raise _failed("set the capabilities")


def _prctl(what: str, option: int, argument: int) -> None:
    words = [ctypes.c_ulong(word) for word in (argument, 0, 0, 0)]
    if _libc.prctl(option, *words) != 0:
        raise _failed(what)


def _failed(what: str) -> LockdError:
    number = ctypes.get_errno()
    return refusal(
        f"privileges: cannot {what}: {os.strerror(number)}"
        f" ({errno.errorcode.get(number, number)}) in process {os.getpid()}",
        number,
    )
