#include "program.h"
#include "workload.h"

static const struct scenario *now;

static void take(void *unused)
{
    (void)unused;
    if (now->take)
        now->take();
}

static void give(void *unused)
{
    (void)unused;
    if (now->give)
        now->give();
}

static void ask(void *unused)
{
    (void)unused;
    now->ask();
}

static void done(void *unused)
{
    (void)unused;
    if (now->done)
        now->done();
}

static const struct scenario *find(const char *name, const struct scenario *scenarios, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!strcmp(scenarios[i].name, name))
            return &scenarios[i];
    fprintf(stderr, "no scenario %s\n", name);
    exit(1);
}

void run_program(int argc, char **argv, const struct scenario *scenarios, size_t count)
{
    now = find(argc > 1 ? argv[1] : "", scenarios, count);
    struct handover h = {
        .rounds = arg(argc, argv, 2, 40),
        .hold_us = arg(argc, argv, 3, 50000),
        .take = take,
        .give = give,
        .ask = ask,
        .done = done,
    };
    ready();
    hand_over(&h);
    say("{\"waits\": %ld, \"blocked\": %ld, \"blocked_us\": %ld}", h.waits.waits, h.waits.blocked,
        (long)(h.waits.sum_ns / 1000));
    finish();
}

static void *run_in_thread(void *p)
{
    ((void (*)(void))p)();
    return NULL;
}

void in_thread(void (*run)(void))
{
    spawn(run_in_thread, (void *)run);
}

void until(const volatile int *value, int wanted)
{
    while (__atomic_load_n(value, __ATOMIC_SEQ_CST) != wanted)
        nap(50);
}
