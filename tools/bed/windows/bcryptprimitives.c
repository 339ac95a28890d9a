/* The one function that Rust's programs take from this DLL, which Wine 8 does not have. */
#include <windows.h>
BOOLEAN NTAPI SystemFunction036(PVOID buffer, ULONG bytes); /* RtlGenRandom */

__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE buffer, SIZE_T bytes) {
    return SystemFunction036(buffer, (ULONG)bytes);
}
