// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Number of times that functions or tracepoints are reached, by thread and stack (lockd trace stackcount). */

struct stackcount_key {
    u32 tid;
    u32 pad;
    struct call_stack_ids stacks;
};

struct stackcount_value {
    u64 count;
    struct who who;
};

BPF_TABLE("hash", struct stackcount_key, struct stackcount_value, stackcount_0, ENTRIES);
BPF_TABLE("hash", struct stackcount_key, struct stackcount_value, stackcount_1, ENTRIES);
BPF_ARRAY_OF_MAPS(stackcount, "stackcount_0", 2);

/* Attached to whatever the user names: `ctx` may be of any type. */
int count_stack(void *ctx)
{
    struct stackcount_key key = {.tid = bpf_get_current_pid_tgid()};
    int window = current_window();
    void *map = stackcount.lookup(&window);

    if (!map || !is_current_traced())
        return 0;
    key.stacks = keep_call_stacks(ctx);
    struct stackcount_value *v = bpf_map_lookup_elem(map, &key);
    if (!v) {
        struct stackcount_value fresh = {};
        identify(bpf_get_current_task(), &fresh.who);
        bpf_map_update_elem(map, &key, &fresh, BPF_NOEXIST);
        v = bpf_map_lookup_elem(map, &key);
    }
    if (v)
        add_to(&v->count, 1); /* an interrupt may count at the same time */
    else
        lose(LOSS_TRACE__FULL);
    return 0;
}
