// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Macros for the programs in the next file of the translation unit, if trampolines call these (fentry and
 * fexit). Trampolines see every return of a function. */

#undef BY_FENTRY
#undef probed
#undef ARGUMENT
#undef RETURNED
#undef RETURN_WILL_BE_SEEN

#define BY_FENTRY
#define probed struct bpf_raw_tracepoint_args
#define ARGUMENT(ctx) ((ctx)->args[0])
#define RETURN_WILL_BE_SEEN(ctx) true
#define RETURNED(ctx) ((s64)GIVEN_RETURNED(ctx))
