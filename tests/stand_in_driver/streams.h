/* A stream is a thread that does its work in order; an event is a point in one. */

#pragma once

#include "host_memory.h"

typedef struct Event {
    unsigned asked, reached; /* recordings */
    double time;
} Event;

typedef struct Work {
    enum { COPY, RECORD, WAIT, PREFETCH, LAST } kind;
    Address to, from;
    size_t n;
    int where;
    Event* event;
    unsigned recording;
    struct Work* next;
} Work;

typedef struct Stream {
    Work *first, **last;
    int is_busy;
    struct Stream* next;
} Stream;

static Stream* streams;

static void perform(Work* work) { /* without the lock but for what it looks at */
    if (work->kind == COPY) {
        if (slow) nap((unsigned)slow);
        enter();
        if (!is_locked(work->from, work->n)) violations++;
        leave();
        memcpy((void*)(uintptr_t)work->to, (void*)(uintptr_t)work->from, work->n);
        return;
    }
    enter();
    if (work->kind == RECORD) work->event->time = now(), work->event->reached = work->recording;
    if (work->kind == WAIT)
        while (work->event->reached < work->recording) await();
    if (work->kind == PREFETCH) {
        Range* one = around(work->to, work->n, 1);
        if (one) one->where = work->n == one->n ? work->where : MIXED;
    }
    announce();
    leave();
}

static WORKER {
    Stream* stream = given;
    for (int goes_on = 1; goes_on;) {
        enter();
        stream->is_busy = 0;
        announce();
        while (!stream->first) await();
        Work* work = stream->first;
        stream->first = work->next;
        if (!stream->first) stream->last = &stream->first;
        stream->is_busy = 1;
        leave();
        goes_on = work->kind != LAST;
        if (goes_on) perform(work);
        free(work);
    }
    free(stream);
    return 0;
}

/* Under the lock. The null stream's work is done at once, behind nothing. */
static void put(Stream* stream, Work what) {
    if (!stream) {
        leave();
        perform(&what);
        enter();
        return;
    }
    Work* work = malloc(sizeof *work);
    *work = what, work->next = NULL;
    *stream->last = work, stream->last = &work->next;
    announce();
}

static int reads(Address at, size_t n) { /* whether a copy that is asked for reads of these bytes */
    for (Stream* stream = streams; stream; stream = stream->next)
        for (Work* work = stream->first; work; work = work->next)
            if (work->kind == COPY && work->from < at + n && at < work->from + work->n) return 1;
    return 0;
}

EXPORT Status cuStreamCreate(Stream** out, unsigned flags) {
    CALL("cuStreamCreate");
    NEEDS_CONTEXT();
    (void)flags;
    *out = calloc(1, sizeof **out);
    (*out)->last = &(*out)->first, (*out)->next = streams;
    streams = *out;
    start(*out);
    DONE
}

EXPORT Status cuStreamDestroy_v2(Stream* stream) {
    CALL("cuStreamDestroy_v2");
    for (Stream** one = &streams; *one; one = &(*one)->next)
        if (*one == stream) {
            *one = stream->next;
            put(stream, (Work){.kind = LAST});
            break;
        }
    DONE
}

EXPORT Status cuStreamSynchronize(Stream* stream) {
    CALL("cuStreamSynchronize");
    while (stream && (stream->first || stream->is_busy)) await();
    DONE
}

EXPORT Status cuStreamWaitEvent(Stream* stream, Event* event, unsigned flags) {
    CALL("cuStreamWaitEvent");
    (void)flags;
    if (event->asked) put(stream, (Work){.kind = WAIT, .event = event, .recording = event->asked});
    DONE
}

EXPORT Status cuStreamIsCapturing(Stream* stream, int* out) {
    CALL("cuStreamIsCapturing");
    (void)stream;
    *out = 0;
    DONE
}

EXPORT Status cuEventCreate(Event** out, unsigned flags) {
    CALL("cuEventCreate");
    NEEDS_CONTEXT();
    (void)flags;
    *out = calloc(1, sizeof **out);
    DONE
}

EXPORT Status cuEventRecord(Event* event, Stream* stream) {
    CALL("cuEventRecord");
    put(stream, (Work){.kind = RECORD, .event = event, .recording = ++event->asked});
    DONE
}

EXPORT Status cuEventQuery(Event* event) {
    CALL("cuEventQuery");
    if (event->reached < event->asked) status = NOT_READY;
    DONE
}

EXPORT Status cuEventSynchronize(Event* event) {
    CALL("cuEventSynchronize");
    while (event->reached < event->asked) await();
    DONE
}

EXPORT Status cuEventElapsedTime(float* out, Event* begin, Event* end) {
    CALL("cuEventElapsedTime");
    if (begin->reached < begin->asked || end->reached < end->asked) REFUSE(NOT_READY);
    *out = (float)(end->time - begin->time);
    DONE
}
