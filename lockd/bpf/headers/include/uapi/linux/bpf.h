// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Stub: bcc's headers include this file, but bcc has its own copy of the definitions. */
