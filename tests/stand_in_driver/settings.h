/* What the stand-in is told to be and to fail at, and how a call begins and ends. */

#pragma once

#include "platform.h"

typedef int Status;
typedef uint64_t Address;
enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713
};
enum { PAGE = 4096, HOST = -1, MIXED = -2 };

typedef struct Fault {
    char call[64];
    unsigned at, seen; /* at: which call of that name; 0: each */
    Status status;
} Fault;

static Fault faults[32];
static unsigned fault_count;
static uint64_t slow, free_bytes, total_bytes, lockable;
static int version, major_, minor_, managed_, readonly_;

static uint64_t numbered(const char* settings, const char* name, uint64_t otherwise) {
    size_t n = strlen(name);
    for (const char* at = settings; at && *at; at = strchr(at, ' '), at = at ? at + 1 : NULL)
        if (!strncmp(at, name, n) && at[n] == '=') return strtoull(at + n + 1, NULL, 10);
    return otherwise;
}

static void read_settings(void) {
    char text[4096];
    setting(text, sizeof text);
    slow = numbered(text, "slow", 0);
    total_bytes = numbered(text, "total", 8ull << 30), free_bytes = numbered(text, "free", 7ull << 30);
    lockable = numbered(text, "lockable", UINT64_MAX);
    version = (int)numbered(text, "version", 13000);
    major_ = (int)numbered(text, "major", 7), minor_ = (int)numbered(text, "minor", 5);
    managed_ = (int)numbered(text, "managed", 1), readonly_ = (int)numbered(text, "readonly", 1);
    fault_count = 0;
    for (char* at = strtok(text, " "); at && fault_count < 32; at = strtok(NULL, " ")) {
        if (strncmp(at, "cu", 2)) continue;
        Fault* fault = &faults[fault_count];
        char *equals = strchr(at, '='), *nth = strchr(at, '@');
        if (!equals) continue;
        size_t n = (size_t)((nth ? nth : equals) - at);
        if (n >= sizeof fault->call) continue;
        memset(fault, 0, sizeof *fault);
        memcpy(fault->call, at, n);
        fault->at = nth ? (unsigned)atoi(nth + 1) : 0, fault->status = atoi(equals + 1);
        fault_count++;
    }
}

/* The status that a call is told to fail with. Under the lock. */
static Status told(const char* call) {
    for (unsigned i = 0; i < fault_count; i++)
        if (!strcmp(faults[i].call, call) && ++faults[i].seen && (!faults[i].at || faults[i].at == faults[i].seen))
            return faults[i].status;
    return OK;
}

static Status begun(const char* call) {
    enter();
    return told(call);
}

/* The lock is held from CALL to DONE. */
#define CALL(name)               \
    Status status = begun(name); \
    if (status) goto done
#define REFUSE(why)     \
    do {                \
        status = (why); \
        goto done;      \
    } while (0)
#define NEEDS_CONTEXT() \
    if (!current) REFUSE(INVALID_CONTEXT)
#define DONE \
    done:    \
    leave(); \
    return status;

static _Thread_local void* current; /* this thread's context */
