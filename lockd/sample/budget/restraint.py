"""How lockd keeps to its budget of CPU time: what it does without while it takes more.

A step is taken for what it makes cheaper, and for nothing else:

- The programs and the sampler work with every event, and each step relieves them. It goes up one when they
  have taken more than the budget for a second, and what they had saved before is used up.
- The namer works now and then, but then for seconds, as when a large program is new. The first step stops it,
  and is taken for it when it has used up what programs and sampler left it for minutes.
- The exporter works for those who ask it. No step makes that cheaper.

Some of the budget counts as saved when a step begins, so that it has time to show what it saves: the less,
the more is still taken. It comes down one when clearly less was taken for a while, or when all is saved that
can be. A step down that does not last makes the next wait twice as long.
"""

from __future__ import annotations

import logging
from dataclasses import asdict

from lockd.sample.budget.spending import Spent

log = logging.getLogger(__name__)

STACKS, DETAIL, PROCESSES = 1, 2, 3
"""As in enum restraint of lockd/bpf/include/common.bpf.h; each step with those before it."""
STEPS = (
    "everything is told",
    "no stacks are taken and no names looked up",
    "waits are counted by process, not by thread and lock",
    'only totals are counted, as the process "other", and looked at less often',
)
SAVED_SECONDS = 30.0
"""At most so many seconds of the budget can programs and sampler save up."""
STEP_SECONDS = 3.0
"""So many of them have they when a step begins."""
SETTLED_SECONDS = 2.0
"""After a step, until what is taken is all taken at that step: what came before is folded in the first."""
NAMER_SECONDS = 120.0
"""At most so many seconds of the budget are saved for the namer."""
NAMER_RETURNS = 60.0
"""So many of them are to be saved before it goes on."""
NAMER_SHARE = 0.25
"""Of the budget, that the namer has in any case, though programs and sampler may leave it less."""
CALM = 0.75
"""Of the budget: what is clearly less."""
PATIENCE, MOST_PATIENCE = 5.0, 320.0
"""Seconds of calm before a step down."""
LASTED = 60.0
"""A step down that was taken back sooner did not last."""
MESSAGE_ID = "b0b05d5db51d435fb6674d086e099d47"
"""Of the journal's entry for a step: `journalctl MESSAGE_ID=...` lists them."""


class Purse:
    """What is saved, in seconds of the budget; `most` at most, and as much to begin with."""

    def __init__(self, most: float) -> None:
        self.saved = self._most = most

    def put(self, seconds: float) -> None:
        """Less than nothing: take it out, as far as it is there."""
        self.saved = min(max(self.saved + seconds, 0.0), self._most)

    @property
    def is_full(self) -> bool:
        return self.saved >= self._most


class Restraint:
    """The step that lockd is at, from 0 to len(STEPS) - 1.

    `budget` is a share of the machine; None: there is no limit.
    """

    def __init__(self, budget: float | None) -> None:
        self.budget = budget
        self.level = 0
        self.spent = Spent()
        """When it was last judged."""
        self.seconds = [0.0] * len(STEPS)
        """Spent at each step."""
        self._of_events, self._of_namer = Purse(SAVED_SECONDS), Purse(NAMER_SECONDS)
        self._calm = 0.0
        """Seconds for which clearly less was taken."""
        self._patience = PATIENCE
        self._since_step = 0.0
        self._since_down = LASTED

    def judge(self, spent: Spent, seconds: float) -> bool:
        """Take notice of what was spent in the last `seconds`; whether that changed the step."""
        self.spent = spent
        self.seconds[self.level] += seconds
        if self.budget is None:
            return False
        used = spent.by_events / self.budget
        self._of_events.put((1 - used) * seconds)
        self._of_namer.put((max(1 - used, NAMER_SHARE) - spent.namer / self.budget) * seconds)
        self._calm = self._calm + seconds if used < CALM else 0.0
        self._since_step += seconds
        self._since_down += seconds
        level = self.level
        if used > 1 and not self._of_events.saved:
            if level + 1 < len(STEPS) and (not level or self._since_step >= SETTLED_SECONDS):
                self._step_up_for_events(self.budget, seconds)
        elif not level and spent.namer and not self._of_namer.saved:
            self._step_up(f"the namer has used up what was saved of budget.cpu, {self.budget:.2%}")
        elif level > STACKS or self._of_namer.saved >= NAMER_RETURNS:
            self._come_down(self.budget)
        if not self.level and self._since_down >= MOST_PATIENCE:
            self._patience = PATIENCE
        return self.level != level

    def change(self, budget: float | None) -> None:
        """Judge by another budget from now on."""
        if budget is None and self.level and self.budget is not None:
            before, self.level = self.level, 0
            self._tell(logging.INFO, before, "budget.cpu is none from now on")
        self.budget = budget

    def _step_up_for_events(self, budget: float, seconds: float) -> None:
        if self._since_down < LASTED:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._since_down = LASTED
        self._of_events.put(STEP_SECONDS)
        self._step_up(
            f"programs and sampler more than budget.cpu, {budget:.2%}, in {seconds:.1f} s,"
            " and nothing is saved"
        )

    def _step_up(self, why: str) -> None:
        self._calm = self._since_step = 0.0
        self.level += 1
        self._tell(logging.WARNING, self.level - 1, why)

    def _come_down(self, budget: float) -> None:
        """One step, if it is time to."""
        wait = self._since_step if self._of_events.is_full else self._calm
        if not self.level or wait < self._patience:
            return
        why = f"less than budget.cpu, {budget:.2%}, for {self._since_step:.0f} s"
        if self._calm >= self._patience:
            why = f"for {self._calm:.0f} s less than {CALM:.0%} of budget.cpu, {budget:.2%}"
        self._calm = self._since_step = self._since_down = 0.0
        self.level -= 1
        self._tell(logging.INFO, self.level + 1, why)

    def _tell(self, priority: int, before: int, why: str) -> None:
        log.log(
            priority,
            "restraint from %d to %d: %s; lockd takes %s: %s",
            before,
            self.level,
            STEPS[self.level],
            _words(self.spent),
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


def _words(spent: Spent) -> str:
    parts = ", ".join(f"{part} {share:.2%}" for part, share in asdict(spent).items())
    return f"{spent.total:.2%} of the machine ({parts})"
