/* The memory that is pinned, registered or managed, and what a device may read of it. */

#pragma once

#include "settings.h"

typedef struct Range {
    Address at;
    size_t n;
    enum { IS_ALLOCATED, IS_REGISTERED, IS_MANAGED } kind;
    int where; /* of managed memory: where it was last prefetched to */
    struct Range* next;
} Range;

static Range* ranges;
static uint64_t locked;
static int64_t pageable, violations, launches;

static Range* range_at(Address at, int kind) {
    for (Range* one = ranges; one; one = one->next)
        if (one->at == at && (int)one->kind == kind) return one;
    return NULL;
}

static Range* around(Address at, size_t n, int is_managed) {
    for (Range* one = ranges; one; one = one->next)
        if ((one->kind == IS_MANAGED) == is_managed && one->at <= at && at + n <= one->at + one->n) return one;
    return NULL;
}

/* Whether a device could read all of these bytes. Neighbours count as one. */
static int is_locked(Address at, size_t n) {
    Address end = at + n;
    for (int moved = 1; moved && at < end;) {
        moved = 0;
        for (Range* one = ranges; one; one = one->next)
            if (one->kind != IS_MANAGED && one->at <= at && at < one->at + one->n) at = one->at + one->n, moved = 1;
    }
    return at >= end;
}

static void add(Address at, size_t n, int kind) {
    Range* one = calloc(1, sizeof *one);
    one->at = at, one->n = n, one->kind = kind, one->where = MIXED, one->next = ranges;
    ranges = one;
    if (kind != IS_MANAGED) locked += n;
}

static void take_out(Range* which) {
    for (Range** one = &ranges; *one; one = &(*one)->next)
        if (*one == which) {
            *one = which->next;
            if (which->kind != IS_MANAGED) locked -= which->n;
            free(which);
            return;
        }
}
