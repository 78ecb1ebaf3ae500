// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Stub: the option of the kernel configuration that bcc's own headers require. */
#define CONFIG_BPF_SYSCALL 1
