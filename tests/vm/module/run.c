// SPDX-License-Identifier: GPL-2.0-only
/* /proc/lockd_test: writing a script runs it to its end, reading tells the truth about the last one. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt
#include <linux/jiffies.h>
#include <linux/kthread.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/proc_fs.h>
#include <linux/sched/signal.h>
#include <linux/sched/task.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/uaccess.h>
#include "lockd_test.h"

#define MAX_SCRIPT 16384

static DECLARE_WAIT_QUEUE_HEAD(met); /* woken when a round, or the run, has ended */
static unsigned long busy; /* bit 0: a script is running, its truth being read, or threads are being ended */
static struct run *lingering; /* the last script whose threads live on; `before` leads to the others */

/* The truth about the last script: about the kernel threads, and about the caller. */
static struct truth truths[2][TYPES];

/* End the run, since it cannot do what the script says. */
void fail(struct run *run, const char *why, const char *what)
{
    pr_info("%s: %s: %s\n", run->comm, what, why);
    WRITE_ONCE(run->failed, true);
    wake_up_all(&changed);
    wake_up_all(&met);
}

/* Wait for all threads to end the round. */
static void meet(struct run *run, unsigned int round)
{
    long all = (long)round * run->thread_count;

    if (atomic_long_inc_return(&run->met) == all)
        wake_up_all(&met);
    while (atomic_long_read(&run->met) < all && !READ_ONCE(run->failed)) {
        if (time_after(jiffies, run->deadline))
            fail(run, "the others do not end their round", run->comm);
        wait_event_timeout(met, atomic_long_read(&run->met) >= all || READ_ONCE(run->failed), HZ);
    }
}

static void play(struct thread *me)
{
    struct run *run = me->run;
    unsigned int round, i;

    for (round = 1; round <= run->rounds && !READ_ONCE(run->failed); round++) {
        for (i = 0; i < me->role->count && !READ_ONCE(run->failed); i++)
            do_step(me, &me->role->steps[i]);
        meet(run, round);
    }
    release_all(me);
}

static int play_in_thread(void *data)
{
    struct thread *me = data;

    allow_signal(SIGINT);
    allow_signal(SIGKILL);
    play(me);
    atomic_inc(&me->run->ended);
    wake_up_all(&met);
    for (;;) { /* live on, without taking a lock */
        set_current_state(TASK_IDLE);
        if (kthread_should_stop())
            break;
        schedule();
    }
    __set_current_state(TASK_RUNNING);
    /* A thread takes locks when it ends, too: not under the name that the script gave. */
    strscpy(current->comm, KBUILD_MODNAME, sizeof(current->comm));
    flush_signals(current);
    return 0;
}

/* Make all threads of the script. The one of the role `caller` is the thread that runs this. */
static int make_threads(struct run *run)
{
    unsigned int i, j;
    struct thread *thread;

    run->threads = kvcalloc(run->thread_count, sizeof(*run->threads), GFP_KERNEL);
    if (!run->threads)
        return -ENOMEM;
    thread = run->threads;
    for (i = 0; i < run->role_count; i++) {
        for (j = 0; j < run->roles[i].threads; j++, thread++) {
            thread->run = run;
            thread->role = &run->roles[i];
            thread->is_caller = !strcmp(thread->role->name, "caller");
            thread->task = current;
            if (!thread->is_caller)
                thread->task = kthread_create(play_in_thread, thread, "%s", run->comm);
            if (IS_ERR(thread->task))
                return PTR_ERR(thread->task);
            /* Else it would take a lock when it begins: kthread_affine_node() (6.14, d1a89197589c). */
            if (!thread->is_caller)
                thread->task->flags |= PF_NO_SETAFFINITY;
            get_task_struct(thread->task);
        }
    }
    return 0;
}

/* End all threads of a script. Those that have not been started end at once. */
static void end_threads(struct run *run)
{
    struct thread *thread;

    if (!run->threads)
        return;
    for (thread = run->threads; thread < run->threads + run->thread_count; thread++) {
        if (IS_ERR_OR_NULL(thread->task))
            break;
        if (!thread->is_caller)
            kthread_stop(thread->task);
        put_task_struct(thread->task);
    }
    kvfree(run->threads);
}

static void end_lingering(void)
{
    while (lingering) {
        struct run *run = lingering;

        lingering = run->before;
        end_threads(run);
        kvfree(run);
    }
}

static int play_all(struct run *run)
{
    struct thread *thread, *caller = NULL;

    run->deadline = jiffies + DEADLINE_SECONDS * HZ;
    for (thread = run->threads; thread < run->threads + run->thread_count; thread++) {
        if (thread->is_caller)
            caller = thread;
        else
            wake_up_process(thread->task);
    }
    if (caller) {
        play(caller);
        atomic_inc(&run->ended);
    }
    if (wait_event_interruptible(met, atomic_read(&run->ended) == run->thread_count))
        fail(run, "interrupted", run->comm);
    return run->failed ? -EIO : 0;
}

static void add_truth(const struct thread *thread)
{
    int type;

    for (type = 0; type < TYPES; type++) {
        const struct truth *one = &thread->truth[type];
        struct truth *sum = &truths[thread->is_caller][type];

        sum->acquisitions += one->acquisitions;
        sum->failed += one->failed;
        sum->holds += one->holds;
        sum->hold_ns += one->hold_ns;
        sum->max_hold_ns = max(sum->max_hold_ns, one->max_hold_ns);
        sum->waits += one->waits;
        sum->wait_ns += one->wait_ns;
        sum->max_wait_ns = max(sum->max_wait_ns, one->max_wait_ns);
        sum->spins += one->spins;
        sum->spin_ns += one->spin_ns;
    }
}

/* Run the script `text`, which this changes. */
static int run_script(char *text)
{
    struct thread *thread;
    struct run *run = kvzalloc(sizeof(*run), GFP_KERNEL);
    int failed;

    if (!run)
        return -ENOMEM;
    failed = parse(run, text);
    if (!failed) {
        forget_turns();
        memset(truths, 0, sizeof(truths));
        failed = make_threads(run);
    }
    if (!failed)
        failed = play_all(run);
    for (thread = run->threads; !failed && thread < run->threads + run->thread_count; thread++)
        add_truth(thread);
    if (!failed && run->lingers) {
        run->before = lingering;
        lingering = run;
        return 0;
    }
    end_threads(run);
    kvfree(run);
    return failed;
}

static ssize_t write_script(struct file *file, const char __user *buffer, size_t count, loff_t *position)
{
    char *text;
    int failed = -EBUSY;

    if (count > MAX_SCRIPT) {
        pr_info("a script has at most %d bytes\n", MAX_SCRIPT);
        return -EINVAL;
    }
    text = memdup_user_nul(buffer, count);
    if (IS_ERR(text))
        return PTR_ERR(text);
    if (!strcmp(text, "go\n")) {
        go_on();
        failed = 0;
    } else if (!test_and_set_bit(0, &busy)) {
        failed = 0;
        if (strcmp(text, "end\n"))
            failed = run_script(text);
        else
            end_lingering();
        clear_bit(0, &busy);
    }
    kfree(text);
    return failed ? failed : count;
}

static void show_truth(struct seq_file *file, const char *name, const struct truth *truth)
{
    seq_printf(file,
               "\"%s\": {\"acquisitions\": %llu, \"failed\": %llu, "
               "\"holds\": %llu, \"hold_ns\": %llu, \"max_hold_ns\": %llu, "
               "\"waits\": %llu, \"wait_ns\": %llu, \"max_wait_ns\": %llu, "
               "\"spins\": %llu, \"spin_ns\": %llu}",
               name, truth->acquisitions, truth->failed, truth->holds, truth->hold_ns, truth->max_hold_ns,
               truth->waits, truth->wait_ns, truth->max_wait_ns, truth->spins, truth->spin_ns);
}

static void show_turns(struct seq_file *file)
{
    u64 by_holder[HOLDERS];
    u64 all = find_waited(by_holder);

    seq_printf(file, "\"turns\": {\"waited_ns\": %llu, \"by_holder_ns\": ", all);
    seq_printf(file, "{\"short\": %llu, \"some\": %llu, \"long\": %llu}}", by_holder[0], by_holder[1],
               by_holder[2]);
}

static int show_truths(struct seq_file *file, void *unused)
{
    static const char *const names[TYPES] = {"mutex", "rwsem_read", "rwsem_write", "semaphore"};
    int whose, type;

    if (test_and_set_bit(0, &busy))
        return -EBUSY;
    for (whose = 0; whose < 2; whose++) {
        seq_puts(file, whose ? "}, \"caller\": {" : "{\"threads\": {");
        for (type = 0; type < TYPES; type++) {
            if (type)
                seq_puts(file, ", ");
            show_truth(file, names[type], &truths[whose][type]);
        }
    }
    seq_puts(file, "}, ");
    show_turns(file);
    seq_puts(file, "}\n");
    clear_bit(0, &busy);
    return 0;
}

static int open_truth(struct inode *inode, struct file *file)
{
    return single_open(file, show_truths, NULL);
}

static const struct proc_ops operations = {
    .proc_open = open_truth,
    .proc_read = seq_read,
    .proc_lseek = seq_lseek,
    .proc_release = single_release,
    .proc_write = write_script,
};

static int __init start(void)
{
    int failed = make_locks();

    if (failed)
        return failed;
    failed = make_turns();
    if (!failed && !proc_create(KBUILD_MODNAME, 0600, NULL, &operations)) {
        free_turns();
        failed = -ENOMEM;
    }
    if (failed)
        free_locks();
    return failed;
}

static void __exit end(void)
{
    remove_proc_entry(KBUILD_MODNAME, NULL);
    end_lingering();
    free_turns();
    free_locks();
}

module_init(start);
module_exit(end);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Takes locks as a script says, and tells the truth about it");
