/* Devices, the context of each thread, versions and error texts. */
#include "acl_sim.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const int num_devices = 2;
static __thread int thread_device = -1;
static __thread char last_error[512];
static __thread char taken_error[512];
static __thread int capture_mode; /* 0: global, 1: of the thread, 2: relaxed */
static int version = 80501000;
static int capturing;

int current_device(void) { return thread_device; }

int fail(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return code;
}

/* Reading it clears it. */
EXPORT const char *aclGetRecentErrMsg(void) {
    if (last_error[0] == '\0') return NULL;
    memcpy(taken_error, last_error, sizeof taken_error);
    last_error[0] = '\0';
    return taken_error;
}

EXPORT int aclInit(const char *config) {
    (void)config;
    return SUCCESS;
}

EXPORT int aclFinalize(void) { return SUCCESS; }

EXPORT int aclrtGetDeviceCount(uint32_t *count) {
    *count = (uint32_t)num_devices;
    return SUCCESS;
}

EXPORT int aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= num_devices)
        return fail(RT_INVALID_DEVICE, "aclrtSetDevice: there is no device %d", device);
    thread_device = device;
    return SUCCESS;
}

EXPORT int aclrtResetDevice(int32_t device) {
    if (thread_device == device) thread_device = -1;
    return SUCCESS;
}

EXPORT int aclrtGetDevice(int32_t *device) {
    REQUIRE_CONTEXT();
    *device = thread_device;
    return SUCCESS;
}

/* A context is its device's number plus one. */
EXPORT int aclrtGetCurrentContext(void **context) {
    REQUIRE_CONTEXT();
    *context = (void *)(intptr_t)(thread_device + 1);
    return SUCCESS;
}

EXPORT int aclrtSetCurrentContext(void *context) {
    thread_device = (int)(intptr_t)context - 1;
    return SUCCESS;
}

EXPORT int aclmdlRICaptureThreadExchangeMode(int *mode) {
    int before = capture_mode;
    if (*mode < 0 || *mode > 2) return fail(INVALID_PARAM, "capture mode %d", *mode);
    capture_mode = *mode;
    *mode = before;
    return SUCCESS;
}

int breaks_capture(void) { return capturing && capture_mode == 0; }

EXPORT const char *aclrtGetSocName(void) { return "Ascend910B1"; }

EXPORT int aclGetDeviceCapability(uint32_t device, int what, int64_t *value) {
    (void)device, (void)what;
    *value = 24;
    return SUCCESS;
}

EXPORT int aclrtGetDeviceInfo(uint32_t device, int what, int64_t *value) {
    (void)device, (void)what;
    *value = 24;
    return SUCCESS;
}

EXPORT int aclrtDeviceGetBareTgid(int32_t *pid) {
    *pid = (int32_t)getpid();
    return SUCCESS;
}

EXPORT int aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    *can = device != peer;
    return SUCCESS;
}

EXPORT int aclrtGetSysParamOpt(int option, int64_t *value) {
    (void)option;
    *value = 0;
    return SUCCESS;
}

#ifndef ACL_SIM_WITHOUT_BATCH
EXPORT int aclsysGetVersionNum(const char *package, int32_t *number) {
    if (strcmp(package, "runtime") != 0)
        return fail(INVALID_PARAM, "aclsysGetVersionNum: unknown package %s", package);
    *number = version;
    return SUCCESS;
}
#endif

EXPORT int aclsysGetVersionStr(const char *package, char *text) {
    (void)package;
    int major = version / 10000000, minor = version / 100000 % 100, patch = version / 1000 % 100;
    snprintf(text, 32, "%d.%d.%d", major, minor, patch);
    return SUCCESS;
}

/* For tests */

/* Simulates another thread that captures a graph, in the mode that forbids interference. */
EXPORT void acl_sim_set_capturing(int now) { capturing = now; }
EXPORT void acl_sim_set_version(int number) { version = number; }
