// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Records of the tracepoints of system calls (sys_enter_*, sys_exit_*). */

struct sys_enter {
    u64 common;
    s32 nr;
    u32 undefined; /* padding that the kernel does not write */
    u64 args[6];
};

struct sys_exit {
    u64 common;
    s32 nr;
    u32 undefined;
    s64 ret;
};
