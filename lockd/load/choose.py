"""The choice among the ways to do a part of the work: the first that this host has, or the configured one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lockd.kernel.manifest import Chosen
from lockd.load.hooks import Candidate, Part, Way, parts_of
from lockd.load.host import Host
from lockd.load.settings import LoadSettings

NONE: Mapping[Way, str] = MappingProxyType({})


@dataclass(frozen=True)
class Choice:
    """A part of the work, and the way in which it will be done on this host."""

    part: Part
    way: Way | None
    """The way; None if this host has no way, or not the configured one."""
    hooks: tuple[tuple[Candidate, str], ...]
    """The hooks of `way`, or of the preferred way if `way` is None, in the order of attachment. Each hook
    comes with the reason why it is not available; the reason is empty if it is available."""
    instead_of: str
    """Why the ways before `way` cannot be taken, or all ways if `way` is None, for people to read. Empty if
    `way` is the first that was examined."""

    @property
    def chosen(self) -> Chosen:
        """The choice in the form that the manifest stores."""
        return Chosen(
            self.part.program, self.part.what, self.way.mechanism if self.way else "", self.instead_of
        )


def choices_for(settings: LoadSettings, host: Host, refused: Mapping[Way, str] = NONE) -> list[Choice]:
    """Return the choice for each part of the work, in the order of compilation; `refused` as in choose().

    Samples go through ring buffers. On a host where programs must not write to these, there are none. A trace
    counts all releases of locks, and samples none.
    """
    mechanisms = dict(settings.mechanisms)
    has_rings = not host.has_sleeping_rings
    parts = parts_of(
        settings.programs,
        settings.lock_mode,
        settings.futex_mode,
        settings.has_holders and (has_rings or settings.trace is not None),
        settings.has_wait_samples and has_rings,
    )
    if settings.trace:
        parts += settings.trace.parts
    return [choose(part, mechanisms.get(part.program, "auto"), host, refused) for part in parts]


def choose(part: Part, mechanism: str, host: Host, refused: Mapping[Way, str] = NONE) -> Choice:
    """Return the choice for `part`.

    `mechanism` is the configured one, or `auto` for any. `refused` are ways that the kernel refused when they
    were tried, with the reasons.
    """
    # In mode calls, the futex program also needs the part `switches`, which can be done in one way only. A
    # mechanism that is configured for the program then means its part `calls`.
    is_any = mechanism == "auto" or len(part.ways) == 1
    allowed = [way for way in part.ways if is_any or mechanism == way.mechanism]
    if not allowed:
        known = " or ".join(way.mechanism for way in part.ways)
        reason = (
            f"programs.{part.program}.mechanism: {mechanism}: its {part.what} are measured by {known} only"
        )
        return Choice(part, None, tuple((hook, reason) for hook in part.ways[0].hooks), reason)
    reasons: list[str] = []
    preferred = None
    for way in allowed:
        hooks = tuple(available(way, host))
        preferred = preferred or hooks
        if reason := refused.get(way) or obstacle(hooks):
            reasons.append(f"{way.mechanism}: {reason}")
        else:
            return Choice(part, way, hooks, "; ".join(reasons))
    return Choice(part, None, preferred or (), "; ".join(reasons))


def available(way: Way, host: Host) -> list[tuple[Candidate, str]]:
    """Return every hook of a way with the reason why it is not available, empty if it is.

    If copies of a function, which the compiler made, are to be hooked (Candidate.variants), each has a hook.
    """
    return [(hook, host.obstacle(hook)) for candidate in way.hooks for hook in host.resolve(candidate)]


def obstacle(hooks: tuple[tuple[Candidate, str], ...]) -> str:
    """Return why a way with these hooks cannot be taken; empty if it can.

    A way needs all of its required hooks, and at least one hook.
    """
    missing = next((reason for hook, reason in hooks if reason and hook.required), "")
    if not missing and all(reason for _, reason in hooks):
        missing = hooks[0][1]
    return missing
