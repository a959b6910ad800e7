/* A library for LD_PRELOAD: below one directory, calls fail as they do on other file systems.
 *
 * OTHER_FS_BELOW names the directory. A rule is "CALL FIRST COUNT ERRNO EFFECT": of the calls of
 * that kind, COUNT from the FIRST on answer with ERRNO, "before" they take effect or "after". With
 * the effect "hidden" an unlink succeeds and renames the file as NFS does while it is open. Rules
 * are joined by ";", and set by OTHER_FS_RULES or other_fs_rules(), which counts anew.
 *
 * Calls: link, noreplace, rename, unlink, rmdir, mkdir, create, open, direct (an open with O_DIRECT),
 * sync (of a file), syncdir, close (of a file), closedir, write, preallocate.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST_RULES 8
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

enum effect { NONE, BEFORE, AFTER, HIDDEN };

static struct rule {
    char call[16], effect[16];
    long first, count, seen;
    int code;
} rules[MOST_RULES];
static int rules_used;
static long struck;

/* Set the rules; returns how many calls the first of the earlier ones has struck. */
long other_fs_rules(const char *text) {
    long before = __atomic_exchange_n(&struck, 0, __ATOMIC_SEQ_CST);
    int used = 0;
    while (text && used < MOST_RULES) {
        struct rule *rule = &rules[used];
        if (sscanf(text, "%15s %ld %ld %d %15[a-z]", rule->call, &rule->first, &rule->count,
                   &rule->code, rule->effect) == 5) {
            rule->seen = 0;
            used++;
        }
        text = strchr(text, ';');
        text = text ? text + 1 : NULL;
    }
    rules_used = used;
    return before;
}

__attribute__((constructor)) static void begin(void) { other_fs_rules(getenv("OTHER_FS_RULES")); }

static int is_below(int directory, const char *path) {
    const char *root = getenv("OTHER_FS_BELOW");
    char link[64], found[PATH_MAX];
    if (!root) return 0;
    if (path && path[0] == '/') return !strncmp(path, root, strlen(root));
    if (directory == AT_FDCWD) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    ssize_t length = readlink(link, found, sizeof found - 1);
    found[length < 0 ? 0 : length] = 0;
    return !strncmp(found, root, strlen(root));
}

/* The effect of the first rule that strikes a call; sets errno by it. */
static enum effect strike(const char *call, int directory, const char *path) {
    if (!rules_used || !is_below(directory, path)) return NONE;
    for (struct rule *rule = rules; rule < rules + rules_used; rule++) {
        if (strcmp(rule->call, call)) continue;
        long number = __atomic_add_fetch(&rule->seen, 1, __ATOMIC_SEQ_CST);
        if (number < rule->first || number - rule->first >= rule->count) continue;
        if (rule == rules) __atomic_add_fetch(&struck, 1, __ATOMIC_SEQ_CST);
        errno = rule->code;
        return rule->effect[0] == 'b' ? BEFORE : rule->effect[0] == 'a' ? AFTER : HIDDEN;
    }
    return NONE;
}

/* Make a call, unless it fails before; answer that it failed, if it does after. */
#define ANSWER(call, directory, path, made)                     \
    do {                                                        \
        enum effect effect = strike(call, directory, path);     \
        int code = errno;                                       \
        if (effect == BEFORE) return -1;                        \
        long result = (made);                                   \
        if (effect != AFTER || result < 0) return result;       \
        errno = code;                                           \
        return -1;                                              \
    } while (0)

int linkat(int from, const char *old, int to, const char *new, int flags) {
    ANSWER("link", to, new, REAL(linkat)(from, old, to, new, flags));
}

int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

int renameat(int from, const char *old, int to, const char *new) {
    ANSWER("rename", to, new, REAL(renameat)(from, old, to, new));
}

int rename(const char *old, const char *new) { return renameat(AT_FDCWD, old, AT_FDCWD, new); }

int renameat2(int from, const char *old, int to, const char *new, unsigned int flags) {
    ANSWER("noreplace", to, new, REAL(renameat2)(from, old, to, new, flags));
}

int unlinkat(int directory, const char *path, int flags) {
    static long number;
    const char *call = flags & AT_REMOVEDIR ? "rmdir" : "unlink";
    enum effect effect = strike(call, directory, path);
    int code = errno;
    if (effect == BEFORE) return -1;
    if (effect == HIDDEN && path[0] != '/') {
        char name[64];
        long each = __atomic_add_fetch(&number, 1, __ATOMIC_SEQ_CST);
        snprintf(name, sizeof name, ".nfs%016lx%08lx", (long)getpid(), each);
        return REAL(renameat)(directory, path, directory, name);
    }
    int result = REAL(unlinkat)(directory, path, flags);
    if (effect != AFTER || result < 0) return result;
    errno = code;
    return -1;
}

int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }

int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int directory, const char *path, mode_t mode) {
    ANSWER("mkdir", directory, path, REAL(mkdirat)(directory, path, mode));
}

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int fsync(int file) {
    struct stat found;
    int is_directory = !fstat(file, &found) && S_ISDIR(found.st_mode);
    ANSWER(is_directory ? "syncdir" : "sync", file, NULL, REAL(fsync)(file));
}

int close(int file) {
    struct stat found;
    int is_directory = rules_used && !fstat(file, &found) && S_ISDIR(found.st_mode);
    ANSWER(is_directory ? "closedir" : "close", file, NULL, REAL(close)(file));
}

int fallocate64(int file, int mode, off64_t offset, off64_t length) {
    ANSWER("preallocate", file, NULL, REAL(fallocate64)(file, mode, offset, length));
}

int fallocate(int file, int mode, off_t offset, off_t length) {
    return fallocate64(file, mode, offset, length);
}

ssize_t pwritev64v2(int file, const struct iovec *buffers, int count, off64_t offset, int flags) {
    ANSWER("write", file, NULL, REAL(pwritev64v2)(file, buffers, count, offset, flags));
}

ssize_t pwritev2(int file, const struct iovec *buffers, int count, off_t offset, int flags) {
    return pwritev64v2(file, buffers, count, offset, flags);
}

ssize_t pwritev64(int file, const struct iovec *buffers, int count, off64_t offset) {
    return pwritev64v2(file, buffers, count, offset, 0);
}

ssize_t pwritev(int file, const struct iovec *buffers, int count, off_t offset) {
    return pwritev64v2(file, buffers, count, offset, 0);
}

static int open_file(int directory, const char *path, int flags, mode_t mode) {
    if ((flags & O_DIRECT) && strike("direct", directory, path)) return -1;
    enum effect effect = strike(flags & O_CREAT ? "create" : "open", directory, path);
    int code = errno;
    if (effect == BEFORE) return -1;
    int result = REAL(openat64)(directory, path, flags, mode);
    if (effect != AFTER || result < 0) return result;
    close(result);
    errno = code;
    return -1;
}

#define MODE(flags)                                  \
    mode_t mode = 0;                                 \
    if ((flags) & (O_CREAT | O_TMPFILE)) {           \
        va_list given;                               \
        va_start(given, flags);                      \
        mode = va_arg(given, mode_t);                \
        va_end(given);                               \
    }

int openat64(int directory, const char *path, int flags, ...) {
    MODE(flags)
    return open_file(directory, path, flags, mode);
}

int openat(int directory, const char *path, int flags, ...) {
    MODE(flags)
    return open_file(directory, path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    MODE(flags)
    return open_file(AT_FDCWD, path, flags, mode);
}

int open(const char *path, int flags, ...) {
    MODE(flags)
    return open_file(AT_FDCWD, path, flags, mode);
}
