/* How many futex calls were seen in each of their steps, to tell that none was missed (lockd trace futex -d).
 */

/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */

#define WITH_STEPS

/* A call that began or was restarted ends, is killed, is still open, or is lost. */
enum step {
    STEP_BEGAN,
    STEP_RESTARTED, /* went on after a stop */
    STEP_ENDED,
    STEP_KILLED, /* with its thread, and the end was not seen */
    STEP_SWITCHED_OUT, /* for the first time in its call */
    STEP_BLOCKED, /* may be several times in a call */
    STEP_RAN_AGAIN, /* after that */
    STEPS
};

BPF_PERCPU_ARRAY(steps, u64, STEPS);

static __always_inline void count_step(u32 step)
{
    u64 *count = steps.lookup(&step);
    if (count)
        *count += 1;
}
