/* Preloaded into the proxy's processes: I/O errors of one folder, as a dying disk gives them.
 *
 * While the file CHAOS_SWITCH exists, whatever writes, cuts or syncs a file under CHAOS_FOLDER
 * fails with EIO, the way the kernel would say it; nothing else is touched. The proxy itself knows
 * nothing of it.
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
    const char *told = getenv("CHAOS_SWITCH"), *folder = getenv("CHAOS_FOLDER");
    char link[64], path[PATH_MAX];
    ssize_t length;
    int before = errno;
    if (told == NULL || folder == NULL || access(told, F_OK) != 0) {
        errno = before;
        return 0;
    }
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length < 0) return 0;
    path[length] = 0;
    if (strncmp(path, folder, strlen(folder)) != 0) return 0;
    errno = EIO;
    return 1;
}

#define NEXT(name) __typeof__(name) *next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t size) {
    NEXT(write);
    return fails(fd) ? -1 : next(fd, data, size);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    NEXT(pwrite);
    return fails(fd) ? -1 : next(fd, data, size, at);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    NEXT(pwrite64);
    return fails(fd) ? -1 : next(fd, data, size, at);
}

int ftruncate(int fd, off_t size) {
    NEXT(ftruncate);
    return fails(fd) ? -1 : next(fd, size);
}

int ftruncate64(int fd, off64_t size) {
    NEXT(ftruncate64);
    return fails(fd) ? -1 : next(fd, size);
}

int fsync(int fd) {
    NEXT(fsync);
    return fails(fd) ? -1 : next(fd);
}

int fdatasync(int fd) {
    NEXT(fdatasync);
    return fails(fd) ? -1 : next(fd);
}
