/* The futex system calls of Linux 6.7, K rounds of each: futex_wait for 2 (kind lock), futex_wait for
 * 7 (cond), futex_waitv (other), and futex_wait for 2 that futex_requeue moves (lock). Each blocks for
 * 500 us or more and ends by one futex_wake; then K futex_waits fail with EAGAIN (lock).
 * Exit code 77 if the kernel has none of this. */
#include "workload.h"

enum { FUTEX_WAITV_NR = 449, FUTEX_WAKE_NR = 454, FUTEX_WAIT_NR, FUTEX_REQUEUE_NR };
enum { U32_PRIVATE = 0x02 | 0x80 };
struct waitv {
    uint64_t value, word;
    uint32_t flags, reserved;
};

static _Atomic uint32_t a, b;
static _Atomic long finished;
static struct waits lock, cond, other;

static long futex_wait(uint32_t value)
{
    return syscall(FUTEX_WAIT_NR, &a, (long)value, ~0U, U32_PRIVATE, NULL, 0);
}

static long futex_wake(_Atomic uint32_t *word)
{
    return check(syscall(FUTEX_WAKE_NR, word, ~0U, 1, U32_PRIVATE), "futex_wake");
}

static void *wait_lock(void *unused)
{
    struct before start = before();
    check(futex_wait(2), "futex_wait");
    after(&lock, start);
    finished++;
    return unused;
}

static void *wait_cond(void *unused)
{
    struct before start = before();
    check(futex_wait(7), "futex_wait");
    after(&cond, start);
    finished++;
    return unused;
}

static void *wait_other(void *unused)
{
    struct waitv v[2] = {
        {a, (uintptr_t)&a, U32_PRIVATE, 0},
        {b, (uintptr_t)&b, U32_PRIVATE, 0},
    };
    struct before start = before();
    check(syscall(FUTEX_WAITV_NR, v, 2, 0, NULL, 0), "futex_waitv");
    after(&other, start);
    finished++;
    return unused;
}

static void round_of(void *(*waiter)(void *), long nr, uint32_t value, bool requeue)
{
    static long rounds;
    a = value;
    pid_t tid = spawn(waiter, NULL);
    wait_asleep(tid, nr);
    nap(500);
    if (requeue) {
        struct waitv v[2] = {
            {value, (uintptr_t)&a, U32_PRIVATE, 0},
            {0, (uintptr_t)&b, U32_PRIVATE, 0},
        };
        check(syscall(FUTEX_REQUEUE_NR, v, 0, 0, 1), "futex_requeue");
    }
    if (futex_wake(requeue ? &b : &a) != 1)
        die("woke nobody");
    wait_until(&finished, ++rounds);
    /* As it ends, it may have a lock of the C library for which the next thread waits: one more wake. */
    while (!syscall(SYS_tgkill, getpid(), tid, 0))
        nap(50);
}

int main(int argc, char **argv)
{
    long k = arg(argc, argv, 1, 50);
    if (syscall(FUTEX_REQUEUE_NR, NULL, 0, 0, 0) < 0 && errno == ENOSYS) {
        fprintf(stderr, "this kernel has no futex_requeue system call\n");
        return MISSING;
    }
    ready();
    for (long i = 0; i < k; i++) {
        round_of(wait_lock, FUTEX_WAIT_NR, 2, false);
        round_of(wait_cond, FUTEX_WAIT_NR, 7, false);
        round_of(wait_other, FUTEX_WAITV_NR, 2, false);
        round_of(wait_lock, FUTEX_WAIT_NR, 2, true);
    }
    a = 0;
    for (long i = 0; i < k; i++) {
        struct before start = before();
        if (futex_wait(2) == 0 || errno != EAGAIN)
            die("futex_wait: no EAGAIN");
        after(&lock, start);
    }
    say("{\"futex\": {");
    say_futex("lock", &lock);
    say(", ");
    say_futex("cond", &cond);
    say(", ");
    say_futex("other", &other);
    say("}, \"wakes\": %ld, \"errors\": {\"EAGAIN\": %ld}}", 5 * k, k);
    finish();
}
