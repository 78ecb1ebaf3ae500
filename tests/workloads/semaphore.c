/* sem_wait K times, each posted HOLD_US after the waiter sleeps: K waits of kind cond, K wakes. */
#include "workload.h"
#include <semaphore.h>

static sem_t semaphore;

static void nothing(void *sem)
{
    (void)sem;
}

static void post(void *sem)
{
    sem_post(sem);
}

static void wait_for(void *sem)
{
    sem_wait(sem);
}

int main(int argc, char **argv)
{
    struct handover h = {
        .lock = &semaphore,
        .rounds = arg(argc, argv, 1, 100),
        .hold_us = arg(argc, argv, 2, 2000),
        .take = nothing,
        .give = post,
        .ask = wait_for,
        .done = nothing,
    };
    check(sem_init(&semaphore, 0, 0), "sem_init");
    ready();
    hand_over(&h);
    say("{\"futex\": {");
    say_futex("cond", &h.waits);
    say("}, \"wakes\": %ld, \"errors\": {}}", h.rounds);
    finish();
}
