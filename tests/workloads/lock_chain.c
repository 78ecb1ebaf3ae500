/* A chain of DEPTH mutexes: one thread asks for the first, whose holder asks for the second, and so on. The
 * holder of the last one sleeps for 5 to 20 ms with it held, in the function chain_end(). Says for how long
 * the first thread waited. The protocol is that of tests/programs/holders.c: a line after a second in which
 * lockd gets to know the locks, then a byte, then SECONDS that the truth is about. */
#include "workload.h"

enum { MOST_DEPTH = 5, KNOWN_SECONDS = 1, PAUSE_US = 300, FROM_US = 5000, TO_US = 20000 };

static pthread_mutex_t lock_0 = PTHREAD_MUTEX_INITIALIZER, lock_1 = PTHREAD_MUTEX_INITIALIZER,
                       lock_2 = PTHREAD_MUTEX_INITIALIZER, lock_3 = PTHREAD_MUTEX_INITIALIZER,
                       lock_4 = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t *const locks[MOST_DEPTH] = {&lock_0, &lock_1, &lock_2, &lock_3, &lock_4};
static _Atomic long paused;
static _Atomic int64_t waited_ns;

/* Each link of the chain is code of its own. */
#define LINK(i, next)                                                                                        \
    __attribute__((noinline)) static void link_##i(void)                                                     \
    {                                                                                                        \
        pthread_mutex_lock(&lock_##i);                                                                       \
        pthread_mutex_lock(&lock_##next);                                                                    \
        pthread_mutex_unlock(&lock_##next);                                                                  \
        pthread_mutex_unlock(&lock_##i);                                                                     \
        __asm__ volatile("");                                                                                \
    }
LINK(0, 1)
LINK(1, 2)
LINK(2, 3)
LINK(3, 4)
static void (*const links[])(void) = {link_0, link_1, link_2, link_3};

__attribute__((noinline)) static void chain_end(pthread_mutex_t *last)
{
    static uint32_t state = 1;
    state = state * 1664525 + 1013904223;
    pthread_mutex_lock(last);
    nap(FROM_US + (state >> 8) % (TO_US - FROM_US));
    pthread_mutex_unlock(last);
    __asm__ volatile("");
}

static void *pass(void *link)
{
    for (;; nap(PAUSE_US))
        if (!paused)
            ((void (*)(void))link)();
    return NULL;
}

static void *ask(void *unused)
{
    for (;; nap(PAUSE_US)) {
        if (paused)
            continue;
        int64_t begin = now_ns();
        pthread_mutex_lock(&lock_0);
        waited_ns += now_ns() - begin;
        pthread_mutex_unlock(&lock_0);
    }
    return unused;
}

static void hold_for(long seconds, pthread_mutex_t *last)
{
    waited_ns = 0;
    paused = 0;
    for (int64_t end = now_ns() + seconds * 1000000000; now_ns() < end; nap(PAUSE_US))
        chain_end(last);
    paused = 1;
    nap(200000); /* until nobody asks any more */
}

int main(int argc, char **argv)
{
    long depth = arg(argc, argv, 1, 3), seconds = arg(argc, argv, 2, 10);
    if (depth < 2 || depth > MOST_DEPTH) {
        fprintf(stderr, "no chain of %ld locks\n", depth);
        exit(1);
    }
    ready();
    for (long i = 0; i < depth - 1; i++)
        spawn(pass, links[i]);
    spawn(ask, NULL);
    hold_for(KNOWN_SECONDS, locks[depth - 1]);
    say("{}");
    publish();
    wait_for_byte();
    hold_for(seconds, locks[depth - 1]);
    say("{\"waited_us\": %ld}", (long)(waited_ns / 1000));
    finish();
}
