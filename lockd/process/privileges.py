"""Privileges: a process gives up its user, its capabilities, every way to get them back, and resources.

Capabilities belong to threads. Call these functions before the process starts its first thread.
"""

from __future__ import annotations

import ctypes
import difflib
import errno
import logging
import os
import pwd
import resource
from collections.abc import Collection, Mapping

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
"""Numbers of capabilities by name."""

_PR_SET_PDEATHSIG = 1
_PR_SET_KEEPCAPS = 8
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Sets(ctypes.Structure):
    """32 capabilities in each of the three sets. Two of these structs make up all 64."""

    _fields_ = [
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    ]


_libc = ctypes.CDLL(None, use_errno=True)


def capabilities() -> set[str]:
    """Names of the permitted capabilities of this thread, in effect or not."""
    _, permitted = _read_sets()
    return _names(permitted)


def drop_all(user: str | None = None) -> None:
    """Drop every capability for good, and become `user` if a name is given.

    Raises HostError if there is no such user or the process may not become that user.
    """
    account = _account(user) if user is not None else None
    no_new_privileges()
    _cut_bounding_set(keep=0)
    if account is not None:
        _become(account)
    _prctl("clear the ambient capabilities", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    _write_sets(0, 0, 0)


def keep_only(
    caps: set[str],
    user: str | None = None,
    dormant: Collection[str] = (),
    inherited: Collection[str] = (),
) -> None:
    """Keep the capabilities `caps` in effect, and drop all others for good. Become `user` if a name is given.

    Capabilities in `dormant` stay permitted without being in effect. Only a program that root executes gets
    them in effect. Capabilities in `inherited`, a part of `caps`, are in effect in every program that this
    process executes, whoever its user is. Raises HostError if the process lacks one of these capabilities, if
    there is no such user, or if the process may not become that user. Raises ValueError for an unknown name
    of a capability.
    """
    effective = sum(1 << _number(name) for name in caps)
    keep = effective | sum(1 << _number(name) for name in {*dormant} - caps)
    account = _account(user) if user is not None else None
    _, permitted = _read_sets()
    if missing := _names(keep & ~permitted):
        raise HostError(
            f"privileges: cannot keep {', '.join(sorted(missing))}: this process does not have it;"
            " rule: start lockd as root, or with these capabilities in AmbientCapabilities= of its unit"
        )
    _cut_bounding_set(keep)
    if account is not None:
        _prctl("keep capabilities across the change of the user", _PR_SET_KEEPCAPS, 1)
        _become(account)
        _prctl("lose capabilities with the next change of the user", _PR_SET_KEEPCAPS, 0)
    _prctl("clear the ambient capabilities", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    _write_sets(effective, keep, sum(1 << _number(name) for name in inherited))
    for name in inherited:
        _prctl(f"have programs inherit {name}", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, NUMBERS[name])


def unprivileged_user(wanted: str) -> str | None:
    """The user that a process of root should become: `wanted`, or `nobody` if `wanted` does not exist.

    Returns None in processes of other users, which cannot become another user.
    """
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam(wanted).pw_name
    except KeyError:
        return "nobody"


def lower_limits(limits: Mapping[int, int]) -> None:
    """Lower resource limits of this process for good, the hard and the soft limit to the same value.

    `limits` has the values by the numbers of the limits in `resource`. A hard limit that is lower already
    stays, and the soft limit becomes the same.
    """
    for limit, wanted in limits.items():
        _, hard = resource.getrlimit(limit)
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(limit, (value, value))


def no_new_privileges() -> None:
    """Make sure that no program that this process executes gets more privileges than the process has."""
    _prctl("set no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this process a signal when its parent ends.

    Call this after the user has changed: the kernel forgets the request with each change of the user.
    """
    _prctl("request a signal for the end of the parent", _PR_SET_PDEATHSIG, signal_number)


def _number(name: str) -> int:
    if name in NUMBERS:
        return NUMBERS[name]
    near = difflib.get_close_matches(name, NUMBERS, n=1)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    raise ValueError(f'privileges: no capability is called "{name}"{hint}')


def _names(bits: int) -> set[str]:
    names = {number: name for name, number in NUMBERS.items()}
    return {names.get(n, f"CAP_{n}") for n in range(bits.bit_length()) if bits >> n & 1}


def _account(user: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(user)
    except KeyError:
        raise HostError(
            f'privileges: no user "{user}" on this host; rule: the user that lockd becomes must exist'
        ) from None


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
    """Remove all capabilities but these bits from the bounding set, if this process may do that."""
    effective, _ = _read_sets()
    if not effective >> NUMBERS["CAP_SETPCAP"] & 1:
        # The bounding set matters only for programs of root and programs with file capabilities.
        log.debug("the bounding set of capabilities stays as it is: no CAP_SETPCAP")
        return
    number = 0
    while (is_in_set := _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0)) >= 0:  # -1 after the last capability
        if is_in_set and not keep >> number & 1:
            _prctl(f"remove capability {number} from the bounding set", _PR_CAPBSET_DROP, number)
        number += 1


def _read_sets() -> tuple[int, int]:
    """The effective and the permitted set, with a bit for each capability."""
    sets = (_Sets * 2)()
    header = _Header(_CAPABILITY_VERSION_3, 0)
    if _libc.capget(ctypes.byref(header), sets) != 0:
        raise _error("read the capabilities")
    low, high = sets
    return low.effective | high.effective << 32, low.permitted | high.permitted << 32


def _write_sets(effective: int, permitted: int, inheritable: int) -> None:
    """Set these three sets, each with a bit for each capability."""
    low, high = (
        _Sets(*(bits >> shift & 0xFFFFFFFF for bits in (effective, permitted, inheritable)))
        for shift in (0, 32)
    )
    sets = (_Sets * 2)(low, high)
    header = _Header(_CAPABILITY_VERSION_3, 0)
    if _libc.capset(ctypes.byref(header), sets) != 0:
        raise _error("set the capabilities")


def _prctl(action: str, option: int, argument: int, second: int = 0) -> None:
    """Call prctl(). If it fails, raises the error that _error() makes for this action."""
    arguments = [ctypes.c_ulong(number) for number in (argument, second, 0, 0)]
    if _libc.prctl(option, *arguments) != 0:
        raise _error(action)


def _error(action: str) -> LockdError:
    """The error for a system call that has just failed."""
    number = ctypes.get_errno()
    return refusal(
        f"privileges: cannot {action}: {os.strerror(number)}"
        f" ({errno.errorcode.get(number, number)}) in process {os.getpid()}",
        number,
    )
