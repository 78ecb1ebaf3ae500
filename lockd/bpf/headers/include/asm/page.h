// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Stub: named by bcc, which brings its own copy of the definitions. */
