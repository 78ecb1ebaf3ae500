#include "workload.h"
#include <ctype.h>
#include <linux/userfaultfd.h>
#include <stdarg.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>

static char line[1 << 16];
static size_t length;

void die(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    _exit(1);
}

long arg(int argc, char **argv, int index, long otherwise)
{
    if (index >= argc)
        return otherwise;
    char *end;
    long value = strtol(argv[index], &end, 10);
    if (end == argv[index] || *end || value < 0) {
        fprintf(stderr, "argument %d: not a number >= 0: %s\n", index, argv[index]);
        _exit(1);
    }
    return value;
}

void say(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    length += vsnprintf(line + length, sizeof line - length, format, list);
    va_end(list);
    if (length >= sizeof line) {
        errno = ENOBUFS;
        die("say");
    }
}

void publish(void)
{
    if (!length)
        return;
    line[length++] = '\n';
    for (size_t sent = 0; sent < length;)
        sent += check(write(1, line + sent, length - sent), "write stdout");
    length = 0;
}

void finish(void)
{
    char byte;
    publish();
    while (check(read(0, &byte, 1), "read stdin") > 0)
        ;
    _exit(0);
}

int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

int64_t thread_cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

struct before before(void)
{
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    int64_t cpu = thread_cpu_ns();
    return (struct before){now_ns(), cpu, usage.ru_nvcsw, usage.ru_nivcsw};
}

static void raise_to(_Atomic int64_t *max, int64_t value)
{
    int64_t old = *max;
    while (old < value && !atomic_compare_exchange_weak(max, &old, value))
        ;
}

void after(struct waits *w, struct before b)
{
    int64_t ns = now_ns() - b.ns, on_cpu = thread_cpu_ns() - b.cpu_ns;
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    w->waits++;
    if (usage.ru_nvcsw == b.switches)
        return;
    w->blocked++;
    w->sleeps += usage.ru_nvcsw - b.switches;
    w->sum_ns += ns;
    raise_to(&w->max_ns, ns);
    if (usage.ru_nivcsw == b.preemptions && ns > on_cpu) {
        w->least_ns += ns - on_cpu;
        raise_to(&w->max_least_ns, ns - on_cpu);
    }
}

void add_waits(struct waits *sum, const struct waits *w)
{
    sum->waits += w->waits;
    sum->blocked += w->blocked;
    sum->sleeps += w->sleeps;
    sum->sum_ns += w->sum_ns;
    sum->least_ns += w->least_ns;
    raise_to(&sum->max_ns, w->max_ns);
    raise_to(&sum->max_least_ns, w->max_least_ns);
}

/* The second number of schedstat, which is there if the kernel has CONFIG_SCHED_INFO. */
int64_t queued_ns(void)
{
    long long running, queued = 0;
    char text[64] = "";
    int fd = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    check(read(fd, text, sizeof text - 1), "read schedstat");
    close(fd);
    sscanf(text, "%lld %lld", &running, &queued);
    return queued;
}

/* Fault in what measuring needs: a fault can block too. */
static void warm_up(void)
{
    struct waits nobody = {0};
    struct before b = before();
    syscall(-1); /* fails, which writes errno */
    after(&nobody, b);
}

void wait_for_byte(void)
{
    char byte;
    if (check(read(0, &byte, 1), "read stdin") == 0)
        _exit(1); /* the test went away */
}

void ready(void)
{
    const char *comm = getenv("LOCKD_COMM");
    struct timespec moment = {0, 1000000};
    if (comm) {
        nanosleep(&moment,
                  NULL); /* lockd adds up calls until a thread leaves the CPU: these have the old name */
        prctl(PR_SET_NAME, comm);
    }
    warm_up();
    say("ready %d", getpid());
    publish();
    wait_for_byte();
}

static long us(int64_t ns)
{
    return ns / 1000;
}

static void say_least(const struct waits *w)
{
    say("\"least_us\": %ld, \"max_least_us\": %ld", us(w->least_ns), us(w->max_least_ns));
}

void say_futex(const char *kind, const struct waits *w)
{
    say("\"%s\": {\"waits\": %ld, \"blocked\": %ld, \"sleeps\": %ld, \"blocked_us\": %ld, \"max_us\": %ld, ",
        kind, w->waits, w->blocked, w->sleeps, us(w->sum_ns), us(w->max_ns));
    say_least(w);
    say("}");
}

void say_offcpu(const char *state, const char *reason, const struct waits *w)
{
    say("\"state\": \"%s\", \"reason\": \"%s\", \"count\": %ld, \"sum_us\": %ld, \"max_us\": %ld, ", state,
        reason, w->blocked, us(w->sum_ns), us(w->max_ns));
    say_least(w);
}

void say_kernel(const char *lock_type, const struct waits *w)
{
    say("\"%s\": {\"waits\": %ld, \"wait_us\": %ld, \"max_us\": %ld, ", lock_type, w->blocked, us(w->sum_ns),
        us(w->max_ns));
    say_least(w);
    say("}");
}

struct waits naps;

void nap(long us)
{
    struct timespec t = {us / 1000000, us % 1000000 * 1000};
    struct before b = before();
    check(nanosleep(&t, NULL), "nanosleep");
    after(&naps, b);
}

void spin(long us)
{
    for (int64_t end = now_ns() + us * 1000; now_ns() < end;)
        ;
}

void wait_until(_Atomic long *value, long least)
{
    while (*value < least)
        nap(50);
}

/* /proc/TID/syscall is "running", or begins with the number of the call it sleeps in. */
void wait_asleep(pid_t tid, long syscall_nr)
{
    wait_asleep_or(tid, syscall_nr, NULL, 0);
}

void wait_asleep_or(pid_t tid, long syscall_nr, _Atomic long *finished, long value)
{
    char path[64], text[32];
    snprintf(path, sizeof path, "/proc/%d/syscall", tid);
    for (; !finished || *finished < value; nap(50)) {
        int fd = check(open(path, O_RDONLY | O_CLOEXEC), path);
        ssize_t size = check(read(fd, text, sizeof text - 1), path);
        close(fd);
        text[size] = 0;
        if (isdigit(text[0]) && strtol(text, NULL, 10) == syscall_nr)
            return;
    }
}

struct start {
    void *(*run)(void *);
    void *arg;
    _Atomic long tid;
};

static void *started(void *p)
{
    struct start *s = p;
    void *(*run)(void *) = s->run, *arg = s->arg;
    s->tid = gettid(); /* now spawn() returns and *s is gone */
    return run(arg);
}

pid_t spawn(void *(*run)(void *), void *arg)
{
    struct start s = {run, arg, 0};
    pthread_attr_t attr;
    pthread_t thread;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, 256 << 10);
    errno = pthread_create(&thread, &attr, started, &s);
    if (errno)
        die("pthread_create");
    wait_until(&s.tid, 1);
    return s.tid;
}

static void *asker(void *p)
{
    struct handover *h = p;
    for (long i = 1; i <= h->rounds; i++) {
        wait_until(&h->asked, i);
        struct before b = before();
        h->ask(h->lock);
        after(&h->waits, b);
        h->done(h->lock);
        h->finished = i;
    }
    return NULL;
}

void hand_over(struct handover *h)
{
    pid_t tid = spawn(asker, h);
    for (long i = 1; i <= h->rounds; i++) {
        h->take(h->lock);
        h->asked = i;
        wait_asleep(tid, SYS_futex);
        if (h->busy)
            spin(h->hold_us);
        else
            nap(h->hold_us);
        h->give(h->lock);
        wait_until(&h->finished, i);
    }
}

int futex_wait_2(void *word, long timeout_us)
{
    struct timespec t = {timeout_us / 1000000, timeout_us % 1000000 * 1000};
    long result = futex(word, FUTEX_WAIT_PRIVATE, 2, timeout_us < 0 ? NULL : &t, NULL, 0);
    return result < 0 ? errno : 0;
}

void take_ownerless(uint32_t *word)
{
    uint32_t is_free = 0;
    if (__atomic_compare_exchange_n(word, &is_free, 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        return;
    while (__atomic_exchange_n(word, 2, __ATOMIC_SEQ_CST))
        futex_wait_2(word, -1);
}

void give_ownerless(uint32_t *word)
{
    if (__atomic_exchange_n(word, 0, __ATOMIC_SEQ_CST) == 2)
        check(futex(word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0), "futex");
}

int watch_missing_page(void *page, size_t size)
{
    int uffd = syscall(SYS_userfaultfd, O_CLOEXEC);
    if (uffd < 0) {
        perror("userfaultfd");
        exit(MISSING);
    }
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register missing = {.range = {(uintptr_t)page, size}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    check(ioctl(uffd, UFFDIO_API, &api), "UFFDIO_API");
    check(ioctl(uffd, UFFDIO_REGISTER, &missing), "UFFDIO_REGISTER");
    return uffd;
}

void use_processor(bool last)
{
    cpu_set_t may, one;
    check(sched_getaffinity(0, sizeof may, &may), "sched_getaffinity");
    int cpu = last ? CPU_SETSIZE - 1 : 0;
    while (!CPU_ISSET(cpu, &may))
        cpu += last ? -1 : 1;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    check(sched_setaffinity(0, sizeof one, &one), "sched_setaffinity");
}
