/* Threads wait in three functions, for 5, 20 and 75% of their time, in turns of random length: brief_wait,
 * middle_wait and long_wait, all of which sleep. Each turn of long_wait is some 40 times as long as one of
 * brief_wait, so that the last wait says little about the next one. Other threads read pipes in
 * answered_wait, which for a quarter of that time wait for answer_soon to write, and else for answer_late.
 * "places" has what was waited in each of the three functions since the start byte, and how often, "wakers"
 * what readers have waited for each of the two. "queued_us" is the part of it all that threads were on the
 * run queue. */
#include "workload.h"

enum { BRIEF, MIDDLE, LONG, PLACES };
enum { SOON, LATE, WAKERS };

#define NOINLINE __attribute__((noinline, noclone))
static volatile long count; /* so that no call is the last thing that its caller does */
static _Atomic long stop, finished, place_ns[PLACES], waker_ns[WAKERS], waits[PLACES], answers[WAKERS];
static _Atomic long sleepers_queued_ns, readers_queued_ns;

static uint32_t below(uint32_t *state, uint32_t limit)
{
    *state = *state * 1664525 + 1013904223;
    return (uint64_t)*state * limit >> 32;
}

static void wait_in(int place, long us)
{
    int64_t begin = now_ns();
    nap(us);
    place_ns[place] += now_ns() - begin;
    waits[place]++;
}

NOINLINE static void brief_wait(long us)
{
    wait_in(BRIEF, us);
    count++;
}

NOINLINE static void middle_wait(long us)
{
    wait_in(MIDDLE, us);
    count += 2;
}

NOINLINE static void long_wait(long us)
{
    wait_in(LONG, us);
    count += 3;
}

/* A turn takes 1, 4 or 40 ms on average, and there are 421, 421 and 158 of each in 1,000. */
static void *sleep_in_turns(void *number)
{
    uint32_t state = (uintptr_t)number;
    while (!stop) {
        uint32_t dice = below(&state, 1000);
        if (dice < 421)
            brief_wait(500 + below(&state, 1001));
        else if (dice < 842)
            middle_wait(2000 + below(&state, 4001));
        else
            long_wait(20000 + below(&state, 40001));
    }
    sleepers_queued_ns += queued_ns();
    finished++;
    return NULL;
}

struct pair {
    int pipe[2];
    uint32_t state;
    pid_t reader;
    _Atomic int by; /* which function writes next */
};

NOINLINE static void answer_soon(struct pair *pair)
{
    check(write(pair->pipe[1], "x", 1), "write pipe");
    count += 4;
}

NOINLINE static void answer_late(struct pair *pair)
{
    check(write(pair->pipe[1], "x", 1), "write pipe");
    count += 5;
}

NOINLINE static void answered_wait(struct pair *pair)
{
    char byte;
    int64_t begin = now_ns();
    check(read(pair->pipe[0], &byte, 1), "read pipe");
    waker_ns[pair->by] += now_ns() - begin;
    answers[pair->by]++;
    count += 6;
}

static void *read_pipe(void *pair)
{
    while (!stop)
        answered_wait(pair);
    readers_queued_ns += queued_ns();
    finished++;
    return NULL;
}

/* One in four of the answers comes late, and takes nine times as long: three quarters of the time. */
static void *write_pipe(void *p)
{
    struct pair *pair = p;
    while (!stop) {
        bool late = below(&pair->state, 4) == 0;
        nap(late ? 18000 + below(&pair->state, 18001) : 2000 + below(&pair->state, 2001));
        pair->by = late ? LATE : SOON;
        if (late)
            answer_late(pair);
        else
            answer_soon(pair);
    }
    answer_soon(pair);
    finished++;
    return NULL;
}

static void say_function(const char *name, long ns, long number, const char *end)
{
    say("\"%s\": {\"us\": %ld, \"waits\": %ld}%s", name, ns / 1000, number, end);
}

int main(int argc, char **argv)
{
    long sleepers = arg(argc, argv, 1, 60), pairs = arg(argc, argv, 2, 30), seconds = arg(argc, argv, 3, 5);
    struct pair *all = calloc(pairs, sizeof *all);
    ready();
    for (long i = 0; i < sleepers; i++)
        spawn(sleep_in_turns, (void *)(i + 1));
    for (long i = 0; i < pairs; i++) {
        check(pipe2(all[i].pipe, O_CLOEXEC), "pipe");
        all[i].state = i + 1;
        spawn(read_pipe, &all[i]);
        spawn(write_pipe, &all[i]);
    }
    nap(seconds * 1000000);
    stop = 1;
    wait_until(&finished, sleepers + 2 * pairs);
    say("{\"places\": {\"queued_us\": %ld, \"in\": {", sleepers_queued_ns / 1000);
    say_function("brief_wait", place_ns[BRIEF], waits[BRIEF], ", ");
    say_function("middle_wait", place_ns[MIDDLE], waits[MIDDLE], ", ");
    say_function("long_wait", place_ns[LONG], waits[LONG], "}}, ");
    say("\"wakers\": {\"queued_us\": %ld, \"in\": {", readers_queued_ns / 1000);
    say_function("answer_soon", waker_ns[SOON], answers[SOON], ", ");
    say_function("answer_late", waker_ns[LATE], answers[LATE], "}}}");
    finish();
}
