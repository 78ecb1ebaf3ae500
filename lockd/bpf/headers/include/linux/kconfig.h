// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Stub: what bcc's own headers ask of a kernel configuration. */
#define CONFIG_BPF_SYSCALL 1
