"""How often functions or tracepoints are reached, by stack."""

from __future__ import annotations

import argparse
import time

from lockd.load.settings import Trace
from lockd.profile import Profile, Sample, Value
from lockd.trace import options, output, probes
from lockd.trace.patterns import parse
from lockd.trace.session import Session

HELP = "Count how often functions or tracepoints are reached, by stack"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pattern", help="FUNCTION, OBJECT:FUNCTION or t:CATEGORY:EVENT; `*` is anything")
    parser.add_argument("-r", "--regexp", action="store_true", help="PATTERN is a regular expression")
    options.add_duration(parser)
    options.add_processes(parser)
    options.add_stacks(parser)
    options.add_output(parser, options.PROFILE_FORMATS, "stacks")


def run(args: argparse.Namespace) -> int:
    found = probes.resolve(parse(args.pattern, args.regexp), args.pids)
    trace = Trace(parts=(found.part("count_stack", ("stackcount.bpf.c",)),), pairs=("stackcount",))
    settings = options.load_settings(args, trace)
    began = time.time()
    counts: dict[tuple[int, ...], int] = {}
    names: dict[int, tuple[str, int]] = {}
    with Session("lockd trace stackcount", settings, args.duration, args.pids) as session:
        stacks = session.stacks
        for taken in session.windows():
            if "stackcount" in taken:
                keys, values = taken["stackcount"]
                who = values["who"]
                for tid, user, kernel, count, tgid, comm in zip(
                    keys["tid"].tolist(), keys["stacks"]["user"].tolist(), keys["stacks"]["kernel"].tolist(),
                    values["count"].tolist(), who["tgid"].tolist(), who["comm"].tolist(), strict=True,
                ):  # fmt: skip
                    counts[tid, user, kernel] = counts.get((tid, user, kernel), 0) + count
                    names[tid] = comm.decode(errors="replace"), tgid
                    session.events += count
        samples = [
            Sample(
                names[tid][0], names[tid][1], tid,
                (*reversed(stacks.user(user)), *reversed(stacks.kernel(kernel))), (count,),
            )
            for (tid, user, kernel), count in counts.items()
        ]  # fmt: skip
        output.write(
            args, Profile(session.title, (Value("count", "count"),), samples, began, session.elapsed)
        )
        session.report()
    return 0
