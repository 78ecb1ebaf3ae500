"""How long threads are off the CPU, by the stack that they left it with."""

from __future__ import annotations

import argparse

from lockd.trace.core import output
from lockd.trace.core.formats import table
from lockd.trace.offcpu import common
from lockd.trace.offcpu.absences import Place, Times
from lockd.trace.offcpu.common import brief, joined, labels_of, traced, values_of
from lockd.views.profile import Mark, Sample

HELP = "Sum up the time that threads are off the CPU, by stack"
EPILOG = """examples:
  lockd trace offcpu 5                 all threads, for 5 seconds
  lockd trace offcpu -p 185,912        two processes, until both have ended or Ctrl-C
  lockd trace offcpu -f -p 185 30      folded, for flame graphs
  lockd trace offcpu -m 1000 10        waits of a millisecond or more
  lockd trace offcpu --state 2 10      uninterruptible waits
  lockd trace offcpu --runqueue 10     time on the run queue as well
  lockd trace offcpu --format table 5  one line for each stack, with the states and reasons
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    common.add_options(parser)


def run(args: argparse.Namespace) -> int:
    with traced("lockd trace offcpu", args, {}) as (session, profile, found):
        profile.samples = [sample(place, times, args) for place, times in found.items()]
        output.write(args, profile, {"table": table(profile, brief)})
        session.report()
    return 0


def sample(place: Place, times: Times, args: argparse.Namespace) -> Sample:
    delimiter = Mark("--" if args.format == "stacks" else "-")
    frames = joined(place.user, place.kernel, delimiter, args)
    return Sample(place.comm, place.pid, place.tid, frames, values_of(times, args), labels_of(place))
