// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Stub: the saved user registers, by architecture. bcc's headers and lockd's programs use the type. */
#ifndef LOCKD_STUB_PTRACE_H
#define LOCKD_STUB_PTRACE_H

#include <linux/types.h>

#if defined(__TARGET_ARCH_arm64) || defined(__aarch64__)
struct pt_regs {
    u64 regs[31];
    u64 sp;
    u64 pc;
    u64 pstate;
    u64 orig_x0;
    s32 syscallno;
    u32 unused;
};
#else
struct pt_regs {
    unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8;
    unsigned long ax, cx, dx, si, di, orig_ax, ip, cs, flags, sp, ss;
};
#endif

#endif
