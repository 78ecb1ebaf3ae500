"""The result of lockd trace offcpu and offwake, of made-up waits."""

from __future__ import annotations

import argparse

from lockd.trace.offcpu import offcpu
from lockd.trace.offcpu.absences import Place, Times
from lockd.views.profile import Profile


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    offcpu.add_options(parser)
    return parser.parse_args(words)


def test_of_waits_that_look_the_same_the_longest_is_told() -> None:
    """Two stacks of the kernel are one where only the stacks of user space are shown."""
    args = parsed("-U")
    places = {
        Place("reader", 1, 2, ("read", "main"), ("schedule", "pipe_read")): Times(3, 9_000_000, 0, 5_000_000),
        Place("reader", 1, 2, ("read", "main"), ("schedule", "new_read")): Times(2, 8_000_000, 0, 4_800_000),
    }
    samples = [offcpu._sample(place, times, args) for place, times in places.items()]
    (merged,) = Profile("test", offcpu._values(args), samples).sorted()
    assert merged.frames == ("main", "read")
    assert merged.values == (17_000, 5, 5_000)


def test_a_side_that_was_not_asked_for_is_not_shown() -> None:
    """A wait from before the trace has the stacks of both sides in any case."""
    place = Place("reader", 1, 2, ("read", "main"), ("schedule", "pipe_read"), is_older=True)
    sides = {option: offcpu._sample(place, Times(), parsed(option)).frames for option in ("-K", "-U")}
    assert sides == {"-K": ("pipe_read", "schedule"), "-U": ("main", "read")}
