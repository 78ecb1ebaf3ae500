/* Two processes, each with a lock of its own. K times a thread of the first waits for its lock, for HOLD_US
 * or more, "waited_us" in all. Meanwhile N threads of the second, whose name begins with W, wait for theirs
 * for ever. The second process has chosen the address of its lock: it differs in bit 42 alone from that of
 * the other lock, and the ids of the processes in bit 0 alone. */
#include "workload.h"
#include <sys/prctl.h>

#define FIRST_AT 0x100000000000UL
#define SECOND_AT (FIRST_AT ^ 1UL << 42)

static struct shared {
    _Atomic long may_begin, asleep, finished;
    _Atomic int64_t waited_ns;
} *shared;
static long rounds, hold_us, waiters;
static char name[16];

static void lock(void *mutex)
{
    pthread_mutex_lock(mutex);
}

static void unlock(void *mutex)
{
    pthread_mutex_unlock(mutex);
}

static void hand_over_own(void)
{
    struct handover h = {
        .lock = (void *)FIRST_AT, /* zeros are a mutex that is free */
        .rounds = rounds,
        .hold_us = hold_us,
        .take = lock,
        .give = unlock,
        .ask = lock,
        .done = unlock,
    };
    wait_until(&shared->asleep, waiters);
    hand_over(&h);
    shared->waited_ns = h.waits.sum_ns;
    shared->finished = 1;
}

static void *wait_for_ever(void *word)
{
    futex_wait_2(word, -1);
    return NULL;
}

static void wait_for_own(void)
{
    uint32_t *word = (void *)SECOND_AT;
    *word = 2;
    name[0] = 'W';
    prctl(PR_SET_NAME, name);
    for (long i = 0; i < waiters; i++) {
        wait_asleep(spawn(wait_for_ever, word), SYS_futex);
        shared->asleep++;
    }
}

static pid_t start(void (*run)(void))
{
    pid_t pid = check(fork(), "fork");
    if (pid)
        return pid;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    wait_until(&shared->may_begin, 1);
    run();
    for (;;)
        pause();
}

static void end(pid_t pid)
{
    check(kill(pid, SIGKILL), "kill");
    check(waitpid(pid, NULL, 0), "waitpid");
}

/* Exits with 77 where addresses are shorter. */
static void map_at(unsigned long at)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    void *page = mmap((void *)at, 4096, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (page == MAP_FAILED && errno == ENOMEM)
        exit(MISSING);
    if (page != (void *)at)
        die("mmap");
}

int main(int argc, char **argv)
{
    rounds = arg(argc, argv, 1, 100);
    hold_us = arg(argc, argv, 2, 10000);
    waiters = arg(argc, argv, 3, 8);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        die("mmap");
    map_at(FIRST_AT);
    map_at(SECOND_AT);
    ready();
    prctl(PR_GET_NAME, name);
    for (;;) {
        pid_t first = start(hand_over_own), second = first % 2 ? 0 : start(wait_for_own);
        if (second == first + 1)
            break;
        end(first);
        if (second)
            end(second);
    }
    shared->may_begin = 1;
    wait_until(&shared->finished, 1);
    say("{\"waited_us\": %ld}", (long)(shared->waited_ns / 1000));
    finish();
}
