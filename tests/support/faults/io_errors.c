/* Preloaded into the proxy's processes: I/O errors of one folder, as a dying disk gives them.
 *
 * While the file CHAOS_SWITCH exists, whatever writes, cuts or syncs a file under CHAOS_FOLDER
 * fails with EIO, as if the kernel said it; nothing else is touched. The proxy knows nothing of it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int fails(int fd) {
    const char *file = getenv("CHAOS_SWITCH"), *folder = getenv("CHAOS_FOLDER");
    char link[64], path[PATH_MAX];
    ssize_t length = -1;
    int before = errno;
    if (file != NULL && folder != NULL && access(file, F_OK) == 0) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        length = readlink(link, path, sizeof path - 1);
    }
    errno = before;
    if (length < 0) return 0;
    path[length] = 0;
    if (strncmp(path, folder, strlen(folder)) != 0) return 0;
    errno = EIO;
    return 1;
}

#define FAILING(type, name, parameters, ...)                                      \
    type name parameters {                                                        \
        __typeof__(name) *next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name);     \
        return fails(fd) ? -1 : next(__VA_ARGS__);                                \
    }

FAILING(ssize_t, write, (int fd, const void *data, size_t size), fd, data, size)
FAILING(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), fd, data, size, at)
FAILING(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), fd, data, size, at)
FAILING(int, ftruncate, (int fd, off_t size), fd, size)
FAILING(int, ftruncate64, (int fd, off64_t size), fd, size)
FAILING(int, fsync, (int fd), fd)
FAILING(int, fdatasync, (int fd), fd)
