/* SPDX-License-Identifier: Apache-2.0 */
#include "machine.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <omp.h>

#include "core/sizes.h"

/* The numbers by which Arm's server cores name themselves. */
static const char *arm_core(long implementer, long part) {
    static const struct {
        long part;
        const char *name;
    } cores[] = {{0xd0c, "Arm Neoverse N1"}, {0xd40, "Arm Neoverse V1"}, {0xd49, "Arm Neoverse N2"},
                 {0xd4f, "Arm Neoverse V2"}, {0xd84, "Arm Neoverse V3"}, {0xd8e, "Arm Neoverse N3"}};
    for (size_t i = 0; implementer == 0x41 && i < sizeof cores / sizeof *cores; i++)
        if (cores[i].part == part)
            return cores[i].name;
    return NULL;
}

const char *machine_cpu(void) {
    static char model[128];
    long implementer = 0;
    if (model[0])
        return model;
    snprintf(model, sizeof model, "unknown");
    FILE *file = fopen("/proc/cpuinfo", "r");
    char line[512];
    while (file && fgets(line, sizeof line, file)) {
        const char *colon = strchr(line, ':');
        if (colon && strncmp(line, "model name", 10) == 0) {
            snprintf(model, sizeof model, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
            break;
        }
        if (colon && strncmp(line, "CPU implementer", 15) == 0)
            implementer = strtol(colon + 1, NULL, 16);
        if (colon && strncmp(line, "CPU part", 8) == 0) { /* there is no model name on aarch64 */
            const long part = strtol(colon + 1, NULL, 16);
            const char *name = arm_core(implementer, part);
            if (name)
                snprintf(model, sizeof model, "%s", name);
            else
                snprintf(model, sizeof model, "aarch64, implementer 0x%lx, part 0x%lx", implementer, part);
            break;
        }
    }
    if (file)
        fclose(file);
    return model;
}

int machine_processors(void) {
    return omp_get_num_procs();
}

void machine_unbind(void) {
    cpu_set_t all;
    CPU_ZERO(&all);
    for (int place = 0; place < omp_get_num_places(); place++) {
        int ids[CPU_SETSIZE];
        const int count = omp_get_place_num_procs(place);
        if (count > CPU_SETSIZE)
            return;
        omp_get_place_proc_ids(place, ids);
        for (int i = 0; i < count; i++)
            CPU_SET((size_t)ids[i], &all);
    }
    if (CPU_COUNT(&all) > 0)
        sched_setaffinity(0, sizeof all, &all);
}

/* The first line of /sys/devices/system/cpu/cpu0/cache/index<index>/<name>, or "". */
static void read_cache_fact(int index, const char *name, char *text, int size) {
    char path[128];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/%s", index, name);
    FILE *file = fopen(path, "r");
    if (!file || !fgets(text, size, file))
        text[0] = '\0';
    if (file)
        fclose(file);
}

/* Index of the data cache of a level in that folder, or -1. */
static int find_cache(int level) {
    for (int index = 0; index < 8; index++) {
        char text[64];
        read_cache_fact(index, "level", text, sizeof text);
        if (atoi(text) != level)
            continue;
        read_cache_fact(index, "type", text, sizeof text);
        if (strncmp(text, "Instruction", 11) != 0)
            return index;
    }
    return -1;
}

size_t machine_cache_level(int level) {
    const int index = find_cache(level);
    if (index < 0)
        return 0;
    char text[64], *unit;
    read_cache_fact(index, "size", text, sizeof text);
    const size_t size = strtoull(text, &unit, 10);
    return *unit == 'M' ? size << 20 : *unit == 'K' ? size << 10 : size;
}

/* How many processors share the cache: the number of bits in "0000000f,ffffffff". */
static int sharers(int index) {
    char text[1024];
    read_cache_fact(index, "shared_cpu_map", text, sizeof text);
    int count = 0;
    for (const char *c = text; *c; c++) {
        const char digit[] = {*c, '\0'};
        if (*c != ',')
            count += __builtin_popcountl(strtoul(digit, NULL, 16));
    }
    return count > 0 ? count : 1;
}

size_t machine_cache_bytes(int threads) {
    enum { UNKNOWN = 32 << 20 };
    int level = 3;
    while (level > 1 && machine_cache_level(level) == 0)
        level--;
    const size_t size = machine_cache_level(level);
    if (size == 0)
        return UNKNOWN;
    /* Threads may be spread over all caches. */
    const int processors = machine_processors(), share = sharers(find_cache(level));
    const int64_t caches = ceil_div(processors, share);
    return size * (size_t)min64(threads, caches);
}

/* The number in the first line of a file, or `otherwise`. */
static unsigned long long read_number(const char *path, unsigned long long otherwise) {
    FILE *file = fopen(path, "r");
    unsigned long long number;
    if (!file || fscanf(file, "%llu", &number) != 1)
        number = otherwise;
    if (file)
        fclose(file);
    return number;
}

size_t machine_free_memory(void) {
    FILE *file = fopen("/proc/meminfo", "r");
    char line[128];
    unsigned long long kibibytes = 0;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %llu", &kibibytes) == 1)
            break;
    if (file)
        fclose(file);

    /* A container may have less; without a limit the file contains "max". */
    const size_t machine = (size_t)kibibytes << 10;
    const unsigned long long limit = read_number("/sys/fs/cgroup/memory.max", machine);
    const unsigned long long used = read_number("/sys/fs/cgroup/memory.current", 0);
    if (limit >= machine)
        return machine;
    return used < limit ? (size_t)(limit - used) : 0;
}
