#include "holders.h"
#include "workload.h"

static const char *const names[] = {"short", "some", "long"};
#define KNOWN_SECONDS 1 /* after which lockd knows the lock, and what kind it is of */
static const long means_us[] = {2000, 8000, 30000};

/* When a thread held the lock, or waited for it. */
struct span {
    int64_t begin, end;
    int which;
};
#define MOST (1 << 18)
static struct span holds[MOST], waits[MOST];
static _Atomic long held_often, waited_often, paused, stopped;
static _Thread_local int64_t asked; /* when this thread asked for the lock */
static _Thread_local int64_t awake; /* the time for which it had been awake then: see time_awake() */
static const struct held_lock *lock;

static long random_us(long mean) /* from half of the mean to one and a half */
{
    static uint32_t state = 1;
    state = state * 1664525 + 1013904223;
    return mean / 2 + (long)((state >> 8) % mean);
}

/* Return for how long this thread has run or waited for a processor, in ns. Many locks spin, and call
 * sched_yield(), before their threads sleep. No holder is charged for that time. */
static int64_t time_awake(void)
{
    return thread_cpu_ns() + queued_ns();
}

void held(int which)
{
    int64_t begin = now_ns();
    if (which == HOLDERS) {
        int64_t asleep = asked + time_awake() - awake;
        long at = waited_often++;
        if (at < MOST)
            waits[at] = (struct span){asleep < begin ? asleep : begin, begin, which};
        return;
    }
    nap(random_us(means_us[which]));
    long at = held_often++;
    if (at < MOST)
        holds[at] = (struct span){begin, now_ns(), which};
}

static void *ask(void *unused)
{
    while (!stopped) {
        awake = time_awake();
        asked = now_ns();
        if (!paused)
            lock->ask();
        nap(300);
    }
    return unused;
}

/* Holds are in order and do not overlap. */
static void tell(void)
{
    int64_t waited[HOLDERS] = {0}, all = 0;
    for (long w = 0; w < waited_often; w++) {
        long low = 0, high = held_often; /* the first hold that ends after the wait begins */
        while (low < high) {
            long middle = (low + high) / 2;
            if (holds[middle].end <= waits[w].begin)
                low = middle + 1;
            else
                high = middle;
        }
        all += waits[w].end - waits[w].begin;
        for (; low < held_often && holds[low].begin < waits[w].end; low++) {
            int64_t from = holds[low].begin > waits[w].begin ? holds[low].begin : waits[w].begin;
            int64_t to = holds[low].end < waits[w].end ? holds[low].end : waits[w].end;
            waited[holds[low].which] += to - from;
        }
    }
    say("{\"waited_us\": %ld, \"holds\": %ld, \"holders\": {", (long)(all / 1000), held_often);
    for (int i = 0; i < HOLDERS; i++)
        say("%s\"%s\": %ld", i ? ", " : "", names[i], (long)(waited[i] / 1000));
    say("}}");
}

static void hold_for(long seconds)
{
    paused = 0;
    int64_t end = now_ns() + seconds * 1000000000;
    while (now_ns() < end && held_often < MOST && waited_often < MOST) {
        lock->hold[random_us(3000) % HOLDERS]();
        nap(300);
    }
    paused = 1;
    nap(200000); /* until nobody asks any more */
}

void run_holders(int argc, char **argv, const struct held_lock *locks, int count)
{
    long askers = arg(argc, argv, 2, 3), seconds = arg(argc, argv, 3, 10);
    for (int i = 0; i < count && argc > 1; i++)
        if (!strcmp(locks[i].name, argv[1]))
            lock = &locks[i];
    if (!lock) {
        fprintf(stderr, "no lock %s\n", argc > 1 ? argv[1] : "");
        exit(1);
    }
    ready();
    for (long i = 0; i < askers; i++)
        spawn(ask, NULL);
    hold_for(KNOWN_SECONDS);
    held_often = waited_often = 0;
    say("{}");
    publish();
    wait_for_byte();
    hold_for(seconds);
    stopped = 1;
    if (held_often > MOST || waited_often > MOST)
        die("more spans than there is room for");
    tell();
    finish();
}
