/* A file system that fails: FIELD_FAULT is CALL:ERRNO:TEXT, for paths that contain the text.
   Build it by gcc -shared -fPIC, and load it by LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int fails(const char *call, const char *path) {
    const char *fault = getenv("FIELD_FAULT");
    size_t length = strlen(call);
    if (fault == NULL || path == NULL || strncmp(fault, call, length) || fault[length] != ':') {
        return 0;
    }
    const char *text = strchr(fault + length + 1, ':');
    if (text == NULL || strstr(path, text + 1) == NULL) {
        return 0;
    }
    errno = atoi(fault + length + 1);
    return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int mkdir(const char *path, mode_t mode) {
    return fails("mkdir", path) ? -1 : NEXT(mkdir)(path, mode);
}

int rename(const char *from, const char *to) {
    return fails("rename", to) ? -1 : NEXT(rename)(from, to);
}

int unlink(const char *path) {
    return fails("unlink", path) ? -1 : NEXT(unlink)(path);
}

int unlinkat(int folder, const char *path, int flags) {
    char link[64], found[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(link, found, sizeof found - 1);
    found[length < 0 ? 0 : length] = 0;
    return fails("unlink", found) ? -1 : NEXT(unlinkat)(folder, path, flags);
}

ssize_t write(int file, const void *bytes, size_t size) {
    char link[64], found[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, found, sizeof found - 1);
    found[length < 0 ? 0 : length] = 0;
    return fails("write", found) ? -1 : NEXT(write)(file, bytes, size);
}
