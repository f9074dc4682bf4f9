/* A file system that fails on command, for one process: preloaded, it stands between the process and libc.
 *
 * Below the folder of failing_volume_arm, calls number first to last fail with an error number, or kill the process; they are counted from that
 * call on. What is above libc (Python, torch, the Rust of safetensors) cannot tell it from a kernel that answers so.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define NAMES 65536

static char root[4096];
static long calls, first, last;
static int error_number, kills, armed, reads;
static char names[NAMES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Count from now on. number 0: kill the process. with_reads: opening a file or a folder for reading counts, too. */
void failing_volume_arm(const char *folder, long from, long to, int number, int with_reads) {
    pthread_mutex_lock(&lock);
    snprintf(root, sizeof root, "%s/", folder);
    calls = 0, first = from, last = to, error_number = number, kills = number == 0, reads = with_reads;
    names[0] = 0;
    armed = 1;
    pthread_mutex_unlock(&lock);
}

/* Count no more; returns the number of calls. */
long failing_volume_disarm(void) {
    armed = 0;
    return calls;
}

/* The operations that were counted, separated by spaces. */
const char *failing_volume_names(void) { return names; }

static int below(const char *path) { return strncmp(path, root, strlen(root)) == 0 || strncmp(path, root, strlen(root) - 1) == 0; }

static int of_descriptor(int descriptor, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, 4000);
    if (length < 0) return 0;
    path[length] = 0;
    return below(path);
}

static int at(int folder, const char *name, char *path) {
    if (name[0] == '/' || folder == AT_FDCWD) return below(name);
    return of_descriptor(folder, path);
}

/* True if this call fails; errno is set. */
static int fails(const char *name) {
    int failed = 0;
    pthread_mutex_lock(&lock);
    if (armed) {
        calls++;
        size_t used = strlen(names);
        if (used + strlen(name) + 2 < NAMES) snprintf(names + used, NAMES - used, used ? " %s" : "%s", name);
        failed = first <= calls && calls <= last;
    }
    pthread_mutex_unlock(&lock);
    if (failed && kills) kill(getpid(), SIGKILL);
    if (failed) errno = error_number;
    return failed;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)
#define FAIL_AT(folder, path, name, result) \
    do { char found[4096]; if (armed && at(folder, path, found) && fails(name)) return result; } while (0)
#define FAIL_OF(descriptor, name, result) \
    do { char found[4096]; if (armed && of_descriptor(descriptor, found) && fails(name)) return result; } while (0)

static int opening(int folder, const char *path, int flags) {
    char found[4096];
    if (!armed || !at(folder, path, found)) return 0;
    if (flags & (O_WRONLY | O_RDWR | O_CREAT)) return fails("create");
    return reads && fails("open");
}

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
        REAL(int, name, const char *, int, ...); \
        return opening(AT_FDCWD, path, flags) ? -1 : real(path, flags, mode); \
    }
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
        REAL(int, name, int, const char *, int, ...); \
        return opening(folder, path, flags) ? -1 : real(folder, path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

FILE *fopen64(const char *path, const char *mode) {
    REAL(FILE *, fopen64, const char *, const char *);
    return opening(AT_FDCWD, path, mode[0] == 'r' && !strchr(mode, '+') ? O_RDONLY : O_WRONLY) ? NULL : real(path, mode);
}

DIR *opendir(const char *path) {
    REAL(DIR *, opendir, const char *);
    return opening(AT_FDCWD, path, O_RDONLY) ? NULL : real(path);
}

ssize_t write(int descriptor, const void *content, size_t count) {
    REAL(ssize_t, write, int, const void *, size_t);
    FAIL_OF(descriptor, "write", -1);
    return real(descriptor, content, count);
}

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    FAIL_OF(descriptor, "write", -1);
    return real(descriptor, parts, count);
}

ssize_t pwrite64(int descriptor, const void *content, size_t count, off_t place) {
    REAL(ssize_t, pwrite64, int, const void *, size_t, off_t);
    FAIL_OF(descriptor, "write", -1);
    return real(descriptor, content, count, place);
}

ssize_t copy_file_range(int from, off64_t *there, int to, off64_t *here, size_t count, unsigned flags) {
    REAL(ssize_t, copy_file_range, int, off64_t *, int, off64_t *, size_t, unsigned);
    FAIL_OF(to, "write", -1);
    return real(from, there, to, here, count, flags);
}

static int syncing(int descriptor) {
    struct stat found;
    char path[4096];
    if (!armed || !of_descriptor(descriptor, path)) return 0;
    return fails(fstat(descriptor, &found) == 0 && S_ISDIR(found.st_mode) ? "sync-folder" : "sync");
}

int fsync(int descriptor) {
    REAL(int, fsync, int);
    return syncing(descriptor) ? -1 : real(descriptor);
}

int fdatasync(int descriptor) {
    REAL(int, fdatasync, int);
    return syncing(descriptor) ? -1 : real(descriptor);
}

int ftruncate64(int descriptor, off_t length) {
    REAL(int, ftruncate64, int, off_t);
    FAIL_OF(descriptor, "truncate", -1);
    return real(descriptor, length);
}

int ftruncate(int descriptor, off_t length) {
    REAL(int, ftruncate, int, off_t);
    FAIL_OF(descriptor, "truncate", -1);
    return real(descriptor, length);
}

int rename(const char *before, const char *after) {
    REAL(int, rename, const char *, const char *);
    FAIL_AT(AT_FDCWD, after, "rename", -1);
    return real(before, after);
}

int renameat(int from, const char *before, int to, const char *after) {
    REAL(int, renameat, int, const char *, int, const char *);
    FAIL_AT(to, after, "rename", -1);
    return real(from, before, to, after);
}

/* The kernel finds a name that is there before it asks the volume to make one. */
static int taken(const char *path) {
    struct stat found;
    if (lstat(path, &found) != 0) return 0;
    errno = EEXIST;
    return 1;
}

int link(const char *before, const char *after) {
    REAL(int, link, const char *, const char *);
    if (armed && taken(after)) return -1;
    FAIL_AT(AT_FDCWD, after, "link", -1);
    return real(before, after);
}

int linkat(int from, const char *before, int to, const char *after, int flags) {
    REAL(int, linkat, int, const char *, int, const char *, int);
    if (armed && after[0] == '/' && taken(after)) return -1;
    FAIL_AT(to, after, "link", -1);
    return real(from, before, to, after, flags);
}

int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    if (armed && taken(path)) return -1;
    FAIL_AT(AT_FDCWD, path, "mkdir", -1);
    return real(path, mode);
}

int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(int, mkdirat, int, const char *, mode_t);
    FAIL_AT(folder, path, "mkdir", -1);
    return real(folder, path, mode);
}

/* What is not there is not asked of the volume. */
static int missing(int folder, const char *path) {
    struct stat found;
    if (fstatat(folder, path, &found, AT_SYMLINK_NOFOLLOW) == 0) return 0;
    errno = ENOENT;
    return 1;
}

int unlink(const char *path) {
    REAL(int, unlink, const char *);
    if (armed && missing(AT_FDCWD, path)) return -1;
    FAIL_AT(AT_FDCWD, path, "remove", -1);
    return real(path);
}

int unlinkat(int folder, const char *path, int flags) {
    REAL(int, unlinkat, int, const char *, int);
    if (armed && missing(folder, path)) return -1;
    FAIL_AT(folder, path, "remove", -1);
    return real(folder, path, flags);
}

int rmdir(const char *path) {
    REAL(int, rmdir, const char *);
    if (armed && missing(AT_FDCWD, path)) return -1;
    FAIL_AT(AT_FDCWD, path, "remove", -1);
    return real(path);
}
