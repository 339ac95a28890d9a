/* Locks, threads, pages and clocks of both systems. */

#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef _WIN32
#include <windows.h>
#define EXPORT __declspec(dllexport)
static CRITICAL_SECTION lock;
static CONDITION_VARIABLE changed;
static INIT_ONCE once = INIT_ONCE_STATIC_INIT;
static BOOL CALLBACK made(PINIT_ONCE o, PVOID p, PVOID* c) {
    (void)o, (void)p, (void)c;
    InitializeCriticalSection(&lock);
    InitializeConditionVariable(&changed);
    return TRUE;
}
static void enter(void) {
    InitOnceExecuteOnce(&once, made, NULL, NULL);
    EnterCriticalSection(&lock);
}
static void leave(void) {
    LeaveCriticalSection(&lock);
}
static void await(void) {
    SleepConditionVariableCS(&changed, &lock, INFINITE);
}
static void announce(void) {
    WakeAllConditionVariable(&changed);
}
static void nap(unsigned us) {
    Sleep((us + 999) / 1000);
}
static double now(void) {
    LARGE_INTEGER at, each;
    QueryPerformanceCounter(&at), QueryPerformanceFrequency(&each);
    return 1e3 * (double)at.QuadPart / (double)each.QuadPart;
}
static void* pages(size_t n) {
    return VirtualAlloc(NULL, n, MEM_COMMIT | MEM_RESERVE, PAGE_READWRITE);
}
static void drop(void* at, size_t n) {
    (void)n, VirtualFree(at, 0, MEM_RELEASE);
}
static void setting(char* into, unsigned size) {
    if (!GetEnvironmentVariableA("FUSESTREAM_STAND_IN", into, size)) into[0] = 0;
}
static DWORD WINAPI worker(LPVOID);
static void start(void* stream) {
    CloseHandle(CreateThread(NULL, 0, worker, stream, 0, NULL));
}
#define WORKER DWORD WINAPI worker(LPVOID given)
#else
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#define EXPORT __attribute__((visibility("default")))
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static void enter(void) {
    pthread_mutex_lock(&lock);
}
static void leave(void) {
    pthread_mutex_unlock(&lock);
}
static void await(void) {
    pthread_cond_wait(&changed, &lock);
}
static void announce(void) {
    pthread_cond_broadcast(&changed);
}
static void nap(unsigned us) {
    usleep(us);
}
static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return 1e3 * (double)at.tv_sec + 1e-6 * (double)at.tv_nsec;
}
static void* pages(size_t n) {
    void* at = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}
static void drop(void* at, size_t n) {
    munmap(at, n);
}
static void setting(char* into, unsigned size) {
    const char* found = getenv("FUSESTREAM_STAND_IN");
    snprintf(into, size, "%s", found ? found : "");
}
static void* worker(void*);
static void start(void* stream) {
    pthread_t thread;
    pthread_create(&thread, NULL, worker, stream);
    pthread_detach(thread);
}
#define WORKER void* worker(void* given)
#endif
