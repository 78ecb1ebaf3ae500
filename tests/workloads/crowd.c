/* THREADS threads, each of which waits ROUNDS times until a timeout of US, all at the same time: with
 * FUTEX=0 for a signal that nobody sends (reason signal, of which a host has few others), with FUTEX=1 on a
 * futex of its own (kind lock, reason lock). THREADS x ROUNDS waits, all of which time out; a wait that is
 * preempted for all of US does not block. */
#include "workload.h"

static long rounds, us, with_futex;
static struct waits waits;
static _Atomic long finished;

static void wait_for_signal(void)
{
    struct timespec t = {us / 1000000, us % 1000000 * 1000};
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR2);
    if (sigtimedwait(&set, NULL, &t) >= 0 || errno != EAGAIN)
        die("sigtimedwait: no timeout");
}

static void *run(void *unused)
{
    struct waits mine = {0};
    uint32_t two = 2;
    for (long i = 0; i < rounds; i++) {
        struct before b = before();
        if (!with_futex)
            wait_for_signal();
        else if (futex_wait_2(&two, us) != ETIMEDOUT)
            die("futex: no timeout");
        after(&mine, b);
    }
    add_waits(&waits, &mine);
    finished++;
    pause(); /* for ever: a thread's exit asks for mmap_lock */
    return unused;
}

int main(int argc, char **argv)
{
    long threads = arg(argc, argv, 1, 300);
    rounds = arg(argc, argv, 2, 50);
    us = arg(argc, argv, 3, 20000);
    with_futex = arg(argc, argv, 4, 0);
    ready();
    for (long i = 0; i < threads; i++)
        spawn(run, NULL);
    while (finished < threads)
        nap(10000);
    say("{\"calls\": %ld, \"offcpu\": [{", threads * rounds);
    say_offcpu("interruptible", with_futex ? "lock" : "signal", &waits);
    say("}]");
    if (with_futex) {
        say(", \"futex\": {");
        say_futex("lock", &waits);
        say("}, \"wakes\": 0, \"errors\": {\"ETIMEDOUT\": %ld}", threads * rounds);
    }
    say("}");
    finish();
}
