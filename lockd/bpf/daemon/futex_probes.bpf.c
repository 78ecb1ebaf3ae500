// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Futex calls, by probes on the functions of the system calls. */

/* Attached to __x64_sys_futex() and the functions of the other futex calls. Their only argument points to the
 * saved user registers. It is not used: in the BTF of 5.10 it has no type that lets a program read them. */
int futex_entered(probed *ctx)
{
    u64 began = run_begins();
    struct system_call call = call_of(user_regs(), 4);

    if (!RETURN_WILL_BE_SEEN(ctx)) {
#ifdef TRACE
        if (!is_current_traced())
            return 0;
#endif
        lose(LOSS_FUTEX__RETURN_MISSED);
        return 0;
    }
    futex_began(ctx, call.nr, call.args);
    run_ends(began);
    return 0;
}

/* Attached to futex_wait_restart(), which restart_syscall() calls. */
int futex_reentered(probed *ctx)
{
    if (RETURN_WILL_BE_SEEN(ctx)) {
        futex_restarted();
        return 0;
    }
#ifdef TRACE
    if (!is_current_traced())
        return 0;
#endif
    lose(LOSS_FUTEX__RETURN_MISSED);
    return 0;
}

/* Attached to the returns of the functions to which futex_entered() and futex_reentered() are attached. */
int futex_left(probed *ctx)
{
    u64 began = run_begins();

    futex_ended(ctx, RETURNED(ctx));
    run_ends(began);
    return 0;
}
