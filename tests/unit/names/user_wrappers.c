// Threads that block for ever, each under the name of its wait: see test_user_lock_programs.py. Their
// locks are on the heap, so that they are called after the place that waits, or the C library's own.

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#define KEPT __attribute__((noinline))
#define NOT_AT_THE_END __asm__ volatile("")

static pthread_mutex_t *heap;

KEPT void shop_mutex_lock(pthread_mutex_t *mutex)
{
    pthread_mutex_lock(mutex);
    NOT_AT_THE_END;
}

KEPT void wrapper_caller(void)
{
    shop_mutex_lock(heap);
    NOT_AT_THE_END;
}

static KEPT void wait_for_it(void)
{
    pthread_mutex_lock(heap);
    NOT_AT_THE_END;
}

KEPT void nameless_caller(void)
{
    wait_for_it();
    NOT_AT_THE_END;
}

__attribute__((cold)) KEPT void seldom(void)
{
    NOT_AT_THE_END;
}

/* The compiler puts the part that it expects to run seldom somewhere else. */
static volatile int is_seldom = 1;

KEPT void split_caller(void)
{
    if (is_seldom) {
        seldom();
        pthread_mutex_lock(heap);
    }
    for (int i = 0; i < 100; i++)
        is_seldom += i;
}

KEPT void puts_caller(void)
{
    puts("");
    NOT_AT_THE_END;
}

KEPT void fflush_caller(void)
{
    fflush(stdout);
    NOT_AT_THE_END;
}

struct waiter {
    const char *name;
    void (*waits)(void);
};

static void *started(void *p)
{
    const struct waiter *one = p;
    prctl(PR_SET_NAME, one->name);
    one->waits();
    return p;
}

int main(void)
{
    static struct waiter all[] = {
        {"wrapper", wrapper_caller}, {"nameless", nameless_caller}, {"split", split_caller},
        {"puts", puts_caller},       {"fflush", fflush_caller},
    };
    pthread_t thread;
    heap = malloc(sizeof *heap);
    pthread_mutex_init(heap, NULL);
    pthread_mutex_lock(heap);
    flockfile(stdout);
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
        pthread_create(&thread, NULL, started, &all[i]);
    pause();
}
