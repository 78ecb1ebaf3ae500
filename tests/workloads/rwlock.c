/* A glibc rwlock: K times a reader waits for the writer, then K times a writer waits for the reader.
 * 2 K waits, each blocked for HOLD_US or more; their operation looks like a condition variable, their
 * stack (pthread_rwlock_*) says that it is a lock. */
#include "workload.h"

static pthread_rwlock_t rwlock = PTHREAD_RWLOCK_INITIALIZER;

static void read_lock(void *lock)
{
    pthread_rwlock_rdlock(lock);
}

static void write_lock(void *lock)
{
    pthread_rwlock_wrlock(lock);
}

static void unlock(void *lock)
{
    pthread_rwlock_unlock(lock);
}

int main(int argc, char **argv)
{
    struct handover reader_waits = {
        .lock = &rwlock,
        .rounds = arg(argc, argv, 1, 100),
        .hold_us = arg(argc, argv, 2, 2000),
        .take = write_lock,
        .give = unlock,
        .ask = read_lock,
        .done = unlock,
    };
    struct handover writer_waits = reader_waits;
    writer_waits.take = read_lock;
    writer_waits.ask = write_lock;
    ready();
    hand_over(&reader_waits);
    hand_over(&writer_waits);
    add_waits(&reader_waits.waits, &writer_waits.waits);
    say("{\"futex\": {");
    say_futex("lock", &reader_waits.waits);
    say("}, \"wakes\": %ld, \"errors\": {}}", 2 * reader_waits.rounds);
    finish();
}
