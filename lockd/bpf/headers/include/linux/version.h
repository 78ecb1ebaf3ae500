/* Stub: lockd probes for features and never asks for a version, but bcc's helpers.h does;
 * any kernel that has raw tracepoints and batch operations serves. */
#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + (c))
#define LINUX_VERSION_CODE KERNEL_VERSION(5, 10, 0)
