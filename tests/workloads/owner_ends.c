/* A thread ends while it holds a robust mutex for which another waits, K times: K waits of kind lock, each
 * blocked for HOLD_US or more and ended by the kernel on behalf of the thread that ends. */
#include "workload.h"

static pthread_mutex_t robust;
static _Atomic long held, asked, finished;
static _Atomic pid_t asker;
static long rounds, hold_us;
static struct waits waits;

static void *hold(void *unused)
{
    pthread_mutex_lock(&robust);
    held++;
    wait_until(&asked, held);
    wait_asleep(asker, SYS_futex);
    nap(hold_us);
    return unused;
}

static void *ask(void *unused)
{
    asker = (pid_t)syscall(SYS_gettid);
    for (long i = 1; i <= rounds; i++) {
        wait_until(&held, i);
        struct before b = before();
        asked++;
        if (pthread_mutex_lock(&robust) != EOWNERDEAD)
            die("the owner has not ended");
        after(&waits, b);
        pthread_mutex_consistent(&robust);
        pthread_mutex_unlock(&robust);
        finished++;
    }
    return unused;
}

int main(int argc, char **argv)
{
    pthread_mutexattr_t attributes;
    rounds = arg(argc, argv, 1, 20);
    hold_us = arg(argc, argv, 2, 20000);
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&robust, &attributes);
    ready();
    spawn(ask, NULL);
    for (long i = 1; i <= rounds; i++) {
        spawn(hold, NULL);
        wait_until(&finished, i);
    }
    say("{\"futex\": {");
    say_futex("lock", &waits);
    say("}}");
    finish();
}
