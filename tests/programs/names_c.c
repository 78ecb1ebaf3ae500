/* Locks of C programs, each in a function of its own: what glibc and musl have. */
#define _GNU_SOURCE
#include "program.h"
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <time.h>

/* Mutexes: of this file, of all files, on the heap, of a thread; with priority inheritance. */
static pthread_mutex_t static_mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_mutex_t global_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t *heap_mutex;
static __thread pthread_mutex_t tls_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t *tls_of_main, *tls_of_asker;
static pthread_mutex_t pi_mutex;

static void take_static(void)
{
    pthread_mutex_lock(&static_mutex);
}

static void give_static(void)
{
    pthread_mutex_unlock(&static_mutex);
}

static void take_global(void)
{
    pthread_mutex_lock(&global_mutex);
}

static void give_global(void)
{
    pthread_mutex_unlock(&global_mutex);
}

static void lock_heap_mutex(void)
{
    pthread_mutex_lock(heap_mutex);
}

static void take_heap(void)
{
    if (!heap_mutex) {
        heap_mutex = malloc(sizeof *heap_mutex);
        pthread_mutex_init(heap_mutex, NULL);
    }
    pthread_mutex_lock(heap_mutex);
}

static void give_heap(void)
{
    pthread_mutex_unlock(heap_mutex);
}

static void take_mine(void)
{
    tls_of_main = &tls_mutex;
    pthread_mutex_lock(tls_of_main);
}

static void lock_mutex_of_main(void)
{
    pthread_mutex_lock(tls_of_main);
}

static void give_mine(void)
{
    pthread_mutex_unlock(tls_of_main);
}

static void lock_pi_mutex(void)
{
    pthread_mutex_lock(&pi_mutex);
}

static void take_pi(void)
{
    static int is_ready;
    if (!is_ready) {
        pthread_mutexattr_t attr;
        pthread_mutexattr_init(&attr);
        is_ready = !pthread_mutexattr_setprotocol(&attr, PTHREAD_PRIO_INHERIT);
        pthread_mutex_init(&pi_mutex, &attr);
    }
    pthread_mutex_lock(&pi_mutex);
}

static void give_pi(void)
{
    pthread_mutex_unlock(&pi_mutex);
}

static void lock_static_mutex(void)
{
    pthread_mutex_lock(&static_mutex);
}

static void lock_global_mutex(void)
{
    pthread_mutex_lock(&global_mutex);
}

/* A thread's own, which another thread has taken. */
static volatile int is_told, is_taken, may_give;

static void hold_askers(void)
{
    until(&is_told, 1);
    pthread_mutex_lock(tls_of_asker);
    is_taken = 1;
    until(&may_give, 1);
    pthread_mutex_unlock(tls_of_asker);
    is_taken = 0;
}

static void have_it_held(void)
{
    may_give = 0;
    in_thread(hold_askers);
}

static void lock_own_mutex(void)
{
    tls_of_asker = &tls_mutex;
    is_told = 1;
    until(&is_taken, 1);
    pthread_mutex_lock(&tls_mutex);
}

static void have_it_given(void)
{
    may_give = 1;
}

static void unlock_own_mutex(void)
{
    pthread_mutex_unlock(&tls_mutex);
    until(&is_taken, 0);
}

/* A lock in the middle of something larger, and in an array. */
static struct {
    char title[200];
    pthread_mutex_t mutex;
    long balance;
} bank = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static void take_bank(void)
{
    pthread_mutex_lock(&bank.mutex);
}

static void lock_bank(void)
{
    pthread_mutex_lock(&bank.mutex);
}

static void give_bank(void)
{
    pthread_mutex_unlock(&bank.mutex);
}

/* A lock that ends a wait by its time limit, and is asked for again. */
static void lock_with_time_limit(void)
{
    struct timespec limit;
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += 10;
    pthread_mutex_timedlock(&static_mutex, &limit);
}

/* Read-write lock. */
static pthread_rwlock_t rwlock = PTHREAD_RWLOCK_INITIALIZER;

static void take_write(void)
{
    pthread_rwlock_wrlock(&rwlock);
}

static void take_read(void)
{
    pthread_rwlock_rdlock(&rwlock);
}

static void read_table(void)
{
    pthread_rwlock_rdlock(&rwlock);
}

static void write_table(void)
{
    pthread_rwlock_wrlock(&rwlock);
}

static void give_rwlock(void)
{
    pthread_rwlock_unlock(&rwlock);
}

/* Condition variable, semaphore, barrier. */
static pthread_mutex_t news_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t news = PTHREAD_COND_INITIALIZER;
static int is_news;

static void wait_for_news(void)
{
    pthread_mutex_lock(&news_mutex);
    while (!is_news)
        pthread_cond_wait(&news, &news_mutex);
    is_news = 0;
    pthread_mutex_unlock(&news_mutex);
}

static void tell_news(void)
{
    pthread_mutex_lock(&news_mutex);
    is_news = 1;
    pthread_mutex_unlock(&news_mutex);
    pthread_cond_signal(&news);
}

static sem_t tokens;

static void take_token(void)
{
    sem_wait(&tokens);
}

static void give_token(void)
{
    sem_post(&tokens);
}

static pthread_barrier_t barrier;

static void make_barrier(void)
{
    static int is_ready;
    if (!is_ready)
        is_ready = !pthread_barrier_init(&barrier, NULL, 2);
}

static void meet(void)
{
    pthread_barrier_wait(&barrier);
}

/* Join and once: in each round another thread is let go, and what it is about made new. */
static volatile int is_running, may_end;
static pthread_t worker;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void *work(void *unused)
{
    until(&may_end, 1);
    return unused;
}

static void start_worker(void)
{
    may_end = 0;
    pthread_create(&worker, NULL, work, NULL);
}

static void join_worker(void)
{
    pthread_join(worker, NULL);
}

static void let_end(void)
{
    may_end = 1;
}

static void prepare(void)
{
    is_running = 1;
    until(&may_end, 1);
}

static void prepare_once(void)
{
    pthread_once(&once, prepare);
    is_running = 0;
}

static void start_preparing(void)
{
    may_end = 0;
    in_thread(prepare_once);
    until(&is_running, 1);
}

static void need_prepared(void)
{
    pthread_once(&once, prepare);
}

static void forget_prepared(void)
{
    until(&is_running, 0);
    once = (pthread_once_t)PTHREAD_ONCE_INIT;
}

static const struct scenario scenarios[] = {
    {"static", take_static, lock_static_mutex, give_static, give_static},
    {"global", take_global, lock_global_mutex, give_global, give_global},
    {"heap", take_heap, lock_heap_mutex, give_heap, give_heap},
    {"member", take_bank, lock_bank, give_bank, give_bank},
    {"timed", take_static, lock_with_time_limit, give_static, give_static},
    {"tls", take_mine, lock_mutex_of_main, give_mine, give_mine},
    {"tls_own", have_it_held, lock_own_mutex, have_it_given, unlock_own_mutex},
    {"pi", take_pi, lock_pi_mutex, give_pi, give_pi},
    {"read", take_write, read_table, give_rwlock, give_rwlock},
    {"write", take_read, write_table, give_rwlock, give_rwlock},
    {"cond", NULL, wait_for_news, tell_news, NULL},
    {"sem", NULL, take_token, give_token, NULL},
    {"barrier", make_barrier, meet, meet, NULL},
    {"join", start_worker, join_worker, let_end, NULL},
    {"once", start_preparing, need_prepared, let_end, forget_prepared},
};

int main(int argc, char **argv)
{
    run_program(argc, argv, scenarios, sizeof scenarios / sizeof *scenarios);
}
