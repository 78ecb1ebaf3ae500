"""Choose among the ways to do a part of the work: the first that this host has, or the one asked for."""

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
    """A part and how it will be done here."""

    part: Part
    way: Way | None
    """None if this host has no way, or not the one asked for."""
    hooks: tuple[tuple[Candidate, str], ...]
    """Of that way, or of the preferred one if there is none, in the order of attachment; with each
    the reason why it is not available, empty if it is."""
    instead_of: str
    """Why not a way that would have been preferred, in words; empty if none would."""

    @property
    def told(self) -> Chosen:
        """For the manifest."""
        return Chosen(
            self.part.program, self.part.what, self.way.mechanism if self.way else "", self.instead_of
        )


def choices_for(settings: LoadSettings, host: Host, refused: Mapping[Way, str] = NONE) -> list[Choice]:
    """How each part of the work will be done; `refused` as in choose()."""
    mechanisms = dict(settings.mechanisms)
    parts = parts_of(settings.programs, settings.lock_mode)
    if settings.trace:
        parts += settings.trace.parts
    return [choose(part, mechanisms.get(part.program, "auto"), host, refused) for part in parts]


def choose(part: Part, mechanism: str, host: Host, refused: Mapping[Way, str] = NONE) -> Choice:
    """The choice for `part`; `mechanism` as in the configuration, `auto` for any, if there are several.

    `refused`: ways that turned out not to do when they were tried, and why.
    """
    # Switches, which futex calls need too, can be had in one way: to ask for another is about the calls.
    is_given = mechanism == "auto" or len(part.ways) == 1
    allowed = [way for way in part.ways if is_given or mechanism == way.mechanism]
    if not allowed:
        known = " or ".join(way.mechanism for way in part.ways)
        reason = (
            f"programs.{part.program}.mechanism: {mechanism}: its {part.what} are measured by {known} only"
        )
        return Choice(part, None, tuple((hook, reason) for hook in part.ways[0].hooks), "")
    reasons: list[str] = []
    preferred = None
    for way in allowed:
        hooks = tuple(available(way, host))
        preferred = preferred or hooks
        if reason := refused.get(way) or why_not(hooks):
            reasons.append(f"{way.mechanism}: {reason}")
        else:
            return Choice(part, way, hooks, "; ".join(reasons))
    return Choice(part, None, preferred or (), "; ".join(reasons))


def available(way: Way, host: Host) -> list[tuple[Candidate, str]]:
    """Every hook of a way, for every copy of its function, and why it is not available, if so."""
    return [(hook, host.unavailable(hook)) for wanted in way.hooks for hook in host.resolve(wanted)]


def why_not(hooks: tuple[tuple[Candidate, str], ...]) -> str:
    """Why a way with these hooks cannot be taken; empty if it can."""
    missing = next((reason for hook, reason in hooks if reason and hook.required), "")
    if not missing and all(reason for _, reason in hooks):
        missing = hooks[0][1]
    return missing
