"""The errors that lockd explains to its user in words, without a traceback."""

from __future__ import annotations

import errno
import signal

PASSING = frozenset((errno.EAGAIN, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM))
"""What a call fails with for lack of something that there may be enough of a moment later."""


class LockdError(Exception):
    """Something failed while lockd ran; the message says what, where, and what to do about it."""

    exit_code = 1


class UsageError(LockdError):
    """The command line is wrong: an unknown flag, a value that breaks its rule."""

    exit_code = 2


class ConfigError(LockdError):
    """A configuration file cannot be read or breaks a rule; one line of message per problem."""

    exit_code = 2


class HostError(LockdError):
    """This host cannot do what was asked: no BPF, a missing hook, not enough privileges.

    It will be the same after a restart, so that systemd does not start lockd again.
    """

    exit_code = 3


def refusal(message: str, number: int) -> LockdError:
    """The error for what the kernel refuses with this errno: HostError, unless that may pass."""
    return (LockdError if number in PASSING else HostError)(message)


def error_class(exit_code: int) -> type[LockdError]:
    """The kind of error that a child of lockd's has ended with this code for."""
    return {ConfigError.exit_code: ConfigError, HostError.exit_code: HostError}.get(exit_code, LockdError)


def describe_exit(code: int) -> str:
    """The exit code of a child, in words."""
    signals = {one.value: one.name for one in signal.Signals}
    return f"ended by {signals.get(-code, f'signal {-code}')}" if code < 0 else f"ended with code {code}"
