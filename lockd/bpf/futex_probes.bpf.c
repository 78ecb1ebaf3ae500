/* Futex calls by probes on the functions of the system calls. */

/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */

/* Attached to __x64_sys_futex() and its kin, whose only argument is the saved user registers. */
int futex_entered(probed *ctx)
{
    struct system_call call = saved_call((void *)ARGUMENT(ctx));

    if (!RETURN_WILL_BE_SEEN(ctx)) {
        lose(LOSS_FUTEX__RETURN_MISSED);
        return 0;
    }
    return futex_began(call.nr, call.args[0], call.args[1], call.args[2], call.args[3]);
}

/* Attached to futex_wait_restart(), which restart_syscall() calls. */
int futex_reentered(probed *ctx)
{
    if (!RETURN_WILL_BE_SEEN(ctx))
        lose(LOSS_FUTEX__RETURN_MISSED);
    else
        futex_restarted();
    return 0;
}

/* Attached to the returns of the above. */
int futex_left(probed *ctx)
{
    return futex_ended(ctx, RETURNED(ctx));
}
