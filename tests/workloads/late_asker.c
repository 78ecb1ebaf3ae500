/* A lock that stores no owner, for which a thread waits now and then. K times the main thread polls for
 * 400 ms without the lock, then takes it and computes for 30 ms. Another thread asks for the lock in the last
 * 20 ms of each hold. So the holder runs in all the time that is waited, "waited_us". */
#include "workload.h"
#include <poll.h>

enum { APART_MS = 400, HOLD_US = 30000, ALONE_US = 10000 };

static uint32_t late_lock[8]; /* the first word; in the others a mutex of glibc would have its owner */
static _Atomic long held, asked;
static int64_t waited_ns;

static void *ask(void *unused)
{
    for (long round = 1;; round++) {
        wait_until(&held, round);
        nap(ALONE_US);
        int64_t begin = now_ns();
        take_ownerless(late_lock);
        waited_ns += now_ns() - begin;
        give_ownerless(late_lock);
        asked = round;
    }
    return unused;
}

int main(int argc, char **argv)
{
    long k = arg(argc, argv, 1, 20);
    ready();
    spawn(ask, NULL);
    for (long round = 1; round <= k; round++) {
        check(poll(NULL, 0, APART_MS), "poll");
        take_ownerless(late_lock);
        held = round;
        spin(HOLD_US);
        give_ownerless(late_lock);
        wait_until(&asked, round);
    }
    say("{\"waited_us\": %ld}", (long)(waited_ns / 1000));
    finish();
}
