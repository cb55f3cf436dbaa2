/* SPDX-License-Identifier: Apache-2.0 */
/* NVML is loaded if it is installed; the tool does not depend on it. */
#include "gpu_state.h"

#include <dlfcn.h>

/* From NVML's ABI, unchanged since 2012. */
typedef struct nvml_device *nvml_device;
enum { NVML_CLOCK_SM = 1, NVML_CLOCK_MEM = 2, NVML_TEMPERATURE_GPU = 0 };

static unsigned ask_clock(void *library, nvml_device device, int kind) {
    int (*get)(nvml_device, int, unsigned *);
    *(void **)&get = dlsym(library, "nvmlDeviceGetClockInfo");
    unsigned value = 0;
    return get && get(device, kind, &value) == 0 ? value : 0;
}

struct gpu_state gpu_state(void) {
    struct gpu_state state = {0};
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return state;
    int (*start)(void), (*stop)(void), (*find)(unsigned, nvml_device *);
    int (*temperature)(nvml_device, int, unsigned *), (*power)(nvml_device, unsigned *);
    *(void **)&start = dlsym(library, "nvmlInit_v2");
    *(void **)&stop = dlsym(library, "nvmlShutdown");
    *(void **)&find = dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
    *(void **)&temperature = dlsym(library, "nvmlDeviceGetTemperature");
    *(void **)&power = dlsym(library, "nvmlDeviceGetPowerUsage");
    nvml_device device = NULL;
    if (start && stop && find && start() == 0) {
        unsigned degrees = 0, milliwatts = 0;
        if (find(0, &device) == 0) {
            state.clock_mhz = (int)ask_clock(library, device, NVML_CLOCK_SM);
            state.memory_clock_mhz = (int)ask_clock(library, device, NVML_CLOCK_MEM);
            if (temperature && temperature(device, NVML_TEMPERATURE_GPU, &degrees) == 0)
                state.temperature = (int)degrees;
            if (power && power(device, &milliwatts) == 0)
                state.watts = (int)(milliwatts / 1000);
        }
        stop();
    }
    dlclose(library);
    return state;
}
