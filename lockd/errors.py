"""The errors that lockd explains to its user in words, without a traceback."""

from __future__ import annotations


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
    """This host cannot do what was asked: no BPF, a missing hook, not enough privileges."""

    exit_code = 3


def error_of(exit_code: int) -> type[LockdError]:
    """The kind of error that a child of lockd's has ended with this code for."""
    return {ConfigError.exit_code: ConfigError, HostError.exit_code: HostError}.get(exit_code, LockdError)
