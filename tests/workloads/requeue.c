/* N threads wait on futex A, one FUTEX_CMP_REQUEUE moves them all to B, N wakes on B let them go one
 * by one: N waits of kind lock, all begun on A; N + 1 wakes. */
#include "workload.h"

static uint32_t a = 2, b = 2;
static struct waits waits;
static _Atomic long finished;

static void *waiter(void *unused)
{
    struct before start = before();
    if (futex_wait_2(&a, -1))
        die("futex wait");
    after(&waits, start);
    finished++;
    return unused;
}

int main(int argc, char **argv)
{
    long n = arg(argc, argv, 1, 20);
    ready();
    for (long i = 0; i < n; i++)
        wait_asleep(spawn(waiter, NULL), SYS_futex);
    /* The fourth argument is how many to requeue, in the timeout's place. */
    long moved = check(futex(&a, FUTEX_CMP_REQUEUE_PRIVATE, 0, (void *)n, &b, 2), "requeue");
    for (long i = 1; i <= n; i++) {
        nap(500);
        if (check(futex(&b, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0), "wake") != 1)
            die("woke nobody");
        wait_until(&finished, i);
    }
    say("{\"addr\": \"%p\", \"requeued\": %ld, \"futex\": {", (void *)&a, moved);
    say_futex("lock", &waits);
    say("}, \"wakes\": %ld, \"errors\": {}}", n + 1);
    finish();
}
