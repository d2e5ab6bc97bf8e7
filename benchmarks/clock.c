// A library that shifts the clock of a program, its monotonic one apart, by the seconds in a file:
//     cc -shared -fPIC -o clock.so clock.c; LD_PRELOAD=$PWD/clock.so python ...
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
static double *offset;
void use_clock(const char *path) { offset = mmap(0, 8, PROT_READ, MAP_SHARED, open(path, O_RDONLY), 0); }
int clock_gettime(clockid_t clock, struct timespec *result) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int error = real(clock, result);
    if (clock == CLOCK_REALTIME && offset) result->tv_sec += (long)*offset;
    return error;
}
