/* Two threads wake each other through condition variables, K times each way: 2 K waits of kind cond,
 * no wait of kind lock. Each has its own mutex and condition variable, signals only when the other is
 * asleep, and after unlocking, so no mutex is ever contended. 4 K wakes: each signal, and each unlock
 * after a wait, because glibc takes the mutex back as if others waited for it. */
#include "workload.h"

struct player {
    pthread_mutex_t mutex;
    pthread_cond_t cond;
    bool turn;
    _Atomic long tid;
    struct waits waits;
    struct player *other;
};

static long rounds;
static _Atomic long finished;

static void wait_turn(struct player *p)
{
    pthread_mutex_lock(&p->mutex);
    while (!p->turn) {
        struct before b = before();
        pthread_cond_wait(&p->cond, &p->mutex);
        after(&p->waits, b);
    }
    p->turn = false;
    pthread_mutex_unlock(&p->mutex);
}

static void give_turn(struct player *p)
{
    wait_until(&p->tid, 1);
    wait_asleep(p->tid, SYS_futex);
    pthread_mutex_lock(&p->mutex);
    p->turn = true;
    pthread_mutex_unlock(&p->mutex);
    pthread_cond_signal(&p->cond);
}

static void *second(void *p)
{
    struct player *me = p;
    me->tid = gettid();
    for (long i = 0; i < rounds; i++) {
        wait_turn(me);
        give_turn(me->other);
    }
    finished = 1;
    return NULL;
}

int main(int argc, char **argv)
{
    struct player a = {.mutex = PTHREAD_MUTEX_INITIALIZER, .cond = PTHREAD_COND_INITIALIZER};
    struct player b = a;
    a.other = &b;
    b.other = &a;
    rounds = arg(argc, argv, 1, 500);
    ready();
    a.tid = gettid();
    spawn(second, &b);
    for (long i = 0; i < rounds; i++) {
        give_turn(&b);
        wait_turn(&a);
    }
    wait_until(&finished, 1);
    add_waits(&a.waits, &b.waits);
    say("{\"futex\": {");
    say_futex("cond", &a.waits);
    say("}, \"wakes\": %ld, \"errors\": {}}", 4 * rounds);
    finish();
}
