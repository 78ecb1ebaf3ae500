// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Stub: bcc's headers include this file, but lockd's programs need none of its definitions. */
