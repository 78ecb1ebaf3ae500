/* A mutex is held while a file is written past the page cache: K waits of kind lock, each for as long as
 * the disk takes for KILOBYTES, and 2 K wakes. The file is made in DIR. Who starts this makes the disk slow.
 */
#include "workload.h"

pthread_mutex_t journal_mutex = PTHREAD_MUTEX_INITIALIZER;
static int file;
static size_t size;
static void *block;

static void lock(void *mutex)
{
    pthread_mutex_lock(mutex);
}

static void unlock(void *mutex)
{
    pthread_mutex_unlock(mutex);
}

static __attribute__((noinline)) void write_journal(void *mutex)
{
    check(pwrite(file, block, size, 0), "write");
    unlock(mutex);
}

int main(int argc, char **argv)
{
    const char *dir = argc > 3 ? argv[3] : ".";
    char path[4096];
    struct handover h = {
        .lock = &journal_mutex,
        .rounds = arg(argc, argv, 1, 10),
        .take = lock,
        .give = write_journal,
        .ask = lock,
        .done = unlock,
    };
    size = arg(argc, argv, 2, 64) << 10;
    snprintf(path, sizeof path, "%s/slow_disk.%d", dir, getpid());
    file = check(open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_DIRECT, 0600), path);
    if (posix_memalign(&block, 4096, size))
        die("posix_memalign");
    memset(block, 1, size);
    ready();
    hand_over(&h);
    unlink(path);
    say("{\"addr\": \"%p\", \"futex\": {", (void *)&journal_mutex);
    say_futex("lock", &h.waits);
    say("}, \"wakes\": %ld, \"errors\": {}}", 2 * h.rounds);
    finish();
}
