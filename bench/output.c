/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "report.h"

enum { LINKS = 40, NAMES = 100 }; /* links in a row, as the kernel allows; temporary names tried */

/* Replaces a path that is a symbolic link by what the link names, which need not exist. */
static bool follow_links(char *path, size_t size) {
    for (int i = 0; i < LINKS; i++) {
        char target[sizeof((struct output *)0)->path];
        const ssize_t got = readlink(path, target, sizeof target);
        if (got < 0)
            return errno == EINVAL || errno == ENOENT; /* not a link; nothing of this name yet */
        const char *const slash = strrchr(path, '/');
        const size_t folder = target[0] == '/' || !slash ? 0 : (size_t)(slash - path) + 1;
        if (folder + (size_t)got >= size) {
            errno = ENAMETOOLONG;
            return false;
        }
        memcpy(path + folder, target, (size_t)got);
        path[folder + (size_t)got] = '\0';
    }
    errno = ELOOP;
    return false;
}

/* A new file beside the path. Others may be able to write to this folder, so a name that exists, be
 * it a link, is never opened. */
static int create_temporary(struct output *o) {
    int fd = -1;
    errno = EEXIST;
    for (int i = 0; i < NAMES && fd < 0 && errno == EEXIST; i++) {
        snprintf(o->temporary, sizeof o->temporary, "%s.%ld-%d", o->path, (long)getpid(), i);
        fd = open(o->temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    }
    return fd;
}

bool output_is_special(const char *path) {
    struct stat is;
    return stat(path, &is) == 0 && !S_ISREG(is.st_mode) && !S_ISDIR(is.st_mode);
}

bool output_check(const char *path) {
    if (output_is_special(path)) /* not opened: a reader of a pipe would see its end */
        return faccessat(AT_FDCWD, path, W_OK, AT_EACCESS) == 0;
    struct output o;
    const bool good = output_open(&o, path);
    output_discard(&o);
    return good;
}

bool output_open(struct output *o, const char *path) {
    *o = (struct output){0};
    if (strlen(path) >= sizeof o->path) {
        errno = ENAMETOOLONG;
        return false;
    }
    snprintf(o->path, sizeof o->path, "%s", path);
    int fd;
    if (output_is_special(path)) {
        fd = open(path, O_WRONLY | O_CLOEXEC);
    } else {
        struct stat is;
        if (!follow_links(o->path, sizeof o->path))
            return false;
        const bool exists = lstat(o->path, &is) == 0;
        if (exists && !S_ISREG(is.st_mode)) {
            errno = S_ISDIR(is.st_mode) ? EISDIR : EINVAL;
            return false;
        }
        if (exists && faccessat(AT_FDCWD, o->path, W_OK, AT_EACCESS) != 0)
            return false; /* a rename would replace it all the same */
        fd = create_temporary(o);
        if (fd >= 0 && exists)
            (void)!fchmod(fd, is.st_mode & 0777);
        if (fd < 0)
            o->temporary[0] = '\0';
    }
    o->file = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (!o->file && fd >= 0)
        close(fd);
    return o->file != NULL;
}

bool output_commit(struct output *o) {
    bool good = !ferror(o->file);
    good &= fclose(o->file) == 0;
    o->file = NULL;
    if (good && (!o->temporary[0] || rename(o->temporary, o->path) == 0))
        return true;
    const int why = errno;
    if (o->temporary[0])
        unlink(o->temporary);
    errno = why;
    return false;
}

void output_discard(struct output *o) {
    const int why = errno;
    if (o->file)
        fclose(o->file);
    if (o->file && o->temporary[0])
        unlink(o->temporary);
    o->file = NULL;
    errno = why;
}
