/* One thread, N futex waits that fail at once on N different addresses, as fast as can be, then BLOCKING
 * waits that time out after 100 us on as many others. With PI=0 all of kind lock, and the first fail with
 * EAGAIN; with PI=1 of kind pi and with EDEADLK, which no other program has. No wakes. */
#include "workload.h"

static void *owner(void *unused)
{
    pause();
    return unused;
}

/* Calls FUTEX_LOCK_PI. Returns 0 or the errno. */
static int lock_pi(void *word, long timeout_us)
{
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end); /* the only clock it knows */
    end.tv_nsec += timeout_us * 1000;
    end.tv_sec += end.tv_nsec / 1000000000;
    end.tv_nsec %= 1000000000;
    return futex(word, FUTEX_LOCK_PI_PRIVATE, 0, &end, NULL, 0) < 0 ? errno : 0;
}

int main(int argc, char **argv)
{
    long n = arg(argc, argv, 1, 100000), blocking = arg(argc, argv, 2, 1000);
    bool pi = arg(argc, argv, 3, 0);
    int (*wait_for)(void *, long) = pi ? lock_pi : futex_wait_2;
    int at_once = pi ? EDEADLK : EAGAIN;
    struct waits waits = {.waits = n};
    uint32_t *words = mmap(NULL, (n + blocking + 1) * sizeof *words, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (words == MAP_FAILED)
        die("mmap");
    uint32_t held = pi ? spawn(owner, NULL) : 2;
    for (long i = 0; i < n; i++)
        words[i] = pi ? gettid() : 0;
    for (long i = n; i < n + blocking; i++)
        words[i] = held;
    ready();
    int64_t start = now_ns();
    for (long i = 0; i < n; i++)
        if (wait_for(&words[i], 1000000) != at_once)
            die("futex: did not fail at once");
    int64_t ns = now_ns() - start;
    for (long i = n; i < n + blocking; i++) {
        struct before b = before();
        if (wait_for(&words[i], 100) != ETIMEDOUT)
            die("futex: no timeout");
        after(&waits, b);
    }
    say("{\"addresses\": %ld, \"at_once_us\": %ld, \"futex\": {", n + blocking, (long)(ns / 1000));
    say_futex(pi ? "pi" : "lock", &waits);
    say("}, \"wakes\": 0, \"errors\": {\"%s\": %ld, \"ETIMEDOUT\": %ld}}", pi ? "EDEADLK" : "EAGAIN", n,
        blocking);
    finish();
}
