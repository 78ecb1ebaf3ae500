/* Raw futex waits (kind lock) that fail: TIMEOUTS with ETIMEDOUT after TIMEOUT_US, EAGAINS with
 * EAGAIN, which do not block, and EINTRS blocked waits that a signal handler interrupts. No wakes.
 * "longest_us" is how long a call took at most, rounded up. */
#include "workload.h"

static uint32_t zero, two = 2;
static long eintrs;
static struct waits waits;
static _Atomic long interrupted, longest_ns;

static void handler(int signal)
{
    (void)signal;
}

static void wait_expecting(int error, uint32_t *word, long timeout_us)
{
    struct before b = before();
    int got = futex_wait_2(word, timeout_us);
    long ns = now_ns() - b.ns;
    after(&waits, b);
    if (ns > longest_ns)
        longest_ns = ns;
    if (got != error) {
        errno = got;
        die("futex: wrong result");
    }
}

static void *victim(void *unused)
{
    for (long i = 1; i <= eintrs; i++) {
        wait_expecting(EINTR, &two, -1);
        interrupted = i;
    }
    return unused;
}

int main(int argc, char **argv)
{
    long timeouts = arg(argc, argv, 1, 100), eagains = arg(argc, argv, 2, 1000);
    long timeout_us = arg(argc, argv, 4, 1000);
    eintrs = arg(argc, argv, 3, 50);
    sigaction(SIGUSR1, &(struct sigaction){.sa_handler = handler}, NULL);
    ready();
    for (long i = 0; i < timeouts; i++)
        wait_expecting(ETIMEDOUT, &two, timeout_us);
    for (long i = 0; i < eagains; i++)
        wait_expecting(EAGAIN, &zero, -1);
    pid_t tid = spawn(victim, NULL);
    for (long i = 1; i <= eintrs; i++) {
        wait_asleep(tid, SYS_futex);
        check(syscall(SYS_tgkill, getpid(), tid, SIGUSR1), "tgkill");
        wait_until(&interrupted, i);
    }
    say("{\"futex\": {");
    say_futex("lock", &waits);
    say("}, \"wakes\": 0, \"errors\": {\"ETIMEDOUT\": %ld, \"EAGAIN\": %ld, \"EINTR\": %ld}, ", timeouts,
        eagains, eintrs);
    say("\"longest_us\": %ld}", longest_ns / 1000 + 1);
    finish();
}
