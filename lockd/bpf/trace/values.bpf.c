// SPDX-License-Identifier: (GPL-2.0-only OR Apache-2.0)
/* Values of a field of a tracepoint (lockd trace hist).
 *
 * VALUE_OFFSET, VALUE_BYTES and VALUE_SIGNED describe the field. BY_* describe a field to group by, and
 * FILTER_0_* to FILTER_3_* fields that are compared with limits: only events that pass all comparisons count.
 * If VALUE_TEXT is defined, the field is text of at most VALUE_TEXT bytes, and each different text is counted
 * by itself. If VALUE_DYNAMIC is defined too, the field contains the place of the text, see dynamic().
 * BY_TEXT and BY_DYNAMIC do the same for the field to group by. */

enum comparison { EQUAL, NOT_EQUAL, LESS, LESS_OR_EQUAL, GREATER, GREATER_OR_EQUAL };

struct values_key {
    struct group group;
    u64 by;
    u32 slot;
    u32 pad;
#ifdef VALUE_TEXT
    char text[VALUE_TEXT];
#endif
#ifdef BY_TEXT
    char by_text[BY_TEXT];
#endif
};

/* The sum is in two halves, neither of which can overflow in one window. */
struct values_value {
    u64 count;
    u64 low_sum; /* sum of the low 32 bits */
    s64 high_sum; /* sum of the high bits, with the sign */
    u64 max;
};

BPF_TABLE("hash", struct values_key, struct values_value, values_0, ENTRIES);
BPF_TABLE("hash", struct values_key, struct values_value, values_1, ENTRIES);
BPF_ARRAY_OF_MAPS(values, "values_0", 2);

/* Return a number in a tracepoint's record, extended to 64 bits. All arguments but the first are
 * constants. */
static __always_inline u64 field(void *record, u32 offset, u32 bytes, bool is_signed)
{
    u32 unused = 64 - 8 * bytes;
    u64 value = 0;

    bpf_probe_read_kernel(&value, bytes, record + offset);
    return is_signed ? (u64)((s64)(value << unused) >> unused) : value;
}

/* Return the address of a text. The low half of the 32-bit field at `offset` is the text's own offset in the
 * record. (The high half is the length of the text.) */
static __always_inline void *dynamic(void *record, u32 offset)
{
    return record + (field(record, offset, 4, false) & 0xffff);
}

static __always_inline bool compares(u64 value, u32 comparison, u64 limit, bool is_signed)
{
    bool is_less = is_signed ? (s64)value < (s64)limit : value < limit;

    switch (comparison) {
    case EQUAL:
        return value == limit;
    case NOT_EQUAL:
        return value != limit;
    case LESS:
        return is_less;
    case LESS_OR_EQUAL:
        return is_less || value == limit;
    case GREATER:
        return !is_less && value != limit;
    }
    return !is_less;
}

#define PASSES(record, n)                                                                                    \
    compares(field(record, FILTER_##n##_OFFSET, FILTER_##n##_BYTES, FILTER_##n##_SIGNED),                    \
             FILTER_##n##_COMPARISON, (FILTER_##n##_LIMIT), FILTER_##n##_SIGNED)

static __always_inline bool passes_filters(void *record)
{
#ifdef FILTER_0_OFFSET
    if (!PASSES(record, 0))
        return false;
#endif
#ifdef FILTER_1_OFFSET
    if (!PASSES(record, 1))
        return false;
#endif
#ifdef FILTER_2_OFFSET
    if (!PASSES(record, 2))
        return false;
#endif
#ifdef FILTER_3_OFFSET
    if (!PASSES(record, 3))
        return false;
#endif
    return true;
}

static __always_inline void add_value(struct values_value *v, u64 value)
{
    add_to(&v->count, 1); /* an interrupt may count at the same time */
#ifndef VALUE_TEXT
    add_to(&v->low_sum, (u32)value);
    add_to((u64 *)&v->high_sum, VALUE_SIGNED ? (u64)((s64)value >> 32) : value >> 32);
    if (VALUE_SIGNED ? (s64)value > (s64)v->max : value > v->max)
        v->max = value;
#endif
}

/* Attached to the tracepoint that the user named. */
int count_value(void *ctx)
{
    struct values_key key = {};
    int window = current_window();
    void *map = values.lookup(&window);
    u64 value = 0;

    if (!map || !is_current_traced() || !passes_filters(ctx))
        return 0;
    key.group = current_group(current_id());
    key.group.stacks = keep_call_stacks(ctx);
#if defined(VALUE_DYNAMIC)
    bpf_probe_read_kernel_str(key.text, sizeof(key.text), dynamic(ctx, VALUE_OFFSET));
#elif defined(VALUE_TEXT)
    bpf_probe_read_kernel_str(key.text, sizeof(key.text), ctx + VALUE_OFFSET);
#else
    value = field(ctx, VALUE_OFFSET, VALUE_BYTES, VALUE_SIGNED);
    key.slot = histogram_slot(value, VALUE_SIGNED && (s64)value < 0);
#endif
#if defined(BY_DYNAMIC)
    bpf_probe_read_kernel_str(key.by_text, sizeof(key.by_text), dynamic(ctx, BY_OFFSET));
#elif defined(BY_TEXT)
    bpf_probe_read_kernel_str(key.by_text, sizeof(key.by_text), ctx + BY_OFFSET);
#elif defined(BY_OFFSET)
    key.by = field(ctx, BY_OFFSET, BY_BYTES, BY_SIGNED);
#endif
    struct values_value *v = bpf_map_lookup_elem(map, &key);
    if (!v) {
        struct values_value fresh = {.max = value};
        bpf_map_update_elem(map, &key, &fresh, BPF_NOEXIST);
        v = bpf_map_lookup_elem(map, &key);
    }
    if (v)
        add_value(v, value);
    else
        lose(LOSS_TRACE__FULL);
    return 0;
}
