// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Numbers of futex calls that were seen at each step, which show whether a call was missed (lockd trace futex
 * -d). */

#define WITH_STEPS

/* Steps of a call. Each call that began or was restarted has ended, was killed, is still in progress, or was
 * lost. */
enum step {
    STEP_BEGAN,
    STEP_RESTARTED, /* continued after a stop */
    STEP_ENDED,
    STEP_KILLED, /* ended with its thread, and its end was not seen */
    STEP_SWITCHED_OUT, /* left its CPU for the first time in the call */
    STEP_BLOCKED, /* possibly several times in a call */
    STEP_RAN_AGAIN, /* after it blocked */
    STEPS
};

BPF_PERCPU_ARRAY(steps, u64, STEPS);

static __always_inline void count_step(u32 step)
{
    u64 *count = steps.lookup(&step);
    if (count)
        *count += 1;
}
