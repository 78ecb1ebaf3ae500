/* What a locktrace does: a hash entry and a user stack for every futex call, whether it blocks or not. */
struct call {
    u64 since, uaddr, blocked, off_since;
    int op, stack;
};

struct key {
    u64 uaddr;
    u32 tid, tgid;
    int stack, pad;
};

struct value {
    u64 calls, blocked_ns, sys_ns, max_blocked_ns, errors;
};

BPF_HASH(calls, u32, struct call, 65536);
BPF_HASH(totals, struct key, struct value, 65536);
BPF_STACK_TRACE(stacks, 16384);

TRACEPOINT_PROBE(syscalls, sys_enter_futex)
{
    u32 tid = bpf_get_current_pid_tgid();
    struct call call = {.since = bpf_ktime_get_ns(), .uaddr = (u64)args->uaddr, .op = args->op};

    call.stack = stacks.get_stackid(args, BPF_F_USER_STACK);
    calls.update(&tid, &call);
    return 0;
}

TRACEPOINT_PROBE(syscalls, sys_exit_futex)
{
    u64 id = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns();
    u32 tid = id;
    struct call *call = calls.lookup(&tid);
    struct value zero = {};

    if (!call)
        return 0;
    struct key key = {.uaddr = call->uaddr, .tid = tid, .tgid = id >> 32, .stack = call->stack};
    struct value *v = totals.lookup_or_try_init(&key, &zero);
    if (v) {
        v->calls++;
        v->blocked_ns += call->blocked;
        v->sys_ns += now - call->since - call->blocked;
        if (call->blocked > v->max_blocked_ns)
            v->max_blocked_ns = call->blocked;
        if (args->ret < 0)
            v->errors++;
    }
    calls.delete(&tid);
    return 0;
}

TRACEPOINT_PROBE(sched, sched_switch)
{
    u32 prev = args->prev_pid, next = args->next_pid;
    u64 now = bpf_ktime_get_ns();
    struct call *call = calls.lookup(&prev);

    if (call && args->prev_state)
        call->off_since = now;
    call = calls.lookup(&next);
    if (call && call->off_since) {
        call->blocked += now - call->off_since;
        call->off_since = 0;
    }
    return 0;
}
