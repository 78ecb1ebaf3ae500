// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* The group in which a value is counted: one thread, so that an entry has one writer, and, if the user asked
 * for them, stacks and the name of the process. */

#define ID_OF_CPU 0x8000000000000000 /* plus a CPU's number: the idle thread of the CPU, whose ids are 0 */

struct group {
    u64 id; /* what bpf_get_current_pid_tgid() returns, or ID_OF_CPU plus a CPU's number */
    struct call_stack_ids stacks;
    char comm[COMM_LEN]; /* of the process; empty without BY_COMM */
};

/* Return the `id` of the current thread's group. */
static __always_inline u64 current_id(void)
{
    u64 id = bpf_get_current_pid_tgid();

    return id ? id : ID_OF_CPU | bpf_get_smp_processor_id();
}

/* Return the group of the current thread, whose current_id() is `id`. The caller fills in the stacks. */
static __always_inline struct group current_group(u64 id)
{
    struct group group = {.id = id};
#ifdef BY_COMM
    u64 leader = 0;

    READ_TASK(bpf_get_current_task(), TASK_GROUP_LEADER, leader);
    READ_TASK(leader, TASK_COMM, group.comm);
#endif
    return group;
}
