"""The errors that lockd reports to its user by a message, without a traceback."""

from __future__ import annotations

import errno
import signal

PASSING = frozenset((errno.EAGAIN, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM))
"""The errnos of calls that may succeed a moment later: they were interrupted, or lacked a resource such as
memory."""


class LockdError(Exception):
    """An error while lockd runs. The message says what failed, where, and what to do about it."""

    exit_code = 1


class UsageError(LockdError):
    """The command line is wrong, for instance by an unknown flag or by a value that breaks its rule."""

    exit_code = 2


class ConfigError(LockdError):
    """A configuration file cannot be read, or breaks rules. The message has one line for each problem."""

    exit_code = 2


class HostError(LockdError):
    """This host cannot do what was asked for: it lacks for instance a hook, privileges or a package.

    A restart would not change that, so systemd does not start lockd again after this exit code.
    """

    exit_code = 3


def refusal(message: str, number: int) -> LockdError:
    """The error for a call that the kernel refused with the errno `number`: a HostError, or a LockdError if
    the reason may pass."""
    return (LockdError if number in PASSING else HostError)(message)


def error_class(exit_code: int) -> type[LockdError]:
    """The class of the error that ended a child process of lockd, by the exit code of the child."""
    return {ConfigError.exit_code: ConfigError, HostError.exit_code: HostError}.get(exit_code, LockdError)


def describe_exit(code: int) -> str:
    """How a child process ended, such as "ended by SIGKILL". `code` is the returncode of subprocess.Popen."""
    signals = {number.value: number.name for number in signal.Signals}
    return f"ended by {signals.get(-code, f'signal {-code}')}" if code < 0 else f"ended with code {code}"
