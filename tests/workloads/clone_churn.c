/* N threads, at most 8 alive at once, each of which makes one futex wait (kind lock) and ends: N waits, no
 * wakes. With TIMEOUT_US=0 they fail with EAGAIN, and none blocks; else they block until then and fail with
 * ETIMEDOUT (but for one that is preempted for all of that time). They are bare clones: glibc's thread start,
 * join and exit, which use futexes, are not involved (the kernel's own wake at exit is no system call). */
#include "workload.h"

enum { SLOTS = 8, STACK = 16 << 10 };

static struct slot {
    _Atomic pid_t tid; /* the kernel clears it when the thread has ended */
    char *stack;
} slots[SLOTS];
static long timeout_us;
static struct waits waits;

static int thread(void *unused)
{
    static uint32_t zero, two = 2;
    (void)unused;
    if (!timeout_us) {
        futex_wait_2(&zero, -1); /* all threads share errno, so it is not looked at */
        waits.waits++;
        return 0;
    }
    struct before b = before();
    futex_wait_2(&two, timeout_us);
    after(&waits, b);
    return 0;
}

int main(int argc, char **argv)
{
    const int flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM |
                      CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID;
    long n = arg(argc, argv, 1, 100000);
    timeout_us = arg(argc, argv, 2, 0);
    for (int i = 0; i < SLOTS; i++) {
        slots[i].stack =
            mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (slots[i].stack == MAP_FAILED)
            die("mmap");
    }
    ready();
    int64_t start = now_ns();
    for (long i = 0; i < n; i++) {
        struct slot *s = &slots[i % SLOTS];
        while (s->tid)
            sched_yield();
        check(clone(thread, s->stack + STACK, flags, NULL, &s->tid, NULL, &s->tid), "clone");
    }
    for (int i = 0; i < SLOTS; i++)
        while (slots[i].tid)
            sched_yield();
    say("{\"threads\": %ld, \"us\": %ld, \"futex\": {", n, (long)((now_ns() - start) / 1000));
    say_futex("lock", &waits);
    say("}, \"wakes\": 0, \"errors\": {\"%s\": %ld}}", timeout_us ? "ETIMEDOUT" : "EAGAIN", n);
    finish();
}
