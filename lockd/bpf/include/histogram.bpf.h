// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Slots of the histograms that lockd/trace/core/histogram.py prints. */

#ifdef LINEAR_STEP
/* Slot 0 is below LINEAR_FIRST. Each further slot has LINEAR_STEP values, and the last is LINEAR_LAST and
 * above. */
static __always_inline u32 histogram_slot(u64 value, bool is_negative)
{
    s64 first = (LINEAR_FIRST), last = (LINEAR_LAST);

    if (is_negative ? (s64)value < first : first > 0 && value < (u64)first)
        return 0;
    if (is_negative ? (s64)value >= last : last <= 0 || value >= (u64)last)
        value = last;
    return 1 + (value - (u64)first) / (LINEAR_STEP);
}
#else
/* Slot 0 is negative values, slot 1 is zero, slot 2 is one, and slot s from 3 on is [2^(s-2), 2^(s-1)). */
static __always_inline u32 histogram_slot(u64 value, bool is_negative)
{
    if (is_negative)
        return 0;
    return value ? bpf_log2l(value) + 1 : 1; /* bcc's bpf_log2l(2^k) is k + 1 */
}
#endif
