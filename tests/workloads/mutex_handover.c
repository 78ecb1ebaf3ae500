/* A glibc mutex is handed over K times: K waits of kind lock, each blocked for HOLD_US or more,
 * and 2 K wakes (the owner's unlock, and the asker's, which cannot know that nobody waits). */
#include "workload.h"

pthread_mutex_t handover_mutex = PTHREAD_MUTEX_INITIALIZER;

static void lock(void *mutex)
{
    pthread_mutex_lock(mutex);
}

static void unlock(void *mutex)
{
    pthread_mutex_unlock(mutex);
}

int main(int argc, char **argv)
{
    struct handover h = {
        .lock = &handover_mutex,
        .rounds = arg(argc, argv, 1, 100),
        .hold_us = arg(argc, argv, 2, 2000),
        .busy = argc > 3 && !strcmp(argv[3], "busy"),
        .take = lock,
        .give = unlock,
        .ask = lock,
        .done = unlock,
    };
    ready();
    hand_over(&h);
    say("{\"addr\": \"%p\", \"futex\": {", (void *)&handover_mutex);
    say_futex("lock", &h.waits);
    say("}, \"wakes\": %ld, \"errors\": {}}", 2 * h.rounds);
    finish();
}
