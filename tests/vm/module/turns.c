// SPDX-License-Identifier: GPL-2.0-only
/* Three functions hold a lock, for 5, 20 and 75 of 100 parts of the time, in turns of random length, while
 * other threads ask for it. It is known for how long each function made them wait. */
#include <linux/delay.h>
#include <linux/kernel.h>
#include <linux/ktime.h>
#include <linux/mutex.h>
#include <linux/rwsem.h>
#include <linux/semaphore.h>
#include <linux/string.h>
#include <linux/vmalloc.h>
#include "lockd_test.h"

#define MOST_SPANS 16384 /* of holds, and of waits */
#define PAUSE_US 300 /* of each thread between two locks, so that others get theirs */

enum { SHORT, SOME, LONG };

static const unsigned int means_us[HOLDERS] = {2000, 8000, 30000};

/* When a thread held the lock, or waited for it. */
struct span {
    u64 begin, end;
    int which; /* which of the holders held the lock */
};

static struct span *holds, *waits; /* holds in their order; waits are protected by `book` */
static unsigned int held_often, waited_often;
static bool is_over;

int make_turns(void)
{
    holds = vzalloc(2 * MOST_SPANS * sizeof(*holds));
    waits = holds + MOST_SPANS;
    return holds ? 0 : -ENOMEM;
}

void free_turns(void)
{
    vfree(holds);
}

void forget_turns(void)
{
    held_often = waited_often = 0;
    is_over = false;
}

/* Return a random time between half of the mean and one and a half times the mean. */
static unsigned int random_us(unsigned int mean)
{
    static u32 state = 1;

    state = state * 1664525 + 1013904223;
    return mean / 2 + (state >> 8) % mean;
}

/* The lock is held by the function that calls this. */
static void held(int which)
{
    u64 begin = ktime_get_ns();
    unsigned int us = random_us(means_us[which]);

    usleep_range(us, us);
    if (held_often < MOST_SPANS)
        holds[held_often++] = (struct span){begin, ktime_get_ns(), which};
}

#define HOLDING(name, take, give, which)                                                                     \
    static noinline void name(void *lock)                                                                    \
    {                                                                                                        \
        take(lock);                                                                                          \
        held(which);                                                                                         \
        give(lock);                                                                                          \
        barrier(); /* else the compiler would make a jump of the call */                                     \
    }
#define IN_TURNS(kind, take, give)                                                                           \
    HOLDING(turn_short_##kind, take, give, SHORT)                                                            \
    HOLDING(turn_some_##kind, take, give, SOME)                                                              \
    HOLDING(turn_long_##kind, take, give, LONG)                                                              \
    static noinline void ask_for_##kind(void *lock)                                                          \
    {                                                                                                        \
        u64 asked = ktime_get_ns();                                                                          \
                                                                                                             \
        take(lock);                                                                                          \
        note_wait(asked);                                                                                    \
        give(lock);                                                                                          \
        barrier();                                                                                           \
    }
#define ALL_OF(kind) {{turn_short_##kind, turn_some_##kind, turn_long_##kind}, ask_for_##kind}

static void note_wait(u64 asked)
{
    u64 now = ktime_get_ns();

    spin_lock(&book);
    if (waited_often < MOST_SPANS)
        waits[waited_often++] = (struct span){asked, now};
    spin_unlock(&book);
}

IN_TURNS(mutex, mutex_lock, mutex_unlock)
IN_TURNS(rwsem, down_write, up_write)
IN_TURNS(semaphore, down, up)

static const struct {
    void (*hold[HOLDERS])(void *lock);
    void (*ask)(void *lock);
} functions[] = {[MUTEX] = ALL_OF(mutex), [RWSEM] = ALL_OF(rwsem), [SEMAPHORE] = ALL_OF(semaphore)};

void do_hold_in_turns(struct thread *me, const struct step *step)
{
    u64 end = ktime_get_ns() + step->number * 1000000ull;

    while (ktime_get_ns() < end && !READ_ONCE(me->run->failed)) {
        functions[step->lock->kind].hold[random_us(3000) % HOLDERS](step->lock->address);
        usleep_range(PAUSE_US, PAUSE_US);
    }
    WRITE_ONCE(is_over, true);
    if (held_often == MOST_SPANS || waited_often == MOST_SPANS)
        fail(me->run, "more turns than there is room for", me->role->name);
}

void do_ask(struct thread *me, const struct step *step)
{
    while (!READ_ONCE(is_over) && !READ_ONCE(me->run->failed)) {
        functions[step->lock->kind].ask(step->lock->address);
        usleep_range(PAUSE_US, PAUSE_US);
    }
}

/* Return the time waited in all, and set the time by holder. Holds do not overlap. */
u64 find_waited(u64 by_holder[HOLDERS])
{
    struct span *wait, *hold;
    u64 all = 0;

    memset(by_holder, 0, HOLDERS * sizeof(*by_holder));
    for (wait = waits; wait < waits + waited_often; wait++) {
        all += wait->end - wait->begin;
        for (hold = holds; hold < holds + held_often && hold->begin < wait->end; hold++)
            if (hold->end > wait->begin)
                by_holder[hold->which] += min(hold->end, wait->end) - max(hold->begin, wait->begin);
    }
    return all;
}
