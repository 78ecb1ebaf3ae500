"""How lockd keeps to its budget of CPU time: what it does without while it takes more.

It goes one step up when it has taken more than the budget for a second, and what it had saved before is used
up; so a scrape, or a program whose symbols are read, is no reason. It comes one step down when it has
taken clearly less for a while, or has saved all that can be saved. A step down that does not last makes the
next wait twice as long.
"""

from __future__ import annotations

import logging
from dataclasses import asdict

from lockd.sample.spending import Spent

log = logging.getLogger(__name__)

STACKS, DETAIL, PROCESSES = 1, 2, 3
"""As in enum restraint of lockd/bpf/common.bpf.h; each step with those before it."""
STEPS = (
    "everything is told",
    "no stacks are taken and no names looked up",
    "waits are counted by process, not by thread and lock",
    'only totals are counted, as the process "other", and looked at less often',
)
SAVED_SECONDS = 30.0
"""At most so many seconds of the budget can be saved up."""
CALM = 0.75
"""Of the budget: what is clearly less."""
PATIENCE, MOST_PATIENCE = 5.0, 320.0
"""Seconds of calm before a step down."""
LASTED = 60.0
"""A step down that was taken back sooner did not last."""
MESSAGE_ID = "b0b05d5db51d435fb6674d086e099d47"
"""Of the journal's entry for a step: `journalctl MESSAGE_ID=...` lists them."""


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
        self._saved = SAVED_SECONDS
        """In seconds of the budget."""
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
        used = spent.total / self.budget
        self._saved = min(max(self._saved + (1 - used) * seconds, 0.0), SAVED_SECONDS)
        self._calm = self._calm + seconds if used < CALM else 0.0
        self._since_step += seconds
        self._since_down += seconds
        if used > 1 and not self._saved and self.level + 1 < len(STEPS):
            self._step_up(self.budget, seconds)
            return True
        wait = self._since_step if self._saved >= SAVED_SECONDS else self._calm
        if self.level and wait >= self._patience:
            self._step_down(self.budget)
            return True
        if not self.level and self._since_down >= MOST_PATIENCE:
            self._patience = PATIENCE
        return False

    def _step_up(self, budget: float, seconds: float) -> None:
        if self._since_down < LASTED:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._since_down = LASTED
        self._calm = self._since_step = 0.0
        self.level += 1
        why = f"more than budget.cpu, {budget:.2%}, and nothing is saved"
        self._tell(logging.WARNING, self.level - 1, f"{_words(self.spent)} in {seconds:.1f} s: {why}")

    def _step_down(self, budget: float) -> None:
        why = f"less than budget.cpu, {budget:.2%}, for {self._since_step:.0f} s"
        if self._calm >= self._patience:
            why = f"for {self._calm:.0f} s less than {CALM:.0%} of budget.cpu, {budget:.2%}"
        self._calm = self._since_step = self._since_down = 0.0
        self.level -= 1
        self._tell(logging.INFO, self.level + 1, f"{_words(self.spent)}: {why}")

    def _tell(self, priority: int, before: int, why: str) -> None:
        log.log(
            priority,
            "restraint from %d to %d: %s; lockd takes %s",
            before,
            self.level,
            STEPS[self.level],
            why,
            extra={
                "MESSAGE_ID": MESSAGE_ID,
                "LOCKD_RESTRAINT": self.level,
                "LOCKD_RESTRAINT_BEFORE": before,
                "LOCKD_CPU_PROGRAMS": f"{self.spent.programs:.6f}",
                "LOCKD_CPU_SAMPLER": f"{self.spent.sampler:.6f}",
                "LOCKD_CPU_HELPERS": f"{self.spent.helpers:.6f}",
                "LOCKD_CPU_BUDGET": f"{self.budget:.6f}",
            },
        )


def _words(spent: Spent) -> str:
    parts = ", ".join(f"{part} {share:.2%}" for part, share in asdict(spent).items())
    return f"{spent.total:.2%} of the machine ({parts})"
