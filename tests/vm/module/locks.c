// SPDX-License-Identifier: GPL-2.0-only
/* The locks: static ones, which kallsyms names, and some in allocated memory, which nothing names. */
#include <linux/mutex.h>
#include <linux/rwsem.h>
#include <linux/semaphore.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/ww_mutex.h>
#include "lockd_test.h"

DEFINE_SPINLOCK(book);
DECLARE_WAIT_QUEUE_HEAD(changed);

static DEFINE_MUTEX(lockd_test_mutex);
static DEFINE_MUTEX(lockd_test_mutex2);
static DEFINE_MUTEX(lockd_test_mutex3);
static DEFINE_WW_CLASS(lockd_test_class);
static struct ww_mutex lockd_test_ww_mutex;
static DECLARE_RWSEM(lockd_test_rwsem);
static DECLARE_RWSEM(lockd_test_rwsem2);
static struct semaphore lockd_test_semaphore = __SEMAPHORE_INITIALIZER(lockd_test_semaphore, 1);
static struct semaphore lockd_test_semaphore2 = __SEMAPHORE_INITIALIZER(lockd_test_semaphore2, 1);
static struct semaphore lockd_test_counting = __SEMAPHORE_INITIALIZER(lockd_test_counting, 3);

static struct allocated {
    struct mutex mutex;
    struct rw_semaphore rwsem;
    struct semaphore semaphore;
} *allocated;

static struct lock locks[] = {
    {"mutex", MUTEX, &lockd_test_mutex, 1},
    {"mutex2", MUTEX, &lockd_test_mutex2, 1},
    {"mutex3", MUTEX, &lockd_test_mutex3, 1},
    {WW_MUTEX, MUTEX, &lockd_test_ww_mutex, 1},
    {"rwsem", RWSEM, &lockd_test_rwsem, 1},
    {"rwsem2", RWSEM, &lockd_test_rwsem2, 1},
    {"semaphore", SEMAPHORE, &lockd_test_semaphore, 1},
    {"semaphore2", SEMAPHORE, &lockd_test_semaphore2, 1},
    {"counting", SEMAPHORE, &lockd_test_counting, 3},
    {"allocated_mutex", MUTEX, NULL, 1},
    {"allocated_rwsem", RWSEM, NULL, 1},
    {"allocated_semaphore", SEMAPHORE, NULL, 1},
};

struct lock *lock_named(const char *name)
{
    int i;

    for (i = 0; i < ARRAY_SIZE(locks); i++)
        if (!strcmp(locks[i].name, name))
            return &locks[i];
    return NULL;
}

int make_locks(void)
{
    allocated = kzalloc(sizeof(*allocated), GFP_KERNEL);
    if (!allocated)
        return -ENOMEM;
    ww_mutex_init(&lockd_test_ww_mutex, &lockd_test_class);
    mutex_init(&allocated->mutex);
    init_rwsem(&allocated->rwsem);
    sema_init(&allocated->semaphore, 1);
    lock_named("allocated_mutex")->address = &allocated->mutex;
    lock_named("allocated_rwsem")->address = &allocated->rwsem;
    lock_named("allocated_semaphore")->address = &allocated->semaphore;
    return 0;
}

void free_locks(void)
{
    kfree(allocated);
}
