// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* How many futex calls were seen at each of their steps (lockd trace futex -d). The numbers show whether the
 * end of a call was missed. */

#define WITH_STEPS

/* Steps of a call. Of each call that began or was restarted, the end or the kill was seen as well, unless the
 * call is still in progress or was counted as lost. */
enum step {
    STEP_BEGAN,
    STEP_RESTARTED, /* continued by restart_syscall() after a stop (SIGSTOP) */
    STEP_ENDED,
    STEP_KILLED, /* the exit was not seen: the thread was killed, or had begun the call before the trace */
    STEP_SWITCHED_OUT, /* the thread left its CPU for the first time in the call */
    STEP_BLOCKED, /* the thread blocked, possibly several times in a call */
    STEP_RAN_AGAIN, /* the thread ran again after it blocked */
    STEPS
};

BPF_PERCPU_ARRAY(steps, u64, STEPS);

static __always_inline void count_step(u32 step)
{
    u64 *count = steps.lookup(&step);
    if (count)
        *count += 1;
}
