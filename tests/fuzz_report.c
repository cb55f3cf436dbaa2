/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A report that somebody else wrote: whatever its bytes, it is refused, or read and shown as a page,
 * a table and a report. Driven by libFuzzer (./run fuzz), or
 *
 *     test_fuzz_report FILE...
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "report.h"

/* Through a file, as the command reads it. */
static bool try_input(const uint8_t *bytes, size_t size) {
    static char path[64];
    if (!path[0])
        snprintf(path, sizeof path, "/dev/shm/rafter-fuzz-%ld", (long)getpid());
    FILE *const file = fopen(path, "wb"), *const nowhere = fopen("/dev/null", "w");
    const bool written = file && nowhere && (size == 0 || fwrite(bytes, 1, size, file) == size);
    if (file && fclose(file) == 0 && written) {
        struct report report = {0};
        if (json_read_report(&report, path)) {
            html_write(&report, nowhere);
            json_write(&report, nowhere);
            for (int i = 0; i < report.tables; i++) {
                table_print(&report.table[i], nowhere);
                table_markdown(&report.table[i], nowhere);
            }
        }
        report_free(&report);
    }
    if (nowhere)
        fclose(nowhere);
    unlink(path);
    return written;
}

#if defined(RAFTER_LIBFUZZER)
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    if (!try_input(bytes, size))
        abort();
    return 0;
}
#else
int main(int argc, char **argv) {
    static uint8_t bytes[1 << 20];
    int tried = 0;
    for (int i = 1; i < argc; i++) {
        FILE *const file = fopen(argv[i], "rb");
        const size_t size = file ? fread(bytes, 1, sizeof bytes, file) : 0;
        if (file)
            fclose(file);
        tried += file && try_input(bytes, size);
    }
    printf("%d of %d passed\n", tried, argc - 1);
    return tried == 0 || tried < argc - 1;
}
#endif
