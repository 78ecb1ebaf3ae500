/* N short-lived processes with the parent's name, at most 8 alive at once. Each makes one futex wait
 * that fails with EAGAIN, one wake, and one wait that times out after 200 us, and exits: 2 N waits of
 * kind lock, of which N block (but for one that is preempted for all of the 200 us). */
#include "workload.h"

enum { ALIVE = 8 };

static void child(struct waits *waits)
{
    static uint32_t zero, two = 2;
    mlockall(MCL_CURRENT); /* or a page fault could block during a call that does not */
    struct before b = before();
    if (futex_wait_2(&zero, -1) != EAGAIN)
        die("futex: no EAGAIN");
    after(waits, b);
    check(futex(&zero, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0), "futex wake");
    b = before();
    if (futex_wait_2(&two, 200) != ETIMEDOUT)
        die("futex: no timeout");
    after(waits, b);
    _exit(0);
}

static void reap(void)
{
    int status;
    check(wait(&status), "wait");
    if (status) {
        fprintf(stderr, "a child ended with status %#x\n", status);
        _exit(1);
    }
}

int main(int argc, char **argv)
{
    long n = arg(argc, argv, 1, 1000), alive = 0;
    struct waits *waits =
        mmap(NULL, sizeof *waits, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (waits == MAP_FAILED)
        die("mmap");
    ready();
    for (long i = 0; i < n; i++) {
        if (alive == ALIVE) {
            reap();
            alive--;
        }
        if (check(fork(), "fork") == 0)
            child(waits);
        alive++;
    }
    while (alive--)
        reap();
    say("{\"processes\": %ld, \"futex\": {", n);
    say_futex("lock", waits);
    say("}, \"wakes\": %ld, \"errors\": {\"EAGAIN\": %ld, \"ETIMEDOUT\": %ld}}", n, n, n);
    finish();
}
