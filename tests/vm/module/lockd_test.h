/* SPDX-License-Identifier: GPL-2.0-only */
/* Locks that threads take as a script says, and the truth about it (see README.md). */
#include <linux/atomic.h>
#include <linux/ktime.h>
#include <linux/sched.h>
#include <linux/spinlock.h>
#include <linux/wait.h>

#define MAX_THREADS 1000
#define MAX_ROLES 8
#define MAX_STEPS 24 /* of a role */
#define MAX_HOLDS 8 /* of a thread at a time */
#define DEADLINE_SECONDS 60 /* less than the time after which a kernel complains about a hung task */

enum lock_kind { MUTEX, RWSEM, SEMAPHORE };

#define WW_MUTEX "ww_mutex" /* the name of the only lock of this sort, which begins with a mutex */

/* The values of lockd's label lock_type. */
enum lock_type { TYPE_MUTEX, TYPE_RWSEM_READ, TYPE_RWSEM_WRITE, TYPE_SEMAPHORE, TYPES };

/* What happened to the locks of one type. Times are in ns. */
struct truth {
    u64 acquisitions;
    u64 failed; /* tries that did not get the lock, and waits that gave up */
    u64 holds, hold_ns, max_hold_ns; /* holds that have ended */
    u64 waits, wait_ns, max_wait_ns; /* calls that slept */
    u64 spins, spin_ns; /* calls that got what another thread held, without sleeping */
};

/* A lock, and the holds of the threads of a script that have returned from taking it. */
struct lock {
    const char *name;
    enum lock_kind kind;
    void *address; /* struct mutex, rw_semaphore or semaphore */
    int room; /* how many threads may hold it, readers not counted */
    int held; /* how many hold it; protected by `book` */
    int written; /* how many of these are writers */
};

struct hold {
    struct lock *lock; /* NULL: none */
    enum lock_type type;
    u64 since;
};

struct step {
    const struct op *op;
    struct lock *lock;
    struct role *role;
    unsigned int number;
};

/* What some threads do, in each round. */
struct role {
    char *name;
    unsigned int threads;
    unsigned int count; /* of steps */
    struct step steps[MAX_STEPS];
};

struct thread {
    struct run *run;
    struct role *role;
    struct task_struct *task;
    bool is_caller; /* the thread in write(), which is no kernel thread of the module */
    struct lock *calling; /* the lock it is in a call for */
    unsigned long switches; /* voluntary ones before that call */
    struct hold holds[MAX_HOLDS]; /* protected by `book` */
    struct truth truth[TYPES];
};

/* A script that runs, or that has ended and whose threads live on. */
struct run {
    struct run *before; /* of those whose threads live on */
    char comm[TASK_COMM_LEN];
    unsigned int rounds;
    bool lingers; /* its threads live on after the last round */
    unsigned int role_count, thread_count;
    struct role roles[MAX_ROLES];
    struct thread *threads;
    unsigned long deadline; /* in jiffies */
    bool failed;
    atomic_long_t met; /* threads that have ended a round, over all rounds */
    atomic_t ended; /* threads that have ended the last round */
};

/* An operation that a step may name. */
struct op {
    const char *name;
    enum { NUMBER = 1, LOCK = 2, ROLE = 4 } wants; /* the words after its name, in this order */
    enum { TAKES, RELEASES, DOWNGRADES, OTHER } does;
    enum lock_type type; /* the type of lock that it takes, releases or downgrades */
    int (*take)(void *address, unsigned int number); /* 0: got it */
    void (*release)(void *address);
    void (*other)(struct thread *me, const struct step *step);
};

/* script.c */
int parse(struct run *run, char *text); /* changes `text`; -EINVAL, with the reason in the kernel's log */

/* steps.c */
extern const struct op ops[];
void do_step(struct thread *me, const struct step *step);
void release_all(struct thread *me);
void go_on(void);

/* locks.c */
extern spinlock_t book;
extern wait_queue_head_t changed; /* woken when a hold, a call or run->failed has changed */
struct lock *lock_named(const char *name);
int make_locks(void);
void free_locks(void);

/* turns.c */
enum { HOLDERS = 3 };
int make_turns(void);
void free_turns(void);
void forget_turns(void);
void do_hold_in_turns(struct thread *me, const struct step *step);
void do_ask(struct thread *me, const struct step *step);
u64 find_waited(u64 by_holder[HOLDERS]); /* by holder, and (returned) in all, in ns */

/* run.c */
void fail(struct run *run, const char *why, const char *what);
