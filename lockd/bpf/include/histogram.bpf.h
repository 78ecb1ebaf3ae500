// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Slots of the histograms that lockd/trace/core/histogram.py prints. */

#ifdef LINEAR_STEP
/* Whether `value` is below `bound`; each may be a signed or an unsigned number of 64 bits. Two numbers with
 * the same sign keep their order when their bits are read as unsigned numbers. */
static __always_inline bool is_below(u64 value, bool is_negative, u64 bound, bool is_bound_negative)
{
    return is_negative == is_bound_negative ? value < bound : is_negative;
}

/* Slot 0 is for values below LINEAR_FIRST. Each further slot has LINEAR_STEP values, and the last slot is for
 * LINEAR_LAST and above. */
static __always_inline u32 histogram_slot(u64 value, bool is_negative)
{
    if (is_below(value, is_negative, LINEAR_FIRST, LINEAR_FIRST_NEGATIVE))
        return 0;
    if (!is_below(value, is_negative, LINEAR_LAST, LINEAR_LAST_NEGATIVE))
        value = LINEAR_LAST;
    return 1 + (value - LINEAR_FIRST) / LINEAR_STEP;
}
#else
/* Slot 0 is for negative values, slot 1 for 0, slot 2 for 1, and slot s from 3 on for [2^(s-2), 2^(s-1)). */
static __always_inline u32 histogram_slot(u64 value, bool is_negative)
{
    if (is_negative)
        return 0;
    return value ? bpf_log2l(value) + 1 : 1; /* bcc's bpf_log2l(2^k) is k + 1 */
}
#endif
