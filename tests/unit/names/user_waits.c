// Threads that block for ever, each under the name of its wait, in NAME_caller(): see test_user_locks.py.

#define _GNU_SOURCE
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

pthread_mutex_t global_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t static_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct {
    long before[20];
    pthread_mutex_t inside;
    pthread_rwlock_t rw;
    pthread_cond_t cond;
    pthread_mutex_t m;
} large = {{0},
           PTHREAD_MUTEX_INITIALIZER,
           PTHREAD_RWLOCK_INITIALIZER,
           PTHREAD_COND_INITIALIZER,
           PTHREAD_MUTEX_INITIALIZER};
pthread_rwlock_t rwlock = PTHREAD_RWLOCK_INITIALIZER;
static pthread_cond_t cond = PTHREAD_COND_INITIALIZER;
static pthread_mutex_t cond_mutex = PTHREAD_MUTEX_INITIALIZER;
static sem_t semaphore;
static pthread_barrier_t barrier;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t *heap;
static pthread_mutex_t pi;
__thread pthread_mutex_t own = PTHREAD_MUTEX_INITIALIZER;
static pthread_t never;
static pthread_mutex_t back_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t back_cond = PTHREAD_COND_INITIALIZER;
static int is_waiting;
static volatile int is_initialising;

#define NAME(name) prctl(PR_SET_NAME, name)
#define WAITER(name, call)                                                                                   \
    __attribute__((noinline)) void name##_caller(void)                                                       \
    {                                                                                                        \
        call;                                                                                                \
        __asm__ volatile("");                                                                                \
    }                                                                                                        \
    static void *name##_thread(void *unused)                                                                 \
    {                                                                                                        \
        NAME(#name);                                                                                         \
        name##_caller();                                                                                     \
        __asm__ volatile("");                                                                                \
        return unused;                                                                                       \
    }

static void init(void)
{
    NAME("initialising");
    is_initialising = 1;
    pause();
}
static void *initialise(void *u)
{
    pthread_once(&once, init);
    return u;
}
static void *nothing(void *u)
{
    pause();
    return u;
}

WAITER(global, pthread_mutex_lock(&global_mutex))
WAITER(file, pthread_mutex_lock(&static_mutex))
WAITER(inside, pthread_mutex_lock(&large.inside))
WAITER(read, pthread_rwlock_rdlock(&rwlock))
WAITER(write, pthread_rwlock_wrlock(&rwlock))
WAITER(inrw, pthread_rwlock_rdlock(&large.rw))
WAITER(wait, (pthread_mutex_lock(&cond_mutex), pthread_cond_wait(&cond, &cond_mutex)))
WAITER(incond, (pthread_mutex_lock(&large.m), pthread_cond_wait(&large.cond, &large.m)))
WAITER(sem, sem_wait(&semaphore))
WAITER(barrier, pthread_barrier_wait(&barrier))
WAITER(once, pthread_once(&once, init))
WAITER(heap, pthread_mutex_lock(heap))
WAITER(pi, pthread_mutex_lock(&pi))
WAITER(join, pthread_join(never, NULL))
WAITER(back, (pthread_mutex_lock(&back_mutex), is_waiting = 1, pthread_cond_wait(&back_cond, &back_mutex)))
WAITER(tls, (pthread_mutex_lock(&own), pthread_mutex_lock(&own)))

static void signalled_caller(int number)
{
    pthread_mutex_lock(&global_mutex);
    __asm__ volatile("" ::"r"(number));
}
static void *signalled_thread(void *unused)
{
    NAME("signalled");
    signal(SIGUSR1, signalled_caller);
    raise(SIGUSR1);
    return unused;
}

static void start(void *(*run)(void *))
{
    pthread_t t;
    if (pthread_create(&t, NULL, run, NULL))
        abort();
}

int main(void)
{
    pthread_mutexattr_t attr;
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_setprotocol(&attr, PTHREAD_PRIO_INHERIT);
    pthread_mutex_init(&pi, &attr);
    heap = malloc(sizeof *heap);
    pthread_mutex_init(heap, NULL);
    sem_init(&semaphore, 0, 0);
    pthread_barrier_init(&barrier, NULL, 2);
    pthread_mutex_lock(&global_mutex);
    pthread_mutex_lock(&static_mutex);
    pthread_mutex_lock(&large.inside);
    pthread_mutex_lock(heap);
    pthread_mutex_lock(&pi);
    pthread_rwlock_wrlock(&rwlock);
    pthread_rwlock_wrlock(&large.rw);
    pthread_create(&never, NULL, nothing, NULL);
    start(initialise);
    while (!is_initialising)
        usleep(1000);
    start(global_thread);
    start(file_thread);
    start(inside_thread);
    start(read_thread);
    start(write_thread);
    start(inrw_thread);
    start(wait_thread);
    start(incond_thread);
    start(sem_thread);
    start(barrier_thread);
    start(once_thread);
    start(heap_thread);
    start(pi_thread);
    start(join_thread);
    start(tls_thread);
    start(signalled_thread);
    start(back_thread);
    while (pthread_mutex_lock(&back_mutex), !is_waiting) {
        pthread_mutex_unlock(&back_mutex);
        usleep(1000);
    }
    pthread_cond_signal(&back_cond); // and keeps the mutex
    pause();
    return 0;
}
