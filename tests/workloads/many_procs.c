/* N processes alive at once, named mp00001, mp00002, ..., each with a mutex of its own that two of its
 * threads hand over ROUNDS times, held for 1 ms: N x ROUNDS waits of kind lock, all blocked, and twice
 * as many wakes. All live until stdin ends. */
#include "workload.h"
#include <sys/prctl.h>

struct shared {
    struct waits waits;
    _Atomic long up, finished;
};

static void lock(void *mutex)
{
    pthread_mutex_lock(mutex);
}

static void unlock(void *mutex)
{
    pthread_mutex_unlock(mutex);
}

/* Both pipes are only ever closed: `go` to begin, `end` (when the parent exits) to end. */
static _Noreturn void child(long number, long rounds, struct shared *shared, int go, int end)
{
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    struct handover h = {
        .lock = &mutex,
        .rounds = rounds,
        .hold_us = 1000,
        .take = lock,
        .give = unlock,
        .ask = lock,
        .done = unlock,
    };
    char name[16], byte;
    snprintf(name, sizeof name, "mp%05ld", number % 10000000);
    prctl(PR_SET_NAME, name);
    shared->up++;
    check(read(go, &byte, 1), "read go");
    hand_over(&h);
    add_waits(&shared->waits, &h.waits);
    shared->finished++;
    check(read(end, &byte, 1), "read end");
    _exit(0);
}

int main(int argc, char **argv)
{
    long n = arg(argc, argv, 1, 100), rounds = arg(argc, argv, 2, 20);
    struct shared *shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int go[2], end[2];
    if (shared == MAP_FAILED)
        die("mmap");
    check(pipe(go), "pipe");
    check(pipe(end), "pipe");
    ready();
    for (long i = 1; i <= n; i++) {
        if (check(fork(), "fork") == 0) {
            close(go[1]);
            close(end[1]);
            child(i, rounds, shared, go[0], end[0]);
        }
    }
    wait_until(&shared->up, n);
    close(go[1]);
    while (shared->finished < n)
        nap(10000);
    say("{\"processes\": %ld, \"futex\": {", n);
    say_futex("lock", &shared->waits);
    say("}, \"wakes\": %ld, \"errors\": {}}", 2 * n * rounds);
    finish();
}
