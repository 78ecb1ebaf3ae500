/* Two threads spin on the same CPU for SECONDS and never wait: wall time less CPU time of each is
 * runqueue time (and what the hypervisor or interrupts took). */
#include "workload.h"
#include <sys/resource.h>

struct spinner {
    int cpu;
    int64_t wall_ns, cpu_ns;
    long voluntary, involuntary;
    pid_t tid;
};

static long seconds;
static _Atomic long arrived, finished;

static int64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void *run(void *p)
{
    struct spinner *s = p;
    struct rusage start, end;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(s->cpu, &set);
    check(sched_setaffinity(0, sizeof set, &set), "sched_setaffinity");
    s->tid = gettid();
    arrived++;
    while (arrived < 2)
        ;
    getrusage(RUSAGE_THREAD, &start);
    int64_t wall = now_ns(), cpu = cpu_ns();
    spin(seconds * 1000000);
    s->cpu_ns = cpu_ns() - cpu;
    s->wall_ns = now_ns() - wall;
    getrusage(RUSAGE_THREAD, &end);
    s->voluntary = end.ru_nvcsw - start.ru_nvcsw;
    s->involuntary = end.ru_nivcsw - start.ru_nivcsw;
    finished++;
    return NULL;
}

int main(int argc, char **argv)
{
    struct spinner s[2] = {{.cpu = sched_getcpu()}};
    seconds = arg(argc, argv, 1, 3);
    s[1] = s[0];
    ready();
    spawn(run, &s[0]);
    spawn(run, &s[1]);
    nap(seconds * 1000000);
    wait_until(&finished, 2);
    say("{\"cpu\": %d, \"threads\": [", s[0].cpu);
    for (int i = 0; i < 2; i++)
        say("%s{\"tid\": %d, \"wall_us\": %ld, \"cpu_us\": %ld, \"runqueue_us\": %ld, "
            "\"voluntary_switches\": %ld, \"involuntary_switches\": %ld}",
            i ? ", " : "", s[i].tid, (long)(s[i].wall_ns / 1000), (long)(s[i].cpu_ns / 1000),
            (long)((s[i].wall_ns - s[i].cpu_ns) / 1000), s[i].voluntary, s[i].involuntary);
    say("], \"futex\": {}, \"wakes\": 0, \"errors\": {}}");
    finish();
}
