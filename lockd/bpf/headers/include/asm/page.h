// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Stub: bcc's helpers.h includes this file for PAGE_SIZE, which lockd defines itself (load/source.py). */
