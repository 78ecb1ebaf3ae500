// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Time between two tracepoints in one thread, mostly the entry and the exit of a system call (lockd trace
 * latency).
 *
 * A call that a signal interrupts continues if no handler runs: the kernel makes the thread enter it
 * again, perhaps as restart_syscall(). This is one call for the program, and counts as one here. */

/* ERESTART*: results inside the kernel of a system call that a signal has interrupted. User space never sees
 * them. */
#define ERESTARTSYS 512
#define ERESTARTNOINTR 513
#define ERESTARTNOHAND 514
#define ERESTART_RESTARTBLOCK 516
#define EINTR 4

#define RESULT_DIED 1 /* in place of a result: the thread ended in the call */

struct latency_call {
    u64 since; /* 0: the thread is in no call */
    u64 left; /* time at which a signal interrupted it; 0: no signal did */
    struct call_stack_ids stacks;
    s32 nr; /* number of the system call */
    s32 result; /* if `left` is set: its result, the negative of an ERESTART* code */
};

struct latency_key {
    struct group group;
    s32 nr;
    s32 result; /* see result_of() */
    u32 slot;
    u32 pad;
};

struct latency_value {
    u64 count;
    u64 sum; /* ns */
    u64 max;
};

/* By current_id(), the call that a thread is in. The entry stays when the call has ended: to create and
 * delete an entry costs more than all else that is done for a call. */
BPF_TABLE("hash", u64, struct latency_call, latency_calls, THREADS_ENTRIES);
BPF_TABLE("hash", struct latency_key, struct latency_value, latency_0, ENTRIES);
BPF_TABLE("hash", struct latency_key, struct latency_value, latency_1, ENTRIES);
BPF_ARRAY_OF_MAPS(latency, "latency_0", 2);

/* Return an error (a negative errno) as it is, and any other result as 0. */
static __always_inline s32 result_of(s64 returned)
{
    return (u64)returned >= (u64)-MAX_ERRNO ? returned : 0;
}

/* Count a call that ended at `until`; `result` is that of result_of(), or RESULT_DIED. */
static __always_inline void count_call(u64 id, struct latency_call *call, s32 result, u64 until)
{
    u64 ns = until > call->since ? until - call->since : 0;
    int window = current_window();
    void *map = latency.lookup(&window);
    struct latency_key key = {};

    call->since = 0;
    call->left = 0;
    if (!map || !is_wanted(ns))
        return;
    key.group = current_group(id);
    key.group.stacks = call->stacks;
    key.nr = call->nr;
#ifdef BY_RESULT
    key.result = result;
#endif
    key.slot = histogram_slot(ns / NS_PER_UNIT, false);
    struct latency_value *v = bpf_map_lookup_elem(map, &key);
    if (!v) {
        struct latency_value fresh = {};
        bpf_map_update_elem(map, &key, &fresh, BPF_NOEXIST);
        v = bpf_map_lookup_elem(map, &key);
    }
    if (!v) {
        lose(LOSS_TRACE__FULL);
        return;
    }
    v->count += 1;
    v->sum += ns;
    raise_to(&v->max, ns);
}

static __always_inline void call_began(void *ctx, s32 nr)
{
    u64 id = current_id();
    struct latency_call *call = latency_calls.lookup(&id);
    struct latency_call fresh = {.nr = nr};

    if (call && call->left && (nr == call->nr || nr == NR_RESTART_SYSCALL)) {
        call->left = 0; /* the call continues */
        return;
    }
    if (call && call->left)
        count_call(id, call, call->result, call->left);
    else if (call && call->since)
        lose(LOSS_TRACE__END_UNSEEN);
    if (call)
        call->since = 0;
    if (nr == NR_RESTART_SYSCALL || !is_current_traced()) /* a restarted call's beginning was not seen */
        return;
    fresh.stacks = keep_call_stacks(ctx);
    fresh.since = bpf_ktime_get_ns();
    if (call)
        *call = fresh;
    else if (latency_calls.update(&id, &fresh))
        lose(LOSS_TRACE__THREADS_FULL);
}

static __always_inline bool is_interrupted(s64 returned)
{
    return returned == -ERESTARTSYS || returned == -ERESTARTNOINTR || returned == -ERESTARTNOHAND ||
           returned == -ERESTART_RESTARTBLOCK;
}

static __always_inline void call_ended(s64 returned)
{
    u64 now = bpf_ktime_get_ns(), id = current_id();
    struct latency_call *call = latency_calls.lookup(&id);

    if (!call || !call->since || call->left)
        return; /* the call began before the trace, is not traced, or found no room */
    if (is_interrupted(returned)) {
        call->left = now;
        call->result = returned;
    } else {
        count_call(id, call, result_of(returned), now);
    }
}
