// SPDX-License-Identifier: GPL-2.0-only
/* Parses the text of a script into roles and their steps. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt
#include <linux/kernel.h>
#include <linux/printk.h>
#include <linux/string.h>
#include "lockd_test.h"

static const enum lock_kind kind_of[TYPES] = {MUTEX, RWSEM, RWSEM, SEMAPHORE};

static int refuse(const char *why, const char *what)
{
    pr_info("%s: %s\n", what, why);
    return -EINVAL;
}

static const struct op *op_named(const char *name)
{
    const struct op *op;

    for (op = ops; op->name; op++)
        if (!strcmp(op->name, name))
            return op;
    return NULL;
}

static struct role *role_named(struct run *run, const char *name)
{
    unsigned int i;

    for (i = 0; i < run->role_count; i++)
        if (!strcmp(run->roles[i].name, name))
            return &run->roles[i];
    return NULL;
}

/* Cut a text at the separator, and return what is before it, without blanks around. */
static char *cut(char **rest, const char *separator)
{
    char *part = strsep(rest, separator);

    return part ? strim(part) : NULL;
}

/* Parse a step, such as "down_timeout 5000 semaphore". */
static int parse_step(struct run *run, char *text, struct step *step)
{
    char *name = cut(&text, " "), *word;

    step->op = op_named(name);
    if (!step->op)
        return refuse("there is no such step", name);
    if (step->op->wants & NUMBER) {
        word = cut(&text, " ");
        if (!word || kstrtouint(word, 10, &step->number))
            return refuse("needs a number", name);
    }
    if (step->op->wants & LOCK) {
        word = cut(&text, " ");
        step->lock = word ? lock_named(word) : NULL;
        if (!step->lock)
            return refuse("needs the name of a lock", name);
        if (step->op->does != OTHER && kind_of[step->op->type] != step->lock->kind)
            return refuse("is not for a lock of that kind", name);
        if (!strncmp(name, "ww_", 3) && strcmp(word, WW_MUTEX))
            return refuse("is not for a lock of that kind", name);
    }
    if (step->op->wants & ROLE) {
        word = cut(&text, " ");
        step->role = word ? role_named(run, word) : NULL;
        if (!step->role)
            return refuse("needs the name of a role", name);
    }
    return text ? refuse("has a word too much", name) : 0;
}

/* Parse the head of "waiter*3: STEP, STEP". Its steps come later, as they may name roles that follow. */
static int parse_head(struct run *run, char *line, char **steps)
{
    struct role *role = &run->roles[run->role_count];
    char *count = cut(&line, ":");

    *steps = line;
    if (!line)
        return refuse("a line is ROLE: STEP, STEP", count);
    role->name = cut(&count, "*");
    role->threads = 1;
    if (count && kstrtouint(count, 10, &role->threads))
        return refuse("needs a number after *", role->name);
    if (!*role->name || role_named(run, role->name))
        return refuse("roles need names of their own", role->name);
    if (!role->threads || role->threads > MAX_THREADS - run->thread_count)
        return refuse("too many threads, or none", role->name);
    if (role->threads > 1 && !strcmp(role->name, "caller"))
        return refuse("there is but one", role->name);
    run->thread_count += role->threads;
    run->role_count++;
    return 0;
}

static int parse_steps(struct run *run, struct role *role, char *text)
{
    char *one;

    while ((one = cut(&text, ","))) {
        int failed;

        if (role->count == MAX_STEPS)
            return refuse("too many steps", role->name);
        failed = parse_step(run, one, &role->steps[role->count++]);
        if (failed)
            return failed;
    }
    return 0;
}

int parse(struct run *run, char *text)
{
    char *rest = strim(text), *first = cut(&rest, "\n"), *comm = cut(&first, " ");
    char *rounds = cut(&first, " "), *line;
    char *steps[MAX_ROLES];
    unsigned int i;
    int failed;

    if (!*comm || strlen(comm) >= sizeof(run->comm))
        return refuse("a name for the threads has 1 to 15 characters", comm);
    strcpy(run->comm, comm);
    run->lingers = first && !strcmp(first, "linger");
    if (!rounds || kstrtouint(rounds, 10, &run->rounds) || !run->rounds || (first && !run->lingers))
        return refuse("the first line is NAME ROUNDS [linger]", comm);
    while ((line = cut(&rest, "\n"))) {
        if (run->role_count == MAX_ROLES)
            return refuse("too many roles", comm);
        failed = parse_head(run, line, &steps[run->role_count]);
        if (failed)
            return failed;
    }
    if (!run->role_count)
        return refuse("nothing to do", comm);
    for (i = 0; i < run->role_count; i++) {
        failed = parse_steps(run, &run->roles[i], steps[i]);
        if (failed)
            return failed;
    }
    return 0;
}
