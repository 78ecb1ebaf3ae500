// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Signals that are sent, with sender and receiver (lockd trace signals). */

#define SIGNALS_PAGES 256

/* Values of signal_generate's argument `info` in place of a pointer, and the codes that they stand for. */
#define NO_INFO 0 /* sent by a process */
#define FROM_KERNEL 1
#define SI_USER 0
#define SI_KERNEL 0x80
#define SI_CODE_OFFSET 8 /* in struct kernel_siginfo, after two ints */

struct signal_sent {
    u64 at; /* ns on the monotonic clock */
    u32 running_tgid; /* the process on the CPU: the sender, or one that was interrupted */
    u32 running_tid;
    u32 tgid; /* the receiver */
    u32 tid;
    s32 number; /* of the signal */
    s32 code; /* si_code */
    s32 result; /* enum TRACE_SIGNAL_* of the kernel: whether the signal is delivered */
    u16 to_process; /* 1: sent to the process; 0: to one thread */
    u16 is_queueing; /* 1: the running thread is in a system call by which it can send any code */
    char running_comm[COMM_LEN]; /* of the process, not of the thread */
    char comm[COMM_LEN];
};

BPF_RINGBUF_OUTPUT(signals, SIGNALS_PAGES);
BPF_ARRAY(signal_record, struct signal_sent, 1); /* empty: tells user space the layout of a record */

static __always_inline void read_process(u64 task, u32 *tgid, u32 *tid, char *comm)
{
    u64 leader = 0;

    READ_TASK(task, TASK_TGID, *tgid);
    READ_TASK(task, TASK_PID, *tid);
    READ_TASK(task, TASK_GROUP_LEADER, leader);
    bpf_probe_read_kernel(comm, COMM_LEN, (void *)(leader + TASK_COMM));
}

static __always_inline bool is_queueing(void)
{
    s16 nr = current_syscall();

    return nr == NR_RT_SIGQUEUEINFO || nr == NR_RT_TGSIGQUEUEINFO || nr == NR_PIDFD_SEND_SIGNAL;
}

/* Raw tracepoint signal_generate. Arguments: number of the signal, information, task of the receiver, whether
 * the signal is for the whole process, result. */
int on_signal_generate(struct bpf_raw_tracepoint_args *ctx)
{
    u64 current = bpf_get_current_task(), receiver = ctx->args[2], info = ctx->args[1];
    struct signal_sent event = {
        .number = ctx->args[0], .to_process = !!(u32)ctx->args[3], .result = ctx->args[4]};

    if (!((u64)SIGNALS_ASKED >> (event.number - 1 & 63) & 1))
        return 0;
    read_process(current, &event.running_tgid, &event.running_tid, event.running_comm);
    read_process(receiver, &event.tgid, &event.tid, event.comm);
    if (!is_traced(event.running_tgid, event.running_tid, false) && !is_traced(event.tgid, event.tid, false))
        return 0;
    event.is_queueing = is_queueing();
    event.at = bpf_ktime_get_ns();
    if (info == NO_INFO)
        event.code = SI_USER;
    else if (info == FROM_KERNEL)
        event.code = SI_KERNEL;
    else
        bpf_probe_read_kernel(&event.code, sizeof(event.code), (void *)(info + SI_CODE_OFFSET));
    if (signals.ringbuf_output(&event, sizeof(event), BPF_RB_NO_WAKEUP))
        lose(LOSS_TRACE__FULL);
    return 0;
}
