/* A stand-in for NVIDIA's driver, over plain memory: a DLL for Windows, a shared library elsewhere. For tests, never
   shipped.

   It has the calls that FuseStream makes, and those of streams and events that torch makes beside them, with the
   driver's own signatures, so that whoever calls it goes through the real calling convention. There is one device. A
   stream is a thread that does its work in order; a kernel does nothing. What a card would get wrong in silence is
   counted (`standInCount`).

   Settings are read at each cuInit from FUSESTREAM_STAND_IN, separated by spaces:

       NAME=STATUS     the call NAME returns this status, always
       NAME@N=STATUS   the Nth call of NAME (from 1) does
       slow=US         each copy takes so many microseconds more
       free=BYTES, total=BYTES      of the device
       lockable=BYTES  of host memory that may be pinned and registered together
       version=NUMBER  of the driver, as 12020
       major=N, minor=N, managed=0|1, readonly=0|1   what the device says of itself

   Built with -DOLDER it lacks what drivers before 12.2 lack. */

#include "streams.h"

/* --------------------------------------------------------------------------- driver and device */

EXPORT Status cuInit(unsigned flags) {
    Status status;
    enter();
    (void)flags;
    read_settings();
    status = told("cuInit");
    leave();
    return status;
}

EXPORT Status cuDriverGetVersion(int* out) {
    CALL("cuDriverGetVersion");
    *out = version;
    DONE
}

EXPORT Status cuGetErrorName(Status status, const char** out) {
    static const struct {
        Status status;
        const char* name;
    } known[] = {
        {1, "CUDA_ERROR_INVALID_VALUE"},
        {2, "CUDA_ERROR_OUT_OF_MEMORY"},
        {100, "CUDA_ERROR_NO_DEVICE"},
        {200, "CUDA_ERROR_INVALID_IMAGE"},
        {201, "CUDA_ERROR_INVALID_CONTEXT"},
        {500, "CUDA_ERROR_NOT_FOUND"},
        {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
        {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
        {801, "CUDA_ERROR_NOT_SUPPORTED"},
        {999, "CUDA_ERROR_UNKNOWN"},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].status == status) return *out = known[i].name, OK;
    return *out = NULL, INVALID_VALUE;
}

EXPORT Status cuGetErrorString(Status status, const char** out) {
    return *out = status == OUT_OF_MEMORY ? "out of memory" : "said by the stand-in", OK;
}

EXPORT Status cuDeviceGet(int* out, int ordinal) {
    CALL("cuDeviceGet");
    if (ordinal) REFUSE(101);
    *out = 0;
    DONE
}

EXPORT Status cuDeviceGetAttribute(int* out, int which, int device) {
    CALL("cuDeviceGetAttribute");
    if (device) REFUSE(101);
    switch (which) {
        case 13:
            *out = 1650000;
            break; /* kHz */
        case 16:
            *out = 34;
            break; /* multiprocessors */
        case 36:
            *out = 7000000;
            break; /* memory, kHz */
        case 37:
            *out = 256;
            break; /* bits of the bus */
        case 75:
            *out = major_;
            break;
        case 76:
            *out = minor_;
            break;
        case 89:
            *out = managed_;
            break;
        case 113:
            *out = readonly_;
            break;
        default:
            status = INVALID_VALUE;
    }
    DONE
}

EXPORT Status cuDevicePrimaryCtxRetain(void** out, int device) {
    CALL("cuDevicePrimaryCtxRetain");
    static int primary;
    if (device) REFUSE(101);
    *out = &primary;
    DONE
}

EXPORT Status cuCtxSetCurrent(void* context) {
    CALL("cuCtxSetCurrent");
    current = context;
    DONE
}

EXPORT Status cuCtxGetCurrent(void** out) {
    CALL("cuCtxGetCurrent");
    *out = current;
    DONE
}

EXPORT Status cuMemGetInfo_v2(size_t* free_now, size_t* total) {
    CALL("cuMemGetInfo_v2");
    NEEDS_CONTEXT();
    *free_now = (size_t)free_bytes;
    *total = (size_t)total_bytes;
    DONE
}

EXPORT Status cuDeviceGraphMemTrim(int device) {
    CALL("cuDeviceGraphMemTrim");
    (void)device;
    DONE
}

/* -------------------------------------------------------------------------------------- memory */

EXPORT Status cuMemHostRegister_v2(Address at, size_t n, unsigned flags) {
    CALL("cuMemHostRegister_v2");
    NEEDS_CONTEXT();
    (void)flags;
    if (!n || at % PAGE || n % PAGE) REFUSE(INVALID_VALUE);
    for (Range* one = ranges; one; one = one->next)
        if (one->kind == IS_REGISTERED && one->at < at + n && at < one->at + one->n) REFUSE(ALREADY_REGISTERED);
    if (locked + n > lockable) REFUSE(OUT_OF_MEMORY);
    add(at, n, IS_REGISTERED);
    DONE
}

EXPORT Status cuMemHostUnregister(Address at) {
    CALL("cuMemHostUnregister");
    NEEDS_CONTEXT();
    Range* one = range_at(at, IS_REGISTERED);
    if (!one) REFUSE(NOT_REGISTERED);
    if (reads(one->at, one->n)) violations++;
    take_out(one);
    DONE
}

static Status allocated(const char* call, Address* out, size_t n, int kind) {
    CALL(call);
    NEEDS_CONTEXT();
    if (!n) REFUSE(INVALID_VALUE);
    if (kind != IS_MANAGED && locked + n > lockable) REFUSE(OUT_OF_MEMORY);
    void* at = pages(n);
    if (!at) REFUSE(OUT_OF_MEMORY);
    *out = (Address)(uintptr_t)at;
    add(*out, n, kind);
    DONE
}

static Status freed(const char* call, Address at, int kind) {
    CALL(call);
    NEEDS_CONTEXT();
    Range* one = range_at(at, kind);
    if (!one) REFUSE(INVALID_VALUE);
    if (reads(one->at, one->n)) violations++;
    drop((void*)(uintptr_t)one->at, one->n);
    take_out(one);
    DONE
}

EXPORT Status cuMemHostAlloc(Address* out, size_t n, unsigned flags) {
    (void)flags;
    return allocated("cuMemHostAlloc", out, n, IS_ALLOCATED);
}

EXPORT Status cuMemFreeHost(Address at) {
    return freed("cuMemFreeHost", at, IS_ALLOCATED);
}

EXPORT Status cuMemcpyHtoDAsync_v2(Address to, Address from, size_t n, Stream* stream) {
    CALL("cuMemcpyHtoDAsync_v2");
    NEEDS_CONTEXT();
    if (!is_locked(from, n)) pageable++;
    put(stream, (Work){.kind = COPY, .to = to, .from = from, .n = n});
    DONE
}

EXPORT Status cuMemcpyDtoH_v2(void* to, Address from, size_t n) {
    CALL("cuMemcpyDtoH_v2");
    NEEDS_CONTEXT();
    memcpy(to, (void*)(uintptr_t)from, n);
    DONE
}

EXPORT Status cuMemAllocManaged(Address* out, size_t n, unsigned flags) {
    return flags == 1 ? allocated("cuMemAllocManaged", out, n, IS_MANAGED) : INVALID_VALUE;
}

EXPORT Status cuMemFree_v2(Address at) {
    return freed("cuMemFree_v2", at, IS_MANAGED);
}

static Status prefetched(const char* call, Address at, size_t n, int where, Stream* stream) {
    CALL(call);
    NEEDS_CONTEXT();
    if (!around(at, n, 1) || where < HOST || where > 0) REFUSE(INVALID_VALUE);
    put(stream, (Work){.kind = PREFETCH, .to = at, .n = n, .where = where});
    DONE
}

static Status advised(const char* call, Address at, size_t n, int advice, int where) {
    CALL(call);
    NEEDS_CONTEXT();
    if (!around(at, n, 1) || advice < 1 || advice > 6 || where < HOST || where > 0) REFUSE(INVALID_VALUE);
    DONE
}

EXPORT Status cuMemPrefetchAsync(Address at, size_t n, int where, Stream* stream) {
    return prefetched("cuMemPrefetchAsync", at, n, where, stream);
}

EXPORT Status cuMemAdvise(Address at, size_t n, int advice, int where) {
    return advised("cuMemAdvise", at, n, advice, where);
}

#ifndef OLDER
typedef struct Location {
    int kind, number; /* 1: a device, 2: the host */
} Location;

static int place(Location where) {
    return where.kind == 2 ? HOST : where.kind == 1 ? where.number : MIXED;
}

EXPORT Status cuMemPrefetchAsync_v2(Address at, size_t n, Location where, unsigned flags, Stream* stream) {
    return flags ? INVALID_VALUE : prefetched("cuMemPrefetchAsync_v2", at, n, place(where), stream);
}

EXPORT Status cuMemAdvise_v2(Address at, size_t n, int advice, Location where) {
    return advised("cuMemAdvise_v2", at, n, advice, place(where));
}
#endif

EXPORT Status cuMemRangeGetAttribute(void* out, size_t size, int which, Address at, size_t n) {
    CALL("cuMemRangeGetAttribute");
    NEEDS_CONTEXT();
    Range* one = around(at, n, 1);
    if (!one || size != sizeof(int) || which != 4) REFUSE(INVALID_VALUE);
    *(int*)out = one->where;
    DONE
}

/* ------------------------------------------------------------------------------------- kernels */

typedef struct LaunchConfig {
    unsigned grid[3], block[3], shared;
    Stream* stream;
    void* attributes;
    unsigned attribute_count;
} LaunchConfig;

static LaunchConfig last_launch;
static int module_, function_;

EXPORT Status cuModuleLoadDataEx(void** out, const char* code, unsigned count, int* options, void** values) {
    CALL("cuModuleLoadDataEx");
    NEEDS_CONTEXT();
    if (memcmp(code, "\177ELF", 4) && !strstr(code, ".version")) {
        for (unsigned i = 0; i < count; i++)
            if (options[i] == 5) strcpy(values[i], "neither machine code nor PTX");
        REFUSE(INVALID_IMAGE);
    }
    *out = &module_;
    DONE
}

EXPORT Status cuModuleGetFunction(void** out, void* module, const char* name) {
    CALL("cuModuleGetFunction");
    NEEDS_CONTEXT();
    if (module != &module_ || !*name) REFUSE(NOT_FOUND);
    *out = &function_;
    DONE
}

EXPORT Status cuModuleGetGlobal_v2(Address* out, size_t* n, void* module, const char* name) {
    CALL("cuModuleGetGlobal_v2");
    NEEDS_CONTEXT();
    (void)module, (void)out, (void)n, (void)name;
    status = NOT_FOUND;
    DONE
}

EXPORT Status cuFuncGetAttribute(int* out, int which, void* function) {
    CALL("cuFuncGetAttribute");
    NEEDS_CONTEXT();
    if (function != &function_) REFUSE(INVALID_VALUE);
    *out = which == 4 ? 128 : 0; /* registers */
    DONE
}

EXPORT Status cuFuncSetAttribute(void* function, int which, int value) {
    CALL("cuFuncSetAttribute");
    NEEDS_CONTEXT();
    if (function != &function_ || which != 8 || value > 64 << 10) REFUSE(INVALID_VALUE);
    DONE
}

EXPORT Status cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, void* function, int threads, size_t shared) {
    CALL("cuOccupancyMaxActiveBlocksPerMultiprocessor");
    NEEDS_CONTEXT();
    if (function != &function_) REFUSE(INVALID_VALUE);
    *out = threads <= 512 && shared <= 32 << 10 ? 2 : 1;
    DONE
}

EXPORT Status cuLaunchKernelEx(const LaunchConfig* config, void* function, void** parameters, void** extra) {
    CALL("cuLaunchKernelEx");
    NEEDS_CONTEXT();
    (void)parameters, (void)extra;
    if (function != &function_ || !config->grid[0] || !config->block[0]) REFUSE(INVALID_VALUE);
    last_launch = *config;
    launches++;
    DONE
}

/* -------------------------------------------------------------------------- what tests ask for */

/* Bytes that are locked, or registered. pageable: copies of memory that is not locked. violations: copies of memory
 * that was given back meanwhile. */
EXPORT int64_t standInCount(const char* what) {
    enter();
    int64_t found = !strcmp(what, "pageable") ? pageable : !strcmp(what, "violations") ? violations : -1;
    if (!strcmp(what, "launches")) found = launches;
    if (!strcmp(what, "locked")) found = (int64_t)locked;
    if (!strcmp(what, "ranges")) {
        found = 0;
        for (Range* one = ranges; one; one = one->next) found++;
    }
    if (!strcmp(what, "registered")) {
        found = 0;
        for (Range* one = ranges; one; one = one->next) found += one->kind == IS_REGISTERED ? (int64_t)one->n : 0;
    }
    leave();
    return found;
}

/* Grid, block, shared bytes and number of attributes of the last launch. */
EXPORT void standInLaunch(unsigned out[8]) {
    enter();
    memcpy(out, last_launch.grid, 7 * sizeof *out);
    out[7] = last_launch.attribute_count;
    leave();
}
