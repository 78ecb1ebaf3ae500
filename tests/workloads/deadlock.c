/* Threads (or processes) that wait for each other for ever, or that only seem to. MODE says how:
 * 0 a ring of N mutexes      each thread holds one and wants the next
 * 1 mutex and rwlock         one has an rwlock for writing and wants a mutex, the other wants to read
 * 2 the same                 but the other wants to write
 * 3 mutex and PI mutex       the kernel, which refuses rings of PI mutexes, does not see this one
 * 4 itself                   a thread wants the mutex that it holds
 * 5 recursive mutexes        a ring of N, each taken twice
 * 6 two processes            a ring of two process-shared mutexes
 * 7 robust mutexes           a ring of N
 * 8 a ring of N PI mutexes   the kernel refuses it; glibc has the last one wait for ever
 * 9 none, for SECONDS        everything that looks like it and is none (see live())
 * 10 a mutex and a join      one joins the other, which wants the mutex that the first holds
 * In all but 9, VICTIMS more threads want the first lock. */
#include "workload.h"
#include <sys/prctl.h>

enum { RING, READER, WRITER, PI, SELF, RECURSIVE, PROCESSES, ROBUST, PI_RING, LIVE, JOIN };
#define MOST 16

static struct shared {
    pthread_mutex_t mutexes[MOST];
    pthread_rwlock_t rwlock;
    _Atomic long holding, go, formed, tids[MOST];
    _Atomic int64_t formed_ns;
} *shared;
pthread_mutex_t deadlock_mutexes[MOST];
static long mode, n, victims;
static pthread_t threads[MOST];

static void init(pthread_mutex_t *mutex, int type, bool pi, bool process_shared, bool robust)
{
    pthread_mutexattr_t attr;
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_settype(&attr, type);
    pthread_mutexattr_setprotocol(&attr, pi ? PTHREAD_PRIO_INHERIT : PTHREAD_PRIO_NONE);
    pthread_mutexattr_setpshared(&attr, process_shared ? PTHREAD_PROCESS_SHARED : PTHREAD_PROCESS_PRIVATE);
    pthread_mutexattr_setrobust(&attr, robust ? PTHREAD_MUTEX_ROBUST : PTHREAD_MUTEX_STALLED);
    errno = pthread_mutex_init(mutex, &attr);
    if (errno)
        die("pthread_mutex_init");
}

static pthread_mutex_t *mutex(long i)
{
    return mode == PROCESSES ? &shared->mutexes[i] : &deadlock_mutexes[i];
}

/* What each thread takes first, and what it waits for. */
static void take_first(long i)
{
    if (i == 0 && (mode == READER || mode == WRITER))
        pthread_rwlock_wrlock(&shared->rwlock);
    else
        pthread_mutex_lock(mutex(i));
    if (mode == RECURSIVE)
        pthread_mutex_lock(mutex(i));
}

static __attribute__((noinline)) void take_second(long i)
{
    if (i == n - 1 && mode == READER)
        pthread_rwlock_rdlock(&shared->rwlock);
    else if (i == n - 1 && mode == WRITER)
        pthread_rwlock_wrlock(&shared->rwlock);
    else if (i == 0 && mode == JOIN)
        pthread_join(threads[1], NULL);
    else
        pthread_mutex_lock(mutex((i + 1) % n));
}

static void *member(void *number)
{
    long i = (long)number;
    threads[i] = pthread_self();
    shared->tids[i] = gettid();
    take_first(i);
    shared->holding++;
    wait_until(&shared->go, i + 1);
    shared->formed_ns = now_ns();
    shared->formed = i + 1;
    take_second(i);
    return NULL;
}

static void *victim(void *unused)
{
    if (mode == READER || mode == WRITER)
        pthread_rwlock_rdlock(&shared->rwlock);
    else
        pthread_mutex_lock(mutex(0));
    return unused;
}

static void start(long i)
{
    if (mode != PROCESSES) {
        spawn(member, (void *)i);
    } else if (check(fork(), "fork") == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        member((void *)i);
    }
}

/* The threads ask one after another, each when the one before is asleep. The last one closes the ring. */
static void deadlock(void)
{
    for (long i = 0; i < MOST; i++)
        init(mutex(i), mode == RECURSIVE ? PTHREAD_MUTEX_RECURSIVE : PTHREAD_MUTEX_NORMAL,
             mode == PI_RING || (mode == PI && i == 0), mode == PROCESSES, mode == ROBUST);
    pthread_rwlock_init(&shared->rwlock, NULL);
    for (long i = 0; i < n; i++)
        start(i);
    wait_until(&shared->holding, n);
    for (long i = 0; i < n; i++) {
        shared->go = i + 1;
        wait_until(&shared->formed, i + 1);
        wait_asleep(shared->tids[i], SYS_futex);
    }
    for (long i = 0; i < victims; i++)
        wait_asleep(spawn(victim, NULL), SYS_futex);
    say("{\"formed_ns\": %lld, \"tids\": [", (long long)shared->formed_ns);
    for (long i = 0; i < n; i++)
        say("%s%ld", i ? ", " : "", shared->tids[i]);
    say("], \"mutexes\": [");
    for (long i = 0; i < n; i++)
        say("%s\"%p\"", i ? ", " : "", (void *)mutex(i));
    say("]}");
}

/* Live (MODE 9): waits as long as in a deadlock, in chains and in circles of other things than locks. */
static _Atomic bool over;
static _Atomic long waits;
static pthread_rwlock_t table = PTHREAD_RWLOCK_INITIALIZER;
static pthread_mutex_t stages[4], hot[4], pi_mutex;

/* Takes locks always in the same order, with much contention. */
static void *nested(void *unused)
{
    while (!over) {
        for (int i = 0; i < 4; i++)
            pthread_mutex_lock(&hot[i]);
        waits++;
        for (int i = 4; i--;)
            pthread_mutex_unlock(&hot[i]);
    }
    return unused;
}

/* Each takes a lock and then the next one, and holds both for 1.3 s: long chains that have an end. */
static void *stage(void *number)
{
    long i = (long)number;
    while (!over) {
        pthread_mutex_lock(&stages[i]);
        if (i < 3)
            pthread_mutex_lock(&stages[i + 1]);
        nap(1300000);
        waits++;
        if (i < 3)
            pthread_mutex_unlock(&stages[i + 1]);
        pthread_mutex_unlock(&stages[i]);
    }
    return NULL;
}

/* Two threads that lock in opposite orders and give up: no ring lasts. */
static void *backs_off(void *number)
{
    static pthread_mutex_t two[2] = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER};
    long i = (long)number;
    while (!over) {
        struct timespec until;
        pthread_mutex_lock(&two[i]);
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 300000000 + 100000000 * i;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        if (pthread_mutex_timedlock(&two[1 - i], &until) == 0)
            pthread_mutex_unlock(&two[1 - i]);
        waits++;
        pthread_mutex_unlock(&two[i]);
        nap(1000 * (i + 1));
    }
    return NULL;
}

static void *reads(void *unused)
{
    while (!over) {
        pthread_rwlock_rdlock(&table);
        pthread_mutex_lock(&hot[3]);
        waits++;
        pthread_mutex_unlock(&hot[3]);
        pthread_rwlock_unlock(&table);
    }
    return unused;
}

static void *writes(void *unused)
{
    while (!over) {
        pthread_rwlock_wrlock(&table);
        pthread_mutex_lock(&pi_mutex);
        nap(waits++ % 16 ? 1000 : 1200000);
        pthread_mutex_unlock(&pi_mutex);
        pthread_rwlock_unlock(&table);
        nap(1000);
    }
    return unused;
}

static void *wants_pi(void *unused)
{
    while (!over) {
        pthread_mutex_lock(&pi_mutex);
        waits++;
        pthread_mutex_unlock(&pi_mutex);
    }
    return unused;
}

static void live(long seconds)
{
    for (int i = 0; i < 4; i++) {
        init(&stages[i], PTHREAD_MUTEX_NORMAL, false, false, false);
        init(&hot[i], i % 2 ? PTHREAD_MUTEX_ERRORCHECK : PTHREAD_MUTEX_NORMAL, false, false, false);
    }
    init(&pi_mutex, PTHREAD_MUTEX_NORMAL, true, false, false);
    for (int i = 0; i < 4; i++) {
        spawn(nested, NULL);
        spawn(stage, (void *)(long)i);
        spawn(stage, (void *)(long)i);
        spawn(reads, NULL);
    }
    for (int i = 0; i < 2; i++) {
        spawn(backs_off, (void *)(long)i);
        spawn(writes, NULL);
        spawn(wants_pi, NULL);
    }
    nap(seconds * 1000000);
    over = true;
    say("{\"waits\": %ld}", waits);
}

int main(int argc, char **argv)
{
    mode = arg(argc, argv, 1, RING);
    n = arg(argc, argv, 2, 2);
    victims = arg(argc, argv, 3, 0);
    if (mode == SELF)
        n = 1;
    if (n < 1 || (mode != LIVE && n > MOST)) {
        errno = EINVAL;
        die("N");
    }
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        die("mmap");
    ready();
    if (mode == LIVE)
        live(n);
    else
        deadlock();
    finish();
}
