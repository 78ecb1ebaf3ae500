// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Macros for the programs in the next file of the translation unit, if kprobes and kretprobes call these.
 *
 * A kretprobe follows a limited number of calls at a time (maxactive, by default one or two for each CPU, in
 * most kernels at least 10). A function that sleeps may have hundreds of calls in progress. The program at
 * the entry can see whether the return will be missed. Of two probes on a function, the kernel first calls
 * the one that was attached last. The kretprobe is attached last: it has replaced the return address before
 * the program at the entry runs. If the kretprobe has no room for the call, the address is unchanged. */

#undef BY_FENTRY
#undef probed
#undef ARGUMENT
#undef RETURNED
#undef RETURN_WILL_BE_SEEN

#define probed struct pt_regs
#define ARGUMENT(ctx) PT_REGS_PARM1(ctx)
#define RETURN_WILL_BE_SEEN(ctx) (return_address(ctx) == GIVEN_RETURN_TRAMPOLINE(ctx))
#define RETURNED(ctx) ((s64)PT_REGS_RC(ctx))
