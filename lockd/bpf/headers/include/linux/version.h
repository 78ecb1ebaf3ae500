// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Stub: lockd probes for features and never asks for a version, but bcc's helpers.h does. It is given the
 * oldest version that lockd supports. */
#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + (c))
#define LINUX_VERSION_CODE KERNEL_VERSION(5, 10, 0)
