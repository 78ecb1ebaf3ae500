// SPDX-License-Identifier: GPL-2.0-only
/* What each step does, and the book that is kept of all holds. */
#include <linux/delay.h>
#include <linux/jiffies.h>
#include <linux/mutex.h>
#include <linux/rwsem.h>
#include <linux/sched/signal.h>
#include <linux/semaphore.h>
#include <linux/ww_mutex.h>
#include "lockd_test.h"

#ifndef task_is_running /* 5.14, b03fbd4ff24c: the state got a new name */
#define task_is_running(task) (READ_ONCE((task)->state) == TASK_RUNNING)
#endif

static bool gone_on;

/* One function for each that takes a lock, all of one type. */
#define TAKE_VOID(function)                                                                                  \
    static int call_##function(void *lock, unsigned int number)                                              \
    {                                                                                                        \
        function(lock);                                                                                      \
        return 0;                                                                                            \
    }
#define TAKE(function)                                                                                       \
    static int call_##function(void *lock, unsigned int number)                                              \
    {                                                                                                        \
        return function(lock);                                                                               \
    }
#define TAKE_TRY(function) /* these return whether they got it */                                            \
    static int call_##function(void *lock, unsigned int number)                                              \
    {                                                                                                        \
        return function(lock) ? 0 : -EBUSY;                                                                  \
    }

TAKE_VOID(mutex_lock)
TAKE_VOID(mutex_lock_io)
TAKE(mutex_lock_interruptible)
TAKE(mutex_lock_killable)
TAKE_TRY(mutex_trylock)
TAKE_VOID(down_read)
TAKE(down_read_killable)
TAKE_TRY(down_read_trylock)
TAKE_VOID(down_write)
TAKE(down_write_killable)
TAKE_TRY(down_write_trylock)
TAKE_VOID(down)
TAKE(down_interruptible)
TAKE(down_killable)
TAKE(down_trylock)
#ifdef HAVE_DOWN_READ_INTERRUPTIBLE /* see Kbuild */
TAKE(down_read_interruptible)
#endif

static int call_down_timeout(void *lock, unsigned int us)
{
    return down_timeout(lock, usecs_to_jiffies(us));
}

static int call_ww_mutex_lock(void *lock, unsigned int number)
{
    return ww_mutex_lock(lock, NULL);
}

static void call_mutex_unlock(void *lock)
{
    mutex_unlock(lock);
}

static void call_ww_mutex_unlock(void *lock)
{
    ww_mutex_unlock(lock);
}

static void call_up_read(void *lock)
{
    up_read_non_owner(lock); /* the same as up_read(), but for lockdep */
}

static void call_up_write(void *lock)
{
    up_write(lock);
}

static void call_up(void *lock)
{
    up(lock);
}

static bool is_held_by_another(const struct lock *lock, enum lock_type type)
{
    if (type == TYPE_RWSEM_READ)
        return lock->written;
    return lock->held >= lock->room;
}

/* Return an unused hold of the thread. Only the thread itself begins holds. */
static struct hold *free_hold(struct thread *me)
{
    struct hold *hold;

    for (hold = me->holds; hold < me->holds + MAX_HOLDS; hold++)
        if (!READ_ONCE(hold->lock))
            return hold;
    return NULL;
}

/* Begin a hold. */
static void note_taken(struct thread *me, struct lock *lock, enum lock_type type, u64 now)
{
    spin_lock(&book);
    *free_hold(me) = (struct hold){lock, type, now};
    lock->held++;
    lock->written += type == TYPE_RWSEM_WRITE;
    spin_unlock(&book);
    me->truth[type].acquisitions++;
}

/* Return the hold that a release ends: the thread's own newest one, else anybody's oldest. */
static struct hold *find_hold(struct thread *me, const struct lock *lock, enum lock_type type)
{
    struct run *run = me->run;
    struct hold *found = NULL, *hold;
    struct thread *thread;

    for (hold = me->holds; hold < me->holds + MAX_HOLDS; hold++)
        if (hold->lock == lock && hold->type == type && (!found || hold->since >= found->since))
            found = hold;
    if (found)
        return found;
    for (thread = run->threads; thread < run->threads + run->thread_count; thread++)
        for (hold = thread->holds; hold < thread->holds + MAX_HOLDS; hold++)
            if (hold->lock == lock && hold->type == type && (!found || hold->since < found->since))
                found = hold;
    return found;
}

/* Note the end of a hold that `me` is about to release. Return whether there was one. */
static bool note_released(struct thread *me, struct lock *lock, enum lock_type type)
{
    struct truth *truth = &me->truth[type];
    struct hold *hold;
    u64 held_ns;

    spin_lock(&book);
    hold = find_hold(me, lock, type);
    if (!hold) {
        spin_unlock(&book);
        fail(me->run, "is to release what nobody holds", me->role->name);
        return false;
    }
    hold->lock = NULL;
    lock->held--;
    lock->written -= type == TYPE_RWSEM_WRITE;
    held_ns = ktime_get_ns() - hold->since;
    spin_unlock(&book);
    truth->holds++;
    truth->hold_ns += held_ns;
    truth->max_hold_ns = max(truth->max_hold_ns, held_ns);
    return true;
}

static void take(struct thread *me, const struct step *step)
{
    struct truth *truth = &me->truth[step->op->type];
    bool is_held = is_held_by_another(step->lock, step->op->type);
    u64 before, after;
    int result;

    if (!free_hold(me)) {
        fail(me->run, "is to hold too much at a time", me->role->name);
        return;
    }
    me->switches = current->nvcsw;
    smp_store_release(&me->calling, step->lock);
    before = ktime_get_ns();
    result = step->op->take(step->lock->address, step->number);
    after = ktime_get_ns();
    smp_store_release(&me->calling, NULL);
    if (current->nvcsw != me->switches) {
        truth->waits++;
        truth->wait_ns += after - before;
        truth->max_wait_ns = max(truth->max_wait_ns, after - before);
    } else if (is_held && !result) {
        truth->spins++;
        truth->spin_ns += after - before;
    }
    if (!result) {
        note_taken(me, step->lock, step->op->type, after);
    } else {
        truth->failed++;
        if (!me->is_caller)
            flush_signals(current);
    }
    wake_up_all(&changed);
}

static void release(struct thread *me, const struct step *step)
{
    if (!note_released(me, step->lock, step->op->type))
        return;
    step->op->release(step->lock->address);
    wake_up_all(&changed);
}

static void downgrade(struct thread *me, const struct step *step)
{
    if (!note_released(me, step->lock, TYPE_RWSEM_WRITE))
        return;
    downgrade_write(step->lock->address);
    note_taken(me, step->lock, TYPE_RWSEM_READ, ktime_get_ns());
    wake_up_all(&changed);
}

/* Give back what an unfinished script has left locked. */
void release_all(struct thread *me)
{
    struct hold *hold;

    for (hold = me->holds; hold < me->holds + MAX_HOLDS; hold++) {
        struct lock *lock = hold->lock;
        const struct op *op = ops;

        if (!lock)
            continue;
        if (!READ_ONCE(me->run->failed))
            fail(me->run, "ends while it holds a lock", me->role->name);
        while (op->does != RELEASES || op->type != hold->type)
            op++;
        if (note_released(me, lock, hold->type))
            op->release(lock->address);
    }
}

static void do_sleep(struct thread *me, const struct step *step)
{
    usleep_range(step->number, step->number);
}

/* Threads that ask for a lock spin while its holder runs, and sleep if it sleeps: so it spins. */
static void do_spin(struct thread *me, const struct step *step)
{
    u64 end = ktime_get_ns() + step->number * 1000ull;

    while (ktime_get_ns() < end) {
        cond_resched();
        cpu_relax();
    }
}

/* Wait until is_so() is true. It is called each time that something changes, and at each tick. */
static void await(struct thread *me, const struct step *step,
                  bool (*is_so)(struct run *run, const struct step *step))
{
    struct run *run = me->run;

    while (!is_so(run, step) && !READ_ONCE(run->failed)) {
        if (time_after(jiffies, run->deadline))
            fail(run, "waits in vain", me->role->name);
        wait_event_timeout(changed, is_so(run, step) || READ_ONCE(run->failed), 1);
    }
}

static bool is_held(struct run *run, const struct step *step)
{
    return READ_ONCE(step->lock->held) == step->number;
}

/* Whether `number` threads are in a call for the lock and, if `asleep`, have left the CPU in it. */
static bool are_in_call(struct run *run, const struct step *step, bool asleep)
{
    unsigned int count = 0;
    struct thread *thread;

    for (thread = run->threads; thread < run->threads + run->thread_count; thread++)
        if (smp_load_acquire(&thread->calling) == step->lock)
            count += !asleep ||
                     (READ_ONCE(thread->task->nvcsw) != thread->switches && !task_is_running(thread->task));
    return count == step->number;
}

static bool is_called(struct run *run, const struct step *step)
{
    return are_in_call(run, step, false);
}

static bool is_asleep(struct run *run, const struct step *step)
{
    return are_in_call(run, step, true);
}

static bool has_gone_on(struct run *run, const struct step *step)
{
    return READ_ONCE(gone_on);
}

static void do_held(struct thread *me, const struct step *step)
{
    await(me, step, is_held);
}

static void do_called(struct thread *me, const struct step *step)
{
    await(me, step, is_called);
}

static void do_asleep(struct thread *me, const struct step *step)
{
    await(me, step, is_asleep);
}

static void do_pause(struct thread *me, const struct step *step)
{
    await(me, step, has_gone_on);
    WRITE_ONCE(gone_on, false);
}

/* Let the thread that pauses go on, or else the next one that is to pause. */
void go_on(void)
{
    WRITE_ONCE(gone_on, true);
    wake_up_all(&changed);
}

static void signal_all(struct thread *me, const struct role *role, int signal)
{
    struct run *run = me->run;
    struct thread *thread;

    for (thread = run->threads; thread < run->threads + run->thread_count; thread++)
        if (thread->role == role && !thread->is_caller)
            send_sig(signal, thread->task, 1);
}

static void do_interrupt(struct thread *me, const struct step *step)
{
    signal_all(me, step->role, SIGINT);
}

static void do_kill(struct thread *me, const struct step *step)
{
    signal_all(me, step->role, SIGKILL);
}

#define TAKING(function, lock_type)                                                                          \
    {.name = #function, .wants = LOCK, .does = TAKES, .type = lock_type, .take = call_##function}
#define RELEASING(function, lock_type)                                                                       \
    {.name = #function, .wants = LOCK, .does = RELEASES, .type = lock_type, .release = call_##function}
#define DOING(what, wanted) {.name = #what, .wants = wanted, .does = OTHER, .other = do_##what}

const struct op ops[] = {
    TAKING(mutex_lock, TYPE_MUTEX),
    TAKING(mutex_lock_io, TYPE_MUTEX),
    TAKING(mutex_lock_interruptible, TYPE_MUTEX),
    TAKING(mutex_lock_killable, TYPE_MUTEX),
    TAKING(mutex_trylock, TYPE_MUTEX),
    RELEASING(mutex_unlock, TYPE_MUTEX),
    TAKING(ww_mutex_lock, TYPE_MUTEX),
    RELEASING(ww_mutex_unlock, TYPE_MUTEX),
    TAKING(down_read, TYPE_RWSEM_READ),
#ifdef HAVE_DOWN_READ_INTERRUPTIBLE
    TAKING(down_read_interruptible, TYPE_RWSEM_READ),
#endif
    TAKING(down_read_killable, TYPE_RWSEM_READ),
    TAKING(down_read_trylock, TYPE_RWSEM_READ),
    RELEASING(up_read, TYPE_RWSEM_READ),
    TAKING(down_write, TYPE_RWSEM_WRITE),
    TAKING(down_write_killable, TYPE_RWSEM_WRITE),
    TAKING(down_write_trylock, TYPE_RWSEM_WRITE),
    {.name = "downgrade_write", .wants = LOCK, .does = DOWNGRADES, .type = TYPE_RWSEM_WRITE},
    RELEASING(up_write, TYPE_RWSEM_WRITE),
    TAKING(down, TYPE_SEMAPHORE),
    TAKING(down_interruptible, TYPE_SEMAPHORE),
    TAKING(down_killable, TYPE_SEMAPHORE),
    TAKING(down_trylock, TYPE_SEMAPHORE),
    {.name = "down_timeout",
     .wants = NUMBER | LOCK,
     .does = TAKES,
     .type = TYPE_SEMAPHORE,
     .take = call_down_timeout},
    RELEASING(up, TYPE_SEMAPHORE),
    DOING(sleep, NUMBER),
    DOING(spin, NUMBER),
    DOING(held, NUMBER | LOCK),
    DOING(called, NUMBER | LOCK),
    DOING(asleep, NUMBER | LOCK),
    DOING(pause, 0),
    DOING(hold_in_turns, NUMBER | LOCK),
    DOING(ask, LOCK),
    DOING(interrupt, ROLE),
    DOING(kill, ROLE),
    {},
};

void do_step(struct thread *me, const struct step *step)
{
    if (step->op->does == TAKES)
        take(me, step);
    else if (step->op->does == RELEASES)
        release(me, step);
    else if (step->op->does == DOWNGRADES)
        downgrade(me, step);
    else
        step->op->other(me, step);
}
