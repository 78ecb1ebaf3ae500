/* THREADS threads that make as many futex calls as they can for SECONDS (0: until another byte comes), each
 * on WORDS addresses of its own: EAGAINS waits (kind lock) that fail at once, then one that times out after
 * TIMEOUT_US, and so on. A wait that is preempted for all of that time does not block. No wakes, and no
 * times: taking them would calm the storm. */
#include "workload.h"

static long seconds, eagains, words, timeout_us;
static _Atomic long failed, timeouts, blocked, finished;
static _Atomic bool is_over;

static void *run(void *unused)
{
    uint32_t *word = calloc(2 * words, sizeof *word);
    for (long i = 0; i < words; i++)
        word[2 * i + 1] = 2; /* futex_wait_2() blocks here */
    long mine = 0, at = 0, switches = before().switches;
    while (!is_over) {
        for (long i = 0; i < eagains; i++, at = (at + 1) % words)
            if (futex_wait_2(&word[2 * at], 1000000) != EAGAIN)
                die("futex: did not fail at once");
        if (futex_wait_2(&word[2 * at + 1], timeout_us) != ETIMEDOUT)
            die("futex: no timeout");
        mine++;
    }
    blocked += before().switches - switches;
    failed += mine * eagains;
    timeouts += mine;
    finished++;
    pause(); /* for ever: a thread's exit asks for mmap_lock */
    return unused;
}

int main(int argc, char **argv)
{
    long threads = arg(argc, argv, 1, 32);
    seconds = arg(argc, argv, 2, 10);
    eagains = arg(argc, argv, 3, 4);
    words = arg(argc, argv, 4, 1000);
    timeout_us = arg(argc, argv, 5, 50);
    ready();
    for (long i = 0; i < threads; i++)
        spawn(run, NULL);
    if (seconds)
        nap(seconds * 1000000);
    else
        wait_for_byte();
    is_over = true;
    while (finished < threads)
        nap(10000);
    say("{\"futex\": {\"lock\": {\"waits\": %ld, \"blocked\": %ld}}, \"wakes\": 0, ", failed + timeouts,
        blocked);
    say("\"errors\": {\"EAGAIN\": %ld, \"ETIMEDOUT\": %ld}, ", failed, timeouts);
    say("\"offcpu\": [{\"state\": \"interruptible\", \"reason\": \"lock\", \"count\": %ld}]}", blocked);
    finish();
}
