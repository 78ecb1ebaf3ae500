// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Futex calls, by the tracepoints of system calls. */

/* Attached to sys_enter_futex, sys_enter_futex_wait, _waitv, _wake and _requeue. */
int futex_enter(struct sys_enter *ctx)
{
    u64 began = run_begins(), arguments[4] = {ctx->args[0], ctx->args[1], ctx->args[2], ctx->args[3]};

    futex_began(ctx, ctx->nr, arguments);
    run_ends(began);
    return 0;
}

/* Attached to sys_enter_restart_syscall. */
int futex_restart(struct sys_enter *ctx)
{
    return futex_restarted();
}

/* Attached to the sys_exit_* tracepoints of the futex calls and of restart_syscall(). */
int futex_exit(struct sys_exit *ctx)
{
    u64 began = run_begins();

    futex_ended(ctx, ctx->ret);
    run_ends(began);
    return 0;
}
