/* For the programs that follow: called by kprobes and kretprobes.
 *
 * A kretprobe has room for only so many calls at a time (maxactive: as many as CPUs, or a
 * few more), and functions that sleep may have hundreds. It shows in advance: it replaces
 * the return address before the program at the entry runs, as of two probes the one that
 * was attached later is called first; where it has no room the address stays. */

#undef BY_FENTRY
#undef probed
#undef ARGUMENT
#undef RETURNED
#undef RETURN_WILL_BE_SEEN

#define probed struct pt_regs
#define ARGUMENT(ctx) PT_REGS_PARM1(ctx)
#define RETURN_WILL_BE_SEEN(ctx) (return_address(ctx) == GIVEN_RETURN_TRAMPOLINE(ctx))
#define RETURNED(ctx) ((s64)PT_REGS_RC(ctx))
