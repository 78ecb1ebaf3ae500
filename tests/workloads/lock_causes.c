/* One thread holds a lock of glibc in turns of 5 to 40 ms, with pauses of 300 us, while other threads ask for
 * it. What it does meanwhile is CAUSE. The program knows for how long threads waited while it did that, and
 * while it had or wanted a processor. The protocol is that of tests/programs/holders.c: a line after a second
 * in which lockd gets to know the lock, then a byte, then the time that the truth is about. The holder is the
 * main thread.
 *
 * A clock tells how long a thread computes, for it may be preempted then. Of any other time, what the holder
 * spent on a processor or on the run queue is no part of CAUSE, but of "running". */
#include "workload.h"
#include <poll.h>
#include <sys/socket.h>

enum { KNOWN_SECONDS = 1, PAUSE_US = 300, FROM_US = 5000, TO_US = 40000, SPIN_US = 1000, BLOCK = 2 << 20 };
enum cause { RUNNING, SLEEP, SOCKET, POLL, LOCK, DISK, CAUSES };

/* A phase in which the holder did one thing, with the lock held. */
struct phase {
    int64_t begin, end;
    int64_t on_cpu_ns, queued_ns; /* parts of the phase, as the kernel counts them */
    int64_t waited_ns; /* by all threads that asked for the lock meanwhile */
    enum cause cause;
};
/* A wait of a thread for the lock. */
struct span {
    int64_t begin, end;
};
/* What the clocks of the holder say at a moment. */
struct moment {
    struct before before;
    int64_t queued_ns;
};

#define MOST (1 << 16)
static struct phase phases[MOST];
static struct span waits[MOST];
static _Atomic long passed, waited_often, held_often, paused;

static pthread_mutex_t normal = PTHREAD_MUTEX_INITIALIZER, recursive, pi;
static pthread_rwlock_t rwlock = PTHREAD_RWLOCK_INITIALIZER;
static pthread_mutex_t *mutex; /* NULL: the lock is the rwlock */
static pthread_mutex_t inner = PTHREAD_MUTEX_INITIALIZER; /* the lock for which the holder waits */
static int pair[2], file = -1; /* the helper has the other end */
static char *block;

static void take(void)
{
    int64_t begin = now_ns();
    errno = mutex ? pthread_mutex_lock(mutex) : pthread_rwlock_wrlock(&rwlock);
    if (errno)
        die("lock");
    int64_t end = now_ns();
    long at = waited_often++;
    if (at < MOST)
        waits[at] = (struct span){begin, end};
}

static void give(void)
{
    errno = mutex ? pthread_mutex_unlock(mutex) : pthread_rwlock_unlock(&rwlock);
    if (errno)
        die("unlock");
}

static void *ask(void *unused)
{
    for (;; nap(PAUSE_US))
        if (!paused) {
            take();
            give();
        }
    return unused;
}

/* The holder tells its helper how long to wait. */
static void tell_helper(long us)
{
    check(write(pair[0], &us, sizeof us), "write socket");
}

static long told(void)
{
    long us;
    check(read(pair[1], &us, sizeof us), "read socket");
    return us;
}

static void answer(void)
{
    check(write(pair[1], "x", 1), "write socket");
}

static void read_answer(void)
{
    char byte;
    check(read(pair[0], &byte, 1), "read socket");
}

static void *answer_later(void *unused)
{
    for (;;) {
        nap(told());
        answer();
    }
    return unused;
}

static void *hold_inner(void *unused)
{
    for (;;) {
        told();
        pthread_mutex_lock(&inner);
        answer();
        nap(told());
        pthread_mutex_unlock(&inner);
    }
    return unused;
}

static void read_socket(long us)
{
    tell_helper(us);
    read_answer();
}

static void poll_nothing(long us)
{
    struct timespec time = {us / 1000000, us % 1000000 * 1000};
    check(ppoll(NULL, 0, &time, NULL), "ppoll");
}

/* Before the turn: the helper takes `inner`, to have it when the holder asks for it. */
static void let_inner_be_held(void)
{
    tell_helper(0);
    read_answer();
}

static void lock_inner(long us)
{
    tell_helper(us);
    pthread_mutex_lock(&inner);
    pthread_mutex_unlock(&inner);
}

/* Read past the page cache. */
static void read_disk(long us)
{
    for (int64_t end = now_ns() + us * 1000; now_ns() < end;)
        if (pread(file, block, BLOCK, 0) != BLOCK)
            die("read disk");
}

static const struct {
    const char *name;
    void (*pass)(long us), (*prepare)(void);
    void *(*help)(void *);
} causes[] = {
    [RUNNING] = {"running", .pass = spin},
    [SLEEP] = {"sleep", .pass = nap},
    [SOCKET] = {"socket", .pass = read_socket, .help = answer_later},
    [POLL] = {"poll", .pass = poll_nothing},
    [LOCK] = {"lock", .pass = lock_inner, .prepare = let_inner_be_held, .help = hold_inner},
    [DISK] = {"disk", .pass = read_disk},
};

static long random_us(long from, long to)
{
    static uint32_t state = 1;
    state = state * 1664525 + 1013904223;
    return from + (long)((state >> 8) % (to - from + 1));
}

static struct moment moment(void)
{
    int64_t queued = queued_ns();
    return (struct moment){before(), queued};
}

static void note(enum cause cause, struct moment from, struct moment to)
{
    long at = passed++;
    if (at < MOST)
        phases[at] = (struct phase){
            .begin = from.before.ns,
            .end = to.before.ns,
            .on_cpu_ns = to.before.cpu_ns - from.before.cpu_ns,
            .queued_ns = to.queued_ns - from.queued_ns,
            .cause = cause,
        };
}

/* One thing for the whole time or, for CAUSES, a mixture: as the dice say, it computes for a quarter of the
 * time and sleeps for the rest. So what it does has nothing to do with how many threads wait. Where it only
 * computes it does so in short phases: in some of them it has no processor. */
static void hold(enum cause cause)
{
    long us = random_us(FROM_US, TO_US);
    bool is_mixed = cause == CAUSES;
    if (!is_mixed && causes[cause].prepare)
        causes[cause].prepare();
    take();
    struct moment from = moment(), to;
    int64_t end = from.before.ns + us * 1000;
    do {
        enum cause now = !is_mixed ? cause : random_us(0, 3) ? SLEEP : RUNNING;
        causes[now].pass(is_mixed ? random_us(1000, 8000) : cause == RUNNING ? SPIN_US : us);
        to = moment();
        note(now, from, to);
        from = to;
    } while ((is_mixed || cause == RUNNING) && to.before.ns < end && passed < MOST);
    give();
    held_often++;
}

static void hold_for(long seconds, enum cause cause)
{
    passed = waited_often = held_often = 0;
    paused = 0;
    int64_t end = now_ns() + seconds * 1000000000;
    while (now_ns() < end && passed < MOST && waited_often < MOST) {
        hold(cause);
        nap(PAUSE_US);
    }
    paused = 1;
    nap(200000); /* until nobody asks any more */
}

/* Phases are in order and do not overlap. */
static void add_wait(struct span wait)
{
    long low = 0, high = passed; /* the first phase that ends after the wait begins */
    while (low < high) {
        long middle = (low + high) / 2;
        if (phases[middle].end <= wait.begin)
            low = middle + 1;
        else
            high = middle;
    }
    for (; low < passed && phases[low].begin < wait.end; low++) {
        int64_t from = phases[low].begin > wait.begin ? phases[low].begin : wait.begin;
        int64_t to = phases[low].end < wait.end ? phases[low].end : wait.end;
        phases[low].waited_ns += to - from;
    }
}

/* How long threads waited in a part of a phase, such as the part that the holder was on a processor. */
static double waited_us(const struct phase *phase, int64_t part_ns)
{
    int64_t length = phase->end - phase->begin;
    return phase->waited_ns / 1e3 * (part_ns < length ? (double)part_ns / length : 1);
}

static void tell(enum cause cause)
{
    double by_cause[CAUSES] = {0}, queued = 0;
    int64_t waited = 0, held = 0, held_queued = 0;
    for (long w = 0; w < waited_often; w++) {
        waited += waits[w].end - waits[w].begin;
        add_wait(waits[w]);
    }
    for (struct phase *p = phases; p < phases + passed; p++) {
        int64_t length = p->end - p->begin;
        double running = waited_us(p, p->cause == RUNNING ? length : p->on_cpu_ns + p->queued_ns);
        by_cause[RUNNING] += running;
        by_cause[p->cause] += waited_us(p, length) - running;
        /* A thread that `cpu.max` stops is not always on a run queue: the kernel misses some of these times.
         */
        int64_t without_cpu = p->cause == RUNNING ? length - p->on_cpu_ns : p->queued_ns;
        queued += waited_us(p, without_cpu);
        held += length;
        held_queued += without_cpu;
    }
    say("{\"waited_us\": %ld, \"holds\": %ld, \"held_us\": %ld, \"queued_us\": %ld, ", (long)(waited / 1000),
        held_often, (long)(held / 1000), (long)(held_queued / 1000));
    say("\"runqueue_us\": %ld, \"causes\": {", (long)queued);
    const char *comma = "";
    for (int i = 0; i < CAUSES; i++) {
        if (i != RUNNING && i != (int)cause && !(cause == CAUSES && i == SLEEP))
            continue;
        say("%s\"%s\": %ld", comma, causes[i].name, (long)by_cause[i]);
        comma = ", ";
    }
    say("}}");
}

static void set_up_lock(const char *name)
{
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&recursive, &attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_NORMAL);
    pthread_mutexattr_setprotocol(&attributes, PTHREAD_PRIO_INHERIT);
    pthread_mutex_init(&pi, &attributes);
    if (!strcmp(name, "normal"))
        mutex = &normal;
    else if (!strcmp(name, "recursive"))
        mutex = &recursive;
    else if (!strcmp(name, "pi"))
        mutex = &pi;
    else if (strcmp(name, "rwlock")) {
        fprintf(stderr, "no lock %s\n", name);
        exit(1);
    }
}

static enum cause cause_of(const char *name)
{
    int i = 0;
    while (i < CAUSES && strcmp(name, causes[i].name))
        i++;
    if (i == CAUSES && strcmp(name, "mixed")) {
        fprintf(stderr, "no cause %s\n", name);
        exit(1);
    }
    return i;
}

/* Exits with 77 where DIR has no O_DIRECT, as in memory. */
static void set_up_file(const char *dir)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/lock_causes.%d", dir, getpid());
    file = open(path, O_RDWR | O_CREAT | O_DIRECT | O_CLOEXEC, 0600);
    if (file < 0 && errno != EINVAL)
        die(path);
    unlink(path);
    if (file < 0)
        exit(MISSING);
    errno = posix_memalign((void **)&block, 4096, BLOCK);
    if (errno)
        die("posix_memalign");
    memset(block, 'x', BLOCK);
    if (pwrite(file, block, BLOCK, 0) != BLOCK)
        die("write disk");
    check(fsync(file), "fsync");
}

int main(int argc, char **argv)
{
    enum cause cause = cause_of(argc > 2 ? argv[2] : "mixed");
    long askers = arg(argc, argv, 3, 3), seconds = arg(argc, argv, 4, 10);
    set_up_lock(argc > 1 ? argv[1] : "normal");
    if (cause == DISK)
        set_up_file(argc > 5 ? argv[5] : ".");
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), "socketpair");
    ready();
    if (cause != CAUSES && causes[cause].help)
        spawn(causes[cause].help, NULL);
    for (long i = 0; i < askers; i++)
        spawn(ask, NULL);
    hold_for(KNOWN_SECONDS, cause);
    say("{}");
    publish();
    wait_for_byte();
    hold_for(seconds, cause);
    if (passed > MOST || waited_often > MOST)
        die("more spans than there is room for");
    tell(cause);
    finish();
}
