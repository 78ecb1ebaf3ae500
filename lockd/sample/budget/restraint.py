"""Restraint: what lockd leaves out while it takes more CPU time than its budget.

There are four restraint levels; each leaves out more than the one before (STEPS). The level goes up by one
step only if that step makes cheaper what is too expensive:

- Programs and sampler work with every event, and each step saves work in both. The level goes up when they
  have taken more than the budget for a second, and what they had saved before is used up.
- The sampler is one thread. On a host with many processors this thread may be too slow although it takes less
  than the budget. So the level goes up, too, when the sampler needs nearly a whole processor.
- The namer works now and then, but then for seconds, for instance when a large program is new. Level 1 stops
  the namer. So the level goes from 0 to 1 when the namer has used up its savings, which are what programs and
  sampler left of the budget in the last minutes.
- The exporter works for those who ask it. No step makes its work cheaper, and so its CPU time raises no
  level.

At each step up that programs or sampler cause, a few seconds of the budget count as saved, so that the step
has time to take effect. The less lockd then exceeds its budget, the longer these savings last. The level goes
down by one step when programs and sampler have taken clearly less than the budget for a while, or when their
savings are full and the last step was a while ago.
Whenever the level has to rise again soon after a step down, the time before the next step down is doubled.
"""

from __future__ import annotations

import logging
from dataclasses import asdict

from lockd.sample.budget.spending import Spent

log = logging.getLogger(__name__)

STACKS, DETAIL, PROCESSES = 1, 2, 3
"""Restraint levels, as in enum restraint of lockd/bpf/include/common.bpf.h. Each includes those before it."""
STEPS = (
    "nothing is left out",
    "no stacks are taken and no names looked up",
    "waits are counted by process, not by thread and lock",
    'only totals are counted, as the process "other", and read less often',
)
SAVED_SECONDS = 30.0
"""The most that programs and sampler can save, in seconds of the budget (see Savings)."""
SAMPLER_SHARE = 0.75
"""The share of one processor that the sampler may take. With more, ticks come late: each takes longer the
more rows it has, and other threads need the processor, too."""
SAMPLER_SECONDS = 5.0
"""The most that the sampler can save, in seconds of SAMPLER_SHARE. The sampler can never take more than a
whole processor, and so needs 15 s to use these savings up."""
STEP_SECONDS = 3.0
"""What is added to the savings of programs and sampler at a step up that they cause, in seconds of each
limit."""
SETTLED_SECONDS = 2.0
"""Least seconds from a change of the level to a step up that programs or sampler cause, except from level 0.
In the first of them, rows from before the change are folded."""
NAMER_SECONDS = 120.0
"""The most that programs and sampler can save for the namer, in seconds of the budget."""
NAMER_RETURNS = 60.0
"""The least savings with which a stopped namer may go on, in seconds of the budget."""
NAMER_SHARE = 0.25
"""The share of the budget that the namer always has, even if programs and sampler leave it less."""
CALM = 0.75
"""Less than this share of a limit counts as clearly less than the limit."""
PATIENCE, MOST_PATIENCE = 5.0, 320.0
"""Seconds of calm (less than CALM is taken) before a step down: at first, and at most."""
LASTED = 60.0
"""Seconds after a step down in which a step up doubles the patience."""
MESSAGE_ID = "b0b05d5db51d435fb6674d086e099d47"
"""The field MESSAGE_ID of the journal's entries about changes of the level. `journalctl MESSAGE_ID=...` lists
these entries."""


class Savings:
    """CPU time that a limit allowed and that was not taken: from 0 to `most`, and `most` at first.

    The unit is a second of the limit: the CPU time that the limit allows in one second.
    """

    def __init__(self, most: float) -> None:
        self.saved = self._most = most

    def add(self, seconds: float) -> None:
        """Add what was not taken of the limit. A negative number is what was taken beyond the limit."""
        self.saved = min(max(self.saved + seconds, 0.0), self._most)

    @property
    def is_full(self) -> bool:
        return self.saved >= self._most


class Restraint:
    """The restraint level, from 0 to len(STEPS) - 1, and when it changes.

    `budget` is a share of a machine with `cpus` processors; None stands for no limit.
    """

    def __init__(self, budget: float | None, cpus: int) -> None:
        self.budget, self._cpus = budget, cpus
        self.level = 0
        self.spent = Spent()
        """What lockd took in the time that was judged last."""
        self.seconds = [0.0] * len(STEPS)
        """Seconds that lockd has been at each level."""
        self._for_events, self._for_namer = Savings(SAVED_SECONDS), Savings(NAMER_SECONDS)
        self._for_sampler = Savings(SAMPLER_SECONDS)
        self._calm = 0.0
        """Seconds for which programs and sampler have taken clearly less than their limits."""
        self._patience = PATIENCE
        self._since_step = 0.0
        """Seconds since the last change of the level."""
        self._since_down = LASTED
        """Seconds since the last step down; LASTED or more if programs or sampler caused a step up since."""

    def judge(self, spent: Spent, seconds: float) -> bool:
        """Account for `spent`, the mean shares of the last `seconds`. Returns whether the level changed."""
        self.spent = spent
        self.seconds[self.level] += seconds
        if self.budget is None:
            return False
        used = spent.by_events / self.budget
        used_by_sampler = spent.sampler * self._cpus / SAMPLER_SHARE
        self._for_events.add((1 - used) * seconds)
        self._for_sampler.add((1 - used_by_sampler) * seconds)
        self._for_namer.add((max(1 - used, NAMER_SHARE) - spent.namer / self.budget) * seconds)
        self._calm = self._calm + seconds if max(used, used_by_sampler) < CALM else 0.0
        self._since_step += seconds
        self._since_down += seconds
        level, too_much = self.level, ""
        if used > 1 and not self._for_events.saved:
            too_much = f"programs and sampler took more than budget.cpu, {self.budget:.2%},"
        elif used_by_sampler > 1 and not self._for_sampler.saved:
            too_much = f"the sampler took more than {SAMPLER_SHARE:.0%} of one processor"
        if too_much:
            if level + 1 < len(STEPS) and (not level or self._since_step >= SETTLED_SECONDS):
                self._step_up_for_events(f"{too_much} in {seconds:.1f} s, and nothing is saved")
        elif not level and spent.namer and not self._for_namer.saved:
            self._step_up(f"the namer has used up its savings of budget.cpu, {self.budget:.2%}")
        elif level > STACKS or self._for_namer.saved >= NAMER_RETURNS:
            self._come_down(self.budget)
        if not self.level and self._since_down >= MOST_PATIENCE:
            self._patience = PATIENCE
        return self.level != level

    def set_budget(self, budget: float | None, cpus: int) -> None:
        """Judge by another budget from now on. Without a budget the level falls to 0 at once."""
        if budget is None and self.level and self.budget is not None:
            before, self.level = self.level, 0
            self._log_change(logging.INFO, before, "budget.cpu is none from now on")
        self.budget, self._cpus = budget, cpus

    def _step_up_for_events(self, why: str) -> None:
        if self._since_down < LASTED:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._since_down = LASTED
        self._for_events.add(STEP_SECONDS)
        self._for_sampler.add(STEP_SECONDS)
        self._step_up(why)

    def _step_up(self, why: str) -> None:
        self._calm = self._since_step = 0.0
        self.level += 1
        self._log_change(logging.WARNING, self.level - 1, why)

    def _come_down(self, budget: float) -> None:
        """Go down one level if programs and sampler have long enough taken clearly less than their limits.

        If their savings are full, it is enough that the last change of the level was long enough ago.
        """
        is_full = self._for_events.is_full and self._for_sampler.is_full
        wait = self._since_step if is_full else self._calm
        if not self.level or wait < self._patience:
            return
        limit, seconds = "budget.cpu", self._since_step
        if self._calm >= self._patience:
            limit, seconds = f"{CALM:.0%} of budget.cpu", self._calm
        why = f"programs and sampler took less than {limit}, {budget:.2%}, for {seconds:.0f} s"
        self._calm = self._since_step = self._since_down = 0.0
        self.level -= 1
        self._log_change(logging.INFO, self.level + 1, why)

    def _log_change(self, priority: int, before: int, why: str) -> None:
        log.log(
            priority,
            "restraint from %d to %d: %s; lockd takes %s: %s",
            before,
            self.level,
            STEPS[self.level],
            _description(self.spent),
            why,
            extra={
                "MESSAGE_ID": MESSAGE_ID,
                "LOCKD_RESTRAINT": self.level,
                "LOCKD_RESTRAINT_BEFORE": before,
                "LOCKD_CPU_PROGRAMS": f"{self.spent.programs:.6f}",
                "LOCKD_CPU_SAMPLER": f"{self.spent.sampler:.6f}",
                "LOCKD_CPU_NAMER": f"{self.spent.namer:.6f}",
                "LOCKD_CPU_EXPORTER": f"{self.spent.exporter:.6f}",
                "LOCKD_CPU_BUDGET": f"{self.budget:.6f}",
            },
        )


def _description(spent: Spent) -> str:
    parts = ", ".join(f"{part} {share:.2%}" for part, share in asdict(spent).items())
    return f"{spent.total:.2%} of the machine ({parts})"
