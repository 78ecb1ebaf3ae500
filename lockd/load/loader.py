"""The loader's work: choose ways, compile, attach, and describe in a manifest what was attached."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from lockd.errors import HostError
from lockd.kernel.btf import KernelTypes
from lockd.kernel.manifest import Hook, Manifest
from lockd.load.bpf_object import Attachment, BpfObject
from lockd.load.choose import Choice, choices_for
from lockd.load.compile import compile_cached
from lockd.load.compiled import CompileCache, default_directory
from lockd.load.hooks import HOLDERS, Candidate, Way, functions_of
from lockd.load.host import SLEEPING_RINGS, Host, require_pids_of_the_host, require_privileges
from lockd.load.settings import LoadSettings
from lockd.load.source import source_for

log = logging.getLogger(__name__)

WAKEUPS = "wakeups"
"""The ring buffer by which the programs wake the sampler."""
BLOCKED_PROCESSES = "blocked_processes"
"""The ring buffer by which the programs announce processes to the namer."""
SAMPLES = (
    *("releases", "refused_releases", "release_record", "kernel_release_record"),
    *("wait_samples", "refused_waits", "wait_sample_record"),
    "cpythons",
)
"""The maps of samples. Only those exist that the programs need.

For sampled releases of locks they are the ring, the counters of samples without room in it, and the layouts
of its records for user-space locks and for kernel locks. For sampled waits they are the ring, the counters,
and the layout of its records. The map of the processes of CPython is for both.
"""
RINGS_OF_TRACES = {"signals", "snooped"}
"""The ring buffers of one-shot tools that print what comes through them, and nothing else."""
WITHOUT_RINGS = (
    "no holders of locks, causes and stacks of waits are sampled, and locks of a process that soon ends may"
    " have no names"
)
"""What is missing on a host with Host.has_sleeping_rings."""
SLEEP_SECONDS = 0.001
"""How long the loader sleeps before it enters the waits that began before lockd into the programs' maps.

The program that enters them measures the offset between the monotonic and the scheduler's clock. As the
present time of the scheduler's clock, it uses the time at which this thread last got a CPU. The sleep makes
this time recent.
"""


@dataclass(frozen=True)
class Loaded:
    """A manifest, and the descriptors of its maps, of its functions and of the attachments, in this order."""

    manifest: Manifest
    fds: list[int]


def load(settings: LoadSettings) -> Loaded:
    """Attach everything in `settings.programs` that this host can do.

    A missing hook is in the manifest with the reason, unless it is optional. A part of the work is not
    attached at all if this host has no way to do it. Raises HostError if nothing can be attached, or if a
    trace needs a ring buffer and this host has none to which programs may write.
    """
    require_pids_of_the_host()
    require_privileges()
    host = Host(KernelTypes(), functions_of(settings.trace.parts) if settings.trace else ())
    if settings.trace and RINGS_OF_TRACES.intersection(settings.trace.maps):
        host.require_rings()
    if not settings.trace and host.has_sleeping_rings:
        log.warning("%s: %s", WITHOUT_RINGS, SLEEPING_RINGS)
    refused: dict[Way, str] = {}
    while True:
        try:
            return _load(settings, host, refused)
        except WayRefusedError as error:
            refused[error.way] = str(error)


class WayRefusedError(Exception):
    """The kernel refused a required hook of a way that had seemed to be available; the message says why."""

    def __init__(self, way: Way, reason: str) -> None:
        super().__init__(reason)
        self.way = way


def _load(settings: LoadSettings, host: Host, refused: Mapping[Way, str]) -> Loaded:
    """Do the work of load() without the ways in `refused`.

    Raises WayRefusedError if another way turns out to be refused; nothing is attached then.
    """
    choices = choices_for(settings, host, refused)
    _require_any(choices)
    source = source_for(settings, choices, host)
    bpf_object = BpfObject(compile_cached(source, CompileCache(default_directory())), source, host)
    set_queue_secret(bpf_object)
    loading = bpf_object.load_in_background(
        hook
        for choice in choices
        for hook, missing in choice.hooks
        if choice.way and hook.mechanism == "raw_tracepoint" and not missing
    )
    pairs, plain = _maps(settings, choices)
    plain += [name for name in (WAKEUPS, BLOCKED_PROCESSES, *SAMPLES) if bpf_object.has_map(name)]
    for pair in pairs:
        for index in (0, 1):
            bpf_object.set_map(pair, index, f"{pair}_{index}")
    maps = plain + [f"{pair}_{index}" for pair in pairs for index in (0, 1)]
    loading.join()

    attached = Attached()
    try:
        # Attaching takes kernel locks. The programs for kernel locks are attached first, so that they see the
        # locks that are taken while all other programs are attached.
        for choice in reversed(choices):
            attached.add(bpf_object, choice)
    except WayRefusedError:
        bpf_object.close()
        raise
    if not attached.attachments:
        reasons = "; ".join(f"{hook.hook}: {hook.reason}" for hook in attached.hooks if hook.reason)
        raise HostError(f"none of the programs {', '.join(settings.programs)} can be attached: {reasons}")
    attached_ns = time.monotonic_ns()
    if "kernel_holding" in plain:
        bpf_object.set_number("armed", attached_ns)
    if not settings.trace and any(choice.way and choice.part.what == "switches" for choice in choices):
        _enter_older_waits(bpf_object, attached_ns)
    manifest = Manifest(
        attached_ns=attached_ns,
        chosen=tuple(choice.chosen for choice in choices),
        hooks=tuple(attached.hooks),
        maps=tuple(bpf_object.map_info(name) for name in maps),
        functions=tuple((program, name) for program, name, _ in attached.functions),
        enums=source.enums,
        constants=source.constants,
    )
    fds = [bpf_object.map_fd(name) for name in maps]
    fds += [fd for _, _, fd in attached.functions] + attached.attachments
    return Loaded(manifest, fds)


def set_queue_secret(bpf_object: BpfObject) -> None:
    """Give the programs a random number, so that no user can choose a lock that shares a queue with another.

    The number is in a map, so that it lasts as long as the queues: also over a restart that takes over the
    maps. Compiled programs are kept in a file, and do not contain it. Raises LockdError.
    """
    bpf_object.set_member("control", "queue_secret", int.from_bytes(os.urandom(8), "little") | 1)


def _enter_older_waits(bpf_object: BpfObject, attached_ns: int) -> None:
    """Enter into the programs' maps the waits that began before anything was attached."""
    bpf_object.set_number("looked_at", attached_ns)
    time.sleep(SLEEP_SECONDS)
    try:
        bpf_object.run_for_tasks("enter_older_wait")
    except HostError as error:
        log.warning("waits that began before are not seen until their threads next leave the CPU: %s", error)


def _require_any(choices: list[Choice]) -> None:
    """Raise HostError if no program can do the first, essential part of its work."""
    essential: dict[str, Choice] = {}
    for choice in choices:
        if choice.part.what != HOLDERS:
            essential.setdefault(choice.part.program, choice)
    if not any(choice.way for choice in essential.values()):
        reasons = "; ".join(f"{program}: {choice.instead_of}" for program, choice in essential.items())
        raise HostError(f"none of the programs {', '.join(essential)} can run here: {reasons}")


def _maps(settings: LoadSettings, choices: list[Choice]) -> tuple[list[str], list[str]]:
    """Return the names of the pairs, and of the other maps, that the sampler or the trace reads."""
    pairs, plain = ["stacks"], ["control", "written", "losses", "run_times", "threads"]
    for program in settings.programs:
        pairs += [program, f"{program}_over"]
    if "futex" in settings.programs:
        pairs.append("captures")
        plain += ["known_locks", "hotspots"]
    if "kernel_locks" in settings.programs:
        plain.append("kernel_waits")
    if any(choice.way and choice.part.what == "holds" for choice in choices):
        pairs += ["kernel_holds", "kernel_holds_over"]
        plain.append("kernel_holding")
    if settings.trace:
        pairs += settings.trace.pairs
        plain += settings.trace.maps
    return pairs, plain


@dataclass
class Attached:
    """The hooks of all parts with their outcome, and the descriptors of what was loaded and attached."""

    hooks: list[Hook] = field(default_factory=list)
    attachments: list[int] = field(default_factory=list)
    functions: list[tuple[str, str, int]] = field(default_factory=list)
    """(program of lockd, BPF function, descriptor) of every BPF program that was loaded."""

    def add(self, bpf_object: BpfObject, choice: Choice) -> None:
        """Attach the hooks of one part of a program's work, and load the functions that the sampler runs.

        Each hook is noted, with the reason if it is not attached. Optional hooks that this host lacks are
        left out. Raises WayRefusedError if the kernel refuses a required hook.
        """
        no_way = "" if choice.way else choice.instead_of
        attached = self._attach_many(bpf_object, choice)
        for hook, reason in choice.hooks:
            if reason and hook.optional:
                continue
            if not reason and no_way:
                reason = f"of no use, as the way it belongs to cannot be taken: {no_way}"
            if not reason and hook not in attached:
                try:
                    self._note(hook, bpf_object.attach(hook))
                except HostError as error:
                    reason = str(error)
                    if hook.required and choice.way:
                        raise WayRefusedError(choice.way, reason) from error
            self.hooks.append(Hook(hook.program, hook.hook, hook.mechanism, not reason, reason))
        for function in choice.part.on_demand if choice.way else ():
            try:
                self.functions.append((choice.part.program, function, bpf_object.load_on_demand(function)))
            except HostError as error:
                log.warning("%s", error)

    def _attach_many(self, bpf_object: BpfObject, choice: Choice) -> set[Candidate]:
        """Attach hooks by links to many hooks where that is possible; return the hooks that were attached."""
        hooks = [hook for hook, reason in choice.hooks if not reason] if choice.way else []
        links = bpf_object.attach_many(hooks)
        for group, link in links:
            self._note(group[0], link)
        return {hook for group, _ in links for hook in group}

    def _note(self, hook: Candidate, attached: Attachment) -> None:
        program, attachment = attached
        self.attachments.append(attachment)
        if program not in (fd for _, _, fd in self.functions):
            self.functions.append((hook.program, hook.function, program))
