/* Calls of mutex functions whose number is known, and how long they took: mutexes SCENARIO...
 * The protocol is that of tests/workloads/README.md; standard C and POSIX alone, for any C library.
 *
 * The truth is by mutex: `taken` calls that took it and `wait_ns` that these took, `held` times that it was
 * held and `hold_ns` in sum, each measured inside what lockd measures (holds) or around it (waits). */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

#define OUT_OF_LINE __attribute__((noinline, noclone))
#define SOME 50

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void nap(long us)
{
    struct timespec t = {us / 1000000, us % 1000000 * 1000};
    while (nanosleep(&t, &t))
        ;
}

static struct timespec after(clockid_t clock, long us)
{
    struct timespec t;
    clock_gettime(clock, &t);
    t.tv_nsec += us * 1000;
    t.tv_sec += t.tv_nsec / 1000000000;
    t.tv_nsec %= 1000000000;
    return t;
}

struct truth {
    _Atomic long taken, held, failed;
    _Atomic int64_t wait_ns, hold_ns;
    int64_t since;
};

/* Each has a mutex of its own, `SCENARIO_guard`, and its truth. */
/* clang-format off */
#define SCENARIOS(X) \
    X(holds) X(contention) X(trying) X(timed) X(condition_waits) X(recursive) X(robust) X(errors) \
    X(given_by_another) X(c11) X(handler) X(cancelled) X(forked) X(often) X(ongoing)
/* clang-format on */
#define DEFINE(name)                                                                                         \
    pthread_mutex_t name##_guard = PTHREAD_MUTEX_INITIALIZER;                                                \
    static struct truth of_##name;                                                                           \
    static void name(void);
SCENARIOS(DEFINE)

static const struct scenario {
    const char *name;
    void (*run)(void);
    pthread_mutex_t *mutex;
    struct truth *truth;
} scenarios[] = {
#define ENTRY(name) {#name, name, &name##_guard, &of_##name},
    SCENARIOS(ENTRY)};

static pthread_mutex_t *guard; /* of the scenario that runs */
static struct truth *of_guard;
static pthread_mutex_t other = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t cond = PTHREAD_COND_INITIALIZER;
static mtx_t plain;
static cnd_t condition;
static struct truth of_other, of_plain;
static _Atomic int step;

static void reach(int which)
{
    while (step < which)
        nap(200);
}

static void begun(struct truth *t)
{
    t->since = now();
}

static void ended(struct truth *t)
{
    t->hold_ns += now() - t->since;
    t->held++;
}

/* Notes a call that took from `since` to now. */
static int noted(struct truth *t, int64_t since, int error, int is_first)
{
    if (error && error != EOWNERDEAD) {
        t->failed++;
        return error;
    }
    t->wait_ns += now() - since;
    t->taken++;
    if (is_first)
        begun(t);
    return error;
}

OUT_OF_LINE static int take(pthread_mutex_t *m, struct truth *t)
{
    int64_t since = now();
    int error = pthread_mutex_lock(m);
    return noted(t, since, error, 1);
}

OUT_OF_LINE static void give(pthread_mutex_t *m, struct truth *t)
{
    ended(t);
    pthread_mutex_unlock(m);
}

static pthread_t start(void *(*run)(void *))
{
    pthread_t t;
    if (pthread_create(&t, NULL, run, NULL))
        exit(1);
    return t;
}

/* Held SOME times, for 2 ms each, by a thread that is new. */
OUT_OF_LINE static void *hold_often(void *arg)
{
    prctl(PR_SET_NAME, "holder");
    for (int i = 0; i < SOME; i++) {
        take(guard, of_guard);
        nap(2000);
        give(guard, of_guard);
    }
    return arg;
}

static void holds(void)
{
    pthread_join(start(hold_often), NULL);
}

/* SOME waits, of 3 ms or more each. */
static void *waits_often(void *arg)
{
    prctl(PR_SET_NAME, "waiter");
    for (int i = 0; i < SOME; i++) {
        reach(2 * i + 1);
        take(guard, of_guard);
        give(guard, of_guard);
        step = 2 * i + 2;
    }
    return arg;
}

static void contention(void)
{
    pthread_t waiter = start(waits_often);
    for (int i = 0; i < SOME; i++) {
        take(guard, of_guard);
        step = 2 * i + 1;
        nap(5000);
        give(guard, of_guard);
        reach(2 * i + 2);
    }
    pthread_join(waiter, NULL);
}

static void *tries(void *arg)
{
    for (int i = 0; i < SOME; i++) {
        int64_t since = now();
        noted(of_guard, since, pthread_mutex_trylock(guard), 1);
    }
    return arg;
}

static void trying(void)
{
    take(guard, of_guard);
    pthread_join(start(tries), NULL);
    give(guard, of_guard);
    for (int i = 0; i < SOME; i++) {
        int64_t since = now();
        if (!noted(of_guard, since, pthread_mutex_trylock(guard), 1))
            give(guard, of_guard);
    }
}

static void *takes_in_time(void *arg)
{
    for (int i = 0; i < 4; i++) {
        struct timespec until = after(CLOCK_REALTIME, i < 3 ? 10000 : 10000000);
        int64_t since = now();
        if (!noted(of_guard, since, pthread_mutex_timedlock(guard, &until), 1))
            give(guard, of_guard);
        step = i + 1;
    }
#ifdef __GLIBC__
    for (int i = 0; i < 2; i++) {
        if (i == 0)
            reach(5);
        struct timespec until = after(CLOCK_MONOTONIC, i ? 10000000 : 10000);
        int64_t since = now();
        if (!noted(of_guard, since, pthread_mutex_clocklock(guard, CLOCK_MONOTONIC, &until), 1))
            give(guard, of_guard);
        step = 6 + i;
    }
#endif
    return arg;
}

static void timed(void)
{
    take(guard, of_guard);
    pthread_t t = start(takes_in_time);
    reach(3);
    nap(20000);
    give(guard, of_guard);
    reach(4);
#ifdef __GLIBC__
    take(guard, of_guard);
    step = 5;
    reach(6);
    nap(20000);
    give(guard, of_guard);
#endif
    pthread_join(t, NULL);
}

/* A wait for a condition ends a hold, and begins another. */
static void *waits_for_condition(void *arg)
{
    take(guard, of_guard);
    for (int i = 0; i < 10; i++) {
        struct timespec until = after(CLOCK_REALTIME, 20000);
        nap(1000);
        ended(of_guard);
        if (i % 2)
            pthread_cond_timedwait(&cond, guard, &until);
        else {
            step++;
            pthread_cond_wait(&cond, guard);
        }
        begun(of_guard);
    }
    give(guard, of_guard);
    return arg;
}

static void condition_waits(void)
{
    pthread_t t = start(waits_for_condition);
    for (int i = 1; i <= 5; i++) {
        reach(i);
        nap(20000);
        take(guard, of_guard);
        pthread_cond_signal(&cond);
        give(guard, of_guard);
    }
    pthread_join(t, NULL);
}

static void make(int type, int robust)
{
    pthread_mutexattr_t a;
    pthread_mutexattr_init(&a);
    pthread_mutexattr_settype(&a, type);
    pthread_mutexattr_setrobust(&a, robust);
    pthread_mutex_init(guard, &a);
}

static void recursive(void)
{
    make(PTHREAD_MUTEX_RECURSIVE, PTHREAD_MUTEX_STALLED);
    for (int i = 0; i < SOME; i++) {
        for (int depth = 0; depth < 3; depth++) {
            int64_t since = now();
            noted(of_guard, since, pthread_mutex_lock(guard), depth == 0);
        }
        nap(1000);
        pthread_mutex_unlock(guard);
        pthread_mutex_unlock(guard);
        give(guard, of_guard);
    }
}

static void *takes_and_ends(void *arg)
{
    take(guard, of_guard);
    nap(10000);
    ended(of_guard);
    return arg;
}

static void robust(void)
{
    make(PTHREAD_MUTEX_NORMAL, PTHREAD_MUTEX_ROBUST);
    for (int i = 0; i < 5; i++) {
        pthread_join(start(takes_and_ends), NULL);
        nap(10000);
        if (take(guard, of_guard) == EOWNERDEAD)
            pthread_mutex_consistent(guard);
        nap(5000);
        give(guard, of_guard);
    }
}

static void *takes_wrongly(void *arg)
{
    pthread_mutex_unlock(guard); /* EPERM: the other's hold goes on */
    return arg;
}

static void errors(void)
{
    make(PTHREAD_MUTEX_ERRORCHECK, PTHREAD_MUTEX_STALLED);
    take(guard, of_guard);
    noted(of_guard, 0, pthread_mutex_lock(guard), 1); /* EDEADLK */
    nap(5000);
    pthread_join(start(takes_wrongly), NULL);
    nap(5000);
    give(guard, of_guard);
}

/* Not what POSIX allows, and done: it works for a mutex of the default sort. */
static void *gives_for_another(void *arg)
{
    give(guard, of_guard);
    return arg;
}

static void given_by_another(void)
{
    for (int i = 0; i < 5; i++) {
        take(guard, of_guard);
        nap(5000);
        pthread_join(start(gives_for_another), NULL);
        nap(5000);
    }
}

static int take_c11(int (*call)(mtx_t *))
{
    int64_t since = now();
    return noted(&of_plain, since, call(&plain) == thrd_success ? 0 : EBUSY, 1);
}

static int timed_c11(mtx_t *m)
{
    struct timespec until = after(CLOCK_REALTIME, 10000);
    return mtx_timedlock(m, &until);
}

static void *fails_c11(void *arg)
{
    for (int i = 0; i < SOME; i++)
        take_c11(mtx_trylock);
    take_c11(timed_c11);
    return arg;
}

static void c11(void)
{
    mtx_init(&plain, mtx_timed);
    cnd_init(&condition);
    for (int i = 0; i < SOME; i++) {
        take_c11(mtx_lock);
        nap(500);
        ended(&of_plain);
        mtx_unlock(&plain);
    }
    take_c11(mtx_trylock);
    pthread_join(start(fails_c11), NULL);
    struct timespec until = after(CLOCK_REALTIME, 10000);
    ended(&of_plain);
    cnd_timedwait(&condition, &plain, &until);
    begun(&of_plain);
    nap(2000);
    ended(&of_plain);
    mtx_unlock(&plain);
}

/* A signal's handler takes another mutex while its thread waits for a condition. */
static void in_handler(int number)
{
    (void)number;
    take(&other, &of_other);
    nap(2000);
    give(&other, &of_other);
    step++;
}

static void *is_interrupted(void *arg)
{
    take(guard, of_guard);
    step = 1;
    ended(of_guard);
    while (step < 6)
        pthread_cond_wait(&cond, guard);
    begun(of_guard);
    nap(2000);
    give(guard, of_guard);
    return arg;
}

static void handler(void)
{
    struct sigaction action = {.sa_handler = in_handler};
    sigaction(SIGUSR1, &action, NULL);
    pthread_t t = start(is_interrupted);
    reach(1);
    for (int i = 0; i < 5; i++) {
        nap(5000);
        pthread_kill(t, SIGUSR1);
        reach(2 + i);
    }
    take(guard, of_guard);
    pthread_cond_signal(&cond);
    give(guard, of_guard);
    pthread_join(t, NULL);
}

/* A thread that waits for a condition is cancelled: what is to run as it ends does, the mutex is free. */
static void gives_at_end(pthread_mutex_t **m)
{
    pthread_mutex_unlock(*m);
}

static void *is_cancelled(void *arg)
{
    pthread_mutex_t *m __attribute__((cleanup(gives_at_end))) = guard;
    take(m, of_guard);
    ended(of_guard);
    step = 1;
    for (;;)
        pthread_cond_wait(&cond, m);
    return arg;
}

static void cancelled(void)
{
    pthread_t t = start(is_cancelled);
    reach(1);
    nap(20000);
    pthread_cancel(t);
    pthread_join(t, NULL);
    int64_t since = now();
    if (!noted(of_guard, since, pthread_mutex_trylock(guard), 1))
        give(guard, of_guard);
}

/* What goes on at the end: `guard` is held by the main thread and two wait for it, `other` was taken by a
 * thread that has ended. */
static void *waits_for_ever(void *arg)
{
    prctl(PR_SET_NAME, "waiter");
    step++;
    pthread_mutex_lock(guard);
    return arg;
}

static void *takes_other(void *arg)
{
    prctl(PR_SET_NAME, "gone");
    pthread_mutex_lock(&other);
    return arg;
}

static void ongoing(void)
{
    pthread_mutex_lock(guard);
    start(waits_for_ever);
    start(waits_for_ever);
    pthread_join(start(takes_other), NULL);
    reach(2);
    nap(100000);
}

/* A child gives back its copy. */
static void forked(void)
{
    take(guard, of_guard);
    nap(2000);
    pid_t child = fork();
    if (!child) {
        pthread_mutex_unlock(guard);
        for (int i = 0; i < SOME; i++) {
            pthread_mutex_lock(guard);
            pthread_mutex_unlock(guard);
        }
        _exit(0);
    }
    waitpid(child, NULL, 0);
    nap(2000);
    give(guard, of_guard);
}

/* As fast as it goes. */
static void often(void)
{
    for (int i = 0; i < 20000; i++) {
        take(guard, of_guard);
        give(guard, of_guard);
    }
}

static void tell(const char *name, const struct truth *t, const char *end)
{
    printf("\"%s\": {\"taken\": %ld, \"held\": %ld, \"failed\": %ld, \"wait_ns\": %lld, \"hold_ns\": %lld}%s",
           name, (long)t->taken, (long)t->held, (long)t->failed, (long long)t->wait_ns, (long long)t->hold_ns,
           end);
}

static const struct scenario *scenario_of(const char *name)
{
    for (size_t i = 0; i < sizeof(scenarios) / sizeof(*scenarios); i++)
        if (!strcmp(name, scenarios[i].name))
            return &scenarios[i];
    exit(1);
}

int main(int argc, char **argv)
{
    char byte;
    if (getenv("LOCKD_COMM"))
        prctl(PR_SET_NAME, getenv("LOCKD_COMM"));
    printf("ready %d\n", getpid());
    fflush(stdout);
    if (read(0, &byte, 1) != 1)
        return 1;
    for (int i = 1; i < argc; i++) {
        const struct scenario *one = scenario_of(argv[i]);
        step = 0;
        guard = one->mutex;
        of_guard = one->truth;
        one->run();
    }
    printf("{");
    for (int i = 1; i < argc; i++) {
        char name[64];
        snprintf(name, sizeof(name), "%s_guard", argv[i]);
        tell(name, scenario_of(argv[i])->truth, ", ");
    }
    tell("other", &of_other, ", ");
    tell("plain", &of_plain, "}\n");
    fflush(stdout);
    while (read(0, &byte, 1) == 1)
        ;
    _exit(0);
}
